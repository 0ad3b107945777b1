# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""What the engine counts: `/metrics` (Prometheus text) and `/v1/loads` (JSON), read the same way everywhere.

Standard library only: this also runs on the host without Ansible. Gauges in `/metrics` are written by the scheduler's own
loop and stay up to 30 s after a load ends; `/v1/loads` asks the scheduler and is current.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

RUNNING = "sglang:num_running_reqs"
QUEUED = "sglang:num_queue_reqs"
ACCEPT_LENGTH = "sglang:spec_accept_length"
GENERATED = "sglang:generation_tokens_total"
PROMPTED = "sglang:prompt_tokens_total"
FINISHED = "sglang:num_requests_total"

_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'\s*(?P<name>[A-Za-z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True)
class Sample:
    """One line: `name{labels} value`."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def _labels(text: str) -> dict[str, str] | None:
    """The labels of a line; None when it is not well formed."""
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            return None
        found[match["name"]] = re.sub(r"\\[\\\"n]", lambda piece: _ESCAPES[piece[0]], match["value"])
        at = match.end()
    return found


def samples(text: str) -> Iterator[Sample]:
    """The samples of a Prometheus text; comments and lines that are no samples are left out."""
    for line in text.splitlines():
        match = None if line.startswith("#") else _LINE.match(line.strip())
        if match is None:
            continue
        labels = _labels(match["labels"] or "")
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if labels is not None:
            yield Sample(match["name"], value, labels)


class Metrics:
    """The samples of one answer of `/metrics`, by name."""

    def __init__(self, found: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in found:
            self._by_name.setdefault(sample.name, []).append(sample)

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """From the text of `/metrics`."""
        return cls(samples(text))

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def named(self, name: str) -> list[Sample]:
        """All samples of one name."""
        return self._by_name.get(name, [])

    def _replicas(self, name: str) -> list[float]:
        """One value for each data-parallel replica: the tensor-parallel ranks of a replica all tell the same story."""
        found: dict[str, float] = {}
        for sample in self.named(name):
            if math.isfinite(sample.value):
                replica = sample.labels.get("dp_rank", "")
                found[replica] = max(sample.value, found.get(replica, -math.inf))
        return list(found.values())

    def _over(self, name: str, join: Callable[[list[float]], float]) -> float | None:
        values = self._replicas(name)
        return join(values) if values else None

    def total(self, name: str) -> float | None:
        """Of a counter, or of a gauge that counts: the sum over replicas. None when the engine does not report it."""
        return self._over(name, sum)

    def mean(self, name: str) -> float | None:
        """Of a ratio: the mean over the replicas that have one (0 means none yet)."""
        values = [value for value in self._replicas(name) if value > 0]
        return sum(values) / len(values) if values else None

    @property
    def accept_length(self) -> float | None:
        """Mean acceptance length of the last decode steps; None without speculation or before the first of them."""
        return self.mean(ACCEPT_LENGTH)


@dataclass(frozen=True)
class Load:
    """Requests in the scheduler at this moment."""

    running: int
    waiting: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.running + self.waiting


def parse_loads(body: str) -> Load | None:
    """From the text of `/v1/loads`; None when it is not what the engine answers."""
    try:
        loads = json.loads(body)["loads"]
        running = sum(int(entry["num_running_reqs"]) for entry in loads)
        waiting = sum(int(entry["num_waiting_reqs"]) for entry in loads)
    except (ValueError, KeyError, TypeError):
        return None
    return Load(running, waiting)
