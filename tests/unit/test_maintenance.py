"""The maintenance mark: it holds for a time, ends by itself, and a broken one is neither ignored nor eternal."""

import json
import os

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import maintenance as m

UNIT = "sglang-kimi.service"


def test_the_mark_is_where_the_contract_says():
    assert str(m.path(UNIT)) == "/run/gpuserve-sglang/sglang-kimi.maintenance"
    assert m.path("sglang-kimi") == m.path(UNIT)


def test_a_mark_holds_until_its_time_and_no_longer(tmp_path):
    run_dir = tmp_path / "new"
    assert m.active(UNIT, 1000.0, run_dir) is None
    m.mark(UNIT, 60, "deployment", run_dir, 1000.0)
    assert json.loads(m.path(UNIT, run_dir).read_text()) == {"until": 1060.0, "why": "deployment"}
    assert m.active("sglang-kimi", 1059.9, run_dir) == m.Mark(1060.0, "deployment")
    assert m.active(UNIT, 1060.0, run_dir) is None
    assert m.active("other.service", 1000.0, run_dir) is None
    assert [path.name for path in run_dir.iterdir()] == ["sglang-kimi.maintenance"]


def test_a_second_mark_replaces_the_first_and_clear_says_whether_there_was_one(tmp_path):
    m.mark(UNIT, 60, "one", tmp_path, 1000.0)
    m.mark(UNIT, 600, "two", tmp_path, 1000.0)
    assert m.active(UNIT, 1100.0, tmp_path) == m.Mark(1600.0, "two")
    assert m.clear(UNIT, tmp_path)
    assert not m.clear(UNIT, tmp_path)
    assert m.active(UNIT, 1100.0, tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"why": "x"}', '{"until": "soon"}', '{"until": null}'])
def test_a_mark_that_cannot_be_read_holds_for_an_hour(tmp_path, text):
    file = m.path(UNIT, tmp_path)
    file.write_text(text)
    os.utime(file, (1000.0, 1000.0))
    held = m.active(UNIT, 1000.0 + m.UNREADABLE_SECONDS - 1, tmp_path)
    assert held is not None
    assert str(file) in held.why
    assert m.active(UNIT, 1000.0 + m.UNREADABLE_SECONDS, tmp_path) is None
