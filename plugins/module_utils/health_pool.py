# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""The KV pool of a server that answers, against the one that was planned.

A server whose GPU is partly held by others starts, says healthy, and has a quarter of the pool: 449 633 tokens instead of
1 684 715 were seen. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Memory:
    """What the engine reports of its memory; None where it does not say. GiB are those of one rank."""

    kv_tokens: int | None = None
    kv_cache_gib: float | None = None
    weights_gib: float | None = None
    graphs_gib: float | None = None

    def public(self) -> dict[str, Any]:
        """As a dictionary."""
        return asdict(self)


def _above_zero(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None


def _gib(value: Any) -> float | None:
    return max(0.0, float(value)) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def memory_from_info(info: Any) -> Memory:
    """What an answer of `/server_info` says about memory. Nothing else is taken over: the rest of it holds secrets.

    The pool of a server with several data-parallel ranks is that of its smallest rank, because requests land on any.
    """
    if not isinstance(info, Mapping):
        return Memory()
    states = info.get("internal_states")
    states = [state for state in states if isinstance(state, Mapping)] if isinstance(states, list) else []
    usages = [usage for usage in (state.get("memory_usage") for state in states) if isinstance(usage, Mapping)]
    capacities = [tokens for tokens in (_above_zero(usage.get("token_capacity")) for usage in usages) if tokens]
    first: Mapping[str, Any] = usages[0] if usages else {}
    return Memory(
        kv_tokens=min(capacities, default=None) or _above_zero(info.get("max_total_num_tokens")),
        kv_cache_gib=_gib(first.get("kvcache")),
        weights_gib=_gib(first.get("weight")),
        graphs_gib=_gib(first.get("graph")),
    )


@dataclass(frozen=True)
class Pool:
    """The judgement: `ok` is false only for a pool that is known to be too small; `judged` false means that nothing is known."""

    ok: bool
    judged: bool
    seen: int | None
    planned: int | None
    text: str
    hint: str = ""

    def public(self) -> dict[str, Any]:
        """What modules return."""
        return {"ok": self.ok, "judged": self.judged, "seen": self.seen, "planned": self.planned, "text": self.text}


def _tokens(number: int) -> str:
    return f"{number:,}".replace(",", " ")


_HINT = (
    "see who else holds GPU memory (nvidia-smi) and free it, or, when the engine is right and the plan is not, raise "
    "sglang_service_kv_tolerance"
)


def judge_pool(seen: int | None, planned: int | None, tolerance: float) -> Pool:
    """Is the pool of `seen` tokens what was planned, but for the fraction `tolerance`? More than planned is fine.

    Without a plan (None or 0), or when the engine does not say, nothing is judged, and the text says so.
    """
    if not seen:
        return Pool(True, False, None, planned or None, "KV pool not judged: the engine does not say how large it is")
    if not planned:
        return Pool(
            True,
            False,
            seen,
            None,
            f"KV pool {_tokens(seen)} tokens, not judged: the plan does not know how many to expect",
        )
    share = seen / planned
    if share < 1 - tolerance:
        text = (
            f"the KV pool holds {_tokens(seen)} tokens, {share:.0%} of the {_tokens(planned)} planned (at least "
            f"{1 - tolerance:.0%} expected)"
        )
        return Pool(False, True, seen, planned, text, _HINT)
    text = f"KV pool {_tokens(seen)} tokens, {_tokens(planned)} planned"
    if share > 1 + tolerance:
        text += f" ({share - 1:.0%} more)"
    return Pool(True, True, seen, planned, text)
