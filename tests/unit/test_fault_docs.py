"""The page of faults: made of the table and of what was seen, and of nothing else."""

import copy
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import fault_docs as docs  # noqa: E402

TABLE = [
    {"id": "a", "fault": "a | b", "must": "live", "clock": "from a to b", "within": 5, "kept": ""},
    {"id": "b", "fault": "other", "must": "die", "clock": "all", "within": 60, "kept": "the record"},
]
RECORD = {"date": "2026-11-30", "rows": {"a": {"outcome": "passed", "seconds": 3.21, "seen": "lived"}}}


def test_the_page_shows_what_was_seen_and_what_was_not_done():
    page = docs.render(TABLE, RECORD)
    assert "Last run: 2026-11-30; of 2 rows: 1 passed, 1 not done yet." in page
    assert "| a \\| b | live | passed | 3.2 | 5 | from a to b | lived | - |" in page
    assert "| other | die | **not done yet** |  | 60 | all |  | the record |" in page


def test_a_new_record_replaces_its_rows_only_and_old_rows_go():
    known = {"date": "2026-01-01", "rows": {"b": {"outcome": "failed"}, "gone": {"outcome": "passed"}}}
    merged = docs.merge(known, RECORD, ["a", "b"])
    assert merged == {"date": "2026-11-30", "rows": {"a": RECORD["rows"]["a"], "b": {"outcome": "failed"}}}
    with pytest.raises(docs.DocsError, match="the new record has a, expected"):
        docs.merge(known, RECORD, ["b"])
    with pytest.raises(docs.DocsError, match="the record has a, which the table does not"):
        docs.render(TABLE[1:], RECORD)


@pytest.mark.parametrize(("change", "words"), [({"id": "b"}, "stands twice"), ({"more": 1}, "a has")])
def test_a_table_that_is_not_one_is_refused(tmp_path, change, words):
    table = copy.deepcopy(TABLE)
    table[0].update(change)
    file = tmp_path / "faults.yml"
    file.write_text(json.dumps(table))
    with pytest.raises(docs.DocsError, match=words):
        docs.read_table(file)


def test_the_table_covers_the_limits_of_the_gate_and_the_rollback():
    within = {entry["id"]: entry["within"] for entry in docs.read_table()}
    assert within["rollback"] == 5
    assert within["gate-latency"] == 2
    assert len(within) > 25


def test_the_page_in_the_repository_is_the_generated_one():
    assert docs.main(["--check"]) == 0
