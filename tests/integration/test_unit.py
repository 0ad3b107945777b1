"""The plan's unit on real systemd, with a stand-in for the engine and the minutes of the documented box in hundredths.

What is tried is the arithmetic and the signals: that a loop of slow failures ends, that a clean stop is no failure, and that a
crash is no stop.
"""

from __future__ import annotations

import sys
import time

import pytest
from conftest import ROOT, Box

sys.path.insert(0, str(ROOT / "tests" / "unit"))
sys.path.insert(0, str(ROOT / "collections"))

import plan_cases as cases
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import launch_plan

#: One second of the test is so many of the documented box.
SCALE = 120
#: Ends on SIGINT like the engine: with status 0. `hangs`: not at all, so that the stop takes its whole time.
ENGINE = "import signal, sys, time; signal.signal(signal.SIGINT, {handler}); time.sleep(900); time.sleep(900); time.sleep(900)"
UNIT = """
[Unit]
StartLimitIntervalSec={start_limit_interval_sec}ms
StartLimitBurst={start_limit_burst}
OnFailure=stand-in-incident@why.service
[Service]
Type=exec
User=nobody
ExecStart=/usr/bin/python3 -c "{engine}"
ExecStartPost=/bin/sh -c '{gate}'
Restart={restart}
RestartSec={restart_sec}ms
TimeoutStartSec={timeout_start_sec}ms
TimeoutStopSec={timeout_stop_sec}ms
KillMode={kill_mode}
KillSignal={kill_signal}
"""
INCIDENT = "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo %i >>/run/incidents'\n"


class StandIn:
    """A unit with the planned settings, and what became of it."""

    def __init__(self, box: Box) -> None:
        self.box = box

    def install(self, gate: str, hangs: bool, scale: int = SCALE) -> None:
        unit = dict(launch_plan(cases.wanted(), cases.host(), cases.models())["unit"])
        for name in ("start_limit_interval_sec", "restart_sec", "timeout_start_sec", "timeout_stop_sec"):
            unit[name] = unit[name] * 1000 // scale
        engine = ENGINE.format(handler="signal.SIG_IGN" if hangs else "lambda *a: sys.exit(0)")
        text = UNIT.format(**unit, engine=engine, gate=gate.format(start=unit["timeout_start_sec"] / 1000))
        self.box.sh(
            f"rm -f /run/incidents; cat >/run/systemd/system/stand-in.service <<'E'\n{text}\nE\n"
            f"cat >/run/systemd/system/stand-in-incident@.service <<'E'\n{INCIDENT}\nE\nsystemctl daemon-reload"
        )

    def __getitem__(self, name: str) -> str:
        return self.box.sh(f"systemctl show -P {name} stand-in")

    @property
    def incidents(self) -> int:
        return int(self.box.sh("cat /run/incidents 2>/dev/null | wc -l"))

    def wait(self, state: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self["ActiveState"] != state:
            assert time.monotonic() < until, (
                f"still {self['ActiveState']}, expected {state}: {self['NRestarts']} restarts"
            )
            time.sleep(0.2)


@pytest.fixture
def stand_in(box: Box):
    yield StandIn(box)
    box.sh("systemctl kill -s SIGKILL stand-in; systemctl stop stand-in; systemctl reset-failed stand-in", check=False)
    box.sh("rm -f /run/systemd/system/stand-in*; systemctl daemon-reload")


def test_a_loop_of_slow_failures_ends_and_escalates_once(stand_in: StandIn) -> None:
    """The worst loop: each start uses up its whole time, and so does each stop."""
    stand_in.install(gate="sleep {start}; exit 1", hangs=True)
    stand_in.box.sh("systemctl start --no-block stand-in")
    stand_in.wait("failed", 120)
    assert int(stand_in["NRestarts"]) == 3
    assert stand_in.incidents == 1


def test_a_clean_stop_is_no_failure_and_a_crash_is_no_stop(stand_in: StandIn) -> None:
    stand_in.install(gate="true", hangs=False, scale=30)
    stand_in.box.sh("systemctl start stand-in")
    stand_in.box.sh("systemctl stop stand-in")
    assert (stand_in["ActiveState"], stand_in["Result"], stand_in["ExecMainStatus"]) == ("inactive", "success", "0")
    assert stand_in.incidents == 0
    stand_in.box.sh("systemctl start stand-in")
    stand_in.box.sh("systemctl kill --kill-whom=main -s SIGKILL stand-in")
    stand_in.wait("active", 30)
    assert stand_in["NRestarts"] == "1"
    # Started again, but nobody has to be called yet.
    assert stand_in.incidents == 0


def test_a_stop_that_hangs_ends_and_shows(stand_in: StandIn) -> None:
    stand_in.install(gate="true", hangs=True)
    stand_in.box.sh("systemctl start stand-in")
    stand_in.box.sh("systemctl stop stand-in")
    assert (stand_in["ActiveState"], stand_in["Result"]) == ("failed", "timeout")
    assert stand_in.box.sh("systemctl show -P TasksCurrent stand-in") in ("0", "[not set]")
