# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""What the host says about a server: systemd, the journal, processes, and whose socket it is.

Standard library only. Times are seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .health_text import scrub

# ----------------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True)
class CommandResult:
    """What a command said; rc 127: there is no such command, 124: it took too long."""

    rc: int
    out: str = ""
    err: str = ""


Runner = Callable[[Sequence[str], float], CommandResult]


def run_command(argv: Sequence[str], timeout: float) -> CommandResult:
    """Run a command without a shell, in the C locale."""
    env = {**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
    try:
        done = subprocess.run(
            list(argv), capture_output=True, timeout=timeout, env=env, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        return CommandResult(127, err=f"{argv[0]}: command not found")
    except subprocess.TimeoutExpired:
        return CommandResult(124, err=f"{argv[0]}: no answer within {timeout:.0f} s")
    except OSError as error:
        return CommandResult(126, err=f"{argv[0]}: {error}")
    return CommandResult(
        done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    )


# ------------------------------------------------------------------------------------------------------------ systemd

UNIT_PROPERTIES = (
    "LoadState,ActiveState,SubState,MainPID,ExecMainStatus,ExecMainCode,ExecMainStartTimestampMonotonic,"
    "ExecMainExitTimestampMonotonic,Result,NRestarts,InvocationID,ControlGroup,Job"
)


@dataclass(frozen=True)
class UnitStatus:
    """Properties of a unit as `systemctl show` prints them; `error` when it could not be asked."""

    name: str
    load_state: str = ""
    active_state: str = ""
    sub_state: str = ""
    main_pid: int = 0
    exec_main_code: int = 0
    exec_main_status: int = 0
    run_seconds: float = 0.0
    result: str = ""
    n_restarts: int = 0
    invocation_id: str = ""
    control_group: str = ""
    job: bool = False
    error: str = ""

    def public(self) -> dict[str, Any]:
        """What the module returns."""
        inner = ("load_state", "run_seconds", "control_group", "job", "error")
        return {key: value for key, value in asdict(self).items() if key not in inner}

    def exit_text(self) -> str:
        """How the main process ended: `status=9/KILL`, `status=2`; empty while it runs."""
        if self.exec_main_code in (2, 3):
            try:
                name = signal.Signals(self.exec_main_status).name.removeprefix("SIG")
            except ValueError:
                name = "?"
            text = f"status={self.exec_main_status}/{name}" + (" (core dumped)" if self.exec_main_code == 3 else "")
        elif self.exec_main_code == 1:
            text = f"status={self.exec_main_status}"
        else:
            text = ""
        if self.result not in ("", "success", "exit-code", "signal", "core-dump"):
            text = f"{text}, result={self.result}" if text else f"result={self.result}"
        return text


def _number(text: str | None) -> int:
    # systemd prints `[not set]` and 2^64-1 for what it does not know.
    return int(text) if text and text.isdigit() and len(text) < 19 else 0


def parse_unit(name: str, text: str) -> UnitStatus:
    """`systemctl show` output to a status."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    started = _number(values.get("ExecMainStartTimestampMonotonic"))
    ended = _number(values.get("ExecMainExitTimestampMonotonic"))
    return UnitStatus(
        name=name,
        load_state=values.get("LoadState", ""),
        active_state=values.get("ActiveState", ""),
        sub_state=values.get("SubState", ""),
        main_pid=_number(values.get("MainPID")),
        exec_main_code=_number(values.get("ExecMainCode")),
        exec_main_status=_number(values.get("ExecMainStatus")),
        run_seconds=(ended - started) / 1e6 if ended > started > 0 else 0.0,
        result=values.get("Result", ""),
        n_restarts=_number(values.get("NRestarts")),
        invocation_id=values.get("InvocationID", ""),
        control_group=values.get("ControlGroup", ""),
        job=_number(values.get("Job")) > 0,
    )


def observe_unit(name: str, run: Runner = run_command) -> UnitStatus:
    """Ask systemd about a unit."""
    answer = run(["systemctl", "show", "--no-pager", "-p", UNIT_PROPERTIES, "--", name], 5.0)
    if answer.rc != 0 or "ActiveState=" not in answer.out:
        return UnitStatus(name, error=(answer.err or answer.out).strip() or f"systemctl ended with status {answer.rc}")
    return parse_unit(name, answer.out)


def observe_journal(
    unit: str, invocation_id: str, lines: int, run: Runner = run_command, limit: float = 5.0
) -> list[str]:
    """Last journal lines of this run of the unit (both the engine's and systemd's about it), without secrets."""
    if lines <= 0:
        return []
    base = ["journalctl", "--no-pager", "--quiet", "--all", "-o", "cat", "-n", str(lines)]
    ways = [[*base, "-u", unit]]
    if invocation_id:
        # The engine's own lines carry _SYSTEMD_INVOCATION_ID, those of systemd about the unit INVOCATION_ID.
        own = [f"_SYSTEMD_INVOCATION_ID={invocation_id}", "+", f"INVOCATION_ID={invocation_id}", "_PID=1"]
        ways.insert(0, [*base, *own])
    for argv in ways:
        answer = run(argv, limit)
        if answer.rc == 0 and answer.out.strip():
            # splitlines() would also cut at the carriage returns of a progress bar and lose count of the lines.
            return [scrub(line.rstrip()) for line in answer.out.split("\n") if line.strip()][-lines:]
    return []


# ---------------------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class ProcessStatus:
    """A process without a unit; `started` (clock ticks since boot) tells it from a later one with the same number."""

    pid: int
    alive: bool
    started: str = ""


def observe_process(pid: int, proc: Path = Path("/proc")) -> ProcessStatus:
    """Is the process there and not a zombie?"""
    try:
        # The command in parentheses may hold blanks and parentheses itself.
        fields = (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return ProcessStatus(pid, fields[0] not in ("Z", "X"), fields[19])
    except (OSError, IndexError):
        return ProcessStatus(pid, False)


def descendants(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """The process and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in proc.glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        current = todo.pop()
        if current not in found:
            found.add(current)
            todo.extend(children.get(current, []))
    return found


def unit_pids(unit: UnitStatus, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> set[int]:
    """Processes in the unit's control group; where that cannot be read, the main process and its descendants."""
    found: set[int] = {unit.main_pid} if unit.main_pid else set()
    if unit.control_group and unit.control_group != "/":
        for root in (cgroups, cgroups / "systemd"):
            for path in (root / unit.control_group.lstrip("/")).rglob("cgroup.procs"):
                try:
                    found.update(int(line) for line in path.read_text("ascii").split())
                except (OSError, ValueError):
                    continue
    if len(found) < 2 and unit.main_pid:
        found |= descendants(unit.main_pid, proc)
    return found


# --------------------------------------------------------------------------------------------------------- the socket

OURS = "ours"
OTHERS = "others"
NOBODY = "nobody"
UNKNOWN = "unknown"
UNCHECKED = "unchecked"


@dataclass(frozen=True)
class Owner:
    """Who listens on the port: ours, others, nobody (of this host), unknown (not allowed to look), unchecked."""

    kind: str = UNCHECKED
    holders: tuple[str, ...] = ()


def _decode_address(text: str) -> str:
    # The kernel prints addresses as hexadecimal 32-bit words in host byte order.
    words = [bytes.fromhex(text[at : at + 8]) for at in range(0, len(text), 8)]
    raw = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    if len(raw) == 16 and raw[:12] == b"\0" * 10 + b"\xff\xff":
        raw = raw[12:]
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def listening_inodes(addresses: Iterable[str], port: int, proc: Path = Path("/proc")) -> set[str]:
    """Inodes of the sockets that a connection to one of the addresses would reach: the most specific ones."""
    exact: set[str] = set()
    general: set[str] = set()
    wanted = set(addresses)
    for table in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            cells = row.split()
            if len(cells) < 10 or cells[3] != "0A":
                continue
            address, __, port_hex = cells[1].partition(":")
            if int(port_hex, 16) != port:
                continue
            local = _decode_address(address)
            if local in wanted:
                exact.add(cells[9])
            elif local in ("0.0.0.0", "::"):
                general.add(cells[9])
    return exact or general


def _socket_inodes(pid: int, proc: Path) -> set[str] | None:
    """Inodes of a process' sockets; None when it may not be looked at."""
    found: set[str] = set()
    try:
        entries = os.listdir(proc / str(pid) / "fd")
    except PermissionError:
        return None
    except OSError:
        return found
    for entry in entries:
        try:
            target = os.readlink(proc / str(pid) / "fd" / entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def describe_process(pid: int, proc: Path = Path("/proc")) -> str:
    """`pid 4711 (python3 -m http.server)`, shortened and without secrets."""
    try:
        command = (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        command = ""
    command = scrub(command)
    return f"pid {pid}" + (f" ({command[:100]}{' ...' if len(command) > 100 else ''})" if command else "")


def resolve(host: str) -> list[str]:
    """Addresses of a host name; the text itself where it cannot be resolved."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return [host]


def observe_owner(
    addresses: Iterable[str], port: int, pids: Callable[[], set[int]], proc: Path = Path("/proc")
) -> Owner:
    """Whose listening socket would answer?"""
    inodes = listening_inodes(addresses, port, proc)
    if not inodes:
        return Owner(NOBODY)
    hidden = False
    ours = set()
    for pid in pids():
        sockets = _socket_inodes(pid, proc)
        if sockets is None:
            hidden = True
        else:
            ours |= inodes & sockets
    if ours == inodes:
        return Owner(OURS)
    if hidden:
        return Owner(UNKNOWN)
    # Only for the message: somebody else has it, so the whole host is searched for the name.
    rest = inodes - ours
    holders = []
    for entry in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        if rest & (_socket_inodes(int(entry.name), proc) or set()):
            holders.append(describe_process(int(entry.name), proc))
    return Owner(OTHERS, tuple(holders[:3]))
