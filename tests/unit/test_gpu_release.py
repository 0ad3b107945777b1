"""Who may be ended, who stands in the way, and that nobody else is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import gpu, gpu_release, host
from ansible_collections.gpuserve.sglang.plugins.module_utils.gpu_release import (
    Decision,
    Holder,
    Limits,
    Process,
    Release,
    ReleaseError,
    Scene,
    Server,
    judge,
    look,
)
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import UnitStatus

UNIT = "sglang-kimi.service"
REAL = Path(__file__).parent / "fixtures" / "h200-x2"
SERVER = ("/opt/venv/bin/python", "-m", "sglang.launch_server", "--port", "30000")


def scene(*processes: Process, **options: Any) -> Scene:
    parents = {process.pid: process.parent for process in processes if process.visible}
    return Scene({process.pid: process for process in processes}, {**options.pop("parents", {}), **parents}, **options)


def engine(pid: int, **options: Any) -> Process:
    return Process(pid, 100 + pid, **{"parent": 1, "argv": SERVER, "command": " ".join(SERVER), **options})


def worker(pid: int, parent: int, **options: Any) -> Process:
    title = "sglang::scheduler_TP0"
    given = {"argv": (title,), "command": title, "files": ("/dev/nvidia0",), "mapped": ("/dev/nvidia0",), "app": True}
    return Process(pid, 100 + pid, parent=parent, **{**given, **options})


def kinds(decision: Decision) -> dict[int, str]:
    return {holder.process.pid: holder.kind for holder in decision.holders}


# ------------------------------------------------------------------------------------------------------ who is whose
def test_the_units_own_processes_are_own_and_a_monitor_is_not() -> None:
    monitor = Process(
        9, 1, parent=1, argv=("dcgm-exporter",), files=("/dev/nvidia0", "/dev/nvidiactl"), unit="dcgm.service"
    )
    decision = judge(scene(engine(5, unit=UNIT), worker(6, 5, unit=UNIT), monitor), UNIT)
    assert kinds(decision) == {5: "own", 6: "own", 9: "monitor"}
    assert [holder.process.pid for holder in decision.targets] == [5, 6]


def test_a_process_that_maps_a_device_is_no_monitor_even_if_nvidia_smi_does_not_list_it() -> None:
    job = Process(9, 1, parent=1, argv=("train",), files=("/dev/nvidia0",), mapped=("/dev/nvidia0",))
    assert kinds(judge(scene(job), UNIT)) == {9: "foreign"}


def test_a_manager_of_switches_is_a_monitor() -> None:
    manager = Process(
        9, 1, parent=1, argv=("nv-fabricmanager",), files=("/dev/nvidia0",), mapped=("/dev/nvidia-nvswitch0",)
    )
    assert kinds(judge(scene(manager), UNIT)) == {9: "monitor"}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"release": True}, "own"),
        ({"planned": True}, "own"),
        # Somebody else's engine, from an environment of their own.
        ({}, "foreign"),
        # Another unit's worker, or that of a container, with the very same paths.
        ({"release": True, "unit": "other.service"}, "foreign"),
        ({"release": True, "here": False}, "foreign"),
        # A job that runs with the release's interpreter.
        ({"release": True, "argv": ("/opt/sglang/current/bin/python", "train.py")}, "foreign"),
        # A shell with the service's environment started it.
        ({"planned": True, "parent": 50, "argv": ("python", "debug.py")}, "foreign"),
        # Started by hand with the release: its main process is no orphan, and is to be named.
        ({"release": True, "planned": True, "argv": SERVER}, "foreign"),
    ],
)
def test_what_counts_as_left_behind(change: dict[str, Any], kind: str) -> None:
    given = worker(6, change.pop("parent", 1), **change)
    assert kinds(judge(scene(given), UNIT)) == {6: kind}


def test_a_worker_is_no_orphan_while_its_server_lives() -> None:
    decision = judge(scene(engine(5), worker(6, 5, release=True)), UNIT)
    assert kinds(decision) == {6: "foreign"}


def test_a_worker_of_a_dead_server_is_an_orphan_while_the_dead_one_waits_to_be_reaped() -> None:
    dead = engine(5, state="Z", argv=())
    assert kinds(judge(scene(dead, worker(6, 5, release=True)), UNIT)) == {6: "own"}


def test_what_an_orphan_started_is_own_when_it_holds_a_gpu() -> None:
    child = Process(7, 7, parent=6, argv=("python",), files=("/dev/nvidia0",), mapped=("/dev/nvidia0",))
    idle = engine(8, argv=("python", "-c", "pass"), parent=6)
    assert kinds(judge(scene(worker(6, 1, release=True), child, idle), UNIT)) == {6: "own", 7: "own"}


# ------------------------------------------------------------------------------------------------------------- named
def test_a_server_that_was_started_by_hand_is_named_with_its_workers_and_only_main_gets_sigterm() -> None:
    decision = judge(scene(engine(5), worker(6, 5), worker(7, 1)), UNIT, [Server(match=r"launch_server.*--port 30000")])
    assert kinds(decision) == {5: "named", 6: "named", 7: "foreign"}
    assert {h.process.pid: h.leader for h in decision.targets} == {5: True, 6: False}


@pytest.mark.parametrize("server", [Server(pid=6), Server(match="^sglang::scheduler")])
def test_naming_a_worker_means_its_server(server: Server) -> None:
    decision = judge(scene(engine(5), worker(6, 5)), UNIT, [server])
    assert {h.process.pid: h.leader for h in decision.targets} == {5: True, 6: False}


def test_what_merely_started_the_server_is_left_alone() -> None:
    tmux = engine(4, argv=("tmux", "new", *SERVER[:3]))
    decision = judge(scene(tmux, engine(5, parent=4), worker(6, 5)), UNIT, [Server(match="sglang.launch_server")])
    assert {h.process.pid: h.leader for h in decision.targets} == {5: True, 6: False}


def test_a_fork_of_the_server_does_not_take_its_place() -> None:
    decision = judge(scene(engine(5), engine(6, parent=5)), UNIT, [Server(pid=5)])
    assert {h.process.pid: h.leader for h in decision.targets} == {5: True, 6: False}


def test_a_server_of_another_unit_is_refused() -> None:
    with pytest.raises(ReleaseError, match=r"systemctl disable --now vllm.service"):
        judge(scene(engine(5, unit="vllm.service")), UNIT, [Server(pid=5)])


@pytest.mark.parametrize("unit", ["cron.service", "ssh.service", "user-app.service"])
def test_a_server_that_a_unit_merely_contains_is_taken_over(unit: str) -> None:
    """@reboot in a crontab, ssh without pam_systemd: disabling that unit would lock the operator out."""
    there = scene(engine(5, unit=unit, owned=False), worker(6, 5, unit=unit, owned=False))
    decision = judge(there, UNIT, [Server(match="sglang.launch_server")])
    assert {h.process.pid: (h.kind, h.leader) for h in decision.targets} == {5: ("named", True), 6: ("named", False)}
    # Not named, it is refused, and nobody is told to stop the unit.
    refused = gpu_release.refusal(judge(there, UNIT).foreign)
    assert f"unit none (in the control group of {unit}" in refused
    assert "sglang_service_take_over" in refused


def test_a_taken_over_server_does_not_take_other_units_along() -> None:
    other = worker(6, 5, unit="training.service")
    decision = judge(scene(engine(5, unit="cron.service", owned=False), other), UNIT, [Server(pid=5)])
    assert kinds(decision) == {5: "named", 6: "foreign"}


def test_a_server_of_a_unit_that_systemd_says_nothing_about_is_refused_without_a_command_that_ends_it() -> None:
    with pytest.raises(ReleaseError, match="systemd does not say which process") as refused:
        judge(scene(engine(5, unit="cron.service", owned=None)), UNIT, [Server(pid=5)])
    assert "disable" not in str(refused.value)


def test_our_own_unit_is_never_named() -> None:
    assert kinds(judge(scene(engine(5, unit=UNIT)), UNIT, [Server(match="sglang")])) == {5: "own"}


def test_a_number_that_was_given_to_another_program_is_refused() -> None:
    sshd = Process(5, 1, parent=1, argv=("sshd",), command="sshd")
    with pytest.raises(ReleaseError, match="pid 5 is sshd, which neither serves"):
        judge(scene(sshd), UNIT, [Server(pid=5)])
    with pytest.raises(ReleaseError, match="pid 7 is another program"):
        judge(scene(parents={7: 1}), UNIT, [Server(pid=7)])


def test_a_pattern_does_not_reach_what_uses_no_gpu_and_serves_no_model() -> None:
    editor = Process(5, 1, parent=1, argv=("vim", "sglang.launch_server.md"))
    monitor = Process(6, 1, parent=1, argv=("watch", "sglang.launch_server"), files=("/dev/nvidia0",))
    decision = judge(scene(editor, monitor), UNIT, [Server(match="sglang.launch_server")])
    assert kinds(decision) == {6: "monitor"}
    assert decision.notes == ("servers: nothing that runs fits match 'sglang.launch_server'",)


def test_a_server_that_is_gone_is_a_note() -> None:
    decision = judge(scene(), UNIT, [Server(pid=5)])
    assert (decision.holders, decision.notes) == ((), ("servers: pid 5 is not there (any more)",))


@pytest.mark.parametrize(
    "entry", [{}, {"pid": 1}, {"pid": "x"}, {"match": ".*"}, {"match": "("}, {"pid": 5, "match": "x"}, {"name": "x"}, {"match": ""}]
)  # fmt: skip
def test_an_entry_that_names_nothing_or_everything_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(ReleaseError, match="expected"):
        Server.load(entry)


def test_entries_load() -> None:
    assert Server.load({"pid": 5, "match": None}) == Server(pid=5)
    assert Server.load({"match": "vllm serve"}) == Server(match="vllm serve")


# ----------------------------------------------------------------------------------------------------------- foreign
def test_the_refusal_names_everybody() -> None:
    job = Process(
        9, 1, parent=1, argv=("python3", "train.py"), command="python3 train.py", user="bob", files=("/dev/nvidia3",),
        mapped=("/dev/nvidia3",), memory_mib=40960, gpus=(3,), app=True,
    )  # fmt: skip
    text = gpu_release.refusal(judge(scene(job), UNIT).foreign)
    for word in (
        "pid 9 (python3 train.py)",
        "user bob",
        "40960 MiB",
        "GPU 3",
        "/dev/nvidia3",
        "No process was signalled",
    ):
        assert word in text
    assert "sglang_service_take_over" not in text
    assert "sglang_service_take_over" in gpu_release.refusal(judge(scene(engine(5, app=True)), UNIT).foreign)


def test_what_another_container_runs_is_foreign_and_said_to_be_invisible() -> None:
    hidden = Process(4242, 0, command="python3", app=True, visible=False, here=False, gpus=(3,), memory_mib=5)
    (holder,) = judge(scene(hidden), UNIT).foreign
    assert "not visible from here" in holder.process.text()


@pytest.mark.parametrize(
    ("state", "refused"), [("active", True), ("activating", True), ("deactivating", True), ("inactive", False), ("failed", False)]
)  # fmt: skip
def test_nothing_is_ended_that_systemd_would_start_again(state: str, refused: bool) -> None:
    status = UnitStatus(UNIT, load_state="loaded", active_state=state, sub_state="x")
    assert bool(gpu_release.unit_in_the_way(status)) is refused
    assert gpu_release.unit_in_the_way(UnitStatus(UNIT, error="no systemd")) == ""
    assert gpu_release.unit_in_the_way(UnitStatus(UNIT, load_state="not-found", active_state="inactive")) == ""


# ------------------------------------------------------------------------------------------------- reading the host
class Proc:
    """A made-up /proc."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.tree = host.Roots(proc=str(base / "proc"), dev=str(base / "dev"))
        (base / "proc").mkdir()
        (base / "dev").mkdir()
        for name in ("nvidia0", "nvidia1", "nvidiactl"):
            (base / "dev" / name).touch()

    def put(
        self, pid: int, argv: Sequence[str], *, parent: int = 1, started: int = 77, files: Sequence[str] = (),
        maps: Sequence[str] = (), environ: bytes = b"", cgroup: str = "0::/user.slice/session-1.scope\n", name: str = "x",
        namespace: str = "pid:[1]", session: int = 0,
    ) -> None:  # fmt: skip
        folder = self.base / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "ns").mkdir()
        (folder / "ns" / "pid").symlink_to(namespace)
        (folder / "cmdline").write_bytes(b"\0".join(word.encode() for word in argv) + b"\0")
        (folder / "comm").write_text(name + "\n")
        (folder / "cgroup").write_text(cgroup)
        (folder / "status").write_text("Uid:\t0\t0\t0\t0\n")
        (folder / "environ").write_bytes(environ)
        rest = " ".join(["S", str(parent), "0", str(session), *(["0"] * 15), str(started), "0", "0"])
        (folder / "stat").write_text(f"{pid} ({name}) {rest}\n")
        lines = [f"7f00-7f01 rw-s 00000000 00:05 {n} {path}" for n, path in enumerate(maps)]
        (folder / "maps").write_text("\n".join(["7f00-7f01 rw-p 00000000 00:00 0", *lines, ""]))
        for number, target in enumerate(files, start=3):
            (folder / "fd" / str(number)).symlink_to(target)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    made = Proc(tmp_path)
    made.put(os.getpid(), ["pytest"])
    (tmp_path / "proc" / "self").symlink_to(str(os.getpid()))
    return made


