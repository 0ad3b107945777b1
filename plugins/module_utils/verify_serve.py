# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""The server that runs: its process, its sockets, what it answers, and what its log holds since it was started."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import acceptance
from .health import Generation, HttpAnswer, UnitStatus, scrub
from .health_pool import judge_pool, memory_from_info
from .metrics import RUNNING, Metrics
from .service import PLAN_VARIABLE, without_secrets
from .verify import (
    WARNING,
    Check,
    failed,
    listed,
    passed,
    skipped,
    unknown,
)
from .verify_unit import UnitSeen, variable_text

#: Variables that change what the engine does: one that the plan does not have is a finding, others are nobody's business.
ENGINE_VARIABLES = re.compile(
    r"^(SGLANG_|SGL_|NCCL_|CUDA_|TORCH|PYTORCH|TRITON|FLASHINFER|VLLM_|LD_|PYTHON|OMP_|HF_|TVM_|CUBLAS|CUDNN)"
)
#: Set by systemd or by the interpreter itself.
_NOT_THE_UNITS = {"PYTHONSAFEPATH"}


@dataclass(frozen=True)
class ProcessSeen:
    """The main process. Workers change their title, which overwrites their environment: they are not read."""

    status: UnitStatus
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Files of the release that are newer than the process; None when that is not known.
    newer: Sequence[str] | None = ()

    @property
    def runs(self) -> bool:
        """Whether there is a server to ask."""
        return self.status.active_state == "active" and self.status.main_pid > 0


def check_process(seen: ProcessSeen, unit: UnitSeen, plan: Mapping[str, Any]) -> list[Check]:
    """process, process_command, process_environment, process_release, restarts.

    A process that follows a changed unit is that change's consequence: the unit's checks have named it.
    """
    name = seen.status.name
    if seen.status.error:
        why = scrub(seen.status.error)
        return [unknown("process", f"process of {name}", why, "Look at `systemctl status` on the host.")]
    if not seen.runs:
        how = seen.status.exit_text()
        found = f"{seen.status.active_state}/{seen.status.sub_state}" + (f" ({how})" if how else "")
        why = f"`journalctl -u {name} -n 100` says why; `systemctl start {name}` starts it and waits until it serves."
        if seen.status.active_state == "inactive":
            why = (
                f"It was stopped and did not fail (playbooks/stop.yml, or `systemctl stop {name}`; `journalctl -u {name} -n 20` says when): "
                f"playbooks/start.yml starts it, or on the host `systemctl start {name}`; both wait until it serves."
            )
        return [
            failed(
                "process",
                f"process of {name}",
                found,
                "active/running",
                why,
            )
        ]
    checks = [passed("process", f"process of {name}", f"active/running, pid {seen.status.main_pid}", "active/running")]
    checks.append(_check_command(seen, unit, plan))
    checks.append(_check_environment(seen, unit, plan))
    id_, subject = "process_release", "release of the process"
    if "/releases/" not in plan["command"][0]:
        checks.append(skipped(id_, subject, f"{plan['command'][0]} is no release of this collection"))
    elif seen.newer is None:
        why = "the start of the process cannot be read"
        checks.append(unknown(id_, subject, why, "Look at `systemctl status` on the host."))
    elif seen.newer:
        checks.append(
            failed(
                id_,
                subject,
                f"{', '.join(seen.newer)} changed after the process started",
                "a process that was started from the release as it is",
                "Run site.yml: it restarts the server.",
            )
        )
    else:
        checks.append(passed(id_, subject, "as it was when the process started"))
    id_, subject = "restarts", "restarts by systemd"
    if seen.status.n_restarts:
        checks.append(
            failed(
                id_,
                subject,
                str(seen.status.n_restarts),
                "0",
                f"`journalctl -u {name}` and the incident folder say why it died; `systemctl reset-failed {name}` "
                "sets the count back.",
                WARNING,
            )
        )
    else:
        checks.append(passed(id_, subject, "0"))
    return checks


