"""What runs now: the unit, its main process, and the plan that it was started with.

The unit carries the hash of its plan in the environment (`PLAN_VARIABLE`). The running process therefore tells which
plan it follows, whatever has happened to the files since: an interrupted play, or an edit by hand, is seen.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .health import Runner, observe_unit, run_command, scrub
from .settings import AT_START

PLAN_VARIABLE = "GPUSERVE_PLAN"


def boot_time(proc: Path = Path("/proc")) -> float:
    """When the host was booted, in seconds since the epoch. Raises OSError when the kernel does not say."""
    for line in (proc / "stat").read_text().splitlines():
        if line.startswith("btime"):
            return float(line.split()[1])
    raise OSError(f"{proc}/stat has no btime")


def process_started(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Start of a process in seconds since the epoch; None when it is gone."""
    try:
        # A process may call itself by any bytes.
        stat = (proc / str(pid) / "stat").read_text(errors="replace")
        boot = boot_time(proc)
    except OSError:
        return None
    ticks = float(stat.rpartition(")")[2].split()[19])
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def process_words(pid: int, file: str, proc: Path = Path("/proc")) -> list[str]:
    """``cmdline`` or ``environ`` of a process as words; empty when it is gone or may not be read.

    Empty words count, but not at the end: a process that changed its title leaves zeros there.
    """
    try:
        raw = (proc / str(pid) / file).read_bytes()
    except OSError:
        return []
    words = raw.rstrip(b"\0")
    return [word.decode("utf-8", "replace") for word in words.split(b"\0")] if words else []


def started_after(pid: int, paths: Sequence[Path], proc: Path = Path("/proc")) -> bool:
    """Whether a process was started when these files were in place already.

    By a second at least: its start is known to a hundredth, that of the boot to a second.
    """
    began = process_started(pid, proc) if pid else None
    try:
        return began is not None and all(path.stat().st_mtime < began - 1 for path in paths)
    except OSError:
        return False


def installed_plan(unit: str, unit_file: Path, settings_dir: Path) -> dict[str, Any] | None:
    """The plan beside the settings of a unit, in short; None without one.

    ``error`` says why it is not that of the unit: a play that was killed between the two has written only one of them.
    """
    path = settings_dir / f"{unit.removesuffix('.service')}.plan.json"
    try:
        plan, text = json.loads(path.read_text()), unit_file.read_text()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        plan, text, why = {}, "", f"{path} and {unit_file} cannot be read ({error})"
    else:
        why = "" if isinstance(plan, dict) else f"{path} holds {type(plan).__name__}"
        plan = plan if isinstance(plan, dict) else {}
    found = re.search(rf"^Environment={PLAN_VARIABLE}=(\w*)", text, re.MULTILINE)
    carried = found[1] if found else ""
    if not why and carried != plan.get("process_hash"):
        why = (
            f"{unit_file} follows the plan {carried[:12] or 'none'}, and {path} is {str(plan.get('process_hash'))[:12]}"
        )
    return {key: plan.get(key) for key in ("hash", "process_hash", "profile", "endpoint", "unit")} | {"error": why}


def start_reasons(now: Mapping[str, Any], plan_hash: str, changes: Sequence[str] = ()) -> list[str]:
    """Why the service must be started or restarted to follow the plan of ``plan_hash``; empty when it need not be.

    ``now`` is what :func:`read_service` returned, ``changes`` what :func:`setting_changes` did: a process that claims to follow
    the plan and has other settings was started from a unit that somebody edited. Text for people: what was found, what is wanted.
    """
    if now["active_state"] not in ("active", "activating", "reloading") or not now["main_pid"]:
        return [f"the unit is {now['active_state'] or 'unknown to systemd'}"]
    reasons = []
    if now["plan_hash"] != plan_hash:
        reasons.append(
            f"the running process follows another plan ({now['plan_hash'][:12] or 'none'}, wanted {plan_hash[:12]})"
        )
    elif changes and not now["drop_ins"]:
        # A drop-in that stays would change them again: a restart for it would never be the last one.
        reasons.append(
            f"the running process has other settings than its plan ({'; '.join(changes)}): its unit was edited"
        )
    if now["newer"]:
        reasons.append(f"the release changed after the process started ({', '.join(now['newer'])})")
    return reasons


def without_secrets(command: Sequence[str]) -> list[str]:
    """A command line without the values of options that hold a secret, in the next word or after an equals sign."""
    shown: list[str] = []
    secret_next = False
    for word in command:
        name, equals, _value = word.partition("=")
        # Asked with a harmless value, since a secret may hold what ends a word in running text.
        secret = name.startswith("--") and scrub(f"{name} x") != f"{name} x"
        if secret_next and not secret:
            shown.append("***")
        elif secret and equals:
            shown.append(f"{name}=***")
        else:
            shown.append(scrub(word))
        secret_next = secret and not equals
    return shown