def real(name: str) -> gpu.Runner:
    return lambda argv: gpu.ToolResult(0, (REAL / name).read_text(encoding="utf-8"))


LIBRARY = "/opt/sglang/releases/abc/lib/python3.12/site-packages/torch/lib/libtorch.so"


def test_one_look_reads_holders_of_files_of_memory_and_of_releases(proc: Proc) -> None:
    """The real XML lists pid 586 on GPU 1 with 4706 MiB."""
    proc.put(586, ["sglang::scheduler_TP0"], files=["/dev/nvidia1", "/dev/nvidiactl"], maps=["/dev/nvidia1", LIBRARY])
    proc.put(600, ["dcgm-exporter"], files=["/dev/nvidia0"], cgroup="0::/system.slice/dcgm.service\n")
    proc.put(601, ["bash"], name="odd) S 1 (name")
    seen = look(proc.tree, "nvidia-smi", real("busy.xml"), ["/opt/sglang"])
    assert set(seen.processes) == {586, 600}
    scheduler, monitor = seen.processes[586], seen.processes[600]
    assert (scheduler.memory_mib, scheduler.gpus, scheduler.app, scheduler.release) == (4706, (1,), True, True)
    assert scheduler.mapped == ("/dev/nvidia1",)
    assert (scheduler.started, scheduler.parent, scheduler.here, scheduler.planned) == (77, 1, True, False)
    assert (monitor.uses, monitor.unit, monitor.gpus) == (False, "dcgm.service", (0,))
    assert seen.parents[601] == 1
    assert seen.memory == {0: 4, 1: 4715}
    assert kinds(judge(seen, UNIT)) == {586: "own", 600: "monitor"}


