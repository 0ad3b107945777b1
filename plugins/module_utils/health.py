# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Does the server serve? One program for the play, for ExecStartPost= and for the liveness timer.

Observation (health_host, health_http) and decision (`decide`, a pure function) are apart; every name of the parts can be
imported from here. Standard library only.
Times are seconds. Sources of the numbers: docs on the engine's life cycle (a 200 from /health takes about 1 s, a 503 of
a dead scheduler 20 s, the first sampled request of a cold host 98 s because kernels are compiled for it).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .health_host import (
    NOBODY,
    OTHERS,
    OURS,
    UNCHECKED,
    UNIT_PROPERTIES,
    UNKNOWN,
    CommandResult,
    Owner,
    ProcessStatus,
    Runner,
    UnitStatus,
    descendants,
    describe_process,
    listening_inodes,
    observe_journal,
    observe_owner,
    observe_process,
    observe_unit,
    parse_unit,
    resolve,
    run_command,
    unit_pids,
)
from .health_http import (
    BODY_LIMIT,
    Generation,
    HttpAnswer,
    HttpRequest,
    PendingAnswer,
    Requester,
    generation_body,
    judge_generation,
)
from .health_pool import (
    Memory,
    Pool,
    judge_pool,
    memory_from_info,
)
from .health_text import (
    FAILED,
    FOREIGN,
    GENERATING,
    GENERATION_FAILED,
    INTERIM,
    POOL_TOO_SMALL,
    READY,
    REFUSED,
    STATES,
    TIMEOUT,
    WARMING,
    WORDS,
    Progress,
    doing_text,
    last_pieces,
    last_sign,
    parse_progress,
    phase_name,
    progress_line,
    scrub,
    seconds_text,
    steady,
)

__all__ = [
    "BODY_LIMIT",
    "DEATH_GRACE",
    "FAILED",
    "FOREIGN",
    "FREE_THE_PORT",
    "GENERATING",
    "GENERATION_FAILED",
    "GENERATION_TRIES",
    "INFO_TIMEOUT",
    "INTERIM",
    "JOURNAL_INTERVAL",
    "LIFE_INTERVAL",
    "NOBODY",
    "OTHERS",
    "OURS",
    "POOL_TOO_SMALL",
    "READY",
    "REFUSED",
    "SILENT_AFTER",
    "STATES",
    "SYSTEMCTL_PATIENCE",
    "TIMEOUT",
    "UNCHECKED",
    "UNIT_PROPERTIES",
    "UNKNOWN",
    "WARMING",
    "WORDS",
    "CommandResult",
    "Gate",
    "Generation",
    "HttpAnswer",
    "HttpRequest",
    "Memory",
    "Observation",
    "Options",
    "Owner",
    "PendingAnswer",
    "Pool",
    "ProcessStatus",
    "Progress",
    "Requester",
    "Runner",
    "Since",
    "UnitStatus",
    "Verdict",
    "check_options",
    "decide",
    "descendants",
    "describe_process",
    "doing_text",
    "gate_said",
    "generation_body",
    "held_by",
    "judge_generation",
    "judge_life",
    "judge_pool",
    "last_pieces",
    "last_sign",
    "listening_inodes",
    "main",
    "memory_from_info",
    "observe_journal",
    "observe_owner",
    "observe_process",
    "observe_unit",
    "parse_progress",
    "parse_unit",
    "phase_name",
    "progress_line",
    "read_settings",
    "resolve",
    "run_command",
    "scrub",
    "seconds_text",
    "steady",
    "unit_name",
    "unit_pids",
    "usual_seconds",
    "with_settings",
]

LIFE_INTERVAL = 0.5
JOURNAL_INTERVAL = 3.0
# A request that broke may be the first sign of a death that systemd reports a moment later: the death is the better message.
DEATH_GRACE = 1.5
# systemctl can fail for a moment (daemon-reexec, a busy bus); longer than this it is a fault of its own.
SYSTEMCTL_PATIENCE = 10.0
# ... and these do not pass.
_NO_SYSTEMD = re.compile(r"command not found|not been booted with systemd")
# A sampled answer can be empty by chance (end of text as first token), but hardly three times.
GENERATION_TRIES = 3
# A 503 that took so long is that of a scheduler which was asked and kept silent; that of a start comes at once.
SILENT_AFTER = 10.0
# In these words the gate ends, in the play and in the journal, and a wrong option ends it in those of argparse.
HEALTHY = "/health 200"
_GATE_SAID = re.compile(rf"^(?:.+ \(expected: {HEALTHY} |gate: error: )")
# The tracebacks of eight ranks come between the gate's words and the end of a journal.
SAID_WITHIN = 1000
# Memory is read once from a server that has just answered.
INFO_TIMEOUT = 5.0

