# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Switching the service: what will happen and why, and the steps on the host.

The steps are few and each is whole: whoever dies between two of them (the controller, the host) leaves a state in which the
running process, the files and the record say what is missing. When the server went away is kept below ``/run``, so that the
time without a server is told truly by the play that ends it, which need not be the one that began it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .health import (
    FREE_THE_PORT,
    OTHERS,
    Runner,
    UnitStatus,
    held_by,
    observe_journal,
    observe_owner,
    observe_unit,
    resolve,
    run_command,
    scrub,
    seconds_text,
    unit_pids,
)
from .incident import Store
from .maintenance import short_name
from .service import PLAN_VARIABLE, process_words, setting_changes, unit_changes

RUN_DIR = Path("/run/gpuserve-sglang")
UNIT_DIR = Path("/etc/systemd/system")
#: A server that failed its gate has nobody to finish requests for; the engine ends within 2 to 7 s when it can.
KILL_AFTER = 10.0
#: The kernel takes back the memory of killed processes; with hundreds of gigabytes that is no instant.
KILL_PATIENCE = 60.0
#: On top of what systemd itself waits for.
STOP_GRACE = 60.0
COMMAND_LIMIT = 90.0
EVIDENCE_JOURNAL = 2000
EVIDENCE_KEPT = 10
_RELEASE = re.compile(r"/releases/([^/]+)/")
RUNNING = ("active", "activating", "reloading", "deactivating")


class SwitchError(Exception):
    """Says what was found, what was expected and what to do."""


# --- thinking ---------------------------------------------------------------------------------------------------------


def release_of(command: Sequence[str]) -> str:
    """Id of the release that a command line starts; empty when it is none of the collection's."""
    found = _RELEASE.search(command[0]) if command else None
    return found[1] if found else ""


