# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the module gpu_release and says on the controller that it still works: a drain can take minutes."""

from __future__ import annotations

import time
from typing import Any

from ansible_collections.gpuserve.sglang.plugins.module_utils.gpu_release import Limits
from ansible_collections.gpuserve.sglang.plugins.plugin_utils.watch import Heartbeat, WatchedAction

# A line at least so often; what is free at once needs none.
PROGRESS_EVERY = 15.0


class Progress(Heartbeat):
    """Prints every PROGRESS_EVERY seconds how long it may still take. How far it is, only the host knows."""

    def __init__(self, host: str, finish: float, kill: float, free: float) -> None:
        super().__init__(time.monotonic(), PROGRESS_EVERY)
        self.host, self.finish, self.budget = host, finish, finish + kill + free

    def line(self, elapsed: float) -> str:
        """`[GPUs of kimi-1] 15/175 s: requests finish (at most 135 s), then processes end and memory comes back`."""
        what = f"requests finish (at most {self.finish:.0f} s), then processes end and memory comes back"
        return f"[GPUs of {self.host}] {elapsed:.0f}/{self.budget:.0f} s: {what}"


class ActionModule(WatchedAction):
    """The controller's side of gpu_release."""

    MODULE = "gpuserve.sglang.gpu_release"

    def _watch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """One call; only ending something takes long."""
        if self._task.check_mode or arguments.get("state") != "released":
            return self._call(arguments)
        names = ("term_timeout", "kill_timeout", "free_timeout")
        with Progress(self._host, *(self._number(arguments, name, getattr(Limits, name)) for name in names)):
            return self._call(arguments)
