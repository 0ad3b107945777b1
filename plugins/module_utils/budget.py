"""GPU memory of one rank, from the model's config.json, the index of its weights and the host's GPUs.

The engine's own arithmetic (0.5.9, ``model_runner_kv_cache_mixin.py:116-149``)::

    KV tokens = (free after weights - free before weights * (1 - mem_fraction_static)) / bytes a token

What lies outside the fraction - the draft model, its KV pool, request tables, workspaces, CUDA graphs, activations - is
not checked by the engine at all: it starts, and dies of it later. Here it is added up. Checked against engine logs in
``tests/unit/test_budget.py``. All sizes are bytes unless their name says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from .settings import is_int, is_number
from .shapes import HostShape, ModelShape

MIB = 1 << 20
GIB = 1 << 30

#: Memory that is gone before the engine looks: driver reserve and CUDA context.
#: 143771 MiB total, 143156 free by nvidia-smi, 139.13 GiB seen by the engine (H200, fixtures/engine-logs).
CONTEXT_BYTES = 1302 * MIB
#: Attention workspace of the flashinfer backend after the KV pool; logs: 12.42 -> 11.91 GiB (384 MiB of it by name).
FLASHINFER_WORKSPACE_BYTES = 520 * MIB
#: The draft worker's own small buffers; logs: 20.88 -> 20.81 GiB.
DRAFT_WORKSPACE_BYTES = 72 * MIB
#: CUDA graphs beside the engine's heuristic of 2 MiB a batch size; logs: 0.12 (baseline) to 0.36 GiB (tree of 16) at
#: 32.
GRAPH_BASE_BYTES = 128 * MIB
#: ... and the draft's graphs; logs: 0.23 GiB (topk 1) to 0.44 GiB (topk 4, with draft extend).
DRAFT_GRAPH_BASE_BYTES = 256 * MIB
#: Free memory below which the engine was seen to die after "ready" (0.10 GiB free: fixtures, oom-after-ready-line).
DEADLY_MARGIN_BYTES = 256 * MIB
#: Free memory below which the plan says that it is thin.
THIN_MARGIN_BYTES = 1 * GIB
#: Workspace of the fused all-reduce: one buffer and three lamport buffers, each for every rank, this many tokens, 2
#: bytes.
FUSION_MAX_TOKENS = 2048
#: Preallocation of --enable-symm-mem unless SGLANG_SYMM_MEM_PREALLOC_GB_SIZE says otherwise (server_args.py, 0.5.9).
SYMM_MEM_BYTES = 4 * GIB
#: Weights inside the fraction must at least leave this many tokens, or no request fits.
SMALLEST_POOL_TOKENS = 1

#: What the plan cannot know of the memory of a rank: the driver's share differs from GPU to GPU, communicators take theirs before
#: the engine looks, weights are padded and repacked (a share of them, when they are divided). It falls on the KV pool alone.
UNSURE_BYTES = GIB // 2
UNSURE_WEIGHTS = 0.01

KV_DTYPE_BYTES = {"bf16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclasses.dataclass(frozen=True)
class Budget:
    """Memory of one rank. ``None`` where the facts do not suffice; ``assumptions`` says which were used."""

    device: str
    gpu_memory_bytes: int | None
    available_bytes: int | None
    weights_bytes_per_gpu: int | None
    draft_bytes_per_gpu: int
    kv_bytes_per_token: int | None
    draft_kv_bytes_per_token: int
    draft_kv_bytes: int
    request_table_bytes: int
    graph_bytes: int
    workspace_bytes: int
    activation_bytes: int
    kv_tokens: int | None
    kv_uncertainty: float
    replicated_bytes: int
    context_length: int | None
    full_length_requests: float | None
    mem_fraction_static: float | None
    largest_fraction: float | None
    smallest_fraction: float | None
    margin_bytes: int | None
    assumptions: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The shape in which a plan carries it."""
        return {**dataclasses.asdict(self), "assumptions": list(self.assumptions)}


