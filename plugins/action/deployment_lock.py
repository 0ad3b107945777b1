# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Takes the lock of a host in the name of this play; asks on the controller whether another holder still lives."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.gpuserve.sglang.plugins.module_utils.lock import PATH, describe, holder, is_dead

display = Display()

MODULE = "gpuserve.sglang.deployment_lock"


class ActionModule(ActionBase):
    """The controller's side of deployment_lock."""

    _supports_check_mode = True
    _supports_async = False
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Take the lock, break that of a dead holder, refuse a living one."""
        super().run(tmp, task_vars)
        del tmp
        task_vars = task_vars or {}
        arguments = dict(self._task.args)
        if self._task.check_mode or arguments.get("state", "held") != "held":
            return self._call(arguments, task_vars)
        # A task runs in a child of the play's process.
        arguments["_holder"] = holder(os.getppid(), sys.argv)
        result = self._call(arguments, task_vars)
        found = result.get("holder") or {}
        if found and is_dead(found):
            result = self._call({**arguments, "_dead": found["token"]}, task_vars)
            found = result.get("holder") or {}
        host = str(task_vars.get("inventory_hostname") or "this host")
        if result.get("broken"):
            display.display(f"{host}: took over the lock of {describe(result['broken'], time.time())}: it is gone")
        if found:
            path = arguments.get("path", PATH)
            result |= {
                "failed": True,
                "msg": f"Another play works on {host}: {describe(found, time.time())}. Expected nobody ({path}). "
                "Nothing was changed. Wait until it is done and run this again; a holder that is gone is found by the next "
                "play on its own controller at once.",
            }
        return result

    def _call(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
        return result
