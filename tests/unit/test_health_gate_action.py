"""The action plugin with a stand-in for the module: progress lines, total time, connection loss."""

import time
from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible_collections.gpuserve.sglang.plugins.action import health_gate as action
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import doing_text
from ansible_collections.gpuserve.sglang.plugins.plugin_utils import watch


def seen(state, phase="", status="", **more):
    return {
        "doing": doing_text(state, phase, status),
        "usual": 570.0 if status else 0.0,
        "state": state,
        "ready": state == "ready",
        "phase": phase,
        "last_status": status,
        "elapsed": 1.0,
        "msg": state,
        "_since": {"main_pid": 7, "elapsed": 1.0},
        **more,
    }


class Module:
    """Returns (or raises) one answer after the other; the last one stays."""

    def __init__(self, answers, takes=0.0):
        self.answers, self.takes, self.calls = list(answers), takes, []

    def __call__(self, module_name=None, module_args=None, task_vars=None):
        assert module_name == "gpuserve.sglang.health_gate"
        self.calls.append(module_args)
        time.sleep(self.takes)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)


@pytest.fixture
def play(monkeypatch):
    lines = []
    resets = []
    monkeypatch.setattr(action.display, "display", lines.append)
    monkeypatch.setattr(action, "RETRY_PAUSE", 0.05)

    def run(module, check_mode=False, reset=lambda: resets.append(1), **arguments):
        plugin = action.ActionModule.__new__(action.ActionModule)
        plugin._task = SimpleNamespace(args=arguments, check_mode=check_mode, async_val=0, action="health_gate")
        plugin._connection = SimpleNamespace(reset=reset)
        plugin._execute_module = module
        monkeypatch.setattr(watch.ActionBase, "run", lambda *_args, **_kwargs: {})
        return plugin.run(task_vars={"inventory_hostname": "box"})

    run.lines, run.resets = lines, resets
    return run


def test_one_line_for_each_change_and_none_for_a_counter(play):
    module = Module(
        [
            seen("refused", "weights 1/64", "refused"),
            seen("refused", "weights 12/64", "refused"),
            seen("warming", "warm-up", "503"),
            seen("generating", "warm-up", "200"),
            seen("ready", "warm-up", "200", elapsed=105.0),
        ]
    )
    result = play(module)
    assert result["ready"]
    assert play.lines == [
        "[sglang-kimi on box] 0/900 s, usually 570 s: loading weights 1/64",
        "[sglang-kimi on box] 0/900 s, usually 570 s: warming up (503)",
        "[sglang-kimi on box] 0/900 s, usually 570 s: generating (the first sampled request compiles kernels)",
        "[sglang-kimi on box] 105/900 s, usually 570 s: ready (200)",
    ]


def test_silence_is_broken_while_a_window_lasts(play, monkeypatch):
    monkeypatch.setattr(action, "PROGRESS_EVERY", 0.5)
    module = Module([seen("warming", "warm-up", "503"), seen("ready")], takes=1.6)
    began = time.monotonic()
    play(module, unit="", port=31000, timeout="60")
    assert play.lines[0] == "[127.0.0.1:31000 on box] 0/60 s: waiting for the first answer"
    # Two windows of 1.6 s with a line every half second: what is known is said again, but not all the time.
    again = [line for line in play.lines if line.endswith("/60 s, usually 570 s: warming up (503)")]
    assert len(again) >= 2
    assert len(play.lines) <= 5 + 2 * (time.monotonic() - began)


def test_total_time_and_knowledge_go_from_window_to_window(play, monkeypatch):
    now = [100.0]
    # A clock that moves when the module works, so that the numbers are exact however busy this machine is.
    monkeypatch.setattr(action, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    module = Module([seen("warming"), seen("warming"), seen("ready")])

    def works(**arguments):
        now[0] += 5.0
        return module(**arguments)

    result = play(works, timeout=60)
    first, second, third = (call["_since"] for call in module.calls)
    assert [since["elapsed"] for since in (first, second, third)] == [0.0, 5.0, 10.0]
    assert "main_pid" not in first
    assert second["main_pid"] == third["main_pid"] == 7
    assert [call["_window"] for call in module.calls] == [1, 5, 5]
    assert all(call["timeout"] == 60 for call in module.calls)
    assert "_since" not in result


def test_failure_of_the_module_is_handed_on(play):
    module = Module([seen("warming"), seen("failed", failed=True, msg="sglang-kimi.service died")])
    result = play(module)
    assert (result["failed"], result["msg"]) == (True, "sglang-kimi.service died")
    assert play.lines[-1] == "[sglang-kimi on box] 1/900 s: failed"


def test_wrong_options_are_not_tried_again(play):
    module = Module([{"failed": True, "msg": "port is 99999, expected 1 to 65535"}])
    assert play(module, port=99999)["msg"].startswith("port is 99999")
    assert len(module.calls) == 1
    assert play.lines == []


@pytest.mark.parametrize(
    "loss",
    [
        AnsibleConnectionFailure("ssh: connection timed out"),
        {"unreachable": True, "msg": "gone"},
        {"failed": True, "module_stdout": "", "rc": 255, "msg": "no result"},
    ],
)
def test_lost_connection_comes_back(play, loss):
    module = Module([seen("warming", "warm-up", "503"), loss, loss, seen("ready", "", "200")])
    assert play(module)["ready"]
    assert len(play.resets) == 2
    assert sum("connection lost, trying again" in line for line in play.lines) == 1
    # What was known before the loss is what a restart during it is measured against.
    assert module.calls[-1]["_since"]["main_pid"] == 7


def test_lost_connection_that_stays_lost_is_unreachable_at_the_end_of_the_budget(play):
    module = Module([seen("warming"), AnsibleConnectionFailure("no route to host")])
    began = time.monotonic()
    result = play(module, timeout=0.5)
    assert 0.3 < time.monotonic() - began < 10  # not its FIRST_CONTACT of a minute
    assert result["unreachable"]
    assert result["msg"].startswith("the connection was lost while the gate waited")
    assert result["msg"].endswith("no route to host")


def test_host_that_never_answered_is_given_up_early(play, monkeypatch):
    monkeypatch.setattr(action, "FIRST_CONTACT", 0.3)
    result = play(Module([AnsibleConnectionFailure("no such host")]))
    assert result["unreachable"]
    assert result["msg"].startswith("the connection could not be made")


def test_a_module_that_crashed_is_no_lost_connection(play):
    crash = {"failed": True, "module_stdout": "Traceback ...", "msg": "crash"}
    module = Module([seen("warming"), crash])
    assert play(module)["msg"] == "crash"


def test_check_mode_is_one_call_without_windows(play):
    module = Module([seen("refused")])
    result = play(module, check_mode=True)
    assert module.calls == [{}]
    assert result["state"] == "refused"
    assert "_since" not in result


def test_reset_that_fails_does_not_end_the_gate(play):
    def reset():
        raise RuntimeError("no control socket")

    module = Module([seen("warming"), AnsibleConnectionFailure("x"), seen("ready")])
    assert play(module, reset=reset)["ready"]
