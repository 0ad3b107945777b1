# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""The mark that says: somebody is working on this service, so nobody else restarts it.

``/run/gpuserve-sglang/<unit>.maintenance`` holds ``{"until": seconds since the epoch, "why": "..."}``. The mark ends by
itself, so that a play that was killed leaves no service without a watch, and a reboot removes it. Standard library only,
because it is also read on the host, without Ansible.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

RUN_DIR = Path("/run/gpuserve-sglang")
# A mark that cannot be read was still meant by somebody; but not for ever.
UNREADABLE_SECONDS = 3600.0


@dataclass(frozen=True)
class Mark:
    """Until when (seconds since the epoch) the service is left alone, and why."""

    until: float
    why: str = ""


def short_name(unit: str) -> str:
    """`sglang-kimi.service` -> `sglang-kimi`: names of files and of the units that belong to it."""
    return unit.removesuffix(".service")


def path(unit: str, run_dir: Path = RUN_DIR) -> Path:
    """Where the mark of a unit is; both spellings of its name are the same mark."""
    return run_dir / f"{short_name(unit)}.maintenance"


def mark(unit: str, seconds: float, why: str, run_dir: Path = RUN_DIR, now: float | None = None) -> Mark:
    """Leave the unit alone for so long from now; a second mark replaces the first."""
    made = Mark((time.time() if now is None else now) + seconds, why)
    run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    target = path(unit, run_dir)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    new.write_text(json.dumps({"until": made.until, "why": made.why}) + "\n", encoding="utf-8")
    new.replace(target)
    return made


def clear(unit: str, run_dir: Path = RUN_DIR) -> bool:
    """Take the mark away; whether there was one."""
    try:
        path(unit, run_dir).unlink()
    except FileNotFoundError:
        return False
    return True


def active(unit: str, now: float | None = None, run_dir: Path = RUN_DIR) -> Mark | None:
    """The mark that holds at this moment; None when there is none or it is over."""
    file = path(unit, run_dir)
    try:
        text, written = file.read_text(encoding="utf-8"), file.stat().st_mtime
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        text, written = "", time.time()
    try:
        data = json.loads(text)
        found = Mark(float(data["until"]), str(data.get("why", "")))
    except (ValueError, KeyError, TypeError, AttributeError):
        found = Mark(written + UNREADABLE_SECONDS, f"{file} cannot be read")
    return found if (time.time() if now is None else now) < found.until else None
