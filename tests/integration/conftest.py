"""A box of its own, and site.yml driven through ansible-runner, whose event stream the tests read."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ansible_runner
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BOX = "gpuserve-integration"
UNIT = "sglang-kimi.service"


@dataclass
class Run:
    """What one playbook run did, from its events."""

    rc: int
    seconds: float
    events: list[dict[str, Any]] = field(repr=False)
    stdout: str = field(repr=False)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == kind]

    @property
    def stats(self) -> dict[str, int]:
        (stats,) = self.of("playbook_on_stats")
        names = ("ok", "changed", "failures", "dark", "skipped", "rescued")
        return {name: sum(stats["event_data"][name].values()) for name in names}

    @property
    def changed(self) -> list[str]:
        return [e["event_data"]["task"] for e in self.of("runner_on_ok") if e["event_data"]["res"].get("changed")]

    @property
    def failure(self) -> str:
        """The message of the task that ended the play."""
        failed = [e for e in self.of("runner_on_failed") if not e["event_data"].get("ignore_errors")]
        return str(failed[-1]["event_data"]["res"].get("msg", "")) if failed else ""

    @property
    def tasks(self) -> list[str]:
        return [e["event_data"]["task"] for e in self.of("playbook_on_task_start")]


class Box:
    """The throw-away GPU box and its inventory."""

    def __init__(self, name: str, inventory: Path) -> None:
        self.name, self.inventory = name, inventory
        self._runs = 0

    def sh(self, command: str, check: bool = True) -> str:
        done = subprocess.run(["podman", "exec", self.name, "sh", "-c", command], capture_output=True, text=True)
        if check and done.returncode != 0:
            raise AssertionError(f"`{command}` on {self.name} ended with {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def background(self, *command: str) -> None:
        subprocess.run(["podman", "exec", "--detach", self.name, *command], check=True, capture_output=True)

    @property
    def main_pid(self) -> int:
        return int(self.sh(f"systemctl show -P MainPID {UNIT}") or 0)

    def fingerprint(self) -> str:
        """What a play could have changed: files, users and units. What timers and apt's look-ups touch is left out."""
        return self.sh(
            "{ find /etc /opt /srv /usr/lib/systemd /usr/lib/python3* /var/lib /var/cache /home "
            "-xdev -type f -not -path '*/__pycache__/*' -not -path '/var/lib/systemd/*' -not -path '/var/cache/apt/*' -printf '%p %s %T@\\n' 2>/dev/null | sort; "
            "cat /etc/passwd; systemctl list-unit-files --no-legend; } | sha256sum"
        )

    def play(self, playbook: str, *arguments: str, handler: Any = None, **extra: Any) -> Run:
        """Run a playbook of the checkout on this box through ansible-runner."""
        lines: list[str] = []

        def on_event(event: dict[str, Any]) -> bool:
            lines.append(event.get("stdout", ""))
            if handler is not None:
                handler(event)
            return True

        began = time.monotonic()
        # A folder for each run: runner would hand the extra variables of one run to the next.
        private = self.inventory.parent / f"run-{self._runs}"
        private.mkdir()
        self._runs += 1
        runner = ansible_runner.run(
            private_data_dir=str(private),
            project_dir=str(ROOT),
            playbook=playbook,
            inventory=str(self.inventory),
            cmdline=" ".join(arguments) or None,
            extravars=extra or None,
            envvars={
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            },
            event_handler=on_event,
            quiet=True,
        )
        stdout = "\n".join(line for line in lines if line)
        return Run(runner.rc, time.monotonic() - began, list(runner.events), stdout)


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory):
    """A fresh box: nothing of the collection has touched it yet."""
    inventory = tmp_path_factory.mktemp("integration") / "inventory"
    inventory.mkdir()
    host = {
        "ansible_connection": "box",
        "ansible_become": False,
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    (inventory / "hosts.yml").write_text(yaml.safe_dump({"gpu_servers": {"hosts": {BOX: host}}}))
    (inventory / "group_vars").symlink_to(ROOT / "inventories" / "sandbox" / "group_vars")
    subprocess.run([ROOT / "sandbox" / "box", "down", BOX], check=True)
    subprocess.run([ROOT / "sandbox" / "box", "up", BOX], check=True)
    yield Box(BOX, inventory)
    if not os.environ.get("KEEP_BOX"):
        subprocess.run([ROOT / "sandbox" / "box", "down", BOX], check=True)


def ansible(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command line tool of Ansible, from the checkout and with its configuration."""
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        **options.pop("env", {}),
    }
    return subprocess.run(
        command, cwd=options.pop("cwd", ROOT), env=environment, capture_output=True, text=True, **options
    )


def as_json(text: str) -> Any:
    return json.loads(text[text.index("{") :])
