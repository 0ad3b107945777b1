# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Who holds the GPUs, whom this service may end, and how to end them without touching anybody else.

Three parts: L(look) reads C(/proc) and nvidia-smi, L(judge) decides from what was read (pure), L(Release) acts on the
decision and on nothing else.  Times are seconds, memory is MiB.

What a process does with a GPU is told apart by its memory map: CUDA maps a device file, a client of NVML (a monitor, an
exporter) only opens it.  Of an engine, main process, scheduler and detokenizer map it, while nvidia-smi lists the
scheduler alone.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gpuserve.sglang.plugins.module_utils import gpu, host
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import UnitStatus

OWN, NAMED, MONITOR, FOREIGN = "own", "named", "monitor", "foreign"
#: Set in the environment of the unit's processes (module_utils/service.py). A process that changes its title loses it.
PLAN_VARIABLE = b"GPUSERVE_PLAN="
#: Once the main process is gone its children have so long to follow; measured were 0.8 s.
FOLLOW_GRACE = 5.0
#: What was left behind has no server any more whose requests could finish: it gets SIGKILL so soon after SIGTERM.
LEFTOVER_GRACE = 5.0
POLL = 0.5
#: The files that CUDA maps. A fabric manager maps those of its switches, which hold nobody's memory.
_MEMORY = re.compile(r"/dev/nvidia(\d+|ctl|-uvm)")


class ReleaseError(Exception):
    """What was found, what was expected, what to do."""


# ------------------------------------------------------------------------------------------------------ what is there
@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one with the same number by C(started) (clock ticks since boot)."""

    pid: int
    started: int
    parent: int = 0
    state: str = "S"
    argv: tuple[str, ...] = ()
    command: str = ""
    user: str = ""
    unit: str = ""
    files: tuple[str, ...] = ()
    mapped: tuple[str, ...] = ()
    memory_mib: int = 0
    gpus: tuple[int, ...] = ()
    #: nvidia-smi lists it.
    app: bool = False
    #: Found in /proc. What nvidia-smi lists can live in another PID namespace.
    visible: bool = True
    #: Its environment holds the service's plan.
    planned: bool = False
    #: Libraries of a release of this service are mapped.
    release: bool = False
    #: Lives in the same PID namespace as this program: not in somebody's container.
    here: bool = True
    #: C(unit) was made to run it. False: the control group merely contains it, as those of cron and sshd do; None: not known.
    owned: bool | None = True

    @property
    def uses(self) -> bool:
        """Holds memory of a GPU, or may: more than a look at its counters."""
        return self.app or any(_MEMORY.fullmatch(path) for path in self.mapped)

    @property
    def holds(self) -> bool:
        return self.uses or bool(self.files)

    @property
    def ended(self) -> bool:
        """Gone but for the entry that its parent has not read yet."""
        return self.state in ("Z", "X")

    @property
    def engine(self) -> tuple[str, bool] | None:
        """(name, is it a worker) of an inference server."""
        return None if self.ended else host.engine_of(self.argv)

    def text(self) -> str:
        """For people: who it is and what it has."""
        parts = [f"pid {self.pid} ({self.command or 'unknown'})"]
        if self.visible:
            inside = f"unit none (in the control group of {self.unit}, which runs another program)"
            unit = inside if self.unit and self.owned is False else f"unit {self.unit or 'none'}"
            parts += [f"user {self.user or 'unknown'}", unit]
        else:
            parts.append("not visible from here: it runs in another container or on the machine that owns the GPUs")
        if self.gpus:
            parts.append("GPU " + ", ".join(str(index) for index in self.gpus))
        if self.memory_mib:
            parts.append(f"{self.memory_mib} MiB")
        if self.files or self.mapped:
            parts.append("holds " + " ".join(sorted({*self.files, *self.mapped})))
        return ", ".join(parts)


@dataclass(frozen=True)
class Scene:
    """One look: processes that matter (holders, inference servers, what was asked for), everybody's parents, the GPUs."""

    processes: Mapping[int, Process]
    parents: Mapping[int, int]
    #: C(index) to MiB in use; empty when nvidia-smi does not answer.
    memory: Mapping[int, int] = field(default_factory=dict)
    #: Why nvidia-smi gave no answer.
    smi_error: str = ""
    device_files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def ancestors(self, pid: int) -> list[int]:
        """Parent, its parent and so on, without process 1."""
        return _ancestors(pid, self.parents)

    def descendants(self, pid: int) -> list[int]:
        return [other for other in self.parents if pid in self.ancestors(other)]


