# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps what is needed to understand a failure, before a restart or a reboot wipes it away.

Runs on the host without Ansible: from ``OnFailure=`` of the unit, from the liveness timer before it restarts, and from a
deployment that is taken back. Writes ``<state>/incidents/<UTC>-<reason>/`` with ``summary.md`` as its front page.

A host in trouble answers badly: every question has a time limit (a process that hangs inside the driver cannot even be
killed, so it is left behind), every file a size limit, the folder of incidents a total, and what could not be read is
said in the summary. Secrets are taken out. Standard library only; sizes are bytes, times seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import health, host, maintenance
from .health import CommandResult, Runner, scrub

FOLDER_MODE, FILE_MODE = 0o700, 0o640
# Where an incident goes when the state directory cannot take it: in memory, gone with the next boot.
FALLBACK = maintenance.RUN_DIR / "incidents"
COMMAND_TIMEOUT = 10.0
# A killed process that does not end hangs inside the kernel; it is left behind.
KILL_PATIENCE = 1.0
# A disk that takes so much is not full.
PROBE_BYTES = 256 * 1024
# Reading the stacks of one process, and of all: one that hangs must not eat the time of the rest.
STACK_TIMEOUT, STACKS_TIMEOUT = 5.0, 15.0
_NAME = re.compile(r"^\d{8}T\d{6}Z-")


class IncidentError(Exception):
    """Says what was found, what was expected and what to do."""


@dataclass(frozen=True)
class Options:
    """What is kept, where, and whom to tell. Sizes in the units that their names give."""

    unit: str = "sglang-kimi.service"
    state_dir: str = "/var/lib/sglang-kimi"
    port: int = 30000
    keep: int = 10
    max_file_kib: int = 1024
    max_total_mib: int = 100
    time_limit: float = 60.0
    journal_lines: int = 2000
    # Holds the address in its first line; readable by root only, because such an address is often a secret.
    webhook_file: str = ""
    command: tuple[str, ...] = ()
    notify_timeout: float = 10.0


