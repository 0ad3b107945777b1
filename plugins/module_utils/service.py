"""What runs now: the unit, its main process, and the plan that it was started with.

The unit carries the hash of its plan in the environment (`PLAN_VARIABLE`). The running process therefore tells which
plan it follows, whatever has happened to the files since: an interrupted play, or an edit by hand, is seen.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .health import Runner, observe_unit, run_command, scrub

PLAN_VARIABLE = "GPUSERVE_PLAN"


def process_started(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Start of a process in seconds since the epoch; None when it is gone."""
    try:
        stat = (proc / str(pid) / "stat").read_text()
        boot = next(
            float(line.split()[1]) for line in (proc / "stat").read_text().splitlines() if line.startswith("btime")
        )
    except (OSError, StopIteration):
        return None
    ticks = float(stat.rpartition(")")[2].split()[19])
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def process_words(pid: int, file: str, proc: Path = Path("/proc")) -> list[str]:
    """``cmdline`` or ``environ`` of a process as words; empty when it is gone or may not be read."""
    try:
        raw = (proc / str(pid) / file).read_bytes()
    except OSError:
        return []
    return [word.decode("utf-8", "replace") for word in raw.split(b"\0") if word]


def read_service(
    unit: str, newer: Sequence[str] = (), run: Runner = run_command, proc: Path = Path("/proc")
) -> dict[str, Any]:
    """State of ``unit`` and of its main process; see RETURN of the module service_info.

    ``newer`` are paths; those that changed after the process started come back in ``newer``.
    """
    status = observe_unit(unit, run)
    pid = status.main_pid
    environment = dict(word.split("=", 1) for word in process_words(pid, "environ", proc) if "=" in word) if pid else {}
    started = process_started(pid, proc) if pid else None
    changed = []
    for path in newer:
        try:
            # A second of grace: the start of a process is known to a hundredth, that of a boot to a second.
            if started is not None and os.stat(path).st_mtime > started + 1:
                changed.append(path)
        except OSError:
            continue
    return {
        "unit": unit,
        "error": status.error,
        "exists": status.load_state == "loaded",
        "active_state": status.active_state,
        "sub_state": status.sub_state,
        "main_pid": pid,
        "invocation_id": status.invocation_id,
        "n_restarts": status.n_restarts,
        "started": started,
        "command": [scrub(word) for word in process_words(pid, "cmdline", proc)] if pid else [],
        "plan_hash": environment.get(PLAN_VARIABLE, ""),
        "newer": changed,
    }
