"""Switching a server that serves: what is said, what is refused, what is taken back, and what a killed play leaves behind.

The tests share one box and run in the order written.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import threading
from typing import Any

from box_helpers import ANSWER, ROOT, STATE, UNIT, Box, ansible

START = "Start the service"
GATE = "Wait until it serves"
# The interpreter ends at once, and the plan has nothing against it.
BROKEN = {"deployment_extra_env": {"PYTHONHOME": "/nonexistent"}}


def running(number: int) -> dict[str, Any]:
    return {"deployment_overrides": {"max_running_requests": number}}


def records(box: Box) -> dict[str, str]:
    """What must stay when a deployment fails."""
    return {
        "links": box.sh(f"readlink /opt/sglang/current /opt/sglang/last-good {STATE}/deployments/last-good"),
        "unit": box.sh(f"cat /etc/systemd/system/{UNIT}"),
        "settings": box.sh("cat /etc/gpuserve-sglang/sglang-kimi.json /etc/gpuserve-sglang/sglang-kimi.plan.json"),
    }


def test_a_stop_lets_requests_finish_and_a_start_ends_serving(serving_box: Box) -> None:
    box = serving_box
    pid = box.main_pid
    check = box.play("playbooks/stop.yml", "--check")
    assert check.rc == 0, check.report
    assert len(check.changed) == 1 and box.main_pid == pid

    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 800, "ignore_eos": True}
    box.write("/tmp/body.json", json.dumps(body))
    request = "curl -sf --max-time 280 -H 'Content-Type: application/json' -d @/tmp/body.json http://127.0.0.1:30000/v1/chat/completions"
    box.background("sh", "-c", f"for n in 1 2 3; do {request} >/tmp/answer-$n 2>&1 & done; wait; touch /tmp/answered")
    box.wait_for(lambda: "Decode batch" in box.journal(lines=5) or box.sh("ls /tmp/answered", check=False), 60)
    stop = box.play("playbooks/stop.yml")
    assert stop.rc == 0, stop.report
    assert re.search(r"was stopped after [\d.]+ s", stop.stdout)
    box.wait_for(lambda: box.sh("ls /tmp/answered", check=False), 30)
    for number in (1, 2, 3):
        answer = json.loads(box.sh(f"cat /tmp/answer-{number}"))
        assert answer["usage"]["completion_tokens"] == 800
    assert box.main_pid == 0
    assert box.sh(f"systemctl is-enabled {UNIT}") == "enabled"
    assert box.play("playbooks/stop.yml").changed == []

    check = box.play("playbooks/start.yml", "--check")
    assert check.rc == 0, check.report
    assert check.changed == [START] and box.main_pid == 0
    start = box.play("playbooks/start.yml")
    assert start.rc == 0, start.report
    assert START in start.changed
    assert box.chat() == ANSWER
    pid = box.main_pid
    assert box.play("playbooks/start.yml").changed == []
    assert box.main_pid == pid


def test_a_changed_setting_restarts_once_and_keeps_another_play_out(serving_box: Box) -> None:
    box = serving_box
    before = box.main_pid
    second: list[subprocess.CompletedProcess[str]] = []

    def stop() -> None:
        second.append(ansible("ansible-playbook", "-i", str(box.inventory), "playbooks/stop.yml"))

    # Started by an event, so that the first play has the lock for sure and goes on meanwhile.
    thread = threading.Thread(target=stop, daemon=True)

    def handler(event: dict[str, Any]) -> None:
        if event["event"] == "runner_on_ok" and event["event_data"].get("task") == START:
            thread.start()

    run = box.play("site.yml", handler=handler, **running(6))
    assert run.rc == 0, run.report
    thread.join(120)
    (refused,) = second
    assert refused.returncode != 0
    for words in ("Another play works on", "ansible-playbook site.yml", "since 20", "Nothing was changed"):
        assert words in " ".join(refused.stdout.split()), refused.stdout

    for words in ("will be restarted", "another plan", "--max-running-requests 8 -> 6", "is put back", "was away for"):
        assert words in " ".join(run.stdout.split())
    assert box.main_pid not in (0, before)
    record = json.loads(box.sh(f"cat {STATE}/last-start.json"))
    assert record["seconds_away"] >= record["seconds_to_ready"] > 1
    assert box.sh("ls /run/gpuserve-sglang.lock /run/gpuserve-sglang/sglang-kimi.maintenance", check=False) == ""


def test_a_deployment_that_fails_is_taken_back_with_its_evidence(serving_box: Box) -> None:
    box = serving_box
    before, pid = records(box), box.main_pid
    run = box.play("site.yml", **running(6), **BROKEN, deployment_load_budget=200)
    assert run.rc != 0
    # Each waits by its own budget.
    failed, restored_words = run.stdout.split("Put the files of the last good deployment back", 1)
    assert "/200 s" in failed
    assert "/300 s" in restored_words and "/200 s" not in restored_words
    for words in (
        "status=1",
        "ModuleNotFoundError",
        "was taken back",
        "serves again with the last good one",
        "UTC",
        "Evidence of the failed one",
    ):
        assert words in run.failure, run.report
    assert records(box) == before
    assert box.main_pid not in (0, pid)
    assert "PYTHONHOME" not in box.sh(f"tr '\\0' '\\n' </proc/{box.main_pid}/environ")
    assert box.chat() == ANSWER

    restored = run.result("Put the files of the last good deployment back")
    assert "PYTHONHOME" in box.sh(f"cat {restored['incident']}/{UNIT}")
    assert "status=1" in box.sh(f"cat {restored['incident']}/summary.md")
    # The module's own time: what Ansible takes to begin a task depends on the machine.
    (gate,) = [e for e in run.of("runner_on_failed") if e["event_data"]["task"] == GATE]
    created = datetime.datetime.fromisoformat(gate["created"]).replace(tzinfo=datetime.timezone.utc)
    print(
        f"files back after {restored['restored']['seconds']} s, {restored['restored']['at'] - created.timestamp():.2f} s after the gate"
    )
    assert restored["restored"]["seconds"] < 10


def killed_at(box: Box, task: str, variables: dict[str, Any]) -> None:
    """Run site.yml and kill the controller with SIGKILL when a task begins."""
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "PYTHONUNBUFFERED": "1",
        # With it the name of a task is printed when it begins.
        "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "1",
    }
    command = ["ansible-playbook", "-i", str(box.inventory), "site.yml", "-e", json.dumps(variables)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as play:
        assert play.stdout
        lines = []
        # Should the task never come, the play must not outlive the test.
        timer = threading.Timer(600, lambda: os.killpg(play.pid, signal.SIGKILL))
        timer.start()
        for line in play.stdout:
            lines.append(line)
            if line.startswith("TASK [") and f": {task}]" in line:
                os.killpg(play.pid, signal.SIGKILL)
                break
        timer.cancel()
    assert lines and f": {task}]" in lines[-1], "".join(lines[-60:])


def test_a_play_that_is_killed_anywhere_is_repaired_by_the_next(serving_box: Box) -> None:
    """Before the stop, after the stop, during the gate; each next run begins with what the one before left."""
    box = serving_box
    pid, good = box.main_pid, box.sh(f"readlink {STATE}/deployments/last-good")
    wanted = running(5)
    killed_at(box, "Let systemd read the unit, and enable it at boot", wanted)
    assert box.main_pid == pid
    assert "site.yml" in box.sh("cat /run/gpuserve-sglang.lock")

    killed_at(box, "Free the GPUs of what the old server left, and of the servers that are taken over", wanted)
    assert box.main_pid == 0

    killed_at(box, GATE, wanted)
    pid = box.main_pid
    assert pid > 0 and "--max-running-requests 5" in box.command_line
    assert box.sh(f"readlink {STATE}/deployments/last-good") == good, "nothing is good before its gate"

    run = box.play("site.yml", **wanted)
    assert run.rc == 0, run.report
    assert "took over the lock" in run.stdout
    assert box.main_pid == pid, "what already serves the plan is not restarted"
    assert START not in run.changed
    assert box.chat() == ANSWER
    assert box.sh(f"readlink {STATE}/deployments/last-good") != good
    record = json.loads(box.sh(f"cat {STATE}/last-start.json"))
    assert record["seconds_away"] >= record["seconds_to_ready"] > 1

    again = box.play("site.yml", **wanted)
    assert (again.rc, again.changed, box.main_pid) == (0, [], pid), again.report


def test_the_operator_goes_back(serving_box: Box) -> None:
    box = serving_box
    check = box.play("playbooks/rollback.yml", "--check")
    assert check.rc == 0, check.report
    assert "--max-running-requests 5" in box.command_line
    before = box.sh(f"cat {STATE}/eagle-fast-verify.md")
    run = box.play("playbooks/rollback.yml")
    assert run.rc == 0, run.report
    assert "the operator goes back to deployment" in " ".join(run.stdout.split())
    assert "--max-running-requests 6" in box.command_line
    assert box.chat() == ANSWER
    plan = json.loads(box.sh("cat /etc/gpuserve-sglang/sglang-kimi.plan.json"))
    assert plan["args"]["--max-running-requests"] == 6
    # The check before it entered nothing.
    added = box.sh(f"cat {STATE}/eagle-fast-verify.md").removeprefix(before)
    assert added.count(f": back to plan `{plan['hash'][:12]}`") == added.count("<!-- deployment: ") == 1


def test_files_of_a_deployment_that_cannot_be_put_in_place_go_back(serving_box: Box) -> None:
    """Nothing was stopped yet, so the next crash or boot must find what served."""
    box, timer = serving_box, "/etc/systemd/system/sglang-kimi-liveness.timer"
    before, pid = records(box), box.main_pid
    box.sh(f"mv {timer} /root/timer && ln -s /dev/null {timer} && systemctl daemon-reload")
    try:
        run = box.play("site.yml", **running(7))
    finally:
        box.sh(f"mv -T /root/timer {timer} && systemctl daemon-reload")
    assert run.rc != 0
    for words in (timer, "was not touched", "were put back", f"/etc/systemd/system/{UNIT}"):
        assert words in run.failure, run.report
    assert START not in run.tasks
    assert (records(box), box.main_pid) == (before, pid)
    assert box.show("NeedDaemonReload") == "no"
    assert box.chat() == ANSWER
    run = box.play("site.yml", **running(6))
    assert (run.rc, box.main_pid) == (0, pid), run.report


def test_the_operator_goes_back_from_files_that_no_server_follows(serving_box: Box) -> None:
    """Not one deployment too far, and the server that follows those on record goes on."""
    box = serving_box
    before, pid = records(box), box.main_pid
    assert box.play("site.yml", "--tags", "sglang_service_configure", **running(7)).rc == 0
    assert records(box) != before
    refused = box.play("playbooks/start.yml")
    assert refused.rc != 0 and "a deployment that never served" in refused.failure, refused.report
    run = box.play("playbooks/rollback.yml")
    assert run.rc == 0, run.report
    assert "the installed unit is not the recorded one" in " ".join(run.stdout.split())
    assert (records(box), box.main_pid) == (before, pid)


def test_a_unit_that_never_started_is_not_what_is_put_back(serving_box: Box) -> None:
    box = serving_box
    before, pid = records(box), box.main_pid
    wanted = {**running(6), "deployment_load_budget": 200}
    run = box.play("site.yml", **wanted)
    assert run.rc == 0, run.report
    assert box.main_pid == pid and records(box)["unit"] != before["unit"]
    again = box.play("site.yml", **wanted)
    assert (again.rc, again.changed, box.main_pid) == (0, [], pid), again.report
    assert box.play("playbooks/stop.yml").rc == 0
    run = box.play("playbooks/rollback.yml")
    assert run.rc == 0, run.report
    assert records(box) == before
    assert box.main_pid != pid and "--max-running-requests 6" in box.command_line
    assert box.chat() == ANSWER
