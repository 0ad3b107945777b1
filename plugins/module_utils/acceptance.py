# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""The acceptance watch: does the draft still earn its keep?

Compares the acceptance length that the server reports now with that of the last benchmark. A drop has no error message of
its own: answers stay right, and speculation only becomes slower than none. So the verdict names what to look at and the
switch. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OFF = "off"
UNKNOWN = "unknown"
UNMEASURED = "unmeasured"
OK = "ok"
LOW = "low"

#: Share of the benchmark's acceptance length that may be lost before the watch speaks.
TOLERANCE = 0.15
#: 1 is the target's own token: nothing of the draft was accepted. A gauge over few steps is not exact.
NOTHING_ACCEPTED = 1.05

_SPECULATES = "--speculative-algorithm"
_FUSION = "--enable-flashinfer-allreduce-fusion"


@dataclass(frozen=True)
class Watch:
    """The verdict; `low` is the only state that calls for somebody."""

    state: str
    now: float | None = None
    expected: float | None = None
    message: str = ""
    causes: list[str] = field(default_factory=list)
    switch: str = ""

    def public(self) -> dict[str, Any]:
        """As a dictionary."""
        return asdict(self)


def measured(benchmark: Mapping[str, Any] | None, running: int = 0) -> float | None:
    """Acceptance length of the benchmark's level that is nearest to so many running requests."""
    levels: Sequence[Mapping[str, Any]] = (benchmark or {}).get("levels") or []
    known = [level for level in levels if isinstance(level.get("accept_length"), (int, float))]
    if not known:
        return None
    nearest = min(known, key=lambda level: abs(int(level["concurrency"]) - max(running, 1)))
    return float(nearest["accept_length"])


def _causes(args: Mapping[str, Any], nothing: bool) -> list[str]:
    found = []
    if not nothing:
        found.append(
            "other traffic: the benchmark asks for code and agent work, which is what the draft was trained on; other "
            "languages and tasks are accepted less (run playbooks/benchmark.yml: the same figure as before clears the draft)"
        )
    found.append(
        "wrong draft: it must be trained for this target, and its eagle_aux_hidden_state_layer_ids must name the layers that "
        "CUDA graphs capture (for 61 layers [1, 29, 57], or none at all); [2, 30, 58] is silently off by one"
    )
    if args.get(_FUSION):
        found.append(
            "fusion defect: with fused all-reduce every rank captures a partial sum for the draft unless the patch "
            f"0003-fusion-fallback-reduce is in; try once without {_FUSION}"
        )
    return found


def _switch(args: Mapping[str, Any]) -> str:
    ways = ["deployment_profile: baseline (no speculation)"]
    ways.append("deployment_overrides: {speculative_disable_batch_threshold: N} (none above N running requests)")
    if args.get(_FUSION):
        ways.append("deployment_overrides: {enable_flashinfer_allreduce_fusion: false}")
    return "; or ".join(ways)


def watch(
    now: float | None,
    args: Mapping[str, Any],
    benchmark: Mapping[str, Any] | None,
    running: int = 0,
    tolerance: float = TOLERANCE,
) -> Watch:
    """Judge the acceptance length that `/metrics` shows now.

    ``args`` are the plan's flags (``plan.args``), ``benchmark`` is ``<state>/benchmarks/latest.json`` or None, ``running``
    is the number of running requests.
    """
    if not args.get(_SPECULATES):
        return Watch(OFF, message="speculation is off")
    if now is None:
        return Watch(UNKNOWN, message="no acceptance length yet: the server has not decoded since its start")
    expected = measured(benchmark, running)
    nothing = now <= NOTHING_ACCEPTED
    if nothing or (expected is not None and now < expected * (1 - tolerance)):
        than = (
            f"the last benchmark had {expected:.2f}"
            if expected is not None
            else "there is no benchmark to compare with"
        )
        what = "nothing of the draft is accepted" if nothing else f"{(1 - now / (expected or now)) * 100:.0f} % less"
        causes, switch = _causes(args, nothing), _switch(args)
        text = (
            f"acceptance length is {now:.2f}, {than}: {what}. Likely causes: "
            + "; ".join(causes)
            + f". Switch: {switch}."
        )
        return Watch(LOW, now, expected, text, causes, switch)
    if expected is None:
        return Watch(UNMEASURED, now, message=f"acceptance length is {now:.2f}; no benchmark to compare with")
    return Watch(OK, now, expected, f"acceptance length is {now:.2f}, the last benchmark had {expected:.2f}")
