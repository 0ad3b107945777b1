"""The store of bytecode: what it gives is right for the source, whatever is in it, and it is nobody else's."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import bytecode

SOURCE = "def f():\n    return 1 / 0\n"


def sha256(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "a" / "site-packages"
    write(folder, {"top.py": SOURCE, "pkg/__init__.py": "", "pkg/mod.py": SOURCE, "pkg/template.py": "x = (\n"})
    return folder


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def fill(site: Path, known: dict[str, str] | None = None, processes: int = 2) -> tuple[int, int]:
    found = bytecode.fill(str(site.parent.parent / "store"), str(site), known or {}, processes)
    return found["files"], found["compiled"]


def pyc(site: Path, name: str) -> Path:
    return Path(importlib.util.cache_from_source(str(site / name)))


def shelf(site: Path) -> Path:
    return site.parent.parent / "store" / bytecode.shelf_name()


def run(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """In an interpreter that imports from ``site`` and writes no bytecode."""
    code = f"import sys; sys.path.insert(0, {str(site)!r}); {code}"
    return subprocess.run([sys.executable, "-I", "-B", "-c", code], capture_output=True, text=True, check=False)


def test_everything_that_is_python_is_compiled_once(site: Path) -> None:
    assert fill(site, processes=1) == (4, 4)
    assert pyc(site, "top.py").samefile(pyc(site, "pkg/mod.py")), "one entry for one content"
    assert not pyc(site, "pkg/template.py").exists()
    assert len(list(shelf(site).iterdir())) == 2
    assert fill(site) == (1, 1), "only what is no Python is tried again"


def test_another_release_takes_what_it_knows_without_reading_it(site: Path) -> None:
    fill(site)
    other = site.parent.parent / "b" / "site-packages"
    write(other, {"renamed.py": SOURCE, "new.py": "x = 2\n"})
    assert fill(other, {"renamed.py": sha256(SOURCE), "new.py": sha256("x = 2\n")}) == (2, 1)
    assert pyc(other, "renamed.py").samefile(pyc(site, "top.py"))
    said = run(other, "import renamed; renamed.f()").stderr
    assert f"{other}/renamed.py" in said and str(site) not in said, "the traceback names the file that runs"
    assert run(other, "import renamed; print(renamed.__cached__)").stdout.strip() == str(pyc(other, "renamed.py"))


def test_a_file_that_is_edited_by_hand_takes_effect(site: Path) -> None:
    fill(site)
    before = (site / "top.py").stat()
    (site / "top.py").write_text(SOURCE.replace("1 / 0", "1 / 1"))
    os.utime(site / "top.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run(site, "import top; print(top.f())").stdout == "1.0\n"


def test_a_wrong_checksum_is_harmless(site: Path) -> None:
    """RECORD says one thing, the file is another: Python does not take what was compiled of the other text."""
    fill(site)
    other = site.parent.parent / "b" / "site-packages"
    write(other, {"x.py": "y = 5\n"})
    fill(other, {"x.py": sha256(SOURCE)})
    assert run(other, "import x; print(x.y)").stdout == "5\n"


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_entry_is_compiled_again(site: Path, damage: bytes | None) -> None:
    fill(site)
    (entry,) = [path for path in shelf(site).iterdir() if path.name.startswith(sha256(SOURCE))]
    sound = entry.read_bytes()
    entry.unlink()
    # As a disk does it: everything is as it was but for one byte of the code.
    entry.write_bytes(sound[:-9] + bytes([sound[-9] ^ 1]) + sound[-8:] if damage is None else damage)
    other = site.parent.parent / "b" / "site-packages"
    write(other, {"x.py": SOURCE})
    assert fill(other, {"x.py": sha256(SOURCE)}) == (1, 1)
    assert sha256(pyc(other, "x.py").read_bytes()) in pyc_names(site)
    assert "ZeroDivisionError" in run(other, "import x; x.f()").stderr


def pyc_names(site: Path) -> str:
    return " ".join(path.name for path in shelf(site).iterdir())


@pytest.mark.parametrize("how", ["writable", "link", "file"])
def test_a_store_that_others_could_have_written_is_not_used(site: Path, tmp_path: Path, how: str) -> None:
    fill(site)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if how == "writable":
        shelf(site).chmod(0o777)
    else:
        for path in shelf(site).iterdir():
            path.unlink()
        shelf(site).rmdir()
        if how == "link":
            shelf(site).symlink_to(elsewhere)
        else:
            shelf(site).write_text("")
    other = site.parent.parent / "b" / "site-packages"
    write(other, {"x.py": SOURCE})
    assert fill(other, {"x.py": sha256(SOURCE)}) == (1, 1)
    assert not shelf(site).is_symlink() and shelf(site).stat().st_mode & 0o777 == 0o755
    assert list(elsewhere.iterdir()) == []
    assert pyc(other, "x.py").stat().st_mode & 0o777 == 0o644


def test_where_links_cannot_be_made_files_are_copied(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert fill(site, processes=1) == (4, 4)
    assert pyc(site, "top.py").read_bytes() == pyc(site, "pkg/mod.py").read_bytes()
    assert pyc(site, "top.py").stat().st_nlink == 1
    assert list(pyc(site, "top.py").parent.glob("*.new")) == []


def test_what_no_release_uses_goes(site: Path) -> None:
    store = str(site.parent.parent / "store")
    assert bytecode.prune(store) == 0, "there is none yet"
    fill(site)
    (shelf(site) / "123.new").write_text("the rest of a build that was killed")
    pyc(site, "pkg/__init__.py").unlink()
    assert bytecode.prune(store) == 2
    assert [path.name[:64] for path in shelf(site).iterdir()] == [sha256(SOURCE)]
    for name in ("top.py", "pkg/mod.py"):
        pyc(site, name).unlink()
    assert bytecode.prune(store) == 1
    assert not shelf(site).exists()


def test_a_process_that_fails_is_an_error(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bytecode.py_compile, "compile", full)
    with pytest.raises(SystemExit, match="2 of 2 processes that compile failed"):
        fill(site)


def test_as_a_program(site: Path, tmp_path: Path) -> None:
    """As the builder runs it: without a file of its own."""
    known = tmp_path / "known.json"
    known.write_text("{}")
    source = Path(bytecode.__file__).read_text()
    command = [sys.executable, "-I", "-S", "-c", source, str(tmp_path / "store"), str(site), str(known)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["files"] == 4 and done.stderr == ""
    assert pyc(site, "top.py").exists()
