# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""The optimisation history of a server: what is on record of the documented box, then one dated entry for each deployment.

Only deployments that served are entered, the same one once, and each time that the operator went back to an earlier one; what was
measured later is added to the last entry. Entries are never changed otherwise, and what people write between them stays.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import benchmark
from .health_text import scrub
from .record import LAST, PREVIOUS, RecordError, Records, document
from .service import difference

HEAD = """# History of this server

How its configuration became what it is. The first part is the record of the documented box; below it stands one entry for each
deployment on this host and for each rollback, added by `gpuserve.sglang`. What you write between the entries stays.

## On record: the documented box

tok/s of single-stream output unless another concurrency (C) is named.

- EAGLE-3 first ran at 54.1, against a baseline of about 82 (CUDA 12.8, topk 4, no overlap).
- Lowering the largest CUDA graph batch from 512 to 128 gave the baseline 9 %.
- The NCCL settings for PCIe: about 63 to 89.
- CUDA 13 with the SM120 patches (all-reduce fusion, symmetric memory) took EAGLE-3 to 96.1.
- topk 4 on the v1 path: -12.7 % single stream and -54.5 % at C=30 against the baseline, because a tree of 16 draft tokens
  multiplies the all-reduce of the verify pass.
- topk 1 with spec v2: -6.4 % at C=1, +10.1 % at C=30, level above.
- topk 2 cannot run on spec v2 and was not tried on v1: the configuration was frozen there.
"""
_MARK = re.compile(r"^<!-- deployment: (\{.*\}) -->$", re.MULTILINE)
_MEASURED = re.compile(r"<!-- measured: begin -->\n.*?<!-- measured: end -->\n", re.DOTALL)


def last_entry(text: str) -> dict[str, Any] | None:
    """The mark of the last entry; None without one, or when it was damaged."""
    marks = _MARK.findall(text)
    try:
        found = json.loads(marks[-1]) if marks else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _number(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) and not isinstance(value, bool) else "-"


def _levels(measured: Mapping[str, Any]) -> list[str]:
    how = benchmark.how(measured)
    lines = [f"Measured {measured['when']} ({how}):", "", "| C | output tok/s | acceptance length |", "|---|---|---|"]
    for level in measured["levels"]:
        shown = [_number(level.get("output_tok_s"), 1), _number(level.get("accept_length"), 2)]
        lines.append(f"| {level['concurrency']} | {' | '.join(shown)} |")
    return lines


