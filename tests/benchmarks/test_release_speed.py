"""Building a release from a warm cache: uv against pip, in one run, with the engine's real wheels where they are.

A release is built with uv into an empty cache (not counted) and removed. Then, with no other release beside it, the same one
is built with uv and with pip. What both do alike (the virtual environment, the import check) is part of both times.
With uv the files are links to its cache, and their bytecode are links to the store beside the releases; pip unpacks and
compiles, which is nearly all of its time.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gpuserve.sglang.plugins.module_utils.release import ReleaseBuilder  # noqa: E402

WHEELS = ROOT / ".cache" / "sandbox" / "wheels-py{}.{}".format(*sys.version_info[:2])
EXPECTED_RATIO = 5


def _build(root: Path, spec: dict[str, Any], installer: str) -> tuple[float, dict[str, float], dict[str, Any]]:
    """Seconds of the whole build, of its parts, and the manifest."""
    builder = ReleaseBuilder(root, spec, installer=installer, uv_requirement="uv==0.13.9", imports=["sglang"], keep=1)
    parts: dict[str, float] = {}
    run = builder._run

    def timed(command: Any, purpose: str, environment: Any) -> str:
        began = time.monotonic()
        said = run(command, purpose, environment)
        parts[purpose] = parts.get(purpose, 0) + time.monotonic() - began
        return said

    builder._run = timed  # type: ignore[method-assign]
    began = time.monotonic()
    manifest = builder.ensure()
    seconds = time.monotonic() - began
    assert [path.name for path in builder.releases.glob("[0-9a-f]*")] == [builder.id], "no other release beside it"
    shutil.rmtree(builder.path)
    return seconds, parts, manifest


def test_uv_against_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    if not (WHEELS / ".complete").exists():
        pytest.skip(f"{WHEELS} is not complete: sandbox/box engine fills it")
    for name in ("UV_CACHE_DIR", "PIP_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    spec = {
        "python": str(Path(sys.executable).resolve()),
        "steps": [
            {
                "name": "engine",
                "requirements": (ROOT / "sandbox/engine/requirements.txt").read_text().splitlines(),
                "no_deps": True,
            }
        ],
        "find_links": [str(WHEELS)],
        "offline": True,
    }
    _build(tmp_path, spec, "uv")
    uv, uv_parts, by_uv = _build(tmp_path, spec, "uv")
    pip, pip_parts, by_pip = _build(tmp_path, spec, "pip")
    assert {k: v for k, v in by_uv["packages"].items() if k != "uv"} == by_pip["packages"], "the same release"
    ratio = pip / uv
    step = "install the step 'engine'"
    for name, value in (("uv", uv), ("pip", pip), ("ratio", ratio), ("step", pip_parts[step] / uv_parts[step])):
        record_property(f"release_{name}", round(value, 2))
    print(f"release from a warm cache: uv {uv:.1f} s, pip {pip:.1f} s, {ratio:.1f} times faster")
    for parts, name in ((uv_parts, "uv"), (pip_parts, "pip")):
        print(f"  {name}: " + ", ".join(f"{purpose} {seconds:.1f} s" for purpose, seconds in parts.items()))
    assert ratio >= EXPECTED_RATIO
