"""The engine's own interpreter as a partner: a program is sent to it, then one JSON question a line, one JSON answer a line.

``GPUSERVE_ENGINE_PYTHON`` names it: a path, or a command such as ``podman exec -i gpuserve-sandbox
/opt/.../bin/python``. It needs SGLang, no GPU, no Ansible and no pytest. Without the variable these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from typing import Any

import pytest

_BOOT = "import json,sys; exec(compile(json.loads(sys.stdin.readline()), 'program', 'exec'), {'__name__': 'program'})"


def command() -> list[str]:
    """The command that starts the engine's interpreter; skips the test where none is named."""
    named = os.environ.get("GPUSERVE_ENGINE_PYTHON")
    if not named:
        pytest.skip("GPUSERVE_ENGINE_PYTHON does not name the engine's interpreter")
    return shlex.split(named)


class Interpreter:
    """A running interpreter of the engine that answers questions.

    ``program`` is sent over standard input, so that the interpreter may live in a container; ``first`` is what it reads
    before the questions.
    """

    def __init__(self, program: str, first: Any = None, **environment: str) -> None:
        self._process = subprocess.Popen(
            [*command(), "-W", "ignore", "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("GPUSERVE_ENGINE_VERBOSE") else subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", **environment},
        )
        self._send(program)
        if first is not None:
            self._send(first)

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def ask(self, do: str, **question: Any) -> dict[str, Any]:
        """Ask one question."""
        assert self._process.stdout is not None
        self._send({"do": do, **question})
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the engine's interpreter ended with status {self._process.wait()}: set GPUSERVE_ENGINE_VERBOSE=1"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the interpreter."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