# ----------------------------------------------------------------------------------------------------------- decision


@dataclass(frozen=True)
class Since:
    """What the gate knew before; the caller hands it from one window to the next."""

    n_restarts: int = -1
    invocation_id: str = ""
    main_pid: int = 0
    pid_started: str = ""
    elapsed: float = 0.0
    attempts: int = 0
    last_status: str = ""
    state: str = ""
    phase: str = ""
    silent: bool = False
    sign: str = ""
    sign_at: float = 0.0
    generating: bool = False
    kv_tokens: int = -1

    @classmethod
    def load(cls, data: Mapping[str, Any] | None) -> Since:
        """From the dictionary that went through JSON; unknown keys are ignored, wrong values are an error."""
        known = cls()
        given = {}
        for key, default in asdict(known).items():
            if data and data.get(key) is not None:
                given[key] = type(default)(data[key])
        return replace(known, **given)

    def learn(self, unit: UnitStatus | None, process: ProcessStatus | None) -> Since:
        """Take over what was not known yet; what was known stays, so that a change can be seen."""
        now = self
        # Until a start that is queued begins, systemd shows what it knows about the run before.
        if unit is not None and not unit.error and not _queued(unit):
            if now.n_restarts < 0:
                now = replace(now, n_restarts=unit.n_restarts)
            if not now.invocation_id and unit.invocation_id:
                now = replace(now, invocation_id=unit.invocation_id)
            if not now.main_pid and unit.main_pid:
                now = replace(now, main_pid=unit.main_pid)
        if process is not None and process.alive and not now.pid_started:
            now = replace(now, pid_started=process.started)
        return now

    def doing(self, state: str, elapsed: float) -> str:
        """What the server does, in words."""
        quiet = elapsed - self.sign_at if self.sign else 0.0
        return doing_text(state, self.phase, self.last_status, self.silent, quiet)


@dataclass(frozen=True)
class Observation:
    """What was seen at one moment; None: not looked at."""

    elapsed: float
    unit: UnitStatus | None = None
    process: ProcessStatus | None = None
    owner: Owner = field(default_factory=Owner)
    http: HttpAnswer | None = None
    generation: Generation | None = None
    pool: Pool | None = None


@dataclass(frozen=True)
class Verdict:
    """State, the reason in words (what was found), and whether a generation is the next step."""

    state: str
    reason: str = ""
    generate: bool = False
    hint: str = ""


def _queued(unit: UnitStatus) -> bool:
    """Whether somebody has asked for a start that has not begun yet."""
    return unit.job and (unit.active_state == "inactive" or "auto-restart" in unit.sub_state)


def _while(since: Since) -> str:
    words = {
        REFUSED: "while loading",
        WARMING: "while warming up",
        GENERATING: "during its first generation",
        READY: "after it was ready",
    }
    return words.get(since.state, "")


def _lived(unit: UnitStatus, since: Since, elapsed: float) -> str:
    # The process' own age says more than the gate's; the gate may have begun later.
    return (
        f"after {seconds_text(unit.run_seconds or elapsed)} s"
        if unit.run_seconds or since.main_pid or since.state
        else ""
    )


