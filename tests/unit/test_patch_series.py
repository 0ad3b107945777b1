"""module_utils/patch_series.py with real git on small packages, and module and action plugin through a real play."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuserve.sglang.plugins.module_utils import patch_series as ps

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path.parent for path in (ROOT / "patches").glob("*/*/series.yml"))

A = "".join(f"a{number}\n" for number in range(40))
B = "".join(f"b{number}\n" for number in range(40))
PRISTINE = {"pkg/__init__.py": "", "pkg/a.py": A, "pkg/sub/b.py": B}
#: Each patch: the lines that it changes, by file.
EDITS: dict[str, dict[str, dict[str, str]]] = {
    "one": {"pkg/a.py": {"a5": "A5"}},
    "two": {"pkg/a.py": {"a30": "A30\nmore"}, "pkg/sub/b.py": {"b7": "B7"}},
    "three": {"pkg/sub/b.py": {"b33": "B33"}},
}


def edited(text: str, changes: dict[str, str]) -> str:
    return "".join(changes.get(line, line) + "\n" for line in text.splitlines())


def diff(path: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/src/{path}", f"b/src/{path}"
    )
    return f"diff --git a/src/{path} b/src/{path}\n" + "".join(lines)


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checksums = tool("patch_checksums")
porter = tool("port_patches")


def texts() -> dict[str, str]:
    return {
        f"{number}-{id}.patch": f"Subject: {id}\n---\n"
        + "".join(diff(path, PRISTINE[path], edited(PRISTINE[path], change)) for path, change in files.items())
        for number, (id, files) in enumerate(EDITS.items())
    }


def definition(**changes: Any) -> dict[str, Any]:
    return {
        "package": "pkg",
        "distribution": "the-pkg",
        "version": "1.0",
        "strip": 2,
        "layouts": {"git": "src", "source": ".", "site-packages": "."},
        "patches": [
            {
                "id": id,
                "file": f"{number}-{id}.patch",
                "title": f"patch {id}",
                "requires": ["two"] if id == "three" else [],
                "upstream": {"ref": f"x#{number}", "fixed_in": {"one": "1.1", "two": "1.2", "three": None}[id]},
            }
            for number, id in enumerate(EDITS)
        ],
        **changes,
    }


def lay_out(root: Path, layout: str = "site-packages", version: str = "1.0", files: dict[str, str] = PRISTINE) -> Path:
    base = root / "src" if layout == "git" else root
    for name, text in files.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)
    if layout == "site-packages":
        info = base / f"the_pkg-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: the-pkg\nVersion: {version}\n")
    elif layout == "source":
        (base / "PKG-INFO").write_text(f"Name: the-pkg\nVersion: {version}\n")
    else:
        (base / "pkg" / "version.py").write_text(f'__version__ = "{version}"\n')
    return root


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of series.yml with its checksums, from the tool that writes it."""
    root = lay_out(tmp_path_factory.mktemp("pristine"))
    series = ps.load_series(definition(), texts(), checksums=False)
    return {**definition(), "checksums": checksums.compute(series, root)}


@pytest.fixture(scope="module")
def series(complete: dict[str, Any]) -> ps.Series:
    return ps.load_series(complete, texts())


def expected(*ids: str) -> dict[str, str]:
    """What the files hold with these patches, from the edits and without the code under test."""
    return {
        path: edited(text, {k: v for id in ids for k, v in EDITS[id].get(path, {}).items()})
        for path, text in PRISTINE.items()
    }


def holds(root: Path, *ids: str, folder: str = ".") -> bool:
    return all((root / folder / path).read_text() == text for path, text in expected(*ids).items())