def replicated_bytes(model: ModelShape) -> int:
    """Weights of which every rank holds the whole, whatever the tensor parallelism.

    Read in the engine's model files (0.5.9): the down-projections of MLA (``deepseek_v2.py:1123``, ReplicatedLinear), router
    gates (``MoEGate``), norms, and of a Kimi vision tower the MLPs and the projector (``kimi_k25.py:119,557``). These parts
    are not quantised.
    """
    hidden, layers = model.hidden_size or 0, model.layers or 0
    a_layer = 2 * hidden + model.routed_experts * hidden
    if model.is_mla:
        a_layer += hidden * ((model.q_lora_rank or 0) + (model.kv_lora_rank or 0) + (model.qk_rope_head_dim or 0))
    return (layers * a_layer + _vision_parameters(model)) * model.dtype_bytes


def _vision_parameters(model: ModelShape) -> int:
    """Parameters of a vision tower that are not divided: two matrices of each MLP, two of the projector."""

    def size(*names: str) -> int:
        return next((int(v) for n in names if is_int(v := model.vision.get(n)) and 0 < v < 1 << 20), 0)

    width, layers = size("hidden_size", "vt_hidden_size"), size("num_hidden_layers", "vt_num_hidden_layers")
    inner = size("intermediate_size", "vt_intermediate_size") or 4 * width
    merged = 4 * width
    return layers * 2 * width * inner + (merged * (merged + (model.hidden_size or 0)) if width else 0)