def options_from(settings: Mapping[str, Any]) -> Options:
    """The settings file of the unit to options. Raises IncidentError."""
    try:
        given = dict(settings.get("incident") or {})
        known = asdict(Options())
        # What this program does not know is left alone: a newer play may have written it.
        values: dict[str, Any] = {}
        for key, default in known.items():
            if key in given:
                values[key] = tuple(map(str, given[key])) if key == "command" else type(default)(given[key])
        values["unit"] = health.unit_name(str(settings["unit"]))
        values["state_dir"] = str(settings["state_dir"])
        values["port"] = int(settings["endpoint"]["port"])
        return Options(**values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IncidentError(
            f"the settings cannot be used ({type(error).__name__}: {error}), expected unit, state_dir, endpoint and "
            "incident as the role sglang_service writes them. Run site.yml again."
        ) from error


def read_settings(path: Path) -> dict[str, Any]:
    """The unit's settings file. Raises IncidentError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IncidentError(
            f"{path} cannot be read ({error}), expected the settings that the role sglang_service writes. Run site.yml again."
        ) from error
    if not isinstance(data, dict):
        raise IncidentError(f"{path} holds no mapping, expected the settings that the role sglang_service writes.")
    return data


# --------------------------------------------------------------------------------------------------- asking


def run_bounded(argv: Sequence[str], timeout: float) -> CommandResult:
    """Like health.run_command, but returns on time even when the command hangs inside the kernel and cannot be killed."""
    env = {**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": "", "PAGER": ""}
    try:
        # Not `with`: leaving it would wait for a process that may never end.
        process = subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
        )
    except FileNotFoundError:
        return CommandResult(127, err=f"{argv[0]}: command not found")
    except OSError as error:
        return CommandResult(126, err=f"{argv[0]}: {error}")
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            out, err = process.communicate(timeout=KILL_PATIENCE)
        except subprocess.TimeoutExpired:
            return CommandResult(124, err=f"{argv[0]}: no answer within {timeout:.0f} s, and it cannot be killed")
        text = out.decode("utf-8", "replace")
        return CommandResult(124, text, f"{argv[0]}: no answer within {timeout:.0f} s")
    return CommandResult(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def is_roots(program: Path) -> bool:
    """Whether a program, and every folder on the way to it, belongs to root (or to who asks) and only they can write there."""
    try:
        found = [path.lstat() for path in (program, *program.parents)]
    except OSError:
        return False
    return stat.S_ISREG(found[0].st_mode) and all(
        entry.st_uid in (0, os.geteuid()) and not entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for entry in found
    )


def limit_text(text: str, size: int) -> str:
    """Text of at most so many bytes: the begin and, because the end of a log matters most, three times as much of the end."""
    raw = text.encode("utf-8")
    if len(raw) <= size:
        return text
    note = f"\n[... {len(raw) - size} bytes left out ...]\n"
    room = max(0, size - len(note))
    head, tail = raw[: room // 4], raw[len(raw) - (room - room // 4) :]
    return head.decode("utf-8", "ignore") + note + tail.decode("utf-8", "ignore")


# --------------------------------------------------------------------------------------------------- understanding

# What NVIDIA's numbers mean for the operator of such a box.
XIDS = {
    13: "a kernel went wrong inside the engine; the GPU itself is fine",
    31: "a page fault by the engine's kernel; a bug in software, or a bad GPU when it stays with one",
    43: "a kernel was stopped by the driver; the GPU itself is fine",
    45: "work was cleaned up because its process ended; a follow-up, look at what came before",
    48: "a double-bit memory error: reset the GPU or reboot; replace it when it comes back",
    61: "the GPU's firmware stopped: reboot; replace the GPU when it comes back",
    62: "the GPU's firmware stopped: reboot; replace the GPU when it comes back",
    63: "a memory row was remapped: it takes effect with the next reset or reboot",
    64: "a memory row could not be remapped: replace the GPU",
    74: "an NVLink error: reseat bridges, look at the slots",
    79: "the GPU has fallen off the bus: power, slot or cable; only a reboot brings it back",
    92: "many single-bit memory errors: watch this GPU",
    94: "a contained memory error: the process died, others go on; reset the GPU soon",
    95: "an uncontained memory error: reset the GPU or reboot before anything runs on it",
    119: "the GPU's firmware does not answer: reboot",
    120: "the GPU's firmware failed: reboot",
}
_XID = re.compile(r"NVRM: Xid \((?P<where>[^)]*)\): (?P<number>\d+)")

_SIGNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Out of memory: Killed process|oom-kill:|Memory cgroup out of memory|Result=oom-kill|result 'oom-kill'"),
     "The kernel killed a process for want of main memory: see memory.txt, and MemoryMax in unit.txt."),
    (re.compile(r"torch\.OutOfMemoryError|CUDA out of memory|CUDA error: out of memory"),
     "A GPU ran out of memory: see who else holds it in gpu-holders.txt; otherwise mem_fraction_static is too high."),
    (re.compile(r"No space left on device|Disk quota exceeded"), "A disk is full: see disk.txt."),
    (re.compile(r"address already in use|Errno 98|error while attempting to bind", re.I),
     "The port was taken by something else: see sockets.txt."),
    (re.compile(r"start-limit-hit|Start request repeated too quickly"),
     "systemd gave up after repeated failed starts. `systemctl reset-failed` allows the next one, once the cause is mended."),
    (re.compile(r"Scheduler hit an exception"), "The scheduler raised an exception: the traceback is in journal.txt."),
    (re.compile(r"Watchdog caught collective operation timeout|NCCL error|ncclSystemError|ncclUnhandledCudaError"),
     "The GPUs did not talk to each other (NCCL): see the kernel log and the NCCL settings in the plan."),
    (re.compile(r"no kernel image is available|CUDA driver version is insufficient|Driver/library version mismatch"),
     "Driver and software do not fit together: was one of them upgraded? See nvidia-smi.txt."),
    (re.compile(r"unrecognized arguments|launch_server\.py: error:"),
     "The engine refused its command line: see the last lines of journal.txt and the command in unit.txt."),
)  # fmt: skip


def xid_lines(kernel_log: str) -> list[tuple[int, str, str]]:
    """(number, place, line) of the GPU errors in a kernel log."""
    return [
        (int(found["number"]), found["where"], line.strip())
        for line in kernel_log.splitlines()
        if (found := _XID.search(line))
    ]


def full_disks(df: str) -> list[str]:
    """Mount points that `df -P` shows at 99 % or more; read-only images are full by nature."""
    found = []
    for line in df.splitlines()[1:]:
        cells = line.split(None, 5)
        used = cells[4].rstrip("%") if len(cells) == 6 else ""
        if used.isdigit() and int(used) >= 99 and not re.match(r"/(snap|proc|sys|dev)(/|$)", cells[5]):
            found.append(cells[5])
    return list(dict.fromkeys(found))


def signs(texts: Mapping[str, str]) -> list[str]:
    """What stands out in the collected texts, by file name: sentences that say where to look."""
    found = []
    counts: dict[tuple[int, str], int] = {}
    for number, where, __ in xid_lines(texts.get("kernel.txt", "")):
        counts[number, where] = counts.get((number, where), 0) + 1
    for (number, where), count in counts.items():
        meaning = XIDS.get(number, "look the number up in NVIDIA's list of Xid errors")
        found.append(f"GPU error Xid {number} on {where} ({count} x): {meaning}. See kernel.txt.")
    logs = "\n".join(texts.get(name, "") for name in ("journal.txt", "kernel.txt", "unit.txt", "nvidia-smi.txt"))
    found += [sentence for pattern, sentence in _SIGNS if pattern.search(logs)]
    full = full_disks(texts.get("disk.txt", ""))
    sentence = f"Full: {', '.join(full)}. See disk.txt."
    if full:
        found.append(sentence)
    for line in texts.get("processes.txt", "").splitlines():
        cells = line.split()
        if len(cells) > 2 and cells[0].isdigit() and cells[1] in ("D", "T", "Z"):
            word = {"D": "hangs inside the kernel", "T": "is stopped by a signal", "Z": "is dead"}[cells[1]]
            found.append(f"Process {cells[0]} of the unit {word}: see processes.txt.")
    return found


# --------------------------------------------------------------------------------------------------- the folder


class Store:
    """The folder of all incidents, opened once and then used through its descriptor.

    The state directory belongs to the service's user. A link put in place of the folder, or a folder of that user, is
    not followed: what root writes stays where root meant it.
    """

    def __init__(self, root: Path) -> None:
        self.shown = root
        if not root.parent.is_dir():
            root.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=FOLDER_MODE)
        self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        owner = os.fstat(self._fd).st_uid
        if owner != os.geteuid():
            os.close(self._fd)
            raise PermissionError(f"{root} belongs to user {owner}, expected {os.geteuid()}")
        os.fchmod(self._fd, FOLDER_MODE)
        self.path = Path(f"/proc/self/fd/{self._fd}")

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)

    def names(self) -> list[str]:
        """Incidents, oldest first; anything else in the folder is left alone."""
        return sorted(entry.name for entry in self.path.iterdir() if _NAME.match(entry.name))

    def make(self, name: str) -> str:
        """A new folder; a second incident within one second gets a number."""
        for number in range(1, 100):
            chosen = name if number == 1 else f"{name}-{number}"
            try:
                (self.path / chosen).mkdir(mode=FOLDER_MODE)
            except FileExistsError:
                continue
            return chosen
        raise FileExistsError(f"{self.shown / name} exists")

    def write(self, name: str, file: str, text: str) -> None:
        """A file of an incident, readable by root and its group only."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path / name / file, flags, FILE_MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            os.fchmod(descriptor, FILE_MODE)
            stream.write(text)

    def size(self, name: str) -> int:
        """Bytes of an incident."""
        return sum(entry.stat().st_size for entry in (self.path / name).rglob("*") if entry.is_file())

    def rotate(self, keep: int, total: int) -> list[str]:
        """Remove the oldest until at most ``keep`` are left with at most ``total`` bytes; the newest stays. What went."""
        names = self.names()[::-1]
        removed, used = [], 0
        for place, name in enumerate(names):
            used += self.size(name)
            if place and (place >= keep or used > total):
                shutil.rmtree(self.path / name, ignore_errors=True)
                removed.append(name)
        return removed


# --------------------------------------------------------------------------------------------------- collecting


def reason_word(reason: str) -> str:
    """Any text as a piece of a folder name."""
    return re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:40].strip("-") or "unknown"


