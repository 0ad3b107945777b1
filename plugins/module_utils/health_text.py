# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""What people read about a server: states, phases of a start, progress lines; and no secret in any of it.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

REFUSED = "refused"
WARMING = "warming"
READY = "ready"
FAILED = "failed"
FOREIGN = "foreign"
TIMEOUT = "timeout"
GENERATION_FAILED = "generation_failed"
STATES = (REFUSED, WARMING, READY, FAILED, FOREIGN, TIMEOUT, GENERATION_FAILED)
# States that another look can change; every other state ends the gate.
INTERIM = frozenset({REFUSED, WARMING})

# ------------------------------------------------------------------------------------------------------------ secrets

_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    # The engine prints api_key='...' in its ServerArgs line; None means that there is none and stays readable.
    (re.compile(r"""(?i)(["']?\w*api[_-]?key["']?\s*[=:]\s*)(["'])(?:\\.|(?!\2).)*\2"""), r"\1\2***\2"),
    (re.compile(r"""(?i)(--[\w-]*api[_-]key(?:["']?\s*,\s*|\s+|=))(["'])(?:\\.|(?!\2).)*\2"""), r"\1\2***\2"),
    (re.compile(r"""(?i)(--[\w-]*api[_-]key(?:\s+|=))(?!["'*])\S+"""), r"\1***"),
    (re.compile(r"""(?i)(?<![-\w])((?:\w+_)?api_key\s*[=:]\s*)(?!None\b|["'*])[^\s,;)\]}]+"""), r"\1***"),
    (re.compile(r"""(?i)(\bbearer\s+)[^\s"',;]+"""), r"\1***"),
    (re.compile(r"""(?i)(authorization["']?\s*[:=]\s*["']?)(?!\s|["']|bearer\b)[^"'\n]+"""), r"\1***"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "hf_***"),
)


def scrub(text: str) -> str:
    """Take API keys and tokens out of text that leaves the host."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


# ----------------------------------------------------------------------------------------------------------- progress

_STEPS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"server_args=ServerArgs\("), "starting"),
    (re.compile(r"Init torch distributed begin"), "distributed init"),
    (re.compile(r"shards?:\s+\d+%.*?\|\s*(?P<done>\d+)/(?P<total>\d+) \["), "weights"),
    (re.compile(r"Load weight begin"), "weights"),
    (re.compile(r"Load weight end|KV Cache is allocated"), "KV cache"),
    (re.compile(r"Capture draft cuda graph begin"), "draft CUDA graphs"),
    (re.compile(r"Capture (?:\w+ )?cuda graph begin"), "CUDA graphs"),
    # The bar does not say whose graphs it captures: it keeps the name that the line before gave.
    (re.compile(r"Capturing batches .*?\|\s*(?P<done>\d+)/(?P<total>\d+) \["), ""),
    (re.compile(r"max_total_num_tokens=\d+, chunked_prefill_size"), "HTTP start"),
    (re.compile(r"Uvicorn running on "), "warm-up"),
)


@dataclass(frozen=True)
class Progress:
    """How far the start is: `weights 12/64`."""

    name: str = ""
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.done}/{self.total}" if self.total else self.name


def parse_progress(lines: Iterable[str]) -> Progress:
    """Last phase that the engine's log lines show; `ready to roll` is no phase, because it proves nothing."""
    progress = Progress()
    for line in lines:
        # A tqdm bar rewrites its line with carriage returns: to the journal all of them are one line.
        for part in line.split("\r"):
            for pattern, name in _STEPS:
                found = pattern.search(part)
                if found is None:
                    continue
                counts = found.groupdict()
                total = int(counts.get("total") or 0)
                name = name or (progress.name if "CUDA graphs" in progress.name else "CUDA graphs")
                progress = Progress(name, int(counts.get("done") or 0), total)
                break
    return progress


def phase_name(phase: str) -> str:
    """`weights 12/64` -> `weights`: a counter that moves is no change of phase."""
    return re.sub(r" \d+/\d+$", "", phase)


def clock_text(seconds: float) -> str:
    """105 -> `1:45`."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def seconds_text(seconds: float) -> str:
    """42.0 -> `42`, 0.53 -> `0.5`."""
    return f"{seconds:.0f}" if seconds >= 10 or seconds == int(seconds) else f"{seconds:.1f}"


WORDS = {
    REFUSED: "loading",
    WARMING: "warming up",
    READY: "ready",
    FAILED: "failed",
    FOREIGN: "port held by someone else",
    TIMEOUT: "out of time",
    GENERATION_FAILED: "generation failed",
}


def progress_line(
    label: str, host: str, elapsed: float, budget: float, state: str, phase: str = "", status: str = ""
) -> str:
    """`sglang-kimi on box: 1:45/15:00 warming up - weights 12/64 (503)`."""
    line = f"{label} on {host}: {clock_text(elapsed)}/{clock_text(budget)} {WORDS.get(state, state)}"
    if phase and state in INTERIM and phase != WORDS.get(state):
        line += f" - {phase}"
    return line + (f" ({status})" if status else "")


def last_pieces(lines: Iterable[str], limit: int = 400) -> list[str]:
    """Journal lines for people: of a progress bar only its last state, and no line without end."""
    shown = (line.rstrip().rsplit("\r", 1)[-1].strip() for line in lines)
    return [line if len(line) <= limit else line[:limit] + " ..." for line in shown if line]
