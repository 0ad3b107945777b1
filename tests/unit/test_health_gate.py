"""The gate against a real HTTP server, with a stand-in only for systemctl and journalctl."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import health as h

UNIT = "sglang-kimi.service"
#: What a reaction of a second or two may take on a loaded machine; a gate that reacts too late takes its budget of 30 s or more.
GENEROUS_S = 12


class Engine(ThreadingHTTPServer):
    """Answers like the engine: `health` is a list of statuses (the last one stays), `hang` seconds before each answer."""

    daemon_threads = True

    def __init__(self, health=(200,), chat=None, hang=0.0, hang_chat=0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.health = list(health)
        self.chat = chat or (200, {"choices": [{"message": {"content": "hello"}}], "usage": {"completion_tokens": 3}})
        self.hang, self.hang_chat = hang, hang_chat
        self.asked = []
        self.first_200 = 0.0
        self.stopped = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def port(self):
        return self.server_address[1]

    def close(self):
        self.stopped.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def answer(self, status, data):
        body = json.dumps(data).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def do_GET(self):
        engine = self.server
        engine.asked.append((self.path, None))
        if self.path == "/v1/models":
            self.answer(200, {"data": [{"id": "tiny"}]})
            return
        engine.stopped.wait(engine.hang)
        status = engine.health.pop(0) if len(engine.health) > 1 else engine.health[0]
        if status == 200 and not engine.first_200:
            engine.first_200 = time.monotonic()
        self.answer(status, {})

    def do_POST(self):
        engine = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine.asked.append((self.path, body))
        engine.stopped.wait(engine.hang_chat)
        status, data = engine.chat.pop(0) if isinstance(engine.chat, list) else engine.chat
        self.answer(status, data)

    def log_message(self, *_):
        pass


@pytest.fixture
def engine(request):
    server = Engine(**getattr(request, "param", {}))
    yield server
    server.close()


class Systemd:
    """systemctl and journalctl: `changes` is a list of (seconds since the start, changed properties)."""

    def __init__(self, main_pid=None, changes=(), journal=""):
        self.began = time.monotonic()
        self.main_pid = os.getpid() if main_pid is None else main_pid
        self.changes = changes
        self.journal = journal
        self.calls = []

    def __call__(self, argv, _limit):
        self.calls.append(argv)
        if argv[0] == "journalctl":
            return h.CommandResult(0, self.journal)
        values = {
            "LoadState": "loaded",
            "ActiveState": "active",
            "SubState": "running",
            "MainPID": self.main_pid,
            "Result": "success",
            "NRestarts": 0,
            "InvocationID": "aa",
        }
        for when, change in self.changes:
            if time.monotonic() - self.began >= when:
                values.update(change)
        return h.CommandResult(0, "".join(f"{key}={value}\n" for key, value in values.items()))


def gate(port, systemd=None, since=None, **options):
    given = {"unit": UNIT, "port": port, "timeout": 10.0, "poll_interval": 0.1, **options}
    return h.Gate(h.Options(**given), since or h.Since(), run=systemd or Systemd())


@pytest.fixture
def free_port():
    """A port that nobody listens on, held so that no other process of this machine is given it meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


DEATH = {
    "ActiveState": "failed",
    "SubState": "failed",
    "MainPID": 0,
    "ExecMainCode": 2,
    "ExecMainStatus": 9,
    "Result": "signal",
}


def test_ready_at_once(engine):
    result = gate(engine.port).wait()
    assert (result["state"], result["ready"], result["last_status"], result["attempts"]) == ("ready", True, "200", 1)
    assert result["generation"]["text"] == "hello"
    assert result["generation"]["tokens"] == 3
    assert result["pid"] == os.getpid()
    assert result["unit"]["name"] == UNIT
    path, body = engine.asked[-1]
    assert path == "/v1/chat/completions"
    assert body["model"] == "tiny"
    assert body["temperature"] > 0
    # From the first 200: two seconds at most, plus the generation; a loaded machine gets more.
    assert time.monotonic() - engine.first_200 < GENEROUS_S


