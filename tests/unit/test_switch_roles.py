"""Which steps the role sglang_service takes when something fails: its task files run for real, on modules that are played.

One run of Ansible for each entry point, with one host for each case. A case says what the modules answer; what they were asked is
kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles" / "sglang_service"
A, B, C = ("a" * 64, "b" * 64, "c" * 64)

#: WANT_JSON: the arguments come as a file. Without an answer for the state that is asked for it is the one for all of them.
MODULE = """#!/usr/bin/python3
# WANT_JSON
import json, os, sys
name, folder, host = {name!r}, {folder!r}, os.environ["CASE"]
given = json.load(open(sys.argv[1]))
with open(f"{{folder}}/{{host}}.asked", "a") as stream:
    stream.write(json.dumps([name, given]) + "\\n")
with open(f"{{folder}}/{{host}}.json") as stream:
    answers = json.load(stream).get(name, {{}})
keys = (f"{{given.get('state', '')}}/{{given.get('stop', '')}}", given.get("state", ""), "")
answer = next((answers[key] for key in keys if key in answers), {{}})
if isinstance(answer, list):
    asked = [line for line in open(f"{{folder}}/{{host}}.asked") if json.loads(line)[0] == name]
    answer = answer[min(len(asked), len(answer)) - 1]
print(json.dumps({{"changed": False, "failed": "msg" in answer, **answer}}))
"""

#: Ansible's own words: each result with a message, and which hosts failed in the end.
CALLBACK = """
import json
from ansible.plugins.callback import CallbackBase
class CallbackModule(CallbackBase):
    CALLBACK_VERSION, CALLBACK_TYPE, CALLBACK_NAME = 2.0, "aggregate", "told"
    def tell(self, name, *words):
        with open(f"{folder}/{{name}}.told", "a") as stream:
            stream.write(json.dumps(words) + "\\n")
    def told(self, result, failed=False):
        self.tell(result._host.get_name(), failed, str(result._result.get("msg", "")))
    v2_runner_on_ok = told
    def v2_runner_on_failed(self, result, ignore_errors=False):
        self.told(result, True)
    def v2_playbook_on_stats(self, stats):
        for name in stats.processed:
            self.tell(name, bool(stats.summarize(name)["failures"]))
