"""Whatever is wanted, wherever: a plan that is sound, or an error that names the variable, the value and the way
out."""

from __future__ import annotations

import json
from typing import Any

import plan_strategies
from ansible_collections.gpuserve.sglang.plugins.module_utils.settings import CONTROL
from hypothesis import HealthCheck, event, given, settings


@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(deployment=plan_strategies.deployments())
def test_plan_or_good_error(deployment: tuple[Any, Any, Any]) -> None:
    wanted, host, models = deployment
    plan = plan_strategies.plan_or_problems(wanted, host, models)
    event("plan" if plan else "error")
    if plan is None:
        return
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan
    words = [*plan["command"], *plan["env"], *plan["env"].values(), *map(str, plan["unit"].values())]
    assert not [word for word in words if not isinstance(word, str) or CONTROL.search(word)]
    assert plan["command"][3:] == plan["argv"]
    # nothing that was asked for is dropped or changed silently
    schema = plan_strategies.SCHEMA
    for key in ("overrides", "extra_args"):
        for name, value in (wanted.get(key) or {}).items():
            flag = schema.find(name)
            assert flag is not None, name
            rendered = plan["args"].get(flag.spelling)
            if flag.nargs in ("+", "*") and value is not None and not isinstance(value, list):
                value = [value]
            assert rendered == (None if value is None or value is False else value), (name, value)
    noted = {note["setting"] for note in plan["notes"]}
    assert {*plan["args"], *plan["env"], *(f"unit.{key}" for key in plan["unit"])} <= noted
