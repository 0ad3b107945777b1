"""tests/run itself: groups, counts, a part that hangs, a part that fails."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

RUN = Path(__file__).resolve().parents[1] / "run"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("parts_of_the_tests", str(RUN))
    spec = importlib.util.spec_from_loader("parts_of_the_tests", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclass looks the module up; no compiled file beside the script.
    monkeypatch.setitem(sys.modules, "parts_of_the_tests", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    monkeypatch.setattr(module, "OUTPUT", tmp_path)
    return module


def test_the_default_leaves_out_what_is_slow(run: ModuleType) -> None:
    known = [
        "lint",
        "molecule/faults",
        "molecule/default",
        "integration/test_site",
        "integration/test_switch",
        "benchmarks",
    ]
    assert run.chosen([], known) == ["integration/test_site", "molecule/default", "lint"]
    assert set(run.chosen(["slow"], known)) == {"molecule/faults", "integration/test_switch"}
    assert set(run.chosen(["all"], known)) == set(known)
    assert run.chosen(["molecule"], known) == ["molecule/default"]
    assert run.chosen(["tests/integration/test_switch.py", "integration/test_switch"], known) == [
        "integration/test_switch"
    ]
    with pytest.raises(SystemExit, match="no part 'nothing'; expected one of"):
        run.chosen(["nothing"], known)


def test_every_test_belongs_to_a_part(run: ModuleType) -> None:
    parts = run.all_parts()
    root = RUN.parents[1]
    assert {f"integration/{path.stem}" for path in root.glob("tests/integration/test_*.py")} <= set(parts)
    assert {f"molecule/{path.parent.name}" for path in root.glob("molecule/*/molecule.yml")} <= set(parts)
    assert {"lint", "unit", "sanity", "engine", "benchmarks"} <= set(parts)


def test_counts_are_those_of_pytest(run: ModuleType) -> None:
    log = "x\n=== 1 failed, 12 passed, 2 warnings, 3 errors in 4.02s ===\nok\n7 passed in 3.10s\n2 passed in 64.1s (0:01:04)\n"
    assert run.counts(log, ok=False) == (21, 4)
    assert run.counts("no tests here", ok=True) == (1, 0)
    assert run.counts("no tests here", ok=False) == (0, 1)


def test_a_part_that_hangs_is_ended_with_all_its_children_and_the_others_run(
    run: ModuleType, tmp_path: Path, capsys
) -> None:
    # A child with a session of its own, as plays have them.
    hang = f"setsid sleep 300 & echo $! >{tmp_path}/pid; echo begun; wait"
    parts = {
        "a/hangs": hang,
        "fails": "for i in $(seq 400); do echo line $i; done; exit 3",
        "works": "echo '2 passed in 1.00s'",
    }
    lanes = run.Lanes(parts, 2, timeout=3.0)
    began = time.monotonic()
    results = {result.name: result for result in lanes.run(list(parts))}
    assert time.monotonic() - began < 60
    assert {name: result.ok for name, result in results.items()} == {"a/hangs": False, "fails": False, "works": True}
    assert results["works"].passed == 2
    said = capsys.readouterr().out
    assert re.search(r"^== a/hangs: \d+ s, FAILED \(stopped after 3 s\)", said, re.MULTILINE)
    assert "fails | line 400" in said
    assert "fails | line 200\n" not in said
    assert "FAILED (exit status 3)" in said
    stat = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    # Where nobody collects orphans, a zombie stays.
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
    assert (tmp_path / "a-hangs.log").read_text().startswith("begun\n")


def test_only_parts_with_boxes_are_run_again_and_said_to_be_unsteady(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    at_second = f"test -e {tmp_path}/tried || {{ touch {tmp_path}/tried; echo first words; exit 1; }}"
    parts = {"molecule/shaky": at_second, "integration/test_broken": "exit 1", "unit": "exit 1", "lint": "true"}
    monkeypatch.setattr(run, "all_parts", lambda: parts)
    monkeypatch.setattr(run.signal, "signal", lambda *__: None)
    monkeypatch.setattr(sys, "argv", ["run", *parts])
    monkeypatch.setenv("RETRIES", "1")
    assert run.main() == 1
    said = capsys.readouterr().out
    assert re.search(
        r"^== 4 parts in \d+ s; failed: (unit, integration/test_broken|integration/test_broken, unit)$", said, re.M
    )
    assert "== UNSTEADY, failed at first and passed when run again: molecule/shaky;" in said
    assert (tmp_path / "molecule-shaky.first.log").read_text() == "first words\n"
    assert said.count("== unit: ") == 1
    (tmp_path / "tried").unlink()
    monkeypatch.setenv("RETRIES", "0")
    monkeypatch.setattr(sys, "argv", ["run", "molecule/shaky"])
    assert run.main() == 1
