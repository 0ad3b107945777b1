"""The liveness timer's judgement, with made-up clocks, answers and hosts: what counts as dead, and what follows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import health as h
from ansible_collections.gpuserve.sglang.plugins.module_utils import incident, maintenance
from ansible_collections.gpuserve.sglang.plugins.module_utils import liveness as lv

UNIT = "sglang-kimi.service"
RUNNING = h.UnitStatus(
    UNIT, load_state="loaded", active_state="active", sub_state="running", main_pid=100, invocation_id="aa"
)
OPTIONS = lv.Options(failures=3, busy_limit=300, restarts_per_hour=2, model="tiny")
KNOWN = lv.Memory(state=lv.ALIVE, invocation_id="aa", proven=1000.0)
OURS = h.Owner(h.OURS)
HEALTHY = h.HttpAnswer(200, seconds=1.0)
SPOKEN = h.HttpAnswer(
    200, body=json.dumps({"choices": [{"message": {"content": "Yes"}}], "usage": {"completion_tokens": 1}})
)
BLANK = h.HttpAnswer(
    200, body=json.dumps({"choices": [{"message": {"content": ""}}], "usage": {"completion_tokens": 2}})
)
UNHEALTHY = h.HttpAnswer(503, seconds=20.0)
SILENT = h.HttpAnswer(error="timeout", seconds=30.0)


def seen(now=1030.0, **changes):
    return lv.Seen(**{"now": now, "unit": RUNNING, "owner": OURS, "http": UNHEALTHY, "window": 30.0, **changes})


def states(decision):
    return decision.state, decision.action, decision.memory.failures


# ------------------------------------------------------------------------------------------------ one probe


@pytest.mark.parametrize("answer", [SPOKEN, BLANK, h.HttpAnswer(400), h.HttpAnswer(401), h.HttpAnswer(404)])
def test_an_answer_is_life_and_ends_a_row_of_failures(answer):
    memory = replace(KNOWN, failures=2, escalated=True)
    decision = lv.judge(seen(http=HEALTHY, answer=answer), memory, OPTIONS)
    assert states(decision) == (lv.ALIVE, lv.NOTHING, 0)
    assert decision.memory.proven == 1030.0
    assert not decision.memory.escalated


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"http": UNHEALTHY}, "/health: 503 after 20 s"),
        ({"http": SILENT}, "/health: timeout after 30 s"),
        ({"http": h.HttpAnswer(error="refused")}, "/health: refused"),
        ({"http": HEALTHY, "answer": SILENT}, "/health: 200, generation: no answer within 30.0 s"),
        ({"http": HEALTHY, "answer": h.HttpAnswer(500, body="boom")}, "generation: HTTP 500: boom"),
        ({"http": HEALTHY, "answer": h.HttpAnswer(503)}, "HTTP 503"),
        ({"http": HEALTHY, "answer": h.HttpAnswer(429)}, "HTTP 429"),
        ({"http": HEALTHY, "answer": h.HttpAnswer(200, body="<html>")}, "no chat completion"),
        (
            {"http": HEALTHY, "answer": SPOKEN, "owner": h.Owner(h.OTHERS, ("pid 7 (nginx)",))},
            "answered by pid 7 (nginx)",
        ),
        ({"dead": ("pid 101 (sglang::schedul)",)}, "pid 101 (sglang::schedul) is dead"),
        ({"stopped": ("pid 100 (python3)",)}, "pid 100 (python3) is stopped"),
    ],
)
def test_no_answer_and_no_sign_of_work_is_a_failure_with_its_reason(changes, words):
    decision = lv.judge(seen(**changes), KNOWN, OPTIONS)
    assert states(decision) == (lv.FAILING, lv.NOTHING, 1)
    assert words in decision.reason
    assert "nothing delivered for 30 s" in decision.reason
    assert decision.memory.proven == 1000.0


@pytest.mark.parametrize(
    ("unit", "state"),
    [
        ({"active_state": "activating", "sub_state": "start-post"}, lv.STARTING),
        ({"active_state": "activating", "sub_state": "auto-restart", "main_pid": 0}, lv.STARTING),
        ({"active_state": "inactive", "sub_state": "dead", "job": True}, lv.STARTING),
        ({"active_state": "inactive", "sub_state": "dead"}, lv.STOPPED),
        ({"active_state": "deactivating", "sub_state": "stop-sigterm"}, lv.STOPPED),
        ({"active_state": "failed", "sub_state": "failed"}, lv.STOPPED),
        ({"load_state": "not-found", "active_state": "inactive"}, lv.STOPPED),
        ({"active_state": "", "error": "bus"}, lv.UNKNOWN),
    ],
)
def test_what_does_not_run_is_never_restarted(unit, state):
    """Even after any number of failures: nobody restarts what somebody stopped, or what systemd is starting."""
    memory = replace(KNOWN, failures=99)
    decision = lv.judge(seen(unit=replace(RUNNING, **unit), http=None), memory, OPTIONS)
    assert (decision.state, decision.action) == (state, lv.NOTHING)


def test_the_maintenance_mark_stops_everything():
    mark = maintenance.Mark(9999.0, "deployment")
    decision = lv.judge(seen(mark=mark), replace(KNOWN, failures=2), OPTIONS)
    assert states(decision) == (lv.MAINTENANCE, lv.NOTHING, 0)
    assert decision.reason == "deployment"


# ------------------------------------------------------------------------------------------------ busy or dead


def test_answers_to_others_are_work_for_as_long_as_they_last():
    marks = ("generation_tokens_total{mode=a}", "generation_tokens_total{mode=b}", "loads.0.num_used_tokens")
    reason = lv.judge(seen(http=SILENT, moved=marks, counted=True), KNOWN, OPTIONS).reason
    assert reason == "/health: timeout after 30 s, but it works (generation_tokens_total)"
    memory = KNOWN
    for at in range(1030, 10000, 60):
        decision = lv.judge(seen(float(at), http=SILENT, moved=marks, counted=True), memory, OPTIONS)
        assert states(decision) == (lv.BUSY, lv.NOTHING, 0)
        memory = decision.memory
    assert memory.proven == 9970.0


def test_without_metrics_any_progress_is_work():
    memory = KNOWN
    for at in range(1030, 10000, 60):
        decision = lv.judge(seen(float(at), http=SILENT, moved=("journal",)), memory, OPTIONS)
        assert states(decision) == (lv.BUSY, lv.NOTHING, 0)
        memory = decision.memory


def test_a_scheduler_that_works_and_delivers_nothing_is_not_excused_for_ever():
    """A probe makes the scheduler work, also when what should bring the answer hangs."""
    memory, found = KNOWN, []
    for at in range(1030, 1031 + 60 * 8, 60):
        moved = ("journal", "realtime_tokens_total{mode=prefill}")
        decision = lv.judge(seen(float(at), http=SILENT, moved=moved, counted=True), memory, OPTIONS)
        found.append((decision.state, decision.action))
        memory = decision.memory
    assert found[:5] == [(lv.BUSY, lv.NOTHING)] * 5
    assert found[5:8] == [(lv.FAILING, lv.NOTHING)] * 2 + [(lv.FAILING, lv.RESTART)]


@pytest.mark.parametrize(
    "sign", [{"dead": ("pid 103 (sglang::detoken)",)}, {"stopped": ("pid 103 (sglang::detoken)",)}]
)
@pytest.mark.parametrize("moved", [("journal",), ("generation_tokens_total{}", "journal")])
@pytest.mark.parametrize("counted", [True, False])
def test_a_dead_or_stopped_part_is_not_excused_by_what_the_others_do(sign, moved, counted):
    decision = lv.judge(seen(http=SILENT, moved=moved, counted=counted, cpu_seconds=100.0, **sign), KNOWN, OPTIONS)
    assert states(decision) == (lv.FAILING, lv.NOTHING, 1)


def test_a_helper_that_ended_says_nothing_about_a_server_that_delivers():
    decision = lv.judge(
        seen(http=SILENT, moved=("generation_tokens_total{}",), counted=True, dead=("pid 99 (python3)",)),
        KNOWN,
        OPTIONS,
    )
    assert states(decision) == (lv.BUSY, lv.NOTHING, 0)


def test_a_long_prefill_is_busy_by_its_processor_time_but_not_for_ever():
    """One forward pass can count nothing for minutes; a collective that hangs burns processor time too."""
    memory, seen_states = KNOWN, []
    for at in range(1030, 1031 + 60 * 8, 60):
        decision = lv.judge(seen(float(at), http=SILENT, cpu_seconds=25.0), memory, OPTIONS)
        seen_states.append((decision.state, decision.action))
        memory = decision.memory
    busy = [(lv.BUSY, lv.NOTHING)] * 5
    assert seen_states[:5] == busy
    assert seen_states[5:8] == [(lv.FAILING, lv.NOTHING)] * 2 + [(lv.FAILING, lv.RESTART)]


@pytest.mark.parametrize("sign", [{"dead": ("pid 101 (sglang)",)}, {"stopped": ("pid 101 (sglang)",)}])
def test_a_dead_or_stopped_process_is_not_excused_by_the_processor_time_of_the_others(sign):
    assert lv.judge(seen(cpu_seconds=100.0, **sign), KNOWN, OPTIONS).state == lv.FAILING


def test_an_idling_process_is_not_busy():
    assert lv.judge(seen(cpu_seconds=3.0), KNOWN, OPTIONS).state == lv.FAILING


def test_busy_by_processor_time_neither_adds_to_the_failures_nor_clears_them():
    decision = lv.judge(seen(cpu_seconds=25.0), replace(KNOWN, failures=2), OPTIONS)
    assert states(decision) == (lv.BUSY, lv.NOTHING, 2)


# ------------------------------------------------------------------------------------------------ restarts


def run_of_failures(memory, start, count, step=60.0):
    decisions = []
    for number in range(count):
        decision = lv.judge(seen(start + number * step), memory, OPTIONS)
        memory = decision.memory
        if decision.action == lv.RESTART:
            memory = replace(memory, failures=0, restarts=(*memory.restarts, start + number * step))
        decisions.append(decision.action)
    return decisions, memory


def test_only_failures_in_a_row_lead_to_a_restart():
    first = lv.judge(seen(1030.0), KNOWN, OPTIONS)
    second = lv.judge(seen(1090.0), first.memory, OPTIONS)
    alive = lv.judge(seen(1150.0, http=HEALTHY, answer=SPOKEN), second.memory, OPTIONS)
    third = lv.judge(seen(1210.0), alive.memory, OPTIONS)
    assert [d.memory.failures for d in (first, second, alive, third)] == [1, 2, 0, 1]
    assert {d.action for d in (first, second, alive, third)} == {lv.NOTHING}


def test_restarts_are_rationed_and_the_rest_is_said_once():
    actions, memory = run_of_failures(KNOWN, 1030.0, 12)
    assert actions == ["", "", lv.RESTART, "", "", lv.RESTART, "", "", lv.ESCALATE, "", "", ""]
    assert len(memory.restarts) == 2
    # An hour after the first restart there is one to spend again.
    later, __ = run_of_failures(memory, memory.restarts[0] + lv.HOUR, 1)
    assert later == [lv.RESTART]


def test_no_restarts_allowed_means_escalation_at_once():
    options = replace(OPTIONS, restarts_per_hour=0)
    assert lv.judge(seen(), replace(KNOWN, failures=2), options).action == lv.ESCALATE


def test_another_run_of_the_unit_begins_with_a_clean_count():
    memory = replace(KNOWN, failures=2, restarts=(900.0,))
    decision = lv.judge(seen(unit=replace(RUNNING, invocation_id="bb"), cpu_seconds=25.0), memory, OPTIONS)
    assert states(decision) == (lv.BUSY, lv.NOTHING, 0)
    assert decision.memory.restarts == (900.0,)
    assert decision.memory.proven == 1030.0


# ------------------------------------------------------------------------------------------------ signs of work


METRICS = """# HELP sglang:realtime_tokens_total Total number of tokens
sglang:realtime_tokens_total{mode="prefill_compute",model_name="tiny",tp_rank="0"} 26134.0
sglang:realtime_tokens_total{mode="decode",model_name="tiny",tp_rank="0"} 25816.0
sglang:num_used_tokens{model_name="tiny"} 12.0
sglang:num_queue_reqs{model_name="tiny"} 7.0
sglang:num_requests_total{model_name="tiny"} 99.0
"""
LOADS = {
    "loads": [
        {"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 5, "num_used_tokens": 77, "gen_throughput": 3.1}
    ]
}


def test_marks_are_figures_that_only_work_moves():
    journal = ["GET /health", "[12:00:01] Prefill batch, #new-seq: 1", "[12:00:02] Decode batch, #running-req: 1", "x"]
    marks = lv.read_marks(h.HttpAnswer(200, body=json.dumps(LOADS)), h.HttpAnswer(200, body=METRICS), journal)
    assert marks == {
        "loads.0.num_running_reqs": "2",
        "loads.0.num_used_tokens": "77",
        "realtime_tokens_total{mode=decode,model_name=tiny,tp_rank=0}": "25816.0",
        "realtime_tokens_total{mode=prefill_compute,model_name=tiny,tp_rank=0}": "26134.0",
        "num_used_tokens{model_name=tiny}": "12.0",
        "journal": "[12:00:02] Decode batch, #running-req: 1",
    }
    assert lv.moved(marks, marks) == []
    assert lv.moved(marks, {**marks, "loads.0.num_used_tokens": "78"}) == ["loads.0.num_used_tokens"]


def test_a_longer_queue_and_a_source_that_comes_or_goes_are_no_progress():
    before = lv.read_marks(h.HttpAnswer(200, body=json.dumps(LOADS)), None, [])
    LOADS["loads"][0]["num_waiting_reqs"] += 100
    after = lv.read_marks(h.HttpAnswer(200, body=json.dumps(LOADS)), h.HttpAnswer(200, body=METRICS), [])
    assert lv.moved(before, after) == []
    assert lv.moved(after, {}) == []


def test_the_first_batch_in_the_journal_is_progress():
    assert lv.moved({}, {"journal": "Prefill batch"}) == ["journal"]


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"loads": 3}', '{"loads": [3]}', '{"loads": [{}]}', "sglang:x"])
def test_answers_of_another_shape_give_no_marks(body):
    assert lv.read_marks(h.HttpAnswer(200, body=body), h.HttpAnswer(200, body=body), []) == {}
    assert lv.read_marks(SILENT, SILENT, []) == {}


def test_real_metrics_of_the_engine_are_understood():
    text = (Path(__file__).parent / "fixtures" / "health" / "cuda-0.5.11-metrics.txt").read_text()
    marks = lv.read_marks(None, h.HttpAnswer(200, body=text), [])
    names = {name.partition("{")[0] for name in marks}
    assert {
        "realtime_tokens_total",
        "generation_tokens_total",
        "prompt_tokens_total",
        "cuda_graph_passes_total",
    } <= names
    assert not names & {"num_requests_total", "num_queue_reqs"}
    key = "realtime_tokens_total{engine_type=unified,mode=decode,model_name=tiny,moe_ep_rank=0,pp_rank=0,tp_rank=0}"
    assert marks[key] == "25816.0"


def stat(folder, pid, name, state, ppid=1, ticks=(0, 0)):
    (folder / str(pid)).mkdir(parents=True, exist_ok=True)
    rest = [state, str(ppid), *["0"] * 9, str(ticks[0]), str(ticks[1]), *["0"] * 30]
    (folder / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(rest)}\n")


def test_processes_say_who_is_stopped_or_dead(tmp_path):
    stat(tmp_path, 100, "python3", "T", ticks=(100, 50))
    stat(tmp_path, 101, "sglang::schedul", "Z", 100, ticks=(50, 0))
    stat(tmp_path, 102, "nvcc (1) x", "Z", 100)
    stat(tmp_path, 103, "sglang::detoken", "S", 100, ticks=(0, 100))
    found = lv.read_processes({100, 101, 102, 103, 104}, tmp_path)
    assert found.stopped == ("pid 100 (python3)",)
    assert found.dead == ("pid 101 (sglang::schedul)",)
    assert found.cpu_seconds == 300 / lv.os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------------------ memory and settings


def test_memory_survives_the_file_and_a_broken_file_is_a_first_probe(tmp_path):
    path = lv.memory_path(UNIT, tmp_path)
    assert path.name == "sglang-kimi.liveness.json"
    memory = replace(KNOWN, failures=2, restarts=(1.0, 2.5), escalated=True)
    lv.save_memory(path, memory)
    assert lv.load_memory(path) == memory
    assert path.stat().st_mode & 0o777 == 0o644
    for text in ("", "[]", '{"failures": "many"}', '{"restarts": 3}', "\xff"):
        path.write_text(text, encoding="latin-1")
        assert lv.load_memory(path) == lv.Memory()
    path.write_text('{"later": 1, "failures": 2}')
    assert lv.load_memory(path) == lv.Memory(failures=2)
    assert lv.load_memory(tmp_path / "none") == lv.Memory()


SETTINGS = {
    "unit": UNIT,
    "endpoint": {
        "host": "127.0.0.1",
        "port": 31000,
        "url": "http://127.0.0.1:31000",
        "served_model_name": "kimi-k2.5",
    },
    "state_dir": "/var/lib/sglang-kimi",
    "liveness": {"failures": 4, "probe_timeout": 35},
    "incident": {"keep": 3, "command": ["/usr/bin/logger", "{folder}"]},
}


def test_options_come_from_the_settings_file():
    options = lv.options_from(SETTINGS)
    assert (options.unit, options.port, options.model) == (UNIT, 31000, "kimi-k2.5")
    assert (options.failures, options.probe_timeout, options.busy_limit) == (4, 35.0, 300.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"liveness": {"failures": 0}}, "liveness.failures is 0, expected 1 or more"),
        ({"liveness": {"probe_timeout": 0}}, "liveness.probe_timeout is 0.0, expected more than 0"),
        ({"liveness": {"restarts_per_hour": -1}}, "liveness.restarts_per_hour is -1, expected 0 or more"),
        ({"liveness": {"busy_limit": float("nan")}}, "liveness.busy_limit is nan"),
        ({"liveness": {"failures": "x"}}, "the settings cannot be used"),
        ({"liveness": [1]}, "the settings cannot be used"),
        ({"endpoint": {}}, "the settings cannot be used (KeyError: 'host')"),
    ],
)
def test_wrong_settings_are_one_clear_error(change, words, tmp_path, capsys):
    with pytest.raises(lv.LivenessError) as error:
        lv.options_from({**SETTINGS, **change})
    assert words in str(error.value)
    file = tmp_path / "sglang-kimi.json"
    file.write_text(json.dumps({**SETTINGS, **change}))
    with pytest.raises(SystemExit) as ended:
        lv.main(["--settings", str(file)])
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ the whole probe


class Clock:
    def __init__(self):
        self.now = 5000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Answer:
    def __init__(self, host, answer):
        self.host, self.answer = host, answer

    def wait(self, seconds):
        if self.answer is None or self.answer.seconds > seconds:
            self.host.clock.now += seconds
            return None
        self.host.clock.now += self.answer.seconds
        return self.answer

    def abort(self):
        self.host.aborted += 1


class Host:
    """A made-up host: systemd, the server's answers and /proc."""

    def __init__(self, tmp_path):
        self.clock = Clock()
        self.proc, self.run_dir = tmp_path / "proc", tmp_path / "run"
        self.unit = RUNNING
        self.http = {"/health": HEALTHY, "/v1/chat/completions": SPOKEN, "/v1/loads": SILENT, "/metrics": SILENT}
        self.asked, self.commands, self.said, self.kept, self.told = [], [], [], [], []
        self.aborted = 0
        self.dies = True
        self.journal = "nothing"
        (self.proc / "net").mkdir(parents=True)
        # 127.0.0.1:30000 listening, inode 4242, held by the main process.
        row = "   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 0 100"
        (self.proc / "net" / "tcp").write_text(f"head\n{row}\n")
        stat(self.proc, 100, "python3", "S")
        stat(self.proc, 101, "sglang::schedul", "S", 100)
        (self.proc / "100" / "fd").mkdir()
        (self.proc / "100" / "fd" / "3").symlink_to("socket:[4242]")

    def run(self, argv, _timeout):
        if argv[:2] == ["systemctl", "show"] and "-P" in argv:
            return h.CommandResult(0, "always\n")
        if argv[:2] == ["systemctl", "show"]:
            unit = self.unit
            values = {
                "LoadState": unit.load_state,
                "ActiveState": unit.active_state,
                "SubState": unit.sub_state,
                "MainPID": unit.main_pid,
                "InvocationID": unit.invocation_id,
            }
            return h.CommandResult(0, "".join(f"{key}={value}\n" for key, value in values.items()))
        if argv[0] == "journalctl":
            return h.CommandResult(0, self.journal)
        self.commands.append(argv)
        if argv[:2] == ["systemctl", "kill"] and self.dies:
            self.unit = replace(self.unit, active_state="activating", sub_state="auto-restart", main_pid=0)
        return h.CommandResult(0)

    def request(self, _host, _port, _method, path, body, _limit):
        self.asked.append((path, body))
        return Answer(self, self.http[path])

    def collect(self, _file, reason, details, _limit):
        self.kept.append((reason, details))
        return Path("/incidents/one"), ""

    def tell(self, _options, folder, reason, details):
        self.told.append((str(folder), reason, details))
        return []

    def probe(self):
        return lv.Probe(
            OPTIONS, incident.Options(), Path("/etc/settings.json"), run=self.run, request=self.request, clock=self.clock,
            wall=lambda: self.clock.now + 1e9, sleep=self.clock.sleep, say=self.said.append, collect=self.collect,
            tell=self.tell, proc=self.proc, cgroups=self.proc / "none", run_dir=self.run_dir,
        )  # fmt: skip

    def probes(self, count):
        found = []
        for __ in range(count):
            found.append(self.probe().once())
            self.clock.now += 30
        return found