def switch_plan(now: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """What will happen to the service so that it follows ``plan``, and why.

    :param now: what the module service_info returned, asked with the plan and the state directory.
    :returns: ``action`` (none, start, restart), ``reasons``, ``changes`` (settings), ``unit_changes`` (of the unit, against the
        last good deployment), ``release`` (from, to), ``away_seconds``
        (expected; None when nothing is known), ``fallback`` (id of the deployment that a failure puts back; empty without
        one), ``proven`` (this very deployment is the last that passed its gate), and all of it as ``text``.
    """
    unit, reasons = str(now["unit"]), list(now["reasons"])
    running = bool(now["main_pid"]) and now["active_state"] in ("active", "activating", "reloading")
    action = "none" if not reasons else "restart" if running else "start"
    last_good, last_start = now.get("last_good") or {}, now.get("last_start") or {}
    proven = bool(last_good) and last_good.get("process_hash") == plan["process_hash"]
    if last_good.get("unproven") and now["active_state"] != "active":
        # It served with this unit, and has never been started by it.
        proven = False
    known = last_start.get("seconds_to_ready")
    # JSON of older records holds numbers as text.
    away = float(known) if known not in (None, "") else None
    before, after = release_of(now["command"]), release_of(plan["command"])
    changes = (
        setting_changes(now["command"], now["environment"], plan["command"], plan["env"])
        if running and now["command"]
        else []
    )
    fallback = "" if proven or not last_good else str(last_good["id"])
    result = {
        "action": action,
        "reasons": reasons,
        "changes": changes,
        "unit_changes": unit_changes(last_good.get("unit") or {}, plan["unit"], running),
        "release": {"from": before if running else "", "to": after},
        "away_seconds": away,
        "fallback": fallback,
        "proven": proven,
    }
    return result | {"text": _text(unit, now, plan, result)}


def _text(unit: str, now: Mapping[str, Any], plan: Mapping[str, Any], what: Mapping[str, Any]) -> str:
    unit_lines = [f"  unit     {change}" for change in what["unit_changes"]]
    if what["action"] == "none":
        return "\n".join([f"{unit} follows the plan; it is not restarted.", *unit_lines])
    lines = [f"{unit} will be {what['action']}ed:"]
    lines += [f"  why      {reason}" for reason in what["reasons"]]
    lines += [f"  setting  {change}" for change in what["changes"]]
    lines += unit_lines
    release = what["release"]
    if release["from"] and release["from"] != release["to"]:
        lines.append(f"  release  {release['from']} -> {release['to'] or plan['command'][0]}")
    if now.get("drop_ins"):
        lines.append(
            f"  note     {', '.join(now['drop_ins'])} changes the unit as well (`systemctl revert {unit}` removes it)"
        )
    settings = plan["unit"]
    steps = []
    if what["action"] == "restart":
        steps.append(f"running requests finish (at most {settings['timeout_stop_sec']} s), stop")
    steps.append(f"start, wait until it serves (at most {settings['timeout_start_sec']} s)")
    lines.append(f"  steps    {', '.join(steps)}")
    word = "away for about" if what["action"] == "restart" else "ready after about"
    known = what["away_seconds"]
    lines.append(
        f"  time     {word} {seconds_text(known)} s, as the last start on this host took"
        if known is not None
        else "  time     not known: no start on this host is on record"
    )
    lines.append(
        f"  failure  deployment {what['fallback']} is put back"
        if what["fallback"]
        else "  failure  "
        + (
            "this is the last good deployment: where its last start that passed had other files they are put back, else it is stopped"
            if what["proven"]
            else "it is stopped; no earlier deployment is on record"
        )
    )
    return "\n".join(lines)


# --- doing ------------------------------------------------------------------------------------------------------------


def write_file(path: Path, text: str, mode: int = 0o644) -> bool:
    """Write a file whole or not at all; whether that changed it."""
    if not differing({str(path): text}):
        return False
    new = _staged(path, text, mode)
    try:
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return True


def _staged(path: Path, text: str, mode: int = 0o644) -> Path:
    """The text in a file beside the one that it will replace."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("w", errors="surrogateescape") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        new.chmod(mode)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    return new


@contextlib.contextmanager
def replaced(files: Mapping[str, str]) -> Iterator[list[str]]:
    """Files with these texts, all of them or none; the paths that changed.

    All are written beside their places first, which needs the space, and take them then. When one cannot, or when what is done inside
    fails, those that were there before come back.
    """
    changed = differing(files)
    before = {path: Path(path).read_text(errors="surrogateescape") if Path(path).exists() else None for path in changed}
    staged: dict[str, Path] = {}
    done: list[str] = []
    try:
        for path in changed:
            staged[path] = _staged(Path(path), files[path])
        for path, new in staged.items():
            new.replace(path)
            done.append(path)
        yield changed
    except (OSError, SwitchError) as error:
        stay = _undo({path: before[path] for path in done})
        if stay:
            raise SwitchError(f"{error}. These files could not be put back as they were: {'; '.join(stay)}") from error
        raise
    finally:
        for new in staged.values():
            new.unlink(missing_ok=True)


def _undo(before: Mapping[str, str | None]) -> list[str]:
    """Put texts back, None for no file; what could not be."""
    stay = []
    for path, text in before.items():
        try:
            if text is None:
                Path(path).unlink(missing_ok=True)
            else:
                write_file(Path(path), text)
        except OSError as error:
            stay.append(f"{path} ({error})")
    return stay


def differing(files: Mapping[str, str]) -> list[str]:
    """Paths whose files do not hold these texts."""
    found = []
    for path, text in files.items():
        try:
            same = Path(path).read_text() == text
        except (OSError, UnicodeDecodeError):
            same = False
        if not same:
            found.append(path)
    return found


class Away:
    """Since when there is no server, kept over plays that were interrupted."""

    def __init__(self, unit: str, run_dir: Path = RUN_DIR) -> None:
        self.path = run_dir / f"{short_name(unit)}.away"

    def since(self) -> float | None:
        """Seconds since the epoch; None when no serving server was stopped."""
        try:
            return float(self.path.read_text())
        except (OSError, ValueError):
            return None

    def begin(self, now: float) -> None:
        """A serving server is about to be stopped; an earlier time without one is over."""
        write_file(self.path, f"{now:.3f}\n")

    def end(self) -> None:
        """It serves again."""
        self.path.unlink(missing_ok=True)


class Switch:
    """The steps, for one unit. A step waits for another one that a killed play left running on the host."""

    def __init__(
        self,
        unit: str,
        run: Runner = run_command,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        run_dir: Path = RUN_DIR,
        proc: Path = Path("/proc"),
    ) -> None:
        self.unit, self.run, self.clock, self.sleep, self.run_dir, self.proc = unit, run, clock, sleep, run_dir, proc
        self.away = Away(unit, run_dir)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One step at a time."""
        self.run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        with (self.run_dir / f"{short_name(self.unit)}.step").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def systemctl(self, *words: str, missing_ok: bool = False) -> str:
        """Run systemctl; its failure is an error with its words, unless the unit is not there and need not be."""
        done = self.run(["systemctl", *words], COMMAND_LIMIT)
        said = (done.err or done.out).strip()
        if done.rc != 0 and not (missing_ok and re.search(r"not loaded|not found|does not exist", said)):
            raise SwitchError(
                f"`systemctl {' '.join(words)}` ended with status {done.rc}: {scrub(said) or 'no message'}. Expected it to work. "
                f"Do: journalctl -u {self.unit} -n 50"
            )
        return done.out

    def status(self) -> UnitStatus:
        """The unit as systemd sees it."""
        found = observe_unit(self.unit, self.run)
        if found.error:
            raise SwitchError(
                f"systemd does not tell the state of {self.unit}: {scrub(found.error)}. Expected an answer. Do: systemctl status"
            )
        return found

    def is_serving(self, process_hash: str) -> bool:
        """Whether its start has passed with the plan of this process hash, and it still runs."""
        status = self.status()
        words = process_words(status.main_pid, "environ", self.proc) if status.main_pid else []
        return status.active_state == "active" and f"{PLAN_VARIABLE}={process_hash}" in words

    def is_running(self) -> bool:
        """Whether there is something to stop."""
        return self.status().active_state in RUNNING

    def stop_seconds(self) -> float:
        """How long systemd lets a stop take, in seconds."""
        shown = self.systemctl("show", "--no-pager", "-p", "TimeoutStopUSec", "--value", "--", self.unit).strip()
        return parse_span(shown)

    def stop(self, drain: bool = True) -> dict[str, Any]:
        """Stop the unit: running requests finish, or, without ``drain``, it gets ten seconds before it is killed."""
        before, began = self.status(), self.clock()
        result: dict[str, Any] = {"changed": False, "stopped_at": None, "stop_seconds": 0.0, "killed": False}
        if before.active_state not in RUNNING:
            return result
        if before.active_state == "active":
            self.away.begin(began)
        limit = self.stop_seconds() + STOP_GRACE if drain else KILL_AFTER
        self.systemctl("stop", "--no-block", self.unit)
        if not self._wait_stopped(limit):
            if drain:
                raise SwitchError(
                    f"{self.unit} did not stop within {limit:.0f} s. Expected systemd to end it. Do: systemctl status {self.unit}"
                )
            self.systemctl("kill", "--signal=SIGKILL", self.unit, missing_ok=True)
            result["killed"] = True
            if not self._wait_stopped(KILL_PATIENCE):
                raise SwitchError(
                    f"{self.unit} did not end within {KILL_PATIENCE:.0f} s after SIGKILL. Expected it to be gone. A process that "
                    "hangs in the driver needs a reboot: look for it with `ps -eo pid,stat,cmd | grep D`."
                )
        ended = self.clock()
        return result | {"changed": True, "stopped_at": ended, "stop_seconds": round(ended - began, 2)}

    def _wait_stopped(self, limit: float) -> bool:
        until = self.clock() + limit
        while self.status().active_state in RUNNING:
            if self.clock() >= until:
                return False
            self.sleep(0.1)
        return True

    def wants_start(self) -> bool:
        """Whether there is something to start: what systemd means to start after a pause does not run yet."""
        return _wants_start(self.status())

    def start(self, host: str = "", port: int = 0) -> dict[str, Any]:
        """Start the unit with a clean count of starts, without waiting for it to serve.

        With ``port`` it refuses where somebody else listens there: the engine would load for minutes before it failed.
        """
        status = self.status()
        if not _wants_start(status):
            return {"changed": False, "started_at": None}
        if port:
            self.check_port(status, host, port)
        # The start limit counts starts of an operator like those of a restart loop.
        self.systemctl("reset-failed", self.unit, missing_ok=True)
        # A start would wait for the end of the pause before an automatic one (service_start gives EAGAIN); a restart does not.
        verb = "restart" if "auto-restart" in status.sub_state else "start"
        self.systemctl(verb, "--no-block", self.unit)
        return {"changed": True, "started_at": self.clock()}

    def check_port(self, status: UnitStatus, host: str, port: int) -> None:
        """Refuse a port that somebody else holds, in the words of the gate."""
        owner = observe_owner(resolve(host), port, lambda: unit_pids(status))
        if owner.kind == OTHERS:
            raise SwitchError(
                f"{held_by(port, owner, self.unit)} (expected: a free port). Do: {FREE_THE_PORT}. Nothing was started."
            )

    def is_enabled(self) -> bool:
        """Whether it starts at boot."""
        return self.run(["systemctl", "is-enabled", self.unit], COMMAND_LIMIT).out.strip() == "enabled"

    def enable(self, wanted: bool) -> None:
        """Start at boot, or not."""
        self.systemctl("enable" if wanted else "disable", self.unit, missing_ok=not wanted)

    def restore(self, files: Mapping[str, str]) -> list[str]:
        """Put files back as they are on record, and let systemd read them; paths that changed. All of that, or nothing."""
        try:
            with replaced(files) as changed:
                # Also when none changed: whoever wrote them may have been killed before systemd read them.
                self.systemctl("daemon-reload")
        except SwitchError:
            with contextlib.suppress(SwitchError):
                self.systemctl("daemon-reload")
            raise
        return changed


def _wants_start(status: UnitStatus) -> bool:
    return status.active_state not in ("active", "activating", "reloading") or "auto-restart" in status.sub_state


def parse_span(text: str) -> float:
    """systemd's time span to seconds: `1min 30s`, `2min`, `infinity`."""
    if text == "infinity":
        return 86400.0
    factors = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
    parts = re.findall(r"([\d.]+)\s*([a-z]+)", text)
    return sum(float(number) * factors.get(unit, 0.0) for number, unit in parts)


# --- evidence ---------------------------------------------------------------------------------------------------------


SUMMARY = """# {unit}: a deployment failed

{when}. It was taken back or stopped; what the gate said:

{why}

- `journal.txt`: the log of this start, `unit-properties.txt`: what systemd knew about it
- the unit and its settings, as they were tried
"""


class Evidence:
    """What is needed to understand a failed deployment: small, quick, and with no program that could hang on a GPU.

    The gate's words, the unit's properties, the journal of this run, the unit and its settings as they were tried. It looks when
    it is made, since the files are replaced next, and is written afterwards.
    """

    def __init__(self, unit: str, message: str, files: Sequence[Path], now: float, run: Runner = run_command) -> None:
        self.unit, self.now, self.run = unit, now, run
        self.texts = {
            "summary.md": SUMMARY.format(unit=unit, when=time.strftime("%F %T UTC", time.gmtime(now)), why=message)
        }
        shown = run(["systemctl", "show", "--no-pager", "--", unit], 5.0)
        self.texts["unit-properties.txt"] = shown.out or shown.err
        self.invocation = observe_unit(unit, run).invocation_id
        for path in files:
            with contextlib.suppress(OSError):
                self.texts[path.name] = path.read_text()

    def write(self, state_dir: Path, reason: str = "deployment-failed") -> Path:
        """Write the folder, and remove the oldest ones of this kind."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self.now))
        store = Store(state_dir / "incidents")
        try:
            name = store.make(f"{stamp}-{reason}")
            lines = observe_journal(self.unit, self.invocation, EVIDENCE_JOURNAL, self.run)
            for file, text in {**self.texts, "journal.txt": "\n".join(lines)}.items():
                store.write(name, file, scrub(text).rstrip("\n") + "\n")
            for old in [other for other in store.names() if f"-{reason}" in other][:-EVIDENCE_KEPT]:
                shutil.rmtree(store.path / old, ignore_errors=True)
        finally:
            store.close()
        return store.shown / name


def ready_times(unit: str, run: Runner = run_command) -> tuple[float, float] | None:
    """How many seconds the running start took, and when it ended (seconds since the epoch).

    The gate is part of the start, so that the unit becomes active when it serves. None while it is not active.
    """
    names = "ActiveState,ActiveEnterTimestampMonotonic,ExecMainStartTimestampMonotonic"
    answer = run(["systemctl", "show", "--no-pager", "-p", names, "--", unit], 5.0)
    values = dict(line.split("=", 1) for line in answer.out.splitlines() if "=" in line)
    try:
        began, ready = (int(values[name]) / 1e6 for name in reversed(names.split(",")[1:]))
    except (KeyError, ValueError):
        return None
    if values.get("ActiveState") != "active" or not 0 < began <= ready:
        return None
    return ready - began, time.time() - (time.monotonic() - ready)
