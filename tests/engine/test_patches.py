"""The shipped patches against the real packages: what they promise holds patched, and fails pristine.

``GPUSERVE_ENGINE_PYTHON`` names the engine's interpreter, as for the other tests here. Its package is read, patched
here by the code that patches hosts, and the patched sources are sent back to be imported instead of the installed ones:
nothing installed changes. FlashInfer's source comes from ``GPUSERVE_FLASHINFER`` (a folder that holds the package),
from the cache, or from pip. ``GPUSERVE_COMPILE_KERNELS=1`` also compiles its kernels, which takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gpuserve.sglang.plugins.module_utils import patch_series, rules  # noqa: E402

SGLANG = ROOT / "patches" / "sglang" / "0.5.9"
FLASHINFER = ROOT / "patches" / "flashinfer" / "0.6.4"

_BOOT = "import json,sys; exec(compile(json.loads(sys.stdin.readline()), 'probes.py', 'exec'), {'__name__': 'probes'})"

#: Each probe, the patch that it needs, and what the pristine engine makes of it.
PROBES = {
    "kimi_hooks": ("kimi-k25-eagle3", "AttributeError.*set_eagle3_layers_to_capture"),
    "aux_capture": ("eagle3-aux-capture", r"\[1, 29, 57\] before a captured layer are fused"),
    "fusion_fallback": ("fusion-fallback-reduce", "partial sums were not reduced"),
    "fusion_gate": ("sm120-allreduce-fusion", "fusion is not allowed on SM120"),
    "symm_mem_in_place": ("symm-mem-in-place", "was not reduced in place: 1.0"),
    "symm_mem": ("sm120-symm-mem", "KeyError: 12"),
    "symm_mem_two_shot": ("sm120-symm-mem", "two-shot path is closed without multicast"),
    "symm_mem_unknown": ("sm120-symm-mem", "KeyError: 11"),
    "server_args": ("sm120-server-args", "shown as on where no kernel exists"),
    "logprobs": ("logprobs-crash", r"TypeError: cat\(\)"),
    "logprobs_draft": ("logprobs-crash", "IndexError: index 49 is out of bounds"),
    "attribute_first": ("spec-disable-batch-threshold", "a failing __init__ leaves no attribute"),
    "flag": ("spec-disable-batch-threshold", "no attribute 'speculative_disable_batch_threshold'"),
    "threshold": ("spec-disable-batch-threshold", r"ran \['draft', 'verify'\]"),
    "threshold_rules": ("spec-disable-batch-threshold", "4 requests above 3"),
    "threshold_graph": ("spec-disable-batch-threshold", "put on a graph of the verify shape"),
}
#: What must not change: these pass pristine and patched.
UNCHANGED = ("symm_mem_unchanged", "threshold_inert")


def load(folder: Path) -> patch_series.Series:
    """A shipped series."""
    definition = yaml.safe_load((folder / "series.yml").read_text(encoding="utf-8"))
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.patch")}
    return patch_series.load_series(definition, texts)


class Interpreter:
    """The engine's interpreter with some sources laid over the installed ones."""

    def __init__(self, overlay: Mapping[str, str], flashinfer: str = "") -> None:
        environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
        self._process = subprocess.Popen(
            [*shlex.split(os.environ["GPUSERVE_ENGINE_PYTHON"]), "-W", "ignore", "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("GPUSERVE_ENGINE_VERBOSE") else subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._send((Path(__file__).parent / "patch_probes.py").read_text(encoding="utf-8"))
        self._send({"overlay": dict(overlay), "flashinfer": flashinfer})

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def ask(self, do: str, **question: Any) -> dict[str, Any]:
        """Ask one question."""
        assert self._process.stdout is not None
        self._send({"do": do, **question})
        line = self._process.stdout.readline()
        assert line, f"the interpreter ended with status {self._process.wait()}: set GPUSERVE_ENGINE_VERBOSE=1"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the interpreter."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def write(root: Path, sources: Mapping[str, str]) -> None:
    """Lay files out below a folder."""
    for name, text in sources.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The touched files of the installed SGLang, copied."""
    if not os.environ.get("GPUSERVE_ENGINE_PYTHON"):
        pytest.skip("GPUSERVE_ENGINE_PYTHON does not name the engine's interpreter")
    interpreter = Interpreter({})
    found = interpreter.ask("installed", names=[*load(SGLANG).files, "sglang/__init__.py", "sglang/_version.py"])
    interpreter.close()
    root = tmp_path_factory.mktemp("package")
    write(root, found["sources"])
    return root


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def patched_sources(package: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The touched files after the whole series."""
    root = tmp_path_factory.mktemp("patched") / "site-packages"
    shutil.copytree(package, root)
    tree = patch_series.Tree(load(SGLANG), root)
    tree.write(tree.change("applied"))
    return {path: (root / path).read_text(encoding="utf-8") for path in tree.series.files}


@pytest.fixture(scope="module")
def pristine(package: Path) -> Iterator[Interpreter]:
    """The engine as installed."""
    interpreter = Interpreter({})
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="module")
def patched(patched_sources: dict[str, str]) -> Iterator[Interpreter]:
    """The engine with all patches."""
    interpreter = Interpreter(patched_sources)
    yield interpreter
    interpreter.close()


def test_the_installed_package_is_the_known_one(package: Path) -> None:
    tree = patch_series.Tree(load(SGLANG), package)
    assert (tree.state, tree.version, tree.layout) == ("pristine", "0.5.9", "site-packages")


@pytest.mark.parametrize("git", [False, True])
def test_apply_and_reverse(package: Path, tmp_path: Path, git: bool) -> None:
    """Back to identical files, each subset of one patch included."""
    root = tmp_path / "tree"
    shutil.copytree(package, root / "python" if git else root)
    before = contents(root)
    series = load(SGLANG)
    for patches in [None, *[[*patch.requires, patch.id] for patch in series.patches]]:
        tree = patch_series.Tree(series, root)
        assert tree.layout == ("git" if git else "site-packages")
        tree.write(tree.change("applied", patches))
        again = patch_series.Tree(series, root)
        assert {id for id, state in again.states.items() if state == "applied"} == set(patches or series.ids)
        assert not again.change("applied", patches)
        again.write(again.change("pristine"))
        assert contents(root) == before


def test_every_patch_has_its_probe() -> None:
    covered = {patch for patch, _ in PROBES.values()}
    assert covered == set(load(SGLANG).ids)


def test_ids_that_the_planner_asks_for() -> None:
    wanted = {value for name, value in vars(rules).items() if name.startswith("PATCH_")}
    assert wanted and wanted <= set(load(SGLANG).ids)


@pytest.mark.parametrize("probe", [*PROBES, *UNCHANGED])
def test_patched(patched: Interpreter, probe: str) -> None:
    answer = patched.ask(probe)
    assert answer["ok"], answer["where"]


@pytest.mark.parametrize("probe", PROBES)
def test_pristine_fails(pristine: Interpreter, probe: str) -> None:
    """The same question, asked of the engine as installed: it fails for the reason that the patch names."""
    answer = pristine.ask(probe)
    assert not answer["ok"], f"the pristine engine passes {probe}: the probe proves nothing, or the patch is not needed"
    assert re.search(PROBES[probe][1], answer["error"], re.DOTALL), answer["where"]


@pytest.mark.parametrize("probe", UNCHANGED)
def test_pristine_passes(pristine: Interpreter, probe: str) -> None:
    answer = pristine.ask(probe)
    assert answer["ok"], answer["where"]


def test_every_patched_module_was_imported(patched: Interpreter, patched_sources: dict[str, str]) -> None:
    """Otherwise the probes above would have asked the installed files."""
    for probe in PROBES:
        patched.ask(probe)
    expected = {name.removesuffix(".py").replace("/", ".") for name in patched_sources}
    assert set(patched.ask("loaded")["loaded"]) == expected


# --- FlashInfer ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flashinfer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pristine FlashInfer package."""
    if given := os.environ.get("GPUSERVE_FLASHINFER"):
        return Path(given)
    definition = yaml.safe_load((FLASHINFER / "series.yml").read_text(encoding="utf-8"))
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
    assert patch_series.sha256_of(wheel.read_bytes()) == definition["source_sha256"], wheel
    root = tmp_path_factory.mktemp("flashinfer")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root)
    return root


