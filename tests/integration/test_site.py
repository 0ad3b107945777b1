"""site.yml from a bare box to a served token, with everything that must not happen on the way.

The tests share one box and run in the order written: first what must leave a bare box alone, then the deployment,
then what happens to a deployed box.
"""

from __future__ import annotations

import threading
import time

import pytest
from box_helpers import ANSWER, UNIT, Box

HISTORY = "/var/lib/sglang-kimi/eagle-fast-verify.md"
HANDBOOK = "/var/lib/sglang-kimi/production.md"
ROLES = ["deployment", "gpu_preflight", "nccl", "sglang", "sglang_service", "runbook"]

# What is wrong, the variables that make it so, words that the one error must hold: found, expected, what to do.
BAD_INPUT = {
    "unknown profile": ({"deployment_profile": "eagle4"}, ["deployment_profile", "eagle4", "eagle3-topk1-v2", "cpu"]),
    "port out of range": ({"deployment_port": 99999}, ["deployment_port", "99999", "65535"]),
    "relative model path": ({"deployment_model_path": "models/tiny"}, ["models/tiny", "absolute"]),
    "model missing": ({"deployment_model_path": "/data/nothing"}, ["/data/nothing", "found no such directory"]),
    "empty model directory": ({"deployment_model_path": "/srv/empty-model"}, ["/srv/empty-model", "empty"]),
    "missing shard": ({"deployment_model_path": "/srv/no-shard"}, ["model-00002-of-00002.safetensors", "missing"]),
    "truncated shard": ({"deployment_model_path": "/srv/short-shard"}, ["model-00002-of-00002.safetensors", "bytes"]),
    "unknown flag": ({"deployment_extra_args": {"--chunked-prefil-size": 512}}, ["chunked-prefil-size", "--chunked-prefill-size"]),
    "secret in argv": ({"deployment_extra_args": {"api_key": "hunter2"}}, ["api_key", "secret"]),
}  # fmt: skip


class Killer:
    """Kills the server during its load, in the first start of a play or in every one, and notes the times."""

    def __init__(self, box: Box, every: bool = False) -> None:
        self.box, self.every = box, every
        self.killed: list[float] = []
        self.failed: list[float] = []
        self.threads: list[threading.Thread] = []

    def __call__(self, event: dict) -> None:
        task = event["event_data"].get("task")
        if event["event"] == "runner_on_ok" and task == "Start the service" and (self.every or not self.threads):
            self.threads.append(threading.Thread(target=self.kill, daemon=True))
            self.threads[-1].start()
        if event["event"] == "runner_on_failed" and task == "Wait until it serves":
            self.failed.append(time.monotonic())

    def kill(self) -> None:
        # What this start has said, however long a look at it takes.
        journal = f"journalctl -o cat _SYSTEMD_INVOCATION_ID=$(systemctl show -P InvocationID {UNIT})"
        self.box.wait_for(lambda: "server_args=" in self.box.sh(journal, check=False), 60)
        self.box.sh(f"systemctl kill --kill-whom=main -s SIGKILL {UNIT}")
        self.killed.append(time.monotonic())

    def join(self) -> None:
        for thread in self.threads:
            thread.join(70)


@pytest.fixture(scope="module")
def broken_models(box: Box) -> None:
    box.sh(
        "mkdir -p /srv/empty-model && cp -r /data/tiny /srv/no-shard && cp -r /data/tiny /srv/short-shard "
        "&& rm /srv/no-shard/model-00002-of-00002.safetensors "
        "&& truncate -s -100 /srv/short-shard/model-00002-of-00002.safetensors"
    )


@pytest.mark.usefixtures("broken_models")
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_error_before_anything_changes(box: Box, case: str) -> None:
    extra, words = BAD_INPUT[case]
    before = box.fingerprint()
    run = box.play("site.yml", **extra)
    assert run.rc != 0
    assert run.changed == []
    assert len(run.of("runner_on_failed")) == 1
    for word in words:
        assert word in run.failure, run.failure
    assert "hunter2" not in run.stdout
    assert "Traceback" not in run.stdout
    assert box.fingerprint() == before


def test_check_mode_on_a_bare_box_predicts_and_changes_nothing(box: Box) -> None:
    before = box.fingerprint()
    run = box.play("site.yml", "--check", "--diff")
    assert run.rc == 0, run.report
    assert box.fingerprint() == before
    assert "Build the release, or find it complete" in run.changed
    assert "Write the unit" in run.changed
    assert "+ExecStart=" in run.stdout