def test_the_plan_in_the_environment_and_another_namespace_are_seen(proc: Proc) -> None:
    proc.put(600, ["python"], files=["/dev/nvidia0"], maps=["/dev/nvidia0"], environ=b"A=1\0GPUSERVE_PLAN=abc\0")
    proc.put(601, ["sglang::x"], files=["/dev/nvidia0"], maps=["/dev/nvidia0", LIBRARY], namespace="pid:[2]")
    seen = look(proc.tree, None, real("busy.xml"), ["/opt/sglang"])
    assert seen.processes[600].planned
    assert not seen.processes[601].here
    assert kinds(judge(seen, UNIT)) == {600: "own", 601: "foreign"}


@pytest.mark.parametrize(
    ("parent", "session", "main", "owned"),
    [
        # The unit runs the server itself, or a script that runs it.
        (1, 600, 600, True),
        (500, 500, 500, True),
        # cron and sshd start what they run in a session of its own; after a logout it belongs to process 1.
        (500, 600, 500, False),
        (1, 500, 500, False),
        # The unit has no main process (any more), or systemd does not know it: a user's unit.
        (1, 600, 0, False),
        (1, 600, None, None),
    ],
)
def test_whether_a_unit_runs_a_server_or_merely_contains_it(
    proc: Proc, parent: int, session: int, main: int | None, owned: bool | None
) -> None:
    group = "0::/system.slice/some.service\n"
    proc.put(500, ["/usr/sbin/some", "-f"], session=500, cgroup=group)
    proc.put(600, SERVER, parent=parent, session=session, cgroup=group)
    asked: list[str] = []

    def main_pid(unit: str) -> int | None:
        asked.append(unit)
        return main

    seen = look(proc.tree, None, real("busy.xml"), main_pid=main_pid)
    assert (seen.processes[600].unit, seen.processes[600].owned) == ("some.service", owned)
    assert asked == ["some.service"]


