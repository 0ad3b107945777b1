"""The controller's side of the lock: a living holder is refused by name, a dead one's lock is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpuserve.sglang.plugins.action import deployment_lock as action
from ansible_collections.gpuserve.sglang.plugins.module_utils.lock import KEYS, holder
from ansible_collections.gpuserve.sglang.plugins.plugin_utils import watch


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    monkeypatch.setattr(action.display, "display", lines.append)
    monkeypatch.setattr(watch.ActionBase, "run", lambda *_args, **_kwargs: {})

    def run(answers: list[dict[str, Any]], check_mode: bool = False, **arguments: Any) -> tuple[dict[str, Any], list]:
        calls: list[dict[str, Any]] = []

        def module(module_name: str = "", module_args: Any = None, task_vars: Any = None) -> dict[str, Any]:
            assert module_name == "gpuserve.sglang.deployment_lock"
            calls.append(module_args)
            return answers.pop(0)

        plugin = action.ActionModule.__new__(action.ActionModule)
        plugin._task = SimpleNamespace(args=arguments, check_mode=check_mode, async_val=0, action="deployment_lock")
        plugin._execute_module = module
        return plugin.run(task_vars={"inventory_hostname": "box"}), calls

    run.lines = lines  # type: ignore[attr-defined]
    return run


def seen(**more: Any) -> dict[str, Any]:
    return {"changed": False, "held": False, "token": "", "broken": {}, "holder": {}, **more}


def test_it_is_taken_in_the_name_of_the_play_s_process(play) -> None:
    result, (call,) = play([seen(held=True, token="t")])
    assert "failed" not in result and result["token"] == "t"
    assert set(call["_holder"]) == set(KEYS)
    assert call["_holder"]["pid"] == os.getppid()


def test_a_living_holder_is_refused_by_name(play) -> None:
    mine = {**holder(os.getpid(), ["/bin/ansible-playbook", "site.yml"]), "taken": 1.8e9, "until": 4e9}
    result, calls = play([seen(holder=mine)])
    assert len(calls) == 1
    assert result["failed"]
    for words in (
        "Another play works on box",
        "ansible-playbook site.yml",
        f"process {os.getpid()}",
        "since 2027-01-15",
    ):
        assert words in result["msg"]


def test_a_dead_holder_s_lock_is_broken_at_once(play) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        dead = {**holder(child.pid, ["ansible-playbook", "site.yml"]), "taken": 1.8e9, "until": 4e9}
    result, calls = play([seen(holder=dead), seen(held=True, token="t", broken=dead)])
    assert calls[1]["_dead"] == dead["token"]
    assert "failed" not in result
    assert "took over the lock" in play.lines[0]


def test_who_was_faster_in_between_is_refused_all_the_same(play) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        dead = {**holder(child.pid, ["ansible-playbook"]), "taken": 1.8e9, "until": 4e9}
    other = {**dead, "controller": "elsewhere", "name": "ops-2"}
    result, __ = play([seen(holder=dead), seen(holder=other)])
    assert result["failed"] and "ops-2" in result["msg"]


@pytest.mark.parametrize(("check_mode", "state"), [(True, "held"), (False, "released"), (True, "released")])
def test_check_mode_and_release_go_straight_to_the_module(play, check_mode: bool, state: str) -> None:
    result, (call,) = play([seen()], check_mode=check_mode, state=state, token="t")
    assert call == {"state": state, "token": "t"}
    assert "failed" not in result
