"""GPUs that are held when the service is to start: by strangers, by monitors, by its own leftovers, by a server from before.

The real engine runs on the CPU and holds no device file; sandbox/standins/gpu-user is the process that uses a GPU.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import UNIT, Box, ansible

#: The answer that is on its way when the server is told to end takes so long, at the speed that was measured before (s) ...
ANSWER_S = 40
#: ... within the context of the server that was started by hand, which is larger than the sandbox's.
CONTEXT = 30000
BY_HAND = "sglang.launch_server.*--port 30000"
START = """
import json, os, sys
given = json.load(open("/root/by-hand.json"))
if os.fork():
    os._exit(0)
os.setsid()
out = os.open("/root/by-hand.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
os.dup2(out, 1)
os.dup2(out, 2)
os.chdir("/root")
os.execve(given["argv"][0], given["argv"], given["env"])
"""
KEEP = """
import json, sys
words = lambda name: [w for w in open(f"/proc/{sys.argv[1]}/{name}").read().split("\\0") if w]
strange = ("GPUSERVE_PLAN", "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_", "NOTIFY_SOCKET")
env = dict(w.split("=", 1) for w in words("environ") if not w.startswith(strange))
env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
argv = words("cmdline")
argv[argv.index("--context-length") + 1] = sys.argv[2]
argv[argv.index("--max-total-tokens") + 1] = str(int(sys.argv[2]) + 2000)
json.dump({"argv": argv, "env": env}, open("/root/by-hand.json", "w"))
"""


def release(box: Box, *more: str, **options: Any) -> dict[str, Any]:
    """The module, used alone; its result, whether it failed or not."""
    with tempfile.TemporaryDirectory() as folder:
        done = ansible(
            "ansible", "-i", str(box.inventory), box.name, "-m", "gpuserve.sglang.gpu_release", "-a", json.dumps({"state": "reported", **options}),
            "--tree", folder, *more,
        )  # fmt: skip
        files = list(Path(folder).iterdir())
        assert files, done.stdout + done.stderr
        return json.loads(files[0].read_text())


def kinds(result: dict[str, Any]) -> dict[int, str]:
    return {holder["pid"]: holder["kind"] for holder in result["holders"]}


def user(box: Box, *words: str, python: str = "python3", name: str = "") -> int:
    """Start a process that uses GPUs; its number. It belongs to nobody's unit, and process 1 is its parent."""
    line = f"{python} /usr/local/bin/gpu-user {shlex.join(words)}"
    return int(box.sh(f"cd /root; {name} setsid {line} </dev/null >/root/user.log 2>&1 & p=$!; sleep 1; echo $p"))


def alive(box: Box, pid: int) -> bool:
    return box.sh(f"kill -0 {pid} 2>/dev/null && echo yes", check=False) == "yes"


class Request(threading.Thread):
    """An answer of so many tokens, asked for in the background."""

    def __init__(self, box: Box, tokens: int) -> None:
        super().__init__(daemon=True)
        self.box, self.tokens, self.answer, self.seconds = box, tokens, "", 0.0

    def run(self) -> None:
        began = time.monotonic()
        sampling = {"max_new_tokens": self.tokens, "ignore_eos": True, "temperature": 0}
        done = subprocess.run(
            ["podman", "exec", self.box.name, "curl", "-s", "--max-time", "800", "-H", "Content-Type: application/json",
             "-d", json.dumps({"text": "hi", "sampling_params": sampling}), "http://127.0.0.1:30000/generate"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        self.seconds = time.monotonic() - began
        self.answer = done.stdout or f"curl ended with status {done.returncode}"

    @property
    def completed(self) -> int:
        return int(json.loads(self.answer)["meta_info"]["completion_tokens"])


@pytest.fixture(scope="module")
def by_hand(serving_box: Box):
    """The unit is stopped, and the same server was started by hand, as before the collection came: its main process."""
    box = serving_box
    python = box.command_line.split()[0]
    box.write("/root/keep.py", KEEP)
    box.write("/root/start.py", START)
    box.sh(f"python3 /root/keep.py {box.main_pid} {CONTEXT}")
    box.sh(f"systemctl stop {UNIT}")
    box.sh("python3 /root/start.py")
    try:
        box.wait_for(
            lambda: (
                box.sh("curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:30000/health", check=False) == "200"
            ),
            240,
            "an answer of the server that was started by hand",
        )
    except AssertionError as error:
        raise AssertionError(box.sh("tail -n 30 /root/by-hand.log", check=False)) from error
    pid = int(box.sh("pgrep -o -f '^[^ ]*python[^ ]* -m sglang.launch_server'"))
    yield python, pid


def test_holders_are_told_apart_and_strangers_stay(by_hand: tuple[str, int], serving_box: Box) -> None:
    box, (python, main) = serving_box, by_hand
    monitor = user(box, "--gpus", "2", "--monitor")
    stranger = user(box, "--gpus", "3")
    # A worker with a title has no environment any more: the libraries of the release say whose it is.
    orphan = user(box, "--gpus", "4", "--title", "sglang::scheduler_TP4", "--ignore-term", python=python)
    found = release(box, servers=[{"match": BY_HAND}])
    seen = kinds(found)
    assert (seen[monitor], seen[stranger], seen[orphan], seen[main]) == ("monitor", "foreign", "own", "named")
    workers = [h["pid"] for h in found["holders"] if h["kind"] == "named" and h["pid"] != main]
    assert workers, "the server's workers go with it"
    (holder,) = [h for h in found["holders"] if h["pid"] == stranger]
    assert (holder["user"], holder["memory_mib"], holder["gpus"]) == ("root", 4096, [3])
    assert {"/dev/nvidia3", "/dev/nvidiactl"} <= set(holder["files"])
    assert found["gpus"]["2"] == 0
    # Not named, the server is nobody's business here: it holds no GPU. Nothing is ended by a look.
    assert main not in kinds(release(box))

    # The play refuses the stranger before it touches the server that serves.
    refused = box.play("site.yml", sglang_service_take_over=[{"match": BY_HAND}])
    assert refused.rc != 0
    for word in (f"pid {stranger}", "gpu-user --gpus 3", "user root", "4096 MiB"):
        assert word in refused.failure, refused.report
    assert f"pid {orphan} " not in refused.failure
    assert refused.changed == []
    assert all(alive(box, pid) for pid in (monitor, stranger, orphan, main, *workers))

    # And so does the module alone.
    result = release(box, state="released", servers=[{"match": BY_HAND}])
    assert f"pid {stranger} " in result["msg"]
    assert "No process was signalled" in result["msg"]
    assert all(alive(box, pid) for pid in (monitor, stranger, orphan, main, *workers))
    box.sh(f"kill {stranger}")

    # Check mode says who would be ended, and ends nobody.
    said = release(box, "--check", state="released", servers=[{"match": BY_HAND}])
    assert {entry["pid"] for entry in said["released"]} == {orphan, main, *workers}
    assert said["changed"] is True
    assert all(alive(box, pid) for pid in (monitor, orphan, main, *workers))


def test_a_server_that_was_started_by_hand_is_taken_over_and_its_request_ends(
    by_hand: tuple[str, int], serving_box: Box
) -> None:
    box, (_python, main) = serving_box, by_hand
    before = kinds(release(box, servers=[{"match": BY_HAND}]))
    monitor, orphan = (next(pid for pid, kind in before.items() if kind == wanted) for wanted in ("monitor", "own"))
    # How long an answer takes depends on the machine: it must last until the play comes to the GPUs.
    sample = Request(box, 300)
    sample.run()
    request = Request(box, min(CONTEXT - 500, max(1500, int(sample.completed / sample.seconds * ANSWER_S))))
    ended: list[bool] = []

    def ask(event: dict[str, Any]) -> None:
        if event["event"] != "playbook_on_task_start":
            return
        if event["event_data"]["task"].startswith("See who holds the GPUs"):
            request.start()
        if event["event_data"]["task"].startswith("Free the GPUs of"):
            ended.append(not request.is_alive())

    play = box.play(
        "site.yml", handler=ask, sglang_service_take_over=[{"match": BY_HAND}], sglang_service_gpu_term_timeout=600
    )
    assert play.rc == 0, play.report
    assert ended == [False], "the answer was on its way when the server was told to end"
    request.join(60)
    assert request.completed == request.tokens
    freed = play.result("Free the GPUs of what the old server left, and of the servers that are taken over")
    signals = {entry["pid"]: entry["signals"] for entry in freed["released"]}
    assert signals[main] == ["SIGTERM"], "it drained and was not killed"
    assert signals[orphan] == ["SIGTERM", "SIGKILL"], "it ignored SIGTERM"
    assert set(freed["gpus"].values()) == {0}
    assert alive(box, monitor), "a monitor is left alone"
    assert not alive(box, main)
    assert not alive(box, orphan)
    assert box.main_pid > 0
    assert box.chat()

    # The entry stays in the inventory, fits nothing but our own unit now, and does nothing.
    again = box.play("site.yml", sglang_service_take_over=[{"match": BY_HAND}])
    assert (again.rc, again.changed) == (0, []), again.report
    # Nothing is ended under a unit that systemd would start again.
    result = release(box, state="released")
    assert f"{UNIT} is active" in result["msg"]
    assert box.main_pid > 0
    box.sh(f"kill {monitor}")


def test_a_server_that_a_unit_merely_contains_is_taken_over_and_that_of_a_unit_is_not(serving_box: Box) -> None:
    """As cron starts one at boot; that unit is not the server's, and must not be ended for it."""
    box = serving_box
    gpu_user = "/usr/bin/python3 /usr/local/bin/gpu-user --gpus"
    box.sh(f"systemd-run --unit keeper sh -c 'setsid {gpu_user} 5 </dev/null & exec sleep 1000'")
    box.sh(f"systemd-run --unit trainer {gpu_user} 6")
    box.wait_for(
        lambda: len(box.sh("pgrep -f '[g]pu-user --gpus [56]'", check=False).split()) >= 2, 20, "two users of GPUs"
    )
    contained, owned = (int(box.sh(f"pgrep -f '^/usr/bin/python3 .*[g]pu-user --gpus {gpu}'")) for gpu in (5, 6))
    try:
        seen = kinds(release(box, unit="none.service", servers=[{"pid": contained}]))
        assert (seen[contained], seen[owned]) == ("named", "foreign")
        refused = release(box, state="released", unit="none.service", servers=[{"pid": owned}])
        assert "disable --now trainer.service" in refused["msg"] and alive(box, owned)
        box.sh("systemctl stop trainer")
        freed = release(box, state="released", unit="none.service", servers=[{"pid": contained}])
        assert [entry["pid"] for entry in freed["released"]] == [contained], freed
        assert box.sh("systemctl is-active keeper") == "active"
    finally:
        box.sh("systemctl stop keeper trainer", check=False)