def test_a_taken_port_ends_the_play_before_the_engine_starts(box: Box) -> None:
    box.background("python3", "-m", "http.server", "30000", "--bind", "127.0.0.1")
    try:
        box.wait_for(lambda: box.sh("ss -Hltn 'sport = :30000'") != "")
        run = box.play("site.yml")
    finally:
        # The brackets keep the pattern from matching the shell that carries it.
        box.sh("pkill -f '[h]ttp.server 30000'")
    assert run.rc != 0
    assert run.changed == []
    assert "30000" in run.failure
    assert "http.server" in run.failure or "python3" in run.failure
    assert box.sh(f"systemctl show -P LoadState {UNIT}") == "not-found"


def test_a_first_deployment_that_dies_is_stopped(box: Box) -> None:
    """There is nothing to put back: the play fails, the unit stays down, and nothing is on record as good."""
    killer = Killer(box)
    run = box.play("site.yml", handler=killer)
    killer.join()
    assert run.rc != 0
    assert killer.failed[0] - killer.killed[0] < 5
    assert "status=9/KILL" in run.failure
    assert "Last journal lines" in run.failure
    assert "No earlier deployment is on record" in run.failure
    assert box.sh(f"systemctl show -P ActiveState {UNIT}") in ("inactive", "failed")
    # Evidence is kept, nothing is on record as good, and a boot does not try it again.
    assert box.sh("ls /var/lib/sglang-kimi") == "incidents"
    assert "status=9/KILL" in box.sh("cat /var/lib/sglang-kimi/incidents/*-deployment-failed/summary.md")
    assert box.sh(f"systemctl is-enabled {UNIT}", check=False) == "disabled"


def test_site_serves_a_token(box: Box) -> None:
    """The whole path; the event stream shows the roles in their order and the gate's verdict."""
    run = box.play("site.yml")
    assert run.rc == 0, run.report
    assert run.stats["failures"] == 0
    roles = [e["event_data"].get("role") for e in run.of("playbook_on_task_start")]
    order = [r for i, r in enumerate(roles) if r and (i == 0 or roles[i - 1] != r)]
    assert [r.split(".")[-1] for r in dict.fromkeys(order) if r.split(".")[-1] in ROLES] == _first_seen(order)
    (gate,) = [e for e in run.of("runner_on_ok") if e["event_data"]["task"] == "Wait until it serves"]
    result = gate["event_data"]["res"]
    assert result["state"] == "ready"
    assert result["last_status"] == "200"
    assert 1 < result["elapsed"] < 300
    assert result["generation"]["text"]
    assert box.chat() == ANSWER


def _first_seen(order: list[str]) -> list[str]:
    return [r for r in dict.fromkeys(r.split(".")[-1] for r in order) if r in ROLES]


def test_second_run_changes_nothing_and_restarts_nothing(box: Box) -> None:
    pid = box.main_pid
    run = box.play("site.yml")
    assert run.rc == 0
    assert run.changed == []
    assert run.stats["changed"] == 0
    assert box.main_pid == pid > 0


def test_a_time_that_no_gate_can_keep_does_not_cost_the_server(box: Box) -> None:
    pid = box.main_pid
    run = box.play("site.yml", sglang_service_health_timeout=-1, deployment_extra_env={"A": "1"})
    assert run.rc != 0
    assert "sglang_service_health_timeout is -1," in run.failure
    assert "expected each of them to be a number of seconds above 0" in run.failure
    assert run.changed == []
    assert box.main_pid == pid > 0
    assert box.chat() == ANSWER


def test_the_handbook_alone_is_the_same_handbook(box: Box, tmp_path) -> None:
    """By its tag and as the only role of a playbook: what the other roles know is read from the host."""
    play = tmp_path / "runbook.yml"
    play.write_text("- hosts: gpu_servers\n  gather_facts: false\n  roles: [gpuserve.sglang.runbook]\n")
    for run in (box.play("site.yml", "--tags", "runbook_render"), box.play(str(play))):
        assert run.rc == 0, run.report
        assert run.changed == []


def test_an_added_package_is_named_and_taken_away(box: Box) -> None:
    python = box.command_line.split()[0]
    site = box.sh(f"{python} -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))'")
    info = f"{site}/stray-1.0.dist-info"
    lines = "Metadata-Version: 2.1\\nName: stray\\nVersion: 1.0\\n"
    box.sh(f"mkdir {info} && printf '{lines}' >{info}/METADATA && echo 'stray-1.0.dist-info/METADATA,,' >{info}/RECORD")
    box.sh(f"echo 'stray-1.0.dist-info/RECORD,,' >>{info}/RECORD")
    run = box.play("site.yml")
    assert run.rc == 0, run.report
    assert "Build the release, or find it complete" in run.changed
    assert "stray" in run.stdout
    assert box.sh(f"ls -d {info}", check=False) == ""


