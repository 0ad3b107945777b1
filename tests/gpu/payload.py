# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Build one archive with all that tests/gpu/proof.py needs on a GPU machine where nothing can be downloaded.

    make gpu-payload                      tests/output/gpu-payload.tar.xz
    python tests/gpu/payload.py --wheels FOLDER --out FILE

Downloads the wheels of tests/gpu/payload.txt (pip's own configuration; about 1.5 GB, most of it kernels of other GPUs), takes out
what a small model on a Hopper GPU does not load, and packs the rest. On the machine:

    tar xf gpu-payload.tar.xz -C /tmp
    PYTHONPATH=/tmp/gpu-payload python3 tests/gpu/proof.py --env PYTHONPATH=/tmp/gpu-payload

Every dist-info stays: the engine checks versions when it starts. Exit status 1: the archive would be larger than the limit.
"""

from __future__ import annotations

import argparse
import fnmatch
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_MIB = 64
#: wheel: what is taken out of it. Patterns match whole paths inside the wheel.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "sglang_kernel": (
        "sgl_kernel/flash_ops.abi3.so",
        "sgl_kernel/flashmla_ops*",
        "sgl_kernel/sm100/*",
        "sgl_kernel/deep_gemm*",
        "deep_gemm/*",
        "*mscclpp*",
        "*triton_kernels/*",
    ),
    "flashinfer_python": ("flashinfer/data/cutlass/test/*",),
    "sglang": ("sglang/test/*", "sglang/*/test/*"),
    # Not */test/*: plug-ins of Ansible lie in such a folder.
    "*": ("*/tests/*", "*.pyi", "*/__pycache__/*", "*.dist-info/RECORD.jws"),
}
#: Modules that are imported at start but not used by a small model: importable and empty.
SHIMS = {
    "IPython": "",
    "IPython.display": "def HTML(*words, **options):\n    raise RuntimeError('IPython is a shim here')\n\n\ndisplay = HTML\n",
    "soundfile": "",
    "datasets": "class Dataset:\n    pass\n\n\ndef load_dataset(*words, **options):\n    raise RuntimeError('datasets is a shim here')\n",
}
PLATFORMS = (
    "manylinux_2_39_x86_64", "manylinux_2_35_x86_64", "manylinux_2_34_x86_64", "manylinux_2_31_x86_64", "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64",
)  # fmt: skip


class PayloadError(Exception):
    """What was found, what was expected, what to do."""


def wanted(name: str, wheel: str) -> bool:
    """Whether the member C(name) of a wheel (by its distribution's name) goes into the payload."""
    return not any(
        fnmatch.fnmatchcase(name, pattern)
        for distribution in (wheel, "*")
        for pattern in LEFT_OUT.get(distribution, ())
    )


def unpack(wheel: Path, folder: Path) -> int:
    """Put what is wanted of C(wheel) into C(folder), as an installer would. Bytes written."""
    distribution = wheel.name.partition("-")[0]
    size = 0
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename
            # purelib and platlib are installed where everything else is; scripts and headers are not needed.
            parts = name.split("/")
            if parts[0].endswith(".data"):
                if len(parts) < 3 or parts[1] not in ("purelib", "platlib"):
                    continue
                name = "/".join(parts[2:])
            if member.is_dir() or not wanted(name, distribution):
                continue
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise PayloadError(
                    f"{wheel.name}: found the path {name}, expected one inside the wheel. Do not use this file."
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))
            size += member.file_size
    return size


def add_shims(folder: Path) -> None:
    for name, text in SHIMS.items():
        target = folder / name.replace(".", "/") / "__init__.py"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(f'"""Not needed here: an importable stand-in."""\n{text}')


def pack(folder: Path, out: Path, limit_mib: float = LIMIT_MIB) -> int:
    """One compressed archive; its bytes. Raises PayloadError when it is larger than the limit."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w:xz", preset=6) as archive:
        archive.add(folder, arcname="gpu-payload")
    size = out.stat().st_size
    if size > limit_mib * 1024 * 1024:
        raise PayloadError(
            f"{out}: found {size / 1024 / 1024:.1f} MiB, expected {limit_mib:g} at most. Take more out in LEFT_OUT; the largest files:\n  "
            + "\n  ".join(f"{path.stat().st_size / 1e6:8.1f} MB {path.relative_to(folder)}" for path in largest(folder))
        )
    return size


def largest(folder: Path, count: int = 10) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: -path.stat().st_size)[:count]


def requirements(text: str) -> list[str]:
    return [line for line in (line.partition("#")[0].strip() for line in text.splitlines()) if line]


def download(lines: Iterable[str], wheels: Path) -> None:
    wheels.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform={name}" for name in PLATFORMS]
    words = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    words += ["--python-version=3.12", "--implementation=cp", *platforms, f"--dest={wheels}", *lines]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PayloadError(f"pip download ended with status {done.returncode}: {done.stderr.strip()[-1500:]}")


def build(wheels: Path, out: Path, limit_mib: float = LIMIT_MIB) -> int:
    with tempfile.TemporaryDirectory(prefix="gpu-payload-") as work:
        folder = Path(work) / "gpu-payload"
        folder.mkdir()
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, folder)
        add_shims(folder)
        return pack(folder, out, limit_mib)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = HERE.parents[1]
    parser.add_argument("--out", type=Path, default=root / "tests" / "output" / "gpu-payload.tar.xz")
    parser.add_argument("--wheels", type=Path, default=root / ".cache" / "gpu-payload", help="kept between runs")
    parser.add_argument("--no-download", action="store_true", help="take the wheels that are there")
    given = parser.parse_args(words)
    try:
        if not given.no_download:
            download(requirements((HERE / "payload.txt").read_text(encoding="utf-8")), given.wheels)
        size = build(given.wheels, given.out)
    except PayloadError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{given.out}: {size / 1024 / 1024:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
