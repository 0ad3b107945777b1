"""One converged box, faults done to it, and a record of what was seen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))

from box_helpers import ANSWER, UNIT, Box, Run  # noqa: E402

HERE = ROOT / "molecule" / "faults"
RECORD = ROOT / "tests" / "output" / "faults.json"
NAME = os.environ.get("GPUSERVE_FAULTS_BOX", "gpuserve-faults")
STATE = "/var/lib/sglang-kimi"
TIMER = "sglang-kimi-liveness.timer"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
URL = "http://127.0.0.1:30000"
TABLE: list[dict[str, Any]] = yaml.safe_load((HERE / "tests" / "faults.yml").read_text())


class Row:
    """What one fault led to."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.entry = entry
        self.seconds: float | None = None
        self.seen = ""

    def took(self, seconds: float, seen: str) -> None:
        """The figure of the table's clock, and what was seen in words. The limit of the table holds."""
        self.seconds, self.seen = round(seconds, 1), seen
        assert seconds <= self.entry["within"], f"{seconds:.1f} s, expected at most {self.entry['within']} s: {seen}"


class Faulty(Box):
    """The box, with the means to break it and to see it whole again."""

    # -- what is there

    @property
    def scheduler(self) -> int:
        """The scheduler's process."""
        return int(self.sh(f"pgrep -P {self.main_pid} -f '^sglang::scheduler'").split()[0])

    def serves(self) -> bool:
        """One look: the unit is active and /health says 200."""
        look = f"systemctl is-active -q {UNIT} && curl -sf -m 25 -o /dev/null {URL}/health"
        return self.sh(f"{look} && echo yes", check=False).endswith("yes")

    def wait_served(self, seconds: float = 150.0) -> None:
        """Wait until it serves, and let it say its sentence."""
        self.wait_for(self.serves, seconds, "serving")
        assert self.chat() == ANSWER

    def started(self) -> int:
        """How often the unit's process was started since the boot, by the invocations in the journal."""
        return int(self.show("NRestarts") or 0)

    def wait_restart(self, old: int, seconds: float) -> float:
        """Seconds until another main process runs."""
        began = time.monotonic()
        self.wait_for(lambda: self.main_pid not in (0, old), seconds, f"a main process other than {old}")
        return time.monotonic() - began

    def incidents(self) -> set[str]:
        """Names of the incident folders."""
        return set(self.sh(f"ls {STATE}/incidents 2>/dev/null", check=False).split())

    def summary(self, name: str) -> str:
        """The front page of an incident."""
        return self.sh(f"cat {STATE}/incidents/{name}/summary.md")

    def liveness(self) -> dict[str, Any]:
        """What the timer knows."""
        text = self.sh("cat /run/gpuserve-sglang/sglang-kimi.liveness.json 2>/dev/null", check=False)
        return json.loads(text) if text else {}

    def last_good(self) -> str:
        """The deployment on record."""
        return self.sh(f"readlink {STATE}/deployments/last-good")

    def file_sum(self) -> str:
        """The unit as it is on the disk."""
        return self.sh(f"sha256sum <{UNIT_FILE}")

    # -- what is done

    def signal(self, pid: int, name: str) -> None:
        self.sh(f"kill -{name} {pid}")

    def begin_load(self) -> int:
        """Restart the service and come back when the engine loads; its process."""
        old = self.main_pid
        self.sh(f"systemctl restart --no-block {UNIT}")
        self.wait_for(lambda: self.main_pid not in (0, old), 60, "a new process")
        pid = self.main_pid
        self.wait_for(lambda: "server_args=" in self.journal_of(pid), 60, "the engine's first line")
        return pid

    def journal_of(self, pid: int) -> str:
        return self.sh(f"journalctl -o cat --no-pager -n 200 _PID={pid}", check=False)

    def ask(self, tokens: int, limit: int = 170, ids: list[int] | None = None) -> Asked:
        """A request in the background that generates exactly so many tokens."""
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.7}
        prompt = {"text": "hi"} if ids is None else {"input_ids": ids}
        return Asked(self, {**prompt, "sampling_params": sampling}, limit)

    def restore(self) -> None:
        """The planned deployment serves, and nothing of a fault is left."""
        self.sh("pkill -KILL -f '[g]pu-user'; systemctl stop impostor monitor training 2>/dev/null; true")
        self.sh("rm -f /run/gpuserve-sglang/*.maintenance; rm -rf /run/systemd/system/sglang-kimi.service.d; true")
        self.sh(f"pkill -CONT -f '^sglang::' ; kill -CONT {self.main_pid or 1}; true")
        if self.file_sum() != self.base_sum or self.last_good() != self.base_good:
            self.replay()
        self.sh(f"systemctl daemon-reload; systemctl reset-failed {UNIT}; systemctl start {TIMER}; true")
        if not self.serves():
            self.sh(f"systemctl restart {UNIT}", timeout=290)
        self.wait_served()

    def replay(self) -> Run:
        """site.yml as the inventory has it."""
        run = self.play("site.yml")
        assert run.rc == 0, run.report
        return run

    base_sum = ""
    base_good = ""


