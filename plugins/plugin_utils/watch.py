# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""For action plugins that say on the controller what goes on while their module works on the host."""

from __future__ import annotations

import contextvars
import threading
import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()


class WatchedAction(ActionBase):
    """The controller's side of the module `MODULE`: calls it as often as it takes, and prints in between."""

    MODULE = ""

    _supports_check_mode = True
    _supports_async = False
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Hand the arguments to `_watch`."""
        super().run(tmp, task_vars)
        del tmp
        self._vars = task_vars or {}
        self._host = str(self._vars.get("inventory_hostname") or "this host")
        return self._watch(dict(self._task.args))

    def _watch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call the module until it is done."""
        raise NotImplementedError

    def _call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run the module once."""
        result: dict[str, Any] = self._execute_module(
            module_name=self.MODULE, module_args=arguments, task_vars=self._vars
        )
        return result

    @staticmethod
    def _number(arguments: dict[str, Any], name: str, default: float) -> float:
        """An argument as a number; what is none, the module refuses with a clear message."""
        try:
            return float(arguments.get(name, default))
        except (TypeError, ValueError):
            return default


class Heartbeat:
    """Prints a line when it is told to and, from a thread, when none has been printed for a while: silence looks like a hang.

    One call of a module (a generation that compiles kernels, a drain) can last for minutes, so a thread keeps the time.
    """

    def __init__(self, began: float, every: float) -> None:
        self.began, self.every = began, every
        self._last = began
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def line(self, elapsed: float) -> str:
        """What is printed after so many seconds."""
        raise NotImplementedError

    def __enter__(self) -> None:
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._tick,), daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _tick(self) -> None:
        while not self._stop.wait(0.25):
            with self._lock:
                if time.monotonic() - self._last >= self.every:
                    self._print()

    def _print(self, elapsed: float | None = None) -> None:
        """Print the line; only with the lock."""
        self._last = time.monotonic()
        display.display(self.line(self._last - self.began if elapsed is None else elapsed))