def test_a_process_that_only_nvidia_smi_knows_is_kept(proc: Proc) -> None:
    seen = look(proc.tree, "nvidia-smi", real("busy.xml"))
    assert [(p.pid, p.visible, p.memory_mib) for p in seen.processes.values()] == [(586, False, 4706)]


def test_a_neighbouring_folder_is_not_the_release(proc: Proc) -> None:
    proc.put(600, ["sglang::x"], maps=["/opt/sglang-of-bob/lib/libtorch.so"], files=["/dev/nvidia0"])
    assert not look(proc.tree, None, real("busy.xml"), ["/opt/sglang"]).processes[600].release


def test_a_silent_nvidia_smi_is_said(proc: Proc) -> None:
    seen = look(proc.tree, "nvidia-smi", lambda argv: gpu.ToolResult(9, "no driver"))
    assert "no driver" in seen.smi_error
    seen = look(proc.tree, "nvidia-smi", lambda argv: gpu.ToolResult(6, "No devices were found"))
    assert (seen.smi_error, seen.memory) == ("", {})


# ------------------------------------------------------------------------------------------------ acting, for real
STAY = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
GO = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def started() -> Iterator[Any]:
    """Starts real processes; all of them are gone afterwards."""
    children: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()


def as_process(child: subprocess.Popen[str], **options: Any) -> Process:
    stat = (Path("/proc") / str(child.pid) / "stat").read_text().rpartition(")")[2].split()
    return Process(child.pid, int(stat[19]), parent=os.getpid(), argv=("python",), command="python", **options)