def test_given_model_is_used_and_the_list_not_asked(engine):
    gate(engine.port, model="kimi").wait()
    assert [path for path, _ in engine.asked] == ["/health", "/server_info", "/v1/chat/completions"]
    assert engine.asked[-1][1]["model"] == "kimi"


def test_no_generation_when_not_wanted(engine):
    result = gate(engine.port, generate=False).wait()
    assert (result["state"], result["generation"]) == ("ready", {})
    assert [path for path, _ in engine.asked] == ["/health", "/server_info"]


@pytest.mark.parametrize("engine", [{"health": (503, 503, 200)}], indirect=True)
def test_503_then_200(engine):
    result = gate(engine.port).wait()
    assert (result["state"], result["attempts"]) == ("ready", 3)


def test_refused_then_served(free_port):
    systemd = Systemd()
    watched = gate(free_port, systemd)
    first = watched.step()
    assert first.state == h.REFUSED
    assert watched.since.last_status == "refused"


def test_timeout_while_refused(free_port):
    systemd = Systemd(journal="Loading safetensors checkpoint shards:  19% Completed | 12/64 [00:31<02:14]\n")
    began = time.monotonic()
    result = gate(free_port, systemd, timeout=1.0).wait()
    assert 0.9 < time.monotonic() - began < GENEROUS_S
    assert result["state"] == "timeout"
    assert result["phase"] == "weights 12/64"
    assert result["msg"].startswith(f"{UNIT} did not become ready: still loading weights 12/64 (last answer: refused)")
    assert f"on 127.0.0.1:{free_port} within 1 s" in result["msg"]


@pytest.mark.parametrize("engine", [{"hang": 30}], indirect=True)
def test_hanging_health_is_warming_until_the_time_is_over(engine):
    result = gate(engine.port, request_timeout=0.7, timeout=2.0).wait()
    assert (result["state"], result["last_status"]) == ("timeout", "timeout")
    assert 2 <= result["elapsed"] < GENEROUS_S
    assert result["attempts"] >= 2


@pytest.mark.parametrize("engine", [{"hang": 30}], indirect=True)
def test_death_during_a_pending_request_is_seen_within_two_seconds(engine):
    systemd = Systemd(changes=[(1.0, DEATH)], journal="last words api_key='s3cr3t'\n")
    began = time.monotonic()
    result = gate(engine.port, systemd, timeout=60.0).wait()
    assert time.monotonic() - began < GENEROUS_S
    assert result["state"] == "failed"
    assert result["msg"].startswith(f"{UNIT} died")
    assert "status=9/KILL" in result["msg"]
    assert f"Do: journalctl -u {UNIT} -n 200. Last journal lines:" in result["msg"]
    assert result["msg"].endswith("last words api_key='***'")
    assert result["journal"] == ["last words api_key='***'"]


SAID = "port 30000 is held by pid 12 (nc -l 30000); it does not belong to sglang-kimi.service after 0.3 s "
SAID += "(expected: /health 200 and one generation on 127.0.0.1:30000 within 895 s). "
SAID += "Do: stop that process or choose another port."


def test_what_the_gate_of_the_start_said_comes_before_the_engines_last_lines(free_port):
    """The gate inside the unit ended the start; the traceback of the engine's end pushes its words out of the last lines."""
    trace = [f"  File x.py, line {number}" for number in range(40)]
    journal = "\n".join(
        ["Load weight begin", f"{SAID} Last journal lines:", "  Load weight begin", *trace, "KeyboardInterrupt"]
    )
    result = gate(free_port, Systemd(changes=[(0.3, DEATH)], journal=journal), timeout=60.0, journal_lines=3).wait()
    assert result["msg"].startswith(f"{UNIT} died while loading")
    found, told, last = result["msg"].partition(f" The gate of the start said: {SAID} Last journal lines:\n")
    assert told and "port 30000" not in found
    assert last == "  File x.py, line 38\n  File x.py, line 39\n  KeyboardInterrupt"
    assert result["journal"] == ["File x.py, line 38", "File x.py, line 39", "KeyboardInterrupt"]