def process_table(pids: Iterable[int], proc: Path = Path("/proc")) -> str:
    """State, threads, memory and waiting place of processes: `pid state ppid threads rss_mib wchan command`."""
    lines = ["pid state ppid threads rss_mib cpu_seconds wchan command"]
    for pid in sorted(pids):
        folder = proc / str(pid)
        try:
            stat = (folder / "stat").read_text("utf-8", "replace")
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        comm = stat.partition("(")[2].rpartition(")")[0]
        try:
            wchan = (folder / "wchan").read_text("ascii", "replace").strip() or "-"
        except OSError:
            wchan = "-"
        command = health.describe_process(pid, proc).partition(" (")[2].rstrip(")") or f"[{comm}]"
        ticks = os.sysconf("SC_CLK_TCK")
        rss = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") >> 20
        cpu = (int(fields[11]) + int(fields[12])) / ticks
        lines.append(f"{pid} {fields[0]} {fields[1]} {fields[17]} {rss} {cpu:.1f} {wchan} {command}")
    return "\n".join(lines) + "\n"


def read_files(paths: Iterable[Path], size: int = 65536) -> str:
    """Small files of the kernel, each under its name; those that are not there are left out."""
    parts = []
    for path in paths:
        try:
            with path.open(encoding="utf-8", errors="replace") as stream:
                parts.append(f"== {path}\n{stream.read(size)}")
        except OSError:
            continue
    return "\n".join(parts)


