"""The memory budget against what the real engine logged (fixtures/engine-logs, shared with the project) and against
config.json."""

from __future__ import annotations

from typing import Any

import plan_cases as cases
import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import budget, shapes
from ansible_collections.gpuserve.sglang.plugins.module_utils.budget import GIB, MIB

#: The project's test models on one H200: 32 layers x 2 x 8 heads x 64 x 2 bytes = 65536 bytes a token; the draft 8192
#: bytes.
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
DRAFT = {**TARGET, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "num_key_value_heads": 32}
SPECULATIVE: dict[str, Any] = {
    "attention_backend": "flashinfer",
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
    "max_running_requests": 48,
    "cuda_graph_max_bs": 32,
}
BASELINE: dict[str, Any] = {"attention_backend": "flashinfer", "cuda_graph_max_bs": 32}

#: name, settings, fraction, memory held by others in MiB, then from the log: tokens, free GiB after the target's pool,
#: free at end.
LOGS = [
    ("baseline-cold-jit", BASELINE, 0.91, 0, 2049603, 12.42, 11.79),
    ("eagle3-v2", SPECULATIVE, 0.75, 0, 1684715, 34.74, 20.58),
    (
        "eagle3-topk4",
        {**SPECULATIVE, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16},
        0.75,
        0,
        1684715,
        34.74,
        20.22,
    ),
    ("memory-held-by-other", SPECULATIVE, 0.75, 102932, 449633, 9.61, 4.88),
]


def _budget(
    settings: dict[str, Any], fraction: float | None, held: int = 0, host: dict[str, Any] | None = None
) -> budget.Budget:
    machine = host or cases.h200(1)
    for gpu in machine["gpus"]:
        # A GPU of which others hold a part is to the engine what a smaller GPU is.
        gpu["memory_total_mib"] -= held
    target = cases.model(TARGET, int(1.5 * GIB))
    draft = cases.model(DRAFT, int(0.22 * GIB))
    chosen = settings if fraction is None else {**settings, "mem_fraction_static": fraction}
    return budget.compute(chosen, {}, shapes.host_shape(machine), shapes.model_shape(target), shapes.model_shape(draft))


@pytest.mark.parametrize(
    ("name", "settings", "fraction", "held", "tokens", "after_pool", "free"), LOGS, ids=[row[0] for row in LOGS]
)
def test_against_logs(
    name: str, settings: dict[str, Any], fraction: float, held: int, tokens: int, after_pool: float, free: float
) -> None:
    found = _budget(settings, fraction, held)
    assert found.kv_bytes_per_token == 65536
    assert found.kv_tokens == pytest.approx(tokens, rel=0.005)
    assert found.available_bytes and found.weights_bytes_per_gpu is not None and found.margin_bytes is not None
    pool = found.available_bytes - found.weights_bytes_per_gpu - found.kv_tokens * 65536 - found.request_table_bytes
    assert pool / GIB == pytest.approx(after_pool, abs=0.35)
    # what is left at the end: the log's figure is before any activation
    assert (found.margin_bytes + found.activation_bytes) / GIB == pytest.approx(free, abs=0.6)


def test_draft_pool_of_the_log() -> None:
    """The draft's pool comes on top: K and V of 6.43 GiB each for 1684715 tokens."""
    found = _budget(SPECULATIVE, 0.75)
    assert found.draft_kv_bytes_per_token == 8192
    assert found.draft_kv_bytes / GIB == pytest.approx(2 * 6.43, rel=0.01)


def test_the_start_that_died_is_refused() -> None:
    """0.881 left 0.10 GiB free and the server died after its ready line; 0.75 worked."""
    assert (_budget(SPECULATIVE, 0.881).margin_bytes or 0) < budget.DEADLY_MARGIN_BYTES
    assert (_budget(SPECULATIVE, 0.75).margin_bytes or 0) > budget.THIN_MARGIN_BYTES
    largest = _budget(SPECULATIVE, 0.75).largest_fraction
    assert largest and 0.75 < largest < 0.881