QUICK = Limits(term_timeout=5, kill_timeout=5, free_timeout=0)
EMPTY = Scene({}, {}, {0: 4})


def release(decision: Decision, limits: Limits = QUICK, after: Scene = EMPTY, **options: Any) -> Release:
    return Release(decision, limits, lambda: after, lambda now: judge(now, UNIT), **options)


def own(child: subprocess.Popen[str], leader: bool = True) -> Holder:
    return Holder(as_process(child), "own", "test", leader)


def test_sigterm_is_enough_for_who_listens(started: Any) -> None:
    child = started(GO)
    done = release(Decision((own(child),)))
    done.run()
    assert child.wait() == -signal.SIGTERM
    assert [entry["signals"] for entry in done.released] == [["SIGTERM"]]


def test_sigkill_comes_after_the_time_of_sigterm(started: Any) -> None:
    child = started(STAY)
    began = time.monotonic()
    done = release(Decision((own(child),)), replace(QUICK, term_timeout=1))
    done.run()
    assert child.wait() == -signal.SIGKILL
    assert time.monotonic() - began >= 1
    assert [entry["signals"] for entry in done.released] == [["SIGTERM", "SIGKILL"]]


def test_a_worker_gets_no_sigterm_and_is_killed_when_its_server_is_gone(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_release, "FOLLOW_GRACE", 0.5)
    main, child = started(GO), started(GO)
    done = release(Decision((own(main), own(child, leader=False))), replace(QUICK, term_timeout=60))
    done.run()
    assert (main.wait(), child.wait()) == (-signal.SIGTERM, -signal.SIGKILL)
    assert [entry["signals"] for entry in done.released] == [["SIGTERM"], ["SIGKILL"]]


def test_what_was_left_behind_is_not_drained_while_a_server_is(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_release, "LEFTOVER_GRACE", 0.5)
    server, orphan = started(STAY), started(STAY)
    named = Holder(as_process(server), "named", "test", True)
    done = release(Decision((own(orphan), named)), replace(QUICK, term_timeout=60))
    ended: list[float] = []

    def finish() -> None:
        # The server's last request ends when the orphan is long gone.
        assert orphan.wait(30) == -signal.SIGKILL
        ended.append(time.monotonic())
        server.kill()

    thread = threading.Thread(target=finish)
    thread.start()
    done.run()
    thread.join()
    assert ended
    assert [entry["signals"] for entry in done.released] == [["SIGTERM", "SIGKILL"], ["SIGTERM"]]


