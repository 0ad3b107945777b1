"""Runs inside the engine's own interpreter: what each patch promises, asked of the real modules.

The source is sent over standard input (test_patches.py), with the touched files' sources: they are loaded instead of
the installed ones, so that one installed engine serves pristine and patched. A probe passes by returning and fails by
raising. No GPU is here: a faked SM120 means that exactly the queries named in a probe answer as such a GPU does.
"""

import contextlib
import dataclasses
import importlib
import importlib.abc
import importlib.util
import json
import os
import sys
import types
from types import SimpleNamespace as NS
from unittest import mock

OUT = sys.stdout
sys.stdout = sys.stderr


class Overlay(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Loads modules from sources in memory instead of the installed files."""

    def __init__(self, sources):
        self.sources = {name.removesuffix(".py").replace("/", "."): (name, text) for name, text in sources.items()}
        self.loaded = set()

    def find_spec(self, fullname, path=None, target=None):
        if fullname in self.sources:
            return importlib.util.spec_from_loader(fullname, self, origin=self.get_filename(fullname))
        return None

    def get_filename(self, fullname):
        return f"<patched>/{self.sources[fullname][0]}"

    def get_data(self, path):
        raise OSError(path)

    def get_source(self, fullname):
        return self.sources[fullname][1]

    def source_to_code(self, data, path, *, _optimize=-1):
        return compile(data, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname):
        self.loaded.add(fullname)
        return self.source_to_code(self.get_source(fullname), self.get_filename(fullname))


def check(condition, what):
    """An assertion that works with -O too."""
    if not condition:
        raise AssertionError(what)


def raises(kind, call, text):
    """The call raises this."""
    try:
        call()
    except kind as error:
        check(text in str(error), f"{error} does not hold {text!r}")
    else:
        raise AssertionError(f"expected {kind.__name__} with {text!r}")


def bare(cls, **attributes):
    """An object of a class without its __init__."""
    made = cls.__new__(cls)
    if hasattr(cls, "register_forward_hook"):
        import torch

        torch.nn.Module.__init__(made)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


# --- models ----------------------------------------------------------------------------------------------------------


def probe_kimi_hooks():
    from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration

    text = mock.Mock()
    text.get_embed_and_head.return_value = ("embedding", "head")
    model = bare(KimiK25ForConditionalGeneration, language_model=text)
    model.set_eagle3_layers_to_capture([1, 29, 57])
    text.set_eagle3_layers_to_capture.assert_called_once_with([1, 29, 57])
    model.set_eagle3_layers_to_capture()
    text.set_eagle3_layers_to_capture.assert_called_with(None)
    check(model.get_embed_and_head() == ("embedding", "head"), "the answer is not the text model's")
    model.set_embed_and_head("a", "b")
    text.set_embed_and_head.assert_called_once_with("a", "b")


def communicator_of_sm120():
    """The communicator's module as an SM120 makes it: its gates are computed when it is imported."""
    import sglang.srt.layers.communicator as communicator
    import sglang.srt.utils as utils

    capability = {name: (lambda *a, **k: False) for name in ("is_sm90_supported", "is_sm100_supported")}
    with mock.patch.multiple(
        utils,
        is_cuda=lambda: True,
        is_flashinfer_available=lambda: True,
        is_sm120_supported=lambda *a: True,
        **capability,
    ):
        return importlib.reload(communicator)


def probe_fusion_gate():
    communicator = communicator_of_sm120()
    args = NS(enable_flashinfer_allreduce_fusion=True)
    with mock.patch.multiple(communicator, is_dp_attention_enabled=lambda: False, get_global_server_args=lambda: args):
        allowed = communicator.apply_flashinfer_allreduce_fusion
        check(not allowed(0) and not allowed(communicator.FUSE_ALLREDUCE_MAX_BATCH_SIZE + 1), "limits are gone")
        check(allowed(1) and allowed(144), "fusion is not allowed on SM120")
        args.enable_flashinfer_allreduce_fusion = False
        check(not allowed(1), "fusion is on without its flag")


def fused_layers(layers, communicator):
    batch = NS(input_ids=NS(shape=(3,)))
    with mock.patch.multiple(
        communicator,
        apply_flashinfer_allreduce_fusion=lambda size: True,
        is_dp_attention_enabled=lambda: False,
        get_attn_tp_context=lambda: NS(input_scattered=False),
    ):
        return {
            number
            for number, layer in enumerate(layers)
            if layer.layer_communicator.should_fuse_mlp_allreduce_with_next_layer(batch)
        }


def probe_aux_capture():
    import sglang.srt.layers.communicator as communicator
    from sglang.srt.models import bailing_moe, deepseek_v2, glm4_moe, gpt_oss

    for cls in (
        deepseek_v2.DeepseekV2ForCausalLM,
        deepseek_v2.DeepseekV3ForCausalLM,
        glm4_moe.Glm4MoeForCausalLM,
        bailing_moe.BailingMoEForCausalLM,
        gpt_oss.GptOssForCausalLM,
    ):
        count = 61
        layers = [
            NS(
                layer_communicator=bare(
                    communicator.LayerCommunicator,
                    is_last_layer=number == count - 1,
                    _context=NS(tp_size=8),
                    _speculative_algo=None,
                )
            )
            for number in range(count)
        ]
        everyone = set(range(count - 1))
        check(
            fused_layers(layers, communicator) == everyone, f"{cls.__name__}: without EAGLE-3 not every layer is fused"
        )
        model = bare(
            cls,
            pp_group=NS(is_last_rank=True),
            config=NS(num_hidden_layers=count),
            model=NS(layers=layers, layers_to_capture=[]),
        )
        for ids in (None, [1, 29, 57], [4], None):
            model.set_eagle3_layers_to_capture(ids)
            before = {number - 1 for number in model.model.layers_to_capture}
            check(len(before) == (1 if ids == [4] else 3), f"{cls.__name__} captures {model.model.layers_to_capture}")
            found = fused_layers(layers, communicator)
            check(
                found == everyone - before,
                f"{cls.__name__}: {sorted(before & found)} before a captured layer are fused",
            )


def probe_fusion_fallback():
    import sglang.srt.distributed as distributed
    import sglang.srt.layers.flashinfer_comm_fusion as fusion
    import torch
    from sglang.srt.layers.layernorm import RMSNorm

    torch.manual_seed(0)
    norm = RMSNorm(16)
    partial, residual, more = torch.randn(3, 4, 16)
    outcome = NS(value=(None, None))
    with (
        mock.patch.multiple(
            distributed,
            get_tensor_model_parallel_world_size=lambda: 2,
            tensor_model_parallel_all_reduce=lambda x: x * 2,
        ),
        mock.patch.object(fusion, "flashinfer_allreduce_residual_rmsnorm", lambda **_: outcome.value),
        mock.patch.object(norm, "forward", norm.forward_native),
    ):
        for added in (None, more):
            expected = norm.forward_native(partial * 2, residual + (0 if added is None else added))
            found = norm.forward_with_allreduce_fusion(partial.clone(), residual.clone(), added)
            check(torch.allclose(found[0], expected[0]), "the ranks' partial sums were not reduced")
            check(torch.allclose(found[1], expected[1]), "the residual is wrong")
        outcome.value = ("fused", "residual")
        check(norm.forward_with_allreduce_fusion(partial, residual) == outcome.value, "the fused result is not used")


# --- symmetric memory ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def symmetric(capability, ranks, multicast):
    """TorchSymmMemCommunicator on a faked GPU; yields the communicator and the names of the operators that it calls."""
    import torch
    from sglang.srt.distributed.device_communicators import torch_symm_mem as module

    calls = []

    def operator(name):
        def call(buffer, operation, group):
            calls.append(name)
            buffer.mul_(ranks)

        return call

    memory = NS(empty=torch.empty, rendezvous=lambda buffer, group: NS(multicast_ptr=multicast))
    operators = NS(multimem_all_reduce_=operator("multimem"), two_shot_all_reduce_=operator("two_shot"))
    with (
        mock.patch.multiple(module, create=True, torch_symm_mem_available=True, torch_symm_mem=memory),
        mock.patch.multiple(
            torch.cuda, set_device=lambda device: None, get_device_capability=lambda device=None: (capability, 0)
        ),
        mock.patch.object(module.dist, "get_world_size", lambda group: ranks),
        mock.patch.object(torch.ops, "symm_mem", operators),
    ):
        yield module.TorchSymmMemCommunicator(NS(group_name="tp"), torch.device("cpu")), calls


def reduces(communicator, calls, ranks, kernel):
    import torch

    tensor = torch.ones(4, 8, dtype=torch.bfloat16)
    check(communicator.should_torch_symm_mem_allreduce(tensor), "a small bfloat16 tensor is not taken")
    found = communicator.all_reduce(tensor)
    check(bool((found == ranks).all()) and calls == [kernel], f"{kernel} was expected, found {calls}")


def probe_symm_mem():
    for ranks in (2, 4, 6, 8):
        with symmetric(12, ranks, multicast=0) as (communicator, calls):
            check(not communicator.disabled, f"it is disabled for {ranks} ranks")
            reduces(communicator, calls, ranks, "two_shot")


def probe_symm_mem_two_shot():
    """SM90 with two ranks never used multicast."""
    with symmetric(9, 2, multicast=0) as (communicator, calls):
        check(not communicator.disabled, "the two-shot path is closed without multicast")
        reduces(communicator, calls, 2, "two_shot")


def probe_symm_mem_unknown():
    with symmetric(11, 8, multicast=0) as (communicator, _):
        check(communicator.disabled, "an unknown capability is enabled")


def probe_symm_mem_unchanged():
    """Passes pristine and patched: SM90 and SM100 where multimem is used."""
    with symmetric(9, 8, multicast=0) as (communicator, _):
        check(communicator.disabled, "multimem without multicast")
    with symmetric(10, 8, multicast=1) as (communicator, calls):
        reduces(communicator, calls, 8, "multimem")
    with symmetric(10, 3, multicast=1) as (communicator, _):
        check(communicator.disabled, "3 ranks")


def probe_symm_mem_in_place():
    import torch
    from sglang.srt.distributed import parallel_state

    with symmetric(9, 8, multicast=1) as (communicator, calls):
        group = NS(pynccl_comm=NS(disabled=True), torch_symm_mem_comm=communicator, device_group="device")
        with mock.patch.object(torch.distributed, "all_reduce", lambda tensor, group: tensor.mul_(8)):
            for dtype in (torch.bfloat16, torch.float32):
                tensor = torch.ones(4, 8, dtype=dtype)
                parallel_state.GroupCoordinator._all_reduce_in_place(group, tensor)
                check(bool((tensor == 8).all()), f"{dtype} was not reduced in place: {tensor[0, 0]}")
            check(calls == ["multimem"], f"symmetric memory took {len(calls)} tensors, expected the bfloat16 one")


# --- server arguments ------------------------------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def parsed(*words):
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model-path", "/nowhere", *words])


def constructed(major, *words, **environment):
    """ServerArgs after its whole construction, on a faked GPU."""
    import tempfile

    import sglang.srt.server_args as module

    answers = {
        "get_device_memory_capacity": lambda *a, **k: 97887,
        "get_device_name": lambda *a, **k: "a GPU",
        "is_cuda": lambda: True,
        "is_sm90_supported": lambda *a, **k: major == 9,
        "is_sm100_supported": lambda *a, **k: major == 10,
        "is_sm120_supported": lambda *a, **k: major == 12,
        "is_blackwell_supported": lambda *a, **k: major in (10, 12),
        "is_hopper_with_cuda_12_3": lambda *a, **k: major == 9,
        "is_flashinfer_available": lambda *a, **k: True,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(module, **answers),
        mock.patch.dict(os.environ, environment),
    ):
        with open(f"{folder}/config.json", "w", encoding="utf-8") as stream:
            json.dump(LLAMA, stream)
        words = [
            "--model-path",
            folder,
            "--device",
            "cuda",
            "--tp-size",
            "8",
            "--attention-backend",
            "flashinfer",
            *words,
        ]
        return module.ServerArgs.from_cli_args(parsed(*words))


def probe_server_args():
    flag = "--enable-flashinfer-allreduce-fusion"
    check(constructed(9, flag).enable_flashinfer_allreduce_fusion, "SM90 lost it")
    check(constructed(12, flag).enable_flashinfer_allreduce_fusion, "SM120 lost it")
    check(not constructed(12).enable_flashinfer_allreduce_fusion, "SM120 turned it on by itself")
    check(not constructed(8, flag).enable_flashinfer_allreduce_fusion, "it is shown as on where no kernel exists")


EAGLE = [
    "--speculative-algorithm",
    "EAGLE3",
    "--speculative-draft-model-path",
    "/draft",
    "--speculative-num-steps",
    "2",
    "--speculative-eagle-topk",
    "1",
    "--speculative-num-draft-tokens",
    "3",
]


def probe_flag():
    flag = "--speculative-disable-batch-threshold"
    check(parsed().speculative_disable_batch_threshold == 0, "the default is not 0")
    check(parsed(flag, "32").speculative_disable_batch_threshold == 32, "the value is lost")
    v2 = {"SGLANG_ENABLE_SPEC_V2": "True"}
    check(constructed(12, *EAGLE, flag, "32", **v2).speculative_disable_batch_threshold == 32, "the value is lost")
    check(constructed(12, *EAGLE, **v2).speculative_disable_batch_threshold == 0, "the default is not 0")
    check(constructed(12, flag, "0").speculative_disable_batch_threshold == 0, "0 needs nothing")
    raises(ValueError, lambda: constructed(12, *EAGLE, flag, "-1", **v2), "expected 0 (never)")
    raises(ValueError, lambda: constructed(12, *EAGLE, flag, "32", SGLANG_ENABLE_SPEC_V2="False"), "SPEC_V2 is off")
    raises(ValueError, lambda: constructed(12, flag, "32", **v2), "--speculative-algorithm None")
    raises(
        ValueError,
        lambda: constructed(12, *EAGLE, "--enable-dp-attention", "--dp-size", "8", flag, "32", **v2),
        "--enable-dp-attention",
    )


# --- the speculative worker ------------------------------------------------------------------------------------------


def probe_attribute_first():
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    for args, value in ((NS(speculative_disable_batch_threshold=7), 7), (NS(), 0)):
        worker = EAGLEWorkerV2.__new__(EAGLEWorkerV2)
        raises(
            AttributeError,
            lambda worker=worker, args=args: worker.__init__(args, *[0] * 7, None),
            "speculative_eagle_topk",
        )
        check(
            vars(worker).get("speculative_disable_batch_threshold") == value, "a failing __init__ leaves no attribute"
        )


STEPS, STRIDE, HIDDEN, VOCABULARY, DRAFT_VOCABULARY = 2, 3, 4, 50, 20


class Rig:
    """The real EAGLEWorkerV2 and EagleDraftWorker methods over models that record what they are asked."""

    def __init__(self, lengths, threshold, has_grammar=False, mambaish=None, rank=0):
        import torch
        from sglang.srt.managers.schedule_batch import ModelWorkerBatch
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
        from sglang.srt.speculative.eagle_info import EagleDraftInput
        from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.torch, self.events, self.bs = torch, [], len(lengths)
        self.lengths = torch.tensor(lengths)
        # request i owns row rows[i]; slot = 1000 * row + position
        self.rows = torch.arange(self.bs).flip(0)
        self.req_to_token = torch.arange(self.bs)[:, None] * 1000 + torch.arange(64)
        self.last = torch.arange(self.bs, dtype=torch.int32) + 30
        args = NS(
            enable_lora=False,
            attention_backend="torch_native",
            speculative_num_draft_tokens=STRIDE,
            enable_nan_detection=False,
            enable_dp_attention=False,
            moe_dense_tp_size=None,
            moe_a2a_backend="none",
            tp_size=1,
            enable_two_batch_overlap=False,
        )
        pool = NS(req_to_token=self.req_to_token)
        runner = {
            "device": "cpu",
            "req_to_token_pool": pool,
            "token_to_kv_pool": "kv",
            "server_args": args,
            "model_is_mrope": False,
            "attn_backend": mock.Mock(),
        }
        target = NS(
            model_runner=NS(**runner, sample=self.sample, mambaish_config=mambaish, graph_runner=None),
            forward_batch_generation=self.target_forward,
            model_config=NS(hidden_size=HIDDEN, dtype=torch.float32),
        )
        draft = bare(
            EagleDraftWorker,
            draft_runner=NS(**runner, forward=self.draft_forward, tp_group=None),
            draft_tp_context=lambda group: contextlib.nullcontext(),
            plan_stream=None,
            plan_stream_ctx=contextlib.nullcontext(),
            device="cpu",
            server_args=args,
            speculative_num_steps=STEPS,
            speculative_num_draft_tokens=STRIDE,
            topk=1,
            cuda_graph_runner_for_draft_extend=None,
            draft=self.draft,
        )
        self.worker = bare(
            EAGLEWorkerV2,
            server_args=args,
            topk=1,
            speculative_num_steps=STEPS,
            speculative_num_draft_tokens=STRIDE,
            tp_rank=rank,
            enable_nan_detection=False,
            device="cpu",
            _target_worker=target,
            _draft_worker=draft,
            req_to_token_pool=pool,
            plan_stream=None,
            plan_stream_ctx=contextlib.nullcontext(),
            verify=self.verify,
            speculative_disable_batch_threshold=threshold,
        )
        values = {field.name: None for field in dataclasses.fields(ModelWorkerBatch)}
        values |= {
            "forward_mode": ForwardMode.DECODE,
            "input_ids": torch.zeros(self.bs, dtype=torch.int64),
            "req_pool_indices": self.rows,
            "seq_lens": self.lengths,
            "seq_lens_cpu": self.lengths.clone(),
            "seq_lens_sum": int(self.lengths.sum()),
            "return_logprob": True,
            "top_logprobs_nums": [0] * self.bs,
            "token_ids_logprobs": [None] * self.bs,
            "is_extend_in_batch": False,
            "can_run_dp_cuda_graph": False,
            "sampling_info": NS(),
            "spec_algorithm": SpeculativeAlgorithm.EAGLE3,
            "has_grammar": has_grammar,
            "capture_hidden_mode": CaptureHiddenMode.LAST,
            "is_prefill_only": False,
            "extend_logprob_start_lens": [0] * self.bs,
            "spec_info": EagleDraftInput(verified_id=self.last, new_seq_lens=self.lengths),
        }
        self.batch = ModelWorkerBatch(**values)

    def draft(self, batch):
        self.events.append("draft")
        return NS(is_verify_input=lambda: True)

    def verify(self, batch):
        self.events.append("verify")
        raise StopIteration  # what follows is the engine's own

    def target_forward(
        self, model_worker_batch=None, forward_batch=None, is_verify=False, skip_attn_backend_init=False
    ):
        torch = self.torch
        self.events.append("target")
        self.decode = forward_batch
        check(model_worker_batch is None and is_verify and not skip_attn_backend_init, "the target is called otherwise")
        logits = torch.zeros(self.bs, VOCABULARY)
        logits[torch.arange(self.bs), forward_batch.input_ids + 1] = 1  # the next token is the last one + 1
        hidden = forward_batch.input_ids[:, None].float() * 10 + torch.arange(3 * HIDDEN)
        return NS(logits_output=NS(next_token_logits=logits, hidden_states=hidden))

    def sample(self, logits_output, forward_batch):
        self.events.append("sample")
        check(
            forward_batch is self.decode and not forward_batch.return_logprob,
            "sampled for another batch, or with logprobs",
        )
        return logits_output.next_token_logits.argmax(-1)

    def draft_forward(self, forward_batch, skip_attn_backend_init=False):
        torch = self.torch
        self.events.append("draft_extend")
        self.extend = forward_batch
        rows = forward_batch.input_ids.shape[0]
        logits = torch.zeros(rows, DRAFT_VOCABULARY)
        logits[torch.arange(rows), torch.arange(rows) % DRAFT_VOCABULARY] = 9
        return NS(logits_output=NS(next_token_logits=logits, hidden_states=torch.arange(rows)[:, None].float()))

    def run(self):
        import sglang.srt.model_executor.forward_batch_info as batches
        import sglang.srt.speculative.eagle_worker_v2 as module

        torch = self.torch

        def locations(req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device):
            # what the Triton kernel does: slots of positions start .. end of each request
            return torch.cat(
                [
                    req_to_token[row, start:end]
                    for row, start, end in zip(req_pool_indices, start_offset, end_offset, strict=True)
                ]
            )

        with (
            mock.patch.object(module, "assign_extend_cache_locs_func", locations, create=True),
            # these ask for process groups and CUDA streams
            mock.patch.object(batches, "enable_num_token_non_padded", lambda args: False),
            mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None),
        ):
            try:
                self.result = self.worker.forward_batch_generation(self.batch)
            except StopIteration:
                self.result = None
        return self


