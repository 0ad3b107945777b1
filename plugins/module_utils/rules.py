"""What makes a plan impossible, or worth a warning: a table of rules, each with its id, its reason and its evidence.

A rule is a function over a ``Context`` that yields problems (the plan is refused) and warnings (it is made). It never
changes
anything: a value that the engine would overwrite, ignore or choke on is refused with that explanation, not corrected.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .budget import DEADLY_MARGIN_BYTES, GIB, THIN_MARGIN_BYTES, Budget, default_chunk, graph_sizes
from .flags import Schema, secret
from .settings import CONTROL, SIZE_FACTORS, Problem, Setting, Warning_, as_dict, is_int, is_number, show, variable_of
from .shapes import HostShape, ModelShape, version

Finding = Problem | Warning_
TORCH_CUDA = variable_of("torch_cuda")

PATCH_KIMI = "kimi-k25-eagle3"
PATCH_FUSION = "sm120-allreduce-fusion"
PATCH_AUX = "eagle3-aux-capture"
PATCH_SYMM = "sm120-symm-mem"
PATCH_THRESHOLD = "spec-disable-batch-threshold"

#: Fields that exist only with a patch.
PATCHED_FIELDS = {"speculative_disable_batch_threshold": PATCH_THRESHOLD}

EAGLE = ("EAGLE", "EAGLE3", "STANDALONE", "NEXTN")
KIMI = "KimiK25ForConditionalGeneration"
DRAFT_ARCHITECTURES = ("LlamaForCausalLMEagle3",)

#: Models for which 0.5.9 turns all-reduce fusion on by itself on compute capability 9.0 and 10.x (server_args.py:1680).
FUSION_BY_ITSELF = (
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "Qwen3MoeForCausalLM",
    KIMI,
)
#: World sizes for which FlashInfer has a fused all-reduce.
FUSION_WORLD_SIZES = (2, 4, 8, 16)

#: Oldest driver branch that runs programs of a CUDA major version (NVIDIA, "Minor Version Compatibility"), and the
#: driver that a toolkit came with: between the two, kernels compiled at run time may need the newer one.
DRIVER_FOR_MAJOR = {12: (525,), 13: (580,)}
DRIVER_OF_TOOLKIT = {(12, 6): (560, 28, 3), (12, 8): (570, 26), (12, 9): (575, 51, 3), (13, 1): (590, 44, 1)}
#: Oldest toolkit that can compile for a compute capability.
TOOLKIT_FOR_CAPABILITY = {(9, 0): (11, 8), (10, 0): (12, 8), (10, 3): (12, 9), (12, 0): (12, 8), (12, 1): (12, 9)}

#: Environment variables that the engine sets itself, whatever the unit says: what it sets, and the flag that decides
#: it.
OVERWRITTEN_ENV = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "entrypoints/engine.py sets it to 8",
    "CUDA_MODULE_LOADING": "entrypoints/engine.py sets it to AUTO",
    "SGLANG_ENABLE_TORCH_COMPILE": "server_args.py:2673 sets it from enable_torch_compile",
    "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "server_args.py:2673 sets it from disable_outlines_disk_cache",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "server_args.py:2673 sets it from enable_deterministic_inference",
}
#: Attention backends that force a page size.
PAGE_SIZES = {"flashmla": (64,), "cutlass_mla": (128,), "trtllm_mla": (32, 64), "trtllm_mha": (16, 32, 64)}
#: Attention backends that run only on some GPUs: major compute capabilities.
BACKEND_CAPABILITY = {
    "fa3": (8, 9), "fa4": (9, 10), "flashmla": (9,), "cutlass_mla": (10,), "trtllm_mla": (10, 12), "trtllm_mha": (10,),
}  # fmt: skip
#: Pairs that the engine refuses together.
EXCLUSIVE = (
    ("enable_hierarchical_cache", "disable_radix_cache"),
    ("enable_tokenizer_batch_encode", "enable_dynamic_batch_tokenizer"),
    ("encoder_only", "language_only"),
)
#: Flags that need another one.
REQUIRES = (
    ("language_only", "encoder_urls"),
    ("enable_prefix_mm_cache", "encoder_only"),
    ("export_metrics_to_file", "export_metrics_to_file_dir"),
)
#: Attention backends for an FP4 KV cache, by whether the model has a latent KV (MLA).
KV4_BACKENDS = {
    True: ("cutlass_mla", "flashinfer", "trtllm_mla", "flashmla"),
    False: ("triton", "torch_native", "flex_attention", "trtllm_mha"),
}
TRUE, FALSE = frozenset({"true", "1"}), frozenset({"false", "0"})


@dataclasses.dataclass(frozen=True)
class Context:
    """Everything a rule may look at."""

    schema: Schema
    settings: Mapping[str, Setting]
    env: Mapping[str, Setting]
    unit: Mapping[str, Setting]
    host: HostShape
    target: ModelShape | None
    draft: ModelShape | None
    patches: frozenset[str]
    torch_cuda: str
    cuda_home: str
    load_budget_s: int
    topology_nccl: bool
    budget: Budget | None = None

    def get(self, field: str) -> Any:
        """The value of a field, ``None`` when it is left to the engine."""
        setting = self.settings.get(field)
        return setting.value if setting else None

    def number(self, field: str) -> int | None:
        """The value of a field when it is an integer."""
        value = self.get(field)
        return int(value) if is_int(value) else None

    def variable(self, field: str) -> str:
        """The variable that changes a field."""
        setting = self.settings.get(field)
        return setting.variable if setting else f"deployment_overrides.{field}"

    def found(self, field: str) -> str:
        """A field's value with its origin, for messages."""
        setting = self.settings.get(field)
        if setting is None:
            return "nothing"
        return show(setting.value) + ("" if setting.source.startswith("deployment_") else f" from {setting.source}")

    def env_on(self, name: str) -> bool:
        """Whether a boolean variable is on for the engine (0.5.9's ``EnvBool``)."""
        setting = self.env.get(name)
        if setting is None:
            return bool(self.schema.environment.get(name, {}).get("default"))
        return str(setting.value).lower() in TRUE

    @property
    def cuda(self) -> bool:
        """Whether the plan is for NVIDIA GPUs."""
        return self.get("device") in (None, "cuda")

    @property
    def speculative(self) -> bool:
        """Whether a draft model is used."""
        return self.get("speculative_algorithm") in EAGLE

    @property
    def architecture(self) -> str | None:
        """The target's architecture."""
        return self.target.architecture if self.target else None

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return self.number("tp_size") or 1

    def problem(self, rule: str, field: str, expected: str, action: str) -> Problem:
        """A problem with one field."""
        return Problem(rule, self.variable(field), self.found(field), expected, action)


