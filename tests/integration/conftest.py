"""A box of its own for each process of pytest, and the last play of a test that failed in its report."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from box_helpers import ROOT, UNIT, Box, Run, ansible, as_json

__all__ = ["ROOT", "UNIT", "Box", "Run", "ansible", "as_json"]


def _name(session: pytest.Session) -> str:
    """tests/run names the box; by hand it is named after the one file that is run."""
    if name := os.environ.get("GPUSERVE_TEST_BOX"):
        return name
    files = {item.path.stem for item in session.items}
    stem = files.pop().removeprefix("test_") if len(files) == 1 else "integration"
    return f"gpuserve-{stem.replace('_', '-')}"


@pytest.fixture(scope="session")
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A fresh box: nothing of the collection has touched it yet. KEEP_BOX=1 leaves it, REUSE_BOX=1 takes it as it is."""
    box = Box(_name(request.session), tmp_path_factory.mktemp("integration"))
    if not os.environ.get("REUSE_BOX"):
        box.down()
    box.up()
    yield box
    if not os.environ.get("KEEP_BOX") and not os.environ.get("REUSE_BOX"):
        box.down()


@pytest.fixture(scope="session")
def serving_box(box: Box) -> Box:
    """The box with the sandbox's deployment on it, serving."""
    box.serve()
    return box


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: pytest.CallInfo[None]):
    """What the test's last play did is part of the report of a failed test."""
    report = yield
    box = item.funcargs.get("box") or item.funcargs.get("serving_box") if hasattr(item, "funcargs") else None
    if report.failed and isinstance(box, Box) and box.runs:
        report.sections.append(("last play on the box", box.runs[-1].report))
    return report
