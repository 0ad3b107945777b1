"""Tuning's thinking: the order, what cannot be tried, what the rounds say together, and which profile to take."""

from __future__ import annotations

import itertools
from typing import Any

import plan_cases as cases
import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.filter.launch_plan import launch_plan
from ansible_collections.gpuserve.sglang.plugins.filter.tune_order import tune_order
from ansible_collections.gpuserve.sglang.plugins.filter.tune_report import tune_report
from ansible_collections.gpuserve.sglang.plugins.module_utils import benchmark, documented, tuning

RECORDED = [row["profile"] for row in documented.record()["benchmark"]["rows"]]
METHOD = {
    "levels": [1, 30], "requests": 30, "fill": False, "warmup": 5, "output_tokens": 200, "repeats": 2, "seed": 1,
    "max_prompt_chars": 0, "level_timeout": 900, "prompts": "67 (abc)",
}  # fmt: skip


def plan(profile: str, **more: Any) -> dict[str, Any]:
    """A real plan for the documented box."""
    wanted = cases.wanted(profile=profile, **more)
    return dict(launch_plan(wanted, host=cases.host(), models=cases.models(), report_errors=True))


PLANS = {name: plan(name) for name in RECORDED}


def result(profile: str, single: list[float | None], many: list[float | None], failed: int = 0) -> dict[str, Any]:
    runs = []
    for level, rates in ((1, single), (30, many)):
        for rate in rates:
            repeat = {
                "requests": 30, "completed": 30 - failed, "failed": failed, "seconds": 1.0, "output_tok_s": rate, "output_tokens": 6000,
                "ttft_ms": {"p50": 1.0, "p99": 2.0}, "itl_ms": {"p50": 1.0, "p99": 2.0}, "accept_length": None, "other_requests": 0, "errors": {},
            }  # fmt: skip
            runs.append((level, repeat, {"ttfts": [0.1], "itls": [0.01]}))
    about = {"hash": "a" * 64, "profile": profile, "engine_version": "0.5.9"}
    return benchmark.result("2026-01-02T03:04:05Z", about, METHOD, runs)


def test_the_records_configurations_can_be_planned_on_the_documented_box_and_differ() -> None:
    able, refused = tuning.candidates(PLANS)
    assert list(able) == RECORDED
    assert refused == {}


def test_what_the_planner_refuses_and_what_is_the_same_is_not_tried() -> None:
    same = {"same": {"base": "baseline"}}
    plans = {"baseline": PLANS["baseline"], "same": plan("same", profiles=same), "eagle4": plan("eagle4")}
    found = tune_order(plans, 1, 1)
    assert [step["profile"] for step in found["steps"]] == ["baseline"]
    assert found["refused"]["same"] == "on this host it starts the same process as baseline"
    assert "eagle4" in found["refused"]["eagle4"]
    with pytest.raises(AnsibleFilterError, match="expected a dictionary"):
        tune_order([])


@pytest.mark.parametrize("seed", range(20))
def test_each_round_has_every_profile_and_no_profile_runs_twice_in_a_row(seed: int) -> None:
    steps = tuning.order(RECORDED, 3, seed)
    assert steps == tuning.order(RECORDED, 3, seed)
    for number in (1, 2, 3):
        assert sorted(step["profile"] for step in steps if step["round"] == number) == sorted(RECORDED)
    assert all(one["profile"] != other["profile"] for one, other in itertools.pairwise(steps))


def test_the_order_is_shuffled() -> None:
    assert len({tuple(step["profile"] for step in tuning.order(RECORDED, 1, seed)) for seed in range(20)}) > 5
    assert [step["profile"] for step in tuning.order(["one"], 2, 1)] == ["one", "one"]


def test_rounds_are_merged_and_their_difference_is_noise() -> None:
    merged = tuning.merge([result("a", [80.0, 82.0], [700.0, 700.0]), result("a", [90.0, 88.0], [700.0, 700.0])])
    first, second = merged["levels"]
    assert first["output_tok_s"] == 85.0
    assert first["noise"] == pytest.approx(5 / 85, abs=1e-4)
    assert second["noise"] == 0
    assert first["requests"] == 120
    assert merged["method"]["repeats"] == 4
    assert first["ttft_ms"]["p50"] == 100.0


def test_risk_counts_what_can_go_wrong() -> None:
    levels = {name: tuning.risk(PLANS[name])["level"] for name in RECORDED}
    assert levels["eagle3-topk1-v2"] == "high"
    assert tuning._RISKS.index(levels["baseline"]) < tuning._RISKS.index(levels["eagle3-topk1-v2"])
    assert any("speculates" in reason for reason in tuning.risk(PLANS["eagle3-topk4-v1"])["reasons"])
    assert not any("spec v2" in reason for reason in tuning.risk(PLANS["eagle3-topk4-v1"])["reasons"])