#: File -> the question that it answers.
FILES = {
    "journal.txt": "what the engine and systemd said last; read it from the end",
    "unit.txt": "how the unit ended (Result, ExecMainStatus, NRestarts), its limits and its text",
    "processes.txt": "the unit's processes: state D hangs in the kernel, T is stopped, Z is dead",
    "stacks.txt": "where each process of the engine stands, in Python and in the kernel",
    "liveness.json": "what the liveness timer knew",
    "nvidia-smi.txt": "GPUs: missing ones, memory in use, ECC, retired pages, throttling",
    "gpu-holders.txt": "who has the GPUs' device files open; a monitor is harmless, a foreign server is not",
    "kernel.txt": "the kernel's log; lines with Xid are GPU errors",
    "memory.txt": "main memory, pressure, and the unit's control group (memory.events: oom_kill)",
    "disk.txt": "free space and free inodes",
    "sockets.txt": "who listens on which port",
    "plan.json": "what was deployed, each setting with its reason",
    "settings.json": "settings of the gate, the liveness timer and this collector",
    "load.txt": "load of the host, and who uses its processors",
}


@dataclass
class Collector:
    """Collects one incident."""

    options: Options
    settings_file: Path | None = None
    run: Runner = run_bounded
    clock: Callable[[], float] = time.monotonic
    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    fallback: Path = FALLBACK
    run_dir: Path = maintenance.RUN_DIR
    texts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unit: health.UnitStatus | None = None
    _pids: list[int] = field(default_factory=list)
    _until: float = 0.0
    _store: Store | None = None
    _name: str = ""

    def collect(self, reason: str, details: str = "", now: float | None = None) -> Path:
        """Collect everything that answers within the time limit; where it lies. Raises OSError when nothing can be kept."""
        began = self.clock()
        self._until = began + self.options.time_limit
        when = time.time() if now is None else now
        self.unit = health.observe_unit(self.options.unit, self._ask)
        if reason == "failed" and self.unit.result not in ("", "success"):
            reason = f"failed-{self.unit.result}"
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(when))
        store, self._name = self._open(f"{stamp}-{reason_word(reason)}")
        self._store = store
        try:
            self._write("summary.md", self._summary(reason, details, when, complete=False))
            for step in self._steps():
                try:
                    step()
                # A collector that breaks over one surprise keeps nothing of the rest.
                except Exception as error:
                    self.notes.append(f"{step.__name__.lstrip('_')}: {type(error).__name__}: {error}")
            self.notes.append(f"Collected in {self.clock() - began:.1f} s.")
            self._write("summary.md", self._summary(reason, details, when, complete=True))
            store.rotate(self.options.keep, self.options.max_total_mib << 20)
            return store.shown / self._name
        finally:
            store.close()

    def _open(self, name: str) -> tuple[Store, str]:
        places = [Path(self.options.state_dir) / "incidents", self.fallback / maintenance.short_name(self.options.unit)]
        for last, place in enumerate(places):
            store, made = None, ""
            try:
                store = Store(place)
                # Room for the new one first: a full disk is itself a reason for incidents.
                store.rotate(max(1, self.options.keep - 1), self.options.max_total_mib << 20)
                made = store.make(name)
                store.write(made, "summary.md", " " * PROBE_BYTES)
                return store, made
            except OSError as error:
                if store is not None:
                    if made:
                        shutil.rmtree(store.path / made, ignore_errors=True)
                    store.close()
                self.notes.append(f"{place} cannot take an incident: {error}")
                if last:
                    raise
        raise AssertionError

    def _steps(self) -> list[Callable[[], None]]:
        """What may change under our hands comes first (a rollback puts its own plan in place), then the most telling."""
        return [
            self._plan,
            self._processes,
            self._journal,
            self._unit,
            self._gpus,
            self._kernel,
            self._host,
            self._stacks,
        ]

    # -- one question each

    def _ask(self, argv: Sequence[str], timeout: float = COMMAND_TIMEOUT) -> CommandResult:
        left = self._until - self.clock()
        if left <= 0.5:
            return CommandResult(124, err=f"{argv[0]}: not asked, the time for collecting was over")
        return self.run(argv, min(timeout, left))

    def _command(self, *argv: str, timeout: float = COMMAND_TIMEOUT) -> str:
        answer = self._ask(list(argv), timeout)
        text = f"$ {' '.join(argv)}\n{answer.out}"
        if answer.err.strip():
            text += f"{'' if text.endswith(chr(10)) else chr(10)}{answer.err.strip()}\n"
        if answer.rc in (124, 126, 127):
            self.notes.append(answer.err.strip())
        elif answer.rc != 0:
            text += f"(status {answer.rc})\n"
        return text

    def _write(self, file: str, text: str) -> None:
        cleaned = limit_text(scrub(text), self.options.max_file_kib << 10)
        self.texts[file] = cleaned
        if self._store is None:
            return
        try:
            self._store.write(self._name, file, cleaned)
        except OSError as error:
            self.notes.append(f"{file} could not be written: {error}")

    # -- the steps, the most telling first

    def _journal(self) -> None:
        short = maintenance.short_name(self.options.unit)
        units = [word for name in (self.options.unit, f"{short}-liveness.service") for word in ("-u", name)]
        lines = str(self.options.journal_lines)
        text = self._command("journalctl", "--no-pager", "--quiet", "--all", "-o", "short-iso", "-n", lines, *units)
        # Of a progress bar, which rewrites its line with carriage returns, the last state is enough.
        self._write("journal.txt", "\n".join(line.rsplit("\r", 1)[-1] for line in text.split("\n")))

    def _unit(self) -> None:
        unit = self.options.unit
        parts = [
            self._command("systemctl", "status", "--no-pager", "-n", "0", "--", unit),
            self._command("systemctl", "show", "--no-pager", "--", unit),
            self._command("systemctl", "cat", "--no-pager", "--", unit),
        ]
        self._write("unit.txt", "\n".join(parts))

    def _processes(self) -> None:
        if self.unit is None:
            return
        pids = health.unit_pids(self.unit, self.proc, self.cgroups)
        if self.unit.main_pid:
            # A dead child that nobody has asked for is in no control group any more.
            pids |= health.descendants(self.unit.main_pid, self.proc)
        self._pids = sorted(pids)
        self._write("processes.txt", process_table(pids, self.proc))
        state = self.run_dir / f"{maintenance.short_name(self.options.unit)}.liveness.json"
        if state.is_file():
            self._write("liveness.json", state.read_text(encoding="utf-8", errors="replace"))

    def _stacks(self) -> None:
        parts = [read_files([self.proc / str(pid) / "stack", self.proc / str(pid) / "syscall"]) for pid in self._pids]
        spy, until = self._py_spy(), self.clock() + STACKS_TIMEOUT
        for pid in self._pids if spy else []:
            if self.clock() < until:
                # Without stopping the process: one that hangs could not be stopped, and nothing would be read.
                parts.append(self._command(spy, "dump", "--nonblocking", "--pid", str(pid), timeout=STACK_TIMEOUT))
        self._write("stacks.txt", "\n".join(part for part in parts if part))

    def _py_spy(self) -> str:
        """The profiler beside the interpreter that root's own plan names.

        The process is not asked where its interpreter lies: it can say what it likes, and root runs what is found there.
        """
        if self.settings_file is None:
            return ""
        try:
            plan = json.loads(self.settings_file.with_suffix(".plan.json").read_text(encoding="utf-8"))
            path = Path(os.path.realpath(Path(plan["command"][0]).parent / "py-spy"))
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return ""
        return str(path) if is_roots(path) else ""

    def _gpus(self) -> None:
        notes: list[str] = []
        roots = host.Roots(proc=str(self.proc))
        lines = ["device pid user unit command"]
        for target, pids in sorted(host.open_files(roots, notes).items()):
            if not target.startswith("/dev/nvidia"):
                continue
            for pid in pids:
                try:
                    user = str((self.proc / str(pid)).stat().st_uid)
                except OSError:
                    user = "?"
                command = health.describe_process(pid, self.proc).partition(" (")[2].rstrip(")")
                lines.append(f"{target} {pid} {user} {host.unit_of(pid, roots) or '-'} {command}")
        self._write("gpu-holders.txt", "\n".join(lines) + "\n" + "".join(f"{note}\n" for note in notes))
        apps = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
        parts = [
            self._command("nvidia-smi"),
            self._command("nvidia-smi", apps, "--format=csv"),
            self._command("nvidia-smi", "-q"),
        ]
        self._write("nvidia-smi.txt", "\n".join(parts))

    def _kernel(self) -> None:
        text = self._command("journalctl", "-k", "-b", "--no-pager", "--quiet", "-o", "short-iso", "-n", "2000")
        if text.count("\n") < 3:
            text += self._command("dmesg", "-T")
        self._write("kernel.txt", text)

    def _host(self) -> None:
        group = self.unit.control_group.lstrip("/") if self.unit is not None else ""
        roots = [self.cgroups / group, self.cgroups / "memory" / group] if group else []
        names = ("memory.current", "memory.peak", "memory.max", "memory.events", "memory.stat", "memory.failcnt")
        files = [root / name for root in roots for name in names]
        pressure = [self.proc / "pressure" / name for name in ("memory", "io", "cpu")]
        self._write("memory.txt", read_files([self.proc / "meminfo", *pressure, *files]))
        self._write(
            "disk.txt", self._command("df", "-P", "-k", timeout=5.0) + self._command("df", "-P", "-i", timeout=5.0)
        )
        self._write("sockets.txt", self._command("ss", "-H", "-l", "-t", "-n", "-p"))
        self._write(
            "load.txt",
            read_files([self.proc / "loadavg", self.proc / "uptime"])
            + self._command("top", "-b", "-n", "1", "-w", "200"),
        )

    def _plan(self) -> None:
        if self.settings_file is None:
            return
        for source, name in (
            (self.settings_file, "settings.json"),
            (self.settings_file.with_suffix(".plan.json"), "plan.json"),
        ):
            try:
                self._write(name, source.read_text(encoding="utf-8", errors="replace"))
            except OSError as error:
                self.notes.append(f"{source}: {error.strerror}")

    # -- the front page

    def _summary(self, reason: str, details: str, when: float, complete: bool) -> str:
        unit = self.unit or health.UnitStatus(self.options.unit)
        state = unit.error or f"{unit.active_state}/{unit.sub_state}"
        rows = [
            ("time", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when))),
            ("host", socket.gethostname()),
            ("unit", self.options.unit),
            ("reason", reason),
            ("state of the unit", state),
            ("result", unit.result or "-"),
            ("main process", f"{unit.main_pid or 'none'}{f', ended: {unit.exit_text()}' if unit.exit_text() else ''}"),
            ("restarts by systemd", str(unit.n_restarts)),
        ]
        lines = [f"# Incident on {socket.gethostname()}: {reason}", ""]
        if details:
            lines += [details, ""]
        lines += ["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
        if not complete:
            return "\n".join([*lines, "Collecting was not finished.", ""])
        found = signs(self.texts)
        lines += ["## What stands out", ""]
        lines += [f"- {sentence}" for sentence in found] or [
            "- Nothing that is known by its words. Read journal.txt from its end."
        ]
        last = health.last_pieces(self.texts.get("journal.txt", "").split("\n")[-15:], 200)
        lines += ["", "## Last lines of the journal", "", "```", *last, "```", "", "## How to read this folder", ""]
        lines += [
            "1. What stands out, above, names the file to begin with.",
            "2. journal.txt, from its end upwards: the first traceback above the end is the cause, later ones are followers.",
            "3. kernel.txt for Xid (GPU), oom-kill (memory) and I/O errors (disk) at the same time.",
            "4. processes.txt and stacks.txt when nothing died but nothing was answered.",
            "5. gpu-holders.txt and memory.txt when it died while loading.",
            "",
            "| file | answers | bytes |",
            "|---|---|---|",
        ]
        for file, question in FILES.items():
            if self.texts.get(file):
                lines.append(f"| {file} | {question} | {len(self.texts[file].encode('utf-8'))} |")
        lines += [
            "",
            "## What could not be read, and how long it took",
            "",
            *(f"- {scrub(note)}" for note in self.notes),
            "",
        ]
        return "\n".join(lines)


# --------------------------------------------------------------------------------------------------- telling


def _post(url: str, body: bytes, timeout: float) -> int:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "gpuserve-incident"})
    # What urlopen would use; Ansible's open_url is not on the host.
    with urllib.request.build_opener().open(request, timeout=timeout) as answer:
        return int(answer.status)


