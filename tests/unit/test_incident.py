"""The collector of incidents on hosts where half of everything is missing, hangs, is full or hostile."""

import json
import os
import re
import stat
import time
from pathlib import Path

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import health as h
from ansible_collections.gpuserve.sglang.plugins.module_utils import incident as inc

UNIT = "sglang-kimi.service"
NOW = 1796000000.0
SHOW = (
    "LoadState=loaded\nActiveState=failed\nSubState=failed\nMainPID=0\nExecMainCode=2\nExecMainStatus=9\n"
    "Result=start-limit-hit\nNRestarts=2\nInvocationID=aa\nEnvironment=SGLANG_API_KEY=hunter2\n"
)
XID = "2026-11-30T04:00:00+0000 box kernel: NVRM: Xid (PCI:0000:41:00): 79, pid=4711, GPU has fallen off the bus."


def answers(argv, _timeout):
    """A host where everything answers."""
    if argv[:2] == ["systemctl", "show"]:
        return h.CommandResult(0, SHOW)
    if argv[0] == "journalctl" and "-k" in argv:
        return h.CommandResult(0, f"one\ntwo\n{XID}\n{XID}\nthree\n")
    if argv[0] == "journalctl":
        return h.CommandResult(
            0, "start\nshards: 1%\rshards: 50%\nserver_args=(api_key='hunter2')\nRuntimeError: last\n"
        )
    if argv[0] == "df":
        return h.CommandResult(0, "Filesystem blocks Used Available Capacity Mounted on\n/dev/md0 9 9 0 100% /data\n")
    return h.CommandResult(0, f"{argv[0]} answered\n")


@pytest.fixture
def place(tmp_path):
    """State directory, settings and a /proc in which one foreign process holds a GPU."""
    for name in ("state", "etc", "proc/77/fd", "run"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/77/fd/5").symlink_to("/dev/nvidia3")
    (tmp_path / "proc/77/cmdline").write_bytes(b"python3\0train.py\0--api-key\0hunter2\0")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    (tmp_path / "run/sglang-kimi.liveness.json").write_text('{"state": "failing"}')
    settings = {
        "unit": UNIT,
        "state_dir": str(tmp_path / "state"),
        "endpoint": {"host": "127.0.0.1", "port": 30000},
        "incident": {"keep": 3},
    }
    (tmp_path / "etc/sglang-kimi.json").write_text(json.dumps(settings))
    (tmp_path / "etc/sglang-kimi.plan.json").write_text('{"hash": "abc"}')
    return tmp_path


def collector(place, run=answers, **changes):
    options = inc.Options(**{"state_dir": str(place / "state"), "keep": 3, **changes})
    return inc.Collector(
        options, place / "etc/sglang-kimi.json", run=run, proc=place / "proc", cgroups=place / "none",
        fallback=place / "run/incidents", run_dir=place / "run",
    )  # fmt: skip


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------------ what is kept


def test_an_incident_is_a_folder_with_a_front_page(place):
    folder = collector(place).collect("failed", "The gate said no.", NOW)
    assert folder.parent == place / "state/incidents"
    assert re.fullmatch(r"\d{8}T\d{6}Z-failed-start-limit-hit", folder.name)
    assert set(texts(folder)) == {*inc.FILES, "summary.md"}
    summary = texts(folder)["summary.md"]
    for words in (
        "failed-start-limit-hit",
        "The gate said no.",
        "status=9/KILL",
        "Xid 79 on PCI:0000:41:00 (2 x): the GPU has fallen off the bus",
        "Full: /data",
        "systemctl reset-failed",
        "RuntimeError: last",
        "How to read this folder",
        "| kernel.txt |",
    ):
        assert words in summary, words
    assert "/dev/nvidia3 77 " in texts(folder)["gpu-holders.txt"]
    assert "train.py" in texts(folder)["gpu-holders.txt"]
    assert texts(folder)["plan.json"] == '{"hash": "abc"}'
    assert texts(folder)["liveness.json"] == '{"state": "failing"}'
    assert "shards: 50%" in texts(folder)["journal.txt"]
    assert "shards: 1%" not in texts(folder)["journal.txt"]


def test_secrets_stay_out_of_every_file(place):
    folder = collector(place).collect("failed", now=NOW)
    for name, text in texts(folder).items():
        assert "hunter2" not in text, name
    assert "***" in texts(folder)["unit.txt"]


def test_root_runs_no_profiler_that_somebody_else_can_choose(place, monkeypatch):
    """The process names any interpreter it likes; a plan is root's, and so must be the way to what it names."""
    ran = []

    def run(argv, limit):
        ran.append(argv[0])
        return answers(argv, limit)

    evil, ours = place / "state/x/py-spy", Path(os.path.realpath("/usr/bin/env")).parent / "py-spy"
    evil.parent.mkdir()
    evil.write_text("#!/bin/sh\n")
    evil.chmod(0o755)
    (place / "proc/4711").mkdir()
    (place / "proc/4711/cmdline").write_bytes(os.fsencode(evil.parent / "python") + b"\0")
    monkeypatch.setattr(inc.health, "unit_pids", lambda *_args: {4711})
    collector(place, run).collect("failed", "x")
    assert not [name for name in ran if name.endswith("py-spy")]

    plan = place / "etc/sglang-kimi.plan.json"
    evil.parent.chmod(0o777)
    plan.write_text(json.dumps({"command": [str(evil.parent / "python")]}))
    collector(place, run).collect("failed", "x")
    assert not [name for name in ran if name.endswith("py-spy")]

    monkeypatch.setattr(inc, "is_roots", lambda path: path == ours)
    plan.write_text(json.dumps({"command": [str(ours.parent / "python")]}))
    collector(place, run).collect("failed", "x")
    assert {name for name in ran if name.endswith("py-spy")} == {str(ours)}


def test_a_program_is_roots_when_nobody_else_can_write_on_the_way_to_it(tmp_path):
    assert inc.is_roots(Path(os.path.realpath("/usr/bin/env")))
    program = tmp_path / "py-spy"
    program.write_text("")
    # /tmp is everybody's.
    assert not inc.is_roots(program) or not os.stat("/tmp").st_mode & 0o002
    assert not inc.is_roots(Path("/usr/bin/none"))
    assert not inc.is_roots(Path("/usr/bin"))


def test_only_root_reads_it(place):
    os.umask(0o022)
    folder = collector(place).collect("failed", now=NOW)
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}


