"""What a switch will do, and its steps, against a systemd that is played."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import switch as switches
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import CommandResult
from ansible_collections.gpuserve.sglang.plugins.module_utils.record import Records
from ansible_collections.gpuserve.sglang.plugins.module_utils.service import PLAN_VARIABLE
from ansible_collections.gpuserve.sglang.plugins.module_utils.switch import (
    Away,
    Evidence,
    Switch,
    SwitchError,
    differing,
    parse_span,
    ready_times,
    release_of,
    replaced,
    switch_plan,
    write_file,
)
from ansible_collections.gpuserve.sglang.plugins.modules import service_switch

UNIT = "engine.service"
OLD, NEW = "/opt/sglang/releases/0ld0/venv/bin/python", "/opt/sglang/releases/nEw0/venv/bin/python"
PLAN: dict[str, Any] = {
    "process_hash": "b" * 64,
    "command": [NEW, "-m", "sglang.launch_server", "--tp-size", "8"],
    "env": {"A": "2"},
    "unit": {"timeout_stop_sec": 120, "timeout_start_sec": 900},
}
NOW: dict[str, Any] = {
    "unit": UNIT,
    "reasons": ["the running process follows another plan (aaa, wanted bbb)"],
    "active_state": "active",
    "main_pid": 7,
    "command": [OLD, "-m", "sglang.launch_server", "--tp-size", "4"],
    "environment": {"A": "1"},
    "drop_ins": [],
    "last_good": {"id": "aaa", "process_hash": "a" * 64, "profile": "p", "endpoint": {}, "error": ""},
    "last_start": {"seconds_to_ready": 570.4},
}


def test_a_restart_says_why_what_changes_how_long_and_what_a_failure_does() -> None:
    what = switch_plan(NOW, PLAN)
    assert (what["action"], what["fallback"], what["proven"], what["away_seconds"]) == ("restart", "aaa", False, 570.4)
    assert what["release"] == {"from": "0ld0", "to": "nEw0"}
    assert "--tp-size 4 -> 8" in what["changes"] and "A 1 -> 2" in what["changes"]
    for words in (
        "engine.service will be restarted:",
        "follows another plan",
        "setting  --tp-size 4 -> 8",
        "release  0ld0 -> nEw0",
        "running requests finish (at most 120 s), stop, start, wait until it serves (at most 900 s)",
        "away for about 570 s",
        "deployment aaa is put back",
    ):
        assert words in what["text"]


def test_nothing_to_do() -> None:
    what = switch_plan({**NOW, "reasons": []}, {**PLAN, "process_hash": "a" * 64})
    assert (what["action"], what["proven"], what["fallback"]) == ("none", True, "")
    assert what["text"] == "engine.service follows the plan; it is not restarted."


def test_settings_of_the_unit_are_told_also_without_a_restart() -> None:
    """systemd applies most of them as soon as it has read the unit."""
    before = {
        **PLAN["unit"],
        "memory_max": "21G",
        "tasks_max": "4096",
        "user": "sglang",
        "hardening": ["A=yes", "B=yes"],
    }
    wanted = {**before, "memory_max": "4G", "tasks_max": 4096, "user": "other", "hardening": ["A=yes", "B=no", "C=1"]}
    now = {**NOW, "last_good": {**NOW["last_good"], "unit": before}}
    rest = ["  unit     user sglang -> other", "  unit     hardening -B=yes +B=no +C=1"]
    calm = switch_plan({**now, "reasons": []}, {**PLAN, "unit": wanted})
    assert calm["action"] == "none"
    at_once = "  unit     memory_max 21G -> 4G (acts at once, without a restart)"
    assert calm["text"].splitlines() == ["engine.service follows the plan; it is not restarted.", at_once, *rest]
    what = switch_plan(now, {**PLAN, "unit": wanted})
    assert [line for line in what["text"].splitlines() if line.startswith("  unit ")] == [at_once, *rest]
    stopped = switch_plan({**now, "active_state": "inactive", "main_pid": 0}, {**PLAN, "unit": wanted})
    assert stopped["unit_changes"][0] == "memory_max 21G -> 4G"
    long = switch_plan(now, {**PLAN, "unit": {**before, "hardening": list("abcde")}})
    assert long["unit_changes"] == ["hardening -A=yes -B=yes +a +b and 3 more"]
    assert switch_plan(now, {**PLAN, "unit": before})["unit_changes"] == []
    assert switch_plan(NOW, {**PLAN, "unit": wanted})["unit_changes"] == [], "an older record has none"


def test_what_a_killed_play_started_is_not_proven() -> None:
    """The process follows the plan, and no gate has passed: its failure puts the last good one back."""
    what = switch_plan({**NOW, "reasons": []}, PLAN)
    assert (what["action"], what["proven"], what["fallback"]) == ("none", False, "aaa")


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"last_good": None, "last_start": {}}, ["will be started", "not known", "no earlier deployment is on record"]),
        (
            {"last_good": {"id": "bbb", "process_hash": "b" * 64}},
            ["ready after about 570 s", "the last good deployment"],
        ),
        # As the collection wrote it before.
        ({"last_start": {"seconds_to_ready": "57.3"}}, ["ready after about 57 s"]),
        ({"drop_ins": ["/etc/x.conf"]}, ["/etc/x.conf changes the unit as well", "systemctl revert"]),
    ],
)
def test_a_stopped_service_is_started(now: dict[str, Any], words: list[str]) -> None:
    what = switch_plan(
        {**NOW, "active_state": "inactive", "main_pid": 0, "command": [], "environment": {}, **now}, PLAN
    )
    assert what["action"] == "start" and what["changes"] == [] and what["release"]["from"] == ""
    for word in words:
        assert word in what["text"]


def test_release_of_a_command() -> None:
    assert release_of(PLAN["command"]) == "nEw0"
    assert release_of(["/opt/ml-env/bin/python"]) == release_of([]) == ""


# --- steps ------------------------------------------------------------------------------------------------------------


class Systemd:
    """A unit that stops some seconds after it was asked to, or only when it is killed."""

    def __init__(
        self, state: str = "active", stops_after: float = 3.0, enabled: str = "enabled", main_pid: int = 7
    ) -> None:
        self.state, self.stops_after, self.enabled = state, stops_after, enabled
        self.sub_state, self.main_pid = "", main_pid
        self.now, self.gone_at = 1000.0, float("inf")
        self.asked: list[str] = []
        self.fails: dict[str, CommandResult] = {}

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self, argv: Sequence[str], timeout: float) -> CommandResult:
        assert timeout > 0
        words = list(argv[1:])
        if argv[0] == "journalctl":
            return CommandResult(0, "line --api-key s3cret\nlast\n")
        assert argv[0] == "systemctl"
        verb = words[0]
        if verb != "show":
            self.asked.append(" ".join(words))
        if verb in self.fails:
            return self.fails[verb]
        if verb == "stop":
            self.gone_at = self.now + self.stops_after
        if verb == "kill":
            self.gone_at = self.now + 0.5
        if verb in ("start", "restart"):
            self.state, self.gone_at = "activating", float("inf")
        if verb == "is-enabled":
            return CommandResult(0, self.enabled + "\n")
        if verb == "show" and "TimeoutStopUSec" in words:
            return CommandResult(0, "2min\n")
        if self.now >= self.gone_at:
            self.state = "failed"
        shown = f"LoadState=loaded\nActiveState={self.state}\nSubState={self.sub_state}\nInvocationID={'f' * 32}\nMainPID={self.main_pid}\n"
        return CommandResult(0, shown if verb == "show" else "")


@pytest.fixture
def make(tmp_path: Path):
    def build(systemd: Systemd) -> Switch:
        return Switch(UNIT, systemd, systemd.clock, systemd.sleep, tmp_path / "run")

    return build


def test_a_stop_waits_for_the_requests_and_notes_when_the_darkness_began(make) -> None:
    systemd = Systemd(stops_after=100)
    switch = make(systemd)
    done = switch.stop()
    assert done["changed"] and not done["killed"]
    assert done["stop_seconds"] == pytest.approx(100, abs=0.3)
    assert systemd.asked == [f"stop --no-block {UNIT}"]
    assert switch.away.since() == 1000.0


def test_a_stopped_service_is_left_alone(make) -> None:
    systemd = Systemd("inactive")
    switch = make(systemd)
    assert switch.stop() == {"changed": False, "stopped_at": None, "stop_seconds": 0.0, "killed": False}
    assert systemd.asked == [] and switch.away.since() is None


def test_what_never_served_began_no_darkness_and_ends_none(make) -> None:
    """The failed deployment is stopped; the time without a server goes on from the stop of the one that served."""
    systemd = Systemd("activating")
    switch = make(systemd)
    switch.away.begin(900.0)
    assert switch.stop(drain=False)["changed"]
    assert switch.away.since() == 900.0


def test_a_server_that_serves_again_ends_an_older_darkness(make) -> None:
    switch = make(Systemd())
    switch.away.begin(5.0)
    switch.stop()
    assert switch.away.since() == 1000.0


def test_without_draining_it_is_killed_after_ten_seconds(make) -> None:
    systemd = Systemd(stops_after=1e9)
    done = make(systemd).stop(drain=False)
    assert done["killed"] and 10 <= done["stop_seconds"] < 12
    assert systemd.asked[1] == f"kill --signal=SIGKILL {UNIT}"


def test_a_drain_that_systemd_does_not_end_is_an_error(make) -> None:
    with pytest.raises(SwitchError, match=r"did not stop within 180 s. Expected systemd to end it"):
        make(Systemd(stops_after=1e9)).stop()


def test_a_process_that_survives_sigkill_is_an_error(make, monkeypatch: pytest.MonkeyPatch) -> None:
    systemd = Systemd(stops_after=1e9)
    systemd.fails["kill"] = CommandResult(0)
    with pytest.raises(SwitchError, match="after SIGKILL"):
        make(systemd).stop(drain=False)


@pytest.mark.parametrize("state", ["inactive", "failed"])
def test_a_start_begins_with_a_clean_count(make, state: str) -> None:
    systemd = Systemd(state)
    systemd.fails["reset-failed"] = CommandResult(1, "", f"Unit {UNIT} not loaded.")
    assert make(systemd).start()["changed"]
    assert systemd.asked == [f"reset-failed {UNIT}", f"start --no-block {UNIT}"]


@pytest.mark.parametrize("state", ["active", "activating"])
def test_a_running_service_is_not_started(make, state: str) -> None:
    systemd = Systemd(state)
    assert not make(systemd).start()["changed"]
    assert systemd.asked == []


@pytest.mark.parametrize("sub_state", ["auto-restart", "auto-restart-queued"])
def test_what_systemd_would_start_after_a_pause_is_started_now(make, sub_state: str) -> None:
    """`start` would wait for that pause, so the unit is restarted."""
    systemd = Systemd("activating")
    systemd.sub_state = sub_state
    switch = make(systemd)
    assert switch.wants_start()
    assert switch.start() == {"changed": True, "started_at": 1000.0}
    assert systemd.asked == [f"reset-failed {UNIT}", f"restart --no-block {UNIT}"]


def test_a_start_refuses_a_port_that_somebody_else_holds(make) -> None:
    """Nothing is started, and the words are the gate's."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        systemd = Systemd("inactive", main_pid=0)
        with pytest.raises(SwitchError) as refused:
            make(systemd).start("127.0.0.1", port)
    assert systemd.asked == []
    assert str(refused.value).startswith(f"port {port} is held by pid {os.getpid()} (")
    assert str(refused.value).endswith(
        "; it does not belong to engine.service (expected: a free port). Do: stop that process or choose another port. "
        "Nothing was started."
    )
    assert make(systemd).start("127.0.0.1", port)["changed"], "the port is free again"