def judge_life(unit: UnitStatus | None, process: ProcessStatus | None, since: Since, elapsed: float) -> Verdict | None:
    """None while the server lives; otherwise what has become of it."""
    if process is not None:
        if not process.alive:
            return Verdict(FAILED, " ".join(["process", str(process.pid), "is gone", _while(since)]).rstrip())
        if since.pid_started and process.started != since.pid_started:
            return Verdict(FAILED, f"process {process.pid} is gone; its number now belongs to another process")
        return None
    if unit is None or unit.error:
        return None
    name = unit.name
    began = bool(since.main_pid or since.state)

    def died(what: str = "died") -> Verdict:
        words = [name, what, _while(since)]
        how = unit.exit_text()
        return Verdict(
            FAILED,
            " ".join(filter(None, words))
            + (f": {how}" if how else "")
            + (f" {_lived(unit, since, elapsed)}".rstrip() if how else ""),
        )

    restart = f"systemctl start {name}"
    if unit.load_state == "not-found" and began:
        return Verdict(FAILED, f"{name} ended {_while(since)}, and the unit is gone too".replace(" ,", ","))
    if unit.load_state == "not-found":
        return Verdict(
            FAILED, f"{name} does not exist on this host", hint="install the unit first (role sglang_service)"
        )
    if unit.load_state in ("bad-setting", "error", "masked"):
        return Verdict(
            FAILED, f"{name} cannot be started: LoadState={unit.load_state}", hint=f"systemctl status {name}"
        )
    if unit.active_state == "failed":
        return died("died" if began else "had failed before the gate began")
    # With a job it is being started by somebody before the pause is over: what it died of then is not this start's business.
    if "auto-restart" in unit.sub_state and (began or not _queued(unit)):
        return died("died" if began else "is in a restart loop")
    if since.invocation_id and unit.invocation_id and unit.invocation_id != since.invocation_id:
        if unit.n_restarts > max(since.n_restarts, 0):
            return died("died and was started again by systemd")
        return Verdict(
            FAILED, f"{name} was restarted by someone while the gate waited", hint=f"systemctl status {name}"
        )
    if since.n_restarts >= 0 and unit.n_restarts > since.n_restarts:
        return died("died and was started again by systemd")
    if unit.active_state == "deactivating":
        # An end of the main process shows as an exit code; without one somebody is stopping the unit.
        return (
            died()
            if unit.exec_main_code and not unit.main_pid
            else Verdict(FAILED, f"{name} is being stopped ({unit.sub_state}) {_while(since)}".rstrip(), hint=restart)
        )
    if unit.active_state == "inactive":
        if _queued(unit):
            return None
        if unit.exec_main_code and began:
            return died("ended")
        if began:
            # systemd forgets the exit code of a unit that nobody refers to any more.
            return Verdict(FAILED, f"{name} was stopped {_while(since)}".rstrip(), hint=restart)
        return Verdict(FAILED, f"{name} is not running ({unit.active_state}/{unit.sub_state})", hint=restart)
    if since.main_pid and unit.main_pid != since.main_pid:
        if unit.main_pid:
            return Verdict(FAILED, f"the main process of {name} changed from {since.main_pid} to {unit.main_pid}")
        return died()
    # While ExecStartPost= runs, systemd keeps the unit `activating` although its main process has ended.
    if not unit.main_pid and unit.exec_main_code and unit.sub_state in ("start-post", "running", "exited"):
        return died()
    return None


FREE_THE_PORT = "stop that process or choose another port"


def held_by(port: int, owner: Owner, who: str, extra: str = "") -> str:
    """Who holds the port in place of ``who``."""
    holders = ", ".join(owner.holders) or "a process that cannot be named"
    return f"port {port} is held by {holders}{extra}; it does not belong to {who}"