# ------------------------------------------------------------------------------------------------ a host in trouble


def test_a_host_without_any_command_still_gives_an_incident_that_says_so(place):
    folder = collector(place, lambda argv, _limit: h.CommandResult(127, err=f"{argv[0]}: command not found")).collect(
        "gate-failed", now=NOW
    )
    summary = texts(folder)["summary.md"]
    assert folder.name.endswith("-gate-failed")
    assert "nvidia-smi: command not found" in summary
    assert "Collecting was not finished" not in summary
    assert "train.py" in texts(folder)["gpu-holders.txt"]


def test_when_everything_hangs_the_time_limit_holds(place):
    now = [0.0]

    def hangs(argv, limit):
        now[0] += limit
        return h.CommandResult(124, err=f"{argv[0]}: no answer within {limit:.0f} s")

    made = collector(place, hangs, time_limit=30.0)
    made.clock = lambda: now[0]
    folder = made.collect("liveness", now=NOW)
    assert now[0] <= 30.5
    assert "not asked, the time for collecting was over" in texts(folder)["summary.md"]


def test_a_command_that_hangs_is_left_after_its_time_and_its_words_are_kept():
    began = time.monotonic()
    answer = inc.run_bounded(["sh", "-c", "echo begun; exec sleep 60"], 0.5)
    assert time.monotonic() - began < 10
    assert (answer.rc, answer.out) == (124, "begun\n")
    assert inc.run_bounded(["/nonexistent"], 1).rc == 127
    assert inc.run_bounded(["sh", "-c", "echo $LC_ALL; echo no >&2; exit 3"], 5) == h.CommandResult(3, "C\n", "no\n")


def test_a_child_that_keeps_the_pipe_open_does_not_hold_the_collector():
    """What hangs inside the kernel cannot be killed; here a grandchild holds the pipe as such a process would."""
    began = time.monotonic()
    answer = inc.run_bounded(["sh", "-c", "sleep 8 & wait"], 0.3)
    assert time.monotonic() - began < 6
    assert answer.rc == 124
    assert "cannot be killed" in answer.err


