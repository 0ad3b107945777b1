"""The table of faults, row by row: each is done, its outcome is held against the table, and the box is put back in order."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import ANSWER, ROOT, STATE, TABLE, TIMER, UNIT, UNIT_FILE, URL, Asked, Faulty, Killer, Row, podman, until

SWITCHED = {"deployment_overrides": {"max_running_requests": 5}}
ROWS: dict[str, Callable[[Faulty, Row], None]] = {}
DROPIN = "/run/systemd/system/sglang-kimi.service.d"


def row_of(identifier: str) -> Callable[[Callable[[Faulty, Row], None]], Callable[[Faulty, Row], None]]:
    def keep(function: Callable[[Faulty, Row], None]) -> Callable[[Faulty, Row], None]:
        ROWS[identifier] = function
        return function

    return keep


def test_every_row_of_the_table_is_done() -> None:
    assert sorted(ROWS) == sorted(entry["id"] for entry in TABLE)


@pytest.mark.parametrize("entry", TABLE, ids=[entry["id"] for entry in TABLE])
def test_fault(box: Faulty, row: Row, entry: dict[str, Any]) -> None:
    ROWS[entry["id"]](box, row)
    assert row.seconds is not None


# ------------------------------------------------------------------------------------------------ the process dies


@row_of("crash-while-loading")
def _(box: Faulty, row: Row) -> None:
    pid = box.begin_load()
    good = box.last_good()
    box.signal(pid, "KILL")
    seconds = box.wait_restart(pid, 60)
    box.wait_served()
    assert box.last_good() == good
    row.took(seconds, "started again by systemd, served")


@row_of("crash-after-ready")
def _(box: Faulty, row: Row) -> None:
    pid, scheduler, good = box.main_pid, box.scheduler, box.last_good()
    box.signal(pid, "KILL")
    seconds = box.wait_restart(pid, 60)
    assert box.sh(f"test -e /proc/{scheduler} && cat /proc/{scheduler}/comm", check=False) in ("", "(sd-pam)")
    box.wait_served()
    assert box.last_good() == good
    row.took(seconds, "nothing was left behind; started again by systemd, served")


def found_by_the_timer(box: Faulty, row: Row, pid: int, before: set[str], words: str) -> None:
    """The timer restarts the server, and keeps an incident that says why."""
    seconds = box.wait_restart(pid, 150)
    (incident,) = {name for name in box.incidents() - before if name.endswith("-liveness")}
    summary = box.summary(incident)
    assert words in summary, summary
    files = box.sh(f"ls {STATE}/incidents/{incident}").split()
    assert {"journal.txt", "unit.txt", "processes.txt", "plan.json", "summary.md", "nvidia-smi.txt"} <= set(files)
    assert box.sh(f"stat -c %U:%a {STATE}/incidents/{incident}") == "root:700"
    box.wait_served()
    row.took(seconds, f"restarted with an incident that says `{words}`, served")


@row_of("scheduler-killed")
def _(box: Faulty, row: Row) -> None:
    pid, before = box.main_pid, box.incidents()
    box.signal(box.scheduler, "KILL")
    assert box.sh(f"curl -s -m 10 -o /dev/null -w '%{{http_code}}' {URL}/v1/models") == "200"
    found_by_the_timer(box, row, pid, before, "is dead")


@row_of("main-stopped")
def _(box: Faulty, row: Row) -> None:
    pid, before = box.main_pid, box.incidents()
    box.signal(pid, "STOP")
    found_by_the_timer(box, row, pid, before, f"pid {pid} (")


@row_of("detokenizer-stopped")
def _(box: Faulty, row: Row) -> None:
    pid, before = box.main_pid, box.incidents()
    box.signal(int(box.sh(f"pgrep -P {pid} -f '^sglang::detoken'").split()[0]), "STOP")
    # The scheduler works on, and each probe makes it.
    found_by_the_timer(box, row, pid, before, "sglang::detoken) is stopped")


@row_of("hung-request")
def _(box: Faulty, row: Row) -> None:
    pid, before = box.main_pid, box.incidents()
    asked = box.ask(1900)
    assert until(lambda: "Decode batch" in box.journal(lines=5), 30)
    box.signal(box.scheduler, "STOP")
    found_by_the_timer(box, row, pid, before, "is stopped")
    assert asked.join(5).code == "000"


# ------------------------------------------------------------------------------------------------ nothing is wrong


def kept_busy(box: Faulty, row: Row, ask: Callable[[], Asked], tokens: int, grow: bool = False) -> None:
    """Keep requests under way until the timer has called the server busy as often as a dead one would have been restarted for.

    With ``grow`` there are more of them as long as the timer is answered in time: how many it takes depends on the machine.
    """
    pid, before, began = box.main_pid, box.incidents(), time.monotonic()
    enough = json.loads(box.sh("cat /etc/gpuserve-sglang/sglang-kimi.json"))["liveness"]["failures"]
    asked: list[Asked] = []
    busy: set[float] = set()
    states: set[str] = set()
    wanted, grown = 12, began
    while len(busy) < enough and time.monotonic() - began < 120:
        asked += [ask() for __ in range(wanted - sum(request.running for request in asked))]
        known = box.liveness()
        states.add(known.get("state", ""))
        if known.get("state") == "busy":
            busy.add(known["checked"])
        elif grow and time.monotonic() - grown > 10:
            wanted, grown = min(wanted + 12, 48), time.monotonic()
        time.sleep(0.5)
    seconds = time.monotonic() - began
    assert until(lambda: not any(request.running for request in asked), 175), box.liveness()
    assert [request.tokens for request in asked] == [tokens] * len(asked)
    assert len(busy) >= enough, f"{states}, {len(asked)} requests"
    assert states <= {"alive", "busy"}
    assert box.main_pid == pid
    assert box.incidents() == before
    row.took(seconds, f"{len(busy)} times seen as busy and left alone; {len(asked)} of {len(asked)} requests answered")


@row_of("busy")
def _(box: Faulty, row: Row) -> None:
    # Four at once hold the whole pool of tokens; the rest, and the timer's own request, wait in the queue.
    kept_busy(box, row, lambda: box.ask(900), 900, grow=True)


@row_of("long-prefill")
def _(box: Faulty, row: Row) -> None:
    prompts = itertools.count()

    def ask() -> Asked:
        number = next(prompts)
        return box.ask(2, limit=170, ids=[5 + (place * 7 + number) % 200 for place in range(1900)])

    # The control groups of the box belong to the machine: the unit's own limits do nothing here.
    podman("update", "--cpus", "0.3", box.name)
    try:
        kept_busy(box, row, ask, 2)
    finally:
        podman("update", "--cpus", str(os.cpu_count()), box.name)


@row_of("stopped-by-hand")
def _(box: Faulty, row: Row) -> None:
    box.sh(f"systemctl stop {UNIT}", timeout=120)
    began, before = time.monotonic(), box.incidents()
    assert until(lambda: box.liveness().get("state") == "stopped", 20)
    time.sleep(15)
    assert box.main_pid == 0
    assert box.incidents() == before
    row.took(time.monotonic() - began, "seen as stopped, left stopped")


@row_of("stop-with-request")
def _(box: Faulty, row: Row) -> None:
    asked = box.ask(600)
    assert until(lambda: "Decode batch" in box.journal(lines=5), 30)
    group = box.show("ControlGroup")
    began = time.monotonic()
    box.sh(f"systemctl stop {UNIT}", timeout=120)
    seconds = time.monotonic() - began
    assert asked.join(5).tokens == 600
    assert box.sh("pgrep -f '^sglang::'", check=False) == ""
    assert group
    row.took(seconds, "600 of 600 tokens arrived, then it ended; no process was left")


@row_of("gate-latency")
def _(box: Faulty, row: Row) -> None:
    box.sh(f"systemctl restart {UNIT}", timeout=290)
    invocation = box.show("InvocationID")
    match = f"_SYSTEMD_INVOCATION_ID={invocation} + INVOCATION_ID={invocation} _PID=1"
    lines = box.sh(f"journalctl --no-pager -o short-unix {match}").splitlines()
    first = next(line for line in lines if re.search(r'"GET /health HTTP/1\.1" 200', line))
    gate = next(line for line in lines if re.search(r"generated \d+ tokens in", line))
    end = next(line for line in lines if "systemd[1]" in line and re.search(r"Started|Finished", line))
    generation = float(re.search(r"generated \d+ tokens in ([\d.]+) s", gate)[1])
    # /health itself answers a second after it was asked; the clock begins with its answer.
    seconds = float(end.split()[0]) - float(first.split()[0]) - generation
    row.took(max(0.0, seconds), f"the generation took {generation:.1f} s")


# ------------------------------------------------------------------------------------------------ the surroundings


@row_of("port-taken")
def _(box: Faulty, row: Row) -> None:
    box.sh(f"systemctl stop {UNIT}", timeout=120)
    program = (
        "import http.server\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        "    def log_message(self, *_):\n"
        "        pass\n"
        "http.server.HTTPServer(('127.0.0.1', 30000), H).serve_forever()\n"
    )
    box.write("/tmp/impostor.py", program)
    box.sh("systemd-run --unit impostor /usr/bin/python3 /tmp/impostor.py")
    try:
        assert until(lambda: box.sh(f"curl -s -o /dev/null -w '%{{http_code}}' {URL}/health") == "200", 20)
        began = time.monotonic()
        status = box.sh(f"systemctl start {UNIT} >/dev/null 2>&1; echo $?", timeout=120)
        seconds = time.monotonic() - began
        box.sh(f"systemctl stop {UNIT}", timeout=120)
        assert status != "0"
        said = box.journal(lines=80)
        assert "port 30000 is held by pid" in said, said
        assert "impostor.py" in said
        assert box.sh("systemctl is-active impostor") == "active"
    finally:
        box.sh("systemctl stop impostor", check=False)
    row.took(seconds, "the start failed and named the process, which went on")


@row_of("restart-loop")
def _(box: Faulty, row: Row) -> None:
    before = box.incidents()
    box.sh(f"systemctl stop {UNIT}; systemctl reset-failed {UNIT}", check=False, timeout=120)
    box.sh(f"mkdir -p {DROPIN}")
    command = box.sh(f"sed -n 's/^ExecStart=//p' {UNIT_FILE}")
    box.write(f"{DROPIN}/broken.conf", f"[Service]\nExecStart=\nExecStart={command} --no-such-flag\n")
    box.sh("systemctl daemon-reload")
    began = time.monotonic()
    box.sh(f"systemctl start --no-block {UNIT}")
    box.wait_for(lambda: any("-failed-" in name for name in box.incidents() - before), 200, "an incident")
    seconds = time.monotonic() - began
    (incident,) = {name for name in box.incidents() - before if "-failed-" in name}
    assert until(lambda: "How to read" in box.summary(incident), 40)
    summary = box.summary(incident)
    assert "The engine refused its command line" in summary, summary
    assert "systemd gave up" in summary
    assert box.show("ActiveState") == "failed"
    row.took(seconds, "given up at the start limit; the incident says `The engine refused its command line`")


@row_of("memory-limit")
def _(box: Faulty, row: Row) -> None:
    pid, parts = box.main_pid, set(box.sh("pgrep -f '^sglang::|sglang.launch_server'").split())
    stat = box.sh("cat /sys/fs/cgroup/memory/memory.stat /sys/fs/cgroup/memory.stat 2>/dev/null", check=False)
    used = re.search(r"^(?:total_rss|anon) (\d+)$", stat, re.MULTILINE)
    if used is None:
        pytest.skip("the control groups of this machine do not count memory")
    limit = str(int(used[1]) + (256 << 20))
    hog = "x = bytearray(700 << 20); import time; time.sleep(600)"
    podman("update", "--memory", limit, "--memory-swap", limit, box.name)
    try:
        box.sh(f"systemd-run --unit hog /usr/bin/python3 -c '{hog}'")
        lost = until(lambda: parts - set(box.sh("pgrep -f '^sglang::|sglang.launch_server'", check=False).split()), 30)
        began = time.monotonic()
    finally:
        box.sh("systemctl stop hog", check=False)
        podman("update", "--memory", "1t", "--memory-swap", "1t", box.name)
    assert lost, "the kernel killed nothing of the engine"
    box.wait_for(lambda: box.main_pid not in (0, pid), 150, "a new process")
    seconds = time.monotonic() - began
    assert box.sh("systemctl is-active dbus systemd-journald").split() == ["active", "active"]
    box.wait_served()
    row.took(seconds, "a part of the engine was killed, the server was started again")


@row_of("reboot-while-loading")
def _(box: Faulty, row: Row) -> None:
    box.begin_load()
    began = time.monotonic()
    box.restart()
    box.wait_served(175)
    row.took(time.monotonic() - began, "serves again by itself")


@row_of("reboot-while-serving")
def _(box: Faulty, row: Row) -> None:
    began = time.monotonic()
    box.restart()
    box.wait_served(175)
    assert box.sh(f"systemctl is-active {TIMER}") == "active"
    row.took(time.monotonic() - began, "serves again by itself, and is watched again")


# ------------------------------------------------------------------------------------------------ by hand


@row_of("unit-edited")
def _(box: Faulty, row: Row) -> None:
    pid = box.main_pid
    box.sh(f"sed -i 's/^TimeoutStopSec=.*/TimeoutStopSec=7/' {UNIT_FILE} && systemctl daemon-reload")
    assert box.file_sum() != box.base_sum
    run = box.replay()
    assert box.file_sum() == box.base_sum
    assert box.main_pid == pid
    assert box.show("TimeoutStopUSec") == "40s"
    row.took(run.seconds, "put right, nothing restarted")


@row_of("sitecustomize-broken")
def _(box: Faulty, row: Row) -> None:
    file = box.sh("ls /usr/lib/python3*/sitecustomize.py | head -1")
    old = box.sh(f"cat {file}")
    nonsense = "this is ( not python"
    box.write(file, nonsense + "\n")
    try:
        box.sh(f"systemctl restart {UNIT}", timeout=290)
        assert box.chat() == ANSWER
        environment = box.sh(f"tr '\\0' '\\n' </proc/{box.main_pid}/environ").split("\n")
        assert "NCCL_PROTO=LL" in environment
        pid, files = box.main_pid, box.file_sum()
        run = box.play("site.yml")
        assert run.rc != 0, run.report
        # Which lines are somebody's is not known here, so none is thrown away.
        assert "[sitecustomize] Broken sitecustomize" in run.failure and file in run.failure, run.report
        assert run.changed == []
        assert (box.main_pid, box.file_sum(), box.sh(f"cat {file}")) == (pid, files, nonsense)
    finally:
        box.write(file, old + "\n")
    box.replay()
    assert box.main_pid == pid
    row.took(run.seconds, "the service started with its NCCL values; the play named the file and changed nothing")


# ------------------------------------------------------------------------------------------------ deployments that cannot work


def refused(box: Faulty, row: Row, words: str, **extra: Any) -> None:
    """The play ends before anything is changed, and the server goes on."""
    pid, files = box.main_pid, box.file_sum()
    run = box.play("site.yml", **extra)
    assert run.rc != 0, run.report
    assert words in run.failure, run.report
    assert run.changed == []
    assert (box.main_pid, box.file_sum()) == (pid, files)
    assert box.chat() == ANSWER
    row.took(run.seconds, "refused with its reason, nothing changed, the same process serves")


@row_of("bad-flag")
def _(box: Faulty, row: Row) -> None:
    refused(box, row, "--no-such-flag", deployment_extra_args={"--no-such-flag": 1})


@row_of("missing-draft")
def _(box: Faulty, row: Row) -> None:
    refused(
        box, row, "/data/no-draft", deployment_profile="eagle3-topk1-v2", deployment_draft_model_path="/data/no-draft"
    )


@row_of("broken-weights")
def _(box: Faulty, row: Row) -> None:
    box.sh(
        "rm -rf /srv/bad && cp -r /data/tiny /srv/bad && for f in /srv/bad/*.safetensors; do "
        "head -c 4096 /dev/urandom | dd of=$f conv=notrunc status=none; done"
    )
    try:
        run = box.play("site.yml", deployment_model_path="/srv/bad")
    finally:
        box.sh("rm -rf /srv/bad")
    assert run.rc != 0, run.report
    box.wait_served()
    assert box.file_sum() == box.base_sum
    assert box.last_good() == box.base_good
    how = (
        "after the engine had failed on it, and was taken back"
        if "serves again" in run.failure
        else "by the play, before the engine saw it"
    )
    row.took(run.seconds, f"refused {how}; the last good deployment serves")


# ------------------------------------------------------------------------------------------------ switching


@row_of("rollback")
def _(box: Faulty, row: Row) -> None:
    killer = Killer(box)
    stamps: dict[str, float] = {}

    def handler(event: dict[str, Any]) -> None:
        killer(event)
        task = event["event_data"].get("task")
        if event["event"] == "runner_on_ok" and killer.failed and task:
            stamps.setdefault(task, time.monotonic())

    run = box.play("site.yml", handler=handler, **SWITCHED)
    killer.join()
    assert run.rc != 0, run.report
    assert "status=9/KILL" in run.failure
    assert "serves again with the last good one" in run.failure, run.failure
    assert box.chat() == ANSWER
    assert (box.file_sum(), box.last_good()) == (box.base_sum, box.base_good)
    back = stamps["Put the files of the last good deployment back"]
    switched = back - killer.failed[0]
    assert switched < 2, f"{switched:.1f} s from the failed gate to the unit that was put back: {stamps}"
    row.took(killer.failed[0] - killer.killed[0], f"put back {switched:.1f} s after the failed gate, serves")


@row_of("rollback-target-broken")
def _(box: Faulty, row: Row) -> None:
    killer = Killer(box, every=True)
    run = box.play("site.yml", handler=killer, **SWITCHED)
    killer.join()
    assert run.rc != 0
    assert len(killer.killed) == 2
    assert "failed as well" in run.failure, run.failure
    assert box.show("ActiveState") in ("inactive", "failed")
    assert box.last_good() == box.base_good
    box.replay()
    assert box.chat() == ANSWER
    row.took(run.seconds, "both facts said, stopped; the next play repaired it")


@row_of("disk-full")
def _(box: Faulty, row: Row) -> None:
    folder = f"{STATE}/deployments"
    box.sh(
        f"cp -a {folder} /srv/deployments && mount -t tmpfs -o size=1m,mode=755 none {folder} "
        f"&& cp -a /srv/deployments/. {folder}/ && (dd if=/dev/zero of={folder}/.filler bs=4k status=none; true)"
    )
    try:
        run = box.play("site.yml", **SWITCHED)
        assert run.rc != 0, run.report
        assert "No space left" in run.report, run.report
        box.wait_served()
        box.sh(f"rm {folder}/.filler")
        box.replay()
        assert box.last_good() == box.base_good
    finally:
        box.sh(f"cp -a {folder}/. /srv/deployments/; umount {folder}; rm -rf {folder}; cp -a /srv/deployments {folder}; "
               "rm -rf /srv/deployments", check=False)  # fmt: skip
    row.took(run.seconds, "failed with `No space left`, a server served; the next play repaired the record")


def killed_play(box: Faulty, row: Row, pattern: str, delay: float) -> None:
    """A play in a process group of its own, killed when its output shows a task; then another one."""
    variables = json.dumps(SWITCHED)
    command = ["ansible-playbook", "-i", str(box.inventory), "site.yml", "-e", variables]
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "PYTHONUNBUFFERED": "1",
        # With it the name of a task is printed when it begins, not with its result.
        "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "1",
    }
    play = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    shown: list[str] = []
    try:
        for line in play.stdout:
            shown.append(line)
            if re.search(pattern, line):
                time.sleep(delay)
                break
        else:
            raise AssertionError(f"no task {pattern!r} in\n{''.join(shown)[-4000:]}")
    finally:
        os.killpg(play.pid, signal.SIGKILL)
        play.wait()
    time.sleep(1)
    good = box.last_good()
    assert good == box.base_good
    run = box.play("site.yml", **SWITCHED)
    assert run.rc == 0, run.report
    assert box.chat() == ANSWER
    assert "--max-running-requests 5" in box.command_line
    assert box.last_good() != good
    again = box.play("site.yml", **SWITCHED)
    assert again.changed == []
    row.took(run.seconds, "the next play brought the new deployment; the one after it changed nothing")


@row_of("play-killed-unit-written")
def _(box: Faulty, row: Row) -> None:
    killed_play(box, row, r"TASK \[.*Let systemd read the unit", 0)


@row_of("play-killed-started")
def _(box: Faulty, row: Row) -> None:
    killed_play(box, row, r"TASK \[.*(Start the service|Wait until it serves)\]", 0)


@row_of("play-killed-waiting")
def _(box: Faulty, row: Row) -> None:
    killed_play(box, row, r"TASK \[.*Wait until it serves", 3)


@row_of("two-plays")
def _(box: Faulty, row: Row) -> None:
    second: list[tuple[float, int, str]] = []

    def handler(event: dict[str, Any]) -> None:
        # The first one is in the middle of its work, and waits here for the second.
        if (
            event["event"] == "playbook_on_task_start"
            and event["event_data"]["task"] == "Write the unit"
            and not second
        ):
            second.append((0.0, 0, ""))
            began = time.monotonic()
            done = subprocess.run(
                ["ansible-playbook", "-i", str(box.inventory), "site.yml", "-e", json.dumps({"deployment_overrides": {"max_running_requests": 6}})],
                cwd=ROOT, capture_output=True, text=True, timeout=280,
                env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
            )  # fmt: skip
            second[0] = (time.monotonic() - began, done.returncode, done.stdout)

    run = box.play("site.yml", handler=handler, **SWITCHED)
    assert run.rc == 0, run.report
    ((seconds, code, said),) = second
    assert code != 0, said[-3000:]
    assert "since" in said, said[-3000:]
    assert "--max-running-requests 5" in box.command_line
    assert box.chat() == ANSWER
    row.took(seconds, "the second refused and named the first, which finished")


# ------------------------------------------------------------------------------------------------ GPUs


# The real engine runs on the CPU and holds no device file; sandbox/standins/gpu-user is the process that uses a GPU.
GPU_USER = "/usr/local/bin/gpu-user"
BY_HAND = """
import json, os, sys
words = lambda name: [w for w in open(f"/proc/{sys.argv[1]}/{name}").read().split("\\0") if w]
strange = ("GPUSERVE_PLAN", "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_", "NOTIFY_SOCKET")
json.dump(
    {
        "argv": words("cmdline"),
        "env": dict(w.split("=", 1) for w in words("environ") if "=" in w and not w.startswith(strange)),
    },
    open("/root/by-hand.json", "w"),
)
"""
START_BY_HAND = """
import json, os
given = json.load(open("/root/by-hand.json"))
if os.fork():
    os._exit(0)