def probe_threshold():
    import torch
    from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    lengths = [7, 3, 11, 5]
    rig = Rig(lengths, threshold=3).run()
    check(rig.events == ["target", "sample", "draft_extend"], f"ran {rig.events}")
    result, decode, extend, bs = rig.result, rig.decode, rig.extend, len(lengths)
    seq_lens, sampled = torch.tensor(lengths), rig.last + 1

    # the target decodes the last token of each request at its place
    check(decode.forward_mode is ForwardMode.DECODE and decode.spec_info is None, "not a plain decode")
    check(decode.capture_hidden_mode is CaptureHiddenMode.FULL, "hidden states are not captured")
    check(torch.equal(decode.input_ids, rig.last.long()), "other tokens are decoded")
    check(torch.equal(decode.positions, seq_lens), "at other positions")
    check(
        torch.equal(decode.seq_lens, seq_lens + 1) and torch.equal(decode.seq_lens_cpu, seq_lens + 1), "wrong lengths"
    )
    check(decode.seq_lens_sum == int(seq_lens.sum()) + bs, "wrong sum of lengths")
    check(torch.equal(decode.out_cache_loc, rig.rows * 1000 + seq_lens), "the KV goes to other slots")

    # stride-padded token ids, accept length 1
    check(
        result.next_token_ids.shape == (bs * STRIDE,), f"token ids have the shape {tuple(result.next_token_ids.shape)}"
    )
    check(torch.equal(result.next_token_ids[::STRIDE].int(), sampled), "other tokens are returned")
    check(torch.equal(result.accept_lens, torch.ones(bs, dtype=torch.int32)), "accept lengths are not 1")
    check(result.can_run_cuda_graph is False, "it claims a graph")
    requests = [
        NS(
            kv_committed_len=n,
            spec_verify_ct=0,
            spec_accepted_tokens=0,
            update_spec_acceptance_histogram=lambda n: None,
        )
        for n in lengths
    ]
    scheduler = NS(draft_worker=rig.worker)
    tokens = SchedulerOutputProcessorMixin._resolve_spec_overlap_token_ids(scheduler, result, NS(reqs=requests))
    check(tokens == [[int(token)] for token in sampled], f"the scheduler reads {tokens}")
    check([request.kv_committed_len for request in requests] == [n + 1 for n in lengths], "committed lengths are wrong")
    check(result.num_accepted_tokens == 0, "accepted draft tokens are counted")

    # all five fields of the next draft input, from the row of the accepted token
    following = result.next_draft_input
    first = torch.arange(bs) * STRIDE
    check(torch.equal(following.verified_id, sampled) and following.verified_id.dtype == torch.int32, "verified_id")
    check(torch.equal(following.new_seq_lens, seq_lens + 1), "new_seq_lens")
    check(torch.equal(following.topk_index[:, 0], first % DRAFT_VOCABULARY), "topk_index")
    check(following.topk_p.shape == (bs, 1) and bool((following.topk_p > 0.9).all()), "topk_p")
    check(torch.equal(following.hidden_states[:, 0], first.float()), "hidden_states")
    check(following.verify_done is not None, "verify_done")

    # the draft's KV is filled at the place of the accepted token, from the target's hidden states
    check(extend.forward_mode is ForwardMode.DRAFT_EXTEND_V2, "no draft extend")
    check(torch.equal(extend.input_ids[::STRIDE].int(), sampled), "the draft reads other tokens")
    check(torch.equal(extend.positions[::STRIDE], seq_lens), "the draft writes other positions")
    slots = (rig.rows * 1000 + seq_lens)[:, None] + torch.arange(STRIDE)
    check(torch.equal(extend.out_cache_loc, slots.flatten()), "the draft writes other slots")
    hidden = rig.last.float()[:, None] * 10 + torch.arange(3 * HIDDEN)
    check(
        extend.spec_info.hidden_states.shape == (bs * STRIDE, 3 * HIDDEN), "hidden states are not padded to the stride"
    )
    check(torch.equal(extend.spec_info.hidden_states[::STRIDE], hidden), "the draft gets other hidden states")
    check(extend.spec_info.accept_length is result.accept_lens, "the draft gets other accept lengths")