def _check_command(seen: ProcessSeen, unit: UnitSeen, plan: Mapping[str, Any]) -> Check:
    id_, subject = "process_command", "command line of the process"
    wanted = [str(word) for word in plan["command"]]
    if list(seen.command) == wanted:
        return passed(id_, subject, "the plan's", "the plan's")
    if " ".join(seen.command) == unit.start_words():
        return passed(id_, subject, "that of the changed unit", "the plan's, or what the unit says")
    shown, plain = without_secrets(seen.command), without_secrets(wanted)
    extra = [word for word in _groups(shown) if word not in _groups(plain)]
    missing = [word for word in _groups(plain) if word not in _groups(shown)]
    return failed(
        id_,
        subject,
        listed([*(f"has {word}" for word in extra), *(f"lacks {word}" for word in missing)]) or "another order",
        "the plan's",
        f"The process was started from another unit: `systemctl restart {unit.name}`, or site.yml.",
    )


def _groups(words: Sequence[str]) -> list[str]:
    """`--flag value` as one piece."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and groups[-1]:
            groups.append([])
        groups[-1].append(word)
    return [" ".join(group) for group in groups if group]


def _check_environment(seen: ProcessSeen, unit: UnitSeen, plan: Mapping[str, Any]) -> Check:
    id_, subject = "process_environment", "environment of the process"
    if not seen.environment:
        return unknown(id_, subject, "it cannot be read", "Run verify as root (become).")
    wanted = {str(name): str(value) for name, value in plan["env"].items()}
    wanted[PLAN_VARIABLE] = str(plan["process_hash"])
    now = unit.environment()
    found = []
    for name, value in wanted.items():
        has = seen.environment.get(name)
        if has != value and has != now.get(name):
            shown = f"{variable_text(name, has or '', wanted)} (planned {scrub(value)})"
            found.append(shown if has is not None else f"no {name}")
    for name, value in seen.environment.items():
        known = name in wanted or name in _NOT_THE_UNITS or now.get(name) == value or unit.has_foreign_environment()
        if ENGINE_VARIABLES.match(name) and not known:
            found.append(f"{variable_text(name, value, wanted)}, which the plan does not have")
    if not found:
        return passed(id_, subject, "the plan's", "the plan's")
    return failed(
        id_,
        subject,
        listed(found),
        "the plan's",
        f"The process was started from another unit: `systemctl restart {unit.name}`, or site.yml.",
    )


# --------------------------------------------------------------------------------------------------- sockets


def check_port(
    listening: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], unit: str, runs: bool, pids: Iterable[int]
) -> Check:
    """One listener on the port, the unit's, at the planned address."""
    endpoint = plan["endpoint"]
    id_, subject = "port", f"port {endpoint['port']}"
    ours = set(pids)
    entries = [entry for entry in listening if entry["port"] == endpoint["port"]]
    own = [entry for entry in entries if entry["unit"] == unit or entry["pid"] in ours]
    found = [
        f"{entry['address']} is held by {scrub(str(entry['command'] or 'a process that cannot be seen'))[:100]} "
        f"(pid {entry['pid'] or 'unknown'}{', ' + str(entry['unit']) if entry['unit'] else ''})"
        for entry in entries
        if entry not in own
    ]
    found += [f"{unit} listens on {entry['address']}" for entry in own if entry["address"] != endpoint["host"]]
    expected = f"{unit} on {endpoint['host']} and nobody else"
    if runs and not own:
        found.append(f"{unit} does not listen")
    if found:
        return failed(
            id_,
            subject,
            listed(found),
            expected,
            f"`ss -Hltnp 'sport = :{endpoint['port']}'` shows it; stop what does not belong there: clients may reach it "
            "instead of the server.",
        )
    if not runs:
        return skipped(id_, subject, "the service does not run")
    return passed(id_, subject, f"{unit} on {endpoint['host']}", expected)


