"""The engine's own interpreter as a fixture.

``GPUSERVE_ENGINE_PYTHON`` names it: a path, or a command such as ``podman exec -i gpuserve-sandbox
/opt/.../bin/python``. It needs SGLang, no GPU, no Ansible and no pytest. Without the variable these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))
sys.path.insert(0, str(ROOT / "tests" / "unit"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

_BOOT = "import json,sys; exec(compile(json.loads(sys.stdin.readline()), 'worker.py', 'exec'), {'__name__': 'worker'})"


class Engine:
    """A running interpreter of the engine that answers questions."""

    def __init__(self, command: list[str]) -> None:
        source = (ROOT / "tools" / "dump_flag_schema.py").read_text(encoding="utf-8")
        # __file__ has no meaning over standard input
        source = source.replace("pathlib.Path(__file__)", "pathlib.Path('/nowhere/tools/dump_flag_schema.py')")
        source += (Path(__file__).parent / "worker.py").read_text(encoding="utf-8")
        environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [*command, "-W", "ignore", "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("GPUSERVE_ENGINE_VERBOSE") else None,
            text=True,
            env=environment,
        )
        self._send(source)

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


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The engine's interpreter, started once."""
    named = os.environ.get("GPUSERVE_ENGINE_PYTHON")
    if not named:
        pytest.skip("GPUSERVE_ENGINE_PYTHON does not name the engine's interpreter")
    running = Engine(shlex.split(named))
    yield running
    running.close()
