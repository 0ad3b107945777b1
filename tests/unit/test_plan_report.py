"""The plan as text: nothing is lost, nothing runs into the next column."""

from __future__ import annotations

import plan_cases as cases
import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import launch_plan
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan_report import WIDTH, plan_report


@pytest.fixture(scope="module")
def plan() -> dict:
    return launch_plan(cases.wanted(), cases.host(), cases.models())


def test_everything_is_in_the_report(plan: dict) -> None:
    text = plan_report(plan, "kimi-1")
    assert text.startswith(f"Plan {plan['hash'][:12]} for kimi-1: profile eagle3-topk1-v2, SGLang 0.5.9")
    squeezed = " ".join(text.split())
    for note in plan["notes"]:
        assert note["setting"].removeprefix("unit.").removeprefix("engine.") in text
        assert " ".join(f"{note['reason']} [{note['source']}]".split()) in squeezed
    for warning in plan["warnings"]:
        assert " ".join(warning["message"].split()) in squeezed
    for deviation in plan["deviations"]:
        assert f"[take back: {deviation['take_back']}]" in squeezed
    assert " ".join(plan["command"]) in squeezed


def test_the_report_fits_a_terminal(plan: dict) -> None:
    # A path or a command line option is never broken; everything else is wrapped.
    too_long = [line for line in plan_report(plan).splitlines() if len(line) > WIDTH and " " in line.strip()]
    assert [line for line in too_long if len(line.strip().split()) > 3] == []


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (None, "Restart: not compared with a running service."),
        ([], "Restart: no, the running process follows this plan."),
        (["the unit is inactive"], "Restart: yes, the unit is inactive."),
    ],
)
def test_restart_verdict(plan: dict, reasons: list[str] | None, words: str) -> None:
    assert plan_report(plan, "h", reasons).splitlines()[-1] == words


def test_what_changes_in_the_unit_is_listed(plan: dict) -> None:
    lines = plan_report(plan, "h", [], {**plan["unit"], "memory_max": "21G"}).splitlines()
    assert f"  memory_max 21G -> {plan['unit']['memory_max']} (acts at once, without a restart)" in lines
    assert lines[-1] == "Restart: no, the running process follows this plan."
    assert "last good deployment" not in plan_report(plan, "h", [], plan["unit"])