@pytest.fixture
def made(tmp_path):
    return Host(tmp_path)


def test_a_healthy_server_costs_two_sampled_tokens_and_not_a_line(made):
    decision = made.probes(2)[1]
    assert decision.state == lv.ALIVE
    (body,) = [body for path, body in made.asked[:4] if path == "/v1/chat/completions"]
    assert (body["model"], body["max_tokens"]) == ("tiny", 2)
    assert body["temperature"] > 0
    assert made.said == made.commands == made.kept == []
    assert lv.load_memory(lv.memory_path(UNIT, made.run_dir)).state == lv.ALIVE


def test_a_dead_scheduler_is_killed_with_the_evidence_kept_first(made):
    """0.5.9: /health 503 after 20 s each, /metrics and /v1/models stay 200."""
    made.probes(1)
    stat(made.proc, 101, "sglang::schedul", "Z", 100)
    made.http.update({"/health": UNHEALTHY, "/metrics": h.HttpAnswer(200, body=METRICS)})
    decisions = made.probes(3)
    assert [d.memory.failures for d in decisions] == [1, 2, 0]
    assert made.commands == [["systemctl", "kill", "-s", "SIGKILL", "--", UNIT]]
    assert "pid 101 (sglang::schedul) is dead" in made.said[0]
    assert "failing 1 of 3" in made.said[0]
    assert made.kept[0][0] == "liveness"
    assert made.told == [("/incidents/one", "liveness", made.kept[0][1])]
    # No generation is sent to a server that cannot answer: a stuck request would keep SIGTERM from ever ending.
    assert [path for path, __ in made.asked].count("/v1/chat/completions") == 1
    # Starting again takes its time, and is left alone.
    assert {d.state for d in made.probes(5)} == {lv.STARTING}
    assert len(made.commands) == 1


