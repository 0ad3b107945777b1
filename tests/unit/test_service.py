"""What a service runs now, read from real processes and from systemd's answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import CommandResult
from ansible_collections.gpuserve.sglang.plugins.module_utils.service import (
    PLAN_VARIABLE,
    difference,
    installed_plan,
    own_drop_ins,
    process_started,
    process_words,
    read_service,
    setting_changes,
    start_reasons,
    started_after,
    without_secrets,
)
from ansible_collections.gpuserve.sglang.plugins.modules import service_info

SLEEP = "import sys; print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a plan in its environment; it ends with its input."""
    with subprocess.Popen(
        [sys.executable, "-c", SLEEP, "--port", "8000", "--empty", "", "--api-key", "sk-very secret"],
        env={"PATH": os.environ["PATH"], PLAN_VARIABLE: "0123abcd=", "OTHER": "x"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout and child.stdin
        child.stdout.readline()
        yield child
        child.stdin.close()


class Systemctl:
    """Answers as systemctl does, and keeps what it was asked."""

    def __init__(self, pid: int = 0, rc: int = 0, err: str = "", **properties: str) -> None:
        self.asked: list[list[str]] = []
        shown = {
            "LoadState": "loaded",
            "ActiveState": "active",
            "SubState": "running",
            "MainPID": str(pid),
            "NRestarts": "2",
            "InvocationID": "f" * 32,
            **properties,
        }
        self._result = CommandResult(rc, "" if rc else "".join(f"{k}={v}\n" for k, v in shown.items()), err)

    def __call__(self, argv: Sequence[str], timeout: float) -> CommandResult:
        assert timeout > 0
        self.asked.append(list(argv))
        return self._result


def test_a_running_service(process: subprocess.Popen[bytes]) -> None:
    systemctl = Systemctl(process.pid)
    found = read_service("engine.service", names=["OTHER", "ABSENT"], run=systemctl)
    assert systemctl.asked[0][:2] == ["systemctl", "show"] and systemctl.asked[0][-2:] == ["--", "engine.service"]
    started = found.pop("started")
    assert abs(started - time.time()) < 30
    assert found == {
        "unit": "engine.service",
        "error": "",
        "exists": True,
        "active_state": "active",
        "sub_state": "running",
        "main_pid": process.pid,
        "invocation_id": "f" * 32,
        "n_restarts": 2,
        "command": [sys.executable, "-c", SLEEP, "--port", "8000", "--empty", "", "--api-key", "***"],
        "environment": {"OTHER": "x"},
        "plan_hash": "0123abcd=",
        "newer": [],
        "drop_ins": [],
    }


def test_a_stopped_service_has_no_process() -> None:
    found = read_service("engine.service", run=Systemctl(0, ActiveState="inactive", SubState="dead"))
    assert (found["exists"], found["active_state"], found["main_pid"]) == (True, "inactive", 0)
    assert (found["started"], found["command"], found["plan_hash"], found["newer"]) == (None, [], "", [])


def test_without_a_process_nothing_is_newer(tmp_path: Path) -> None:
    assert read_service("engine.service", [str(tmp_path)], run=Systemctl(0))["newer"] == []


def test_an_unknown_unit_does_not_exist() -> None:
    found = read_service("none.service", run=Systemctl(0, LoadState="not-found", ActiveState="inactive"))
    assert not found["exists"] and found["error"] == ""


def test_without_systemd_the_error_is_its_words() -> None:
    found = read_service("engine.service", run=Systemctl(rc=127, err="systemctl: command not found"))
    assert found["error"] == "systemctl: command not found"
    assert not found["exists"] and found["main_pid"] == 0 and found["command"] == []


def test_keys_are_those_of_the_documentation() -> None:
    # These are the module's own: it compares with a plan and reads the records.
    own = {"reasons", "difference", "changes", "last_good", "installed", "last_start", "benchmark", "served"}
    documented = set(yaml.safe_load(service_info.RETURN)) - own
    assert set(read_service("x", run=Systemctl(0))) == documented
    assert set(read_service("x", run=Systemctl(rc=1))) == documented


def test_newer_are_the_files_that_changed_after_the_start(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    started = process_started(process.pid)
    assert started
    offsets = {"old": -60.0, "within-grace": 0.5, "new": 2.0, "later": 60.0}
    for name, offset in offsets.items():
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (started + offset, started + offset))
    paths = [str(tmp_path / name) for name in (*offsets, "missing")]
    found = read_service("engine.service", paths, run=Systemctl(process.pid))
    assert found["newer"] == [str(tmp_path / "new"), str(tmp_path / "later")]


def test_the_start_is_the_process_s_own() -> None:
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", SLEEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdin
        child.stdout.readline()
        started, own = process_started(child.pid), process_started(os.getpid())
        child.stdin.close()
    # The kernel tells its boot in whole seconds.
    assert started and own and before - 1.5 < started < time.time() + 1.5
    assert own <= started


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as child:
        pid = child.pid
    assert process_started(pid) is None
    assert process_words(pid, "environ") == [] and process_words(pid, "cmdline") == []


@pytest.mark.parametrize("name", [b"python", b"a) R 1 (b", b"\xff\xfe", b"a b"])
def test_any_name_of_a_process(tmp_path: Path, name: bytes) -> None:
    """The name stands in brackets, may hold brackets itself and need not be text."""
    (tmp_path / "7").mkdir()
    fields = b"S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 %d 20 21" % (250 * os.sysconf("SC_CLK_TCK"))
    (tmp_path / "7" / "stat").write_bytes(b"7 (" + name + b") " + fields + b"\n")
    (tmp_path / "stat").write_text("cpu 1 2 3\nbtime 1000\nprocesses 9\n")
    assert process_started(7, tmp_path) == 1250.0


def test_a_proc_without_boot_time(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (x) S" + " 1" * 30)
    (tmp_path / "stat").write_text("cpu 1\n")
    assert process_started(7, tmp_path) is None


def test_an_environment_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "environ").write_bytes(b"BAD=\xff\0NOEQUALS\0" + PLAN_VARIABLE.encode() + b"=abc\0")
    assert read_service("x", run=Systemctl(7), proc=tmp_path)["plan_hash"] == "abc"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--api-key", "s3cret"], ["--api-key", "***"]),
        (["--api-key", "two words", "--port", "1"], ["--api-key", "***", "--port", "1"]),
        (["--api-key=two words"], ["--api-key=***"]),
        (["--admin-api-key", "s3cret"], ["--admin-api-key", "***"]),
        (["--api-key", "--admin-api-key", "s3cret"], ["--api-key", "--admin-api-key", "***"]),
        (["HF_TOKEN", "hf_0123456789abcdefXYZ"], ["HF_TOKEN", "hf_***"]),
        (["--key-file", "/etc/key", "--port", "8000"], ["--key-file", "/etc/key", "--port", "8000"]),
        (["--max-total-tokens", "5"], ["--max-total-tokens", "5"]),
        (["--api-key"], ["--api-key"]),
    ],
)
def test_secrets_stay_on_the_host(command: list[str], shown: list[str]) -> None:
    assert without_secrets(command) == shown
    assert without_secrets(shown) == shown