def test_what_the_gate_of_the_start_said_is_not_told_twice():
    words = f"{UNIT} did not become ready: still loading after 7 s"
    seen = h.Gate(h.Options(unit=UNIT), said=f"{words} (expected: /health 200 on x:1 within 7 s).")
    assert "said" not in seen.message(h.Verdict(h.TIMEOUT, f"{UNIT} did not become ready: still loading"), 12)
    assert h.gate_said(["gate: error: /etc/x.json cannot be read", "x"]) == "gate: error: /etc/x.json cannot be read"
    assert h.gate_said(["GET /health 200", ""]) == ""


@pytest.mark.parametrize("engine", [{"hang_chat": 30}], indirect=True)
def test_death_during_the_generation(engine):
    result = gate(engine.port, Systemd(changes=[(1.0, DEATH)]), timeout=60.0).wait()
    assert result["state"] == "failed"
    assert result["elapsed"] < GENEROUS_S
    assert "died during its first generation" in result["msg"]


def test_death_between_two_requests(free_port):
    result = gate(free_port, Systemd(changes=[(1.0, DEATH)]), timeout=60.0, poll_interval=30.0).wait()
    assert result["state"] == "failed"
    assert result["elapsed"] < GENEROUS_S
    assert "died while loading" in result["msg"]


@pytest.mark.parametrize(
    "change",
    [
        {"NRestarts": 1, "InvocationID": "bb", "MainPID": 1},
        {"InvocationID": "bb"},
        {"MainPID": 1},
        {"ActiveState": "activating", "SubState": "auto-restart", "MainPID": 0},
        {"ActiveState": "inactive", "SubState": "dead", "MainPID": 0},
    ],
)
def test_restart_or_stop_during_the_gate(free_port, change):
    result = gate(free_port, Systemd(changes=[(0.5, change)]), timeout=60.0).wait()
    assert result["state"] == "failed"
    assert result["elapsed"] < GENEROUS_S


def test_inactive_unit_fails_at_once_and_is_not_asked(engine):
    systemd = Systemd(changes=[(0, {"ActiveState": "inactive", "SubState": "dead", "MainPID": 0})])
    result = gate(engine.port, systemd).wait()
    assert result["state"] == "failed"
    assert f"systemctl start {UNIT}" in result["msg"]
    assert engine.asked == []


def test_restart_between_two_windows_is_seen(engine):
    since = h.Since(n_restarts=0, invocation_id="before", main_pid=os.getpid(), elapsed=40.0, state=h.REFUSED)
    result = gate(engine.port, since=since, timeout=60.0).wait()
    assert result["state"] == "failed"
    assert "was restarted by someone" in result["msg"]


def test_foreign_server_that_answers_200(engine):
    child = subprocess.Popen(["sleep", "60"])
    try:
        result = gate(engine.port, Systemd(main_pid=child.pid)).wait()
    finally:
        child.kill()
        child.wait()
    assert (result["state"], result["ready"]) == ("foreign", False)
    assert result["msg"].startswith(f"port {engine.port} is held by pid {os.getpid()}")
    assert all(path != "/v1/chat/completions" for path, _ in engine.asked)


def test_without_systemd_nobody_asks_who_it_is(engine):
    def run(argv, _limit):
        raise AssertionError(f"{argv} was run")

    result = gate(engine.port, run, unit="").wait()
    assert (result["state"], result["unit"], result["pid"]) == ("ready", {}, 0)