def probe_threshold_rules():
    """When it speculates and when it does not; every rank alike."""

    def path(*arguments, **options):
        events = Rig(*arguments, **options).run().events
        return "plain" if events[0] == "target" else "speculation"

    check(path([5] * 4, 3) == "plain", "4 requests above 3")
    check(path([5] * 4, 3, rank=5) == path([9, 8, 7, 6], 3, rank=2) == "plain", "ranks decide differently")
    check(path([5] * 3, 3) == "speculation", "3 requests are not above 3")
    check(path([5] * 4, 3, has_grammar=True) == "speculation", "a grammar needs verify")
    check(path([5] * 4, 3, mambaish=object()) == "speculation", "recurrent state needs verify")


def probe_threshold_inert():
    """Passes pristine and patched: with 0 the worker drafts and verifies, whatever the batch."""
    for bs in (1, 4, 64):
        events = Rig([5] * bs, 0).run().events
        check(events == ["draft", "verify"], f"{bs} requests ran {events}")


def probe_threshold_graph():
    from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    def can_run(captured, mode):
        runner = bare(
            CudaGraphRunner,
            capture_forward_mode=captured,
            require_mlp_tp_gather=False,
            enable_pdmux=False,
            disable_padding=False,
            max_bs=64,
            require_mlp_sync=False,
            is_encoder_decoder=False,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            enable_two_batch_overlap=False,
            model_runner=NS(spec_algorithm=NS(is_ngram=lambda: False)),
            graphs={},
        )
        return bool(
            runner.can_run(
                NS(batch_size=4, capture_hidden_mode=CaptureHiddenMode.FULL, spec_info=None, forward_mode=mode)
            )
        )

    check(can_run(ForwardMode.TARGET_VERIFY, ForwardMode.TARGET_VERIFY), "verify lost its graph")
    check(can_run(ForwardMode.TARGET_VERIFY, ForwardMode.IDLE), "idle lost its graph")
    check(can_run(ForwardMode.DECODE, ForwardMode.DECODE), "a server without speculation lost its graphs")
    check(
        not can_run(ForwardMode.TARGET_VERIFY, ForwardMode.DECODE),
        "a plain decode is put on a graph of the verify shape",
    )


