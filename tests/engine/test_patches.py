"""The shipped patches against the real packages: what they promise holds patched, and fails pristine.

The package of the engine's interpreter is read, patched here by the code that patches hosts, and the patched sources are
sent back to be imported instead of the installed ones: nothing installed changes.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gpuserve.sglang.plugins.module_utils import patch_series, rules  # noqa: E402
from interpreter import Interpreter  # noqa: E402

SGLANG = ROOT / "patches" / "sglang" / "0.5.9"
FLASHINFER = ROOT / "patches" / "flashinfer" / "0.6.4"

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


def ask_probes(overlay: Mapping[str, str], flashinfer: str = "") -> Interpreter:
    """The engine's interpreter with some sources laid over the installed ones."""
    program = (Path(__file__).parent / "patch_probes.py").read_text(encoding="utf-8")
    first = {"overlay": dict(overlay), "flashinfer": flashinfer}
    return Interpreter(program, first, SGLANG_USE_CPU_ENGINE="1")


def write(root: Path, sources: Mapping[str, str]) -> None:
    """Lay files out below a folder."""
    for name, text in sources.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The touched files of the installed SGLang, copied."""
    interpreter = ask_probes({})
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
    interpreter = ask_probes({})
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="module")
def patched(patched_sources: dict[str, str]) -> Iterator[Interpreter]:
    """The engine with all patches."""
    interpreter = ask_probes(patched_sources)
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


@pytest.mark.parametrize("state", ["pristine", "applied"])
def test_flashinfer_arch(flashinfer: Path, tmp_path: Path, state: str) -> None:
    series = load(FLASHINFER)
    tree = patch_series.Tree(series, flashinfer)
    assert (tree.state, tree.version) == ("pristine", "0.6.4")
    changes = tree.change(state)
    overlay = {path: text.decode() for path, text in changes.items()}
    interpreter = ask_probes(overlay, str(flashinfer))
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
