# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the module benchmark_run: starts the measurement on the host and prints its progress on the controller."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible_collections.gpuserve.sglang.plugins.module_utils.bench_run import step
from ansible_collections.gpuserve.sglang.plugins.plugin_utils.watch import WatchedAction, display

WINDOW = 4.0
PROGRESS_EVERY = 10.0
RETRY_PAUSE = 2.0
# The measurement ends by itself after 60 s without a question, so there is no use in trying for longer.
LOST_AFTER = 60.0


def progress_line(host: str, progress: dict[str, Any]) -> str:
    """`benchmark on box: level 2 of 5 (C=5), run 1 of 3: 12/30 requests`."""
    if not progress:
        return f"benchmark on {host}: starting"
    place = f"level {progress['level']} of {progress['levels']} (C={progress['concurrency']})"
    if progress["repeats"] > 1:
        place += f", run {progress['repeat']} of {progress['repeats']}"
    done = f"{progress['done']}/{progress['requests']} requests"
    return f"benchmark on {host}: {place}: {done if progress['doing'] == 'measuring' else progress['doing']}"


class Progress:
    """Prints a line when another level begins, and now and then meanwhile."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._step: tuple[Any, ...] = ()
        self._shown = ""
        self._last = 0.0

    def show(self, progress: dict[str, Any]) -> None:
        """Take what is known now."""
        line = progress_line(self.host, progress)
        step = tuple(progress.get(name) for name in ("repeat", "level", "doing"))
        now = time.monotonic()
        if line == self._shown or (step == self._step and now - self._last < PROGRESS_EVERY):
            return
        self._step, self._shown, self._last = step, line, now
        display.display(line)


class ActionModule(WatchedAction):
    """The controller's side of benchmark_run."""

    MODULE = "gpuserve.sglang.benchmark_run"

    def _watch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Start, then ask until the end."""
        arguments = {name: value for name, value in arguments.items() if not name.startswith("_")}
        quiet = arguments.get("quiet_seconds", 10)
        display.display(f"benchmark on {self._host}: looking for {quiet} s whether somebody else is served")
        result = self._call({**arguments, "_phase": "start"})
        if result.get("state") != "running":
            return result
        progress = Progress(self._host)
        # The prompts were needed once.
        question = {**arguments, "prompts": "-", "_phase": "poll", "_run": result["_run"], "_window": WINDOW}
        heard = time.monotonic()
        while True:
            try:
                result = self._call(question)
            except AnsibleConnectionFailure as error:
                result = {"unreachable": True, "msg": str(error)}
            if result.get("unreachable") or "state" not in result:
                if time.monotonic() - heard > LOST_AFTER or not (
                    result.get("unreachable") or "module_stdout" in result
                ):
                    return result
                time.sleep(RETRY_PAUSE)
                continue
            heard = time.monotonic()
            if result["state"] != "running":
                return result
            told = dict(result.get("progress") or {})
            question["_known"] = step(told)
            progress.show(told)
