# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Weights into the page cache while the old server still serves, so that the new one finds them in memory.

The engine maps its shards and reads them page by page, one thread a rank; reading the files beforehand in large pieces by many
threads is limited by the disk alone. Never more than fits beside what runs: what Linux calls available, less a reserve. The work
is a list of pieces in a fixed order, so that a caller can do it in parts and show progress. Standard library only; bytes, seconds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
PIECE = 64 << 20
BLOCK = 8 << 20
# What the new server itself needs of the host's memory, and room to breathe.
RESERVE_BYTES = 8 << 30
RESERVE_FRACTION = 0.05
# A file of which so little is missing is as good as cached: its last pages are read in no time.
NEARLY = 0.999


@dataclass(frozen=True)
class Weight:
    """A file of weights."""

    path: str
    size: int


def find_weights(folders: Iterable[str]) -> list[Weight]:
    """The files of weights in the folders, in the order of their names; one that is linked twice counts once."""
    found: list[Weight] = []
    seen: set[tuple[int, int]] = set()
    for folder in folders:
        for path in sorted(Path(folder).iterdir()):
            if path.suffix not in SUFFIXES or not path.is_file():
                continue
            status = path.stat()
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                found.append(Weight(str(path), status.st_size))
    return found


def pieces(weights: Iterable[Weight], size: int = PIECE) -> list[tuple[str, int, int]]:
    """The work as ``(path, offset, length)``; offsets are multiples of ``size``, which is one of the page size."""
    return [
        (weight.path, offset, min(size, weight.size - offset))
        for weight in weights
        for offset in range(0, weight.size, size)
    ]


# --- memory -----------------------------------------------------------------------------------------------------------


def read_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` in bytes."""
    values = {}
    for line in text.splitlines():
        name, __, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


@dataclass(frozen=True)
class Decision:
    """How many bytes may be in the cache (0: leave it), and why."""

    limit: int
    why: str


def decide(total: int, resident: int, memory: Mapping[str, int], mode: str = "auto") -> Decision:
    """Whether to read ``total`` bytes of which ``resident`` are cached.

    What is cached already is part of what Linux calls available, so the whole of the weights must fit into that.
    ``mode``: ``auto`` reads all or nothing, ``true`` as much as fits.
    """
    if total == 0:
        return Decision(0, "no weights were found")
    if resident >= total * NEARLY:
        return Decision(0, f"{text_gb(total)} of weights are in the page cache already")
    available = memory.get("MemAvailable", 0)
    room = max(0, available - max(RESERVE_BYTES, int(memory.get("MemTotal", 0) * RESERVE_FRACTION)))
    found = f"{text_gb(total)} of weights, room for {text_gb(room)} beside what runs ({text_gb(available)} available)"
    if total <= room:
        return Decision(total, found)
    if mode != "auto" and room > resident:
        return Decision(room, f"{found}: as much as fits")
    return Decision(0, f"{found}: they do not fit, the new server reads them from the disk")


def text_gb(size: float) -> str:
    """Bytes for people: `594.8 GB`, `1.9 MB`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


class Residency:
    """How much of a piece of a file is in memory, asked with mincore(2); a mapping that nobody touches reads nothing."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def bytes_of(self, path: str, offset: int, length: int) -> int:
        """Resident bytes; 0 where the kernel does not tell."""
        if length <= 0:
            return 0
        pages = -(-length // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        with open(path, "rb") as stream:
            # Private and writable, for ctypes to hand out its address; nothing is written.
            mapped = mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_COPY, offset=offset)
        try:
            first = ctypes.c_char.from_buffer(mapped)
            address = ctypes.c_void_p(ctypes.addressof(first))
            failed = self._libc.mincore(address, ctypes.c_size_t(length), vector)
            del first
        finally:
            mapped.close()
        if failed:
            return 0
        return min(length, sum(byte & 1 for byte in bytes(vector)) * mmap.PAGESIZE)

    def total(self, work: Iterable[tuple[str, int, int]]) -> int:
        """Resident bytes of many pieces."""
        return sum(self.bytes_of(*piece) for piece in work)


# --- reading ----------------------------------------------------------------------------------------------------------


class Reader:
    """Reads pieces in order with many threads, from ``first`` on, until all are done, the time is over or ``limit`` is reached."""

    def __init__(
        self,
        work: list[tuple[str, int, int]],
        threads: int,
        limit: int,
        resident: Callable[[str, int, int], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.work, self.threads, self.limit, self.clock = work, max(1, threads), limit, clock
        self.resident = resident or Residency().bytes_of
        self.read_bytes = 0
        self.errors: list[str] = []
        self._lock = threading.Lock()
        self._next = 0
        self._done = 0
        self._until = 0.0

    def run(self, first: int, done: int, seconds: float) -> tuple[int, int]:
        """Work for some seconds.

        :param first: number of pieces that are done.
        :param done: bytes of them.
        :returns: both numbers afterwards; every piece that was begun is finished.
        """
        self._next, self._done, self._until = first, done, self.clock() + seconds
        threads = [threading.Thread(target=self._work, daemon=True) for __ in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._next, self._done

    def over(self) -> bool:
        """Whether nothing is left to do."""
        return self._next >= len(self.work) or self._done >= self.limit or bool(self.errors)

    def _take(self) -> tuple[str, int, int] | None:
        with self._lock:
            if self.over() or self.clock() >= self._until:
                return None
            piece = self.work[self._next]
            self._next += 1
            self._done += piece[2]
            return piece

    def _work(self) -> None:
        buffer = memoryview(bytearray(BLOCK))
        while (piece := self._take()) is not None:
            try:
                if self.resident(*piece) < piece[2]:
                    self._read(buffer, *piece)
            except OSError as error:
                with self._lock:
                    self.errors.append(f"{piece[0]}: {error.strerror or error}")

    def _read(self, buffer: memoryview, path: str, offset: int, length: int) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            place = offset
            while place < offset + length:
                got = os.preadv(handle, [buffer[: min(BLOCK, offset + length - place)]], place)
                if not got:
                    break
                place += got
            with self._lock:
                self.read_bytes += place - offset
        finally:
            os.close(handle)