def absorbed_bytes(model: ModelShape, attention_tp: int) -> int:
    """Copies of the up-projection of MLA that a rank makes after loading (``w_kc``, ``w_vc``), beside the weights."""
    if not model.is_mla or not (model.heads and model.kv_lora_rank and model.qk_nope_head_dim and model.v_head_dim):
        return 0
    width = model.qk_nope_head_dim + model.v_head_dim
    return (model.layers or 0) * -(-model.heads // attention_tp) * model.kv_lora_rank * width * model.dtype_bytes


def weights_on_a_rank(model: ModelShape, tp: int, pp: int, attention_tp: int) -> tuple[int | None, int]:
    """Bytes that the target's weights take on one rank, and how many of them every rank holds."""
    if not model.weights_bytes:
        return None, 0
    whole = min(replicated_bytes(model), model.weights_bytes) if tp > 1 else 0
    divided = -(-(model.weights_bytes - whole) // (tp * pp))
    return divided + -(-whole // pp) + absorbed_bytes(model, attention_tp) // pp, -(-whole // pp)


def kv_bytes_per_token(model: ModelShape, kv_dtype: str, attention_tp: int) -> int | None:
    """Bytes of KV cache that one token takes on one rank (``get_cell_size_per_token``)."""
    if model.layers is None:
        return None
    size = KV_DTYPE_BYTES.get(kv_dtype, model.dtype_bytes)
    layers = model.layers * (2 if (model.architecture or "").startswith("LongcatFlash") else 1)
    if model.is_mla:
        if model.kv_lora_rank is None or model.qk_rope_head_dim is None:
            return None
        width = model.kv_lora_rank + model.qk_rope_head_dim
        if kv_dtype == "fp4_e2m1":
            return width * layers // 2 + width // 16 * layers
        return width * layers * size
    if not model.kv_heads or not model.head_dim or not model.v_head_dim:
        return None
    heads = max(1, model.kv_heads // attention_tp)
    if kv_dtype == "fp4_e2m1":
        return heads * (model.head_dim + model.v_head_dim) * layers // 2 + heads * model.head_dim * layers * 2 // 16
    return heads * (model.head_dim + model.v_head_dim) * layers * size


def graph_sizes(settings: Mapping[str, Any], gpu_memory_mib: int | None) -> list[int]:
    """The batch sizes of the CUDA graphs that the engine will capture, after it drops those above the running
    requests."""
    if settings.get("disable_cuda_graph") or settings.get("device") == "cpu":
        return []
    given = settings.get("cuda_graph_bs")
    if isinstance(given, (list, tuple)) and given:
        sizes = sorted({int(item) for item in given if is_int(item)})
        largest = max(sizes, default=0)
    else:
        largest = settings.get("cuda_graph_max_bs") or default_graph_max(gpu_memory_mib, settings.get("tp_size") or 1)
        if settings.get("disable_cuda_graph_padding"):
            sizes = list(range(1, largest + 1))
        elif settings.get("speculative_algorithm") is None:
            sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, largest + 1, 32)]
        else:
            sizes = [
                *range(1, 9),
                *range(10, 33, 2),
                *range(40, 65, 4),
                *range(72, 257, 8),
                *range(272, largest + 1, 16),
            ]
        sizes = [size for size in sizes if size <= largest]
    running = settings.get("max_running_requests")
    if is_int(running):
        if largest > running:
            sizes = sorted({*sizes, running})
        sizes = [size for size in sizes if size <= running]
    return sizes


def default_graph_max(gpu_memory_mib: int | None, tp_size: int) -> int:
    """``cuda_graph_max_bs`` when nobody sets it (``server_args.py:911-1030``)."""
    if gpu_memory_mib is None:
        return 160
    for below, single, parallel in ((20, 8, 8), (35, 24, 80), (60, 32, 160), (160, 256, 512)):
        if gpu_memory_mib < below * 1024:
            return single if tp_size < 4 else parallel
    return 512


def default_chunk(gpu_memory_mib: int | None) -> int:
    """``chunked_prefill_size`` when nobody sets it (``server_args.py:911-1030``)."""
    if gpu_memory_mib is None:
        return 4096
    for below, tokens in ((35, 2048), (60, 4096), (160, 8192)):
        if gpu_memory_mib < below * 1024:
            return tokens
    return 16384


def automatic_fraction(settings: Mapping[str, Any], gpu_memory_mib: int, model: ModelShape | None) -> float:
    """``mem_fraction_static`` when nobody sets it (``server_args.py:1030-1077`` and
    ``adjust_mem_fraction_for_vlm``)."""
    tp = settings.get("tp_size") or 1
    given = settings.get("cuda_graph_bs") or [
        settings.get("cuda_graph_max_bs") or default_graph_max(gpu_memory_mib, tp)
    ]
    largest = max(given)
    chunk = settings.get("chunked_prefill_size") or default_chunk(gpu_memory_mib)
    if chunk <= 0:
        chunk = settings.get("max_prefill_tokens") or 16384
    reserved = 512 + max(chunk, 2048) * 1.5 + largest * 2 + tp * (settings.get("pp_size") or 1) / 8 * 1024
    if settings.get("enable_dp_attention"):
        reserved += largest * (settings.get("dp_size") or 1) * (4.5 if largest > 300 else 3)
    if gpu_memory_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    algorithm = settings.get("speculative_algorithm")
    if algorithm is not None:
        reserved += 6 * 1024 if algorithm == "STANDALONE" else 0 if algorithm == "NGRAM" else 2 * 1024
    fraction = round((gpu_memory_mib - reserved) / gpu_memory_mib, 3)
    if model is not None and model.is_multimodal and not settings.get("language_only"):
        layers = model.vision.get("num_hidden_layers", model.vision.get("vt_num_hidden_layers", 24))
        width = model.vision.get("hidden_size", model.vision.get("vt_hidden_size", 1024))
        if is_int(layers) and is_int(width) and 0 < layers < 1 << 20 and 0 < width < 1 << 20:
            ratio = layers * width**2 / (24 * 1024**2)
            fraction *= 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (ratio - 1.0)))
    return float(fraction)