def test_every_answer_may_hang_and_the_probe_still_ends(made):
    made.http = dict.fromkeys(made.http)
    stat(made.proc, 100, "python3", "T")
    began = made.clock.now
    decision = made.probe().once()
    assert decision.state == lv.FAILING
    assert "pid 100 (python3) is stopped" in decision.reason
    assert "/health: timeout after 30 s" in decision.reason
    assert made.clock.now - began < OPTIONS.probe_timeout + 2 * lv.MARKS_TIMEOUT + 1
    assert made.aborted == len(made.asked)


def test_a_queue_that_moves_is_not_dead(made):
    made.http["/v1/chat/completions"] = None
    ticker = iter(range(100))

    def request(_host, _port, _method, path, body, _limit):
        made.asked.append((path, body))
        if path == "/v1/loads":
            loads = {"loads": [{"dp_rank": 0, "num_running_reqs": 8, "num_used_tokens": next(ticker)}]}
            return Answer(made, h.HttpAnswer(200, body=json.dumps(loads)))
        return Answer(made, made.http[path])

    made.request = request
    assert {d.state for d in made.probes(6)} == {lv.BUSY}
    assert made.commands == made.kept == []
    assert len(made.said) == 1


def test_a_mark_or_a_stop_during_the_collection_saves_the_server(made):
    made.http["/health"] = UNHEALTHY
    made.probes(2)

    def collect(*_arguments):
        maintenance.mark(UNIT, 600, "deployment", made.run_dir, made.clock.now + 1e9)
        return Path("/incidents/one"), ""

    made.collect = collect
    made.probes(1)
    assert made.commands == []
    assert "left alone" in made.said[-1]
    assert made.probes(1)[0].state == lv.MAINTENANCE
    maintenance.clear(UNIT, made.run_dir)
    made.unit = replace(RUNNING, active_state="inactive", sub_state="dead", main_pid=0)
    assert {d.state for d in made.probes(4)} == {lv.STOPPED}
    assert made.commands == []