# --- logprobs --------------------------------------------------------------------------------------------------------


def probe_logprobs():
    import torch
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    torch.manual_seed(0)
    lengths, starts = [4, 5, 6], [0, 5, 3]
    hidden, one, two = torch.randn(3, sum(lengths), HIDDEN)
    ends = torch.tensor(lengths).cumsum(0) - 1
    for mode in (CaptureHiddenMode.LAST, CaptureHiddenMode.FULL):
        metadata = LogitsMetadata(
            forward_mode=ForwardMode.EXTEND,
            capture_hidden_mode=mode,
            extend_return_logprob=True,
            extend_seq_lens=torch.tensor(lengths),
            extend_seq_lens_cpu=lengths,
            extend_logprob_start_lens_cpu=starts,
        )
        for aux in ([one, two], None):
            pruned, pruned_before, aux_pruned, sample, _, _ = LogitsProcessor._get_pruned_states(
                None, hidden, None, aux, metadata
            )
            check(torch.equal(pruned[sample], hidden[ends]), "the sampled states are wrong")
            stored = LogitsProcessor._get_hidden_states_to_store(
                None, hidden, None, aux, pruned, pruned_before, aux_pruned, sample, metadata
            )
            full = hidden if aux is None else torch.cat(aux, dim=-1)
            check(torch.equal(stored, full[ends] if mode.is_last() else full), f"{mode} stores other states")