def test_one_surprise_does_not_cost_the_rest(place, monkeypatch):
    monkeypatch.setattr(inc.Collector, "_gpus", lambda self: 1 / 0)
    monkeypatch.setattr(inc.Collector, "_unit", lambda self: [].pop())
    folder = collector(place).collect("failed", now=NOW)
    assert "kernel.txt" in texts(folder)
    assert "ZeroDivisionError" in texts(folder)["summary.md"]
    assert "IndexError" in texts(folder)["summary.md"]


def test_a_full_disk_sends_the_incident_to_memory(place, monkeypatch):
    plain = inc.Store.write

    def full(self, name, file, text):
        if str(self.shown).startswith(str(place / "state")):
            raise OSError(28, "No space left on device")
        plain(self, name, file, text)

    monkeypatch.setattr(inc.Store, "write", full)
    folder = collector(place).collect("failed", now=NOW)
    assert folder.parent == place / "run/incidents/sglang-kimi"
    assert "No space left on device" in texts(folder)["summary.md"]
    assert list((place / "state/incidents").iterdir()) == []


def test_a_link_in_place_of_the_folder_is_not_followed(place):
    """The state directory belongs to the service's user, the collector is root."""
    (place / "victim").mkdir()
    (place / "state/incidents").symlink_to(place / "victim")
    folder = collector(place).collect("failed", now=NOW)
    assert list((place / "victim").iterdir()) == []
    assert folder.parent == place / "run/incidents/sglang-kimi"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_not_used(place):
    (place / "state/incidents").mkdir()
    os.chown(place / "state/incidents", 65534, 65534)
    folder = collector(place).collect("failed", now=NOW)
    assert folder.parent == place / "run/incidents/sglang-kimi"
    assert "expected 0" in texts(folder)["summary.md"]


def test_when_nothing_can_be_kept_it_says_so_and_ends(place, capsys, monkeypatch):
    made = collector(place)
    made.fallback = place / "etc/sglang-kimi.json"
    monkeypatch.setattr(inc, "Collector", lambda options, file: made)
    (place / "state/incidents").write_text("not a folder")
    assert inc.main(["--settings", str(place / "etc/sglang-kimi.json")]) == 1
    assert "no incident could be kept" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ limits


def test_the_newest_are_kept_and_foreign_files_left_alone(place):
    (place / "state/incidents").mkdir(mode=0o700)
    (place / "state/incidents/notes.txt").write_text("mine")
    folders = [collector(place).collect(f"r{n}", now=NOW + n) for n in range(5)]
    assert sorted(path.name for path in (place / "state/incidents").iterdir()) == sorted(
        [*(folder.name for folder in folders[-3:]), "notes.txt"]
    )


def test_two_incidents_in_one_second_are_two(place):
    first, second = (collector(place).collect("same", now=NOW) for __ in range(2))
    assert first != second
    assert second.name == f"{first.name}-2"


def test_the_total_size_is_limited_but_the_newest_stays(place):
    def much(argv, limit):
        return h.CommandResult(0, "x" * 900_000) if argv[0] == "nvidia-smi" else answers(argv, limit)

    first = collector(place, much, max_total_mib=1, max_file_kib=900).collect("one", now=NOW)
    assert first.exists()
    second = collector(place, much, max_total_mib=1, max_file_kib=900).collect("two", now=NOW + 1)
    assert second.exists()
    assert not first.exists()


def test_a_file_is_limited_and_its_end_matters_most():
    text = "".join(f"line {n}\n" for n in range(10000))
    cut = inc.limit_text(text, 4096)
    assert len(cut.encode()) <= 4096
    assert cut.startswith("line 0\n")
    assert cut.endswith("line 9999\n")
    assert "bytes left out" in cut
    assert cut.index("left out") < 2000
    assert inc.limit_text("short", 4096) == "short"


def test_any_reason_is_a_folder_name():
    assert inc.reason_word("../../etc/passwd") == "etc-passwd"
    assert inc.reason_word("Gate failed: 503!") == "gate-failed-503"
    assert inc.reason_word("") == "unknown"
    assert len(inc.reason_word("x" * 200)) == 40