def test_a_process_that_cannot_be_killed_is_named_as_such(made):
    made.http["/health"], made.dies = SILENT, False
    made.probes(3)
    assert made.told[0][1] == "unkillable"
    assert "only a reboot helps" in made.said[-1]


def test_when_restarts_are_used_up_the_server_is_left_and_people_are_told_once(made):
    made.http["/health"] = UNHEALTHY
    for run in ("bb", "cc", "dd"):
        made.probes(4)
        made.unit = replace(RUNNING, invocation_id=run)
    made.probes(2)
    assert len(made.commands) == 2
    assert [reason for reason, __ in made.kept] == ["liveness", "liveness", "liveness-limit"]
    assert "as often as allowed" in made.told[-1][2]


def test_a_unit_that_must_not_restart_by_itself_is_started_again(made):
    made.http["/health"] = UNHEALTHY
    plain = made.run
    made.run = lambda argv, limit: h.CommandResult(0, "no\n") if "-P" in argv else plain(argv, limit)
    made.probes(3)
    assert made.commands[1:] == [["systemctl", "--no-block", "start", "--", UNIT]]


def test_without_an_incident_the_restart_happens_all_the_same(made):
    made.http["/health"] = UNHEALTHY
    made.collect = lambda *_arguments: (None, "no space")
    made.probes(3)
    assert made.commands
    assert "no incident was kept: no space" in made.said