def _settings(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """A command line and its environment, one setting a line and without secrets."""
    lines: list[list[str]] = [[]]
    for word in without_secrets(command):
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(word)
    options = [" ".join(line) for line in lines if line]
    return [*options, *(scrub(f"{name}={value}") for name, value in sorted(environment.items()))]


def difference(
    command: Sequence[str], environment: Mapping[str, str], wanted: Sequence[str], wanted_environment: Mapping[str, str]
) -> str:
    """What runs against what is wanted, as a unified diff of one setting a line; empty when equal.

    A space parts the sign from an option: ``- --port 1`` instead of ``---port 1``.
    """
    lines = difflib.unified_diff(
        _settings(command, environment),
        _settings(wanted, wanted_environment),
        "running",
        "planned",
        n=0,
        lineterm="",
    )
    return "\n".join(re.sub(r"^([-+])(?=--[^ ])", r"\1 ", line) for line in lines)


def setting_changes(
    command: Sequence[str], environment: Mapping[str, str], wanted: Sequence[str], wanted_environment: Mapping[str, str]
) -> list[str]:
    """Each setting in which two command lines and environments differ, without secrets: ``--tp-size 4 -> 8``."""

    def table(lines: Sequence[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for place, line in enumerate(lines):
            name, __, value = line.partition(" " if line.startswith("--") else "=")
            if place == 0 and not line.startswith("--"):
                name, value = "program", line
            # An option that is given twice counts with both values.
            found[name] = f"{found[name]}, {value}" if name in found else value
        return found

    before, after = table(_settings(command, environment)), table(_settings(wanted, wanted_environment))
    changes = []
    for name in dict.fromkeys([*before, *after]):
        if name not in after:
            changes.append(" ".join(filter(None, [name, before[name], "is taken away"])))
        elif name not in before:
            changes.append(" ".join(filter(None, [name, after[name], "is new"])))
        elif before[name] != after[name]:
            changes.append(f"{name} {before[name]} -> {after[name]}")
    return changes


#: Settings for the next start, or for another unit.
_LATER = (*AT_START, "after", "wants", "name")
_LINES_SHOWN = 4


def unit_changes(before: Mapping[str, Any], wanted: Mapping[str, Any], running: bool = True) -> list[str]:
    """Each setting in which the unit on record and the wanted one differ: ``memory_max 21G -> 4G``; empty without a record.

    With ``running`` it says which of them systemd applies to the running service as soon as it has read the unit.
    """
    changes = []
    for key in dict.fromkeys([*before, *wanted]) if before else ():
        old, new = before.get(key), wanted.get(key)
        if isinstance(old, (list, tuple)) or isinstance(new, (list, tuple)):
            gone, come = [str(item) for item in old or ()], [str(item) for item in new or ()]
            words = [f"-{item}" for item in gone if item not in come] + [
                f"+{item}" for item in come if item not in gone
            ]
            more = f" and {len(words) - _LINES_SHOWN} more" if len(words) > _LINES_SHOWN else ""
            text = " ".join(words[:_LINES_SHOWN]) + more
        else:
            # JSON of older records holds numbers as text.
            shown = ["not set" if value is None else str(value) for value in (old, new)]
            text = " -> ".join(shown) if shown[0] != shown[1] else ""
        if text:
            changes.append(
                f"{key} {scrub(text)}" + (" (acts at once, without a restart)" if running and key not in _LATER else "")
            )
    return changes


def own_drop_ins(unit: str, run: Runner = run_command) -> list[str]:
    """Drop-ins of this very unit; those of all services (``service.d``) are the host's business."""
    answer = run(["systemctl", "show", "--no-pager", "-p", "DropInPaths", "--value", "--", unit], 5.0)
    return [path for path in answer.out.split() if f"/{unit}.d/" in path] if answer.rc == 0 else []


def read_service(
    unit: str,
    newer: Sequence[str] = (),
    names: Sequence[str] = (),
    run: Runner = run_command,
    proc: Path = Path("/proc"),
) -> dict[str, Any]:
    """State of ``unit`` and of its main process; see RETURN of the module service_info.

    ``newer`` are paths; those that changed after the process started come back in ``newer``. ``names`` are the
    environment variables to return; a process may hold others that are nobody's business.
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
        "command": without_secrets(process_words(pid, "cmdline", proc)) if pid else [],
        "environment": {name: scrub(environment[name]) for name in names if name in environment},
        "plan_hash": environment.get(PLAN_VARIABLE, ""),
        "newer": changed,
        "drop_ins": own_drop_ins(unit, run),
    }