def check_servers(servers: Sequence[Mapping[str, Any]], unit: str, pids: Iterable[int]) -> Check:
    """No other inference server, and no worker whose server is gone, shares the GPUs."""
    id_, subject = "servers", "other inference servers"
    ours = set(pids)
    others = [entry for entry in servers if entry["unit"] != unit and entry["pid"] not in ours]
    if not others:
        return passed(id_, subject, "none")
    words = [
        f"{'orphaned worker' if entry['orphan'] else 'server'} {entry['engine']}, pid {entry['pid']}, user {entry['user']}"
        f"{', ' + str(entry['unit']) if entry['unit'] else ''}"
        for entry in others
    ]
    return failed(
        id_,
        subject,
        listed(words),
        "none",
        "It takes GPU memory and time from this server: stop it, or move it to other GPUs.",
    )


# --------------------------------------------------------------------------------------------------- answers


def check_health(answer: HttpAnswer | None, unit: str) -> Check:
    """`/health`, which makes the engine produce one token."""
    id_, subject = "health", "/health"
    if answer is None:
        return skipped(id_, subject, "the service does not run")
    if answer.status == 200:
        return passed(id_, subject, f"200 after {answer.seconds:.1f} s", "200")
    return failed(
        id_,
        subject,
        f"{answer.text()} after {answer.seconds:.1f} s",
        "200",
        f"503 after 20 s means that the scheduler hangs or is dead. Look at the incident folder and "
        f"`journalctl -u {unit} -n 200`, then restart.",
    )


def check_generation(generation: Generation | None, why: str, unit: str) -> Check:
    """One sampled answer."""
    id_, subject = "generation", "one generation"
    if generation is None:
        return skipped(id_, subject, why)
    if generation.ok:
        return passed(
            id_, subject, f"{generation.tokens} tokens after {generation.seconds:.1f} s", "an answer with text"
        )
    return failed(
        id_,
        subject,
        scrub(generation.error),
        "an answer with text",
        f"The server looks healthy and cannot work: `journalctl -u {unit} -n 200`, then restart it.",
    )


def accept_length(server_info: str) -> float | None:
    """Tokens a verification pass since the start, out of `/server_info`; None when it does not say. Nothing else of that
    answer may be kept: it holds the API key."""
    try:
        states = json.loads(server_info).get("internal_states")
        value = states[0].get("avg_spec_accept_length")
    except (ValueError, AttributeError, IndexError, KeyError, TypeError):
        return None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def check_pool(plan: Mapping[str, Any], answer: HttpAnswer | None, tolerance: float) -> Check:
    """The KV pool is as large as planned: a server whose memory somebody else holds starts healthy with a smaller one."""
    id_, subject = "kv_pool", "KV pool"
    if answer is None:
        return skipped(id_, subject, "the service does not answer")
    planned = plan["budget"].get("kv_tokens")
    # The plan says itself how sure it is.
    tolerance = max(tolerance, plan["budget"].get("kv_uncertainty") or 0.0)
    try:
        info = json.loads(answer.body) if answer.status == 200 else None
    except ValueError:
        info = None
    pool = judge_pool(memory_from_info(info).kv_tokens, planned, tolerance)
    if not pool.judged and planned:
        return unknown(
            id_, subject, f"/server_info does not say ({answer.text()})", "Look at /server_info on the host."
        )
    if not pool.judged:
        return skipped(id_, subject, pool.text)
    expected = f"{planned} tokens, at most {tolerance:.0%} less"
    if pool.ok:
        return passed(id_, subject, pool.text, expected)
    return failed(id_, subject, pool.text, expected, f"{pool.hint[:1].upper()}{pool.hint[1:]}.")