class Asked:
    """A request under way, from inside the box."""

    def __init__(self, box: Box, body: dict[str, Any], limit: int) -> None:
        self.code, self.text = "", ""
        self._box, self._limit = box, limit
        self._body = json.dumps(body)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        command = (
            f"curl -s -m {self._limit} -w '\\n%{{http_code}}' -H 'Content-Type: application/json' -d @- {URL}/generate "
            f"<<'END'\n{self._body}\nEND"
        )
        answer = self._box.sh(command, check=False, timeout=self._limit + 30)
        self.text, __, self.code = answer.rpartition("\n")

    def join(self, seconds: float) -> Asked:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the request is still under way"
        return self

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def tokens(self) -> int:
        return int(json.loads(self.text)["meta_info"]["completion_tokens"])


class Killer:
    """Kills the server during its load, in the first start of a play or in every one, and notes the times."""

    def __init__(self, box: Faulty, every: bool = False) -> None:
        self.box, self.every = box, every
        self.killed: list[float] = []
        self.failed: list[float] = []
        self.switched: list[float] = []
        self.threads: list[threading.Thread] = []

    def __call__(self, event: dict[str, Any]) -> None:
        task = event["event_data"].get("task")
        if event["event"] == "runner_on_ok" and task == "Start the service" and (self.every or not self.threads):
            self.threads.append(threading.Thread(target=self.kill, daemon=True))
            self.threads[-1].start()
        if event["event"] == "runner_on_failed" and task == "Wait until it serves":
            self.failed.append(time.monotonic())

    def kill(self) -> None:
        box = self.box
        box.wait_for(lambda: box.main_pid, 60, "a main process")
        pid = box.main_pid
        box.wait_for(lambda: "server_args=" in box.journal_of(pid), 60, "the engine's first line")
        box.sh(f"kill -KILL {pid}")
        self.killed.append(time.monotonic())

    def join(self) -> None:
        for thread in self.threads:
            thread.join(130)


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    """The box that the scenario has converged, and what it looks like when it is whole."""
    folder = tmp_path_factory.mktemp("faults")
    inventory = folder / "inventory"
    inventory.mkdir()
    text = (HERE / "inventory" / "hosts.yml").read_text().replace("gpuserve-faults", NAME)
    (inventory / "hosts.yml").write_text(text)
    (inventory / "group_vars").symlink_to(ROOT / "inventories" / "sandbox" / "group_vars")
    made = Faulty(NAME, inventory)
    made.wait_served()
    made.base_sum, made.base_good = made.file_sum(), made.last_good()
    return made


@pytest.fixture
def row(request: pytest.FixtureRequest, box: Faulty) -> Iterator[Row]:
    """The entry of the table that the test is about; afterwards the box is whole again, whatever the test found."""
    entry = request.getfixturevalue("entry")
    box.restore()
    made = Row(entry)
    yield made
    box.restore()


def record(entry: dict[str, Any], row: Row | None, outcome: str) -> None:
    """Keep what was seen; a later run replaces the rows that it has."""
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": {}}
    known["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    known["rows"][entry["id"]] = {
        "outcome": outcome,
        "seconds": row.seconds if row else None,
        "seen": row.seen if row else "",
    }
    RECORD.write_text(json.dumps(known, indent=1) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    entry = getattr(item, "callspec", None) and item.callspec.params.get("entry")
    if entry and report.when == "call":
        row = item.funcargs.get("row")
        skipped = str(report.longrepr[2]) if report.skipped else ""
        if skipped and row:
            row.seen = re.sub(r"^Skipped: ", "", skipped)
        record(entry, row, report.outcome)
    box = getattr(item, "funcargs", {}).get("box")
    if report.failed and isinstance(box, Faulty) and box.runs:
        report.sections.append(("last play on the box", box.runs[-1].report))
    return report


def podman(*words: str) -> None:
    """A command of the container runtime."""
    done = subprocess.run(["podman", *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def until(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether a condition comes true within the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.5)
    return False
