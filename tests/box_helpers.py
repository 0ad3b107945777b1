"""A box and the plays on it, for tests: of tests/integration and of Molecule scenarios.

sys.path.insert(0, str(ROOT / "tests"))
from box_helpers import Box

box = Box("gpuserve-faults", folder)
run = box.play("site.yml", deployment_port=30001)
assert run.rc == 0, run.report
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ansible_runner
import yaml

ROOT = Path(__file__).resolve().parents[1]
UNIT = "sglang-kimi.service"
STATE = "/var/lib/sglang-kimi"
ANSWER = "Hello from the sandbox: this tiny model runs on a real SGLang engine, and its answer is known."
#: No play of a test takes this long, so that one that hangs fails with its output (s).
PLAY_TIMEOUT_S = 900
COMMAND_TIMEOUT_S = 300
OUTPUT_LINES = 60


@dataclass
class Run:
    """What one playbook run did, from its events."""

    rc: int
    seconds: float
    events: list[dict[str, Any]]
    stdout: str
    playbook: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Short: pytest shows it in every failed assertion about the run."""
        return f"<{self.playbook}: exit status {self.rc}, {self.seconds:.0f} s, failure {self.failure[:300]!r}>"

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
    def failed(self) -> list[dict[str, Any]]:
        """The event data of tasks that failed or found the host unreachable, rescued ones included."""
        kinds = ("runner_on_failed", "runner_on_unreachable", "runner_item_on_failed")
        return [
            e["event_data"] for e in self.events if e["event"] in kinds and not e["event_data"].get("ignore_errors")
        ]

    @property
    def failure(self) -> str:
        """The message of the task that ended the play."""
        failed = [e for e in self.of("runner_on_failed") if not e["event_data"].get("ignore_errors")]
        return str(failed[-1]["event_data"]["res"].get("msg", "")) if failed else ""

    @property
    def tasks(self) -> list[str]:
        return [e["event_data"]["task"] for e in self.of("playbook_on_task_start")]

    def result(self, task: str) -> dict[str, Any]:
        """The result of the last run of a task that succeeded."""
        found = [e["event_data"]["res"] for e in self.of("runner_on_ok") if e["event_data"]["task"] == task]
        assert found, f"no task '{task}' ended well in\n{self.report}"
        return found[-1]

    @property
    def report(self) -> str:
        """For people: what failed with which words, what changed, and the end of the output."""
        lines = [f"{self.playbook} {self.extra or ''}: exit status {self.rc} after {self.seconds:.0f} s"]
        for data in self.failed:
            result = data["res"]
            lines.append(f"FAILED {data['task']} [{data.get('host')}]: {result.get('msg', '')}")
            lines += [
                f"  {key}: {str(result[key]).strip()[-2000:]}"
                for key in ("module_stderr", "stderr", "exception")
                if result.get(key) and "traceback unavailable" not in str(result[key])
            ]
        lines.append(f"changed: {self.changed}")
        lines += ["last lines:", *self.stdout.splitlines()[-OUTPUT_LINES:]]
        return "\n".join(lines)