def decide(seen: Observation, since: Since, options: Options) -> Verdict:
    """From one observation and what was known before to a verdict. Pure."""
    dead = judge_life(seen.unit, seen.process, since, seen.elapsed)
    if dead is not None:
        return dead
    who = seen.unit.name if seen.unit is not None else f"process {seen.process.pid}" if seen.process else "the server"
    answered = seen.http is not None and seen.http.status > 0
    if seen.owner.kind == OTHERS:
        extra = f", which answered {seen.http.status} on /health" if answered and seen.http else ""
        return Verdict(FOREIGN, held_by(options.port, seen.owner, who, extra), hint=FREE_THE_PORT)
    if answered and seen.owner.kind == NOBODY:
        return Verdict(
            FOREIGN,
            f"port {options.port} answered, but no process of this host listens on it; the answer is not from {who}",
            hint="look for port forwarding, or set unit to '' for a server elsewhere",
        )
    healthy = seen.http is not None and seen.http.status == 200
    blind = seen.unit is not None and bool(seen.unit.error)
    if healthy and seen.owner.kind == UNKNOWN and not blind:
        return Verdict(
            FAILED,
            f"/health answers 200, but whether {who} owns port {options.port} cannot be seen without more rights",
            hint="run the gate as root (become: true) or as the unit's user",
        )
    if seen.pool is not None and not seen.pool.ok:
        return Verdict(POOL_TOO_SMALL, f"{who} answers /health with 200, but {seen.pool.text}", hint=seen.pool.hint)
    if seen.generation is not None:
        if not seen.generation.ok:
            return Verdict(
                GENERATION_FAILED, f"{who} answers /health with 200 but cannot generate: {seen.generation.error}"
            )
        if healthy and not blind:
            return Verdict(READY, f"{who} serves")
    if seen.elapsed >= options.timeout:
        last = since.last_status or (seen.http.text() if seen.http is not None else "none")
        doing = since.doing(since.state, seen.elapsed) if since.state else "starting"
        if healthy:
            doing = "in its first generation"
        elif not doing.startswith("the port"):
            doing = f"still {doing}"
        answer = "" if f"({last})" in doing else f" (last answer: {last})"
        return Verdict(TIMEOUT, f"{who} did not become ready: {doing}{answer}")
    if healthy and blind:
        return Verdict(
            WARMING, f"/health answers 200, but systemctl does not answer: {seen.unit.error if seen.unit else ''}"
        )
    if healthy:
        return (
            Verdict(WARMING, generate=True) if options.generate else Verdict(READY, f"{who} answers /health with 200")
        )
    if seen.http is None or seen.http.error == "refused":
        return Verdict(REFUSED, "nothing listens on the port yet")
    return Verdict(WARMING, f"/health: {seen.http.text()}")


# ----------------------------------------------------------------------------------------------------------- the gate


@dataclass(frozen=True)
class Options:
    """What the gate is asked; `check_options` says what is wrong with it."""

    unit: str = "sglang-kimi.service"
    pid: int = 0
    host: str = "127.0.0.1"
    port: int = 30000
    timeout: float = 900.0
    poll_interval: float = 1.0
    request_timeout: float = 25.0
    generation_timeout: float = 180.0
    model: str = ""
    prompt: str = "Say one short sentence."
    max_tokens: int = 16
    generate: bool = True
    expected_kv_tokens: int = 0
    kv_tolerance: float = 0.1
    last_start: str = ""
    journal_lines: int = 20


def check_options(options: Options) -> str:
    """Empty, or what was found, expected and what to do."""
    for name in ("timeout", "poll_interval", "request_timeout", "generation_timeout"):
        value = getattr(options, name)
        if not value > 0:
            return f"{name} is {value:g}, expected a number of seconds above 0"
    if not 1 <= options.port <= 65535:
        return f"port is {options.port}, expected 1 to 65535"
    if options.max_tokens < 1:
        return f"max_tokens is {options.max_tokens}, expected 1 or more"
    if options.expected_kv_tokens < 0:
        return f"expected_kv_tokens is {options.expected_kv_tokens}, expected a number of tokens, or 0 where it is not known"
    if not 0 <= options.kv_tolerance < 1:
        return f"kv_tolerance is {options.kv_tolerance:g}, expected a fraction from 0 to below 1, such as 0.1"
    if options.journal_lines < 0:
        return f"journal_lines is {options.journal_lines}, expected 0 or more"
    if not options.host:
        return "host is empty, expected the address that the server listens on, such as 127.0.0.1"
    if options.unit.startswith("-") or re.search(r"[\s/*?\[]", options.unit):
        return f"unit is {options.unit!r}, expected the name of one systemd unit, such as sglang-kimi.service"
    if options.pid and options.unit:
        return f"pid {options.pid} and unit {options.unit} are both given, expected one of them: set unit to '' to watch a pid"
    if options.pid < 0:
        return f"pid is {options.pid}, expected a process number above 0"
    return ""


