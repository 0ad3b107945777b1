"""The engine's own interpreter, and FlashInfer's package, as fixtures."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))
sys.path.insert(0, str(ROOT / "tests" / "unit"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from ansible_collections.gpuserve.sglang.plugins.module_utils.patch_series import sha256_of  # noqa: E402
from interpreter import Interpreter  # noqa: E402


@pytest.fixture(scope="session")
def engine() -> Iterator[Interpreter]:
    """The engine's parser and its ServerArgs, started once."""
    source = (ROOT / "tools" / "dump_flag_schema.py").read_text(encoding="utf-8")
    # __file__ has no meaning over standard input
    source = source.replace("pathlib.Path(__file__)", "pathlib.Path('/nowhere/tools/dump_flag_schema.py')")
    running = Interpreter(source + (Path(__file__).parent / "worker.py").read_text(encoding="utf-8"))
    yield running
    running.close()


@pytest.fixture(scope="session")
def flashinfer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pristine FlashInfer package: ``GPUSERVE_FLASHINFER``, from the cache, or from pip."""
    if given := os.environ.get("GPUSERVE_FLASHINFER"):
        return Path(given)
    definition = yaml.safe_load((ROOT / "patches/flashinfer/0.6.4/series.yml").read_text(encoding="utf-8"))
    cache = ROOT / ".cache" / "flashinfer"
    wheel = cache / definition["source"]
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache)]
        done = subprocess.run(
            [*command, f"{definition['distribution']}=={definition['version']}"],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode or not wheel.is_file():
            pytest.skip(f"FlashInfer {definition['version']} cannot be fetched: {done.stderr.strip()[-200:]}")
    assert sha256_of(wheel.read_bytes()) == definition["source_sha256"], wheel
    root = tmp_path_factory.mktemp("flashinfer")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root)
    return root