def test_difference_has_one_setting_a_line_and_no_secret() -> None:
    running = (
        ["/opt/python", "-m", "engine", "--port", "8000", "--api-key", "s3cret", "--flag"],
        {"B": "2", "A": "1", "ENGINE_API_KEY": "s3cret"},
    )
    assert difference(*running, *running) == ""
    assert difference(*running, ["/opt/python", "-m", "engine", "--port", "8001", "--flag"], {"B": "2"}) == (
        "--- running\n+++ planned\n@@ -2,2 +2 @@\n- --port 8000\n- --api-key ***\n+ --port 8001\n"
        "@@ -5 +3,0 @@\n-A=1\n@@ -7 +4,0 @@\n-ENGINE_API_KEY=***"
    )
    assert difference([], {}, ["--a", "1"], {}) == "--- running\n+++ planned\n@@ -0,0 +1 @@\n+ --a 1"


RUNNING = {"active_state": "active", "main_pid": 7, "plan_hash": "a" * 64, "newer": [], "drop_ins": []}


@pytest.mark.parametrize(
    ("now", "reasons"),
    [
        ({}, []),
        ({"active_state": "activating"}, []),
        ({"active_state": "reloading"}, []),
        ({"active_state": "failed", "newer": ["/x"]}, ["the unit is failed"]),
        ({"active_state": "activating", "main_pid": 0}, ["the unit is activating"]),
        ({"active_state": ""}, ["the unit is unknown to systemd"]),
        (
            {"plan_hash": "b" * 64},
            ["the running process follows another plan (bbbbbbbbbbbb, wanted aaaaaaaaaaaa)"],
        ),
        (
            {"plan_hash": "", "newer": ["/r/manifest.json", "/r/x"]},
            [
                "the running process follows another plan (none, wanted aaaaaaaaaaaa)",
                "the release changed after the process started (/r/manifest.json, /r/x)",
            ],
        ),
    ],
)
def test_reasons_to_start(now: dict[str, object], reasons: list[str]) -> None:
    assert start_reasons({**RUNNING, **now}, "a" * 64) == reasons