def gate_said(lines: Iterable[str]) -> str:
    """The last words of the gate that runs inside the start (ExecStartPost=); empty when it said none."""
    said = [line.strip() for line in lines if _GATE_SAID.search(line)]
    return said[-1].partition(" Last journal lines:")[0] if said else ""


def unit_name(unit: str) -> str:
    """`sglang-kimi` -> `sglang-kimi.service`; systemctl would do the same, messages should too."""
    return unit if not unit or "." in unit else f"{unit}.service"


def usual_seconds(path: str) -> float:
    """Seconds that the last good start took, from `last-start.json` of the state directory; 0 where that is not known."""
    try:
        # The folder is the service's own: no link is followed out of it, no pipe waited for.
        with open(
            os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8"
        ) as stream:
            value = json.load(stream)["seconds_to_ready"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
    return float(value) if isinstance(value, (int, float)) and 0 < value < 1e6 else 0.0


@dataclass
class Gate:
    """Watches one server until it serves, cannot serve any more, or the time is over."""

    options: Options
    since: Since = Since()
    run: Runner = run_command
    request: Requester = HttpRequest
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    unit: UnitStatus | None = None
    process: ProcessStatus | None = None
    generation: Generation | None = None
    pool: Pool | None = None
    journal: list[str] = field(default_factory=list)
    said: str = ""
    _addresses: list[str] = field(default_factory=list)
    _began: float = 0.0
    _before: float = 0.0
    _unit_seen: float = 0.0
    _journal_read: float = float("-inf")

    def __post_init__(self) -> None:
        self.options = replace(self.options, unit=unit_name(self.options.unit))
        self._began = self._unit_seen = self.clock()
        self._before = self.since.elapsed
        self._addresses = resolve(self.options.host)

    # -- observing

    def elapsed(self) -> float:
        """Seconds since the gate began, those of earlier windows included."""
        return self._before + self.clock() - self._began

    def look(self) -> Verdict | None:
        """Look at the unit (or process): None while it lives."""
        if self.options.unit:
            self.unit = observe_unit(self.options.unit, self.run)
            if not self.unit.error:
                self._unit_seen = self.clock()
            elif self.clock() - self._unit_seen > SYSTEMCTL_PATIENCE or _NO_SYSTEMD.search(self.unit.error):
                return Verdict(
                    FAILED,
                    f"the state of {self.options.unit} cannot be read: {scrub(self.unit.error)}",
                    hint="use a host with systemd, or set unit to ''",
                )
        elif self.options.pid:
            self.process = observe_process(self.options.pid, self.proc)
        dead = judge_life(self.unit, self.process, self.since, self.elapsed())
        if dead is None:
            self.since = self.since.learn(self.unit, self.process)
        return dead

    def owner(self, answered: bool) -> Owner:
        """Whose socket it is; a surprising answer is looked at twice, because processes come and go between two reads."""
        if self.unit is None and self.process is None:
            return Owner()
        if self.unit is not None and self.unit.error:
            return Owner(UNKNOWN)
        unit, process = self.unit, self.process

        def pids() -> set[int]:
            if unit is not None:
                return unit_pids(unit, self.proc, self.cgroups)
            return descendants(process.pid, self.proc) if process else set()

        found = observe_owner(self._addresses, self.options.port, pids, self.proc)
        if found.kind == OTHERS or (answered and found.kind in (NOBODY, UNKNOWN)):
            self.sleep(0.2)
            found = observe_owner(self._addresses, self.options.port, pids, self.proc)
        return found

    def read_phase(self) -> None:
        """Progress from the journal, every few seconds only."""
        now = self.clock()
        if not self.options.unit or now - self._journal_read < JOURNAL_INTERVAL or (self.unit and _queued(self.unit)):
            return
        self._journal_read = now
        # A slow journal must not hide a death: progress is worth a second, no more.
        lines = observe_journal(self.options.unit, self.since.invocation_id, 200, self.run, 1.0)
        phase, sign = str(parse_progress(lines, self.since.phase)), last_sign(lines)
        # A checksum is enough to see that it changed, and holds no secret.
        sign = f"{zlib.crc32(sign.encode()):08x}" if sign else ""
        if sign and sign != self.since.sign:
            self.since = replace(self.since, sign=sign, sign_at=self.elapsed())
        if phase:
            self.since = replace(self.since, phase=phase)

    def ask(self, method: str, path: str, body: Any, limit: float) -> HttpAnswer | Verdict:
        """One request; the unit is watched while it is under way, and its death ends the wait."""
        began = self.clock()
        pending = self.request(self.options.host, self.options.port, method, path, body, limit)
        while True:
            answer = pending.wait(LIFE_INTERVAL)
            if answer is not None:
                return answer
            dead = self.look()
            if dead is not None:
                pending.abort()
                return dead
            used = self.clock() - began
            if used >= limit or self.elapsed() >= self.options.timeout:
                pending.abort()
                return HttpAnswer(error="timeout", seconds=used)
            if self.since.state != GENERATING:
                # There is nothing to read any more, and an answer must not wait for a slow journal.
                self.read_phase()

    def pause(self, seconds: float) -> Verdict | None:
        """Wait, but notice a death meanwhile."""
        until = self.clock() + seconds
        while (left := until - self.clock()) > 0:
            self.sleep(min(LIFE_INTERVAL, left))
            dead = self.look()
            if dead is not None:
                return dead
        return None

    # -- deciding

    def observe(self, http: HttpAnswer | None, owner: Owner) -> Observation:
        """Everything seen so far as one observation."""
        return Observation(self.elapsed(), self.unit, self.process, owner, http, self.generation, self.pool)

    def judge(self, http: HttpAnswer | None, owner: Owner) -> Verdict:
        """`decide` with this gate's options."""
        return decide(self.observe(http, owner), self.since, self.options)

    def model(self) -> str | Verdict:
        """Name under which the model is served."""
        if self.options.model:
            return self.options.model
        answer = self.ask("GET", "/v1/models", None, min(10.0, self.options.request_timeout))
        if isinstance(answer, Verdict):
            return answer
        try:
            return str(json.loads(answer.body)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            # The engine takes any name; if it does not, its own error is the better message.
            return "default"

    def generate(self) -> Verdict | None:
        """One real generation; None when it was made (well or not), a verdict when the server died over it."""
        model = self.model()
        if isinstance(model, Verdict):
            return model
        body = generation_body(model, self.options.prompt, self.options.max_tokens)
        for _attempt in range(GENERATION_TRIES):
            answer = self.ask("POST", "/v1/chat/completions", body, self.options.generation_timeout)
            if isinstance(answer, Verdict):
                return answer
            if answer.error == "timeout" and self.elapsed() >= self.options.timeout:
                return None
            self.generation = judge_generation(answer)
            if self.generation.ok:
                return None
            if answer.status != 200:
                return self.pause(DEATH_GRACE)
        return None

    def read_pool(self) -> Verdict | None:
        """The KV pool of a server that has answered, once; a verdict when it died over the question."""
        if self.since.kv_tokens >= 0:
            self.judge_pool(self.since.kv_tokens)
            return None
        info = None
        for path in ("/server_info", "/get_server_info"):
            answer = self.ask("GET", path, None, min(INFO_TIMEOUT, self.options.request_timeout))
            if isinstance(answer, Verdict):
                return answer
            if answer.status == 200:
                with contextlib.suppress(ValueError):
                    info = json.loads(answer.body)
            if answer.status != 404:
                break
        self.judge_pool(memory_from_info(info).kv_tokens or 0)
        return None

    def judge_pool(self, seen: int) -> None:
        """Keep what the engine says of its pool (0: nothing), and what that means."""
        self.since = replace(self.since, kv_tokens=seen)
        self.pool = judge_pool(seen, self.options.expected_kv_tokens, self.options.kv_tolerance)

    def learn(self, answer: HttpAnswer) -> None:
        """Keep what /health said."""
        attempts = self.since.attempts + 1
        if answer.error == "timeout" and self.since.last_status and self.elapsed() >= self.options.timeout:
            # Cut short because the gate's own time is over: that says nothing about the server.
            self.since = replace(self.since, attempts=attempts)
            return
        silent = answer.status == 503 and answer.seconds >= SILENT_AFTER
        self.since = replace(self.since, attempts=attempts, last_status=answer.text(), silent=silent)

    def step(self, announce: bool = False) -> Verdict:
        """One round: life, socket, /health, and, after the first 200, the KV pool and the generation.

        With `announce` the round ends before the generation, once, so that the caller can say what is under way: on a cold
        host it takes minutes.
        """
        dead = self.look()
        if dead is not None:
            return dead
        if self.since.generating:
            # The 200 was a moment ago, and ours.
            answer = HttpAnswer(200)
            owner = self.owner(answered=True)
        else:
            self.read_phase()
            owner = self.owner(answered=False)
            if owner.kind == OTHERS:
                return self.judge(None, owner)
            asked = self.ask("GET", "/health", None, self.options.request_timeout)
            if isinstance(asked, Verdict):
                return asked
            answer = asked
            self.learn(answer)
            if answer.error != "refused":
                # What answered must be ours, and still alive: a reset connection is often the first sign of a death.
                dead = self.look()
                if dead is not None:
                    return dead
                owner = self.owner(answered=answer.status > 0)
        verdict = self.judge(answer, owner)
        if verdict.generate or verdict.state == READY:
            dead = self.read_pool()
            if dead is not None:
                return dead
            verdict = self.judge(answer, owner)
        if verdict.generate:
            self.since = replace(self.since, state=GENERATING)
            if announce and not self.since.generating:
                self.since = replace(self.since, generating=True)
                return Verdict(GENERATING, "/health answers 200; the first generation is next")
            dead = self.generate() or self.look()
            if dead is not None:
                return dead
            verdict = self.judge(answer, self.owner(answered=True))
        return verdict

    def wait(self, window: float = 0.0) -> dict[str, Any]:
        """Observe until a final state, or, with a window, until the window is over and no request is under way.

        A window also ends before the generation, so that the caller can say so.
        """
        while True:
            verdict = self.step(announce=window > 0)
            if verdict.state not in INTERIM:
                return self.result(verdict)
            self.since = replace(self.since, state=verdict.state)
            left = window - (self.clock() - self._began)
            # A pause at the end of a window would only come on top of the caller's own way back here.
            if window > 0 and (left <= self.options.poll_interval or verdict.state == GENERATING):
                return self.result(verdict)
            dead = self.pause(min(self.options.poll_interval, max(0.0, self.options.timeout - self.elapsed())))
            if dead is not None:
                return self.result(dead)

    def once(self) -> dict[str, Any]:
        """One observation without waiting and without a generation (check mode)."""
        limit = min(self.options.request_timeout, 5.0)
        self.options = replace(self.options, generate=False, request_timeout=limit)
        return self.result(self.step())

    # -- reporting

    def result(self, verdict: Verdict) -> dict[str, Any]:
        """The same keys in every state."""
        elapsed = self.elapsed()
        final = verdict.state not in INTERIM
        if final and verdict.state != READY and self.options.unit and not self.journal:
            known = self.since.invocation_id or (self.unit.invocation_id if self.unit else "")
            few = self.options.journal_lines
            lines = observe_journal(self.options.unit, known, max(few, SAID_WITHIN) if known and few else few, self.run)
            self.said = gate_said(lines)
            self.journal = last_pieces(line for line in lines[-few:] if not self.said or not line.startswith(self.said))
        pid = self.since.main_pid or self.options.pid
        if self.unit is not None and self.unit.main_pid:
            pid = self.unit.main_pid
        since = replace(self.since, elapsed=elapsed, state=verdict.state if not final else self.since.state)
        return {
            "state": verdict.state,
            "ready": verdict.state == READY,
            "elapsed": round(elapsed, 1),
            "attempts": self.since.attempts,
            "last_status": self.since.last_status,
            "unit": self.unit.public() if self.unit is not None and self.options.unit else {},
            "pid": pid,
            "phase": self.since.phase,
            "doing": since.doing(verdict.state, elapsed),
            "usual": usual_seconds(self.options.last_start) if self.options.last_start else 0.0,
            "pool": self.pool.public() if self.pool is not None else {},
            "generation": self.generation.public() if self.generation is not None else {},
            "journal": self.journal,
            "msg": self.message(verdict, elapsed),
            "_since": asdict(since),
        }

    def message(self, verdict: Verdict, elapsed: float) -> str:
        """What was found, what was expected, what to do, and the journal's last words."""
        options = self.options
        if verdict.state == READY:
            text = f"{verdict.reason} after {seconds_text(elapsed)} s"
            if self.generation is not None:
                text += f"; generated {self.generation.tokens} tokens in {self.generation.seconds:.1f} s"
            return text + (f"; {self.pool.text}" if self.pool is not None else "")
        if verdict.state in INTERIM:
            return verdict.reason + (f" ({self.since.phase})" if self.since.phase else "")
        found = verdict.reason
        if verdict.state != FAILED or " after " not in found:
            found += f" after {seconds_text(elapsed)} s"
        more = {GENERATION_FAILED: " and one generation", POOL_TOO_SMALL: " and the planned KV pool"}
        wanted = HEALTHY + more.get(verdict.state, "")
        text = (
            f"{found} (expected: {wanted} on {options.host}:{options.port} within {seconds_text(options.timeout)} s)."
        )
        todo = [verdict.hint] if verdict.hint else []
        if options.unit:
            todo.append(f"journalctl -u {options.unit} -n 200")
        if todo:
            text += f" Do: {'; '.join(todo)}."
        # It ended the start for this reason, and what the engine wrote over its end comes after it.
        if self.said and steady(self.said.partition(f" (expected: {HEALTHY}")[0]) != steady(found):
            text += f" The gate of the start said: {self.said}"
        if self.journal:
            text += " Last journal lines:\n" + "\n".join(f"  {line}" for line in self.journal)
        return text


# -------------------------------------------------------------------------------------------------------- on the host


def _say(line: str) -> None:
    """A line for the journal, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def read_settings(path: str) -> dict[str, Any]:
    """The part `gate` of a settings file as arguments of `Options`. Raises ValueError: found, expected, what to do."""
    try:
        with open(path, encoding="utf-8") as stream:
            document = json.load(stream)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}), expected the settings that site.yml writes: run it"
        ) from error
    part = document.get("gate") if isinstance(document, dict) else None
    if not isinstance(part, dict):
        raise ValueError(f"{path} holds no part named gate, expected what site.yml writes: run it")
    given: dict[str, Any] = {}
    # What this program does not know is left alone: a newer play may have written it.
    for key, default in asdict(Options()).items():
        if key not in part:
            continue
        kind, value = type(default), part[key]
        if isinstance(value, bool) != (kind is bool) or (kind in (int, float) and not isinstance(value, (int, float))):
            raise ValueError(f"{path}: gate.{key} is {value!r}, expected {kind.__name__}: correct it, or run site.yml")
        given[key] = kind(value)
    return given


def with_settings(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Arguments of `Options`: what is None in `given` comes from a settings file, and without one it is the default.

    A file that is not there says nothing: the first play checks before it writes. Raises ValueError.
    """
    known = read_settings(path) if path and Path(path).exists() else {}
    defaults = asdict(Options())
    return {name: known.get(name, defaults[name]) if value is None else value for name, value in given.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """The gate as a program: progress and verdict on standard output; 0 ready, 1 not ready, 2 wrong options."""
    parser = argparse.ArgumentParser(prog="gate", description="Wait until the server serves.", allow_abbrev=False)
    parser.add_argument("--settings", metavar="FILE", help="settings file; the other options go over what it says")
    for name, default in asdict(Options()).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, type=type(default), metavar=type(default).__name__)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    try:
        settings = given.pop("settings", "")
        options = Options(**{**(read_settings(settings) if settings else {}), **given})
    except ValueError as error:
        parser.error(str(error))
    wrong = check_options(options)
    if wrong:
        parser.error(wrong)
    label = options.unit.removesuffix(".service") or f"{options.host}:{options.port}"
    since, shown = Since(), ""
    while True:
        result = Gate(options, since).wait(5.0)
        since = Since.load(result["_since"])
        if result["state"] not in INTERIM:
            _say(result["msg"])
            return 0 if result["ready"] else 1
        key = steady(result["doing"])
        if key != shown:
            shown = key
            words = (result["elapsed"], options.timeout, result["doing"], result["usual"])
            _say(progress_line(label, socket.gethostname(), *words))


if __name__ == "__main__":
    raise SystemExit(main())
