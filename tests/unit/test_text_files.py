"""A folder of text files: what differs is found, each file is replaced whole, and nothing outside is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils.text_files import TextFilesError, apply, compare

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
