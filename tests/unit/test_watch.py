"""Action plugins that say what goes on: the lines of page_cache, and those while one long call of gpu_release lasts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpuserve.sglang.plugins.action import gpu_release, page_cache
from ansible_collections.gpuserve.sglang.plugins.plugin_utils import watch


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    shown: list[str] = []
    monkeypatch.setattr(watch.display, "display", shown.append)
    monkeypatch.setattr(watch.ActionBase, "run", lambda *_args, **_kwargs: {})
    return shown


def play(plugins: Any, module: Any, check_mode: bool = False, **arguments: Any) -> dict[str, Any]:
    plugin = plugins.ActionModule.__new__(plugins.ActionModule)
    plugin._task = SimpleNamespace(args=arguments, check_mode=check_mode)
    plugin._execute_module = module
    return plugin.run(task_vars={"inventory_hostname": "box"})


def test_weights_are_read_in_windows_with_a_line_after_each(lines: list[str]) -> None:
    since = {"done": 30 * 10**9, "limit": 90 * 10**9}
    answers = [{"state": "reading", "seconds": 10.0, "_since": since}, {"state": "done", "seconds": 20.0}]
    calls = []

    def module(module_name: str, module_args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        assert (module_name, task_vars) == ("gpuserve.sglang.page_cache", {"inventory_hostname": "box"})
        calls.append(module_args)
        return answers.pop(0)

    assert play(page_cache, module, folders=["/m"])["state"] == "done"
    assert calls == [{"folders": ["/m"], "_window": 10.0}, {"folders": ["/m"], "_window": 10.0, "_since": since}]
    assert lines == ["[page cache on box] 10 s: 30.0 GB/90.0 GB, 3.0 GB/s, 20 s left"]


def test_a_long_drain_is_not_silent(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends when two lines were printed, however busy this machine is."""
    monkeypatch.setattr(gpu_release, "PROGRESS_EVERY", 0.3)
    calls = []

    def module(module_name: str, module_args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        assert module_name == "gpuserve.sglang.gpu_release"
        calls.append(module_args)
        enough = threading.Event()
        while len(lines) < 2 and not enough.wait(0.05):
            pass
        return {"changed": True}

    given = {"state": "released", "term_timeout": "600", "kill_timeout": 10}
    assert play(gpu_release, module, **given) == {"changed": True}
    assert calls == [given]
    text = "/640 s: requests finish (at most 600 s), then processes end and memory comes back"
    assert all(line.startswith("[GPUs of box] ") and line.endswith(text) for line in lines)


@pytest.mark.parametrize(("check_mode", "state"), [(True, "released"), (False, "reported"), (False, None)])
def test_a_look_says_nothing(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, check_mode: bool, state: str | None
) -> None:
    def no(*_: Any) -> None:
        raise AssertionError("nothing takes long here")

    monkeypatch.setattr(gpu_release, "Progress", no)
    given = {"state": state} if state else {}
    assert play(gpu_release, lambda **call: {"got": call["module_args"]}, check_mode, **given) == {"got": given}
    assert lines == []


def test_the_thread_ends_with_the_call_also_when_that_fails(lines: list[str]) -> None:
    def lost(**_: Any) -> dict[str, Any]:
        raise ConnectionError("gone")

    before = threading.active_count()
    with pytest.raises(ConnectionError):
        play(gpu_release, lost, state="released", term_timeout="soon")
    assert threading.active_count() == before
    assert lines == []
