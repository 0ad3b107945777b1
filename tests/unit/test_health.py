"""The gate's judgement, case by case: parsing, secrets, life of the unit, verdicts, owner of the socket."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import health as h
from ansible_collections.gpuserve.sglang.plugins.module_utils import health_host

FIXTURES = Path(__file__).parent / "fixtures" / "health"
UNIT = "sglang-kimi.service"
RUNNING = h.UnitStatus(
    UNIT,
    load_state="loaded",
    active_state="active",
    sub_state="running",
    main_pid=100,
    invocation_id="aa",
    result="success",
)
KNOWN = h.Since(n_restarts=0, invocation_id="aa", main_pid=100, state=h.REFUSED)
OK = h.HttpAnswer(200, "", "", 1.0)
OURS = h.Owner(h.OURS)
SPOKEN = h.Generation(True, "hello", 2, 0.1)


def fixture_lines(name):
    # newline="" keeps the carriage returns of the progress bars, as the journal does.
    with (FIXTURES / name).open(encoding="utf-8", newline="") as stream:
        return stream.read().split("\n")


# ------------------------------------------------------------------------------------------------ progress


def test_progress_on_cpu_names_every_phase_in_order():
    lines = fixture_lines("cpu-0.5.9-start.log")
    seen = [str(h.parse_progress(lines[: count + 1])) for count in range(len(lines))]
    assert list(dict.fromkeys(seen)) == [
        "distributed init",
        "weights",
        "weights 0/1",
        "weights 1/1",
        "KV cache",
        "HTTP start",
        "warm-up",
    ]


def test_progress_on_cuda_reads_bars_made_of_carriage_returns():
    lines = fixture_lines("cuda-0.5.11-eagle3-start.log")
    seen = list(dict.fromkeys(str(h.parse_progress(lines[: count + 1])) for count in range(len(lines))))
    assert "weights 1/1" in seen
    assert "CUDA graphs 20/20" in seen
    assert seen[-1] == "draft CUDA graphs 20/20"
    half = next(line for line in lines if "Capturing batches" in line)
    assert str(h.parse_progress([half[: half.index("| 7/20 [") + 8]])) == "CUDA graphs 7/20"


def test_progress_with_many_shards_and_ranks_and_noise():
    lines = [
        "[2026-11-29 14:27:50 TP0] Load weight begin. avail mem=94.1 GB",
        "Loading safetensors checkpoint shards:  19% Completed | 12/64 [00:31<02:14,  2.58s/it]",
        'INFO:     127.0.0.1:33574 - "GET /health HTTP/1.1" 503 Service Unavailable',
        "The server is fired up and ready to roll!",
    ]
    assert str(h.parse_progress(lines)) == "weights 12/64"
    assert str(h.parse_progress([])) == ""
    assert h.phase_name("weights 12/64") == "weights"


def test_progress_line():
    words = h.doing_text(h.REFUSED, "weights 12/64", "refused")
    line = h.progress_line("sglang-kimi", "box", 95.4, 900, words, 570.2)
    assert line == "[sglang-kimi on box] 95/900 s, usually 570 s: loading weights 12/64"
    ready = h.progress_line("s", "b", 3725, 7200, h.doing_text(h.READY, "warm-up", "200"))
    assert ready == "[s on b] 3725/7200 s: ready (200)"


@pytest.mark.parametrize(
    ("state", "phase", "status", "words"),
    [
        (h.REFUSED, "", "refused", "loading"),
        (h.REFUSED, "draft CUDA graphs 7/20", "refused", "capturing draft CUDA graphs 7/20"),
        (h.WARMING, "warm-up", "503", "warming up (503)"),
        (h.WARMING, "warm-up", "timeout", "the port is open, but /health does not answer (timeout)"),
        (h.GENERATING, "warm-up", "200", "generating (the first sampled request compiles kernels)"),
        (h.FAILED, "warm-up", "refused", "failed (refused)"),
        ("of a newer version", "", "", "of a newer version"),
    ],
)
def test_doing(state, phase, status, words):
    assert h.doing_text(state, phase, status) == words


def test_what_follows_the_targets_graphs_is_the_draft():
    lines = fixture_lines("cuda-0.5.11-eagle3-silent.log")
    seen = list(dict.fromkeys(h.phase_name(str(h.parse_progress(lines[: count + 1]))) for count in range(len(lines))))
    after = seen[seen.index("CUDA graphs") :]
    assert after[:3] == ["CUDA graphs", "draft weights", "draft CUDA graphs"]
    # The journal is read in pieces: what earlier lines had shown is not forgotten.
    assert str(h.parse_progress([], "weights 12/64")) == "weights 12/64"
    assert str(h.parse_progress(["Load weight begin."], "CUDA graphs 20/20")) == "draft weights"


def test_a_sign_of_life_is_neither_a_request_of_ours_nor_a_line_of_ours():
    lines = [
        "Capture cuda graph begin.",
        '[2026-11-29 14:18:13] INFO:     127.0.0.1:41096 - "GET /health HTTP/1.1" 503 Service Unavailable',
        "[sglang-kimi on box] 95/900 s, usually 570 s: capturing CUDA graphs",
        "",
    ]
    assert h.last_sign(lines) == lines[0]
    assert h.last_sign(lines[1:]) == ""


# ------------------------------------------------------------------------------------------------ secrets


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("ServerArgs(api_key='s3cr3t', admin_api_key=\"s3cr3t\", port=1)", "port=1"),
        ("{'api_key': 's3cr3t', 'port': 1}", "'port': 1"),
        ('{"api_key": "s3cr3t"}', "api_key"),
        ("python3 -m sglang.launch_server --api-key s3cr3t --port 1", "--port 1"),
        ("--admin-api-key=s3cr3t --port 1", "--port 1"),
        ("argv: ['--api-key', 's3cr3t', '--port', '1']", "'--port', '1'"),
        ("SGLANG_API_KEY=s3cr3t PORT=1", "PORT=1"),
        ("Authorization: Bearer s3cr3t", "Authorization"),
        ("{'authorization': 'Bearer s3cr3t', 'host': 'x'}", "'host': 'x'"),
        ("authorization: Basic s3cr3t", "authorization"),
        ("token hf_s3cr3tS3CR3Ts3cr3tS3 used", "used"),
    ],
)
def test_secrets_are_taken_out_and_the_rest_stays(text, kept):
    cleaned = h.scrub(text)
    assert "s3cr3t" not in cleaned
    assert "***" in cleaned
    assert kept in cleaned


def test_a_word_without_end_is_scrubbed_at_once():
    """Quadratic time would be hours."""
    for word in ("x", "X", "X_"):
        assert h.scrub(word * 1_000_000) == word * 1_000_000


def test_absent_key_stays_readable():
    line = "api_key=None, admin_api_key=None, served_model_name='tiny'"
    assert h.scrub(line) == line


# ------------------------------------------------------------------------------------------------ systemd


def show(**changes):
    values = {
        "LoadState": "loaded",
        "ActiveState": "active",
        "SubState": "running",
        "MainPID": "100",
        "ExecMainStatus": "0",
        "ExecMainCode": "0",
        "ExecMainStartTimestampMonotonic": "1000000",
        "ExecMainExitTimestampMonotonic": "0",
        "Result": "success",
        "NRestarts": "0",
        "InvocationID": "aa",
        "ControlGroup": "",
        **{key: str(value) for key, value in changes.items()},
    }
    return "\n".join(f"{key}={value}" for key, value in values.items()) + "\n"


def test_unit_status_is_parsed():
    text = show(
        MainPID=0,
        ExecMainCode=2,
        ExecMainStatus=9,
        ExecMainExitTimestampMonotonic=43000000,
        ActiveState="failed",
        Result="signal",
        NRestarts="[not set]",
        Job=77,
    )
    unit = h.parse_unit(UNIT, text)
    assert (unit.main_pid, unit.run_seconds, unit.n_restarts, unit.job) == (0, 42.0, 0, True)
    assert unit.exit_text() == "status=9/KILL"
    assert unit.public() == {
        "name": UNIT,
        "active_state": "failed",
        "sub_state": "running",
        "main_pid": 0,
        "exec_main_code": 2,
        "exec_main_status": 9,
        "result": "signal",
        "n_restarts": 0,
        "invocation_id": "aa",
    }


def test_out_of_memory_is_named():
    assert replace(RUNNING, exec_main_code=2, exec_main_status=9, result="oom-kill").exit_text() == (
        "status=9/KILL, result=oom-kill"
    )


def test_systemctl_that_fails_is_an_error_not_a_state():
    unit = h.observe_unit(UNIT, lambda _argv, _limit: h.CommandResult(1, "", "Failed to connect to bus\n"))
    assert unit.error == "Failed to connect to bus"
    assert h.judge_life(unit, None, KNOWN, 1) is None


def test_a_missing_command_is_told_from_a_failing_one():
    assert h.run_command(["/nonexistent/systemctl"], 1).rc == 127
    assert h.run_command(["sleep", "5"], 0.1).rc == 124
    assert h.run_command(["sh", "-c", "echo $LC_ALL; exit 3"], 5) == h.CommandResult(3, "C\n", "")


def test_journal_asks_for_this_invocation_and_hides_secrets():
    calls = []

    def run(argv, _limit):
        calls.append(argv)
        return h.CommandResult(0, "one\nbar 1\rbar 2\nServerArgs(api_key='s3cr3t')\n\n")

    lines = h.observe_journal(UNIT, "aa", 2, run)
    assert lines == ["bar 1\rbar 2", "ServerArgs(api_key='***')"]
    assert "_SYSTEMD_INVOCATION_ID=aa" in calls[0]
    assert "-u" not in calls[0]
    assert h.last_pieces(lines) == ["bar 2", "ServerArgs(api_key='***')"]


def test_journal_falls_back_to_the_unit():
    def run(argv, _limit):
        return h.CommandResult(0, "old line\n" if "-u" in argv else "")

    assert h.observe_journal(UNIT, "aa", 5, run) == ["old line"]
    assert h.observe_journal(UNIT, "aa", 5, lambda _argv, _limit: h.CommandResult(127)) == []


# ------------------------------------------------------------------------------------------------ life


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"active_state": "activating", "sub_state": "start", "main_pid": 100},
        {"active_state": "activating", "sub_state": "start-post"},
        {"active_state": "reloading", "sub_state": "reload"},
    ],
)
def test_alive(change):
    assert h.judge_life(replace(RUNNING, **change), None, KNOWN, 1) is None


def test_alive_before_the_main_process_exists():
    # systemd keeps the exit code of the run before until the new main process is there.
    unit = replace(
        RUNNING, active_state="activating", sub_state="start-pre", main_pid=0, exec_main_code=2, exec_main_status=9
    )
    assert h.judge_life(unit, None, h.Since(), 1) is None
    queued = replace(unit, active_state="inactive", sub_state="dead", job=True)
    assert h.judge_life(queued, None, h.Since(), 1) is None
    # Our own start of a unit that systemd would have started later: the old death is not this start's.
    waiting = replace(unit, sub_state="auto-restart", job=True)
    assert h.judge_life(waiting, None, h.Since(), 1) is None
    assert h.judge_life(replace(waiting, job=False), None, h.Since(), 1) is not None
    assert h.judge_life(waiting, None, KNOWN, 1) is not None
    # ... nor are its number of restarts and its invocation, which will be others as soon as the start begins.
    for still_old in (queued, waiting):
        since = h.Since().learn(replace(still_old, n_restarts=3, invocation_id="old"), None)
        assert (since.n_restarts, since.invocation_id) == (-1, "")
        assert h.judge_life(RUNNING, None, since, 2) is None


KILLED = {"main_pid": 0, "exec_main_code": 2, "exec_main_status": 9, "run_seconds": 42.0}


@pytest.mark.parametrize(
    ("change", "since", "words"),
    [
        (
            {"active_state": "failed", "sub_state": "failed", **KILLED},
            KNOWN,
            f"{UNIT} died while loading: status=9/KILL after 42 s",
        ),
        (
            {"active_state": "failed", "sub_state": "failed", **KILLED},
            replace(KNOWN, state=h.WARMING),
            f"{UNIT} died while warming up: status=9/KILL after 42 s",
        ),
        (
            {"active_state": "failed", "main_pid": 0, "exec_main_code": 1, "exec_main_status": 2},
            h.Since(),
            f"{UNIT} had failed before the gate began: status=2",
        ),
        ({"active_state": "activating", "sub_state": "auto-restart", **KILLED}, KNOWN, "died while loading: status=9"),
        ({"active_state": "activating", "sub_state": "auto-restart", **KILLED}, h.Since(), "is in a restart loop"),
        ({"n_restarts": 1, "invocation_id": "bb", "main_pid": 200}, KNOWN, "died and was started again by systemd"),
        ({"n_restarts": 1}, KNOWN, "died and was started again by systemd"),
        ({"invocation_id": "bb", "main_pid": 200}, KNOWN, "was restarted by someone"),
        ({"main_pid": 200}, KNOWN, f"the main process of {UNIT} changed from 100 to 200"),
        ({"active_state": "inactive", "sub_state": "dead", "main_pid": 0}, h.Since(), "is not running (inactive/dead)"),
        ({"active_state": "inactive", "sub_state": "dead", "main_pid": 0}, KNOWN, "was stopped while loading"),
        (
            {"active_state": "inactive", "sub_state": "dead", "main_pid": 0, "exec_main_code": 1},
            KNOWN,
            "ended while loading: status=0",
        ),
        ({"active_state": "deactivating", "sub_state": "stop-sigterm"}, KNOWN, "is being stopped (stop-sigterm)"),
        ({"active_state": "deactivating", "sub_state": "final-sigterm", **KILLED}, KNOWN, "died while loading"),
        ({"active_state": "activating", "sub_state": "start-post", **KILLED}, KNOWN, "died while loading: status=9"),
        ({"active_state": "activating", "sub_state": "start-post", **KILLED}, h.Since(), "died: status=9/KILL"),
        ({"sub_state": "exited", "main_pid": 0, "exec_main_code": 1}, h.Since(), "died: status=0"),
        ({"load_state": "not-found", "active_state": "inactive"}, h.Since(), "does not exist on this host"),
        (
            {"load_state": "not-found", "active_state": "inactive", "main_pid": 0},
            KNOWN,
            "ended while loading, and the unit is",
        ),
        ({"load_state": "masked", "active_state": "inactive"}, h.Since(), "LoadState=masked"),
    ],
)
def test_dead(change, since, words):
    verdict = h.judge_life(replace(RUNNING, **change), None, since, 50)
    assert verdict is not None
    assert verdict.state == h.FAILED
    assert words in verdict.reason


def test_a_watched_process_that_is_gone_or_replaced():
    since = h.Since(pid_started="555", state=h.REFUSED)
    assert h.judge_life(None, h.ProcessStatus(7, True, "555"), since, 1) is None
    assert "process 7 is gone while loading" in h.judge_life(None, h.ProcessStatus(7, False), since, 1).reason
    assert "belongs to another" in h.judge_life(None, h.ProcessStatus(7, True, "999"), since, 1).reason


def test_zombies_are_dead():
    child = subprocess.Popen(["sleep", "60"])
    try:
        status = h.observe_process(child.pid)
        assert status.alive
        assert int(status.started) > 0
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not h.observe_process(child.pid).alive
    finally:
        child.kill()
        child.wait()
    assert not h.observe_process(child.pid).alive


# ------------------------------------------------------------------------------------------------ verdicts


def verdict(since=KNOWN, generate=True, **seen):
    observation = h.Observation(**{"elapsed": 10.0, "unit": RUNNING, "owner": OURS, **seen})
    return h.decide(observation, since, h.Options(generate=generate))


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        ({"http": h.HttpAnswer(error="refused"), "owner": h.Owner(h.NOBODY)}, h.REFUSED),
        ({"http": h.HttpAnswer(503)}, h.WARMING),
        ({"http": h.HttpAnswer(error="timeout")}, h.WARMING),
        ({"http": h.HttpAnswer(error="broken")}, h.WARMING),
        ({"http": h.HttpAnswer(404)}, h.WARMING),
        ({"http": OK, "generation": SPOKEN}, h.READY),
        ({"http": OK, "generation": SPOKEN, "owner": h.Owner(h.OTHERS)}, h.FOREIGN),
        ({"http": OK, "owner": h.Owner(h.NOBODY)}, h.FOREIGN),
        ({"http": OK, "generation": SPOKEN, "owner": h.Owner(h.UNKNOWN)}, h.FAILED),
        ({"owner": h.Owner(h.OTHERS, ("pid 7 (python3 -m http.server)",))}, h.FOREIGN),
        ({"http": OK, "generation": h.Generation(False, error="HTTP 500")}, h.GENERATION_FAILED),
        ({"http": h.HttpAnswer(503), "elapsed": 900.0}, h.TIMEOUT),
        ({"http": OK, "elapsed": 900.0}, h.TIMEOUT),
        ({"http": OK, "elapsed": 901.0, "generation": SPOKEN}, h.READY),
        ({"http": OK, "generation": SPOKEN, "unit": replace(RUNNING, active_state="failed")}, h.FAILED),
        ({"http": OK, "generation": SPOKEN, "unit": replace(RUNNING, n_restarts=1)}, h.FAILED),
    ],
)
def test_verdicts(seen, state):
    assert verdict(**seen).state == state


def test_first_200_asks_for_a_generation_unless_told_otherwise():
    assert verdict(http=OK) == h.Verdict(h.WARMING, generate=True)
    assert verdict(http=OK, generate=False).state == h.READY


def test_blind_systemctl_never_leads_to_ready():
    seen = {"unit": h.UnitStatus(UNIT, error="bus"), "owner": h.Owner(h.UNKNOWN), "http": OK, "generation": SPOKEN}
    assert verdict(**seen).state == h.WARMING
    assert verdict(**seen, generate=False).state == h.WARMING
    assert verdict(**seen, elapsed=900.0).state == h.TIMEOUT


def test_without_unit_and_pid_the_owner_does_not_matter():
    seen = {"unit": None, "owner": h.Owner(h.UNCHECKED), "http": OK, "generation": SPOKEN}
    assert verdict(since=h.Since(), **seen).state == h.READY


@pytest.mark.parametrize(
    ("answer", "ok", "words"),
    [
        (h.HttpAnswer(400, body='{"message": "bad"}'), False, "HTTP 400"),
        (h.HttpAnswer(500, body="Authorization: Bearer abc"), False, "HTTP 500: Authorization: Bearer ***"),
        (h.HttpAnswer(error="timeout", seconds=180), False, "no answer within 180.0 s"),
        (h.HttpAnswer(error="broken", detail="reset"), False, "the connection broke (reset)"),
        (h.HttpAnswer(200, body="<html>"), False, "no chat completion"),
        (h.HttpAnswer(200, body='{"choices": []}'), False, "no chat completion"),
        (h.HttpAnswer(200, body='{"choices": [{"message": {"content": " "}}]}'), False, "no text"),
        (h.HttpAnswer(200, body='{"choices": [{"message": {"content": null}}]}'), False, "no text"),
        (h.HttpAnswer(200, body='{"choices": [{"message": {"content": "hi"}}]}'), True, ""),
        (
            h.HttpAnswer(200, body='{"choices": [{"message": {"content": null, "reasoning_content": "hm"}}]}'),
            True,
            "",
        ),
    ],
)
def test_what_counts_as_a_generation(answer, ok, words):
    generation = h.judge_generation(answer)
    assert generation.ok is ok
    assert words in generation.error
    assert bool(generation.text.strip()) is ok


def test_generation_request_samples():
    body = h.generation_body("kimi", "Hello", 8)
    assert body["temperature"] > 0
    assert 0 < body["top_p"] < 1
    assert (body["model"], body["max_tokens"]) == ("kimi", 8)


def test_since_survives_json_and_refuses_nonsense():
    since = replace(KNOWN, elapsed=12.5, attempts=3, phase="weights 1/2")
    assert h.Since.load(json.loads(json.dumps(h.asdict(since)))) == since
    assert h.Since.load(None) == h.Since()
    assert h.Since.load({"later": 1, "main_pid": "7"}).main_pid == 7
    with pytest.raises(ValueError, match="invalid literal"):
        h.Since.load({"attempts": "many"})


def test_what_is_known_stays_known():
    learned = h.Since().learn(RUNNING, None)
    assert (learned.n_restarts, learned.invocation_id, learned.main_pid) == (0, "aa", 100)
    assert learned.learn(replace(RUNNING, n_restarts=3, invocation_id="bb", main_pid=9), None) == learned


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"port": 99999}, "port is 99999, expected 1 to 65535"),
        ({"port": 0}, "port is 0"),
        ({"timeout": 0.0}, "timeout is 0, expected a number of seconds above 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"request_timeout": -1.0}, "request_timeout is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"journal_lines": -1}, "journal_lines is -1"),
        ({"host": ""}, "host is empty"),
        ({"unit": "a b"}, "unit is 'a b'"),
        ({"unit": "--version"}, "unit is '--version'"),
        ({"unit": "sglang-*"}, "unit is 'sglang-*'"),
        ({"pid": 7}, "both given"),
        ({"pid": -7, "unit": ""}, "pid is -7"),
    ],
)
def test_wrong_options_are_named(change, words):
    assert words in h.check_options(replace(h.Options(), **change))


def test_default_options_are_right():
    assert h.check_options(h.Options()) == ""
    # The engine takes 20 s to say that its scheduler is dead.
    assert h.Options().request_timeout > 20
    assert h.unit_name("sglang-kimi") == UNIT
    assert h.unit_name("x.scope") == "x.scope"


# ------------------------------------------------------------------------------------------------ the socket


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_own_socket_is_ours(listener):
    assert h.observe_owner(["127.0.0.1"], listener, lambda: {os.getpid()}) == h.Owner(h.OURS)


def test_socket_of_somebody_else_is_named(listener):
    owner = h.observe_owner(["127.0.0.1"], listener, lambda: {os.getppid()})
    assert owner.kind == h.OTHERS
    assert any(f"pid {os.getpid()}" in holder for holder in owner.holders)


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert h.observe_owner(["127.0.0.1"], port, set) == h.Owner(h.NOBODY)


def test_listening_on_all_addresses_counts_and_another_address_does_not():
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert len(h.listening_inodes(["127.0.0.1"], server.getsockname()[1])) == 1
    with socket.create_server(("127.0.0.2", 0)) as server:
        assert h.listening_inodes(["127.0.0.1"], server.getsockname()[1]) == set()


def test_kernel_table_with_ipv6(tmp_path):
    (tmp_path / "net").mkdir()
    head = "  sl  local_address rem_address st tx rx tr tm retrnsmt uid timeout inode\n"
    if sys.byteorder != "little":
        pytest.skip("the rows below were written by a little-endian kernel")
    rows = [
        "0: 00000000000000000000000000000000:7530 0:0 0A 0:0 00:0 0 0 0 11 1",
        "1: 0000000000000000FFFF00000100007F:7530 0:0 0A 0:0 00:0 0 0 0 12 1",
        "2: 00000000000000000000000001000000:7530 0:0 0A 0:0 00:0 0 0 0 13 1",
        "3: 00000000000000000000000001000000:7530 0:0 01 0:0 00:0 0 0 0 14 1",
        "4: 00000000000000000000000001000000:7531 0:0 0A 0:0 00:0 0 0 0 15 1",
    ]
    (tmp_path / "net" / "tcp6").write_text(head + "\n".join(rows) + "\n")
    assert h.listening_inodes(["127.0.0.1"], 30000, tmp_path) == {"12"}
    assert h.listening_inodes(["::1"], 30000, tmp_path) == {"13"}
    assert h.listening_inodes(["10.0.0.1"], 30000, tmp_path) == {"11"}


def test_processes_of_a_unit_come_from_its_control_group(tmp_path):
    group = tmp_path / "system.slice" / UNIT / "sub"
    group.mkdir(parents=True)
    (group.parent / "cgroup.procs").write_text("100\n101\n")
    (group / "cgroup.procs").write_text("102\n")
    unit = replace(RUNNING, control_group=f"/system.slice/{UNIT}")
    assert h.unit_pids(unit, tmp_path, tmp_path) == {100, 101, 102}


def test_without_control_group_the_descendants_count():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert child.pid in h.unit_pids(replace(RUNNING, main_pid=os.getpid()))
    finally:
        child.kill()
        child.wait()


def test_descriptors_that_may_not_be_read_are_unknown(listener, monkeypatch):
    monkeypatch.setattr(health_host, "_socket_inodes", lambda _pid, _proc: None)
    assert h.observe_owner(["127.0.0.1"], listener, lambda: {1}).kind == h.UNKNOWN


def test_command_lines_in_messages_have_no_secrets(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"python3\0-m\0sglang.launch_server\0--api-key\0s3cr3t\0")
    assert h.describe_process(7, tmp_path) == "pid 7 (python3 -m sglang.launch_server --api-key ***)"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Environment=HF_TOKEN=abc123", "Environment=HF_TOKEN=***"),
        ("HF_TOKEN='a b' LC_ALL=C", "HF_TOKEN=*** LC_ALL=C"),
        ('"AWS_SECRET_ACCESS_KEY=x/y+z" is loaded', '"AWS_SECRET_ACCESS_KEY=***" is loaded'),
        ("DB_PASSWORD=p,w;1", "DB_PASSWORD=***"),
        ("SGLANG_MAX_TOKENS=4096 HF_TOKEN_PATH=/x", "SGLANG_MAX_TOKENS=4096 HF_TOKEN_PATH=/x"),
        ("HF_TOKEN=***", "HF_TOKEN=***"),
        ('"OPENAI_API_KEY=sk-x" y', '"OPENAI_API_KEY=***" y'),
        ("'API_KEY=a\"b', c", "'API_KEY=***', c"),
        ("DB=postgres://u:pa55@h/db http://h:80/x@y", "DB=postgres://***@h/db http://h:80/x@y"),
    ],
)
def test_variables_that_hold_a_secret_are_scrubbed(text: str, shown: str) -> None:
    assert h.scrub(text) == shown
