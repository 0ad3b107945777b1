"""Tuning over two CPU profiles that really differ, interrupted once: what served before serves again in every case."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import yaml
from box_helpers import ANSWER, ROOT, STATE, UNIT, Box

SESSION = "/var/lib/gpuserve-sglang/tune"
TUNE: dict[str, Any] = {
    "deployment_profiles": {
        "cpu-chunks": {"base": "cpu", "title": "short prefill chunks", "flags": {"chunked_prefill_size": 64}},
        "cpu-narrow": {"base": "cpu", "title": "two requests at once", "flags": {"max_running_requests": 2}},
    },
    # The third cannot run on the sandbox's tiny model: listed with the reason, not tried.
    "tune_profiles": ["cpu-chunks", "cpu-narrow", "eagle3-topk1-v2"],
    "tune_rounds": 1,
    "tune_runs": 1,
    "tune_throughput_level": 4,
    "benchmark_levels": [1, 4],
    "benchmark_requests": 4,
    "benchmark_output_tokens": 8,
    "benchmark_warmup": 1,
    "benchmark_quiet_seconds": 3,
}


def state(box: Box) -> dict[str, str]:
    """All that tuning must leave as it was: the unit, the record of deployments, what the process follows."""
    return {
        "unit": box.sh(f"cat /etc/systemd/system/{UNIT}"),
        "records": box.sh(f"cd {STATE}/deployments && find . -type f -exec sha256sum {{}} + | sort; readlink last-good; readlink previous-good || true"),
        "settings": box.sh("sha256sum /etc/gpuserve-sglang/*"),
        "latest": box.sh(f"readlink {STATE}/benchmarks/latest.json || echo none"),
        "command": box.command_line,
    }  # fmt: skip


@contextlib.contextmanager
def tuning(box: Box, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A tuning that measures its first profile; its output is in ``log``. What still runs of it at the end is killed."""
    extra = folder / "tune.yml"
    extra.write_text(yaml.safe_dump({**TUNE, "tune_result_file": str(folder / "tune-result.yml")}))
    command = ["ansible-playbook", "-i", str(box.inventory), "playbooks/tune.yml", "-e", f"@{extra}"]
    env = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    with (folder / "log").open("w") as log:
        play = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + 600
            while "benchmark on" not in (text := (folder / "log").read_text()).partition("start 1 of 2")[2]:
                assert play.poll() is None, text[-3000:]
                assert time.monotonic() < deadline, text[-3000:]
                time.sleep(0.5)
            yield play
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(play.pid, signal.SIGKILL)
            play.wait()


@pytest.fixture(scope="module")
def before(serving_box: Box) -> dict[str, str]:
    return state(serving_box)


def test_killed_in_the_middle_and_put_back_by_the_next_call(
    serving_box: Box, before: dict[str, str], tmp_path: Path
) -> None:
    """The controller is killed while a profile serves that nobody asked for; nothing on the host knows of it."""
    with tuning(serving_box, tmp_path):
        pass
    assert serving_box.command_line != before["command"]
    assert serving_box.sh(f"ls {SESSION}/session.json")
    run = serving_box.play("playbooks/tune.yml", **TUNE, tune_restore=True)
    assert run.rc == 0, run.report
    assert "was interrupted; the profile cpu is put back" in " ".join(run.stdout.split())
    assert state(serving_box) == before
    assert serving_box.chat() == ANSWER
    assert serving_box.sh(f"ls {SESSION}", check=False) == ""


def test_profiles_are_compared_and_what_served_serves_again(
    serving_box: Box, before: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "tune-result.yml"
    run = serving_box.play("playbooks/tune.yml", **TUNE, tune_result_file=str(file))
    assert run.rc == 0, run.report
    assert state(serving_box) == before
    assert serving_box.chat() == ANSWER
    report = run.result("Judge the results")["ansible_facts"]["tune_report"]
    assert {found["profile"] for found in report["measured"]} == {"cpu-chunks", "cpu-narrow"}
    hashes = {found["plan_hash"] for found in report["measured"]}
    assert len(hashes) == 2
    assert list(report["refused"]) == ["eagle3-topk1-v2"]
    assert set(report["recommended"]) == {"single", "throughput", "both"}
    assert "not measured: eagle3-topk1-v2" in report["text"]
    assert yaml.safe_load(file.read_text()) == {"deployment_profile": report["profile"]}
    assert report["profile"] in ("cpu-chunks", "cpu-narrow")
    assert matplotlib.image.imread(tmp_path / "tune-result.png").shape[1] > 900
    assert (tmp_path / "tune-result.svg").read_text().count("cpu-narrow") >= 1
    # What was recommended is what the next deployment takes.
    plan = serving_box.play(
        "playbooks/plan.yml", "--extra-vars", f"@{file}", deployment_profiles=TUNE["deployment_profiles"]
    )
    assert plan.rc == 0, plan.report
    assert f"(profile {report['profile']}" in plan.stdout or f"profile {report['profile']}" in plan.stdout


def test_nothing_to_put_back_is_said_and_changes_nothing(serving_box: Box, before: dict[str, str]) -> None:
    pid = serving_box.main_pid
    run = serving_box.play("playbooks/tune.yml", **TUNE, tune_restore=True)
    assert run.rc == 0, run.report
    assert "nothing is to be put back" in run.stdout
    assert run.changed == []
    assert serving_box.main_pid == pid


def test_whoever_deploys_while_profiles_are_tried_is_not_overwritten(
    serving_box: Box, before: dict[str, str], tmp_path: Path
) -> None:
    """The last test of this file. Deployed is the very profile that is measured: nothing but the session tells that it is wanted now."""
    served = serving_box.sh(f"readlink {STATE}/deployments/last-good")
    with tuning(serving_box, tmp_path) as play:
        found = re.search(r"start 1 of 2: (\S+), round", (tmp_path / "log").read_text())
        assert found is not None
        wanted = found[1]
        # It measures, without the lock, for as long as the deployment takes. Its first process alone stands still: podman, stopped
        # in the middle of a call, would keep its own lock.
        os.kill(play.pid, signal.SIGSTOP)
        run = serving_box.play("site.yml", deployment_profiles=TUNE["deployment_profiles"], deployment_profile=wanted)
        os.kill(play.pid, signal.SIGCONT)
        assert run.rc == 0, run.report
        play.wait(600)
    text = " ".join((tmp_path / "log").read_text().split())
    assert play.returncode == 2, text[-3000:]
    assert "somebody else has deployed: the last good deployment is" in text, text[-3000:]
    assert f"(profile {wanted})" in text
    assert "With this deployment it is over" in " ".join(run.stdout.split())
    after = state(serving_box)
    assert after["command"] != before["command"]
    assert serving_box.chat() == ANSWER
    assert serving_box.sh(f"ls {SESSION}", check=False) == ""
    # A rollback goes back to what served before the tuning.
    assert serving_box.sh(f"readlink {STATE}/deployments/previous-good") == served
    run = serving_box.play("playbooks/tune.yml", **TUNE, tune_restore=True)
    assert run.rc == 0, run.report
    assert "nothing is to be put back" in " ".join(run.stdout.split())
    assert state(serving_box) == after
