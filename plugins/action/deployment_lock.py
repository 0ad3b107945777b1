# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Takes the lock of a host in the name of this play; asks on the controller whether another holder still lives."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from ansible_collections.gpuserve.sglang.plugins.module_utils.lock import PATH, describe, holder, is_dead
from ansible_collections.gpuserve.sglang.plugins.plugin_utils.watch import WatchedAction, display


class ActionModule(WatchedAction):
    """The controller's side of deployment_lock."""

    MODULE = "gpuserve.sglang.deployment_lock"

    def _watch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Take the lock, break that of a dead holder, refuse a living one."""
        if self._task.check_mode or arguments.get("state", "held") != "held":
            return self._call(arguments)
        # A task runs in a child of the play's process.
        arguments["_holder"] = holder(os.getppid(), sys.argv)
        result = self._call(arguments)
        found = result.get("holder") or {}
        if found and is_dead(found):
            result = self._call({**arguments, "_dead": found["token"]})
            found = result.get("holder") or {}
        if result.get("broken"):
            display.display(
                f"{self._host}: took over the lock of {describe(result['broken'], time.time())}: it is gone"
            )
        if found:
            path = arguments.get("path", PATH)
            result |= {
                "failed": True,
                "msg": f"Another play works on {self._host}: {describe(found, time.time())}. Expected nobody ({path}). "
                "Nothing was changed. Wait until it is done and run this again; a holder that is gone is found by the next "
                "play on its own controller at once.",
            }
        return result
