"""A folder of text files: what differs is found, each file is replaced whole, and nothing outside is touched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.gpuserve.sglang.plugins.module_utils.text_files import TextFilesError, apply, compare
from ansible_collections.gpuserve.sglang.plugins.modules import text_files as module

FILES = {"a.json": "{}\n", "deep/er/b.py": "x = 'ä'\n"}


def bring(folder: Path, files: dict[str, str], exclusive: bool = True) -> bool:
    difference = compare(folder, files, 0o644, exclusive)
    apply(folder, files, 0o644, 0o755, difference)
    return bool(difference)


def test_second_time_nothing_is_left_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert bring(folder, FILES)
    assert {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()} == FILES
    assert (folder / "deep/er/b.py").stat().st_mode & 0o777 == 0o644
    assert (folder / "deep").stat().st_mode & 0o777 == 0o755
    assert not bring(folder, FILES)


def test_an_edit_and_a_mode_are_put_back_and_shown(tmp_path: Path) -> None:
    bring(tmp_path, FILES)
    (tmp_path / "a.json").write_text("edited\n")
    (tmp_path / "deep/er/b.py").chmod(0o600)
    difference = compare(tmp_path, FILES, 0o644, False)
    assert (difference.write, difference.chmod) == (["a.json"], ["deep/er/b.py"])
    assert difference.before == {"a.json": "edited\n"}
    assert bring(tmp_path, FILES)
    assert not bring(tmp_path, FILES)


def test_only_an_exclusive_folder_loses_other_files(tmp_path: Path) -> None:
    bring(tmp_path, FILES)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "c.py").write_text("")
    assert not bring(tmp_path, FILES, exclusive=False)
    assert bring(tmp_path, FILES, exclusive=True)
    assert not (tmp_path / "old").exists()
    assert (tmp_path / "deep/er/b.py").is_file()


def test_what_python_compiled_is_not_in_the_way(tmp_path: Path) -> None:
    bring(tmp_path, FILES)
    (tmp_path / "deep/er/__pycache__").mkdir()
    (tmp_path / "deep/er/__pycache__/b.cpython-312.pyc").write_bytes(b"")
    assert not bring(tmp_path, FILES, exclusive=True)


def test_what_an_interrupted_run_left_does_not_hinder(tmp_path: Path) -> None:
    (tmp_path / ".a.json.new").write_text("half")
    bring(tmp_path, FILES)
    assert (tmp_path / "a.json").read_text() == "{}\n"
    assert not (tmp_path / ".a.json.new").exists()


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a"])
def test_names_stay_below_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(TextFilesError, match="expected a path below the folder"):
        compare(tmp_path, {name: ""}, 0o644, False)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("keep")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.json").symlink_to(target)
    with pytest.raises(TextFilesError, match="no regular file"):
        compare(folder, FILES, 0o644, False)
    assert target.read_text() == "keep"
    with pytest.raises(TextFilesError, match="is no directory"):
        compare(target, FILES, 0o644, False)


def run(capsys: pytest.CaptureFixture[str], **arguments: Any) -> dict[str, Any]:
    with patch_module_args(arguments), pytest.raises(SystemExit) as ended:
        module.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not ended.value.code, found
    return found


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("given", [{"exclusive": True}, {"own_directory": True}], ids=["exclusive", "own_directory"])
def test_a_folder_that_others_can_write_to_is_found_and_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any]
) -> None:
    folder = tmp_path / "programs"
    bring(folder, FILES)
    folder.chmod(0o777)
    (folder / "deep").chmod(0o775)
    task = {"path": str(folder), "files": FILES, **given}
    wanted = [str(folder), str(folder / "deep")]
    predicted = run(capsys, **task, _ansible_check_mode=True)
    assert (predicted["changed"], predicted["repaired"], predicted["written"]) == (True, wanted, [])
    assert mode_of(folder) == 0o777
    assert run(capsys, **task)["repaired"] == wanted
    assert [mode_of(path) for path in (folder, folder / "deep")] == [0o755, 0o755]
    again = run(capsys, **task)
    assert (again["changed"], again["repaired"]) == (False, [])


def test_a_folder_that_is_not_ours_alone_keeps_its_permissions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bring(tmp_path, FILES)
    tmp_path.chmod(0o775)
    assert not run(capsys, path=str(tmp_path), files=FILES)["changed"]
    assert not run(capsys, path=str(tmp_path), files=FILES, exclusive=True, own_directory=False)["changed"]
    assert mode_of(tmp_path) == 0o775


def test_a_file_that_others_could_write_to_is_another_one_afterwards(tmp_path: Path) -> None:
    """Whoever has it open still must not write to what root runs."""
    bring(tmp_path, FILES)
    (tmp_path / "a.json").chmod(0o666)
    before = (tmp_path / "a.json").stat().st_ino
    with (tmp_path / "a.json").open("a") as held:
        assert compare(tmp_path, FILES, 0o644, True).write == ["a.json"]
        bring(tmp_path, FILES)
        held.write("evil")
    assert (tmp_path / "a.json").stat().st_ino != before
    assert (tmp_path / "a.json").read_text() == FILES["a.json"]
    assert mode_of(tmp_path / "a.json") == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_another_belongs_to_root_afterwards(tmp_path: Path) -> None:
    bring(tmp_path, FILES)
    for name in ("", "deep", "a.json"):
        os.chown(tmp_path / name, 65534, -1)
    difference = compare(tmp_path, FILES, 0o644, True)
    assert (difference.write, difference.repair) == (["a.json"], [str(tmp_path), str(tmp_path / "deep")])
    bring(tmp_path, FILES)
    assert {path.stat().st_uid for path in (tmp_path, *tmp_path.rglob("*"))} == {0}


def test_compiled_files_that_others_can_write_to_go(tmp_path: Path) -> None:
    bring(tmp_path, FILES)
    cache = tmp_path / "deep" / "__pycache__"
    cache.mkdir()
    for name in ("b.pyc", "c.pyc"):
        (cache / name).write_bytes(b"")
    cache.chmod(0o777)
    (cache / "b.pyc").chmod(0o666)
    assert bring(tmp_path, FILES)
    assert [path.name for path in cache.iterdir()] == ["c.pyc"]
    assert mode_of(cache) == 0o755


def test_pythons_own_folder_may_be_narrower(tmp_path: Path) -> None:
    """The unit's gate compiles with the unit's umask: no reason to change anything in each run."""
    bring(tmp_path, FILES)
    cache = tmp_path / "deep" / "__pycache__"
    cache.mkdir(mode=0o700)
    assert not bring(tmp_path, FILES)
    (tmp_path / "deep").chmod(0o700)
    assert bring(tmp_path, FILES)
    assert (mode_of(tmp_path / "deep"), mode_of(cache)) == (0o755, 0o700)


def test_no_folder_of_an_exclusive_one_is_a_link(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    bring(folder, {"a.json": ""})
    (tmp_path / "mine" / "er").mkdir(parents=True)
    (folder / "deep").symlink_to(tmp_path / "mine")
    with pytest.raises(TextFilesError, match="deep is a link, expected a directory or nothing"):
        compare(folder, FILES, 0o644, True)
    assert bring(folder, {"a.json": ""})
    assert not (folder / "deep").is_symlink()
    assert (tmp_path / "mine" / "er").is_dir()