def test_a_refusal_of_systemd_is_told_in_its_words(make) -> None:
    systemd = Systemd("inactive")
    systemd.fails["start"] = CommandResult(1, "", "Failed to start engine.service: Unit is masked.")
    with pytest.raises(SwitchError, match=r"status 1: Failed to start .* masked"):
        make(systemd).start()
    gone = Switch(UNIT, lambda argv, timeout: CommandResult(127, "", "systemctl: command not found"))
    with pytest.raises(SwitchError, match="command not found"):
        gone.status()


def test_files_are_put_back_whole_and_read_by_systemd(make, tmp_path: Path) -> None:
    systemd = Systemd()
    same, other = tmp_path / "same", tmp_path / "new" / "other"
    same.write_text("text")
    files = {str(same): "text", str(other): "put back"}
    assert differing(files) == [str(other)]
    assert make(systemd).restore(files) == [str(other)]
    assert other.read_text() == "put back" and [p.name for p in other.parent.iterdir()] == ["other"]
    assert systemd.asked == ["daemon-reload"]
    assert make(systemd).restore(files) == []
    # Whoever wrote them may have been killed before systemd read them.
    assert systemd.asked == ["daemon-reload"] * 2


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "unit"
    file.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(switches.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(file, "new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["unit"]


def test_one_step_at_a_time(make, tmp_path: Path) -> None:
    switch = make(Systemd())
    with switch.alone(), (tmp_path / "run" / "engine.step").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "run" / "engine.step").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2min", 120), ("1min 30s", 90), ("1h 500ms", 3600.5), ("infinity", 86400), ("", 0), ("15s", 15)],
)
def test_time_spans_of_systemd(text: str, seconds: float) -> None:
    assert parse_span(text) == pytest.approx(seconds)