def test_largest_fraction_leaves_the_thin_margin() -> None:
    largest = _budget(SPECULATIVE, 0.75).largest_fraction
    at = _budget(SPECULATIVE, largest).margin_bytes
    above = _budget(SPECULATIVE, (largest or 0) + 0.002).margin_bytes
    assert at is not None and above is not None
    assert at >= budget.THIN_MARGIN_BYTES > above


def test_kimi_takes_70_kilobytes_a_token() -> None:
    shape = shapes.model_shape(cases.model(cases.KIMI, 1))
    assert shape is not None
    for tp in (1, 8):
        assert budget.kv_bytes_per_token(shape, "auto", tp) == (512 + 64) * 61 * 2 == 70272
    assert budget.kv_bytes_per_token(shape, "fp8_e4m3", 8) == 35136
    assert budget.kv_bytes_per_token(shape, "fp4_e2m1", 8) == (576 * 61) // 2 + 36 * 61


def test_grouped_heads_are_cut_by_ranks_and_replicated_below_one() -> None:
    shape = shapes.model_shape(cases.model(cases.LLAMA, 1))
    assert shape is not None
    assert budget.kv_bytes_per_token(shape, "auto", 1) == 2 * 8 * 128 * 32 * 2
    assert budget.kv_bytes_per_token(shape, "auto", 4) == 2 * 2 * 128 * 32 * 2
    assert budget.kv_bytes_per_token(shape, "auto", 16) == 2 * 1 * 128 * 32 * 2


def test_documented_box() -> None:
    """The record: 547 GB of weights are about 68 GB a GPU, and 0.88 holds them."""
    settings = {**SPECULATIVE, "tp_size": 8, "mem_fraction_static": 0.88, "cuda_graph_max_bs": 128}
    found = budget.compute(
        settings,
        {},
        shapes.host_shape(cases.host()),
        *(shapes.model_shape(cases.models()[key]) for key in ("target", "draft")),
    )
    # ... by plain division; the parts that every rank holds whole come on top.
    whole = found.replicated_bytes
    absorbed = 61 * (64 // 8) * 512 * (128 + 128) * 2
    assert found.weights_bytes_per_gpu == pytest.approx((547e9 - whole) / 8 + whole + absorbed, rel=0.001)
    assert 70e9 < found.weights_bytes_per_gpu < 72e9
    # The pool is what is left of a fixed share, so the plan's doubts about the weights fall on it alone.
    assert 0.05 < found.kv_uncertainty < 0.10
    # A request of the whole context of 262144 tokens fits just so, or just not.
    assert found.kv_tokens and found.kv_tokens > 262144 * (1 - found.kv_uncertainty)
    assert found.full_length_requests == pytest.approx(1, abs=0.05)
    assert found.smallest_fraction and found.smallest_fraction < 0.88 < (found.largest_fraction or 0)


def test_parts_that_every_rank_holds_whole() -> None:
    """By hand, for Kimi-K2.5: a layer has 7168 x (1536 + 512 + 64) down-projections, 384 x 7168 router weights, two norms; the
    tower 27 MLPs of 2 x 1152 x 4608 and a projector of 4608 x (4608 + 7168)."""
    shape = shapes.model_shape(cases.models()["target"])
    assert shape is not None
    language = 61 * (7168 * 2112 + 384 * 7168 + 2 * 7168)
    tower = 27 * 2 * 1152 * 4608 + 4608 * (4608 + 7168)
    assert budget.replicated_bytes(shape) == (language + tower) * 2
    # On one GPU nothing is held twice.
    alone, kept = budget.weights_on_a_rank(shape, 1, 1, 1)
    assert kept == 0
    assert alone == shape.weights_bytes + budget.absorbed_bytes(shape, 1)


def test_a_dense_model_is_divided_but_for_its_norms() -> None:
    shape = shapes.model_shape(cases.model(TARGET, 8 * GIB))
    assert shape is not None
    assert budget.absorbed_bytes(shape, 8) == 0
    assert budget.weights_on_a_rank(shape, 8, 1, 8)[0] == pytest.approx(GIB, rel=0.001)


def test_a_pool_that_is_told_is_certain_and_a_computed_one_is_not() -> None:
    assert _budget({**SPECULATIVE, "max_total_tokens": 60000}, 0.75).kv_uncertainty == 0.0
    # One rank: only the driver's share is unknown, half a GiB of a pool of 103.
    assert _budget(SPECULATIVE, 0.75).kv_uncertainty == pytest.approx(0.5 / 102.8, abs=0.001)


def test_baseline_chooses_about_078_by_itself() -> None:
    """The record says about 0.78 for the documented box."""
    shape = shapes.model_shape(cases.models()["target"])
    fraction = budget.automatic_fraction({"tp_size": 8, "cuda_graph_max_bs": 128}, 97887, shape)
    assert fraction == pytest.approx(0.78, abs=0.005)


def test_graph_sizes_of_the_logs() -> None:
    assert budget.graph_sizes(BASELINE, 143771) == [1, 2, 4, 8, 12, 16, 24, 32]
    expected = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32]
    assert budget.graph_sizes(SPECULATIVE, 143771) == expected
    # the record's 128 with the engine's silent 48
    assert max(budget.graph_sizes({**SPECULATIVE, "cuda_graph_max_bs": 128}, 97887)) == 48
    assert budget.graph_sizes({**SPECULATIVE, "disable_cuda_graph": True}, 143771) == []