os.setsid()
out = os.open("/root/by-hand.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for number in (1, 2):
    os.dup2(out, number)
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
os.chdir("/root")
os.execve(given["argv"][0], given["argv"], given["env"])
"""


def somebody(box: Faulty, name: str, *words: str) -> None:
    """A unit of somebody else's that uses a GPU."""
    box.sh(f"systemd-run --unit {name} {GPU_USER} {' '.join(words)}")
    assert until(lambda: "ready" in box.journal(name, lines=5), 20)


@row_of("gpu-monitor")
def _(box: Faulty, row: Row) -> None:
    somebody(box, "monitor", "--gpus", "0", "--monitor")
    try:
        run = box.play("site.yml", **SWITCHED)
        assert run.rc == 0, run.report
        assert box.sh("systemctl is-active monitor") == "active"
    finally:
        box.sh("systemctl stop monitor", check=False)
    row.took(run.seconds, "the service was restarted, the monitor went on")


@row_of("gpu-foreign")
def _(box: Faulty, row: Row) -> None:
    pid, files = box.main_pid, box.file_sum()
    somebody(box, "training", "--gpus", "3")
    try:
        run = box.play("site.yml", **SWITCHED)
        holder = box.show("MainPID", "training")
        assert run.rc != 0, run.report
        assert f"pid {holder}" in run.failure, run.failure
        assert "training.service" in run.failure
        assert box.sh("systemctl is-active training") == "active"
    finally:
        box.sh("systemctl stop training", check=False)
    assert (box.main_pid, box.file_sum()) == (pid, files)
    assert box.chat() == ANSWER
    row.took(run.seconds, "refused by pid and unit, nothing stopped")


@row_of("gpu-orphan")
def _(box: Faulty, row: Row) -> None:
    python = box.command_line.split()[0]
    box.sh(f"systemctl stop {UNIT}", timeout=120)
    worker = f"{python} {GPU_USER} --gpus 4 --ignore-term --title sglang::scheduler_TP4"
    orphan = box.sh(f"setsid {worker} </dev/null >/root/orphan.log 2>&1 & p=$!; sleep 2; echo $p")
    try:
        run = box.play("site.yml")
        assert run.rc == 0, run.report
        assert box.sh(f"test -e /proc/{orphan} && echo there", check=False) == ""
    finally:
        box.sh(f"kill -KILL {orphan}", check=False)
    assert box.chat() == ANSWER
    row.took(run.seconds, "the worker was ended (SIGTERM, then SIGKILL), the service serves")


@row_of("nohup-server")
def _(box: Faulty, row: Row) -> None:
    box.write("/root/keep.py", BY_HAND)
    box.write("/root/start.py", START_BY_HAND)
    box.sh(f"python3 /root/keep.py {box.main_pid}")
    box.sh(f"systemctl stop {UNIT}; python3 /root/start.py", timeout=120)
    healthy = f"curl -s -o /dev/null -w '%{{http_code}}' {URL}/health"
    assert until(lambda: box.sh(healthy, check=False) == "200", 150), box.sh("tail -n 30 /root/by-hand.log")
    asked: list[Asked] = []

    def handler(event: dict[str, Any]) -> None:
        began = event["event"] == "playbook_on_task_start"
        if began and not asked and event["event_data"]["task"].startswith("See who holds the GPUs"):
            asked.append(box.ask(1500, limit=170))

    run = box.play(
        "site.yml", handler=handler, sglang_service_take_over=[{"match": "sglang.launch_server.*--port 30000"}]
    )
    assert run.rc == 0, run.report
    assert asked[0].join(60).tokens == 1500
    box.wait_served()
    row.took(run.seconds, "drained (1500 of 1500 tokens arrived), taken over, the service serves")
