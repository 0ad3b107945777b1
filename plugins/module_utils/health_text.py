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
GENERATING = "generating"
READY = "ready"
FAILED = "failed"
FOREIGN = "foreign"
TIMEOUT = "timeout"
GENERATION_FAILED = "generation_failed"
POOL_TOO_SMALL = "pool_too_small"
STATES = (REFUSED, WARMING, GENERATING, READY, FAILED, FOREIGN, TIMEOUT, GENERATION_FAILED, POOL_TOO_SMALL)
# States that another look can change; every other state ends the gate.
INTERIM = frozenset({REFUSED, WARMING, GENERATING})

# ------------------------------------------------------------------------------------------------------------ secrets

_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    # The engine prints api_key='...' in its ServerArgs line; None means that there is none and stays readable.
    # From the begin of a word only: looking at every letter of a long one would take minutes.
    (re.compile(r"""(?i)(["']?(?<!\w)\w*api[_-]?key["']?\s*[=:]\s*)(["'])(?:\\.|(?!\2).)*\2"""), r"\1\2***\2"),
    (re.compile(r"""(?i)(--[\w-]*api[_-]key(?:["']?\s*,\s*|\s+|=))(["'])(?:\\.|(?!\2).)*\2"""), r"\1\2***\2"),
    (re.compile(r"""(?i)(--[\w-]*api[_-]key(?:\s+|=))(?!["'*])\S+"""), r"\1***"),
    (
        re.compile(
            r"""(?i)(?<![-\w])((?:\w+_)?api_key\s*[=:]\s*)(?!None\b|["'*])"""
            # A quote that only ends the text around it stays.
            r"""(?:[^\s,;)\]}"']|["'](?=[^\s,;)\]}"']))+"""
        ),
        r"\1***",
    ),
    (re.compile(r"""(?i)(\bbearer\s+)[^\s"',;]+"""), r"\1***"),
    (re.compile(r"""(?i)(authorization["']?\s*[:=]\s*["']?)(?!\s|["']|bearer\b)[^"'\n]+"""), r"\1***"),
    # Variables such as HF_TOKEN and AWS_SECRET_ACCESS_KEY; a number of TOKENS is none.
    (
        re.compile(
            r"""(?<!\w)((?:[A-Z0-9]+_)*(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|SECRET_(?:ACCESS_)?KEY|ACCESS_KEY_ID)=)"""
            r"""(?:(["'])(?:\\.|(?!\2).)+\2|[^\s"'*]+)"""
        ),
        r"\1***",
    ),
    # User and password in an address.
    (re.compile(r"""(://)[^/\s:@"']*:[^/\s@"']+@"""), r"\1***@"),
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
# After one of these the target is in place: what is loaded now is the draft.
_TARGET_LOADED = ("CUDA graphs", "draft weights", "draft CUDA graphs")

_PHASES = {
    "starting": "starting",
    "distributed init": "connecting the ranks",
    "weights": "loading weights",
    "KV cache": "allocating the KV cache",
    "CUDA graphs": "capturing CUDA graphs",
    "draft weights": "loading draft weights",
    "draft CUDA graphs": "capturing draft CUDA graphs",
    "HTTP start": "opening the port",
    "warm-up": "warming up",
}


@dataclass(frozen=True)
class Progress:
    """How far the start is: `weights 12/64`."""

    name: str = ""
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.done}/{self.total}" if self.total else self.name

    @classmethod
    def load(cls, text: str) -> Progress:
        """From its own text."""
        found = re.fullmatch(r"(.*?)(?: (\d+)/(\d+))?", text)
        name, done, total = found.groups() if found else (text, None, None)
        return cls(name, int(done or 0), int(total or 0))


def parse_progress(lines: Iterable[str], before: str = "") -> Progress:
    """Last phase that the engine's log lines show; `ready to roll` is no phase, because it proves nothing.

    :param before: the phase that earlier lines had shown, as text.
    """
    progress = Progress.load(before)
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
                if progress.name in _TARGET_LOADED and name in ("distributed init", "weights", "KV cache"):
                    # The draft is set up like the target before it.
                    name = "draft weights"
                progress = Progress(name, int(counts.get("done") or 0), total)
                break
    return progress


# Lines that come without the start moving: answers to the gate's own requests, and the gate's own lines.
_STANDSTILL = re.compile(r'INFO:\s+\S+:\d+ - "|^\[\S+ on \S+\] \d+/\d+ s')


def last_sign(lines: Iterable[str]) -> str:
    """The last line that shows a start at work; empty when there is none."""
    signs = [line for line in lines if line.strip() and not _STANDSTILL.search(line)]
    return signs[-1] if signs else ""


def steady(text: str) -> str:
    """The text without its numbers: a counter that moves is no change."""
    return re.sub(r"\d+", "#", text)


def phase_name(phase: str) -> str:
    """`weights 12/64` -> `weights`: a counter that moves is no change of phase."""
    return re.sub(r" \d+/\d+$", "", phase)


def seconds_text(seconds: float) -> str:
    """42.0 -> `42`, 0.53 -> `0.5`."""
    return f"{seconds:.0f}" if seconds >= 10 or seconds == int(seconds) else f"{seconds:.1f}"


WORDS = {
    REFUSED: "loading",
    WARMING: "warming up",
    GENERATING: "generating (the first sampled request compiles kernels)",
    READY: "ready",
    FAILED: "failed",
    FOREIGN: "port held by someone else",
    TIMEOUT: "out of time",
    GENERATION_FAILED: "generation failed",
    POOL_TOO_SMALL: "KV pool too small",
}
# Shorter silences in the log are usual: the slowest step that says nothing compiles kernels.
QUIET_WORTH_SAYING = 30.0


def doing_text(state: str, phase: str = "", status: str = "", silent: bool = False, quiet: float = 0.0) -> str:
    """What the server does, in words.

    :param phase: what the journal says, `weights 12/64`.
    :param status: last answer of /health.
    :param silent: whether the engine asked its scheduler and got nothing: such a 503 takes 20 s, that of a start none.
    :param quiet: seconds without a new line in its log.
    """
    if state not in (REFUSED, WARMING):
        return WORDS.get(state, state) + (f" ({status})" if status and state not in INTERIM else "")
    if state == REFUSED:
        text = _PHASES.get(phase_name(phase), WORDS[REFUSED]) + phase[len(phase_name(phase)) :]
    elif silent:
        text = f"the port is open, but the scheduler does not answer ({status})"
    elif status == "timeout":
        text = "the port is open, but /health does not answer (timeout)"
    else:
        text = WORDS[WARMING] + (f" ({status})" if status else "")
    return text + (f", nothing new in its log for {quiet:.0f} s" if quiet >= QUIET_WORTH_SAYING else "")


def progress_line(label: str, host: str, elapsed: float, budget: float, doing: str, usual: float = 0.0) -> str:
    """`[sglang-kimi on box] 95/900 s, usually 570 s: loading weights 12/64`; `usual` 0: not known."""
    usually = f", usually {usual:.0f} s" if usual > 0 else ""
    return f"[{label} on {host}] {int(max(0.0, elapsed))}/{budget:.0f} s{usually}: {doing}"


def last_pieces(lines: Iterable[str], limit: int = 400) -> list[str]:
    """Journal lines for people: of a progress bar only its last state, and no line without end."""
    shown = (line.rstrip().rsplit("\r", 1)[-1].strip() for line in lines)
    return [line if len(line) <= limit else line[:limit] + " ..." for line in shown if line]