# ------------------------------------------------------------------------------------------------ understanding


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("journal.txt", "torch.OutOfMemoryError: CUDA out of memory.", "A GPU ran out of memory"),
        ("kernel.txt", "oom-kill:constraint=CONSTRAINT_MEMCG", "want of main memory"),
        ("journal.txt", "OSError: [Errno 28] No space left on device", "A disk is full"),
        ("journal.txt", "[Errno 98] error while attempting to bind on address", "The port was taken"),
        ("journal.txt", "Scheduler hit an exception: Traceback", "The scheduler raised an exception"),
        ("journal.txt", "launch_server.py: error: unrecognized arguments: --x", "refused its command line"),
        ("nvidia-smi.txt", "Failed to initialize NVML: Driver/library version mismatch", "do not fit together"),
        ("kernel.txt", "NVRM: Xid (PCI:0000:01:00): 999, x", "Xid 999 on PCI:0000:01:00 (1 x): look the number up"),
        ("processes.txt", "pid state\n12 T 1 x\n13 S 1 x", "Process 12 of the unit is stopped by a signal"),
        ("processes.txt", "pid state\n13 D 1 x", "Process 13 of the unit hangs inside the kernel"),
    ],
)
def test_signs(file, text, words):
    (found,) = inc.signs({file: text})
    assert words in found


def test_nothing_stands_out_of_a_quiet_host():
    quiet = {
        "journal.txt": "The server is fired up and ready to roll!",
        "unit.txt": "Result=success\nOOMPolicy=stop\nMemoryMax=20G",
        "disk.txt": "Filesystem b u a Capacity Mounted on\n/dev/md0 9 1 8 11% /\n/dev/loop0 1 1 0 100% /snap/core\n",
        "processes.txt": "pid state ppid\n12 S 1 x",
    }
    assert inc.signs(quiet) == []


# ------------------------------------------------------------------------------------------------ telling


def test_the_webhook_gets_a_small_event_and_its_address_is_never_shown(place):
    file = place / "etc/webhook"
    file.write_text("https://hooks.example/hunter2\n")
    posts = []

    def post(url, body, timeout):
        posts.append((url, json.loads(body), timeout))
        return 204

    options = inc.Options(webhook_file=str(file), command=("/bin/page", "{reason}: {folder}", "{x}", '{"a": 1}'))
    runs = []

    def run(argv, _limit):
        runs.append(argv)
        return h.CommandResult(1, err="no pager")

    said = inc.notify(options, Path("/i/one"), "failed", "why --api-key hunter2", run, post)
    ((url, event, timeout),) = posts
    assert (url, timeout) == ("https://hooks.example/hunter2", 10.0)
    assert (event["unit"], event["reason"], event["folder"]) == (UNIT, "failed", "/i/one")
    assert "hunter2" not in json.dumps(event)
    assert runs == [["/bin/page", "failed: /i/one", "{x}", '{"a": 1}']]
    assert said == ["webhook: HTTP 204", "command /bin/page: status 1, no pager"]


@pytest.mark.parametrize(
    "address", ["ftp://hunter2", "hunter2", "", "http://hunter2.invalid:1/", "file:///etc/hunter2"]
)
def test_a_webhook_that_does_not_work_gives_one_line_without_its_address(place, address):
    file = place / "etc/webhook"
    file.write_text(address)
    (line,) = inc.notify(inc.Options(webhook_file=str(file), notify_timeout=2), Path("/i"), "failed")
    assert line.startswith("webhook: not delivered")
    assert "hunter2" not in line


def test_without_webhook_and_command_nobody_is_told():
    assert inc.notify(inc.Options(), Path("/i"), "failed", post=pytest.fail, run=pytest.fail) == []


# ------------------------------------------------------------------------------------------------ the program


def test_the_program_prints_the_folder_last(place, monkeypatch, capsys):
    made = collector(place)
    monkeypatch.setattr(inc, "Collector", lambda options, file: made)
    assert inc.main(["--settings", str(place / "etc/sglang-kimi.json"), "--reason", "gate-failed"]) == 0
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    assert folder.name.endswith("-gate-failed")
    assert (folder / "summary.md").is_file()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "holds no mapping"),
        ("{}", "the settings cannot be used (KeyError"),
        ('{"unit": "u", "state_dir": "/s", "endpoint": {"port": 1}, "incident": {"keep": "x"}}', "cannot be used"),
    ],
)
def test_wrong_settings_are_one_clear_error(tmp_path, text, words, capsys):
    file = tmp_path / "s.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        inc.main(["--settings", str(file)])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