def test_pid_instead_of_unit(engine, free_port):
    assert gate(engine.port, unit="", pid=os.getpid()).wait()["ready"]
    child = subprocess.Popen(["sleep", "0.7"])
    reaper = threading.Thread(target=child.wait)
    reaper.start()
    result = gate(free_port, unit="", pid=child.pid, timeout=30.0).wait()
    reaper.join()
    assert result["state"] == "failed"
    assert result["elapsed"] < GENEROUS_S
    assert result["msg"].startswith(f"process {child.pid} is gone while loading")


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"chat": (400, {"message": "wrong model"})}, "HTTP 400"),
        ({"chat": (500, {})}, "HTTP 500"),
        ({"chat": (200, {"choices": [{"message": {"content": ""}}]})}, "has no text"),
        ({"hang_chat": 30}, "no answer within"),
    ],
    indirect=["engine"],
)
def test_generation_that_fails(engine, words):
    result = gate(engine.port, generation_timeout=1.0).wait()
    assert (result["state"], result["last_status"]) == ("generation_failed", "200")
    assert result["msg"].startswith(f"{UNIT} answers /health with 200 but cannot generate: ")
    assert words in result["msg"]


EMPTY = (200, {"choices": [{"message": {"content": ""}}]})
FULL = (200, {"choices": [{"message": {"content": "well"}}]})


@pytest.mark.parametrize("engine", [{"chat": [EMPTY, FULL]}], indirect=True)
def test_one_empty_answer_is_bad_luck(engine):
    result = gate(engine.port).wait()
    assert (result["state"], result["generation"]["text"]) == ("ready", "well")


@pytest.mark.parametrize("engine", [{"chat": (500, {})}], indirect=True)
def test_death_explains_a_failed_generation(engine):
    result = gate(engine.port, Systemd(changes=[(0.6, DEATH)])).wait()
    assert result["state"] == "failed"
    assert "status=9/KILL" in result["msg"]


@pytest.mark.parametrize("engine", [{"hang_chat": 30}], indirect=True)
def test_budget_ends_a_generation_too(engine):
    result = gate(engine.port, timeout=1.5).wait()
    assert result["state"] == "timeout"
    assert "did not become ready: in its first generation (last answer: 200)" in result["msg"]


@pytest.mark.parametrize("engine", [{"health": (503,)}], indirect=True)
def test_window_ends_early_and_the_next_one_goes_on(engine):
    first = gate(engine.port).wait(window=0.8)
    assert (first["state"], first["ready"], first["journal"]) == ("warming", False, [])
    assert first["elapsed"] < 5  # the window is 0.8 s, the budget a minute
    since = h.Since.load({**first["_since"], "elapsed": 7.0})
    assert since.main_pid == os.getpid()
    second = gate(engine.port, since=since, timeout=8.0).wait(window=5)
    assert second["state"] == "timeout"
    assert 8 <= second["elapsed"] < 12  # the budget is 8 s, the window would end at 12
    assert second["attempts"] > first["attempts"]


@pytest.mark.parametrize("engine", [{"hang_chat": 1.5}], indirect=True)
def test_window_does_not_cut_a_request(engine):
    # The window ends before the generation, once, so that the caller can say what is under way.
    result = gate(engine.port).wait(window=0.2)
    assert (result["state"], engine.asked[-1][0]) == ("generating", "/server_info")
    result = gate(engine.port, since=h.Since.load(result["_since"])).wait(window=0.2)
    assert result["state"] == "ready"
    assert [path for path, _ in engine.asked].count("/health") == 1


@pytest.mark.parametrize("engine", [{"health": (503,)}], indirect=True)
def test_journal_is_read_every_few_seconds_only(engine):
    systemd = Systemd(journal="Uvicorn running on http://127.0.0.1:1\n")
    result = gate(engine.port, systemd).wait(window=2.0)
    assert result["phase"] == "warm-up"
    assert sum(call[0] == "journalctl" for call in systemd.calls) == 1