def check_speculation(
    plan: Mapping[str, Any],
    answer: HttpAnswer | None,
    metrics: HttpAnswer | None = None,
    benchmark: Mapping[str, Any] | None = None,
) -> Check:
    """Above 1, or speculation costs and brings nothing; and not far below the last benchmark's, of which it is warned."""
    id_, subject = "accept_length", "acceptance length"
    if not plan["args"].get("--speculative-algorithm"):
        return skipped(id_, subject, "the plan does not speculate")
    if answer is None:
        return skipped(id_, subject, "the service does not answer")
    value = accept_length(answer.body) if answer.status == 200 else None
    if value is None:
        return unknown(
            id_, subject, f"/server_info says nothing ({answer.text()})", "Look at /server_info on the host."
        )
    if value > 1:
        seen = Metrics.parse(metrics.body if metrics is not None and metrics.status == 200 else "")
        now, running = seen.accept_length or value, int(seen.total(RUNNING) or 0)
        found = acceptance.watch(now, plan["args"], benchmark, running)
        if found.state != acceptance.LOW:
            return passed(id_, subject, f"{value:.2f} since the start; {found.message}", "above 1")
        action = f"{found.causes[0]}. Others: {'; '.join(found.causes[1:])}. Switch: {found.switch}."
        expected = f"about {found.expected:.2f}, as the last benchmark had" if found.expected else "above 1"
        return failed(id_, subject, f"{now:.2f} in the last steps", expected, f"Look at {action}", WARNING)
    return failed(
        id_,
        subject,
        f"{value:.2f} since the start",
        "above 1",
        "The draft is never right: wrong draft model, or all-reduce fusion without the patch eagle3-aux-capture. "
        "Serve the profile baseline until it is mended.",
    )


# --------------------------------------------------------------------------------------------------- the log

#: Lines that mean that something in the engine broke, whoever asked for what.
_BROKEN = re.compile(
    r"Scheduler hit an exception|CUDA error|CUDA out of memory|OutOfMemoryError|NCCL error|ncclUnhandledCudaError"
    r"|ncclSystemError|ncclInternalError|[Ww]atchdog (?:caught|timeout|got)|Segmentation fault|SIGQUIT received"
)
#: Ends of a traceback that only say that a client went away.
_ABORTED = re.compile(
    r"^(?:[\w.]*\.)?(?:CancelledError|ClientDisconnect|ClientDisconnected|ConnectionResetError|BrokenPipeError"
    r"|EndOfStream|BrokenResourceError|IncompleteRead(?:Error)?|LocalProtocolError|AbortedError)\b"
    r"|[Rr]equest (?:is )?(?:disconnected|aborted|cancelled)|Abort (?:before prefill|in waiting queue)"
)
_REQUEST = re.compile(r"Exception in ASGI application")
_TRACEBACK = "Traceback (most recent call last):"
_ANOTHER = re.compile(r"^\s*(?:\[[^\]]*\]\s*)?(?:During handling of the above|The above exception was the direct)")
_NCCL = re.compile(r"NCCL WARN\b.*")
_XID = re.compile(r"NVRM: Xid \((?P<device>[^)]*)\): (?P<number>\d+)(?P<rest>.*)")
_PREFIX = re.compile(r"^\[[^\]]*\]\s*")


@dataclass(frozen=True)
class LogFindings:
    """What the engine's log says: broken, of single requests, of NCCL. ``aborted`` counts what is left out."""

    broken: list[str]
    requests: list[str]
    nccl: list[str]
    aborted: int = 0