def effective_page(c: Context) -> int:
    """The page size that the engine ends with: some attention backends force one."""
    for field in ("attention_backend", "decode_attention_backend"):
        pages = PAGE_SIZES.get(str(c.get(field)))
        if pages and c.number("page_size") not in pages:
            return pages[-1] if c.get(field) != "trtllm_mha" else 64
    return c.number("page_size") or 1


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table."""

    id: str
    reason: str
    source: str
    check: Callable[[Context], Iterator[Finding]]


RULES: dict[str, Rule] = {}
_Check = Callable[[Context], Iterator[Finding]]


def rule(id: str, reason: str, source: str) -> Callable[[_Check], _Check]:
    """Add a function to the table."""

    def add(check: _Check) -> _Check:
        if id in RULES:
            raise ValueError(f"two rules are called {id}")
        RULES[id] = Rule(id, reason, source, check)
        return check

    return add


def run(context: Context, only_with_budget: bool = False) -> tuple[list[Problem], list[Warning_]]:
    """Apply the whole table, or only the rules that look at the budget."""
    problems: list[Problem] = []
    warnings: list[Warning_] = []
    for item in RULES.values():
        if item.id.startswith("budget_") is not only_with_budget:
            continue
        for finding in item.check(context):
            if isinstance(finding, Problem):
                problems.append(finding)
            else:
                warnings.append(finding)
    return problems, warnings


# --- speculation ----------------------------------------------------------------------------------


@rule(
    "spec_numbers_together",
    "steps without topk is a TypeError, topk without steps a bare AssertionError; without an algorithm they are "
    "ignored",
    "server_args.py:2440-2462",
)
def _spec_numbers(c: Context) -> Iterator[Finding]:
    fields = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    given = [field for field in fields if c.get(field) is not None]
    if c.speculative:
        for field in fields:
            if field not in given:
                expected = f"a number: {', '.join(fields)} are given together"
                yield c.problem("spec_numbers_together", field, expected, f"Set deployment_overrides.{field}.")
            elif (c.number(field) or 0) < 1:
                yield c.problem("spec_numbers_together", field, "1 or more", f"Set deployment_overrides.{field}.")
    elif c.get("speculative_algorithm") is None:
        for field in given:
            expected = "nothing: without speculative_algorithm the engine ignores it"
            yield c.problem("spec_numbers_together", field, expected, "Choose an EAGLE-3 profile, or remove it.")


@rule("spec_topk_v2", "spec v2 raises ValueError for topk above 1", "server_args.py:2386-2393")
def _spec_topk(c: Context) -> Iterator[Finding]:
    topk = c.number("speculative_eagle_topk") or 1
    if c.speculative and topk > 1 and c.env_on("SGLANG_ENABLE_SPEC_V2"):
        action = (
            "Use the profile eagle3-topk4-v1, or set deployment_extra_env.SGLANG_ENABLE_SPEC_V2 to false, or topk to 1."
        )
        yield c.problem("spec_topk_v2", "speculative_eagle_topk", "1, because SGLANG_ENABLE_SPEC_V2 is on", action)


@rule(
    "spec_chain_tokens", "with topk 1 the engine overwrites the draft tokens with steps + 1", "server_args.py:2473-2481"
)
def _spec_chain(c: Context) -> Iterator[Finding]:
    steps, tokens = c.number("speculative_num_steps"), c.number("speculative_num_draft_tokens")
    if c.speculative and c.number("speculative_eagle_topk") == 1 and steps and tokens and tokens != steps + 1:
        expected = (
            f"{steps + 1}: with topk 1 the draft tokens are always steps ({steps}) + 1, the engine "
            "overwrites anything else"
        )
        action = f"Set deployment_overrides.speculative_num_draft_tokens to {steps + 1}, or change the steps."
        yield c.problem("spec_chain_tokens", "speculative_num_draft_tokens", expected, action)


@rule(
    "spec_tree_size",
    "the tree has topk + (steps - 1) * topk^2 candidates; asking for more fails in torch.topk",
    "eagle_utils.py:27",
)
def _spec_tree(c: Context) -> Iterator[Finding]:
    steps, topk = c.number("speculative_num_steps"), c.number("speculative_eagle_topk")
    tokens = c.number("speculative_num_draft_tokens")
    if c.speculative and steps and tokens and topk and topk > 1 and steps > 0:
        most = 1 + topk + (steps - 1) * topk * topk
        if not 2 <= tokens <= most:
            expected = f"2 to {most} draft tokens for topk {topk} and {steps} steps"
            yield c.problem(
                "spec_tree_size", "speculative_num_draft_tokens", expected, "Lower it, or raise topk or steps."
            )


@rule(
    "spec_tree_pages",
    "a tree over pages of several tokens is refused for every backend but two",
    "server_args.py:2485-2493",
)
def _spec_pages(c: Context) -> Iterator[Finding]:
    page, backend = effective_page(c), c.get("attention_backend")
    if (
        c.speculative
        and (c.number("speculative_eagle_topk") or 1) > 1
        and page > 1
        and backend not in ("flashinfer", "fa3")
    ):
        expected = f"flashinfer or fa3: {backend} works in pages of {page}, which topk above 1 does not allow"
        action = "Use flashinfer, page_size 1, or topk 1."
        yield c.problem("spec_tree_pages", "attention_backend", expected, action)


@rule(
    "spec_algorithm", "the planner knows EAGLE3 and no speculation; others are passed on with a warning", "facts 14, 16"
)
def _spec_algorithm(c: Context) -> Iterator[Finding]:
    algorithm = c.get("speculative_algorithm")
    if algorithm not in (None, "EAGLE3"):
        yield Warning_(
            "spec_algorithm", f"speculative_algorithm {algorithm}: the rules here were checked for EAGLE3 only."
        )


@rule("spec_on_gpu", "EAGLE-3 needs GPU kernels", "facts: running the real engine without a GPU")
def _spec_device(c: Context) -> Iterator[Finding]:
    if not c.cuda and c.get("speculative_algorithm") is not None:
        expected = f"nothing on device {c.get('device')}: speculation needs GPU kernels"
        yield c.problem("spec_on_gpu", "speculative_algorithm", expected, "Use the profile cpu, or a host with GPUs.")


@rule("draft_present", "EAGLE-3 loads a separate draft model", "facts 13, 14")
def _draft_present(c: Context) -> Iterator[Finding]:
    if c.get("speculative_algorithm") not in ("EAGLE3", "STANDALONE"):
        return
    path = c.get("speculative_draft_model_path")
    expected = "the absolute path of a draft model"
    action = "Set deployment_draft_model_path, or use the profile baseline."
    if not path:
        yield Problem("draft_present", "deployment_draft_model_path", "nothing", expected, action)
    elif c.draft is None:
        found = f"{show(path)}, but no readable config.json there"
        yield Problem(
            "draft_present", "deployment_draft_model_path", found, expected, "Put the draft model there. " + action
        )


@rule(
    "draft_architecture",
    "only one-layer LlamaForCausalLMEagle3 drafts load; MLA drafts need a later release",
    "facts 14",
)
def _draft_architecture(c: Context) -> Iterator[Finding]:
    if c.get("speculative_algorithm") != "EAGLE3" or c.draft is None:
        return
    variable = "deployment_draft_model_path"
    if c.draft.architecture not in DRAFT_ARCHITECTURES:
        expected = f"a draft of {DRAFT_ARCHITECTURES[0]}: SGLang {c.schema.engine_version} loads no other EAGLE-3 draft"
        action = "Use a draft of that architecture, or the profile baseline."
        yield Problem("draft_architecture", variable, f"architecture {show(c.draft.architecture)}", expected, action)
    elif c.draft.layers != 1:
        found = f"{show(c.draft.layers)} layers in its config.json"
        yield Problem(
            "draft_architecture",
            variable,
            found,
            "a draft with one layer",
            "Use such a draft, or the profile baseline.",
        )


@rule(
    "draft_layer_ids",
    "CUDA graphs capture the default layers (2, n/2, n-3); the draft's ids + 1 are used in eager mode only: "
    "others are off by one",
    "facts 14; sglang #25454, #22836",
)
def _draft_layers(c: Context) -> Iterator[Finding]:
    if c.get("speculative_algorithm") != "EAGLE3" or c.draft is None or c.draft.eagle_layer_ids is None:
        return
    layers = c.target.layers if c.target else None
    if not layers:
        return
    expected = [1, layers // 2 - 1, layers - 4]
    if c.draft.eagle_layer_ids != expected:
        text = (
            f"{expected} or an absent list, for a target of {layers} layers: CUDA graphs always capture "
            f"{[i + 1 for i in expected]}"
        )
        action = (
            "Correct eagle_aux_hidden_state_layer_ids in the draft's config.json to the layers it was "
            "trained on, or take another draft."
        )
        found = f"eagle_aux_hidden_state_layer_ids {c.draft.eagle_layer_ids}"
        yield Problem("draft_layer_ids", "deployment_draft_model_path", found, text, action)


@rule(
    "draft_context",
    "a draft with fewer positions than the target's context raises ValueError at load",
    "facts 13; model_config.py:359-388",
)
def _draft_context(c: Context) -> Iterator[Finding]:
    if not c.speculative or c.draft is None or c.draft.context_length is None:
        return
    context = c.number("context_length") or (c.target.context_length if c.target else None)
    name = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    if context and c.draft.context_length < context and not c.env_on(name):
        found = f"a draft with {c.draft.context_length} positions and a context of {context} tokens"
        action = (
            f"Set deployment_overrides.context_length to {c.draft.context_length}, or deployment_extra_env.{name} "
            "to true"
            " when the draft is known to work beyond its positions."
        )
        yield Problem(
            "draft_context", "deployment_overrides.context_length", found, "a context the draft reaches", action
        )


@rule("draft_hidden_size", "the draft reads the target's hidden states", "models/llama_eagle3.py")
def _draft_hidden(c: Context) -> Iterator[Finding]:
    if c.get("speculative_algorithm") != "EAGLE3" or c.draft is None or c.target is None:
        return
    wide = c.draft.target_hidden_size or c.draft.hidden_size
    if wide and c.target.hidden_size and wide != c.target.hidden_size:
        found = f"a draft for hidden size {wide}, a target with {c.target.hidden_size}"
        action = "Use a draft that was trained for this target."
        yield Problem("draft_hidden_size", "deployment_draft_model_path", found, "equal hidden sizes", action)


@rule(
    "kimi_eagle_patch",
    "0.5.9's Kimi-K2.5 class lacks the EAGLE-3 hooks and fails after all weights are loaded",
    "facts 18; sglang #19689",
)
def _kimi(c: Context) -> Iterator[Finding]:
    if c.speculative and c.architecture == KIMI and PATCH_KIMI not in c.patches:
        action = f"Apply the patch and add {PATCH_KIMI} to deployment_patches, or use the profile baseline."
        expected = f"{PATCH_KIMI}: without it {KIMI} has no EAGLE-3 hooks and fails after minutes of loading"
        yield Problem("kimi_eagle_patch", "deployment_patches", show(sorted(c.patches)), expected, action)


@rule("threshold_patch", "speculative_disable_batch_threshold does not exist upstream", "facts 8, 20")
def _threshold(c: Context) -> Iterator[Finding]:
    value = c.number("speculative_disable_batch_threshold")
    if value:
        yield Warning_(
            "threshold_patch",
            f"speculative_disable_batch_threshold {value}: above that batch size the target decodes without CUDA "
            "graphs, "
            "which exist for the verify shape only; 0 is the value on record.",
        )


# --- fused all-reduce, symmetric memory -----------------------------------------------------------


def fusion_obstacles(c: Context) -> list[tuple[str, str]]:
    """Why fused all-reduce must stay off on this host, each with the way out; empty when it may be on."""
    found: list[tuple[str, str]] = []
    capability = c.host.compute_cap
    if c.tp < 2:
        return [("tensor parallelism is 1: there is no all-reduce to fuse", "Leave it off.")]
    if c.tp not in FUSION_WORLD_SIZES:
        sizes = ", ".join(map(str, FUSION_WORLD_SIZES))
        found.append((f"FlashInfer fuses for {sizes} ranks, not for {c.tp}", "Leave it off, or change tp_size."))
    if c.host.topology not in ("pcie", "nvlink"):
        found.append(
            (
                f"the links between the GPUs are {c.host.topology}",
                "Let gpu_host_info read the topology, or leave it off.",
            )
        )
    if capability is None:
        found.append(("the GPUs' compute capability is not known", "Let gpu_host_info read the GPUs, or leave it off."))
    elif capability[0] == 12:
        if PATCH_FUSION not in c.patches:
            text = (
                f"compute capability {_dotted(capability)} is not supported by FlashInfer and the engine "
                "without a patch"
            )
            found.append((text, f"Apply {PATCH_FUSION} and add it to deployment_patches, or leave it off."))
        if version(c.torch_cuda) < (13,):
            text = f"compute capability {_dotted(capability)} needs CUDA 13, {TORCH_CUDA} is {c.torch_cuda}"
            found.append((text, "Build the stack on CUDA 13, or leave it off."))
    elif capability[0] not in (9, 10):
        text = f"FlashInfer's fused all-reduce has no kernel for compute capability {_dotted(capability)}"
        found.append((text, "Leave it off."))
    if c.speculative and PATCH_AUX not in c.patches:
        text = "with EAGLE-3 every rank would capture a partial sum of the hidden states, and acceptance drops silently"
        found.append((text, f"Apply {PATCH_AUX} and add it to deployment_patches, or leave it off."))
    if c.get("enable_dp_attention"):
        found.append(("data-parallel attention never fuses", "Leave it off."))
    return found


@rule(
    "fusion_allowed",
    "fusion only where topology, capability, toolkit and patches allow it; never with EAGLE-3 unpatched",
    "facts 1, 2, 19",
)
def _fusion(c: Context) -> Iterator[Finding]:
    if not c.get("enable_flashinfer_allreduce_fusion"):
        return
    for why, action in fusion_obstacles(c):
        yield c.problem("fusion_allowed", "enable_flashinfer_allreduce_fusion", f"false: {why}", action)
    if c.host.topology == "pcie":
        yield Warning_(
            "fusion_pcie",
            "enable_flashinfer_allreduce_fusion is on over PCIe, as on the documented box; elsewhere it has "
            "regressed and "
            "deadlocked there (sglang #32330, #18758): measure both, "
            "deployment_overrides.enable_flashinfer_allreduce_fusion: false turns it off.",
        )


@rule(
    "fusion_by_itself",
    "on capability 9.0 and 10.x the engine turns fusion on by itself and has no flag against it",
    "server_args.py:1672-1697",
)
def _fusion_auto(c: Context) -> Iterator[Finding]:
    capability = c.host.compute_cap
    by_itself = (
        c.cuda
        and c.architecture in FUSION_BY_ITSELF
        and capability is not None
        and capability[0] in (9, 10)
        and not c.get("enable_dp_attention")
        and (c.number("nnodes") or 1) == 1
        and c.get("moe_a2a_backend") in (None, "none")
        and not any("H20" in (gpu.name or "") and "H200" not in (gpu.name or "") for gpu in c.host.gpus)
    )
    if not by_itself or c.tp < 2:
        return
    if c.speculative and PATCH_AUX not in c.patches:
        expected = (
            f"{PATCH_AUX}: on compute capability {_dotted(capability)} the engine turns all-reduce fusion on by "
            "itself for "
            f"{c.architecture}, which ruins EAGLE-3's acceptance, and no flag turns it off"
        )
        action = f"Apply the patch and add {PATCH_AUX} to deployment_patches, or use the profile baseline."
        yield Problem("fusion_by_itself", "deployment_patches", show(sorted(c.patches)), expected, action)
    elif not c.get("enable_flashinfer_allreduce_fusion"):
        yield Warning_(
            "fusion_by_itself",
            f"enable_flashinfer_allreduce_fusion is not set, but on compute capability {_dotted(capability)} the "
            "engine turns it on "
            f"by itself for {c.architecture}; no flag turns it off.",
        )


@rule(
    "symm_mem_allowed",
    "Torch symmetric memory raises KeyError at start for capabilities and world sizes it does not know",
    "facts 19",
)
def _symm_mem(c: Context) -> Iterator[Finding]:
    if not c.get("enable_torch_symm_mem"):
        return
    capability = c.host.compute_cap
    field = "enable_torch_symm_mem"
    if capability is None:
        yield c.problem(
            "symm_mem_allowed", field, "false: the compute capability is not known", "Let gpu_host_info read the GPUs."
        )
    elif capability[0] == 12 and PATCH_SYMM not in c.patches:
        expected = (
            f"false: compute capability {_dotted(capability)} raises KeyError: 12 at start without the "
            f"patch {PATCH_SYMM}"
        )
        yield c.problem(
            "symm_mem_allowed", field, expected, f"Apply {PATCH_SYMM} and add it to deployment_patches, or turn it off."
        )
    elif capability[0] not in (9, 10, 12):
        expected = f"false: it has no sizes for compute capability {_dotted(capability)}"
        yield c.problem("symm_mem_allowed", field, expected, "Turn it off.")
    sizes = {9: (4, 6, 8), 10: (6, 8)}.get(capability[0] if capability else 0, (2, 4, 6, 8))
    if c.tp not in sizes:
        expected = f"false for {c.tp} ranks: it works for {', '.join(map(str, sizes))}"
        yield c.problem("symm_mem_allowed", field, expected, "Turn it off, or change tp_size.")


# --- GPUs, driver, toolkit ------------------------------------------------------------------------


def _dotted(capability: tuple[int, ...] | None) -> str:
    return ".".join(map(str, capability or ())) or "unknown"


@rule("device_known", "the planner knows NVIDIA GPUs and the sandbox's CPU", "design")
def _device(c: Context) -> Iterator[Finding]:
    if c.get("device") not in (None, "cuda", "cpu"):
        yield c.problem("device_known", "device", "cuda or cpu", "Remove it, or use the profile cpu.")


@rule("gpu_present", "a CUDA profile needs GPUs", "issue 3")
def _gpu_present(c: Context) -> Iterator[Finding]:
    if not c.cuda or c.host.gpus:
        return
    found = "no GPU on the host" if c.host.knows_gpus else "a host whose GPUs were not read"
    action = "Run gpu_host_info on a host with a working driver, or use the profile cpu."
    yield Problem("gpu_present", "deployment_profile", found, "GPUs for a CUDA profile", action)


@rule("tp_gpu_count", "a rank without a GPU of its own fails at start", "model_runner.py")
def _tp_count(c: Context) -> Iterator[Finding]:
    if not c.cuda or not c.host.gpus:
        return
    step, base = c.number("gpu_id_step") or 1, c.number("base_gpu_id") or 0
    copies = 1 if c.get("enable_dp_attention") else c.number("dp_size") or 1
    ranks = c.tp * (c.number("pp_size") or 1) * copies
    last = base + (ranks - 1) * step
    if c.tp < 1 or last >= len(c.host.gpus):
        expected = f"at most {len(c.host.gpus)}: the host has {len(c.host.gpus)} GPUs"
        if base or step != 1:
            expected += f", and base_gpu_id {base} with gpu_id_step {step} asks for GPU {last}"
        if ranks != c.tp:
            expected += f", and pp_size and dp_size multiply it to {ranks} ranks"
        yield c.problem(
            "tp_gpu_count", "tp_size", expected, f"Set deployment_overrides.tp_size to at most {len(c.host.gpus)}."
        )
    elif ranks < len(c.host.gpus):
        yield Warning_("tp_gpu_count", f"{ranks} of {len(c.host.gpus)} GPUs are used.")


@rule("tp_heads", "attention heads and experts are cut into tp_size parts", "model_config.py, layers/linear.py")
def _tp_heads(c: Context) -> Iterator[Finding]:
    if c.tp < 1 or c.target is None or not c.target.heads or c.get("enable_dp_attention"):
        return
    limit = len(c.host.gpus) or c.tp
    for model, what in ((c.target, "target"), (c.draft if c.speculative else None, "draft")):
        if model is not None and model.heads and model.heads % c.tp:
            fits = [size for size in range(1, limit + 1) if model.heads % size == 0 and c.target.heads % size == 0]
            expected = f"a divisor of the {what}'s {model.heads} attention heads"
            action = f"Set deployment_overrides.tp_size to one of {', '.join(map(str, fits))}."
            yield c.problem("tp_heads", "tp_size", expected, action)


@rule("gpus_equal", "ranks wait for the slowest and the smallest; kernels are chosen for one capability", "issue 3")
def _gpus_equal(c: Context) -> Iterator[Finding]:
    if not c.cuda:
        return
    kinds = sorted(
        {f"{gpu.name or '?'} ({_dotted(gpu.compute_cap)}, {gpu.memory_total_mib or '?'} MiB)" for gpu in c.host.gpus}
    )
    models = {(gpu.name, gpu.compute_cap) for gpu in c.host.gpus}
    if len(models) > 1 and c.tp > 1:
        action = (
            "Use a host with equal GPUs, or hide the others (deployment_extra_env.CUDA_VISIBLE_DEVICES is "
            "not read here)."
        )
        yield Problem("gpus_equal", "deployment_host.gpus", ", ".join(kinds), "GPUs of one model", action)


@rule("gpu_mig", "a MIG device has no peer access and its own memory size", "issue 3")
def _mig(c: Context) -> Iterator[Finding]:
    split = [str(gpu.index) for gpu in c.host.gpus if gpu.mig]
    if c.cuda and split:
        action = "Turn MIG off on these GPUs (nvidia-smi -i N -mig 0), then gather the facts again."
        yield Problem("gpu_mig", "deployment_host.gpus", f"MIG on GPU {', '.join(split)}", "whole GPUs", action)


@rule(
    "driver_toolkit",
    "a driver older than the toolkit needs fails at the first CUDA call",
    "CUDA release notes, table of minimum drivers",
)
def _driver(c: Context) -> Iterator[Finding]:
    wanted = version(c.torch_cuda)
    needed = DRIVER_FOR_MAJOR.get(wanted[0]) if wanted else None
    if not c.cuda or needed is None or not c.host.gpus:
        return
    own = DRIVER_OF_TOOLKIT.get((wanted[0], wanted[1])) if len(wanted) > 1 else None
    if c.host.driver is None:
        text = f"The driver's version is not known; CUDA {c.torch_cuda} needs {_dotted(needed)} or newer."
        yield Warning_("driver_toolkit", text)
    elif version(c.host.driver) < needed:
        expected = f"driver {_dotted(needed)} or newer for CUDA {c.torch_cuda}"
        action = f"Install a newer driver (role cuda) and reboot, or build the stack for an older CUDA ({TORCH_CUDA})."
        yield Problem("driver_toolkit", "deployment_host.driver", f"driver {c.host.driver}", expected, action)
    elif own and version(c.host.driver) < own:
        yield Warning_(
            "driver_toolkit",
            f"Driver {c.host.driver} is older than the one of CUDA {c.torch_cuda} ({_dotted(own)}): kernels "
            "compiled at run "
            "time may be refused.",
        )


@rule(
    "toolkit_torch",
    "kernels compiled at start link against torch's CUDA; another major version does not load",
    "facts; pytorch",
)
def _toolkit(c: Context) -> Iterator[Finding]:
    if not c.cuda:
        return
    found = re.search(r"cuda-(\d+(?:\.\d+)?)/?$", c.cuda_home)
    home, torch = version(found.group(1)) if found else (), version(c.torch_cuda)
    if home and torch and home[0] != torch[0]:
        expected = f"a toolkit of CUDA {torch[0]}: torch was built for {c.torch_cuda}"
        action = f"Set deployment_cuda_home and {TORCH_CUDA} to the same major version."
        yield Problem("toolkit_torch", "deployment_cuda_home", show(c.cuda_home), expected, action)
    if not torch:
        expected, action = (
            "the CUDA version torch was built for",
            "Write what torch.version.cuda prints, such as 13.0, in quotes.",
        )
        yield Problem("toolkit_torch", TORCH_CUDA, show(c.torch_cuda), expected, action)
    capability = c.host.compute_cap
    needed = TOOLKIT_FOR_CAPABILITY.get(capability) if capability else None
    if needed and torch and torch < needed:
        expected = f"CUDA {_dotted(needed)} or newer for compute capability {_dotted(capability)}"
        yield Problem("toolkit_torch", TORCH_CUDA, show(c.torch_cuda), expected, "Build the stack for a newer CUDA.")


@rule("attention_hardware", "some attention backends exist for some GPUs only", "server_args.py:1880-1925")
def _attention(c: Context) -> Iterator[Finding]:
    capability = c.host.compute_cap
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        majors = BACKEND_CAPABILITY.get(str(c.get(field)))
        if c.cuda and capability and majors and capability[0] not in majors:
            expected = f"a backend for compute capability {_dotted(capability)}"
            yield c.problem("attention_hardware", field, expected, "Use flashinfer or triton.")
    if c.get("attention_backend") == "flex_attention" and c.speculative:
        yield c.problem(
            "attention_hardware", "attention_backend", "a backend that can speculate", "Use flashinfer or triton."
        )


# --- values that the engine overwrites, ignores or refuses ----------------------------------------


@rule(
    "never_read", "parsed and read nowhere: setting it changes nothing", "dumped by tools/dump_flag_schema.py; facts 7"
)
def _never_read(c: Context) -> Iterator[Finding]:
    for field in c.settings:
        if field in c.schema.never_read:
            expected = f"nothing: SGLang {c.schema.engine_version} parses it and reads it nowhere"
            yield c.problem("never_read", field, expected, "Remove it.")


@rule(
    "engine_overwrites",
    "a value that the engine replaces silently would make the plan a lie",
    "facts 11, 16; server_args.py",
)
def _overwrites(c: Context) -> Iterator[Finding]:
    def refuse(field: str, expected: str, action: str = "Remove it.") -> Problem:
        return c.problem("engine_overwrites", field, expected, action)

    if c.speculative and c.get("disable_overlap_schedule") and c.env_on("SGLANG_ENABLE_SPEC_V2"):
        action = "Remove it, or set deployment_extra_env.SGLANG_ENABLE_SPEC_V2 to false."
        yield refuse("disable_overlap_schedule", "nothing: with spec v2 the engine turns overlap on again", action)
    if c.get("speculative_algorithm") is not None and c.get("enable_mixed_chunk"):
        yield refuse("enable_mixed_chunk", "nothing: the engine turns mixed chunked prefill off when it speculates")
    sizes = c.get("cuda_graph_bs")
    if isinstance(sizes, (list, tuple)) and sizes and c.number("cuda_graph_max_bs") not in (None, max(sizes)):
        expected = f"{max(sizes)} or null: the engine sets it to the largest of cuda_graph_bs"
        yield refuse(
            "cuda_graph_max_bs", expected, f"Set deployment_overrides.cuda_graph_max_bs to {max(sizes)} or null."
        )
    for field in ("attention_backend", "decode_attention_backend"):
        pages = PAGE_SIZES.get(str(c.get(field)))
        if pages and c.number("page_size") not in (None, *pages):
            expected = f"{' or '.join(map(str, pages))}: the engine overwrites it for {c.get(field)}"
            yield refuse("page_size", expected, "Set one of these, or remove it.")
    if c.get("device") == "cpu" and c.get("sampling_backend") not in (None, "pytorch"):
        yield refuse("sampling_backend", "pytorch: the engine sets it on a CPU")
    if (c.number("pp_size") or 1) > 1 and c.get("speculative_algorithm") is not None:
        yield refuse(
            "pp_size", "1: pipeline parallelism and speculation exclude each other", "Set it to 1, or use baseline."
        )
    for name, why in OVERWRITTEN_ENV.items():
        if name in c.env:
            variable = c.env[name].variable
            yield Problem("engine_overwrites", variable, show(c.env[name].value), f"nothing: {why}", "Remove it.")


@rule("env_boolean", "a word the engine does not know only warns and means False", "facts 15; environ.py, EnvBool")
def _env_boolean(c: Context) -> Iterator[Finding]:
    for name, setting in c.env.items():
        known = c.schema.environment.get(name)
        boolean = known is not None and known["type"] == "bool"
        if boolean or name in ("SGLANG_USE_CPU_ENGINE", "SGLANG_DISABLE_CUDNN_CHECK"):
            if str(setting.value).lower() not in TRUE | FALSE:
                expected = "true or false: the engine takes any other word for false"
                yield Problem("env_boolean", setting.variable, show(setting.value), expected, "Write true or false.")
        elif (
            known is not None
            and known["type"] in ("int", "float")
            and not re.fullmatch(r"-?\d+(\.\d+)?", str(setting.value))
        ):
            expected = f"a number: the engine falls back to {known['default']} with a warning"
            yield Problem("env_boolean", setting.variable, show(setting.value), expected, "Write a number.")


@rule("exclusive_flags", "the engine refuses these together", "server_args.py:2646-2700")
def _exclusive(c: Context) -> Iterator[Finding]:
    for first, second in EXCLUSIVE:
        if c.get(first) and c.get(second):
            yield c.problem("exclusive_flags", first, f"false, because {second} is set", "Choose one of the two.")
    for flag, needed in REQUIRES:
        if c.get(flag) and not c.get(needed):
            expected = f"a value, because {flag} is set"
            yield c.problem("exclusive_flags", needed, expected, f"Set {needed}, or turn {flag} off.")
    if c.get("enable_priority_scheduling") and c.get("schedule_policy") not in (None, "fcfs", "lof"):
        yield c.problem(
            "exclusive_flags", "schedule_policy", "fcfs or lof with priority scheduling", "Choose one of these."
        )


@rule(
    "data_parallel",
    "with dp_size 1 the engine turns data-parallel attention off; other sizes must divide",
    "server_args.py:2083-2125",
)
def _data_parallel(c: Context) -> Iterator[Finding]:
    dp, tp = c.number("dp_size") or 1, c.tp
    for field in ("enable_dp_attention", "enable_dp_lm_head"):
        if c.get(field) and dp == 1:
            expected = "false with dp_size 1: the engine turns it off"
            yield c.problem("data_parallel", field, expected, "Set deployment_overrides.dp_size, or remove it.")
    if c.get("enable_dp_lm_head") and not c.get("enable_dp_attention"):
        yield c.problem("data_parallel", "enable_dp_lm_head", "false without enable_dp_attention", "Set both, or none.")
    if c.get("enable_dp_attention") and dp > 1:
        if tp % dp:
            yield c.problem("data_parallel", "dp_size", f"a divisor of tp_size ({tp})", "Change dp_size or tp_size.")
        for field in ("chunked_prefill_size", "schedule_conservativeness"):
            if field in c.settings:
                expected = "nothing: with data-parallel attention the engine scales it down"
                yield c.problem("data_parallel", field, expected, "Remove it.")
    for field in ("attn_cp_size", "moe_dp_size", "ep_size"):
        size = c.number(field)
        if size is not None and size > 0 and tp % size:
            yield c.problem("data_parallel", field, f"a divisor of tp_size ({tp})", f"Change {field} or tp_size.")


@rule("kv4_backend", "an FP4 KV cache works with some attention backends only", "server_args.py:1976-2053")
def _kv4(c: Context) -> Iterator[Finding]:
    if c.get("kv_cache_dtype") != "fp4_e2m1" or c.target is None:
        return
    backend = c.get("attention_backend")
    choices = KV4_BACKENDS[c.target.is_mla]
    if backend not in (None, *choices):
        expected = f"one of {', '.join(choices)} with kv_cache_dtype fp4_e2m1"
        yield c.problem("kv4_backend", "attention_backend", expected, "Choose one of these, or another kv_cache_dtype.")


@rule("one_host", "this collection plans one host", "design")
def _one_host(c: Context) -> Iterator[Finding]:
    if (c.number("nnodes") or 1) != 1:
        yield c.problem("one_host", "nnodes", "1: a plan is for one host", "Remove it.")
    if c.get("config") is not None:
        expected = "nothing: a configuration file would set flags behind the plan's back"
        yield c.problem("one_host", "config", expected, "Move its contents to deployment_overrides.")


@rule(
    "loader_config",
    "the default loader raises ValueError for any other key",
    "facts: cold start; model_loader/loader.py",
)
def _loader(c: Context) -> Iterator[Finding]:
    value = c.get("model_loader_extra_config")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            yield c.problem("loader_config", "model_loader_extra_config", "a mapping, or JSON", "Write it as YAML.")
            return
    unknown = sorted(set(as_dict(value)) - {"enable_multithread_load", "num_threads"})
    if unknown and c.get("load_format") in (None, "auto", "safetensors"):
        expected = f"only enable_multithread_load and num_threads, not {', '.join(unknown)}"
        yield c.problem("loader_config", "model_loader_extra_config", expected, "Remove the other keys.")


@rule(
    "lora_paths",
    "text in braces is read as JSON with lora_name and lora_path, and anything else trips an assertion",
    "server_args.py:5705",
)
def _lora(c: Context) -> Iterator[Finding]:
    value = c.get("lora_paths")
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if not isinstance(item, str) or not (item.startswith("{") and item.endswith("}")):
            continue
        try:
            parsed = as_dict(json.loads(item))
        except ValueError:
            parsed = {}
        if not {"lora_name", "lora_path"} <= set(parsed):
            expected = "a path, name=path, or JSON with lora_name and lora_path"
            yield c.problem("lora_paths", "lora_paths", expected, "Write name=path.")


# --- sizes ----------------------------------------------------------------------------------------


@rule("chunk_page", "chunked prefill works in whole pages", "server_args.py:5182")
def _chunk_page(c: Context) -> Iterator[Finding]:
    page = effective_page(c) if c.number("page_size") != 0 else 0
    chunk = c.number("chunked_prefill_size") or default_chunk(c.host.gpu_memory_mib)
    if page < 1:
        yield c.problem("chunk_page", "page_size", "1 or more", "Set deployment_overrides.page_size.")
    elif chunk > 0 and chunk % page:
        field = "chunked_prefill_size" if "chunked_prefill_size" in c.settings else "page_size"
        expected = f"a chunked prefill size ({chunk}) that is a multiple of the page size ({page})"
        action = f"Set deployment_overrides.chunked_prefill_size to {chunk // page * page or page}."
        yield c.problem("chunk_page", field, expected, action)


@rule("sizes_positive", "the engine fails later and in other words", "server_args.py; scheduler.py")
def _sizes(c: Context) -> Iterator[Finding]:
    for field in (
        "tp_size", "pp_size", "dp_size", "ep_size", "max_running_requests", "max_total_tokens", "max_prefill_tokens",
        "cuda_graph_max_bs", "context_length", "gpu_id_step", "tokenizer_worker_num", "stream_interval",
        "max_queued_requests", "decode_log_interval",
    ):  # fmt: skip
        value = c.number(field)
        if value is not None and value < 1:
            yield c.problem("sizes_positive", field, "1 or more", f"Set deployment_overrides.{field}.")
    chunk = c.number("chunked_prefill_size")
    if chunk is not None and chunk < 1 and chunk != -1:
        yield c.problem(
            "sizes_positive", "chunked_prefill_size", "1 or more, or -1 to turn it off", "Set one of these."
        )
    sizes = c.get("cuda_graph_bs")
    if isinstance(sizes, (list, tuple)) and any(is_int(item) and item < 1 for item in sizes):
        yield c.problem(
            "sizes_positive", "cuda_graph_bs", "batch sizes of 1 or more", "Set deployment_overrides.cuda_graph_bs."
        )
    fraction = c.get("mem_fraction_static")
    if is_number(fraction) and not 0 < fraction < 1:
        expected = "a fraction between 0 and 1"
        yield c.problem(
            "sizes_positive", "mem_fraction_static", expected, "Set deployment_overrides.mem_fraction_static."
        )
    for field in ("schedule_conservativeness", "base_gpu_id"):
        value = c.get(field)
        if is_number(value) and value < 0:
            yield c.problem("sizes_positive", field, "0 or more", f"Set deployment_overrides.{field}.")


@rule("context_reach", "a context beyond the model's own raises ValueError", "model_config.py:359-388")
def _context(c: Context) -> Iterator[Finding]:
    context, own = c.number("context_length"), c.target.context_length if c.target else None
    name = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    if context and own and context > own and not c.env_on(name):
        action = f"Set deployment_overrides.context_length to at most {own}, or deployment_extra_env.{name} to true."
        yield c.problem("context_reach", "context_length", f"at most {own}, which the model was made for", action)


@rule(
    "graphs_cover_running",
    "graphs above the running requests are dropped; requests above the graphs run eager and slower",
    "facts 6; gpu-run",
)
def _graphs(c: Context) -> Iterator[Finding]:
    running, largest = c.number("max_running_requests"), c.number("cuda_graph_max_bs")
    if not c.cuda or running is None or largest is None or c.get("disable_cuda_graph"):
        return
    if largest > running:
        sizes = graph_sizes({name: item.value for name, item in c.settings.items()}, c.host.gpu_memory_mib)
        yield Warning_(
            "graphs_cover_running",
            f"cuda_graph_max_bs {largest} is above max_running_requests {running}: the engine captures graphs up to "
            f"{max(sizes, default=0)} only and never runs more requests than {running} at a time. "
            f"deployment_overrides.max_running_requests: {largest} would use them all.",
        )
    elif running > largest:
        yield Warning_(
            "graphs_cover_running",
            f"max_running_requests {running} is above cuda_graph_max_bs {largest}: above {largest} requests "
            "decoding runs without CUDA "
            "graphs and throughput drops.",
        )


# --- names, secrets, environment ------------------------------------------------------------------


@rule("served_name", "the colon separates a model from a LoRA adapter", "server_args.py:5155")
def _served(c: Context) -> Iterator[Finding]:
    name = c.get("served_model_name")
    if isinstance(name, str) and (":" in name or not name.strip() or name != name.strip()):
        expected = "a name without a colon and without spaces around it"
        yield Problem("served_name", "deployment_served_model_name", show(name), expected, "Choose another name.")


@rule(
    "secret",
    "a command line and a unit are readable by every user; the engine repeats a key in log, /server_info and records",
    "facts 9",
)
def _secret(c: Context) -> Iterator[Finding]:
    for kind, settings in (("command line", c.settings), ("environment of the unit", c.env)):
        for name, setting in settings.items():
            why = secret(name, setting.value)
            if why and setting.value is not None and setting.value is not False:
                action = "Put authentication in front of the engine; a local model needs no token."
                found = f"a value that is not shown here, because {why}"
                yield Problem("secret", setting.variable, found, f"no secret in the {kind}", action)


@rule("control_characters", "a line break in a unit file starts another directive", "systemd.syntax(7)")
def _control(c: Context) -> Iterator[Finding]:
    for settings in (c.settings, c.env, c.unit):
        for name, setting in settings.items():
            values = setting.value if isinstance(setting.value, (list, tuple)) else [setting.value]
            if any(isinstance(value, str) and CONTROL.search(value) for value in [name, *values]):
                expected = "text without control characters"
                yield Problem("control_characters", setting.variable, show(setting.value), expected, "Remove them.")


@rule("flashinfer_arch", "FlashInfer's all-reduce compiles for 12.0a and not for plain 12.0", "facts 2")
def _arch_list(c: Context) -> Iterator[Finding]:
    setting = c.env.get("FLASHINFER_CUDA_ARCH_LIST")
    if setting is None:
        return
    words = re.split(r"[\s;,]+", str(setting.value).strip())
    wrong = [
        word
        for word in words
        if not re.fullmatch(r"\d+\.\d+[af]?", word) or (version(word)[0] >= 9 and word[-1].isdigit())
    ]
    if wrong:
        expected = "architectures with their suffix, such as 12.0a: the kernels do not compile for the plain name"
        action = "Write 12.0a, or remove the variable: FlashInfer finds the architecture itself."
        yield Problem("flashinfer_arch", setting.variable, show(setting.value), expected, action)


@rule(
    "nccl_topology",
    "the PCIe settings make NVLink all-reduces 3.7 times slower",
    "peers-and-pain: measured on two H200",
)
def _nccl(c: Context) -> Iterator[Finding]:
    forced = sorted(
        name for name in c.env if name in ("NCCL_PROTO", "NCCL_ALGO", "NCCL_MAX_NCHANNELS", "NCCL_P2P_LEVEL")
    )
    if c.cuda and c.host.topology == "nvlink" and forced:
        yield Warning_(
            "nccl_topology",
            f"{', '.join(forced)} are set although the GPUs are linked by NVLink: such settings made a 128 MiB "
            "all-reduce 3.7 times "
            "slower there. deployment_nccl_env: null chooses by topology.",
        )
    if c.cuda and c.tp > 1 and c.host.partial_links:
        yield Warning_(
            "nccl_topology",
            "Only some pairs of GPUs are linked by NVLink: neither the PCIe settings nor NCCL's own choice were "
            "measured there; "
            "try both with deployment_nccl_env.",
        )
    if c.cuda and c.tp > 1 and c.host.topology not in ("pcie", "nvlink") and c.topology_nccl:
        yield Warning_(
            "topology_unknown",
            f"The links between the GPUs are {c.host.topology}: no NCCL settings are chosen. On PCIe that costs "
            "about a third of the "
            "single-stream rate; deployment_nccl_env sets them.",
        )


@rule("exposure", "the engine has no authentication", "facts 9")
def _exposure(c: Context) -> Iterator[Finding]:
    if c.get("host") not in ("127.0.0.1", "::1", "localhost"):
        yield Warning_(
            "exposure", f"The engine listens on {c.get('host')} without authentication: put a gateway in front of it."
        )


@rule("remote_code", "a model directory with its own code does not load without the flag", "models; transformers")
def _remote_code(c: Context) -> Iterator[Finding]:
    if c.target and c.target.has_remote_code and not c.get("trust_remote_code"):
        yield Warning_(
            "remote_code",
            "The model directory ships code (auto_map), but trust_remote_code is off: its tokenizer may not load.",
        )


@rule("model_known", "rules and budget need the model's config.json", "issue 3")
def _model_known(c: Context) -> Iterator[Finding]:
    if c.target is None:
        yield Warning_(
            "model_known", "The target's config.json was not read: heads, context and memory are not checked."
        )
    elif c.target.missing:
        yield Warning_(
            "model_known", f"The target's facts lack {', '.join(c.target.missing)}: what needs them is not checked."
        )


@rule(
    "unit_limits",
    "a start limit must outlast its starts, or an endless loop of slow failures never trips it",
    "peers-and-pain; record, weakness 1",
)
def _unit_limits(c: Context) -> Iterator[Finding]:
    def value(name: str) -> int:
        found = c.unit[name].value if name in c.unit else None
        return int(found) if is_int(found) else 0

    start, stop, interval = value("timeout_start_sec"), value("timeout_stop_sec"), value("start_limit_interval_sec")
    burst, pause = value("start_limit_burst"), value("restart_sec")
    if start < c.load_budget_s:
        expected = f"at least {variable_of('load_budget_s')} ({c.load_budget_s} s): the gate runs inside it"
        yield Problem(
            "unit_limits",
            c.unit["timeout_start_sec"].variable,
            f"{start} s",
            expected,
            "Raise it, or lower the budget.",
        )
    needed = burst * (start + stop + pause)
    if interval and interval < needed:
        expected = f"at least {needed} s: {burst} starts of {start} s, stops of {stop} s and pauses of {pause} s"
        variable = c.unit["start_limit_interval_sec"].variable
        yield Problem("unit_limits", variable, f"{interval} s", expected, "Raise it, or leave it to the planner.")
    if stop and stop < 30:
        yield Warning_(
            "unit_limits",
            f"timeout_stop_sec {stop}: running requests took 18 s to finish in tests, a stop cuts them off.",
        )


#: Main memory of the engine without its weights: its three processes took 1.9 GiB on the CPU with a tiny model, and each rank
#: of a GPU server imports the same torch.
ENGINE_BYTES = 2 * GIB


def _limit_bytes(value: Any, host: HostShape) -> int | None:
    """A size of systemd in bytes; ``None`` for no limit, and for a share of a memory that is not known."""
    found = re.fullmatch(r"(\d+)([KMGT%]?)", str(value))
    if found is None:
        return None
    number, suffix = int(found[1]), found[2]
    if suffix == "%":
        return host.memory_total_mib * (1 << 20) * number // 100 if host.memory_total_mib else None
    return number * SIZE_FACTORS[suffix]


@rule(
    "unit_memory",
    "systemd writes a limit of memory to the running service at once: one that is too low kills the engine, or stalls it",
    "systemd.resource-control(5); measured on the CPU",
)
def _unit_memory(c: Context) -> Iterator[Finding]:
    # On a GPU server the weights pass through main memory, on the CPU they stay there.
    weights = c.target.weights_bytes or 0 if c.target and not c.cuda else 0
    least = ENGINE_BYTES + weights
    for key in ("memory_max", "memory_high"):
        setting = c.unit.get(key)
        # What is computed from a small host is not the operator's to correct here.
        if setting is None or setting.source != setting.variable:
            continue
        limit = _limit_bytes(setting.value, c.host)
        if limit is not None and limit < least:
            found = str(setting.value) + (f" ({_gib(limit)})" if str(setting.value).endswith("%") else "")
            expected = (
                f"at least {-(-least // (1 << 20))}M: the engine's processes take {_gib(ENGINE_BYTES)} before any request"
                + (f", and its weights {_gib(weights)}" if weights else "")
            )
            action = "Raise it, write infinity, or remove it: the planner computes one."
            yield Problem("unit_memory", setting.variable, found, expected, action)


# --- memory ---------------------------------------------------------------------------------------


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


@rule("budget_known", "without sizes nothing can be promised", "issue 3")
def _budget_known(c: Context) -> Iterator[Finding]:
    if c.cuda and c.budget is not None and c.budget.kv_tokens is None:
        lacking = [
            name
            for name, value in (
                ("the GPUs' memory", c.budget.available_bytes),
                ("the size of the weights", c.budget.weights_bytes_per_gpu),
                ("KV bytes a token", c.budget.kv_bytes_per_token),
            )
            if value is None
        ]
        yield Warning_("budget_known", f"Memory is not planned: {', '.join(lacking) or 'a size'} is not known.")


@rule(
    "budget_weights", "weights that do not fit fail after minutes of loading", "model_runner_kv_cache_mixin.py:116-149"
)
def _budget_weights(c: Context) -> Iterator[Finding]:
    b = c.budget
    if b is None or b.kv_tokens is None or b.weights_bytes_per_gpu is None or b.available_bytes is None:
        return
    if b.weights_bytes_per_gpu >= b.available_bytes:
        expected = (
            f"weights below {_gib(b.available_bytes)} a GPU: they take {_gib(b.weights_bytes_per_gpu)} "
            f"with tp_size {c.tp}"
        )
        action = "Use more GPUs (deployment_overrides.tp_size), GPUs with more memory, or a smaller model."
        yield Problem(
            "budget_weights",
            "deployment_model_path",
            f"{_gib(b.weights_bytes_per_gpu * c.tp)} of weights",
            expected,
            action,
        )
    elif b.kv_tokens < 1:
        expected = (
            f"at least {b.smallest_fraction}: the weights alone take {_gib(b.weights_bytes_per_gpu)} of "
            f"{_gib(b.available_bytes)}"
        )
        action = (
            f"Set deployment_overrides.mem_fraction_static between {b.smallest_fraction} and "
            f"{b.largest_fraction}, or use more GPUs."
        )
        found = (
            c.found("mem_fraction_static")
            if "mem_fraction_static" in c.settings
            else f"{b.mem_fraction_static} (the engine's)"
        )
        yield Problem("budget_weights", c.variable("mem_fraction_static"), found, expected, action)


@rule(
    "budget_fit",
    "what lies outside the fraction is not checked by the engine: it dies after it said it was ready",
    "fixtures: oom-after-ready-line",
)
def _budget_fit(c: Context) -> Iterator[Finding]:
    b = c.budget
    if (
        b is None
        or b.margin_bytes is None
        or not b.kv_tokens
        or b.largest_fraction is None
        or b.smallest_fraction is None
    ):
        return
    parts = (
        f"draft {_gib(b.draft_bytes_per_gpu)} + its KV {_gib(b.draft_kv_bytes)} + graphs {_gib(b.graph_bytes)} + "
        "workspaces "
        f"{_gib(b.workspace_bytes)} + activations {_gib(b.activation_bytes)} + request table "
        f"{_gib(b.request_table_bytes)}"
    )
    if b.largest_fraction > b.smallest_fraction:
        action = f"Set deployment_overrides.mem_fraction_static to at most {b.largest_fraction}."
    else:
        action = "No fraction fits: use more GPUs, a smaller chunked_prefill_size, or fewer running requests."
    if b.margin_bytes < DEADLY_MARGIN_BYTES:
        expected = f"a fraction that leaves room for {parts}; {_gib(b.margin_bytes)} would be left"
        found = (
            c.found("mem_fraction_static")
            if "mem_fraction_static" in c.settings
            else f"{b.mem_fraction_static} (the engine's)"
        )
        yield Problem("budget_fit", c.variable("mem_fraction_static"), found, expected, action)
    elif b.margin_bytes < THIN_MARGIN_BYTES:
        yield Warning_("budget_fit", f"Only {_gib(b.margin_bytes)} of GPU memory are left beside {parts}. {action}")


@rule("budget_context", "a pool smaller than one request of full length rejects it", "scheduler.py")
def _budget_context(c: Context) -> Iterator[Finding]:
    b = c.budget
    if b is not None and b.kv_tokens and b.context_length and b.kv_tokens < b.context_length:
        yield Warning_(
            "budget_context",
            f"The KV pool of about {b.kv_tokens} tokens is smaller than one request of full length "
            f"({b.context_length}): longer "
            "requests are refused. deployment_overrides.context_length says so to the clients.",
        )
