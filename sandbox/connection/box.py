"""Reach a box of the sandbox: one call of its runtime for each module, with the module on its standard input."""

from __future__ import annotations

DOCUMENTATION = """
name: box
short_description: Run modules in a box of the sandbox
description:
  - Reaches a container on this machine with C(runc exec) or C(crun exec), whichever runs it. C(podman exec) does the same and
    takes four times as long; it is used where podman does not run as root, and to say what is wrong.
  - Sends a module on the standard input of its interpreter (pipelining), so that a task costs one process in the box
    instead of half a dozen and leaves no temporary files.
options:
  remote_addr:
    description: Name of the box.
    default: inventory_hostname
    vars:
      - name: inventory_hostname
      - name: ansible_host
  remote_user:
    description: User in the box; the container's own where none is given.
    vars:
      - name: ansible_user
extends_documentation_fragment:
  - connection_pipelining
"""

import json
import os
import re
import subprocess
from pathlib import Path

from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.module_utils.common.text.converters import to_bytes, to_text
from ansible.plugins.connection import ConnectionBase
from ansible.utils.display import Display

#: What podman itself ends with, as opposed to the command that it runs.
PODMAN_FAILED = (125, 255)
GONE = ("no such container", "container state improper", "no container with name or id")
#: Where a runtime keeps what it runs for podman as root.
RUNTIMES = {"runc": Path("/run/runc"), "crun": Path("/run/crun")}
#: A runtime's own words, not those of the command: nothing was run.
NOT_RUN = re.compile(
    r"exec failed: (?:container does not exist|cannot exec in )"
    r"|opening file `/run/crun/|container `?[0-9a-f]{64}`? (?:does not exist|is not running)"
)
#: Which runtime runs which box, by its name: podman is slow to say it.
KNOWN = Path(__file__).resolve().parents[2] / ".cache" / "sandbox" / "boxes"

display = Display()


def runtime_of(name: str) -> tuple[str, str] | None:
    """The runtime that runs a box, and the box's identifier there; None where podman has to be asked each time."""
    if os.geteuid() != 0:
        return None
    known = KNOWN / f"{name}.json"
    try:
        runtime, identifier = json.loads(known.read_text())
        if (RUNTIMES[runtime] / identifier).is_dir():
            return runtime, identifier
    except (OSError, ValueError, KeyError, TypeError):
        pass
    words = ["podman", "inspect", "--type", "container", "--format", "{{.OCIRuntime}} {{.Id}}", name]
    try:
        said = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
    except FileNotFoundError:
        return None
    if len(said) != 2:
        return None
    runtime, identifier = Path(said[0]).name, said[1]
    if runtime not in RUNTIMES or not (RUNTIMES[runtime] / identifier).is_dir():
        return None
    known.parent.mkdir(parents=True, exist_ok=True)
    # Another task may read it meanwhile.
    new = known.with_name(f".{name}.{os.getpid()}")
    new.write_text(json.dumps([runtime, identifier]))
    new.replace(known)
    return runtime, identifier


class Connection(ConnectionBase):
    """One process for each call; nothing is kept open between tasks."""

    transport = "box"
    has_pipelining = True

    def _connect(self) -> Connection:
        self._connected = True
        return self

    def _exec(self, command: list[str], in_data: bytes | None) -> tuple[int, bytes, bytes]:
        name, user = self.get_option("remote_addr"), self.get_option("remote_user")
        # A runtime knows users by number only.
        found = runtime_of(name) if user in (None, "", "root") else None
        if found is not None:
            runtime, identifier = found
            done = self._run([runtime, "exec", identifier, *command], in_data)
            if done.returncode == 0 or not NOT_RUN.search(to_text(done.stderr)):
                return done.returncode, done.stdout, done.stderr
        words = ["podman", "exec", "--interactive", *(["--user", user] if user else []), name, *command]
        done = self._run(words, in_data)
        if done.returncode in PODMAN_FAILED:
            said = to_text(done.stderr).strip()
            if any(words in said.lower() for words in GONE):
                raise AnsibleConnectionFailure(f"box {name} does not run; boot it with `sandbox/box up {name}`: {said}")
        return done.returncode, done.stdout, done.stderr

    def _run(self, words: list[str], in_data: bytes | None) -> subprocess.CompletedProcess[bytes]:
        display.vvv(f"EXEC {words}", host=self.get_option("remote_addr"))
        try:
            return subprocess.run(words, input=in_data or b"", capture_output=True, check=False)
        except FileNotFoundError as error:
            raise AnsibleConnectionFailure(
                f"found no `{words[0]}` on this machine; `sandbox/setup` installs what boxes need"
            ) from error

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        return self._exec(["/bin/sh", "-c", cmd], in_data)

    def put_file(self, in_path: str, out_path: str) -> None:
        super().put_file(in_path, out_path)
        if not Path(in_path).is_file():
            raise AnsibleFileNotFound(f"found no file {in_path} on this machine")
        self._copy(["sh", "-c", 'cat >"$0"', out_path], Path(in_path).read_bytes(), f"write {out_path}")

    def fetch_file(self, in_path: str, out_path: str) -> None:
        super().fetch_file(in_path, out_path)
        content = self._copy(["cat", "--", in_path], None, f"read {in_path}")
        Path(out_path).write_bytes(content)

    def _copy(self, command: list[str], content: bytes | None, what: str) -> bytes:
        code, out, err = self._exec(command, content)
        if code != 0:
            raise AnsibleError(f"could not {what} in box {self.get_option('remote_addr')}: {to_text(err).strip()}")
        return to_bytes(out)

    def reset(self) -> None:
        """Nothing is kept open, so there is nothing to reset."""

    def close(self) -> None:
        self._connected = False