@pytest.mark.parametrize(
    ("mib", "tp", "chunk", "graphs"),
    [
        (16000, 1, 2048, 8),
        (24000, 1, 2048, 24),
        (24000, 8, 2048, 80),
        (46000, 4, 4096, 160),
        (81559, 1, 8192, 256),
        (97887, 8, 8192, 512),
        (143771, 2, 8192, 256),
        (183000, 8, 16384, 512),
    ],
)
def test_defaults_by_memory(mib: int, tp: int, chunk: int, graphs: int) -> None:
    assert budget.default_chunk(mib) == chunk
    assert budget.default_graph_max(mib, tp) == graphs


def test_unset_fraction_is_the_engines_own() -> None:
    found = _budget(BASELINE, None)
    assert found.mem_fraction_static == budget.automatic_fraction(BASELINE, 143771, None)
    assert any("own formula" in text for text in found.assumptions)


def test_request_table_of_an_unlimited_baseline_is_large() -> None:
    """2048 rows of a 262144-token context are 2 GiB of GPU memory that nothing in the log names."""
    found = budget.compute(
        {"tp_size": 8, "cuda_graph_max_bs": 128},
        {},
        shapes.host_shape(cases.host()),
        shapes.model_shape(cases.models()["target"]),
        None,
    )
    assert found.request_table_bytes == 2048 * (262144 + 4) * 4


def test_partial_facts_give_no_numbers_and_no_error() -> None:
    for host, target in (
        (cases.cpu_host(), None),
        (cases.host(), None),
        ({}, cases.models()["target"]),
        ({"gpus": [{}]}, {}),
    ):
        found = budget.compute({"tp_size": 1}, {}, shapes.host_shape(host), shapes.model_shape(target), None)
        assert found.kv_tokens is None and found.margin_bytes is None


def test_symmetric_memory_and_nccl_buffers_count() -> None:
    host, target = shapes.host_shape(cases.host()), shapes.model_shape(cases.models()["target"])
    plain = budget.compute({"tp_size": 8}, {}, host, target, None).workspace_bytes
    nccl = {"NCCL_MAX_NCHANNELS": "16", "NCCL_BUFFSIZE": str(16 * MIB)}
    assert budget.compute({"tp_size": 8}, nccl, host, target, None).workspace_bytes - plain == 512 * MIB
    symmetric = budget.compute({"tp_size": 8, "enable_symm_mem": True}, {}, host, target, None).workspace_bytes
    assert symmetric - plain == 4 * GIB
