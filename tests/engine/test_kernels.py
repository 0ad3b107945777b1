"""FlashInfer's fused all-reduce kernels compile for what the patched list asks nvcc for on an RTX PRO 6000, with a real nvcc.

Where nvcc is not at hand these are skipped. All are compiled two at a time. An outcome is kept in ``.cache/kernels`` under the
checksum of everything that it depends on: compilers, flags, and every file that the preprocessor reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from interpreter import command

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "kernels"

# What flashinfer/jit/comm.py compiles, the longest first, each with the flags that jit/core.py adds.
SOURCES = ("trtllm_moe_allreduce_fusion", "trtllm_allreduce_fusion", "trtllm_allreduce")
NAMES = ("FP8_E8M0", "FP4_E2M1", "F16", "BF16", "FP8_E4M3", "FP8_E5M2")
# Without optimisation: an instruction that an architecture lacks is lacking all the same, and found in half the time.
FLAGS = ["-std=c++17", "-O0", "-Xcicc", "-O0", "-Xptxas", "-O0", "--expt-relaxed-constexpr", "-w"]
FLAGS += [f"-DFLASHINFER_ENABLE_{name}" for name in NAMES]
# Without the "a": what FLASHINFER_CUDA_ARCH_LIST=12.0 would ask for.
JOBS = [*((source, "120a") for source in SOURCES), ("trtllm_allreduce_fusion", "120")]


def say(*arguments: str) -> str:
    """What a tool prints."""
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout


class Compiler:
    """nvcc over one unpacked FlashInfer; the outcome of a compilation is ``{status, said, elf}``."""

    def __init__(self, nvcc: str, package: Path, tvm: Path, work: Path) -> None:
        data = package / "flashinfer" / "data"
        self.nvcc, self.sources, self.work = nvcc, data / "csrc", work
        self.roots = {str(package): "flashinfer", str(tvm): "tvm_ffi"}
        folders = ("include", "csrc", "cutlass/include", "spdlog/include")
        self.includes = [f"-I{data / folder}" for folder in folders] + [f"-I{tvm / 'include'}"]
        self.tools = say(nvcc, "--version") + say("g++", "--version")

    def key(self, command: list[str], target: list[str], source: str) -> str:
        """The checksum of what decides the outcome: every file that is read, under a name that does not move."""
        listed = say(*command, "-M").replace("\\\n", " ").partition(":")[2].split()
        digest = hashlib.sha256(json.dumps([self.tools, FLAGS, target, source]).encode())
        for name in sorted(set(listed)):
            short = name
            for root, word in self.roots.items():
                short = short.replace(root, word)
            digest.update(f"\0{short}\0{hashlib.sha256(Path(name).read_bytes()).hexdigest()}".encode())
        return digest.hexdigest()

    def compile(self, source: str, arch: str) -> dict[str, Any]:
        """Compile, or know how it ended."""
        target = [f"-gencode=arch=compute_{arch},code=sm_{arch}"]
        command = [self.nvcc, *FLAGS, *self.includes, *target, str(self.sources / f"{source}.cu")]
        known = CACHE / f"{self.key(command, target, source)}.json"
        if known.exists():
            found: dict[str, Any] = json.loads(known.read_text())
            return found
        cubin = self.work / f"{source}.{arch}.cubin"
        done = subprocess.run([*command, "-cubin", "-o", str(cubin)], check=False, capture_output=True, text=True)
        elf = cubin.exists() and cubin.read_bytes()[:4] == b"\x7fELF"
        outcome = {"source": source, "arch": arch, "status": done.returncode, "elf": elf, "said": done.stderr[-3000:]}
        # A compiler that was killed, or found no room, says nothing about the source.
        if done.returncode == 0 or " error " in done.stderr:
            CACHE.mkdir(parents=True, exist_ok=True)
            new = known.with_suffix(f".{os.getpid()}.new")
            new.write_text(json.dumps(outcome, indent=1) + "\n")
            new.replace(known)
        return outcome


@pytest.fixture(scope="module")
def jobs(
    flashinfer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Future[dict[str, Any]]]]:
    """All compilations, under way."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None or shutil.which("g++") is None:
        pytest.skip("nvcc or g++ is not at hand")
    tvm = os.environ.get("GPUSERVE_TVM_FFI")
    if tvm is None:
        code = "import importlib.util as u; print(u.find_spec('tvm_ffi').submodule_search_locations[0])"
        tvm = say(*command(), "-c", code).strip()
        if not Path(tvm).is_dir():
            pytest.skip("the headers of apache-tvm-ffi are not on this machine: set GPUSERVE_TVM_FFI to its folder")
    compiler = Compiler(nvcc, flashinfer, Path(tvm), tmp_path_factory.mktemp("cubin"))
    with ThreadPoolExecutor(2) as pool:
        yield {job: pool.submit(compiler.compile, *job) for job in JOBS}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("source", SOURCES)
def test_the_kernels_compile_for_sm_120a(jobs: dict[tuple[str, str], Future[dict[str, Any]]], source: str) -> None:
    outcome = jobs[source, "120a"].result()
    assert outcome["status"] == 0, outcome["said"]
    assert outcome["elf"]


def test_they_do_not_compile_for_plain_sm_120(jobs: dict[tuple[str, str], Future[dict[str, Any]]]) -> None:
    """So the planner refuses FLASHINFER_CUDA_ARCH_LIST=12.0; should this ever compile, that rule can go."""
    outcome = jobs["trtllm_allreduce_fusion", "120"].result()
    assert outcome["status"] != 0 and not outcome["elf"]
    assert "not supported on .target 'sm_120'" in outcome["said"]
