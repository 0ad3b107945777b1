"""Thousands of drawn deployments: each plan passes the real parser and is understood as it was meant."""

from __future__ import annotations

import json
from typing import Any

import plan_cases as cases
import plan_strategies
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from test_real_parser import construct, model_paths

__all__ = ["model_paths"]


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(deployment=plan_strategies.deployments())
def test_real_parser_takes_every_plan(engine: Any, deployment: tuple[Any, Any, Any]) -> None:
    plan = plan_strategies.plan_or_problems(*deployment)
    event("plan" if plan else "error")
    if plan is None or "--speculative-disable-batch-threshold" in plan["args"]:
        return
    answer = engine.ask("argv", argv=plan["argv"])
    assert answer["ok"], answer["error"]
    for option, value in plan["args"].items():
        flag = plan_strategies.SCHEMA.by_option[option]
        understood = answer["fields"][flag.field or flag.dest]
        meant = json.loads(json.dumps(value))
        if flag.nargs in ("+", "*") and not isinstance(meant, list):
            meant = [meant]
        if isinstance(meant, (dict, list)) and isinstance(understood, str):
            understood = json.loads(understood)
        if isinstance(meant, str) and not isinstance(understood, str) and flag.type in ("json", "json_list"):
            meant = json.loads(meant)
        assert understood == meant, option


GPU_DEPLOYMENTS = st.tuples(
    st.sampled_from(["eagle3-topk1-v2", "eagle3-topk4-v1", "baseline"]),
    plan_strategies.interesting,
    st.integers(0, 3),
    st.sampled_from([cases.host(), cases.h200()]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(deployment=GPU_DEPLOYMENTS)
def test_engine_constructs_every_gpu_plan(engine: Any, model_paths: str, deployment: tuple[Any, ...]) -> None:
    """Level 2: the engine builds and checks its arguments, and changes none of those that the plan sets."""
    profile, chosen, keep, host = deployment
    wanted = cases.wanted(profile=profile, overrides={key: chosen[key] for key in sorted(chosen)[:keep]})
    plan = plan_strategies.plan_or_problems(wanted, host, cases.models())
    if plan is None or plan["args"].get("--device") == "cpu":
        event("no plan")
        return
    event("plan")
    answer, meant = construct(engine, plan, host, model_paths)
    assert answer["ok"], (answer["error"], wanted["profile"], wanted["overrides"])
    for field, value in meant.items():
        assert answer["fields"][field] == value, (field, wanted["profile"], wanted["overrides"])