def probe_logprobs_draft():
    """The draft's prefill with a vocabulary smaller than the target's, through the real computation of logprobs."""
    import sglang.srt.speculative.eagle_worker_v2 as module
    import torch
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    asked = []

    def forward(forward_batch):
        asked.append(forward_batch.return_logprob)
        if forward_batch.return_logprob:
            metadata = LogitsMetadata(
                forward_mode=ForwardMode.EXTEND, extend_input_logprob_token_ids_gpu=torch.tensor([VOCABULARY - 1, 1])
            )
            LogitsProcessor.process_input_logprobs(None, torch.zeros(2, DRAFT_VOCABULARY), metadata)
        return NS(
            logits_output=NS(next_token_logits=torch.zeros(1, DRAFT_VOCABULARY), hidden_states=torch.zeros(1, HIDDEN))
        )

    worker = bare(module.EagleDraftWorker, draft_runner=NS(forward=forward), topk=1)
    batch = NS(
        forward_mode=ForwardMode.EXTEND,
        extend_seq_lens=[2],
        input_ids=torch.tensor([1, 2]),
        seq_lens=torch.tensor([2]),
        return_logprob=True,
    )
    made = NS(init_new=lambda batch, runner: NS(return_logprob=batch.return_logprob))
    with mock.patch.object(module, "ForwardBatch", made):
        following = worker._draft_extend_for_prefill(batch, torch.zeros(2, HIDDEN), torch.tensor([3]))
    check(asked == [False], "the draft computes logprobs")
    check(batch.return_logprob is True, "the request's own logprobs are turned off too")
    check(following.topk_index.shape == (1, 1), "no draft token")


