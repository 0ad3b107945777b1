# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the module health_gate in windows and prints progress on the controller while it waits."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import (
    INTERIM,
    Options,
    progress_line,
    seconds_text,
    steady,
)
from ansible_collections.gpuserve.sglang.plugins.plugin_utils.watch import Heartbeat, WatchedAction, display

WINDOW = 5.0
# The first line should come at once.
FIRST_WINDOW = 1.0
# A line at least so often.
PROGRESS_EVERY = 15.0
RETRY_PAUSE = 2.0
# A host that never answered is a wrong address rather than a bad moment: it does not get the whole budget.
FIRST_CONTACT = 60.0


class Progress(Heartbeat):
    """Prints a line when something changes, and at least every PROGRESS_EVERY seconds."""

    def __init__(self, label: str, host: str, budget: float, began: float) -> None:
        super().__init__(began, PROGRESS_EVERY)
        self.label, self.host, self.budget = label, host, budget
        # Before the first window is over nothing is known but that we wait.
        self.doing, self.usual = "waiting for the first answer", 0.0
        self._shown = ""

    def line(self, elapsed: float) -> str:
        """`[sglang-kimi on kimi-1] 13/300 s, usually 13 s: loading weights 12/64`."""
        return progress_line(self.label, self.host, elapsed, self.budget, self.doing, self.usual)

    def show(self, doing: str, usual: float | None = None, elapsed: float | None = None) -> None:
        """Take what is known now; print it when it differs in more than a counter."""
        with self._lock:
            self.doing, self.usual = doing, self.usual if usual is None else usual
            if steady(doing) != self._shown:
                self._shown = steady(doing)
                self._print(elapsed)


class ActionModule(WatchedAction):
    """The controller's side of health_gate."""

    MODULE = "gpuserve.sglang.health_gate"

    def _watch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call the module until it returns a final state or the time is over."""
        if self._task.check_mode:
            result = self._call(arguments)
            result.pop("_since", None)
            return result
        budget = self._number(arguments, "timeout", Options.timeout)
        began = time.monotonic()
        progress = Progress(self._label(arguments), self._host, budget, began)
        with progress:
            return self._wait(arguments, budget, began, progress)

    def _wait(self, arguments: dict[str, Any], budget: float, began: float, progress: Progress) -> dict[str, Any]:
        since: dict[str, Any] = {}
        while True:
            elapsed = time.monotonic() - began
            try:
                result = self._call(
                    {
                        **arguments,
                        "_window": WINDOW if since else FIRST_WINDOW,
                        "_since": {**since, "elapsed": elapsed},
                    }
                )
            except AnsibleConnectionFailure as error:
                result = {"unreachable": True, "msg": str(error)}
            if result.get("unreachable") or (since and self._was_cut_off(result)):
                limit = budget if since else min(budget, FIRST_CONTACT)
                elapsed = time.monotonic() - began
                if elapsed + RETRY_PAUSE >= limit:
                    return self._lost(result, elapsed, bool(since))
                progress.show("connection lost, trying again")
                self._reset_connection()
                time.sleep(RETRY_PAUSE)
                continue
            if "state" not in result:
                # Wrong options, no Python on the host and the like: nothing that waiting would cure.
                return result
            since = dict(result.pop("_since", None) or {})
            state = str(result["state"])
            if state not in INTERIM:
                progress.show(str(result["doing"]), float(result["usual"]), float(result["elapsed"]))
                return result
            progress.show(str(result["doing"]), float(result["usual"]))

    @staticmethod
    def _was_cut_off(result: dict[str, Any]) -> bool:
        """The module's output is no result: connection plugins other than ssh report a broken connection that way."""
        return "state" not in result and "module_stdout" in result and not str(result["module_stdout"]).strip()

    @staticmethod
    def _lost(result: dict[str, Any], elapsed: float, reached: bool) -> dict[str, Any]:
        what = "was lost while the gate waited" if reached else "could not be made"
        why = str(result.get("msg", "")).strip()
        result["msg"] = (
            f"the connection {what} and did not come back within {seconds_text(elapsed)} s (expected: a host that answers). "
            f"Do: check the network and the host, then run the play again. Last error: {why}"
        )
        result["unreachable"] = True
        return result

    def _reset_connection(self) -> None:
        # A dead ControlPersist master would swallow every further attempt.
        reset = getattr(self._connection, "reset", None)
        if reset is None:
            return
        try:
            reset()
        except Exception as error:
            display.vvv(f"health_gate: reset of the connection failed: {error}")

    @staticmethod
    def _label(arguments: dict[str, Any]) -> str:
        unit = str(arguments.get("unit", Options.unit) or "")
        if unit:
            return unit.removesuffix(".service")
        return f"{arguments.get('host', Options.host)}:{arguments.get('port', Options.port)}"