def _activation_bytes(model: ModelShape, settings: Mapping[str, Any], chunk: int) -> int:
    """Peak of activations in one prefill chunk: residual stream, attention or MLP inside, routed experts. An
    estimate."""
    tp = settings.get("tp_size") or 1
    hidden = model.hidden_size or 0
    dense = chunk * (4 * hidden + 3 * model.intermediate_size // tp) * model.dtype_bytes
    experts = chunk * model.experts_per_token * (hidden + 3 * model.moe_intermediate_size // tp) * model.dtype_bytes
    running = settings.get("max_running_requests") or 0
    drafts = settings.get("speculative_num_draft_tokens") or 1
    graphs = settings.get("cuda_graph_max_bs") or running
    logits = min(running or graphs, graphs or running) * drafts * (model.vocab_size or 0) * 4
    return int(dense + experts + logits)


def compute(
    settings: Mapping[str, Any],
    env: Mapping[str, str],
    host: HostShape,
    target: ModelShape | None,
    draft: ModelShape | None,
) -> Budget:
    """The budget of one rank for the settings of a plan. Never fails: what cannot be computed is ``None``."""
    device = str(settings.get("device") or "cuda")
    context = settings.get("context_length") or (target.context_length if target else None)
    if device == "cpu":
        return _cpu_budget(settings, target, context)
    assumptions: list[str] = []
    tp = settings.get("tp_size") or 1
    pp = settings.get("pp_size") or 1
    attention_tp = max(1, tp // (settings.get("dp_size") or 1)) if settings.get("enable_dp_attention") else tp
    kv_dtype = str(settings.get("kv_cache_dtype") or "auto")
    speculative = settings.get("speculative_algorithm") is not None
    cell = kv_bytes_per_token(target, kv_dtype, attention_tp) if target else None
    draft_cell = (kv_bytes_per_token(draft, kv_dtype, attention_tp) or 0) if draft and speculative else 0
    weights, replicated = weights_on_a_rank(target, tp, pp, attention_tp) if target else (None, 0)
    draft_weights = -(-draft.weights_bytes // tp) if draft and speculative and draft.weights_bytes else 0
    memory_mib = host.gpu_memory_mib
    available: int | None = None
    if memory_mib is not None:
        # Of the whole GPU: what is in use now is either the server that this plan replaces, or somebody else's, which the
        # preflight refuses. A plan that depended on it would change from run to run.
        available = max(MIB, memory_mib * MIB - CONTEXT_BYTES)
        assumptions.append(f"driver and CUDA context take {CONTEXT_BYTES // MIB} MiB of each GPU (seen on H200)")
    fraction = settings.get("mem_fraction_static")
    if not is_number(fraction):
        fraction = automatic_fraction(settings, memory_mib, target) if memory_mib else None
        assumptions.append("mem_fraction_static is the engine's own formula: nobody sets it")
    if weights is not None:
        kept = f", but for {replicated / GIB:.1f} GiB that every rank holds" if replicated else ""
        assumptions.append(f"weights divide evenly by tensor and pipeline parallelism{kept}")
    chunk = settings.get("chunked_prefill_size") or default_chunk(memory_mib)
    if chunk <= 0:
        chunk = settings.get("max_prefill_tokens") or 16384
    activation = _activation_bytes(target, settings, chunk) if target else 0
    graphs = graph_sizes(settings, memory_mib)
    graph_bytes = 0
    if graphs:
        graph_bytes = GRAPH_BASE_BYTES + 2 * MIB * max(graphs) + (DRAFT_GRAPH_BASE_BYTES if speculative else 0)
        assumptions.append(
            "CUDA graphs: the engine's heuristic of 2 MiB a batch size, plus what small runs were seen to take"
        )
    assumptions.append("activations: estimated from hidden size, experts and chunked prefill")
    workspace = _workspace_bytes(settings, env, target, speculative, tp)
    table = 0
    if context:
        table = (
            _running(settings, None, context) * (context + 4 + (settings.get("speculative_num_draft_tokens") or 0)) * 4
        )
    tokens: int | None = None
    largest: float | None = None
    smallest: float | None = None
    margin: int | None = None
    full: float | None = None
    unsure = 0.0
    if available is not None and weights is not None and cell and fraction is not None:
        page = settings.get("page_size") or 1
        tokens = max(0, int((available - weights) - available * (1 - fraction))) // cell
        limit = settings.get("max_total_tokens")
        if tokens:
            unsure = round(min(0.9, (UNSURE_BYTES + weights * UNSURE_WEIGHTS * (tp > 1)) / (tokens * cell)), 3)
        if is_int(limit) and tokens * (1 - unsure) >= limit:
            # The engine takes what it is told, and there is room for it in any case.
            unsure = 0.0
        tokens = min(tokens, limit) if is_int(limit) else tokens
        tokens = tokens // page * page
        if context:
            table = (
                _running(settings, tokens, context)
                * (context + 4 + (settings.get("speculative_num_draft_tokens") or 0))
                * 4
            )
            full = round(tokens / context, 2)
        fixed = draft_weights + table + workspace + graph_bytes + activation
        margin = int(available - weights - tokens * cell - tokens * draft_cell - fixed)
        ratio = draft_cell / cell
        outside = (fixed + THIN_MARGIN_BYTES + ratio * (available - weights)) / (1 + ratio)
        largest = math.floor((1 - outside / available) * 1000) / 1000
        smallest = math.ceil((weights + cell * SMALLEST_POOL_TOKENS) / available * 1000) / 1000
    return Budget(
        device=device,
        gpu_memory_bytes=memory_mib * MIB if memory_mib else None,
        available_bytes=available,
        weights_bytes_per_gpu=weights,
        draft_bytes_per_gpu=draft_weights,
        kv_bytes_per_token=cell,
        draft_kv_bytes_per_token=draft_cell,
        draft_kv_bytes=draft_cell * (tokens or 0),
        request_table_bytes=table,
        graph_bytes=graph_bytes,
        workspace_bytes=workspace,
        activation_bytes=activation,
        kv_tokens=tokens,
        kv_uncertainty=unsure,
        replicated_bytes=replicated,
        context_length=context,
        full_length_requests=full,
        mem_fraction_static=fraction,
        largest_fraction=largest,
        smallest_fraction=smallest,
        margin_bytes=margin,
        assumptions=tuple(assumptions),
    )


def _running(settings: Mapping[str, Any], tokens: int | None, context: int) -> int:
    """Rows of the request table: the running requests, or what the engine chooses from the pool."""
    given = settings.get("max_running_requests")
    if is_int(given):
        return int(given)
    return min(max(int((tokens or 0) / context * 512), 2048), 4096)


def _workspace_bytes(
    settings: Mapping[str, Any], env: Mapping[str, str], target: ModelShape | None, speculative: bool, tp: int
) -> int:
    total = 0
    backends = {
        settings.get(key) for key in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    }
    if "flashinfer" in backends:
        total += FLASHINFER_WORKSPACE_BYTES
        given = env.get("SGLANG_FLASHINFER_WORKSPACE_SIZE", "")
        if given.isdigit():
            total += int(given) - 384 * MIB
    if speculative:
        total += DRAFT_WORKSPACE_BYTES
    if settings.get("enable_flashinfer_allreduce_fusion") and target and target.hidden_size:
        total += 4 * tp * FUSION_MAX_TOKENS * target.hidden_size * 2
    if settings.get("enable_symm_mem"):
        given = env.get("SGLANG_SYMM_MEM_PREALLOC_GB_SIZE", "")
        total += int(given) * GIB if given.isdigit() else SYMM_MEM_BYTES
    if tp > 1:
        channels, size = env.get("NCCL_MAX_NCHANNELS", ""), env.get("NCCL_BUFFSIZE", "")
        if channels.isdigit() and size.isdigit():
            total += 2 * int(channels) * int(size)
    return total


def _cpu_budget(settings: Mapping[str, Any], target: ModelShape | None, context: int | None) -> Budget:
    limit = settings.get("max_total_tokens")
    tokens = int(limit) if is_int(limit) else None
    return Budget(
        device="cpu",
        gpu_memory_bytes=None,
        available_bytes=None,
        weights_bytes_per_gpu=0,
        draft_bytes_per_gpu=0,
        kv_bytes_per_token=kv_bytes_per_token(target, "auto", settings.get("tp_size") or 1) if target else None,
        draft_kv_bytes_per_token=0,
        draft_kv_bytes=0,
        request_table_bytes=0,
        graph_bytes=0,
        workspace_bytes=0,
        activation_bytes=0,
        kv_tokens=tokens,
        kv_uncertainty=0.0,
        replicated_bytes=0,
        context_length=context,
        full_length_requests=round(tokens / context, 2) if tokens and context else None,
        mem_fraction_static=settings.get("mem_fraction_static"),
        largest_fraction=None,
        smallest_fraction=None,
        margin_bytes=None,
        assumptions=("device cpu: the model and its KV cache are in main memory; no GPU memory is planned",),
    )