@pytest.mark.parametrize("state", ["pristine", "applied"])
def test_flashinfer_arch(flashinfer: Path, tmp_path: Path, state: str) -> None:
    if not os.environ.get("GPUSERVE_ENGINE_PYTHON"):
        pytest.skip("GPUSERVE_ENGINE_PYTHON does not name the engine's interpreter")
    series = load(FLASHINFER)
    tree = patch_series.Tree(series, flashinfer)
    assert (tree.state, tree.version) == ("pristine", "0.6.4")
    changes = tree.change(state)
    overlay = {path: text.decode() for path, text in changes.items()}
    interpreter = Interpreter(overlay, str(flashinfer))
    try:
        answer = interpreter.ask("flashinfer_arch")
        loaded = interpreter.ask("loaded")["loaded"]
    finally:
        interpreter.close()
    if state == "applied":
        assert answer["ok"], answer["where"]
        assert loaded == ["flashinfer.jit.comm"]
    else:
        assert not answer["ok"]
        assert "RuntimeError: No supported CUDA architectures found for major versions [9, 10]" in answer["error"]


@pytest.mark.parametrize("source", ["trtllm_allreduce_fusion", "trtllm_allreduce", "trtllm_moe_allreduce_fusion"])
def test_flashinfer_compile(flashinfer: Path, tmp_path: Path, source: str) -> None:
    """The kernels compile for what the patched list asks nvcc for on an RTX PRO 6000."""
    if not os.environ.get("GPUSERVE_COMPILE_KERNELS"):
        pytest.skip("GPUSERVE_COMPILE_KERNELS is not set: compiling takes minutes")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    tvm = os.environ.get("GPUSERVE_TVM_FFI")
    if nvcc is None:
        pytest.skip("nvcc is not at hand")
    if tvm is None:
        command = [*shlex.split(os.environ.get("GPUSERVE_ENGINE_PYTHON", sys.executable)), "-c"]
        code = "import importlib.util as u; print(u.find_spec('tvm_ffi').submodule_search_locations[0])"
        found = subprocess.run([*command, code], check=False, capture_output=True, text=True)
        tvm = found.stdout.strip()
        if found.returncode or not Path(tvm).is_dir():
            pytest.skip("the headers of apache-tvm-ffi are not at hand: set GPUSERVE_TVM_FFI to its folder")
    data = flashinfer / "flashinfer" / "data"
    folders = [
        data / "include",
        data / "csrc",
        data / "cutlass" / "include",
        data / "spdlog" / "include",
        Path(tvm) / "include",
    ]
    names = ("FP8_E8M0", "FP4_E2M1", "F16", "BF16", "FP8_E4M3", "FP8_E5M2")
    cubin = tmp_path / "out.cubin"
    done = subprocess.run(
        [
            nvcc,
            "-std=c++17",
            "-O0",
            "--expt-relaxed-constexpr",
            "-w",
            *[f"-DFLASHINFER_ENABLE_{name}" for name in names],
            *[f"-I{folder}" for folder in folders],
            "-gencode=arch=compute_120a,code=sm_120a",
            "-cubin",
            "-o",
            str(cubin),
            str(data / "csrc" / f"{source}.cu"),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert cubin.read_bytes()[:4] == b"\x7fELF"
