"""The KV pool that the engine reports, against the plan's: figures that were seen on a real GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import Memory, judge_pool, memory_from_info

FIXTURES = Path(__file__).parent / "fixtures" / "health"
# Seen on one H200: the same server alone, and with 101 GiB held by another process.
ALONE, HELD = 1_684_715, 449_633


def test_memory_of_the_real_engine() -> None:
    info = json.loads((FIXTURES / "cpu-0.5.9-server-info.json").read_text())
    assert info["version"] == "0.5.9"
    assert memory_from_info(info) == Memory(4096, 0.0, 0.0, 0.0)


def test_nothing_but_memory_is_taken_over() -> None:
    info = {"api_key": "hunter2", "max_total_num_tokens": 7, "internal_states": [{"api_key": "hunter2"}]}
    memory = memory_from_info(info)
    assert memory.kv_tokens == 7
    assert "hunter2" not in json.dumps(memory.public())


def test_the_smallest_rank_counts() -> None:
    states = [{"memory_usage": {"token_capacity": tokens, "kvcache": 1.5}} for tokens in (900, 100, 800)]
    assert memory_from_info({"max_total_num_tokens": 900, "internal_states": states}) == Memory(100, 1.5)


@pytest.mark.parametrize(
    "info", [None, [], "text", {}, {"internal_states": None}, {"internal_states": [None, {"memory_usage": 3}]},
             {"max_total_num_tokens": "many"}, {"max_total_num_tokens": 0}, {"max_total_num_tokens": True}],
)  # fmt: skip
def test_an_engine_that_does_not_say(info) -> None:
    assert memory_from_info(info).kv_tokens is None


def test_a_gpu_partly_held_by_others_is_found() -> None:
    pool = judge_pool(HELD, ALONE, 0.10)
    assert (pool.ok, pool.judged) == (False, True)
    assert pool.text == "the KV pool holds 449 633 tokens, 27% of the 1 684 715 planned (at least 90% expected)"
    assert "nvidia-smi" in pool.hint and "sglang_service_kv_tolerance" in pool.hint


@pytest.mark.parametrize(("seen", "ok"), [(900, True), (899, False), (1000, True), (1101, True), (5000, True)])
def test_the_tolerance_is_a_lower_limit_only(seen: int, ok: bool) -> None:
    assert judge_pool(seen, 1000, 0.10).ok is ok


def test_more_than_planned_is_said() -> None:
    assert judge_pool(1500, 1000, 0.1).text == "KV pool 1 500 tokens, 1 000 planned (50% more)"
    assert judge_pool(1050, 1000, 0.1).text == "KV pool 1 050 tokens, 1 000 planned"


@pytest.mark.parametrize("planned", [None, 0])
def test_without_a_plan_nothing_is_judged_and_the_text_says_so(planned: int | None) -> None:
    pool = judge_pool(4096, planned, 0.1)
    assert (pool.ok, pool.judged) == (True, False)
    assert "not judged: the plan does not know" in pool.text


def test_a_silent_engine_is_not_judged_either() -> None:
    pool = judge_pool(None, 1000, 0.1)
    assert (pool.ok, pool.judged, pool.seen) == (True, False, None)
    assert "not judged: the engine does not say" in pool.text