def advice(results: list[dict[str, Any]], serving: str = "", objective: str = "both", **more: Any) -> dict[str, Any]:
    return tune_report(results, PLANS, serving=serving, objective=objective, **more)


RECORD_RUN = [
    result("baseline", [92.7, 92.6], [689.4, 689.0]),
    result("eagle3-topk1-v2", [86.8, 86.7], [759.3, 759.0]),
    result("eagle3-topk4-v1", [80.9, 80.8], [313.3, 313.0]),
]


def test_the_records_own_figures_lead_to_its_choice() -> None:
    found = advice(RECORD_RUN, serving="baseline")
    chosen = {aim: found["recommended"][aim]["profile"] for aim in tuning.OBJECTIVES}
    assert chosen == {"single": "baseline", "throughput": "eagle3-topk1-v2", "both": "baseline"}
    # 6.4 % less here, 10.1 % more there: even within what two runs of each can tell, so the one that serves stays.
    assert "within the noise of eagle3-topk1-v2" in found["recommended"]["both"]["why"]
    assert "it serves already" in found["recommended"]["both"]["why"]
    assert "outside the noise" in found["recommended"]["throughput"]["why"]


def test_within_the_noise_the_serving_one_stays_unless_it_is_riskier() -> None:
    even = [result("baseline", [90.0, 92.0], [700.0, 710.0]), result("eagle3-topk1-v2", [91.0, 93.0], [705.0, 715.0])]
    assert advice(even, serving="baseline")["profile"] == "baseline"
    assert advice(even, serving="eagle3-topk1-v2")["profile"] == "baseline"
    both_high = [
        result("eagle3-topk4-v1", [90.0, 92.0], [700.0, 710.0]),
        result("eagle3-topk1-v2", [91.0, 93.0], [705.0, 715.0]),
    ]
    assert advice(both_high, serving="eagle3-topk4-v1")["profile"] == "eagle3-topk4-v1"
    assert advice(both_high, serving="other")["profile"] == "eagle3-topk1-v2"


def test_a_profile_with_failed_requests_is_shown_and_never_recommended() -> None:
    found = advice(
        [result("baseline", [90.0], [700.0]), result("eagle3-topk1-v2", [99.0], [990.0], failed=1)], serving="baseline"
    )
    assert found["profile"] == "baseline"
    assert "eagle3-topk1-v2" in found["text"]


@pytest.mark.parametrize("objective", tuning.OBJECTIVES)
def test_a_profile_that_failed_in_one_round_is_shown_and_never_recommended(objective: str) -> None:
    results = [result("baseline", [90.0], [700.0]), result("eagle3-topk1-v2", [99.0], [990.0])]
    failures = {"eagle3-topk1-v2": "failed in round 2: CUDA out of memory"}
    found = advice(results, serving="eagle3-topk1-v2", objective=objective, failures=failures)
    assert {aim: of["profile"] for aim, of in found["recommended"].items()} == dict.fromkeys(
        tuning.OBJECTIVES, "baseline"
    )
    assert yaml.safe_load(found["file"]) == {"deployment_profile": "baseline"}
    # Its figures stay, with what became of it; "not measured" would be a lie.
    (row,) = [line for line in found["text"].splitlines() if line.startswith("eagle3-topk1-v2 (serves, failed)")]
    assert "99.0" in row and "990.0" in row
    assert "\nnever recommended: eagle3-topk1-v2: failed in round 2: CUDA out of memory\n" in found["text"]
    assert "not measured" not in found["text"]
    assert [document.get("failure") for document in found["measured"]] == [None, *failures.values()]
    assert "the only one measured without a failure" in found["recommended"][objective]["why"]


def test_when_every_measured_profile_failed_once_none_is_recommended() -> None:
    found = advice([result("baseline", [90.0], [700.0])], failures={"baseline": "failed in round 2: died"})
    assert found["profile"] is None and found["file"] == ""
    assert "no recommendation (no profile came up each time" in found["text"]


def test_nothing_measured_recommends_nothing() -> None:
    found = advice([], failures={"baseline": "failed in round 1: died"})
    assert found["profile"] is None
    assert found["file"] == ""
    assert "not measured: baseline: failed in round 1: died" in found["text"]
    with pytest.raises(AnsibleFilterError, match="objective is 'fast'"):
        advice(RECORD_RUN, objective="fast")


def test_the_file_is_what_the_next_deployment_takes() -> None:
    found = advice(RECORD_RUN, serving="baseline", objective="throughput", host="kimi-1")
    assert yaml.safe_load(found["file"]) == {"deployment_profile": "eagle3-topk1-v2"}
    assert "Tuning of kimi-1, 2026-01-02T03:04:05Z" in found["file"]
    assert "759.1" in found["file"] or "759.2" in found["file"]
    assert all(line.startswith(("#", "deployment_profile:", "---")) for line in found["file"].splitlines())
