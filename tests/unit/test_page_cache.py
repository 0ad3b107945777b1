"""Weights into the page cache: which files, how much of them, and what is really read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.gpuserve.sglang.plugins.action.page_cache import progress
from ansible_collections.gpuserve.sglang.plugins.module_utils.page_cache import (
    PIECE,
    Reader,
    Residency,
    Weight,
    decide,
    find_weights,
    pieces,
    read_meminfo,
    text_gb,
)

GB = 10**9
MEMINFO = """MemTotal:       1584859136 kB
MemFree:         9876543 kB
MemAvailable:   1234567890 kB
HugePages_Total:       3
Odd line
"""


def test_meminfo_in_bytes() -> None:
    found = read_meminfo(MEMINFO)
    assert found["MemAvailable"] == 1234567890 * 1024
    assert found["HugePages_Total"] == 3
    assert "Odd line" not in found


@pytest.mark.parametrize(
    ("total", "resident", "available", "mode", "limit", "words"),
    [
        (595 * GB, 0, 1264 * GB, "auto", 595 * GB, "595.0 GB of weights, room for"),
        # The reserve is 5 % of 1.6 TB here.
        (595 * GB, 0, 640 * GB, "auto", 0, "do not fit"),
        (595 * GB, 0, 640 * GB, "true", 640 * GB - int(0.05 * 1584859136 * 1024), "as much as fits"),
        (595 * GB, 594.9 * GB, 0, "auto", 0, "already"),
        (595 * GB, 300 * GB, 1264 * GB, "auto", 595 * GB, "room"),
        # What is cached is all that fits: reading more would only push it out again.
        (595 * GB, 560 * GB, 600 * GB, "true", 0, "do not fit"),
        (0, 0, 1264 * GB, "auto", 0, "no weights"),
    ],
)
def test_all_or_nothing_unless_it_is_asked_for(
    total: int, resident: float, available: int, mode: str, limit: int, words: str
) -> None:
    memory = {"MemTotal": 1584859136 * 1024, "MemAvailable": available}
    decision = decide(total, int(resident), memory, mode)
    assert decision.limit == limit
    assert words in decision.why


def test_a_small_host_keeps_eight_gibibytes() -> None:
    memory = {"MemTotal": 24 * GB, "MemAvailable": 20 * GB}
    assert decide(12 * GB, 0, memory).limit == 0
    assert decide(11 * GB, 0, memory).limit == 11 * GB


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "b.safetensors").write_bytes(os.urandom(3 << 20))
    (folder / "a.safetensors").write_bytes(os.urandom(1 << 20))
    (folder / "config.json").write_text("{}")
    (folder / "empty.bin").write_bytes(b"")
    (folder / "link.safetensors").symlink_to("a.safetensors")
    (folder / "dir.bin").mkdir()
    return folder


def test_weights_are_found_once_and_in_order(model: Path) -> None:
    found = find_weights([str(model), str(model)])
    assert [(Path(weight.path).name, weight.size) for weight in found] == [
        ("a.safetensors", 1 << 20),
        ("b.safetensors", 3 << 20),
        ("empty.bin", 0),
    ]


def test_pieces_cover_each_file_without_overlap() -> None:
    work = pieces([Weight("/a", 2 * PIECE + 5), Weight("/b", 0), Weight("/c", 7)])
    assert work == [("/a", 0, PIECE), ("/a", PIECE, PIECE), ("/a", 2 * PIECE, 5), ("/c", 0, 7)]


def test_what_was_written_just_now_is_resident(model: Path) -> None:
    residency = Residency()
    path = str(model / "b.safetensors")
    assert residency.bytes_of(path, 0, 3 << 20) == 3 << 20
    assert residency.bytes_of(path, 1 << 20, (1 << 20) + 5) == (1 << 20) + 5
    assert residency.bytes_of(path, 0, 0) == 0


def test_only_what_is_not_resident_is_read(model: Path) -> None:
    work = pieces(find_weights([str(model)]), 1 << 20)
    asked: list[tuple[str, int, int]] = []

    def resident(path: str, offset: int, length: int) -> int:
        asked.append((path, offset, length))
        return 0 if offset == 1 << 20 else length

    reader = Reader(work, 4, 4 << 20, resident)
    assert reader.run(0, 0, 60) == (4, 4 << 20)
    assert reader.over() and reader.errors == []
    assert reader.read_bytes == 1 << 20
    assert sorted(asked) == sorted(work)


def test_it_goes_on_where_the_window_before_ended(model: Path) -> None:
    work = pieces(find_weights([str(model)]), 1 << 20)
    reader = Reader(work, 2, 4 << 20, lambda *piece: 0)
    assert reader.run(3, 3 << 20, 60) == (4, 4 << 20)
    assert reader.read_bytes == 1 << 20
    late = Reader(work, 2, 4 << 20, lambda *piece: 0)
    assert late.run(1, 1 << 20, 0) == (1, 1 << 20)
    assert not late.over()


def test_it_stops_at_the_limit(model: Path) -> None:
    work = pieces(find_weights([str(model)]), 1 << 20)
    reader = Reader(work, 1, 2 << 20, lambda *piece: 0)
    assert reader.run(0, 0, 60) == (2, 2 << 20)
    assert reader.over()


def test_a_file_that_cannot_be_read_ends_it_with_its_name(model: Path) -> None:
    work = pieces(find_weights([str(model)]), 1 << 20)
    (model / "b.safetensors").unlink()
    reader = Reader(work, 2, 4 << 20, lambda *piece: 0)
    reader.run(0, 0, 60)
    assert reader.over()
    assert "b.safetensors: No such file" in reader.errors[0]


def test_progress_for_people() -> None:
    line = progress("kimi-1", {"done": 212 * GB, "limit": 595 * GB}, 68)
    assert line == "[page cache on kimi-1] 68 s: 212.0 GB/595.0 GB, 3.1 GB/s, 123 s left"
    assert "? s left" in progress("kimi-1", {"done": 0, "limit": 1}, 0)
    assert text_gb(1_860_000) == "1.9 MB"
