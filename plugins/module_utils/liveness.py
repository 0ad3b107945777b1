# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Does the server still serve? Asked from outside, every half minute, by a timer; restarts what is dead and nothing else.

The engine can be dead in ways that systemd does not see: a scheduler that was killed leaves a main process that accepts
requests and answers none; a process can be stopped, or hang. But a server can also be silent because it works: a long
prefill, a queue, a kernel that is compiled. So a probe that got no answer is held against signs of work before it counts,
only several in a row lead to a restart, and restarts are rationed: what does not get well from one is for people.

What was seen (`Seen`) and what follows (`judge`, pure) are apart. Standard library only. Times are seconds of the
monotonic clock, which like the state file below /run begins anew at boot.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import health, incident, maintenance, metrics
from .health import HttpAnswer, PendingAnswer, Requester, Runner

ALIVE = "alive"
BUSY = "busy"
FAILING = "failing"
STARTING = "starting"
STOPPED = "stopped"
MAINTENANCE = "maintenance"
UNKNOWN = "unknown"

NOTHING = ""
RESTART = "restart"
ESCALATE = "escalate"

# Where the programs of the host are; the collector of incidents runs as a process of its own, which can be given up.
PROGRAMS = Path("/usr/local/lib/gpuserve-sglang")
# The engine's own counters, asked beside the probe.
MARKS_TIMEOUT = 5.0
JOURNAL_LINES = 200
# Less than this share of one processor over the whole probe is idling.
CPU_BUSY = 0.2
# After SIGKILL, until the processes are gone. Freeing the memory of eight GPUs takes seconds.
KILL_PATIENCE = 30.0
HOUR = 3600.0


class LivenessError(Exception):
    """Says what was found, what was expected and what to do."""


@dataclass(frozen=True)
class Options:
    """What is watched and how patiently; see the variables sglang_service_liveness_* of the role."""

    unit: str = "sglang-kimi.service"
    host: str = "127.0.0.1"
    port: int = 30000
    model: str = ""
    # Failed probes in a row before a restart.
    failures: int = 3
    # Limit of each of the two requests of a probe. The engine needs 20 s to say that its scheduler is dead.
    probe_timeout: float = 30.0
    # So long a server that works, but delivers nothing to anybody, is taken for busy.
    busy_limit: float = 300.0
    restarts_per_hour: int = 2
    max_tokens: int = 2