@pytest.mark.parametrize("handle", [True, False])
def test_a_number_that_was_given_again_is_not_signalled(
    started: Any, handle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not handle:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    child = started(GO)
    other = replace(as_process(child), started=1)
    done = release(Decision((Holder(other, "own", "test", True),)))
    done.run()
    assert child.poll() is None
    assert [entry["signals"] for entry in done.released] == [[]]


def test_without_handles_of_processes_it_works_as_well(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    child = started(GO)
    release(Decision((own(child),))).run()
    assert child.wait() == -signal.SIGTERM


def test_nobody_but_targets_is_touched(started: Any) -> None:
    child, stranger, monitor = started(GO), started(GO), started(GO)
    decision = Decision(
        (own(child), Holder(as_process(stranger), "foreign", "x"), Holder(as_process(monitor), "monitor", "x"))
    )
    release(decision).run()
    assert child.wait() == -signal.SIGTERM
    assert (stranger.poll(), monitor.poll()) == (None, None)


# ---------------------------------------------------------------------------------------------- until they are free
class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wait_with(scenes: Sequence[Scene], free_timeout: float = 30, **options: Any) -> Clock:
    clock, left = Clock(), list(scenes)
    Release(
        options.pop("decision", Decision(())), Limits(free_timeout=free_timeout),
        lambda: left.pop(0) if len(left) > 1 else left[0], options.pop("judge", lambda now: judge(now, UNIT)),
        clock=clock, sleep=clock.sleep, **options,
    ).run()  # fmt: skip
    return clock


def test_it_waits_until_the_memory_is_back() -> None:
    assert wait_with([Scene({}, {}, {0: 5000}), Scene({}, {}, {0: 5000}), EMPTY]).now == 1.0


def test_it_names_memory_that_stays_and_the_budget_is_kept() -> None:
    with pytest.raises(
        ReleaseError, match=r"not free 3 s after[\s\S]*GPU 0: 5000 MiB in use \(expected 1024 at most\)"
    ):
        wait_with([Scene({}, {}, {0: 5000, 1: 3})], free_timeout=3)


def test_it_names_who_came_in_between_and_does_not_touch_them(started: Any) -> None:
    child = started(GO)
    late = as_process(child, mapped=("/dev/nvidia0",))
    with pytest.raises(ReleaseError, match=rf"pid {child.pid} [\s\S]*Nothing else was signalled"):
        wait_with([scene(late, memory={0: 5})], free_timeout=1)
    assert child.poll() is None


def test_a_server_that_is_started_again_is_named_with_who_did_it() -> None:
    again = scene(engine(50, parent=40), memory={0: 5})
    patterns = [Server(match="launch_server")]
    with pytest.raises(ReleaseError, match="started again, by pid 40"):
        wait_with([again], free_timeout=1, judge=lambda now: judge(now, UNIT, patterns))


def test_foreign_processes_that_may_stay_keep_their_memory() -> None:
    job = Process(9, 1, parent=1, argv=("train",), app=True, memory_mib=40000, gpus=(3,), mapped=("/dev/nvidia3",))
    seen = scene(job, memory={0: 5, 3: 40000})
    decision = judge(seen, UNIT)
    assert wait_with([seen], decision=decision, leave_foreign=True).now == 0
    with pytest.raises(ReleaseError, match="pid 9 "):
        wait_with([seen], decision=decision, free_timeout=1)
    # Not another one with the same number, nor more memory elsewhere.
    later = scene(replace(job, started=2), memory={3: 40000})
    with pytest.raises(ReleaseError, match="pid 9 "):
        wait_with([later], decision=decision, leave_foreign=True, free_timeout=1)
    with pytest.raises(ReleaseError, match="GPU 0: 9000 MiB"):
        wait_with([scene(job, memory={0: 9000, 3: 1})], decision=decision, leave_foreign=True, free_timeout=1)


def test_an_nvidia_smi_that_says_nothing_fails_where_there_are_devices_only() -> None:
    assert wait_with([Scene({}, {}, smi_error="no driver")]).now == 0
    with pytest.raises(ReleaseError, match="does not say what the GPUs hold: no driver"):
        wait_with([Scene({}, {}, smi_error="no driver", device_files=("/dev/nvidia0",))], free_timeout=1)


def test_a_monitor_is_waited_for_by_nobody() -> None:
    monitor = Process(9, 1, parent=1, argv=("exporter",), files=("/dev/nvidia0",))
    assert wait_with([scene(monitor, memory={0: 5})]).now == 0


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ReleaseError, match="term_timeout: found -1"):
        Limits(term_timeout=-1)