# --- FlashInfer ------------------------------------------------------------------------------------------------------


def flashinfer_jit():
    """FlashInfer's JIT modules without the package's own __init__, which wants a GPU stack."""
    if "flashinfer" not in sys.modules:
        package = types.ModuleType("flashinfer")
        package.__path__ = [os.path.join(START["flashinfer"], "flashinfer")]
        sys.modules["flashinfer"] = package
    return importlib.import_module("flashinfer.jit.comm")


def probe_flashinfer_arch():
    comm = flashinfer_jit()
    flags = {}
    for arch in ((9, "0a"), (10, "0a"), (8, "6"), (12, "0a")):
        context = comm.current_compilation_context
        with (
            mock.patch.object(context, "TARGET_CUDA_ARCHS", {arch}),
            mock.patch.object(comm, "gen_jit_spec", lambda name, sources, extra_cuda_cflags: extra_cuda_cflags),
        ):
            try:
                flags[arch] = comm.gen_trtllm_comm_module()
            except RuntimeError as error:
                if arch == (12, "0a"):
                    raise
                flags[arch] = str(error)
    check("-gencode=arch=compute_120a,code=sm_120a" in flags[12, "0a"], f"no SM120 code: {flags[12, '0a']}")
    check("-gencode=arch=compute_90a,code=sm_90a" in flags[9, "0a"], f"no SM90 code: {flags[9, '0a']}")
    check("No supported CUDA architectures" in flags[8, "6"], "SM86 is let through")


# --- the conversation ------------------------------------------------------------------------------------------------


def installed(names):
    """The sources of files of installed packages, and the package's version."""
    import importlib.metadata

    spec = importlib.util.find_spec("sglang")
    root = os.path.dirname(os.path.dirname(spec.origin))
    sources = {}
    for name in names:
        with open(os.path.join(root, name), encoding="utf-8", newline="") as stream:
            sources[name] = stream.read()
    return {"version": importlib.metadata.version("sglang"), "root": root, "sources": sources}


def answer(question):
    if question["do"] == "installed":
        return {"ok": True, **installed(question["names"])}
    if question["do"] == "loaded":
        return {"ok": True, "loaded": sorted(OVERLAY.loaded)}
    try:
        globals()[f"probe_{question['do']}"]()
    except BaseException as error:
        import traceback

        where = "".join(traceback.format_exception(error))[-3000:]
        return {"ok": False, "error": f"{type(error).__name__}: {error}", "where": where}
    return {"ok": True}


START = json.loads(sys.stdin.readline())
OVERLAY = Overlay(START["overlay"])
sys.meta_path.insert(0, OVERLAY)
for line in sys.stdin:
    OUT.write(json.dumps(answer(json.loads(line))) + "\n")
    OUT.flush()
