"""Make `ansible_collections.gpuserve.sglang` importable from the checkout; the programs of the host as a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(ROOT / "collections"))


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs that run on the host, as roles/sglang_service/tasks/programs.yml fills it."""
    role = ROOT / "roles" / "sglang_service"
    variables = yaml.safe_load((role / "vars" / "main.yml").read_text())
    folder = tmp_path_factory.mktemp("gpuserve-sglang")
    package = folder / variables["__sglang_service_package"]
    package.mkdir(parents=True)
    (folder / "__main__.py").write_text((role / "files" / "__main__.py").read_text())
    for name in variables["__sglang_service_modules"]:
        (package / f"{name}.py").write_text((ROOT / "plugins" / "module_utils" / f"{name}.py").read_text())
    return folder