# --- evidence and times -----------------------------------------------------------------------------------------------


def test_evidence_is_as_it_was_and_holds_no_secret(tmp_path: Path) -> None:
    unit = tmp_path / UNIT
    unit.write_text("ExecStart=engine --api-key s3cret\n")
    evidence = Evidence(UNIT, "died --api-key s3cret", [unit, tmp_path / "missing"], 1_800_000_000.0, Systemd())
    unit.write_text("put back")
    folder = evidence.write(tmp_path / "state")
    assert folder == tmp_path / "state" / "incidents" / "20270115T080000Z-deployment-failed"
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(texts) == {"summary.md", "unit-properties.txt", "journal.txt", UNIT}
    assert "died" in texts["summary.md"] and "2027-01-15 08:00:00 UTC" in texts["summary.md"]
    assert "ExecStart=engine" in texts[UNIT] and "last" in texts["journal.txt"]
    assert "s3cret" not in str(texts)
    assert evidence.write(tmp_path / "state").name.endswith("-deployment-failed-2")


def test_old_evidence_goes(tmp_path: Path) -> None:
    (tmp_path / "incidents" / "20200101T000000Z-failed").mkdir(parents=True)
    for number in range(switches.EVIDENCE_KEPT + 3):
        Evidence(UNIT, "x", [], 1_800_000_000.0 + number, Systemd()).write(tmp_path)
    names = sorted(path.name for path in (tmp_path / "incidents").iterdir())
    assert len(names) == switches.EVIDENCE_KEPT + 1
    assert names[0] == "20200101T000000Z-failed", "incidents of another kind are not its business"