@pytest.mark.parametrize(
    "error", ["systemctl: command not found", "System has not been booted with systemd as init system (PID 1)."]
)
def test_no_systemd_is_said_clearly(engine, error):
    result = gate(engine.port, lambda _argv, _limit: h.CommandResult(127, err=error)).wait()
    assert result["state"] == "failed"
    assert result["elapsed"] < GENEROUS_S
    assert error in result["msg"]
    assert "set unit to ''" in result["msg"]


def test_systemctl_that_fails_for_a_moment_is_forgiven(engine):
    systemd = Systemd()

    def run(argv, limit):
        if time.monotonic() - systemd.began < 0.8:
            return h.CommandResult(1, err="bus is busy")
        return systemd(argv, limit)

    assert gate(engine.port, run).wait()["state"] == "ready"


def test_once_looks_once(engine, free_port):
    assert gate(engine.port).once()["state"] == "ready"
    assert [path for path, _ in engine.asked] == ["/health", "/server_info"]
    began = time.monotonic()
    assert gate(free_port).once()["state"] == "refused"
    assert time.monotonic() - began < GENEROUS_S


def test_same_keys_in_every_state(engine, free_port):
    results = [
        gate(engine.port).wait(),
        gate(free_port, timeout=0.3).wait(),
        gate(free_port).wait(window=0.1),
        gate(free_port, Systemd(changes=[(0, DEATH)])).wait(),
    ]
    assert [result["state"] for result in results] == ["ready", "timeout", "refused", "failed"]
    assert len({tuple(result) for result in results}) == 1


def test_proxies_of_the_environment_are_not_asked(engine, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert gate(engine.port, unit="").wait()["ready"]


def test_clock_and_sleep_can_be_injected():
    class Silent:
        def wait(self, _seconds):
            return h.HttpAnswer(error="refused")

        def abort(self):
            raise AssertionError("nothing to abort")

    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    watched = h.Gate(
        h.Options(unit="", timeout=900.0),
        request=lambda *_: Silent(),
        clock=lambda: now[0],
        sleep=sleep,
    )
    result = watched.wait()
    assert result["state"] == "timeout"
    # One request a second while nothing listens.
    assert 895 <= result["attempts"] <= 905


def program(folder, *arguments):
    # -I and no site-packages: the host has no Ansible.
    command = [sys.executable, "-I", "-S", str(folder), "gate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)


@pytest.mark.parametrize("engine", [{"health": (503, 200)}], indirect=True)
def test_runs_on_the_host_as_a_program(engine, free_port, programs):
    done = program(programs, "--unit", "", "--port", str(engine.port))
    assert done.returncode == 0, done.stderr
    assert "/900 s: generating (the first sampled request compiles kernels)\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("the server serves after ")
    late = program(programs, "--unit", "", "--port", str(free_port), "--timeout", "0.5", "--no-generate")
    assert late.returncode == 1
    assert "the server did not become ready: still loading" in late.stdout
    wrong = program(programs, "--port", "99999")
    assert wrong.returncode == 2
    assert "port is 99999, expected 1 to 65535" in wrong.stderr


def owners(monkeypatch, *kinds):
    left = list(kinds)
    monkeypatch.setattr(h, "observe_owner", lambda *_: h.Owner(left.pop(0) if len(left) > 1 else left[0]))


def test_a_process_forked_between_two_reads_is_not_foreign(engine, monkeypatch):
    owners(monkeypatch, h.OTHERS, h.OURS)
    assert gate(engine.port).wait()["state"] == "ready"


def test_port_that_changes_hands_during_the_generation_is_foreign(engine, monkeypatch):
    # Before /health, after /health, and twice after the generation.
    owners(monkeypatch, h.OURS, h.OURS, h.OTHERS)
    result = gate(engine.port).wait()
    assert (result["state"], result["generation"]["text"]) == ("foreign", "hello")
