"""How fast the gate is and what it says meanwhile, on a clock that only the test moves: exact, however busy this machine is.

Promises: from the engine's first 200 to the gate's success 2 s at most plus the generation, from a death to the end 5 s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import health as h

UNIT = "sglang-kimi.service"
# What observing costs on a busy host, in seconds.
SYSTEMCTL_S, JOURNALCTL_S, ROUND_TRIP_S = 0.15, 0.5, 0.5
DEATH = {"ActiveState": "failed", "SubState": "failed", "MainPID": 0, "ExecMainCode": 2, "ExecMainStatus": 9}


@dataclass
class World:
    """A server that opens its port, warms up, answers, generates, and may die; times are those of its clock."""

    port_opens: float = 50.0
    ready: float = 60.0
    silent_from: float = float("inf")
    health_s: float = 1.0
    info_s: float = 0.02
    chat_s: float = 3.0
    dies: float = float("inf")
    kv_tokens: int = 1000
    log: Sequence[tuple[float, str]] = ()
    now: float = 0.0
    first_200: float | None = None
    asked: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, argv: Sequence[str], limit: float) -> h.CommandResult:
        if argv[0] == "journalctl":
            self.now += min(JOURNALCTL_S, limit)
            return h.CommandResult(0, "\n".join(line for when, line in self.log if when <= self.now))
        self.now += SYSTEMCTL_S
        values: dict[str, Any] = {
            "LoadState": "loaded", "ActiveState": "activating", "SubState": "start-post", "MainPID": 4711, "Result": "success",
            "NRestarts": 0, "InvocationID": "aa",
        }  # fmt: skip
        if self.now >= self.dies:
            values.update(DEATH)
        return h.CommandResult(0, "".join(f"{key}={value}\n" for key, value in values.items()))

    def request(self, _host: str, _port: int, _method: str, path: str, _body: Any, limit: float) -> Pending:
        self.asked.append(path)
        return Pending(self, path, limit)


class Pending:
    """A request under way: its answer comes when the clock has moved so far."""

    def __init__(self, world: World, path: str, limit: float) -> None:
        self.world, self.began = world, world.now
        self.takes, self.answer = self.plan(path)
        if self.takes > limit:
            self.takes, self.answer = limit, h.HttpAnswer(error="timeout", seconds=limit)

    def plan(self, path: str) -> tuple[float, h.HttpAnswer]:
        world = self.world
        if world.now < world.port_opens or world.now >= world.dies:
            return 0.001, h.HttpAnswer(error="refused")
        if path == "/health":
            if world.now < world.ready:
                return 0.01, h.HttpAnswer(503, seconds=0.01)
            if world.now >= world.silent_from:
                return 20.0, h.HttpAnswer(503, seconds=20.0)
            return world.health_s, h.HttpAnswer(200, seconds=world.health_s)
        if path == "/server_info":
            return world.info_s, h.HttpAnswer(200, body=json.dumps({"max_total_num_tokens": world.kv_tokens}))
        body = json.dumps({"choices": [{"message": {"content": "hello"}}], "usage": {"completion_tokens": 3}})
        return world.chat_s, h.HttpAnswer(200, body=body, seconds=world.chat_s)

    def wait(self, seconds: float) -> h.HttpAnswer | None:
        left = self.began + self.takes - self.world.now
        dead = max(0.0, self.world.dies - self.world.now)
        if dead < min(left, seconds):
            # The connection breaks with the process.
            self.world.now += dead
            return h.HttpAnswer(error="broken", detail="reset")
        self.world.now += max(0.0, min(left, seconds))
        if left > seconds:
            return None
        if self.answer.status == 200 and self.world.first_200 is None:
            self.world.first_200 = self.world.now
        return self.answer

    def abort(self) -> None:
        pass


@pytest.fixture(autouse=True)
def socket_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h, "observe_owner", lambda *__: h.Owner(h.OURS))


def watch(world: World, windows: bool, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """The gate to its end, as a program or in the windows of the action plugin; and what it said on the way."""
    given = h.Options(**{"unit": UNIT, "model": "m", "timeout": 900.0, **options})
    since, said = h.Since(), []
    while True:
        gate = h.Gate(given, since, run=world.run, request=world.request, clock=world.clock, sleep=world.sleep)
        result = gate.wait(5.0)
        said.append(result["doing"])
        if result["state"] not in h.INTERIM:
            return result, list(dict.fromkeys(said))
        since = h.Since.load(json.loads(json.dumps(result["_since"])))
        if windows:
            world.now += ROUND_TRIP_S
            since = h.Since.load({**result["_since"], "elapsed": world.now})


@pytest.mark.parametrize("windows", [False, True], ids=["program", "play"])
@pytest.mark.parametrize("ready", [60.0, 60.3, 61.1, 63.7, 64.9])
@pytest.mark.parametrize("chat_s", [0.5, 98.0])
def test_from_the_first_200_to_success_two_seconds_and_the_generation(
    windows: bool, ready: float, chat_s: float
) -> None:
    world = World(ready=ready, chat_s=chat_s)
    result, said = watch(world, windows)
    assert result["state"] == "ready"
    assert world.first_200 is not None
    assert world.now - world.first_200 <= 2.0 + chat_s
    # One generation, and it was announced before it began.
    assert world.asked.count("/v1/chat/completions") == 1
    assert h.WORDS[h.GENERATING] in said


@pytest.mark.parametrize("windows", [False, True], ids=["program", "play"])
@pytest.mark.parametrize("dies", [3.0, 30.2, 52.4, 60.4, 61.3, 62.5, 70.1, 79.9])
@pytest.mark.parametrize("silent", [False, True], ids=["", "silent scheduler"])
def test_from_death_to_the_end_five_seconds(windows: bool, dies: float, silent: bool) -> None:
    world = World(dies=dies, chat_s=98.0, silent_from=0.0 if silent else float("inf"))
    result, _said = watch(world, windows)
    assert result["state"] == "failed"
    assert "status=9/KILL" in result["msg"]
    assert world.now - dies <= 5.0


def test_a_hung_scheduler_is_not_called_a_warm_up() -> None:
    """Up to here its 503 came at once; that of a scheduler that was asked and kept silent takes 20 s."""
    log = [(1.0, "[2026-11-29 14:17:13] Load weight begin. avail mem=139.13 GB"), (50.0, "Uvicorn running on http://x"),
           (60.0, "The server is fired up and ready to roll!"),
           *[(t, f'[2026-11-29 14:18:13] INFO:     127.0.0.1:41096 - "GET /health HTTP/1.1" {s}') for t, s in ((51.0, 503), (99.0, 503))],
           (70.0, "[sglang-kimi on box] 70/900 s: the port is open, but the scheduler does not answer (503)")]  # fmt: skip
    world = World(silent_from=0.0, log=log)
    result, said = watch(world, False, timeout=200.0)
    assert result["state"] == "timeout"
    assert [h.steady(text) for text in dict.fromkeys(map(h.steady, said))] == [
        "loading weights",
        "loading weights, nothing new in its log for # s",
        "warming up (#)",
        "the port is open, but the scheduler does not answer (#)",
        "the port is open, but the scheduler does not answer (#), nothing new in its log for # s",
        "out of time (#)",
    ]
    assert "did not become ready: still the port is open" not in result["msg"]
    assert "the scheduler does not answer" in result["msg"]
    # Its own requests and its own lines in the journal are no sign of life.
    quiet = int(result["msg"].partition("nothing new in its log for ")[2].split()[0])
    assert 130 <= quiet <= 145


def test_a_quiet_warm_up_says_since_when() -> None:
    world = World(ready=200.0, log=[(50.0, "Uvicorn running on http://x")])
    _result, said = watch(world, False)
    assert "warming up (503)" in said
    assert any(text.startswith("warming up (503), nothing new in its log for ") for text in said)


@pytest.mark.parametrize(("seen", "state"), [(899, "pool_too_small"), (900, "ready"), (4000, "ready")])
def test_the_pool_is_part_of_the_truth(seen: int, state: str) -> None:
    world = World(kv_tokens=seen, chat_s=98.0)
    result, _said = watch(world, False, expected_kv_tokens=1000)
    assert result["state"] == state
    assert result["pool"]["seen"] == seen
    # A pool that is too small ends the gate before anything is compiled.
    assert ("/v1/chat/completions" in world.asked) is (state == "ready")
    if state == "ready":
        assert f"KV pool {seen:,} tokens".replace(",", " ") in result["msg"]
    else:
        for words in ("89", "1 000", "and the planned KV pool", "nvidia-smi", "sglang_service_kv_tolerance"):
            assert words in result["msg"]


def test_a_pool_that_cannot_be_read_costs_seconds_and_is_said() -> None:
    world = World(info_s=60.0, chat_s=1.0)
    result, _said = watch(world, False, expected_kv_tokens=1000)
    assert result["state"] == "ready"
    assert result["pool"]["judged"] is False
    assert "KV pool not judged" in result["msg"]
    assert world.first_200 is not None and world.now - world.first_200 < h.INFO_TIMEOUT + 4


def test_the_last_good_start_is_quoted(tmp_path) -> None:
    record = tmp_path / "last-start.json"
    for text, usual in [
        ("", 0.0),
        ("[]", 0.0),
        ('{"seconds_to_ready": "9"}', 0.0),
        ('{"seconds_to_ready": 570.4}', 570.4),
    ]:
        record.write_text(text)
        assert h.usual_seconds(str(record)) == usual
    assert h.usual_seconds(str(tmp_path / "nothing")) == 0.0
    result, _said = watch(World(), False, last_start=str(record))
    assert result["usual"] == 570.4