def notify(
    options: Options,
    folder: Path,
    reason: str,
    details: str = "",
    run: Runner = run_bounded,
    post: Callable[[str, bytes, float], int] = _post,
) -> list[str]:
    """Tell the webhook and run the command, where there are any; what came of it, without the address."""
    said = []
    event = {
        "event": "incident",
        "host": socket.gethostname(),
        "unit": options.unit,
        "reason": reason,
        "details": scrub(details)[:500],
        "folder": str(folder),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if options.webhook_file:
        try:
            url = Path(options.webhook_file).read_text(encoding="utf-8").split("\n", 1)[0].strip()
            if not re.match(r"https?://", url):
                raise ValueError("not an http address")
            said.append(f"webhook: HTTP {post(url, json.dumps(event).encode(), options.notify_timeout)}")
        except urllib.error.HTTPError as error:
            said.append(f"webhook: HTTP {error.code}")
        # The text of these errors can hold the address, and the address can hold a secret.
        except (OSError, ValueError) as error:
            said.append(f"webhook: not delivered ({type(error).__name__})")
    if options.command:
        fields = {"{" + key + "}": value for key, value in event.items()}
        words = [re.sub(r"\{\w+\}", lambda found: fields.get(found[0], found[0]), word) for word in options.command]
        answer = run(words, options.notify_timeout)
        said.append(
            f"command {words[0]}: status {answer.rc}" + (f", {scrub(answer.err.strip())[:200]}" if answer.rc else "")
        )
    return said


# --------------------------------------------------------------------------------------------------- the program


def main(argv: Sequence[str] | None = None) -> int:
    """Keep one incident and tell about it; the last line names its folder. 0 kept, 1 not kept, 2 wrong options."""
    parser = argparse.ArgumentParser(prog="incident", description="Keep what explains a failure.", allow_abbrev=False)
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE")
    parser.add_argument("--reason", default="manual", help="one word, part of the folder's name")
    parser.add_argument("--details", default="", help="a sentence for the summary")
    parser.add_argument("--no-notify", action="store_true", help="keep, but tell nobody")
    given = parser.parse_args(argv)
    try:
        options = options_from(read_settings(given.settings))
    except IncidentError as error:
        parser.error(str(error))
    try:
        collector = Collector(options, given.settings)
        folder = collector.collect(given.reason, given.details)
    except OSError as error:
        sys.stdout.write(f"no incident could be kept: {error}\n")
        return 1
    if not given.no_notify:
        for line in notify(options, folder, given.reason, given.details):
            sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
