"""Reach a box of the sandbox: one `podman exec` for each module, with the module on its standard input."""

from __future__ import annotations

DOCUMENTATION = """
name: box
short_description: Run modules in a box of the sandbox
description:
  - Reaches a container on this machine with C(podman exec).
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

import subprocess
from pathlib import Path

from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.module_utils.common.text.converters import to_bytes, to_text
from ansible.plugins.connection import ConnectionBase
from ansible.utils.display import Display

#: What podman itself ends with, as opposed to the command that it runs.
PODMAN_FAILED = (125, 255)
GONE = ("no such container", "container state improper", "no container with name or id")

display = Display()


class Connection(ConnectionBase):
    """`podman exec`; nothing is kept open between tasks."""

    transport = "box"
    has_pipelining = True

    def _connect(self) -> Connection:
        self._connected = True
        return self

    def _exec(self, command: list[str], in_data: bytes | None) -> tuple[int, bytes, bytes]:
        name, user = self.get_option("remote_addr"), self.get_option("remote_user")
        words = ["podman", "exec", "--interactive", *(["--user", user] if user else []), name, *command]
        display.vvv(f"EXEC {words}", host=name)
        try:
            done = subprocess.run(words, input=in_data or b"", capture_output=True, check=False)
        except FileNotFoundError as error:
            raise AnsibleConnectionFailure("found no `podman` on this machine; `sandbox/setup` installs it") from error
        if done.returncode in PODMAN_FAILED:
            said = to_text(done.stderr).strip()
            if any(words in said.lower() for words in GONE):
                raise AnsibleConnectionFailure(f"box {name} does not run; boot it with `sandbox/box up {name}`: {said}")
        return done.returncode, done.stdout, done.stderr

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