def _ancestors(pid: int, parents: Mapping[int, int]) -> list[int]:
    found: list[int] = []
    above = parents.get(pid, 0)
    while above > 1 and above not in found:
        found.append(above)
        above = parents.get(above, 0)
    return found


def _stat(pid: int, tree: host.Roots) -> tuple[str, int, int, int] | None:
    """(state, parent, start in ticks, session) of a process; None when it is gone."""
    content = host.read(os.path.join(tree.proc, str(pid), "stat"), 4096)
    if not content:
        return None
    # A process may call itself by any bytes, brackets too: the last one ends the name.
    cells = content.rpartition(")")[2].split()
    try:
        return cells[0], int(cells[1]), int(cells[19]), int(cells[3])
    except (IndexError, ValueError):
        return None


def _mapped(pid: int, tree: host.Roots, below: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Device files in the memory map of a process, and whether a file below one of C(below) is in it."""
    devices: set[str] = set()
    ours = False
    for line in (host.read(os.path.join(tree.proc, str(pid), "maps"), 64 * host.MIB) or "").splitlines():
        cells = line.split(None, 5)
        if len(cells) < 6:
            continue
        path = cells[5]
        if path.startswith("/dev/nvidia"):
            devices.add(path)
        elif not ours and path.startswith(tuple(below)):
            ours = True
    return tuple(sorted(devices)), ours


def _planned(pid: int, tree: host.Roots) -> bool:
    try:
        with open(os.path.join(tree.proc, str(pid), "environ"), "rb") as handle:
            return any(word.startswith(PLAN_VARIABLE) for word in handle.read().split(b"\0"))
    except OSError:
        return False


def _namespace(pid: int | str, tree: host.Roots) -> str | None:
    try:
        return os.readlink(os.path.join(tree.proc, str(pid), "ns", "pid"))
    except OSError:
        return None


def look(
    tree: host.Roots,
    tool: str | None,
    run: gpu.Runner,
    roots: Sequence[str] = (),
    wanted: Sequence[int] = (),
    main_pid: Callable[[str], int | None] = lambda unit: None,
) -> Scene:
    """Read who holds the GPUs.

    C(tool) is the path of nvidia-smi, None where there is none. C(roots) are folders of this service's releases;
    C(wanted) are processes that must be described whatever they hold. C(main_pid) says the main process of a unit: 0 when
    there is none, None when systemd does not answer.
    """
    notes: list[str] = []
    below = [root.rstrip("/") + "/" for root in roots if root]
    gpus, smi_error = gpu.usage(tool, run) if tool else ([], None)
    files: dict[int, set[str]] = {}
    for path, owners in host.open_files(tree, notes).items():
        if path.startswith("/dev/nvidia"):
            for pid in owners:
                files.setdefault(pid, set()).add(path)
    apps: dict[int, dict[str, Any]] = {}
    for record in gpus:
        for process in record["processes"]:
            entry = apps.setdefault(process["pid"], {"command": process["command"], "memory": 0, "gpus": []})
            entry["memory"] += process["memory_mib"] or 0
            entry["gpus"].append(record["index"])
    parents: dict[int, int] = {}
    stats: dict[int, tuple[str, int, int, int]] = {}
    for pid in host.pids(tree):
        stat = _stat(pid, tree)
        if stat is not None:
            stats[pid], parents[pid] = stat, stat[1]
    self_pid = os.getpid()
    engines = {pid for pid in stats if host.engine_of(host.argv_of(pid, tree)) is not None}
    minors = {f"/dev/nvidia{r['index'] if r['minor'] is None else r['minor']}": r["index"] for r in gpus}
    here = _namespace("self", tree)
    mains: dict[str, int | None] = {}

    def owned(pid: int, unit: str) -> bool | None:
        """Whether the unit's main process is this one, or started it in its own session: cron and sshd open a new one."""
        if unit not in mains:
            mains[unit] = main_pid(unit)
        main = mains[unit]
        if main is None or main == pid:
            return None if main is None else True
        return main in _ancestors(pid, parents) and main in stats and stats[main][3] == stats[pid][3]

    processes: dict[int, Process] = {}
    for pid in sorted({*files, *apps, *engines, *(w for w in wanted if w in stats)} - {self_pid}):
        app = apps.get(pid)
        stat = stats.get(pid)
        if stat is None:
            if app is not None:
                processes[pid] = Process(
                    pid, 0, command=app["command"] or "", memory_mib=app["memory"], gpus=tuple(app["gpus"]),
                    app=True, visible=False, here=False,
                )  # fmt: skip
            continue
        mapped, ours = _mapped(pid, tree, below)
        held = tuple(sorted(files.get(pid, ())))
        unit = host.unit_of(pid, tree) or ""
        serves = pid in engines or app is not None or any(_MEMORY.fullmatch(path) for path in mapped)
        touched = {minors[path] for path in (*held, *mapped) if path in minors} | set(app["gpus"] if app else ())
        processes[pid] = Process(
            pid,
            stat[2],
            parent=stat[1],
            state=stat[0],
            argv=tuple(host.argv_of(pid, tree)),
            command=host.command_of(pid, tree) or (app or {}).get("command") or "",
            user=host.user_of(pid, tree) or "",
            unit=unit,
            files=held,
            mapped=mapped,
            memory_mib=app["memory"] if app else 0,
            gpus=tuple(sorted(touched)),
            app=app is not None,
            planned=_planned(pid, tree),
            release=ours,
            here=here is None or _namespace(pid, tree) == here,
            owned=owned(pid, unit) if unit and serves else True,
        )
    return Scene(
        processes,
        parents,
        {record["index"]: record["memory_used_mib"] or 0 for record in gpus},
        smi_error or "",
        tuple(host.device_files(tree)),
        tuple(notes),
    )


# ------------------------------------------------------------------------------------------------------- who is who
@dataclass(frozen=True)
class Server:
    """An old server that the operator names: by number, or by a pattern that its command line contains."""

    pid: int = 0
    match: str = ""

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Server:
        """Raises ReleaseError for an entry that names nothing, or everything."""
        given = {key: value for key, value in data.items() if value not in (None, "")}
        unknown = sorted(set(given) - {"pid", "match"})
        if unknown or len(given) != 1:
            raise ReleaseError(f"servers: found {dict(data)}, expected each entry to have pid or match, one of them.")
        if "pid" in given:
            try:
                pid = int(given["pid"])
            except (TypeError, ValueError):
                pid = 0
            if pid < 2:
                raise ReleaseError(f"servers: found pid {given['pid']!r}, expected the number of a process above 1.")
            return cls(pid=pid)
        pattern = str(given["match"])
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise ReleaseError(
                f"servers: match {pattern!r} is no regular expression ({error}); expected one that the command line of the old "
                "server contains, such as sglang.launch_server.*--port 30000."
            ) from None
        if expression.search(""):
            raise ReleaseError(
                f"servers: match {pattern!r} fits every process, expected one that only the old server's command line contains."
            )
        return cls(match=pattern)

    def text(self) -> str:
        return f"pid {self.pid}" if self.pid else f"match {self.match!r}"


@dataclass(frozen=True)
class Holder:
    """A process with its kind and the reason for it."""

    process: Process
    kind: str
    reason: str
    #: Gets SIGTERM itself; the others are its children, which end with it.
    leader: bool = False

    def public(self) -> dict[str, Any]:
        process = self.process
        return {
            "pid": process.pid,
            "command": process.command,
            "user": process.user or None,
            "unit": process.unit or None,
            "memory_mib": process.memory_mib,
            "gpus": list(process.gpus),
            "files": sorted({*process.files, *process.mapped}),
            "kind": self.kind,
            "reason": self.reason,
            "visible": process.visible,
        }


@dataclass(frozen=True)
class Decision:
    """Every holder with its kind. C(targets) may be ended, C(foreign) stands in the way."""

    holders: tuple[Holder, ...]
    notes: tuple[str, ...] = ()

    def of(self, kind: str) -> list[Holder]:
        return [holder for holder in self.holders if holder.kind == kind]

    @property
    def targets(self) -> list[Holder]:
        return [*self.of(OWN), *self.of(NAMED)]

    @property
    def foreign(self) -> list[Holder]:
        return self.of(FOREIGN)


def _left_behind(process: Process, scene: Scene) -> str:
    """Why a process is an orphan of this service; empty when it is not.

    Nothing of this is true for a job that merely runs with the release's interpreter, for a server that was started by
    hand (its main process lives), or for what another unit or a container runs.
    """
    if process.unit or not process.here or process.ended:
        return ""
    engine = process.engine
    if engine is not None and not engine[1]:
        return ""
    above = [scene.processes[pid] for pid in scene.ancestors(process.pid) if pid in scene.processes]
    if any(other.engine is not None and not other.engine[1] for other in above):
        return ""
    # A child whose parent is gone belongs to process 1. A shell that was given the service's environment does not.
    if process.planned and process.parent <= 1:
        return "left behind by the service: its environment holds the service's plan"
    if engine is not None and process.release:
        return "left behind by the service: a worker without its server, with libraries of the service's release"
    return ""


def _main_of(process: Process, scene: Scene) -> Process | None:
    """The process that drains when it gets SIGTERM: a worker would end in the middle of a request.

    None for what only started it (sudo, a terminal multiplexer): its command line looks the same, but it is not to be ended.
    """
    if process.engine is None:
        return process
    if process.engine[1]:
        above = [scene.processes[pid] for pid in scene.ancestors(process.pid) if pid in scene.processes]
        return next((other for other in above if other.engine is not None and not other.engine[1]), process)
    for pid in scene.descendants(process.pid):
        other = scene.processes.get(pid)
        # Equal words: a fork of the server itself, which has not become something else yet.
        if other is not None and other.engine is not None and not other.engine[1] and other.argv != process.argv:
            return None
    return process


def _named(server: Server, scene: Scene, unit: str, notes: list[str]) -> set[int]:
    """Main processes that C(server) names. Raises ReleaseError when it names what must not be ended this way."""

    def serves(process: Process) -> bool:
        return process.engine is not None or process.uses

    if server.pid:
        process = scene.processes.get(server.pid)
        if server.pid not in scene.parents or (process is not None and process.ended):
            notes.append(f"servers: {server.text()} is not there (any more)")
            return set()
        if process is None or not serves(process):
            what = process.command if process is not None else "another program"
            raise ReleaseError(
                f"servers: pid {server.pid} is {what}, which neither serves a model nor uses a GPU; expected the old server. "
                "Numbers are given again to other processes: look it up now, or use match. Nothing was ended."
            )
        found = [process]
    else:
        pattern = re.compile(server.match)
        found = [p for p in scene.processes.values() if serves(p) and pattern.search(" ".join(p.argv))]
        if not found:
            notes.append(f"servers: nothing that runs fits {server.text()}")
    leaders = set()
    for process in found:
        if process.unit == unit and unit:
            # Ours: systemd ends it, whatever the pattern says.
            continue
        leader = _main_of(process, scene)
        if leader is None:
            continue
        if leader.unit and leader.owned is None:
            raise ReleaseError(
                f"servers: {server.text()} names {leader.text()}, and systemd does not say which process that unit runs; expected to "
                f"know whether it would start the server again. Look at `systemctl status {leader.unit}`. Nothing was ended."
            )
        if leader.unit and leader.owned:
            raise ReleaseError(
                f"servers: {server.text()} names {leader.text()}; expected a server that was started by hand. systemd would start "
                f"it again: `systemctl disable --now {leader.unit}` is the way to end it. Nothing was ended."
            )
        leaders.add(leader.pid)
    return leaders


def judge(scene: Scene, unit: str, servers: Sequence[Server] = ()) -> Decision:
    """Give every holder its kind: C(own), C(named), C(monitor) or C(foreign).

    Raises ReleaseError when C(servers) names something that must not be ended.
    """
    notes: list[str] = list(scene.notes)
    leaders: dict[int, Server] = {}
    for server in servers:
        for pid in _named(server, scene, unit, notes):
            leaders.setdefault(pid, server)
    own: dict[int, str] = {}
    for process in scene.processes.values():
        if unit and process.unit == unit and not process.ended:
            own[process.pid] = f"in the control group of {unit}"
        elif process.pid not in leaders and (why := _left_behind(process, scene)):
            own[process.pid] = why
    holders: list[Holder] = []
    for process in scene.processes.values():
        if process.ended:
            continue
        above = scene.ancestors(process.pid)
        leader = next((pid for pid in (process.pid, *above) if pid in leaders), None)
        if process.pid in own:
            holders.append(Holder(process, OWN, own[process.pid], leader=True))
        elif leader is not None and process.unit in ("", scene.processes[leader].unit):
            first = process.pid == leader
            why = f"named by {leaders[leader].text()}" if first else f"started by pid {leader}, which is named"
            holders.append(Holder(process, NAMED, why, leader=first))
        elif not process.unit and process.holds and (parent := next((pid for pid in above if pid in own), None)):
            holders.append(Holder(process, OWN, f"started by pid {parent}, which is the service's", leader=True))
        elif process.uses:
            why = "nvidia-smi lists it" if process.app else "it maps a device file, as only CUDA does"
            holders.append(Holder(process, FOREIGN, f"not this service's; {why}"))
        elif process.files:
            holders.append(Holder(process, MONITOR, "has device files open but uses no GPU memory"))
    order = (OWN, NAMED, FOREIGN, MONITOR)
    holders.sort(key=lambda holder: (order.index(holder.kind), holder.process.pid))
    return Decision(tuple(holders), tuple(notes))


def unit_in_the_way(status: UnitStatus) -> str:
    """Why the GPUs cannot be released while the unit is as C(status) says; empty when they can.

    Without systemd (C(error)) there is no unit that could bring its processes back.
    """
    if status.error or status.load_state != "loaded" or status.active_state in ("inactive", "failed"):
        return ""
    return (
        f"{status.name} is {status.active_state} ({status.sub_state}), expected it to be stopped: systemd would start again what is "
        f"ended here. Nothing was signalled. Run `systemctl stop {status.name}` first (the role sglang_service does)."
    )


def refusal(foreign: Iterable[Holder]) -> str:
    """One message about processes that are in the way."""
    foreign = list(foreign)
    lines = "".join(f"\n  {holder.process.text()}" for holder in foreign)
    text = (
        f"The GPUs are used by {len(foreign)} process{'es' if len(foreign) > 1 else ''} that this service does not own:{lines}\n"
        "Expected nobody but the service and monitors. No process was signalled. Stop each by its owner's means (systemctl stop UNIT, "
        "or ask its user)"
    )
    by_hand = [holder.process for holder in foreign if not holder.process.unit or holder.process.owned is False]
    if any(process.engine is not None for process in by_hand):
        text += (
            "; an old server that was started by hand is drained and replaced when sglang_service_take_over names it"
        )
    return text + "."


# ------------------------------------------------------------------------------------------------------------ acting
@dataclass(frozen=True)
class Limits:
    """Seconds for each step, and the MiB that an idle GPU may show as used."""

    term_timeout: float = 120.0
    kill_timeout: float = 10.0
    free_timeout: float = 30.0
    memory_threshold_mib: int = 1024

    def __post_init__(self) -> None:
        for name in ("term_timeout", "kill_timeout", "free_timeout", "memory_threshold_mib"):
            if getattr(self, name) < 0:
                raise ReleaseError(f"{name}: found {getattr(self, name):g}, expected 0 or more. Nothing was ended.")


class Target:
    """A process that is to end. It is signalled only while it is still the one that was looked at."""

    def __init__(self, holder: Holder, tree: host.Roots) -> None:
        self.holder, self._tree = holder, tree
        self.signals: list[str] = []
        self._pidfd: int | None = None
        process = holder.process
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            # An old kernel or a sandbox: the start time alone tells it from a later one.
            self._pidfd = None

    @property
    def alive(self) -> bool:
        stat = _stat(self.holder.process.pid, self._tree)
        return stat is not None and stat[2] == self.holder.process.started and stat[0] not in ("Z", "X")

    @property
    def stuck(self) -> bool:
        stat = _stat(self.holder.process.pid, self._tree)
        return stat is not None and stat[2] == self.holder.process.started and stat[0] == "D"

    def send(self, number: signal.Signals) -> None:
        # The handle was opened after the look; the start time, compared after that, says whether it is the same process.
        if not self.alive:
            return
        try:
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            else:
                os.kill(self.holder.process.pid, number)
        except ProcessLookupError:
            return
        self.signals.append(number.name)

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def public(self) -> dict[str, Any]:
        return {**self.holder.public(), "signals": self.signals}


@dataclass
class Release:
    """Ends the targets of a decision, and waits until their files are closed and the memory is back."""

    decision: Decision
    limits: Limits
    look: Callable[[], Scene]
    judge: Callable[[Scene], Decision]
    #: Foreign processes stay, with the memory of their GPUs.
    leave_foreign: bool = False
    tree: host.Roots = field(default_factory=host.Roots)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    released: list[dict[str, Any]] = field(default_factory=list)
    last: Scene | None = None

    def run(self) -> None:
        """Raises ReleaseError when something stays."""
        targets = [Target(holder, self.tree) for holder in self.decision.targets]
        try:
            self._end(targets)
        finally:
            self.released = [target.public() for target in targets]
            for target in targets:
                target.close()
        self._wait_until_free()

    def _wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Whether C(done) became true in time."""
        until = self.clock() + seconds
        while not done():
            if self.clock() >= until:
                return False
            self.sleep(POLL)
        return True

    def _end(self, targets: list[Target]) -> None:
        leaders = [target for target in targets if target.holder.leader]
        leftovers = [target for target in targets if target.holder.kind == OWN]
        for target in leaders:
            target.send(signal.SIGTERM)
        began = last_seen = self.clock()

        def over() -> bool:
            nonlocal last_seen
            if self.clock() - began >= LEFTOVER_GRACE:
                for target in leftovers:
                    if signal.SIGKILL.name not in target.signals:
                        target.send(signal.SIGKILL)
            if any(target.alive for target in leaders):
                last_seen = self.clock()
                return False
            return not any(target.alive for target in targets) or self.clock() - last_seen >= FOLLOW_GRACE

        self._wait(self.limits.term_timeout, over)
        for target in targets:
            target.send(signal.SIGKILL)
        if self._wait(self.limits.kill_timeout, lambda: not any(target.alive for target in targets)):
            return
        left = [target for target in targets if target.alive]
        words = "; ".join(target.holder.process.text() for target in left)
        do = "Look at its open files and its parent, then run the play again."
        if any(target.stuck for target in left):
            do = (
                "It waits inside the driver (state D), where no signal reaches it: look for Xid in `dmesg`, then reset the GPU or "
                "reboot."
            )
        raise ReleaseError(
            f"{words}: still there {self.limits.kill_timeout:g} s after SIGKILL, expected it to be gone. {do}"
        )

    def _obstacles(self) -> list[str]:
        """What is still in the way, after one look."""
        scene = self.last = self.look()
        if scene.smi_error:
            if not scene.device_files:
                return []
            return [f"nvidia-smi does not say what the GPUs hold: {scene.smi_error}"]
        now = self.judge(scene)
        found = [f"{holder.process.text()} ({holder.reason})" for holder in now.targets if holder.process.holds]
        agreed = self.decision.foreign if self.leave_foreign else []
        known = {(holder.process.pid, holder.process.started) for holder in agreed}
        found += [
            f"{holder.process.text()} ({holder.reason})"
            for holder in now.foreign
            if (holder.process.pid, holder.process.started) not in known
        ]
        shared = {index for holder in agreed for index in holder.process.gpus}
        if not found:
            found += [
                f"GPU {index}: {used} MiB in use (expected {self.limits.memory_threshold_mib} at most) by nobody visible"
                for index, used in sorted(scene.memory.items())
                if used > self.limits.memory_threshold_mib and index not in shared
            ]
        # A loop around the old server, or cron, starts it again.
        for holder in now.of(NAMED):
            if holder.leader and not holder.process.holds:
                parent = holder.process.parent
                found.append(
                    f"{holder.process.text()}: it was started again, by pid {parent}; expected it to stay away: stop that first"
                )
        return found

    def _wait_until_free(self) -> None:
        found: list[str] = []

        def free() -> bool:
            found[:] = self._obstacles()
            return not found

        if not self._wait(self.limits.free_timeout, free):
            lines = "".join(f"\n  {line}" for line in found)
            raise ReleaseError(
                f"The GPUs are not free {self.limits.free_timeout:g} s after the last process that may be ended was gone:{lines}\n"
                "Expected closed device files and free memory. Nothing else was signalled. Look with `nvidia-smi` and "
                "`fuser -v /dev/nvidia*` (never with -k: monitors hold the files too), stop what is named, and run the play again."
            )
