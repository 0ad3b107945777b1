# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the module page_cache in windows and prints progress on the controller."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.gpuserve.sglang.plugins.module_utils.page_cache import text_gb

display = Display()

MODULE = "gpuserve.sglang.page_cache"
WINDOW = 10.0


def progress(host: str, since: dict[str, Any], seconds: float) -> str:
    """`[page cache on kimi-1] 68 s: 212.4 GB/594.8 GB, 3.1 GB/s, 123 s left`."""
    rate = since["done"] / max(seconds, 0.001)
    left = f"{(since['limit'] - since['done']) / rate:.0f}" if rate else "?"
    done = f"{text_gb(since['done'])}/{text_gb(since['limit'])}"
    return f"[page cache on {host}] {seconds:.0f} s: {done}, {text_gb(rate)}/s, {left} s left"


class ActionModule(ActionBase):
    """The controller's side of page_cache."""

    _supports_check_mode = True
    _supports_async = False
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call the module until it is done."""
        super().run(tmp, task_vars)
        del tmp
        task_vars = task_vars or {}
        arguments = dict(self._task.args)
        host = str(task_vars.get("inventory_hostname") or "this host")
        while True:
            result: dict[str, Any] = self._execute_module(
                module_name=MODULE, module_args={**arguments, "_window": WINDOW}, task_vars=task_vars
            )
            since = result.pop("_since", None)
            if not since:
                return result
            arguments["_since"] = since
            display.display(progress(host, since, float(result["seconds"])))
