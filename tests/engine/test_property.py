"""Thousands of drawn deployments: each plan passes the real parser and is understood as it was meant."""

from __future__ import annotations

import json
from typing import Any

import plan_strategies
from hypothesis import HealthCheck, event, given, settings


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan_strategies.wanteds(), plan_strategies.hosts(), plan_strategies.models())
def test_real_parser_takes_every_plan(engine: Any, wanted: Any, host: Any, models: Any) -> None:
    plan = plan_strategies.plan_or_problems(wanted, host, models)
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