def test_other_settings_than_the_plan_s_are_a_reason_unless_a_drop_in_makes_them() -> None:
    """Edited and restarted by hand: the process claims to follow the plan."""
    (reason,) = start_reasons(RUNNING, "a" * 64, ["--tp-size 4 -> 8"])
    assert "--tp-size 4 -> 8" in reason and "edited" in reason
    # A restart would not take a drop-in away, and would follow every run.
    assert (
        start_reasons({**RUNNING, "drop_ins": ["/etc/systemd/system/x.d/a.conf"]}, "a" * 64, ["--tp-size 4 -> 8"]) == []
    )
    (reason,) = start_reasons({**RUNNING, "plan_hash": "b" * 64}, "a" * 64, ["--tp-size 4 -> 8"])
    assert "another plan" in reason


def test_each_setting_that_differs_is_named() -> None:
    running = ["/r/1/bin/python", "-m", "engine", "--tp-size", "4", "--old", "--key-file", "a b", "--api-key", "s3cret"]
    wanted = [
        "/r/2/bin/python",
        "-m",
        "engine",
        "--tp-size",
        "8",
        "--new",
        "1",
        "--key-file",
        "a b",
        "--api-key",
        "0ther",
    ]
    assert setting_changes(running, {"A": "1", "C": "x=y"}, wanted, {"A": "2", "B": "", "C": "x=y"}) == [
        "program /r/1/bin/python -m engine -> /r/2/bin/python -m engine",
        "--tp-size 4 -> 8",
        "--old is taken away",
        "A 1 -> 2",
        "--new 1 is new",
        "B is new",
    ]
    assert setting_changes(running, {"A": "1"}, running, {"A": "1"}) == []


def test_only_the_unit_s_own_drop_ins_count() -> None:
    paths = "/etc/systemd/system/service.d/all.conf /etc/systemd/system/engine.service.d/override.conf"

    def run(argv: Sequence[str], timeout: float) -> CommandResult:
        assert argv[:2] == ["systemctl", "show"] and "DropInPaths" in argv and timeout > 0
        return CommandResult(0, paths + "\n")

    assert own_drop_ins("engine.service", run) == ["/etc/systemd/system/engine.service.d/override.conf"]
    assert own_drop_ins("engine.service", lambda argv, timeout: CommandResult(1)) == []


def test_files_that_were_there_before_the_process(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    started, files = process_started(process.pid), [tmp_path / "unit", tmp_path / "settings"]
    assert started
    for offsets, after in (((-60, -2), True), ((-60, -0.5), False), ((-60, 60), False)):
        for file, offset in zip(files, offsets, strict=True):
            file.write_text("")
            os.utime(file, (started + offset, started + offset))
        assert started_after(process.pid, files) is after
    assert started_after(process.pid, []) and not started_after(process.pid, [tmp_path / "missing"])
    assert not started_after(0, files)


def test_the_plan_that_is_in_place(tmp_path: Path) -> None:
    unit, settings = tmp_path / "engine.service", tmp_path / "engine.plan.json"
    assert installed_plan("engine.service", unit, tmp_path) is None
    given = {
        "hash": "1",
        "process_hash": "ab" * 32,
        "profile": "p",
        "endpoint": {"port": 1},
        "unit": {"name": "engine"},
    }
    settings.write_text(json.dumps({**given, "env": {}}))
    assert installed_plan("engine.service", unit, tmp_path) is None
    unit.write_text(f"[Service]\nEnvironment=A=1\nEnvironment={PLAN_VARIABLE}={'ab' * 32}\nRestart=always\n")
    assert installed_plan("engine.service", unit, tmp_path) == {**given, "error": ""}
    unit.write_text(f"[Service]\nEnvironment={PLAN_VARIABLE}={'cd' * 32}\n")
    found = installed_plan("engine.service", unit, tmp_path)
    assert found and found["error"] == f"{unit} follows the plan cdcdcdcdcdcd, and {settings} is abababababab"
    for text, words in (("{", "cannot be read"), ("[]", "holds list")):
        settings.write_text(text)
        found = installed_plan("engine.service", unit, tmp_path)
        assert found and words in found["error"]
