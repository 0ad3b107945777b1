# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""One play at a time: a lock on the host that names its holder, and how a dead holder is told from a busy one.

The lock is a file below ``/run``, written under ``flock``, so that two plays that come at the same moment cannot both have it, and
a boot of the host removes it. It is a lease: whoever works on the host renews it, and a lease that is over binds nobody.
Whether the holder lives can be asked only on the controller that it runs on; there a dead one is found at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PATH = Path("/run/gpuserve-sglang.lock")
LEASE = 1800.0
KEYS = ("token", "controller", "name", "pid", "started", "user", "command")


# --- the controller ---------------------------------------------------------------------------------------------------


def controller_id(proc: Path = Path("/proc")) -> str:
    """What tells this controller from others: process numbers mean the same only within one boot and one container."""
    parts = [socket.gethostname()]
    try:
        parts += [(proc / "sys/kernel/random/boot_id").read_text().strip(), os.readlink(proc / "self/ns/pid")]
    except OSError:
        # No Linux: the hardware address has to do.
        parts.append(f"{uuid.getnode():x}")
    return " ".join(parts)


def process_start(pid: int, proc: Path = Path("/proc")) -> str:
    """When a process began, as text to compare; empty when there is none (a zombie counts as none)."""
    if (proc / "self").exists():
        try:
            fields = (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] in ("Z", "X") else fields[19]
    asked = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return asked.stdout.strip()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def holder(pid: int, command: Sequence[str]) -> dict[str, Any]:
    """The process ``pid`` of this controller as the holder of a lock."""
    words = [os.path.basename(word) if place == 0 else word for place, word in enumerate(command)]
    return {
        "token": uuid.uuid4().hex,
        "controller": controller_id(),
        "name": socket.gethostname(),
        "pid": pid,
        "started": process_start(pid),
        "user": _user(),
        # Options may hold secrets (-e password=...): the playbooks are enough to recognise a play by.
        "command": " ".join([*words[:1], *(word for word in words[1:] if word.endswith((".yml", ".yaml")))]),
    }


def is_dead(found: Mapping[str, Any]) -> bool:
    """Whether the holder certainly is gone: it ran on this controller, and its process is not there any more."""
    if found.get("controller") != controller_id():
        return False
    try:
        return process_start(int(found["pid"])) != str(found["started"])
    except (KeyError, TypeError, ValueError):
        return False


def same_holder(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two records are of the same process: a play may take the lock again that it has."""
    keys = ("controller", "pid", "started")
    return all(one.get(key) == other.get(key) for key in keys)


def clock(seconds: float) -> str:
    """Seconds since the epoch as text in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def describe(found: Mapping[str, Any], now: float) -> str:
    """Who holds the lock, since when, and until when without a sign of life."""
    try:
        taken, until = float(found["taken"]), float(found["until"])
    except (KeyError, TypeError, ValueError):
        return "somebody unknown"
    who = f"{found.get('command') or 'a play'} (process {found.get('pid')}, user {found.get('user')}) on {found.get('name')}"
    return f"{who} since {clock(taken)} ({max(0.0, now - taken):.0f} s ago), at most until {clock(until)} without a sign of life"


# --- the host ---------------------------------------------------------------------------------------------------------


class Lock:
    """The lock file. Every method reads and writes it under ``flock``."""

    def __init__(self, path: Path = PATH) -> None:
        self.path = path

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                # Whoever released it in the meantime has removed the file that was opened here.
                if _inode(self.path) == os.fstat(handle).st_ino:
                    yield handle
                    return
            finally:
                os.close(handle)

    @staticmethod
    def _read(handle: int) -> dict[str, Any]:
        try:
            found = json.loads(os.pread(handle, 1 << 16, 0))
        except ValueError:
            # Empty: just made. Torn: its writer died within a write, and so holds nothing.
            return {}
        return found if isinstance(found, dict) and found.get("token") else {}

    @staticmethod
    def _write(handle: int, content: Mapping[str, Any]) -> None:
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(content, sort_keys=True).encode(), 0)

    def read(self) -> dict[str, Any]:
        """The holder, with ``taken`` and ``until``; empty when nobody has it."""
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and found.get("token") else {}

    def take(self, who: Mapping[str, Any], lease: float, now: float, dead: str = "") -> tuple[bool, dict[str, Any]]:
        """Take the lock for ``lease`` seconds.

        :param dead: token of a holder that the caller knows to be gone.
        :returns: whether it was taken, and whom it was found with (empty: nobody, or the same process).
        """
        with self._open() as handle:
            found = self._read(handle)
            if found and same_holder(found, who):
                found = {}
            free = not found or found["token"] == dead or _until(found) <= now
            if free:
                self._write(handle, {**{key: who[key] for key in KEYS}, "taken": now, "until": now + lease})
            return free, found

    def renew(self, token: str, lease: float, now: float) -> bool:
        """Keep the lock for ``lease`` seconds from now; False when it is somebody else's by now."""
        with self._open() as handle:
            found = self._read(handle)
            mine = bool(token) and found.get("token") == token
            if mine:
                self._write(handle, {**found, "until": max(_until(found), now + lease)})
            elif not found:
                self.path.unlink(missing_ok=True)
            return mine

    def release(self, token: str) -> bool:
        """Give the lock back; False when it was not held with this token."""
        with self._open() as handle:
            found = self._read(handle)
            mine = bool(token) and found.get("token") == token
            if mine or not found:
                self.path.unlink(missing_ok=True)
            return mine


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return -1


def _until(found: Mapping[str, Any]) -> float:
    try:
        return float(found["until"])
    except (KeyError, TypeError, ValueError):
        return 0.0
