# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the module page_cache in windows and prints progress on the controller."""

from __future__ import annotations

from typing import Any

from ansible_collections.gpuserve.sglang.plugins.module_utils.page_cache import text_gb
from ansible_collections.gpuserve.sglang.plugins.plugin_utils.watch import WatchedAction, display

WINDOW = 10.0


def progress(host: str, since: dict[str, Any], seconds: float) -> str:
    """`[page cache on kimi-1] 68 s: 212.4 GB/594.8 GB, 3.1 GB/s, 123 s left`."""
    rate = since["done"] / max(seconds, 0.001)
    left = f"{(since['limit'] - since['done']) / rate:.0f}" if rate else "?"
    done = f"{text_gb(since['done'])}/{text_gb(since['limit'])}"
    return f"[page cache on {host}] {seconds:.0f} s: {done}, {text_gb(rate)}/s, {left} s left"


class ActionModule(WatchedAction):
    """The controller's side of page_cache."""

    MODULE = "gpuserve.sglang.page_cache"

    def _watch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call the module until it is done."""
        while True:
            result = self._call({**arguments, "_window": WINDOW})
            since = result.pop("_since", None)
            if not since:
                return result
            arguments["_since"] = since
            display.display(progress(self._host, since, float(result["seconds"])))