def test_check_mode_on_a_serving_box_changes_nothing(box: Box) -> None:
    pid = box.main_pid
    run = box.play("site.yml", "--check", "--diff")
    assert run.rc == 0, run.report
    assert run.changed == []
    assert box.main_pid == pid


def test_a_changed_setting_restarts_once_and_says_why(box: Box) -> None:
    pid = box.main_pid
    check = box.play("site.yml", "--check", "--diff", deployment_overrides={"max_running_requests": 6})
    assert "will be restarted" in check.stdout
    assert box.main_pid == pid
    run = box.play("site.yml", deployment_overrides={"max_running_requests": 6})
    assert run.rc == 0, run.report
    assert "another plan" in run.stdout
    assert box.main_pid != pid
    words = box.command_line
    assert "--max-running-requests 6" in words
    assert box.play("site.yml", deployment_overrides={"max_running_requests": 6}).changed == []


def test_an_interrupted_play_is_repaired(box: Box) -> None:
    """The unit was written but the service never restarted: the next run sees that the process follows another plan."""
    pid = box.main_pid
    box.play("site.yml", "--tags", "sglang_service_configure")
    assert box.main_pid == pid
    run = box.play("site.yml")
    assert run.rc == 0, run.report
    assert "Start the service" in run.changed
    assert box.main_pid != pid


def test_death_during_the_gate_is_seen_within_five_seconds_and_taken_back(box: Box) -> None:
    """Killed while it loads: the gate fails at once with the journal's last words, and the last good one serves again."""
    before = box.sh(f"cat /etc/systemd/system/{UNIT}")
    killer = Killer(box)
    run = box.play("site.yml", handler=killer, deployment_overrides={"max_running_requests": 5})
    killer.join()
    assert run.rc != 0
    assert killer.failed[0] - killer.killed[0] < 5
    assert "status=9/KILL" in run.failure
    assert "Last journal lines" in run.failure
    assert "serves again with the last good one" in run.failure
    assert box.sh(f"cat /etc/systemd/system/{UNIT}") == before
    assert "--max-running-requests 8" in box.command_line
    assert box.chat() == ANSWER
    # The handbook tells how long the last start took, and that was the one of the rollback.
    pid = box.main_pid
    again = box.play("site.yml")
    assert again.rc == 0, again.report
    assert set(again.changed) <= {"Write the handbook"}
    assert box.main_pid == pid


def test_when_the_last_good_one_fails_too_nothing_restarts_for_ever(box: Box) -> None:
    killer = Killer(box, every=True)
    run = box.play("site.yml", handler=killer, deployment_overrides={"max_running_requests": 5})
    killer.join()
    assert run.rc != 0
    assert len(killer.killed) == 2
    assert "was put back and failed as well" in run.failure
    assert box.sh(f"systemctl show -P ActiveState {UNIT}") in ("inactive", "failed")


def test_recovery_after_the_failed_deployment(box: Box) -> None:
    run = box.play("site.yml")
    assert run.rc == 0, run.report
    assert box.chat() == ANSWER


def test_the_operator_rolls_back_and_forward(box: Box) -> None:
    """The deployment before the present one is put back without a build, and site.yml goes forward again."""
    assert box.play("site.yml", deployment_overrides={"max_running_requests": 7}).rc == 0
    before = box.sh(f"cat {HISTORY}")
    run = box.play("playbooks/rollback.yml", sglang_service_rollback_reason="seven are too few")
    assert run.rc == 0, run.report
    assert "--max-running-requests 8" in box.command_line
    assert box.chat() == ANSWER
    pid, after = box.main_pid, box.sh(f"cat {HISTORY}")
    assert after.startswith(before)
    added = after.removeprefix(before)
    assert added.count("<!-- deployment: ") == 1
    assert ": back to plan `" in added and "Why: seven are too few." in added
    assert "- --max-running-requests 7\n+ --max-running-requests 8\n" in added
    assert "Write the handbook" in run.changed
    assert "--max-running-requests 8" in box.sh(f"cat {HANDBOOK}")
    # The handbook speaks of what serves again, so nothing is left to do for the inventory that asks for it.
    again = box.play("site.yml")
    assert again.changed == [], again.report
    assert (box.main_pid, box.sh(f"cat {HISTORY}")) == (pid, after)