def snapshot(root: Path) -> dict[str, Any]:
    """Everything that a run could have touched."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_ino,
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(root.rglob("*"))
    }


def go(series: ps.Series, root: Path, state: str = "applied", patches: Sequence[str] | None = None) -> bool:
    tree = ps.Tree(series, root)
    changes = tree.change(state, patches)
    tree.write(changes)
    return bool(changes)


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ps.LAYOUTS)
def test_apply_and_reverse(series: ps.Series, tmp_path: Path, layout: str) -> None:
    folder = "src" if layout == "git" else "."
    lay_out(tmp_path, layout)
    assert ps.Tree(series, tmp_path).layout == layout
    assert ps.Tree(series, tmp_path).version == "1.0"
    assert ps.Tree(series, tmp_path).state == "pristine"
    assert go(series, tmp_path)
    assert holds(tmp_path, "one", "two", "three", folder=folder)
    assert ps.Tree(series, tmp_path).state == "applied"
    assert not go(series, tmp_path)
    assert go(series, tmp_path, "pristine")
    assert holds(tmp_path, folder=folder)
    assert not go(series, tmp_path, "pristine")


def test_from_every_combination_to_every_other(series: ps.Series, tmp_path: Path) -> None:
    """Three alone is refused, since it requires two; every other way works, and means exactly the named patches."""
    wanted = [ids for n in range(4) for ids in itertools.combinations(EDITS, n) if "three" not in ids or "two" in ids]
    for number, (start, end) in enumerate(itertools.product(wanted, wanted)):
        root = lay_out(tmp_path / str(number), files=expected(*start))
        assert go(series, root, "applied", end) is (start != end)
        assert holds(root, *end), (start, end)


def test_taking_back_only_some(series: ps.Series, tmp_path: Path) -> None:
    lay_out(tmp_path, files=expected("one", "two", "three"))
    go(series, tmp_path, "pristine", ["one"])
    assert holds(tmp_path, "two", "three")
    with pytest.raises(ps.PatchError, match=r"three is wanted without two, expected both"):
        go(series, tmp_path, "pristine", ["two"])
    assert holds(tmp_path, "two", "three")


def test_a_patch_without_the_one_it_requires_is_refused(series: ps.Series, tmp_path: Path) -> None:
    lay_out(tmp_path)
    with pytest.raises(ps.PatchError, match=r"three is wanted without two, expected both"):
        go(series, tmp_path, "applied", ["three"])
    with pytest.raises(ps.PatchError, match=r"no patch four .* expected some of one, two, three"):
        go(series, tmp_path, "applied", ["four"])
    assert holds(tmp_path)


def test_interrupted_run_is_found_and_completed(series: ps.Series, tmp_path: Path) -> None:
    half = {**expected("one"), "pkg/sub/b.py": expected("two")["pkg/sub/b.py"]}
    lay_out(tmp_path, files=half)
    tree = ps.Tree(series, tmp_path)
    assert tree.state == "partly_applied"
    assert tree.states == {"one": "applied", "two": "partly_applied", "three": "pristine"}
    assert not tree.drift
    assert go(series, tmp_path)
    assert holds(tmp_path, "one", "two", "three")


def test_a_subset_is_partly_applied(series: ps.Series, tmp_path: Path) -> None:
    lay_out(tmp_path, files=expected("two"))
    assert ps.Tree(series, tmp_path).state == "partly_applied"


def test_drift_is_named_and_refused_before_anything_is_written(series: ps.Series, tmp_path: Path) -> None:
    lay_out(tmp_path, files={**PRISTINE, "pkg/sub/b.py": B + "edited by hand\n"})
    before = snapshot(tmp_path)
    tree = ps.Tree(series, tmp_path)
    assert tree.state == "drifted"
    assert tree.states == {"one": "pristine", "two": "drifted", "three": "drifted"}
    found = hashlib.sha256((B + "edited by hand\n").encode()).hexdigest()
    known = sorted(
        hashlib.sha256(expected(*ids)["pkg/sub/b.py"].encode()).hexdigest()
        for ids in ((), ("two",), ("three",), ("two", "three"))
    )
    assert tree.drift == [
        {"path": str(tmp_path / "pkg/sub/b.py"), "found": found, "expected": known, "patches": ["two", "three"]}
    ]
    for state in ("applied", "pristine"):
        with pytest.raises(ps.PatchError) as caught:
            go(series, tmp_path, state)
        for part in (
            str(tmp_path / "pkg/sub/b.py"),
            found,
            *known,
            "Nothing was written",
            "install the-pkg==1.0 again",
        ):
            assert part in str(caught.value)
    assert snapshot(tmp_path) == before


def test_a_missing_file_is_drift(series: ps.Series, tmp_path: Path) -> None:
    lay_out(tmp_path)
    (tmp_path / "pkg/a.py").unlink()
    with pytest.raises(ps.PatchError, match=r"a.py: found no file, expected one of"):
        go(series, tmp_path)
    assert (tmp_path / "pkg/sub/b.py").read_text() == B


def test_another_version_is_refused_by_its_name(series: ps.Series, tmp_path: Path) -> None:
    lay_out(tmp_path, version="1.0.post1", files={**PRISTINE, "pkg/a.py": A + "new\n"})
    before = snapshot(tmp_path)
    with pytest.raises(ps.PatchError, match=r"the-pkg 1\.0\.post1 in .*, expected 1\.0: .*port the series"):
        go(series, tmp_path)
    assert snapshot(tmp_path) == before


def test_superseded(tmp_path: Path, complete: dict[str, Any]) -> None:
    """A newer version that carries every patch needs none, and is not touched."""
    data = json.loads(json.dumps(complete))
    data["patches"][2]["upstream"]["fixed_in"] = "1.2"
    series = ps.load_series(data, texts())
    lay_out(tmp_path, version="1.2+cu130", files={**PRISTINE, "pkg/a.py": "new\n", "pkg/sub/b.py": "new\n"})
    before = snapshot(tmp_path)
    tree = ps.Tree(series, tmp_path)
    assert (tree.state, set(tree.states.values()), tree.drift) == ("superseded", {"superseded"}, [])
    assert not go(series, tmp_path)
    assert snapshot(tmp_path) == before


def test_a_newer_version_that_carries_only_some_is_refused(series: ps.Series, tmp_path: Path) -> None:
    lay_out(tmp_path, version="1.2", files={**PRISTINE, "pkg/a.py": "new\n", "pkg/sub/b.py": "new\n"})
    tree = ps.Tree(series, tmp_path)
    assert (tree.state, tree.states) == ("drifted", {"one": "superseded", "two": "superseded", "three": "drifted"})
    with pytest.raises(ps.PatchError, match=r"expected 1.0"):
        go(series, tmp_path)


@pytest.mark.parametrize(
    ("version", "superseded"),
    [
        ("1.1", True),
        ("1.1.post1", True),
        ("1.1+cu130", True),
        ("1.10", True),
        ("1.1rc1", False),
        ("1.0.9", False),
        (None, False),
    ],
)
def test_versions(series: ps.Series, version: str | None, superseded: bool) -> None:
    assert ps.is_superseded(series.patches[0], version) is superseded


# --- where git must not look -----------------------------------------------------------------------------------------


def repository(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "init", "-q", str(root)], check=True)


def test_inside_a_repository_that_ignores_the_package(
    series: ps.Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git apply in a subfolder of a repository skips what is outside it, with status 0: nothing of that may reach "
    "us."""
    repository(tmp_path)
    (tmp_path / ".gitignore").write_text("*\n")
    root = lay_out(tmp_path / "releases" / "x")
    inside = tmp_path / "tmp"
    inside.mkdir()
    # the trap is real: plain git apply says success and changes nothing
    first = next(iter(texts().values()))
    plain = subprocess.run(["git", "apply", "-p2"], input=first, text=True, cwd=inside, check=False)
    assert plain.returncode == 0
    monkeypatch.setattr(ps.tempfile, "tempdir", str(inside))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert go(series, root)
    assert holds(root, "one", "two", "three")
    assert list(inside.iterdir()) == []