def measured_block(measured: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> str:
    """What was measured with this very plan; only the markers otherwise."""
    lines = ["<!-- measured: begin -->"]
    if measured and measured.get("plan_hash") == plan["hash"]:
        # The file lies in the service's own folder: one that cannot be read is none, as in the handbook.
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            lines += _levels(measured)
    return "\n".join([*lines, "<!-- measured: end -->"]) + "\n"


def changes(before: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> list[str]:
    """Settings that came and went against the deployment before, without secrets."""
    if before is None:
        return []
    lines = [
        line
        for line in difference(before["command"], before["env"], plan["command"], plan["env"]).splitlines()
        if line not in ("--- running", "+++ planned") and not line.startswith("@@")
    ]
    for key in sorted({*before["unit"], *plan["unit"]}):
        old, new = before["unit"].get(key), plan["unit"].get(key)
        if old != new:
            lines += [
                f"{sign}unit.{key}={scrub(str(value))}" for sign, value in (("-", old), ("+", new)) if value is not None
            ]
    return lines


def _named(plan: Mapping[str, Any]) -> str:
    return f"`{str(plan['hash'])[:12]}` (profile `{plan['profile']}`)"


def _plain(text: str) -> str:
    """What people say, as one line that cannot pass for a mark of this file."""
    return scrub(" ".join(text.split())).replace("<!--", "<! --").replace("-->", "-- >")


def went_back(plan: Mapping[str, Any], rollback: Mapping[str, Any]) -> list[str]:
    """From what to what the operator went back, and why."""
    left, found = rollback.get("left") or None, [_plain(str(text)) for text in rollback.get("found") or []]
    was = _named(left) if left else f"what ran, which was not on record as good ({'; '.join(found) or 'not known why'})"
    reason = _plain(str(rollback.get("reason") or "")) or "not said (`sglang_service_rollback_reason`)"
    return [f"The operator went back (`playbooks/rollback.yml`) from {was} to {_named(plan)}. Why: {reason}.", ""]


def entry(
    plan: Mapping[str, Any],
    when: str,
    mark: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    seconds_to_ready: float | None,
    driver: str,
    measured: Mapping[str, Any] | None,
    rollback: Mapping[str, Any] | None = None,
    above: Mapping[str, Any] | None = None,
) -> str:
    """One entry: of a deployment, or of a rollback to one. ``above`` is the mark of the entry above it; empty when damaged."""
    release = f", release `{mark['release']}`" if mark["release"] else ""
    ready = f" Ready after {seconds_to_ready:.1f} s." if seconds_to_ready is not None else ""
    # A rollback does not look at the host.
    loaded = "" if rollback is not None and not driver else f", driver {driver or 'not known'}"
    lines = [
        "",
        f"## {when}: {'back to ' if rollback is not None else ''}plan `{str(plan['hash'])[:12]}`, profile `{plan['profile']}`",
        "",
        f"<!-- deployment: {json.dumps(mark, sort_keys=True)} -->",
        "",
        *(went_back(plan, rollback) if rollback is not None else []),
        f"SGLang {plan['engine_version']}{release}{loaded}, {len(plan['patches'])} patches.{ready}",
        "",
    ]
    diff, same = changes(before, plan), bool(above) and (above or {}).get("process") == plan["process_hash"]
    if rollback is None and same:
        # The record of the deployment before is this one: they are kept by the process that they start.
        was = str((above or {}).get("plan"))[:12]
        lines += [f"Command and environment are those of plan `{was}` above: only settings of the unit changed.", ""]
    elif before is None and above is None:
        lines += ["The first deployment on record here.", ""] if rollback is None else []
    elif before is None:
        lines += (
            ["The deployment before is not on record, so what changed is not known.", ""] if rollback is None else []
        )
    elif diff:
        lines += [f"Against the deployment `{str(before['hash'])[:12]}`:", "", "```diff", *diff, "```", ""]
    else:
        lines += [f"The same settings as the deployment `{str(before['hash'])[:12]}`.", ""]
    return "\n".join(lines) + "\n" + measured_block(measured, plan)


def updated(
    text: str,
    plan: Mapping[str, Any],
    state_dir: Path,
    when: str,
    driver: str = "",
    rollback: Mapping[str, Any] | None = None,
) -> str:
    """The history with what is missing of it. ``text`` is empty for a new one, ``when`` a date for people.

    ``rollback``: the operator went back to ``plan``; ``left`` is the plan of the deployment that was left (empty when that was not on
    record as good; ``found`` then says what was found), ``reason`` the operator's own words. A history is not begun by it.
    """
    if rollback is not None and not text:
        return text
    new = text or HEAD
    records = Records(state_dir)
    try:
        last, previous = records.read(LAST), records.read(PREVIOUS)
    except RecordError:
        last = previous = None
    if last is None or last["plan"].get("hash") != plan["hash"]:
        # Not what serves: a deployment that was only planned is no part of the history.
        return new
    match = re.search(r"/releases/([0-9a-f]+)/", plan["command"][0])
    mark = {"plan": plan["hash"], "process": plan["process_hash"], "release": match.group(1) if match else ""}
    measured = document(state_dir / "benchmarks" / "latest.json")[0]
    start = document(state_dir / "last-start.json")[0]
    found = last_entry(new)
    before = previous["plan"] if previous else None
    if rollback is not None:
        # One entry for each time: a rollback always ends with a start of its own.
        mark["rollback"] = str(start.get("invocation_id") or start.get("when") or when)
        before = rollback.get("left") or None
        missing = found is None or found.get("rollback") != mark["rollback"]
    else:
        missing = found is None or found.get("plan") != plan["hash"]
    if missing:
        seconds = start.get("seconds_to_ready") if start.get("plan_hash") == plan["hash"] else None
        above = found if found is not None else ({} if "<!-- deployment:" in new else None)
        ready = float(seconds) if isinstance(seconds, (int, float, str)) and seconds != "" else None
        return new.rstrip("\n") + "\n" + entry(plan, when, mark, before, ready, driver, measured, rollback, above)
    blocks = list(_MEASURED.finditer(new))
    if blocks and measured.get("plan_hash") == plan["hash"]:
        at = blocks[-1]
        new = new[: at.start()] + measured_block(measured, plan) + new[at.end() :]
    return new
