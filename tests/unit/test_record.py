"""What a rollback can put back: records are whole, the links name the two last good ones, old ones go."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils.record import (
    KEPT,
    LAST,
    PREVIOUS,
    RecordError,
    Records,
    settings_files,
)


def plan(number: int) -> dict:
    return {"hash": str(number), "process_hash": f"{number:064x}"[::-1], "env": {"A": str(number)}}


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path)


def test_nothing_is_on_record_at_first(records: Records) -> None:
    assert records.read(LAST) is None
    assert records.read(PREVIOUS) is None
    assert not records.is_recorded("unit", plan(1))


def test_the_two_last_good_ones_are_named(records: Records) -> None:
    for number in (1, 2, 3):
        records.keep(f"unit {number}", plan(number))
    assert records.read(LAST) == {"id": plan(3)["process_hash"][:12], "unit": "unit 3", "plan": plan(3), "settings": {}}
    previous = records.read(PREVIOUS)
    assert previous is not None and previous["unit"] == "unit 2"
    assert records.is_recorded("unit 3", plan(3))
    assert not records.is_recorded("unit 3 edited", plan(3))
    assert not records.is_recorded("unit 3", plan(2))


def test_a_new_unit_text_of_the_same_plan_is_no_new_generation(records: Records) -> None:
    records.keep("unit 1", plan(1))
    records.keep("unit 2", plan(2))
    records.keep("unit 2, other comment", plan(2))
    assert records.read(LAST)["unit"] == "unit 2, other comment"  # type: ignore[index]
    assert records.read(PREVIOUS)["unit"] == "unit 1"  # type: ignore[index]


def test_settings_files_are_part_of_it(records: Records, tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    for name in ("engine.json", "engine.plan.json", "engine2.json", "engine.txt"):
        (folder / name).write_text("{}")
    assert [path.name for path in settings_files("engine.service", folder)] == ["engine.json", "engine.plan.json"]
    settings = {str(folder / "engine.json"): "{}"}
    records.keep("unit", plan(1), settings)
    assert records.is_recorded("unit", plan(1), settings)
    assert not records.is_recorded("unit", plan(1), {})
    assert records.read(LAST)["settings"] == settings  # type: ignore[index]


def test_a_record_of_an_earlier_release_has_no_settings(records: Records) -> None:
    records.keep("unit", plan(1))
    (records.root / records.linked(LAST) / "settings.json").unlink()
    assert records.read(LAST)["settings"] == {}  # type: ignore[index]


def test_old_records_go_and_linked_ones_stay(records: Records) -> None:
    for number in range(KEPT + 4):
        records.keep(f"unit {number}", plan(number))
        os.utime(records.root / records.linked(LAST), (1000 + number, 1000 + number))
    folders = [p for p in records.root.iterdir() if p.is_dir() and not p.is_symlink()]
    assert len(folders) <= KEPT + 1
    assert records.read(LAST) is not None and records.read(PREVIOUS) is not None


def test_a_damaged_record_is_named(records: Records) -> None:
    records.keep("unit", plan(1))
    (records.root / records.linked(LAST) / "plan.json").write_text("{")
    with pytest.raises(RecordError, match=r"last-good names .* cannot be read .*expected a unit and a plan"):
        records.read(LAST)
    assert not records.is_recorded("unit", plan(1))


def test_an_interrupted_record_is_written_again(records: Records) -> None:
    left = records.root / f".{plan(1)['process_hash'][:12]}.new"
    left.mkdir(parents=True)
    (left / "rest").write_text("x")
    records.keep("unit", plan(1))
    assert json.loads((records.root / records.linked(LAST) / "plan.json").read_text()) == plan(1)
    assert sorted(p.name for p in (records.root / records.linked(LAST)).iterdir()) == [
        "plan.json",
        "settings.json",
        "unit",
    ]


def test_a_plan_comes_back_in_its_own_order(records: Records) -> None:
    """A unit that is rendered from it again must be the same text."""
    ordered = {**plan(1), "env": {"B": "1", "A": "2", "C": "3"}}
    records.keep("unit", ordered)
    found = records.read(LAST)
    assert found is not None and list(found["plan"]["env"]) == ["B", "A", "C"]
    assert list(found["plan"]) == list(ordered)