def test_a_users_git_configuration_decides_nothing(
    series: ps.Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".gitconfig").write_text("[core]\n autocrlf = true\n[apply]\n whitespace = error\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    root = lay_out(tmp_path / "root")
    assert go(series, root)
    assert holds(root, "one", "two", "three")


def test_a_git_tree_shows_the_change_as_its_own(series: ps.Series, tmp_path: Path) -> None:
    lay_out(tmp_path, "git")
    repository(tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "base"], check=True)
    assert go(series, tmp_path)
    status = subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True, text=True).stdout
    assert status.split() == ["M", "src/pkg/a.py", "M", "src/pkg/sub/b.py"]


def test_no_git(series: ps.Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ps.Tree(series, tmp_path).state == "pristine"
    with pytest.raises(ps.PatchError, match=r"git was not found, expected it in PATH. Install the package git"):
        go(series, tmp_path)
    assert holds(tmp_path)


# --- all or nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failing_rename_leaves_every_file_as_it_was(
    series: ps.Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    lay_out(tmp_path)
    real, count = os.replace, itertools.count(1)

    def replace(source: Any, target: Any) -> None:
        if next(count) == failing:
            raise OSError(28, "No space left on device", str(source), None, str(target))
        real(source, target)

    monkeypatch.setattr(ps.os, "replace", replace)
    with pytest.raises(
        ps.PatchError, match=r"cannot be replaced \(No space left on device\)\. Every file has its old content"
    ):
        go(series, tmp_path)
    assert holds(tmp_path)
    assert ps.Tree(series, tmp_path).state == "pristine"
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_a_full_disk_is_met_before_the_first_rename(
    series: ps.Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path)
    count = itertools.count(1)

    def full(handle: int) -> None:
        if next(count) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(ps.os, "fsync", full)
    before = snapshot(tmp_path)
    with pytest.raises(ps.PatchError, match=r"No space left on device.*Nothing was changed"):
        go(series, tmp_path)
    assert snapshot(tmp_path) == before


def test_no_room_for_the_copies(series: ps.Series, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path)

    def full(self: Any, path: str, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ps.Stage, "put", full)
    with pytest.raises(ps.PatchError, match=r"the copies in .* \(No space left on device\).*Nothing was written"):
        go(series, tmp_path)
    assert holds(tmp_path)


def test_a_series_that_does_not_fit_itself_writes_nothing(complete: dict[str, Any], tmp_path: Path) -> None:
    data = json.loads(json.dumps(complete))
    data["checksums"]["three"]["files"]["pkg/sub/b.py"][1]["resulting"] = "0" * 64
    series = ps.load_series(data, texts())
    lay_out(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(
        ps.PatchError, match=r"b\.py with two, three has sha256 .*, expected 0{64}\. Nothing was written"
    ):
        go(series, tmp_path)
    assert snapshot(tmp_path) == before


def test_files_shared_with_a_cache_stay_what_they_are_there(series: ps.Series, tmp_path: Path) -> None:
    """uv links files from its cache into a virtual environment, hard or symbolic."""
    root = lay_out(tmp_path / "venv")
    cache = tmp_path / "cache"
    cache.mkdir()
    (root / "pkg/a.py").chmod(0o640)
    os.link(root / "pkg/a.py", cache / "a.py")
    shutil.move(root / "pkg/sub/b.py", cache / "b.py")
    (root / "pkg/sub/b.py").symlink_to(cache / "b.py")
    assert go(series, root)
    assert holds(root, "one", "two", "three")
    assert ((cache / "a.py").read_text(), (cache / "b.py").read_text()) == (A, B)
    assert stat.S_IMODE((root / "pkg/a.py").stat().st_mode) == 0o640


def test_looking_writes_nothing(series: ps.Series, tmp_path: Path) -> None:
    """What check mode does: the change and its difference, and an untouched tree."""
    lay_out(tmp_path)
    before = snapshot(tmp_path)
    tree = ps.Tree(series, tmp_path)
    difference = tree.difference(tree.change("applied"))
    assert snapshot(tmp_path) == before
    assert "--- a/pkg/a.py\n+++ b/pkg/a.py\n" in difference
    for line in ("-a5\n+A5\n", "-a30\n+A30\n+more\n", "-b7\n+B7\n", "-b33\n+B33\n"):
        assert line in difference


# --- the series file -------------------------------------------------------------------------------------------------


def refused(data: dict[str, Any], message: str, patch_texts: dict[str, str] | None = None) -> None:
    with pytest.raises(ps.PatchError, match=message):
        ps.load_series(data, texts() if patch_texts is None else patch_texts)


def test_bad_series_are_refused(complete: dict[str, Any]) -> None:
    def changed(*path: Any, value: Any) -> dict[str, Any]:
        data = json.loads(json.dumps(complete))
        place = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return data

    refused(changed("strip", value=0), "strip 0, expected a number from 1")
    refused(changed("package", value="../x"), "expected a plain relative one")
    refused(changed("layouts", value={"git": "."}), "expected git, source, site-packages")
    refused(changed("patches", value=[]), "expected a list")
    refused(changed("patches", 0, "id", value="One"), "expected small letters")
    with pytest.raises(ps.PatchError, match=r"the ids one, one, three are not unique"):
        ps.load_series(changed("patches", 1, "id", value="one"), texts(), checksums=False)
    refused(changed("patches", 0, "requires", value=["two"]), "one requires two, expected earlier patches")
    refused(changed("patches", 0, "file", value="/etc/passwd"), "expected a plain relative one")
    refused(changed("checksums", "one", "patch", value="0" * 64), "has sha256 .*, series.yml expects 0{64}")
    refused(changed("checksums", "two", "files", "pkg/a.py", value=[]), "expected a list")
    two = complete["checksums"]["two"]["files"]["pkg/a.py"]
    refused(changed("checksums", "two", "files", "pkg/a.py", value=two[:1]), "each combination of one, two once")
    refused(complete, "0-one.patch of one is missing", {})


def test_patches_that_do_more_than_change_files_are_refused() -> None:
    head = "diff --git a/src/pkg/a.py b/src/pkg/a.py\n"
    for text, message in (
        (head + "new file mode 100644\n", "new file mode"),
        (head + "deleted file mode 100644\n", "deleted file mode"),
        ("diff --git a/src/pkg/a.py b/src/pkg/b.py\nrename from x\n", "keeps its name"),
        ("diff --git a/src/../../etc/passwd b/src/../../etc/passwd\n", "plain relative"),
        ("diff --git a/x.py b/x.py\n", "at least 2 folders deep"),
    ):
        with pytest.raises(ps.PatchError, match=message):
            ps.patched_files(text, 2)


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_shipped_series(folder: Path) -> None:
    """Loads, names every patch file, and each header says what an operator must know."""
    data = yaml.safe_load((folder / "series.yml").read_text())
    patches = {path.name: path.read_text() for path in folder.glob("*.patch")}
    series = ps.load_series(data, patches)
    assert {patch.file for patch in series.patches} == set(patches)
    assert folder.parts[-2:] == (series.package, series.version)
    for patch in series.patches:
        header = patch.text.split("\ndiff --git ")[0]
        for part in ("Purpose", "Upstream", "Risk", "Tested", "Retire"):
            assert f"\n{part}: " in header, (patch.id, part)


# --- porting ---------------------------------------------------------------------------------------------------------


def test_port(tmp_path: Path, series: ps.Series, capsys: pytest.CaptureFixture[str]) -> None:
    """One upstream's by version, one by content, one that conflicts in its second hunk."""
    data = definition()
    data["patches"][1]["upstream"] = {}
    data["patches"][2]["requires"] = []
    newer = {
        "pkg/__init__.py": "",
        "pkg/a.py": "new head\n" + edited(A, {"a5": "rewritten", "a30": "A30\nmore"}),
        "pkg/sub/b.py": edited(B, {"b7": "B7", "b31": "rewritten"}),
    }
    root = lay_out(tmp_path / "newer", version="1.1", files=newer)
    before = snapshot(root)
    fares = ps.port(ps.load_series(data, texts(), checksums=False), root)
    assert snapshot(root) == before
    assert [(item["id"], item["result"]) for item in fares] == [
        ("one", "superseded"),
        ("two", "superseded"),
        ("three", "conflicts"),
    ]
    assert "since 1.1 (x#0)" in fares[0]["why"]
    assert fares[1]["why"] == "the tree holds the very same change"
    assert fares[2]["conflicts"] == [
        {"path": "pkg/sub/b.py", "hunk": "@@ -31,7 +31,7 @@", "why": "its context is not there"}
    ]
    older = lay_out(tmp_path / "older", version="0.9")
    assert [item["result"] for item in ps.port(series, older)] == ["applies"] * 3
    (older / "pkg/sub/b.py").unlink()
    assert ps.port(series, older)[1]["conflicts"] == [
        {"path": "pkg/sub/b.py", "hunk": "", "why": "the file does not exist"}
    ]


def test_port_meets_what_earlier_patches_leave(tmp_path: Path) -> None:
    """The second patch's context is the first one's change."""
    first, second = edited(A, {"a5": "A5"}), edited(A, {"a5": "A5", "a6": "A6"})
    patches = {"0-one.patch": diff("pkg/a.py", A, first), "1-two.patch": diff("pkg/a.py", first, second)}
    data = definition(patches=definition()["patches"][:2])
    series = ps.load_series(data, patches, checksums=False)
    root = lay_out(tmp_path, version="0.9")
    assert [item["result"] for item in ps.port(series, root)] == ["applies", "applies"]
    (root / "pkg/a.py").write_text(edited(A, {"a4": "rewritten"}))
    assert [item["result"] for item in ps.port(series, root)] == ["conflicts", "conflicts"]


def test_port_tool(tmp_path: Path, complete: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "series"
    folder.mkdir()
    (folder / "series.yml").write_text(yaml.safe_dump(complete))
    for name, text in texts().items():
        (folder / name).write_text(text)
    root = lay_out(tmp_path / "newer", version="1.1", files={**PRISTINE, "pkg/sub/b.py": edited(B, {"b7": "x"})})
    assert porter.main([str(folder), str(root)]) == 1
    said = capsys.readouterr().out
    assert "one: superseded - upstream has it since 1.1 (x#0)" in said
    assert "two: conflicts\n  pkg/sub/b.py @@ -5,7 +5,7 @@: its context is not there" in said
    assert "three: applies" in said
    assert porter.main([str(folder), str(lay_out(tmp_path / "same"))]) == 0
    assert porter.main([str(folder), str(tmp_path / "nothing")]) == 2
    assert "no package pkg" in capsys.readouterr().err


# --- module and action plugin ----------------------------------------------------------------------------------------

PLAY = """
- hosts: localhost
  gather_facts: false
  connection: local
  tasks:
    - gpuserve.sglang.patch_series: &call {series: mine, root: "{{ root }}"}
      check_mode: true
      diff: true
      register: looked
    - gpuserve.sglang.patch_series: *call
      register: applied
    - gpuserve.sglang.patch_series: *call
      register: again
    - gpuserve.sglang.patch_series: {series: mine, root: "{{ root }}", patches: [two]}
      register: subset
    - gpuserve.sglang.patch_series: {series: mine, root: "{{ root }}", state: pristine}
      register: back
    - ansible.builtin.lineinfile: {path: "{{ root }}/pkg/a.py", line: edited by hand}
    - gpuserve.sglang.patch_series: *call
      ignore_errors: true
      register: drifted
    - gpuserve.sglang.patch_series: {series: none/1, root: "{{ root }}"}
      ignore_errors: true
      register: unknown
    - ansible.builtin.copy:
        dest: "{{ out }}"
        content: >-
          {{ {'looked': looked, 'applied': applied, 'again': again, 'subset': subset, 'back': back, 'drifted': drifted,
              'unknown': unknown} | to_json }}
"""


def test_module_in_a_play(tmp_path: Path, complete: dict[str, Any]) -> None:
    """A site's own series beside its playbook; check mode, difference, idempotence, subset, reverse, drift."""
    folder = tmp_path / "patches" / "mine"
    folder.mkdir(parents=True)
    (folder / "series.yml").write_text(yaml.safe_dump(complete))
    for name, text in texts().items():
        (folder / name).write_text(text)
    (tmp_path / "play.yml").write_text(PLAY)
    root, out = lay_out(tmp_path / "root"), tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", "-e", f"root={root} out={out}", "play.yml"],
        cwd=tmp_path,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(out.read_text())
    keys = {
        "state",
        "root",
        "layout",
        "distribution",
        "version",
        "expected_version",
        "patches",
        "applied",
        "files",
        "drift",
    }
    for name in ("looked", "applied", "again", "subset", "back", "drifted"):
        assert keys <= set(seen[name]), name
    assert [seen[name]["changed"] for name in ("looked", "applied", "again", "subset", "back")] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert [seen[name]["state"] for name in ("looked", "applied", "again", "subset", "back")] == [
        "pristine",
        "pristine",
        "applied",
        "applied",
        "partly_applied",
    ]
    # the second run found it pristine, so the one in check mode had written nothing, but had foreseen the same
    assert "+A5" in seen["looked"]["diff"]["prepared"]
    assert seen["looked"]["files"] == seen["applied"]["files"]
    assert seen["applied"]["applied"] == ["one", "two", "three"]
    assert seen["subset"]["applied"] == ["two"]
    assert seen["subset"]["files"]["pkg/sub/b.py"] == {
        "sha256": hashlib.sha256(expected("two")["pkg/sub/b.py"].encode()).hexdigest(),
        "patches": ["two"],
    }
    assert seen["back"]["applied"] == []
    assert seen["drifted"]["failed"] and seen["drifted"]["state"] == "drifted" and not seen["drifted"]["changed"]
    assert [item["path"] for item in seen["drifted"]["drift"]] == [str(root / "pkg/a.py")]
    assert "Nothing was written" in seen["drifted"]["msg"]
    assert "there is no patch series 'none/1'" in seen["unknown"]["msg"] and "sglang/0.5.9" in seen["unknown"]["msg"]
