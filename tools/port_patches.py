#!/usr/bin/env python3
# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Say how each patch of a series fares on another version of its package.

    tools/port_patches.py [--json] SERIES TARGET

SERIES is a folder such as patches/sglang/0.5.9. TARGET is a git tree, an unpacked source, site-packages, a wheel, or a
version that pip fetches (such as 0.5.11). Nothing is changed. Each patch ``applies``, is ``superseded`` (with the
reason), or ``conflicts`` (with file and hunk). A patch that applies was tried with the earlier ones in place.
Exit status: 0 no conflict, 1 conflicts, 2 something is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gpuserve.sglang.plugins.module_utils.patch_series import (  # noqa: E402
    PatchError,
    load_series,
    port,
)


def fetched(requirement: str, folder: Path) -> Path:
    """The wheel of a version, by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        raise PatchError(f"pip could not fetch {requirement}, expected its wheel. Give a folder or a wheel instead.")
    return next(folder.glob("*.whl"))


def unpacked(target: str, distribution: str, folder: Path) -> Path:
    """The folder that TARGET means."""
    path = Path(target)
    if re.fullmatch(r"\d[\w.]*", target) and not path.exists():
        path = fetched(f"{distribution}=={target}", folder)
    if path.suffix != ".whl":
        return path
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(folder / "tree")
    return folder / "tree"


def shown(fares: Sequence[dict[str, Any]]) -> str:
    """The outcome as text."""
    lines = []
    for fare in fares:
        lines.append(f"{fare['id']}: {fare['result']}" + (f" - {fare['why']}" if fare["why"] else ""))
        for conflict in fare["conflicts"]:
            lines.append(f"  {conflict['path']} {conflict['hunk']}".rstrip() + f": {conflict['why']}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("series", type=Path)
    parser.add_argument("target")
    options = parser.parse_args(arguments)
    try:
        data = yaml.safe_load((options.series / "series.yml").read_text(encoding="utf-8"))
        texts = {path.name: path.read_text(encoding="utf-8") for path in options.series.glob("*.patch")}
        series = load_series(data, texts, checksums=False)
        with tempfile.TemporaryDirectory(prefix="port-patches-") as folder:
            fares = port(series, unpacked(options.target, series.distribution, Path(folder)))
    except (PatchError, OSError, yaml.YAMLError, zipfile.BadZipFile) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(fares, indent=2) if options.json else shown(fares))
    return int(any(fare["result"] == "conflicts" for fare in fares))


if __name__ == "__main__":
    sys.exit(main())
