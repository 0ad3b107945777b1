"""Planning one host takes under 50 ms of Python; reported beside a yardstick of the same run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "collections"), str(ROOT / "tests" / "unit")]

import plan_cases as cases  # noqa: E402
from ansible_collections.gpuserve.sglang.plugins.module_utils import flags  # noqa: E402
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import launch_plan  # noqa: E402

BUDGET_SECONDS = 0.050


def _best(call: Callable[[], Any], times: int) -> float:
    """The fastest of some runs, in seconds of the processor: a loaded machine does not lengthen them."""
    best = float("inf")
    for _ in range(times):
        begin = time.process_time()
        call()
        best = min(best, time.process_time() - begin)
    return best


def _cold() -> dict[str, Any]:
    """A plan with nothing cached, as the first host of a play gets it."""
    flags.load.cache_clear()
    return launch_plan(cases.wanted(), cases.host(), cases.models())


def test_plan_speed(record_property: Callable[[str, object], None]) -> None:
    schema = (flags.DATA / "flags-0.5.9.json").read_text(encoding="utf-8")
    yardstick = _best(lambda: json.loads(schema), 5)
    cold = _best(_cold, 5)
    warm = _best(lambda: launch_plan(cases.wanted(), cases.host(), cases.models()), 20)
    for name, value in (("cold", cold), ("warm", warm)):
        record_property(f"plan_{name}_ms", round(value * 1000, 3))
        record_property(f"plan_{name}_to_json_load", round(value / yardstick, 2))
        print(
            f"plan, {name}: {value * 1000:.2f} ms, {value / yardstick:.2f} x reading the flag schema "
            f"({yardstick * 1000:.2f} ms)"
        )
    assert cold < BUDGET_SECONDS
    assert warm < BUDGET_SECONDS / 5