def options_from(settings: Mapping[str, Any]) -> Options:
    """The settings file of the unit to options. Raises LivenessError."""
    try:
        given = dict(settings.get("liveness") or {})
        known = asdict(Options())
        # What this program does not know is left alone: a newer play may have written it.
        values = {key: type(known[key])(value) for key, value in given.items() if key in known}
        endpoint = settings["endpoint"]
        options = Options(
            **{
                **values,
                "unit": health.unit_name(str(settings["unit"])),
                "host": str(endpoint["host"]),
                "port": int(endpoint["port"]),
                "model": str(endpoint.get("served_model_name") or ""),
            }
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LivenessError(
            f"the settings cannot be used ({type(error).__name__}: {error}), expected unit, endpoint and liveness as the "
            "role sglang_service writes them. Run site.yml again."
        ) from error
    for name in ("failures", "max_tokens"):
        if getattr(options, name) < 1:
            raise LivenessError(f"liveness.{name} is {getattr(options, name)}, expected 1 or more. Correct it.")
    for name in ("restarts_per_hour", "busy_limit"):
        if math.isnan(getattr(options, name)) or getattr(options, name) < 0:
            raise LivenessError(f"liveness.{name} is {getattr(options, name)}, expected 0 or more. Correct it.")
    if not options.probe_timeout > 0:
        raise LivenessError(f"liveness.probe_timeout is {options.probe_timeout}, expected more than 0. Correct it.")
    return options


# --------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Memory:
    """What one probe leaves to the next, in ``/run/gpuserve-sglang/<unit>.liveness.json``."""

    state: str = ""
    reason: str = ""
    # The run of the unit that the counts belong to.
    invocation_id: str = ""
    failures: int = 0
    # When the server was last seen alive or making progress.
    proven: float = 0.0
    # When this timer restarted it.
    restarts: tuple[float, ...] = ()
    # The restarts of this hour are used up, and that was said.
    escalated: bool = False
    # For people: seconds since the epoch of this probe, and since when the state is what it is.
    checked: float = 0.0
    since: float = 0.0


def memory_path(unit: str, run_dir: Path = maintenance.RUN_DIR) -> Path:
    """The state file of a unit."""
    return run_dir / f"{maintenance.short_name(unit)}.liveness.json"


def load_memory(path: Path) -> Memory:
    """The state file; a missing or broken one is a first probe."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        known = asdict(Memory())
        values: dict[str, Any] = {}
        for key, default in known.items():
            if key in data:
                values[key] = tuple(map(float, data[key])) if key == "restarts" else type(default)(data[key])
        return Memory(**values)
    except (OSError, ValueError, TypeError, AttributeError):
        return Memory()


def save_memory(path: Path, memory: Memory) -> None:
    """Write the state file; a reader sees the old one or the new one."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(asdict(memory), indent=1) + "\n", encoding="utf-8")
    new.chmod(0o644)
    new.replace(path)


# --------------------------------------------------------------------------------------------------- signs of work


# Counted where answers leave the server: these move only when somebody gets something. One that waits for its first token, or
# a probe that nothing answers, moves none of them.
_DELIVERED = (
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "generation_tokens_total",
    "prompt_tokens_total",
    "cached_tokens_total",
)
# Counted by the scheduler, which also works on requests whose answers are lost behind it, the probe's own among them.
_SCHEDULED = ("realtime_tokens_total", "cuda_graph_passes_total", "num_used_tokens")
# Parts without which the engine serves nobody, by the names that they give themselves.
_PARTS = "sglang::"
_BATCH = re.compile(r"\b(?:Prefill|Decode) batch\b")


def read_marks(loads: HttpAnswer | None, counted: HttpAnswer | None, journal: Iterable[str]) -> dict[str, str]:
    """Figures that only move when the engine works.

    Not the number of waiting requests: that one also moves when nothing is ever taken from the queue.
    """
    marks: dict[str, str] = {}
    if loads is not None and loads.status == 200:
        try:
            for rank in json.loads(loads.body)["loads"]:
                for key in ("num_running_reqs", "num_used_tokens"):
                    marks[f"loads.{rank.get('dp_rank', 0)}.{key}"] = str(rank[key])
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
    if counted is not None and counted.status == 200:
        for sample in metrics.samples(counted.body):
            name = sample.name.removeprefix("sglang:")
            if name in _DELIVERED or name in _SCHEDULED:
                labels = ",".join(f"{label}={value}" for label, value in sorted(sample.labels.items()))
                marks[f"{name}{{{labels}}}"] = repr(sample.value)
    batches = [line for line in journal if _BATCH.search(line)]
    if batches:
        marks["journal"] = batches[-1]
    return marks


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Marks that were seen twice and differ; a batch that is logged for the first time counts as well."""
    found = [name for name, value in after.items() if name in before and before[name] != value]
    if "journal" in after and "journal" not in before:
        found.append("journal")
    return found


@dataclass(frozen=True)
class Processes:
    """The processes of the unit at one moment."""

    cpu_seconds: float = 0.0
    # `pid 4711 (sglang::schedul)`
    stopped: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()


def read_processes(pids: Iterable[int], proc: Path = Path("/proc")) -> Processes:
    """Processor time, and who is stopped by a signal or dead but not yet fetched by its parent."""
    ticks, stopped, dead = 0, [], []
    for pid in sorted(pids):
        try:
            stat = (proc / str(pid) / "stat").read_text("utf-8", "replace")
            name, rest = stat.partition("(")[2].rpartition(")")[0], stat.rpartition(")")[2].split()
            ticks += int(rest[11]) + int(rest[12])
        except (OSError, IndexError, ValueError):
            continue
        if rest[0] == "T":
            stopped.append(f"pid {pid} ({name})")
        # The engine's own parts only: a compiler that has ended is nobody's loss.
        elif rest[0] == "Z" and name.startswith(("sglang", "python", "pt_main")):
            dead.append(f"pid {pid} ({name})")
    return Processes(ticks / os.sysconf("SC_CLK_TCK"), tuple(stopped), tuple(dead))


# --------------------------------------------------------------------------------------------------- the decision


@dataclass(frozen=True)
class Seen:
    """What one probe saw; None: not asked."""

    now: float
    unit: health.UnitStatus
    mark: maintenance.Mark | None = None
    owner: health.Owner | None = None
    http: HttpAnswer | None = None
    answer: HttpAnswer | None = None
    # From here on only for a probe that failed.
    window: float = 0.0
    cpu_seconds: float = 0.0
    stopped: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    # What the server delivers could be counted, before and after.
    counted: bool = False


@dataclass(frozen=True)
class Decision:
    """State, the reason in words, what is to be done now, and what to remember."""

    state: str
    reason: str
    action: str
    memory: Memory


def answered(answer: HttpAnswer) -> bool:
    """Whether the answer to the generation shows life: text, tokens without text (two tokens can be a blank), or a
    refusal of this very request (400 to 499 but 408 and 429), which is no reason to restart anything."""
    if 400 <= answer.status < 500 and answer.status not in (408, 429):
        return True
    generation = health.judge_generation(answer)
    return generation.ok or generation.tokens > 0


def trouble(seen: Seen) -> str:
    """Why the probe failed; empty when it did not."""
    if seen.http is None:
        return "/health: not asked"
    if seen.owner is not None and seen.owner.kind in (health.OTHERS, health.NOBODY):
        holders = ", ".join(seen.owner.holders) or "something that is no process of this host"
        return f"the port is answered by {holders}"
    if seen.http.status != 200:
        return f"/health: {seen.http.text()} after {health.seconds_text(seen.http.seconds)} s"
    if seen.answer is None:
        return "/health: 200, but no generation was asked for"
    if not answered(seen.answer):
        return f"/health: 200, generation: {health.judge_generation(seen.answer).error}"
    return ""


def judge(seen: Seen, memory: Memory, options: Options) -> Decision:
    """From one probe and what is remembered to a state and an action. Pure."""
    unit = seen.unit
    if unit.invocation_id and unit.invocation_id != memory.invocation_id:
        # Another run of the unit: the failures of the one before are not its own.
        memory = replace(memory, invocation_id=unit.invocation_id, failures=0, proven=seen.now)
    memory = replace(memory, restarts=tuple(at for at in memory.restarts if 0 <= seen.now - at < HOUR))

    def settled(state: str, reason: str, **changes: Any) -> Decision:
        return Decision(state, reason, NOTHING, replace(memory, state=state, reason=reason, **changes))

    if seen.mark is not None:
        return settled(MAINTENANCE, seen.mark.why or "no reason given", failures=0, proven=seen.now)
    if unit.error:
        return settled(UNKNOWN, f"systemctl does not answer: {health.scrub(unit.error)}")
    if unit.active_state in ("activating", "reloading") or (unit.active_state == "inactive" and unit.job):
        return settled(STARTING, f"{unit.active_state}/{unit.sub_state}", failures=0)
    if unit.active_state != "active":
        return settled(STOPPED, f"{unit.active_state}/{unit.sub_state}", failures=0)

    wrong = trouble(seen)
    if not wrong:
        return settled(ALIVE, "", failures=0, proven=seen.now, escalated=False)
    silent = seen.now - memory.proven
    broken = [f"{who} is dead" for who in seen.dead] + [f"{who} is stopped" for who in seen.stopped]
    names = list(dict.fromkeys(name.partition("{")[0].rpartition(".")[2] for name in seen.moved))
    # The scheduler goes on when the part behind it is gone, and everybody waits: no progress excuses that. A helper that has
    # ended, and that nobody has fetched yet, is no such part.
    lost = bool(seen.stopped) or any(f"({_PARTS}" in who for who in seen.dead)
    # Where deliveries cannot be counted (no metrics), any progress has to do.
    delivered = [name for name in names if name in _DELIVERED or not seen.counted]
    if delivered and not lost:
        reason = f"{wrong}, but it works ({', '.join(delivered[:3])})"
        return settled(BUSY, reason, failures=0, proven=seen.now)
    share = seen.cpu_seconds / seen.window if seen.window > 0 else 0.0
    works = ", ".join(names[:3]) or (f"it uses {share:.1f} processors" if share >= CPU_BUSY and not broken else "")
    if works and not lost and silent < options.busy_limit:
        reason = (
            f"{wrong}, but it works ({works}); taken for busy until {health.seconds_text(options.busy_limit)} s "
            f"without anything delivered, now {silent:.0f}"
        )
        # Neither better nor worse: what failed before still counts.
        return settled(BUSY, reason)
    failures = memory.failures + 1
    reason = "; ".join([wrong, *broken, f"nothing delivered for {silent:.0f} s"])
    memory = replace(memory, state=FAILING, reason=reason, failures=failures)
    if failures < options.failures:
        return Decision(FAILING, reason, NOTHING, memory)
    if len(memory.restarts) < options.restarts_per_hour:
        return Decision(FAILING, reason, RESTART, memory)
    if memory.escalated:
        return Decision(FAILING, reason, NOTHING, memory)
    return Decision(FAILING, reason, ESCALATE, replace(memory, escalated=True))


# --------------------------------------------------------------------------------------------------- the probe


def _collect(settings_file: Path, reason: str, details: str, limit: float) -> tuple[Path | None, str]:
    """Keep an incident with the collector as a process of its own; its folder, or why there is none."""
    argv = [sys.executable, "-I", "-S", str(PROGRAMS), "incident", "--settings", str(settings_file)]
    answer = incident.run_bounded([*argv, "--reason", reason, "--details", details, "--no-notify"], limit)
    lines = answer.out.strip().splitlines()
    if answer.rc == 0 and lines and lines[-1].startswith("/"):
        return Path(lines[-1]), ""
    return None, (answer.err.strip() or "\n".join(lines) or f"status {answer.rc}").splitlines()[-1]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass
class Probe:
    """One probe of one unit and what follows from it."""

    options: Options
    collecting: incident.Options
    settings_file: Path
    run: Runner = health.run_command
    request: Requester = health.HttpRequest
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    say: Callable[[str], None] = _say
    collect: Callable[[Path, str, str, float], tuple[Path | None, str]] = _collect
    tell: Callable[..., list[str]] = incident.notify
    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    run_dir: Path = maintenance.RUN_DIR

    # -- looking

    def _mark(self) -> maintenance.Mark | None:
        return maintenance.active(self.options.unit, self.wall(), self.run_dir)

    def _pids(self, unit: health.UnitStatus) -> set[int]:
        pids = health.unit_pids(unit, self.proc, self.cgroups)
        # A dead child that nobody has asked for is in no control group any more.
        return pids | health.descendants(unit.main_pid, self.proc) if unit.main_pid else pids

    def _ask(self, method: str, path: str, body: Any, limit: float) -> PendingAnswer:
        return self.request(self.options.host, self.options.port, method, path, body, limit)

    def _wait(self, pending: PendingAnswer, limit: float, began: float | None = None) -> HttpAnswer:
        """The limit holds for the whole answer, not only for each piece of it; `began` when it was asked for earlier."""
        began = self.clock() if began is None else began
        answer = pending.wait(max(0.0, limit - (self.clock() - began)))
        if answer is None:
            pending.abort()
            return HttpAnswer(error="timeout", seconds=self.clock() - began)
        return answer

    def _marks(self, unit: health.UnitStatus, pending: Sequence[PendingAnswer]) -> dict[str, str]:
        until = self.clock() + MARKS_TIMEOUT
        loads, counted = (self._wait(request, max(0.0, until - self.clock())) for request in pending)
        journal = health.observe_journal(unit.name, unit.invocation_id, JOURNAL_LINES, self.run, MARKS_TIMEOUT)
        return read_marks(loads, counted, journal)

    def _ask_marks(self) -> list[PendingAnswer]:
        return [self._ask("GET", path, None, MARKS_TIMEOUT) for path in ("/v1/loads", "/metrics")]

    def look(self) -> Seen:
        """One probe; on a server that is well it costs two tokens."""
        began = self.clock()
        unit = health.observe_unit(self.options.unit, self.run)
        mark = self._mark()
        if mark is not None or unit.error or unit.active_state != "active":
            return Seen(self.clock(), unit, mark)
        limit = self.options.probe_timeout
        before = read_processes(self._pids(unit), self.proc)
        marks_before = self._ask_marks()
        began = self.clock()
        asked = self._ask("GET", "/health", None, limit)
        # While /health is under way: its answer takes a second at least.
        figures = self._marks(unit, marks_before)
        answer = self._wait(asked, limit, began)
        seen = Seen(began, unit, http=answer)
        if answer.status > 0:
            addresses = health.resolve(self.options.host)
            owner = health.observe_owner(addresses, self.options.port, lambda: self._pids(unit), self.proc)
            seen = replace(seen, owner=owner)
        if answer.status == 200:
            body = health.generation_body(self.options.model or "default", "Say yes.", self.options.max_tokens)
            seen = replace(seen, answer=self._wait(self._ask("POST", "/v1/chat/completions", body, limit), limit))
        if trouble(seen):
            after = read_processes(self._pids(unit), self.proc)
            later = self._marks(unit, self._ask_marks())
            seen = replace(
                seen,
                moved=tuple(moved(figures, later)),
                counted=any(name.partition("{")[0] in _DELIVERED for name in figures.keys() & later.keys()),
                window=self.clock() - began,
                cpu_seconds=after.cpu_seconds - before.cpu_seconds,
                stopped=after.stopped,
                dead=after.dead,
            )
            # The unit may have died, been stopped or been marked while nothing was answered.
            seen = replace(seen, unit=health.observe_unit(self.options.unit, self.run), mark=self._mark())
        return replace(seen, now=self.clock())

    # -- acting

    def once(self) -> Decision:
        """Look, decide, remember, act, remember."""
        path = memory_path(self.options.unit, self.run_dir)
        before = load_memory(path)
        seen = self.look()
        decision = judge(seen, before, self.options)
        now = self.wall()
        since = before.since if before.state == decision.state else now
        memory = replace(decision.memory, checked=now, since=since)
        self._report(before, decision)
        save_memory(path, memory)
        if decision.action == RESTART:
            memory = self._restart(seen, decision, memory)
            save_memory(path, memory)
        elif decision.action == ESCALATE:
            text = (
                f"{self.options.unit} does not serve ({decision.reason}), and was restarted {len(memory.restarts)} times "
                "within the hour, as often as allowed. It is left as it is: somebody has to look."
            )
            self._keep("liveness-limit", text)
        return replace(decision, memory=memory)

    def _report(self, before: Memory, decision: Decision) -> None:
        """A line when something is new; a healthy server leaves none."""
        if decision.state == FAILING or decision.state != before.state:
            count = f" {decision.memory.failures} of {self.options.failures}" if decision.state == FAILING else ""
            reason = f": {decision.reason}" if decision.reason else ""
            if decision.state != ALIVE or before.state not in ("", STARTING):
                self.say(f"{maintenance.short_name(self.options.unit)} is {decision.state}{count}{reason}")

    def _keep(self, reason: str, details: str) -> None:
        folder, why = self.collect(self.settings_file, reason, details, self.collecting.time_limit + 10)
        self.say(details)
        self.say(f"incident kept in {folder}" if folder else f"no incident was kept: {why}")
        for line in self.tell(self.collecting, folder or Path("-"), reason, details):
            self.say(line)

    def _restart(self, seen: Seen, decision: Decision, memory: Memory) -> Memory:
        unit = seen.unit
        details = f"{unit.name} does not serve: {decision.reason}. It is killed and started again."
        folder, why = self.collect(self.settings_file, "liveness", details, self.collecting.time_limit + 10)
        # Collecting takes time: somebody may have begun to work on the service, or it was restarted meanwhile.
        now = health.observe_unit(unit.name, self.run)
        if self._mark() is not None or now.active_state != "active" or now.invocation_id != unit.invocation_id:
            self.say(f"{unit.name} is left alone: its state changed to {now.active_state or now.error} meanwhile")
            return memory
        self.say(details)
        self.say(f"incident kept in {folder}" if folder else f"no incident was kept: {why}")
        # No SIGTERM: the server waits for requests that nothing answers any more, up to the whole stop timeout. A killed
        # main process is a crash to systemd: Restart= starts it, and the start limit counts it.
        killed = self.run(["systemctl", "kill", "-s", "SIGKILL", "--", unit.name], 10.0)
        memory = replace(memory, failures=0, restarts=(*memory.restarts, self.clock()))
        reason = "liveness"
        if killed.rc != 0:
            details += f" That failed: {killed.err.strip()}"
            self.say(f"systemctl kill ended with status {killed.rc}: {killed.err.strip()}")
        elif not self._gone(unit):
            reason = "unkillable"
            details += " A process does not even die: it hangs inside the kernel, and only a reboot helps."
            self.say(details)
        else:
            self._start_again(unit)
        for line in self.tell(self.collecting, folder or Path("-"), reason, details):
            self.say(line)
        return memory

    def _gone(self, unit: health.UnitStatus) -> bool:
        until = self.clock() + KILL_PATIENCE
        while True:
            now = health.observe_unit(unit.name, self.run)
            if not now.error and (now.main_pid != unit.main_pid or now.invocation_id != unit.invocation_id):
                return True
            if self.clock() >= until:
                return False
            self.sleep(0.5)

    def _start_again(self, unit: health.UnitStatus) -> None:
        """systemd starts it again by Restart=; only a unit that was told not to needs a word."""
        answer = self.run(["systemctl", "show", "-P", "Restart", "--", unit.name], 5.0)
        if answer.rc == 0 and answer.out.strip() in ("no", "on-success"):
            started = self.run(["systemctl", "--no-block", "start", "--", unit.name], 10.0)
            if started.rc != 0:
                self.say(f"systemctl start ended with status {started.rc}: {started.err.strip()}")


def main(argv: Sequence[str] | None = None) -> int:
    """One probe, as the timer runs it. 0 whatever the server does, 1 when the probe itself failed, 2 wrong options."""
    parser = argparse.ArgumentParser(prog="liveness", description="Probe the server once.", allow_abbrev=False)
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE")
    given = parser.parse_args(argv)
    try:
        settings = incident.read_settings(given.settings)
        probe = Probe(options_from(settings), incident.options_from(settings), given.settings)
    except (LivenessError, incident.IncidentError) as error:
        parser.error(str(error))
    probe.once()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
