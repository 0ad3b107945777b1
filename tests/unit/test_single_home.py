"""Numbers live in one place: no role, playbook, inventory or plugin repeats a value of a profile or of the NCCL table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "plugins" / "module_utils" / "data"
SEARCHED = ("roles", "playbooks", "inventories", "plugins")


def _settings() -> list[tuple[str, str]]:
    found = set()
    for profile in json.loads((DATA / "profiles.json").read_text()).values():
        for field, item in profile.get("flags", {}).items():
            value = item.get("value") if isinstance(item, dict) else item
            # A rule may have to speak of 1 (a chain of drafts, one rank); other numbers are somebody's choice.
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value not in (0, 1):
                found.add((field, str(value)))
    for name, value in json.loads((DATA / "nccl.json").read_text())["pcie"]["values"].items():
        found.add((name, value))
    return sorted(found)


def _files() -> list[Path]:
    suffixes = {".py", ".yml", ".yaml", ".j2", ".json", ".md"}
    paths = [p for folder in SEARCHED for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return [p for p in paths if DATA not in p.parents and "__pycache__" not in p.parts]


def _repeats(text: str, field: str, value: str) -> bool:
    """Whether a name of the field stands beside exactly this value: `field: 3`, `--field 3`, `field=3`, `"field": "3"`."""
    names = {field, field.replace("_", "-")}
    pattern = rf"(?:{'|'.join(map(re.escape, names))})[\"'`]?\s*[:= ,]\s*[\"'`]?{re.escape(value)}(?![\w.])"
    return re.search(pattern, text) is not None


def test_the_search_finds_what_it_looks_for() -> None:
    assert len(_settings()) > 12
    for text in ('"mem_fraction_static": 0.88', "--mem-fraction-static 0.88", "mem_fraction_static=0.88"):
        assert _repeats(text, "mem_fraction_static", "0.88")
    assert not _repeats("--mem-fraction-static 0.885", "mem_fraction_static", "0.88")
    assert _repeats('NCCL_BUFFSIZE: "16777216"', "NCCL_BUFFSIZE", "16777216")


@pytest.mark.parametrize(("field", "value"), _settings())
def test_a_value_of_a_profile_stands_nowhere_else(field: str, value: str) -> None:
    assert [str(p.relative_to(ROOT)) for p in _files() if _repeats(p.read_text(), field, value)] == []