"""


def plan(hash_: str, **more: Any) -> dict[str, Any]:
    unit = {"name": "engine", "timeout_start_sec": 300, "timeout_stop_sec": 40}
    endpoint = {"host": "127.0.0.1", "port": 1, "served_model_name": "m"}
    given = {"hash": hash_, "process_hash": hash_, "profile": "p", "unit": unit, "endpoint": endpoint, "env": {}}
    return {**given, "command": ["/bin/sh", "-m", "engine"], **more}


def entry(hash_: str, **more: Any) -> dict[str, Any]:
    return {"id": hash_[:12], "unit": hash_, "plan": plan(hash_), "settings": {}, "proven": None, **more}


def now(hash_: str = B, **last_good: Any) -> dict[str, Any]:
    """A server that serves by the last good deployment."""
    good = {"id": hash_[:12], "error": "", "untrusted": False, "differing": [], "unproven": False, **plan(hash_)}
    return {
        "unit": "engine.service", "exists": True, "active_state": "active", "main_pid": 7, "reasons": [], "changes": [], "command": ["x"],
        "environment": {}, "drop_ins": [], "invocation_id": "i", "last_start": {}, "last_good": {**good, **last_good},
        "installed": {"error": "", **plan(hash_)},
    }  # fmt: skip


def restored(hash_: str, *files: str, spared: bool = False) -> dict[str, Any]:
    return {"restored": {"id": hash_[:12], "plan": plan(hash_), "files": files}, "spared": spared, "incident": "/i"}


WENT = {"last_start": {"when": 1, "seconds_to_ready": 1, "seconds_away": None}}
RECORD = {"last_good": entry(B), "previous_good": entry(A), "tuning": {}, **WENT}
UNPROVEN = entry(B, proven={"unit": "u", "plan": plan(B, hash="old"), "settings": {}})
PASSED, FAILED = {"elapsed": 1.0, "unit": {}}, {"msg": "the gate failed", "spared": False}
STOPPED = {"spared": False, "incident": "/i"}


def case(**answers: Any) -> dict[str, Any]:
    """What the modules answer, over a server whose gate passes."""
    found: dict[str, Any] = {
        "deployment_lock": {"": {"token": "t"}},
        "deployment_record": {"": RECORD},
        "service_info": {"": now()},
        "health_gate": {"": PASSED},
        "service_switch": {"": {}, "stopped": STOPPED, "started": {"started_at": 1.0}},
    }
    for name, given in answers.items():
        found[name] = {**found.get(name, {}), **given} if isinstance(given, dict) else given
    return found


def stopped_now(**last_good: Any) -> dict[str, Any]:
    return {**now(**last_good), "active_state": "failed", "main_pid": 0, "reasons": ["the unit is failed"]}


GONE = entry(A, plan=plan(A, command=["/nonexistent/python"]))
OTHER_FILE = {"differing": ["/etc/systemd/system/engine.service"]}

ROLLBACK = {
    "goes-back": case(service_switch={"restored": restored(A, "f")}),
    "program-gone": case(deployment_record={"": {**RECORD, "previous_good": GONE}}),
    "not-restored": case(service_switch={"restored": {"msg": "No space left", "restored": {}, "spared": False}}),
    "target-fails": case(
        service_switch={"restored": [restored(A, "f"), {}, {}, restored(B, "f")]}, health_gate={"": [FAILED, PASSED]}
    ),
    "other-unit": case(
        service_info={"": now(**OTHER_FILE)}, service_switch={"restored": restored(B, "f", spared=True)}
    ),
    "other-unit-hangs": case(
        service_info={"": now(**OTHER_FILE)},
        service_switch={"restored": restored(B, "f", spared=True)},
        health_gate={"": FAILED},
    ),
    "loops": case(
        service_info={"": {**now(unproven=True), "active_state": "activating"}},
        deployment_record={"": {**RECORD, "last_good": UNPROVEN}},
        service_switch={"restored": restored(B, "f")},
    ),
}
START = {
    "starts": case(service_info={"": stopped_now()}),
    "never-served": case(service_info={"": {**stopped_now(), "installed": {"error": "", **plan(C)}}}),
    "by-half": case(service_info={"": {**stopped_now(), "installed": {"error": "unit and plan differ", **plan(B)}}}),
    "without-plan": case(service_info={"": {**stopped_now(), "installed": None}}),
}
RESTART = {**now(), "reasons": ["another plan"]}
DEPLOY = {
    # What the inventory asks for is C; `fails` is the task file that fails.
    "deploys": case(service_info={"": RESTART}),
    "timer-masked": case(
        fails="liveness", service_info={"": RESTART}, service_switch={"restored/False": restored(B, "f")}
    ),
    "nothing-written": case(
        fails="configure", service_info={"": RESTART}, service_switch={"restored/False": restored(B)}
    ),
    "first-one": case(fails="liveness", service_info={"": {**stopped_now(), "last_good": None}}),
    "disk-full": case(
        fails="configure", service_info={"": RESTART}, service_switch={"restored/False": {"msg": "No space left"}}
    ),
    "hangs": case(
        service_info={"": now(C)}, health_gate={"": FAILED}, service_switch={"restored/False": restored(C, "f")}
    ),
    "fails": case(
        service_info={"": RESTART}, health_gate={"": [FAILED, PASSED]}, service_switch={"restored": restored(B, "f")}
    ),
    "never-stopped": case(
        service_info={"": RESTART},
        service_switch={
            "stopped": {"msg": "systemd does not tell"},
            "restored": restored(B, "f", spared=True),
        },
    ),
    "unit-fails": case(
        service_info={"": stopped_now(hash_=C)},
        health_gate={"": [FAILED, PASSED]},
        service_switch={"restored": restored(C, "f")},
    ),
    "same-files-fail": case(
        service_info={"": stopped_now(hash_=C)}, health_gate={"": FAILED}, service_switch={"restored": restored(C)}
    ),
    "no-way-back": case(
        service_info={"": RESTART},
        health_gate={"": FAILED},
        service_switch={"restored": {"msg": "damaged", "restored": {}, "spared": False}},
    ),
    "not-recorded": case(
        service_info={"": RESTART},
        health_gate={"": [FAILED, PASSED]},
        service_switch={"restored": restored(B, "f"), "stopped": [STOPPED, {}, {**STOPPED, "spared": True}]},
        deployment_record={"": {"msg": "the disk is full"}},
    ),
}


class Played:
    """What one case asked of the modules, and how it ended."""

    def __init__(self, folder: Path, name: str) -> None:
        lines = (folder / f"{name}.asked").read_text().splitlines()
        self.asked = [tuple(entry) for entry in map(json.loads, lines)]
        *told, (self.failed,) = map(json.loads, (folder / f"{name}.told").read_text().splitlines())
        self.said = " ".join(" ".join(message for __, message in told).split())
        self.message = " ".join([message for failed, message in told if failed][-1].split()) if self.failed else ""

    def steps(self) -> list[str]:
        """The steps of the switch in order: ``restored last-good``, ``stopped``, ..."""
        found = []
        for module, given in self.asked:
            if module == "health_gate":
                found.append("gate")
            if module == "service_switch":
                words = [given["state"], given.get("record", ""), "" if given.get("stop", True) else "files only"]
                found.append(" ".join(filter(None, words)))
        return found

    def given(self, module: str, state: str | None = None) -> dict[str, Any]:
        """The arguments of the last call."""
        return [given for name, given in self.asked if name == module and state in (None, given.get("state"))][-1]


def played(tmp: Path, tasks_from: str, cases: dict[str, dict[str, Any]]) -> Callable[[str], Played]:
    collection = tmp / "collections" / "ansible_collections" / "gpuserve" / "sglang"
    (collection / "plugins" / "modules").mkdir(parents=True)
    for name in ("filter", "module_utils"):
        (collection / "plugins" / name).symlink_to(ROOT / "plugins" / name)
    shutil.copytree(ROLE, collection / "roles" / "sglang_service")
    tasks = collection / "roles" / "sglang_service" / "tasks"
    decide = [
        {"gpuserve.sglang.service_info": {"unit": "engine.service"}, "register": "__sglang_service_now"},
        {"ansible.builtin.set_fact": {"__sglang_service_switch": "{{ __sglang_service_now | gpuserve.sglang.switch_plan(deployment_plan) }}"}},
        {"ansible.builtin.set_fact": {"__sglang_service_fallback": "{{ __sglang_service_switch.fallback }}"}},
    ]  # fmt: skip
    # What changes a host for real is left out.
    for name in ("configure", "liveness", "gpus", "prepare"):
        fail = {"ansible.builtin.fail": {"msg": f"{name} failed"}, "when": f"fails | default('') == '{name}'"}
        (tasks / f"{name}.yml").write_text(yaml.safe_dump([fail]))
    (tasks / "decide.yml").write_text(yaml.safe_dump(decide))
    for name in ("deployment_lock", "deployment_record", "deployment_history", "service_info", "service_switch", "health_gate"):  # fmt: skip
        text = MODULE.format(name=name, folder=str(tmp))
        (collection / "plugins" / "modules" / f"{name}.py").write_text(text)
    (tmp / "callback").mkdir()
    (tmp / "callback" / "told.py").write_text(CALLBACK.format(folder=tmp))
    hosts = {}
    for name, answers in cases.items():
        (tmp / f"{name}.json").write_text(json.dumps(answers))
        hosts[name] = {"fails": answers.get("fails", "")}
    local = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3", "ansible_become": False}
    (tmp / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts, "vars": local}}))
    play = {
        "hosts": "all",
        "gather_facts": False,
        "environment": {"CASE": "{{ inventory_hostname }}"},
        "tasks": [
            {"ansible.builtin.include_role": {"name": "gpuserve.sglang.sglang_service", "tasks_from": tasks_from}}
        ],
        "vars": {"deployment_unit": {"name": "engine"}, "sglang_service_state_dir": str(tmp / "state")},
    }
    if tasks_from == "deploy":
        play["vars"]["deployment_plan"] = plan(C)
    (tmp / "play.yml").write_text(yaml.safe_dump([play]))
    (tmp / "ansible.cfg").write_text("[defaults]\n")
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(tmp / "collections"),
        "ANSIBLE_CONFIG": str(tmp / "ansible.cfg"),
        "ANSIBLE_CALLBACK_PLUGINS": str(tmp / "callback"),
        "ANSIBLE_CALLBACKS_ENABLED": "told",
        "ANSIBLE_LOCAL_TEMP": str(tmp / "local"),
        "ANSIBLE_REMOTE_TEMP": str(tmp / "remote"),
    }
    command = ["ansible-playbook", "-i", str(tmp / "hosts.yml"), str(tmp / "play.yml")]
    done = subprocess.run(command, cwd=tmp, env=environment, capture_output=True, text=True, check=False)
    assert all((tmp / f"{name}.told").exists() for name in cases), done.stdout + done.stderr
    return lambda name: Played(tmp, name)


@pytest.fixture(scope="module")
def rollback(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Played]:
    return played(tmp_path_factory.mktemp("rollback"), "operator_rollback", ROLLBACK)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Played]:
    return played(tmp_path_factory.mktemp("start"), "operator_start", START)


@pytest.fixture(scope="module")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Played]:
    return played(tmp_path_factory.mktemp("deploy"), "deploy", DEPLOY)


SWITCHED = ["stopped", "started", "gate"]


# --- rollback.yml -------------------------------------------------------------------------------------------------------


def test_the_operator_goes_back_to_the_deployment_before(rollback: Callable[[str], Played]) -> None:
    done = rollback("goes-back")
    assert (done.failed, done.steps()) == (False, ["restored previous-good", *SWITCHED])
    assert done.given("service_switch", "restored")["spare"] == A
    assert done.given("deployment_history")["rollback"]["left"]["hash"] == B


@pytest.mark.parametrize(
    ("name", "steps", "words"),
    [
        ("program-gone", [], "runs /nonexistent/python, which is gone; expected its release beside the others. Nothing was changed"),
        ("not-restored", ["restored previous-good"], "No space left engine.service was not stopped."),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_put_back_costs_nothing(
    rollback: Callable[[str], Played], name: str, steps: list[str], words: str
) -> None:
    done = rollback(name)
    assert (done.failed, done.steps()) == (True, steps)
    assert words in done.message


def test_a_target_that_fails_its_gate_is_taken_back(rollback: Callable[[str], Played]) -> None:
    done = rollback("target-fails")
    assert done.steps() == ["restored previous-good", *SWITCHED, "restored", *SWITCHED]
    assert done.given("service_switch", "restored")["spare"] == B
    assert "serves again with the last good one (bbbbbbbbbbbb" in done.message


def test_another_unit_under_the_last_good_process_is_what_the_operator_goes_back_from(
    rollback: Callable[[str], Played],
) -> None:
    """Not one deployment too far, and without a restart."""
    done = rollback("other-unit")
    assert (done.failed, done.steps()) == (False, ["restored last-good", "gate"])
    assert done.given("service_switch", "restored")["spare"] == B
    assert "the installed unit is not the recorded one (/etc/systemd/system/engine.service)" in done.said
    assert "nothing is restarted" in done.said and "it was not restarted" in done.said
    assert "start" not in done.given("deployment_record")
    assert done.given("deployment_history")["rollback"]["left"] == {}


def test_a_server_that_was_not_touched_is_not_stopped_for_its_gate(rollback: Callable[[str], Played]) -> None:
    done = rollback("other-unit-hangs")
    assert done.steps() == ["restored last-good", "gate"]
    assert done.message == "the gate failed engine.service was not stopped."


def test_a_unit_that_never_started_goes_back_to_the_files_that_did(rollback: Callable[[str], Played]) -> None:
    done = rollback("loops")
    assert (done.failed, done.steps()) == (False, ["restored last-good", *SWITCHED])
    assert "the unit is activating with other files than those of its last start that passed" in json.dumps(done.asked)
    assert done.given("deployment_record")["plan"]["hash"] == "old"


# --- start.yml ----------------------------------------------------------------------------------------------------------


def test_what_is_installed_is_started_by_its_own_plan(start: Callable[[str], Played]) -> None:
    done = start("starts")
    assert (done.failed, done.steps()) == (False, ["started", "gate", "serving"])
    assert done.given("health_gate")["timeout"] == 300


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("never-served", "installed with a deployment that never served (plan cccccccccccc, profile p)"),
        ("by-half", "installed by half: unit and plan differ"),
        ("without-plan", "installed without its plan"),
    ],
)
def test_what_never_served_is_not_started(start: Callable[[str], Played], name: str, words: str) -> None:
    done = start(name)
    assert (done.failed, done.steps()) == (True, [])
    assert words in done.message
    assert "expected the last good one (bbbbbbbbbbbb, profile p). Nothing was started. Run site.yml" in done.message
    assert "playbooks/rollback.yml to go back" in done.message


# --- site.yml -----------------------------------------------------------------------------------------------------------


def test_a_deployment_that_serves_is_recorded(deploy: Callable[[str], Played]) -> None:
    done = deploy("deploys")
    assert (done.failed, done.steps()) == (False, SWITCHED)
    assert done.given("deployment_record")["start"]["seconds_to_ready"]


@pytest.mark.parametrize(
    ("name", "steps", "words"),
    [
        ("timer-masked", ["restored files only"], "liveness failed engine.service was not touched. The files of the last good "
         "deployment (bbbbbbbbbbbb) were put back: f."),
        ("nothing-written", ["restored files only"], "The files of the last good deployment (bbbbbbbbbbbb) are in place."),
        ("first-one", [], "No deployment that served is on record, so that the files that were written stay;"),
        ("disk-full", ["restored files only"], "could not be put back: No space left What is in place may never have served"),
        ("hangs", ["gate", "restored files only"], "the gate failed engine.service was not touched. The files of the last good "
         "deployment (cccccccccccc) were put back: f."),
    ],
)  # fmt: skip
def test_a_failure_that_touched_no_server_puts_the_files_back(
    deploy: Callable[[str], Played], name: str, steps: list[str], words: str
) -> None:
    done = deploy(name)
    assert (done.failed, done.steps()) == (True, steps)
    assert words in done.message


@pytest.mark.parametrize(("name", "spare", "back"), [("fails", B, B), ("unit-fails", "", C)])
def test_what_fails_its_gate_is_taken_back(deploy: Callable[[str], Played], name: str, spare: str, back: str) -> None:
    """The same process with another unit has the files of its last good start to go back to."""
    done = deploy(name)
    assert done.steps() == [*SWITCHED, "restored", *SWITCHED]
    assert done.given("service_switch", "restored")["spare"] == spare
    assert f"serves again with the last good one ({back[:12]}" in done.message


def test_the_same_files_are_not_tried_twice(deploy: Callable[[str], Played]) -> None:
    done = deploy("same-files-fail")
    assert done.steps() == [*SWITCHED, "restored"]
    assert "so that the cause lies outside of it" in done.message


def test_a_server_that_could_not_be_stopped_serves_on(deploy: Callable[[str], Played]) -> None:
    done = deploy("never-stopped")
    assert done.steps() == ["stopped", "restored", "gate"]
    assert "was not stopped and serves on with the last good one" in done.message


def test_files_that_cannot_be_put_back_are_said(deploy: Callable[[str], Played]) -> None:
    done = deploy("no-way-back")
    assert done.steps() == [*SWITCHED, "restored", "stopped"]
    assert done.given("service_switch", "stopped")["spare"] == B, "what never was stopped is no failed deployment"
    assert "could not be put back: damaged. engine.service was stopped; nothing serves now." in done.message


def test_a_record_that_cannot_be_written_stops_no_server(deploy: Callable[[str], Played]) -> None:
    done = deploy("not-recorded")
    assert done.given("service_switch", "stopped")["spare"] == B
    assert "still runs by it and was not stopped" in done.message