def scan_log(lines: Iterable[str], ignore: Sequence[str] = ()) -> LogFindings:
    """Sort what matters out of the engine's log. A traceback is known by its last line, the exception."""
    patterns = [re.compile(pattern) for pattern in ignore]
    kept: dict[str, list[str]] = {"broken": [], "requests": [], "nccl": []}
    aborted = 0
    # Whose traceback this is, and the exception that ended the last one: it counts unless another one follows from it.
    inside, whose, expect, ended = False, "broken", "broken", ""

    def keep(where: str, text: str) -> None:
        shown = scrub(_PREFIX.sub("", text).strip())[:200]
        if shown and shown not in kept[where] and not any(pattern.search(text) for pattern in patterns):
            kept[where].append(shown)

    def close() -> None:
        nonlocal aborted, ended
        if ended:
            if _ABORTED.search(ended):
                aborted += 1
            else:
                keep(whose, ended)
        ended = ""

    for raw in lines:
        line = raw.rsplit("\r", 1)[-1].rstrip()
        if inside:
            if not line or line[0] in " \t|+":
                continue
            if _TRACEBACK not in line and not _ANOTHER.match(line):
                inside, ended = False, _PREFIX.sub("", line)
                continue
        if not line:
            continue
        if _ANOTHER.match(line):
            # The exception before was only the cause.
            inside, ended = False, ""
            expect = whose
        elif _TRACEBACK in line:
            close()
            inside, whose, expect = True, "broken" if "Scheduler hit an exception" in line else expect, "broken"
        else:
            close()
            found = _NCCL.search(line)
            expect = "requests" if _REQUEST.search(line) else "broken"
            if found:
                keep("nccl", found.group(0))
            elif _BROKEN.search(line) and not _ABORTED.search(line):
                keep("broken", line)
    close()
    return LogFindings(kept["broken"], kept["requests"], kept["nccl"], aborted)


def scan_xids(lines: Iterable[str], ignored: Sequence[int] = ()) -> list[str]:
    """Faults of GPUs that the kernel reported: ``Xid 79 (PCI:0000:41:00)``."""
    found = []
    for line in lines:
        match = _XID.search(line)
        if match and int(match.group("number")) not in ignored:
            found.append(f"Xid {match.group('number')} ({match.group('device')}){match.group('rest')[:100].rstrip()}")
    return list(dict.fromkeys(found))


def check_log(log: LogFindings | str | None, unit: str) -> list[Check]:
    """log_engine, log_requests, log_nccl; a text is why nobody knows."""
    names = {
        "log_engine": "failures in the engine's log",
        "log_requests": "requests that ended in an exception",
        "log_nccl": "NCCL warnings",
    }
    if log is None:
        return [skipped(id_, subject, "the service does not run") for id_, subject in names.items()]
    if isinstance(log, str):
        do = f"Look at `journalctl -u {unit}` on the host; the role needs root to read it."
        return [unknown(id_, subject, log, do) for id_, subject in names.items()]
    look = f"`journalctl -u {unit}` since the start; verify_log_ignore takes what is known and harmless."
    left_out = f" ({log.aborted} of aborted requests left out)" if log.aborted else ""
    checks = []
    for id_, lines, severity in (
        ("log_engine", log.broken, "error"),
        ("log_requests", log.requests, WARNING),
        ("log_nccl", log.nccl, WARNING),
    ):
        if lines:
            checks.append(failed(id_, names[id_], listed(lines), "none since this start", look, severity))
        else:
            none = "none since this start"
            checks.append(passed(id_, names[id_], none + (left_out if id_ == "log_engine" else ""), none))
    return checks


def check_xids(found: Sequence[str] | str | None, container: bool = False) -> Check:
    """Faults that the driver reported since this start; a text is why nobody knows. A container need not see the kernel."""
    id_, subject = "log_xid", "GPU faults (Xid)"
    if found is None:
        return skipped(id_, subject, "the service does not run")
    if isinstance(found, str) and container:
        return skipped(id_, subject, f"the kernel's log is not visible in this container ({found})")
    if isinstance(found, str):
        return unknown(id_, subject, found, "Look at `journalctl -k` and `dmesg` on the host.")
    if not found:
        return passed(id_, subject, "none since this start")
    return failed(
        id_,
        subject,
        listed(found),
        "none since this start",
        "`journalctl -k --grep Xid`; 79 (off the bus), 48, 63, 64, 94 and 95 (memory) mean hardware: take the GPU out of "
        "service. Others: restart the server, and the host when it comes again.",
    )