def test_times_of_a_start_that_another_play_began() -> None:
    now = time.monotonic()

    def run(argv: Sequence[str], timeout: float) -> CommandResult:
        began, ready = int((now - 100) * 1e6), int((now - 40) * 1e6)
        return CommandResult(
            0, f"ActiveState={state}\nActiveEnterTimestampMonotonic={ready}\nExecMainStartTimestampMonotonic={began}\n"
        )

    state = "active"
    found = ready_times(UNIT, run)
    assert found is not None
    assert found[0] == pytest.approx(60, abs=0.01)
    assert found[1] == pytest.approx(time.time() - 40, abs=2)
    state = "activating"
    assert ready_times(UNIT, run) is None
    assert ready_times(UNIT, lambda argv, timeout: CommandResult(1)) is None


def test_evidence_follows_no_link_of_the_services_user(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "incidents").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        Evidence(UNIT, "x", [], 1_800_000_000.0, Systemd()).write(tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_away(tmp_path: Path) -> None:
    away = Away(UNIT, tmp_path)
    assert away.since() is None
    away.begin(1000.25)
    assert away.since() == 1000.25
    away.end()
    away.end()
    assert away.since() is None


# --- putting files back: all of them or none, and what serves by them goes on ------------------------------------------


def test_files_that_cannot_all_be_put_back_stay_as_they_were(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a full disk nor a place that cannot be taken leaves half of them, and systemd reads what was there."""
    systemd = Systemd()
    switch, first, new = make(systemd), tmp_path / "a", tmp_path / "new" / "b"
    first.write_text("running")
    files = {str(first): "earlier", str(new): "earlier", str(tmp_path / "c"): "earlier"}
    written: list[int] = []

    def full(handle: int) -> None:
        written.append(handle)
        if len(written) == 3:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(switches.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            switch.restore(files)
    assert first.read_text() == "running"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [first]

    (tmp_path / "c").mkdir()
    with pytest.raises(OSError, match="directory"):
        switch.restore(files)
    assert first.read_text() == "running"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [first]
    assert systemd.asked == []

    (tmp_path / "c").rmdir()
    systemd.fails["daemon-reload"] = CommandResult(1, "", "Connection timed out")
    with pytest.raises(SwitchError, match="timed out"):
        switch.restore(files)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [first]
    assert first.read_text() == "running"
    del systemd.fails["daemon-reload"]
    assert switch.restore(files) == list(files)


def test_what_could_not_be_undone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "unit"
    file.write_text("running")

    def broken(path: Path, text: str, mode: int = 0o644) -> bool:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(switches, "write_file", broken)
    with (
        pytest.raises(
            SwitchError, match=r"no answer. These files could not be put back as they were: .*unit .*Read-only"
        ),
        replaced({str(file): "earlier"}),
    ):
        raise SwitchError("no answer")


@dataclass
class Host:
    """A unit that serves by the last good deployment (``b``), with files of another one in place; ``a`` came before it."""

    folder: Path
    systemd: Systemd
    switch: Switch
    records: Records

    def place(self, text: str) -> None:
        (self.folder / UNIT).write_text(text)
        (self.folder / "etc" / "engine.json").write_text(text)

    def placed(self) -> set[str]:
        return {(self.folder / UNIT).read_text(), (self.folder / "etc" / "engine.json").read_text()}

    def step(self, state: str = "restored", **options: Any) -> dict[str, Any]:
        given = {
            "unit": UNIT, "state": state, "state_dir": str(self.folder), "record": "last-good", "stop": True, "spare": "", "drain": False,
            "port": 0, "host": "", "enabled": None, "evidence": None, "settings_dir": str(self.folder / "etc"), **options,
        }  # fmt: skip
        result: dict[str, Any] = {"changed": False, "restored": {}, "spared": False}
        try:
            service_switch.work(given, given.pop("check", False), self.switch, result)
        except (SwitchError, OSError) as error:
            result["error"] = str(error)
        return result

    @property
    def stopped(self) -> bool:
        return any(words.startswith(("stop", "kill")) for words in self.systemd.asked)


@pytest.fixture
def host(tmp_path: Path, make, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(service_switch, "UNIT_DIR", tmp_path)
    (tmp_path / "etc").mkdir()
    (tmp_path / "python").write_text("")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "environ").write_bytes(b"X=1\0" + f"{PLAN_VARIABLE}={'b' * 64}".encode() + b"\0")
    systemd = Systemd()
    switch = make(systemd)
    switch.proc = tmp_path
    made = Host(tmp_path, systemd, switch, Records(tmp_path))
    for letter in "ab":
        plan = {"hash": letter, "process_hash": letter * 64, "command": [str(tmp_path / "python")]}
        made.records.keep(letter, plan, {str(tmp_path / "etc" / "engine.json"): letter})
    made.place("new")
    return made


@pytest.mark.parametrize("check", [False, True])
def test_a_server_that_follows_what_is_put_back_goes_on(host: Host, check: bool) -> None:
    """Only files were not those on record: it is not stopped for them."""
    done = host.step(spare="b" * 64, check=check)
    assert (done["spared"], done["changed"], host.stopped) == (True, True, False)
    assert len(done["restored"]["files"]) == 2
    assert host.placed() == ({"new"} if check else {"b"})
    host.systemd.state = "activating"
    assert not host.step(spare="b" * 64, check=True)["spared"], "its start has not passed"
    host.systemd.state = "active"
    assert not host.step(spare="a" * 64)["spared"]
    assert host.stopped


def test_a_deployment_that_failed_is_stopped_without_a_word_about_sparing(host: Host) -> None:
    done = host.step()
    assert (done["spared"], host.stopped, host.placed()) == (False, True, {"b"})


@pytest.mark.parametrize("why", ["program", "files"])
def test_what_cannot_be_put_back_stops_nothing(host: Host, why: str) -> None:
    """The play that asked for it tells by ``restored`` that it may not go on as if the files were there."""
    if why == "program":
        (host.folder / "python").unlink()
    else:
        (host.folder / "etc" / "engine.json").unlink()
        (host.folder / "etc" / "engine.json").mkdir()
    done = host.step()
    assert ("which is gone" if why == "program" else "directory") in done["error"]
    assert (done["restored"], host.stopped) == ({}, False)
    assert (host.folder / UNIT).read_text() == "new"


def test_files_alone_are_put_back_as_they_were_recorded(host: Host) -> None:
    """For a failure that has touched no server: nothing is started, so nothing has to be proven, nor to be there."""
    plan = {"hash": "c", "process_hash": "b" * 64, "command": [str(host.folder / "python")]}
    host.records.keep(
        "b, other limits", plan, {str(host.folder / "etc" / "engine.json"): "b, other limits"}, proven=False
    )
    (host.folder / "python").unlink()
    done = host.step(stop=False)
    assert (done["spared"], host.stopped, host.placed()) == (False, False, {"b, other limits"})
    assert (done["restored"]["plan"]["hash"], host.systemd.asked) == ("c", ["daemon-reload"])


def test_what_is_started_again_has_the_files_of_its_last_start_that_passed(host: Host) -> None:
    plan = {"hash": "c", "process_hash": "b" * 64, "command": [str(host.folder / "python")]}
    host.records.keep("b, never started", plan, {}, proven=False)
    host.place("b, never started")
    done = host.step()
    assert (done["restored"]["plan"]["hash"], host.placed()) == ("b", {"b"})
    assert host.step()["restored"]["files"] == [], "a second failure has nothing else to try"


def test_a_stop_spares_a_server_too(host: Host) -> None:
    assert host.step("stopped", spare="b" * 64)["spared"]
    assert not host.stopped
    assert not host.step("stopped")["spared"]
    assert host.stopped


def test_a_unit_that_never_started_has_its_proven_files_to_go_back_to() -> None:
    """The process hash is the last good one's: what fails is the unit, unless its start has passed since."""
    same = {**PLAN, "process_hash": "a" * 64}
    last = {**NOW["last_good"], "unproven": True}
    for state, proven in (("active", True), ("activating", False), ("failed", False)):
        what = switch_plan({**NOW, "reasons": [], "active_state": state, "last_good": last}, same)
        assert (what["proven"], what["fallback"]) == (proven, "" if proven else "aaa"), state
        what = switch_plan({**NOW, "reasons": [], "active_state": state}, same)
        assert (what["proven"], what["fallback"]) == (True, "")