class Box:
    """A throw-away GPU box and its inventory.

    :param folder: an empty folder of the test for the inventory and for what runner writes, a temporary one by default; one that
        holds a hosts.yml is an inventory of the test's own
    :param variables: host variables of the box beside the sandbox's own
    """

    def __init__(self, name: str, folder: Path | None = None, variables: dict[str, Any] | None = None) -> None:
        folder = folder or Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self.name = name
        self.runs: list[Run] = []
        if (folder / "hosts.yml").exists():
            self.folder, self.inventory = folder.parent, folder
            return
        self.folder, self.inventory = folder, folder / "inventory"
        self.inventory.mkdir(parents=True, exist_ok=True)
        host = {
            "ansible_connection": "box",
            "ansible_become": False,
            "ansible_python_interpreter": "/usr/bin/python3",
            **(variables or {}),
        }
        (self.inventory / "hosts.yml").write_text(yaml.safe_dump({"gpu_servers": {"hosts": {name: host}}}))
        if not (self.inventory / "group_vars").exists():
            (self.inventory / "group_vars").symlink_to(ROOT / "inventories" / "sandbox" / "group_vars")

    # --- the container ---------------------------------------------------------------------------------------

    def up(self, *arguments: str) -> None:
        _sandbox("up", self.name, *arguments)

    def restart(self) -> None:
        _sandbox("restart", self.name)

    def down(self) -> None:
        _sandbox("down", self.name)

    def sh(self, command: str, check: bool = True, timeout: float = COMMAND_TIMEOUT_S) -> str:
        """What a shell command prints; with `check`, an exit status that is not 0 is an error."""
        words = ["podman", "exec", self.name, "sh", "-c", command]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout)
        if check and done.returncode != 0:
            raise AssertionError(f"`{command}` on {self.name} ended with {done.returncode}: {done.stderr}{done.stdout}")
        return done.stdout.strip()

    def background(self, *command: str) -> None:
        subprocess.run(["podman", "exec", "--detach", self.name, *command], check=True, capture_output=True)

    def write(self, path: str, text: str, mode: str = "0644") -> None:
        words = ["podman", "exec", "--interactive", self.name, "sh", "-c", 'cat >"$0" && chmod "$1" "$0"', path, mode]
        subprocess.run(words, input=text, text=True, check=True, capture_output=True)

    def wait_for(self, condition: Callable[[], Any], seconds: float = 30.0, what: str = "the condition") -> Any:
        """The first true value of a condition; after the given time an error with the unit's last journal lines."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come true within {seconds:g} s\n{self.journal(lines=30)}")
            time.sleep(0.2)
        return value

    # --- the server ------------------------------------------------------------------------------------------

    def show(self, name: str, unit: str = UNIT) -> str:
        """One property of a unit."""
        return self.sh(f"systemctl show -P {name} {unit}")

    @property
    def main_pid(self) -> int:
        """Process id of the server, 0 when it does not run."""
        return int(self.show("MainPID") or 0)

    @property
    def command_line(self) -> str:
        """The words of the process that serves, with single spaces."""
        return self.sh(f"tr '\\0' ' ' </proc/{self.main_pid}/cmdline")

    def journal(self, unit: str = UNIT, lines: int = 200, since: str = "") -> str:
        limits = f"-n {lines}" + (f" --since {shlex.quote(since)}" if since else "")
        return self.sh(f"journalctl --no-pager -o cat -u {unit} {limits}", check=False)

    def chat(self, port: int = 30000) -> str:
        """A real answer of the model."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64, "temperature": 0.7}
        answer = self.sh(
            "curl -sf --max-time 120 -H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(body))} http://127.0.0.1:{port}/v1/chat/completions"
        )
        return json.loads(answer)["choices"][0]["message"]["content"]

    def fingerprint(self) -> str:
        """What a play could have changed: files, users and units. What timers and apt's look-ups touch is left out."""
        return self.sh(
            "{ find /etc /opt /srv /usr/lib/systemd /usr/lib/python3* /usr/local /var/lib /var/cache /home "
            "-xdev -type f -not -path '*/__pycache__/*' -not -path '/var/lib/systemd/*' -not -path '/var/cache/apt/*' "
            "-printf '%p %s %T@\\n' 2>/dev/null | sort; "
            "cat /etc/passwd; systemctl list-unit-files --no-legend; } | sha256sum"
        )

    # --- plays -----------------------------------------------------------------------------------------------

    def play(
        self,
        playbook: str | Path,
        *arguments: str,
        handler: Callable[[dict[str, Any]], Any] | None = None,
        env: dict[str, str] | None = None,
        timeout: float = PLAY_TIMEOUT_S,
        **extra: Any,
    ) -> Run:
        """Run a playbook of the checkout on this box through ansible-runner; keywords are extra variables."""
        lines: list[str] = []

        def on_event(event: dict[str, Any]) -> bool:
            lines.append(event.get("stdout", ""))
            if handler is not None:
                handler(event)
            return True

        began = time.monotonic()
        # A folder for each run: runner would hand the extra variables of one run to the next.
        private = self.folder / f"run-{len(self.runs)}"
        private.mkdir()
        runner = ansible_runner.run(
            private_data_dir=str(private),
            project_dir=str(ROOT),
            playbook=str(playbook),
            inventory=str(self.inventory),
            cmdline=" ".join(arguments) or None,
            extravars=extra or None,
            envvars={
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
                **(env or {}),
            },
            event_handler=on_event,
            timeout=int(timeout),
            quiet=True,
        )
        stdout = "\n".join(line for line in lines if line)
        run = Run(runner.rc, time.monotonic() - began, list(runner.events), stdout, str(playbook), extra)
        self.runs.append(run)
        assert runner.status != "timeout", f"the play did not end within {timeout:g} s\n{run.report}"
        return run

    def serve(self, **extra: Any) -> Run | None:
        """Have the sandbox's deployment serve; nothing is played when a server runs already."""
        if self.main_pid and not extra:
            return None
        run = self.play("site.yml", **extra)
        assert run.rc == 0, run.report
        return run


def _sandbox(*arguments: str) -> None:
    done = subprocess.run([ROOT / "sandbox" / "box", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def ansible(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command line tool of Ansible, from the checkout and with its configuration."""
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        **options.pop("env", {}),
    }
    options.setdefault("timeout", PLAY_TIMEOUT_S)
    return subprocess.run(
        command, cwd=options.pop("cwd", ROOT), env=environment, capture_output=True, text=True, check=False, **options
    )


def as_json(text: str) -> Any:
    return json.loads(text[text.index("{") :])
