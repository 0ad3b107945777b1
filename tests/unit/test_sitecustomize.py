"""module_utils/sitecustomize.py against real interpreters: virtual environments, and PYTHONPATH folders."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import sitecustomize as sc

WANTED = {"NCCL_ALGO": "Ring", "NCCL_NTHREADS": 512}
APPORT = b"""# install the apport exception handler if available
try:
    import apport_python_hook
except ImportError:
    pass
else:
    apport_python_hook.install()
"""


class Box:
    """A folder that the interpreter searches first, as Debian's standard library folder with its link into /etc."""

    def __init__(self, root: Path) -> None:
        self.lib = root / "lib"
        self.etc = root / "etc"
        self.lib.mkdir()
        self.etc.mkdir()
        self.link = self.lib / "sitecustomize.py"
        self.file = self.etc / "sitecustomize.py"

    def put(self, content: bytes) -> None:
        self.file.write_bytes(content)
        if not self.link.is_symlink():
            self.link.symlink_to("../etc/sitecustomize.py")

    def apply(self, variables: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        extra = {"PYTHONPATH": str(self.lib)}
        return sc.apply(sys.executable, WANTED if variables is None else variables, extra_environment=extra, **options)

    def environment(self, **more: str) -> dict[str, str]:
        """What a plainly started interpreter says, without the code under test."""
        code = "import os\nfor n, v in os.environ.items():\n    print(n + '=' + v)"
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self.lib), "PYTHONDONTWRITEBYTECODE": "1", **more}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)

    def snapshot(self) -> dict[str, tuple[Any, ...]]:
        """Everything a run could have touched."""
        seen: dict[str, tuple[Any, ...]] = {}
        for path in sorted([*self.lib.rglob("*"), *self.etc.rglob("*")]):
            info = path.lstat()
            body = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
            seen[str(path)] = (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, info.st_ino, body)
        return seen


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


@pytest.fixture(scope="session")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment without packages."""
    root = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    return root


def test_apport_hook_is_kept_and_the_environment_is_set(box: Box) -> None:
    box.put(APPORT)
    result = box.apply()
    assert result["changed"] is True
    assert result["path"] == str(box.link)
    assert result["real_path"] == str(box.file)
    assert result["environment"] == {"NCCL_ALGO": "Ring", "NCCL_NTHREADS": "512"}
    assert (result["created"], result["removed"], result["warnings"]) == (False, False, [])
    content = box.file.read_bytes()
    assert content.startswith(APPORT + b"# BEGIN gpuserve.sglang environment")
    assert content == result["diff"]["after"].encode()
    assert result["diff"]["before"].encode() == APPORT
    assert content == APPORT + result["block"].encode()
    assert box.environment()["NCCL_NTHREADS"] == "512"


def test_apport_hook_still_runs(box: Box) -> None:
    box.put(APPORT)
    (box.lib / "apport_python_hook.py").write_text("import os\ndef install():\n    os.environ['HOOK'] = 'ran'\n")
    box.apply()
    assert box.environment()["HOOK"] == "ran"


def test_what_is_set_already_wins(box: Box) -> None:
    box.put(APPORT)
    box.apply()
    assert box.environment(NCCL_ALGO="Tree")["NCCL_ALGO"] == "Tree"
    assert box.environment(NCCL_ALGO="Tree")["NCCL_NTHREADS"] == "512"


def test_the_environment_of_this_process_does_not_bend_the_answer(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.put(APPORT)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    assert box.apply()["environment"] == {"NCCL_ALGO": "Ring", "NCCL_NTHREADS": "512"}


def test_second_run_touches_nothing(box: Box) -> None:
    box.put(APPORT)
    box.apply()
    before = box.snapshot()
    result = box.apply()
    assert result["changed"] is False
    assert result["diff"]["before"] == result["diff"]["after"]
    assert result["environment"] == {"NCCL_ALGO": "Ring", "NCCL_NTHREADS": "512"}
    assert box.snapshot() == before


@pytest.mark.parametrize("content", [None, APPORT])
@pytest.mark.parametrize("state", ["present", "absent"])
def test_check_mode_writes_nothing_and_predicts(box: Box, content: bytes | None, state: str) -> None:
    if content is None:
        (box.lib / "sitecustomize.py").write_bytes(b"")
    else:
        box.put(content)
    if state == "absent":
        box.apply()
    before = box.snapshot()
    predicted = box.apply(state=state, check=True)
    assert box.snapshot() == before
    real = box.apply(state=state)
    assert predicted == real
    assert real["changed"] is True
    assert real["environment"] == ({"NCCL_ALGO": "Ring", "NCCL_NTHREADS": "512"} if state == "present" else {})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"x = 1",
        b"x = 1\n",
        b"x = 1\r\ny = 2\r\n",
        b"# -*- coding: latin-1 -*-\nx = '\xe4'",
        APPORT + b"\n\n",
    ],
)
def test_absent_restores_byte_for_byte(box: Box, content: bytes) -> None:
    box.put(content)
    assert box.apply()["changed"] is True
    assert box.environment()["NCCL_ALGO"] == "Ring"
    assert box.apply({"NCCL_ALGO": "Tree"})["changed"] is True
    result = box.apply(state="absent")
    assert result["changed"] is True
    assert result["removed"] is False
    assert box.file.read_bytes() == content
    assert "NCCL_ALGO" not in box.environment()
    assert box.apply(state="absent")["changed"] is False


def test_link_owner_and_mode_are_kept(box: Box) -> None:
    box.put(APPORT)
    box.file.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(box.file, 12, 34)
    before = box.file.stat()
    for state in ("present", "absent"):
        box.apply(state=state)
        after = box.file.stat()
        assert os.readlink(box.link) == "../etc/sitecustomize.py"
        assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert sorted(os.listdir(box.etc)) == ["sitecustomize.py"]


def test_changed_value_replaces_the_block_and_keeps_hand_edits_around_it(box: Box) -> None:
    box.put(b"first = 1\n")
    box.apply()
    box.put(box.file.read_bytes() + b"last = 1\n")
    result = box.apply({"NCCL_ALGO": "Tree"})
    assert result["changed"] is True
    content = box.file.read_bytes()
    assert content.startswith(b"first = 1\n# BEGIN")
    assert content.endswith(b"# END gpuserve.sglang environment\nlast = 1\n")
    assert content.count(b"BEGIN gpuserve") == 1
    assert b"NCCL_NTHREADS" not in content
    box.apply(state="absent")
    assert box.file.read_bytes() == b"first = 1\nlast = 1\n"


def test_no_variables_is_absent(box: Box) -> None:
    box.put(APPORT)
    box.apply()
    result = box.apply({})
    assert (result["changed"], result["block"]) == (True, "")
    assert box.file.read_bytes() == APPORT


def test_a_stale_compiled_copy_is_not_believed(box: Box) -> None:
    """16 and 32 make files of one size; a .pyc is compared by size and whole seconds."""
    box.put(APPORT)
    box.apply({"NCCL_MAX_NCHANNELS": 16})
    os.utime(box.file, (1_000_000_000, 1_000_000_000))
    assert box.environment(PYTHONDONTWRITEBYTECODE="")["NCCL_MAX_NCHANNELS"] == "16"
    assert list((box.lib / "__pycache__").glob("sitecustomize.*.pyc"))
    box.apply({"NCCL_MAX_NCHANNELS": 32})
    os.utime(box.file, (1_000_000_000, 1_000_000_000))
    assert box.environment()["NCCL_MAX_NCHANNELS"] == "32"


# --- refusals ----------------------------------------------------------------------------------------------------------


def refused(box: Box, *texts: str, variables: dict[str, Any] | None = None) -> None:
    """Refused with these texts, in check mode too, and nothing touched."""
    before = box.snapshot()
    for check in (True, False):
        with pytest.raises(sc.SitecustomizeError) as caught:
            box.apply(variables, check=check)
        for text in texts:
            assert text in str(caught.value)
        assert box.snapshot() == before


def test_broken_syntax_is_refused(box: Box) -> None:
    box.put(APPORT + b"def broken(:\n")
    refused(box, str(box.link), "SyntaxError", "line 8", "expected valid Python", "repair it")


def test_a_file_that_raises_is_refused(box: Box) -> None:
    box.put(b"import os\nraise RuntimeError('by hand')\n")
    refused(box, "RuntimeError: by hand (line 2)", "expected it to run to its end")


def test_a_file_that_exits_is_refused(box: Box) -> None:
    """sitecustomize that raises SystemExit keeps the interpreter from starting at all."""
    box.put(b"raise SystemExit(3)\n")
    refused(box, "SystemExit: 3 (line 1)")


def test_a_hanging_file_is_refused(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sc, "TIMEOUT", 1)
    box.put(b"import time\ntime.sleep(60)\n")
    refused(box, "did not answer within 1 s", "hanging")


@pytest.mark.parametrize("content", [sc.BEGIN + b"\n", sc.END + b"\n", sc.END + b"\n" + sc.BEGIN + b"\n"])
def test_unpaired_markers_are_refused(box: Box, content: bytes) -> None:
    box.put(content)
    refused(box, "expected one pair", "by hand")


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"NCCL-ALGO": "x"}, "'NCCL-ALGO', expected letters"),
        ({"A": True}, "variables.A is True (bool), expected text or a number"),
        ({"A": None}, "variables.A is None"),
        ({"A": ["x"]}, "variables.A is ['x'] (list)"),
        ({"A": "x\ny"}, "expected one line"),
    ],
)
def test_bad_variables_are_refused(box: Box, variables: dict[str, Any], text: str) -> None:
    box.put(APPORT)
    refused(box, text, variables=variables)


def test_values_are_quoted(box: Box) -> None:
    box.put(APPORT)
    value = "a'b\"c\\d $HOME é"
    assert box.apply({"X": value})["environment"] == {"X": value}
    assert box.environment(PYTHONIOENCODING="utf-8", LC_ALL="C.UTF-8")["X"] == value


def test_old_content_is_put_back_when_the_interpreter_says_otherwise(box: Box) -> None:
    """The hand-written part behaves differently when the file is really imported."""
    content = b"import sys\nif 'sitecustomize' in sys.modules:\n    raise RuntimeError\n"
    box.put(content)
    with pytest.raises(sc.SitecustomizeError, match=r"imports no sitecustomize at all.*put back"):
        box.apply()
    assert box.file.read_bytes() == content


def test_unwritable_place(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.put(APPORT)

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(sc.SitecustomizeError, match=r"cannot be written .Read-only file system., expected a writable"):
        box.apply()
    assert sorted(os.listdir(box.etc)) == ["sitecustomize.py"]
    assert box.file.read_bytes() == APPORT


def test_absent_works_on_a_file_that_someone_broke(box: Box) -> None:
    box.put(APPORT)
    box.apply()
    box.put(box.file.read_bytes() + b"def broken(:\n")
    result = box.apply(state="absent")
    assert box.file.read_bytes() == APPORT + b"def broken(:\n"
    assert any("SyntaxError" in warning for warning in result["warnings"])


# --- hand-written values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "number"),
    [
        (b"os.environ.setdefault('NCCL_ALGO', 'Tree')", 3),
        (b"os.environ['NCCL_ALGO'] = 'Tree'", 3),
        (b"os.environ.update(NCCL_ALGO='Tree')", 0),
    ],
)
def test_another_value_by_hand_is_reported(box: Box, line: bytes, number: int) -> None:
    box.put(b"import os\n\n" + line + b"\n")
    for check in (True, False):
        result = box.apply(check=check)
        assert result["conflicts"] == [{"name": "NCCL_ALGO", "wanted": "Ring", "effective": "Tree", "line": number}]
        (warning,) = result["warnings"]
        assert "NCCL_ALGO is 'Tree'" in warning
        assert "expected 'Ring'" in warning
        assert (f"line {number} of" in warning) is (number > 0)
        assert result["environment"]["NCCL_ALGO"] == "Tree"
    assert line in box.file.read_bytes()


def test_the_same_value_by_hand_is_fine(box: Box) -> None:
    box.put(b"import os\nos.environ.setdefault('NCCL_ALGO', 'Ring')\n")
    assert box.apply()["conflicts"] == []


def test_a_value_by_hand_below_the_block_is_reported_with_its_line(box: Box) -> None:
    box.put(b"")
    box.apply()
    content = box.file.read_bytes() + b"os.environ['NCCL_ALGO'] = 'Tree'\n"
    box.put(content)
    (conflict,) = box.apply()["conflicts"]
    assert content.splitlines()[conflict["line"] - 1] == b"os.environ['NCCL_ALGO'] = 'Tree'"


# --- interpreters ------------------------------------------------------------------------------------------------------


def test_virtual_environment_file_is_created_and_removed(venv: Path) -> None:
    python = str(venv / "bin" / "python")
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = Path(subprocess.run([python, "-c", find], capture_output=True, text=True, check=True).stdout.strip())
    base = subprocess.run([python, "-S", "-c", "import sitecustomize"], capture_output=True, check=False)
    if base.returncode == 0:
        pytest.skip("this interpreter has a sitecustomize of its own")
    predicted = sc.apply(python, WANTED, check=True)
    assert not (folder / "sitecustomize.py").exists()
    result = sc.apply(python, WANTED)
    assert result == predicted
    assert result["created"] is True
    assert result["path"] == str(folder / "sitecustomize.py")
    assert stat.S_IMODE((folder / "sitecustomize.py").stat().st_mode) == 0o644
    assert result["environment"] == {"NCCL_ALGO": "Ring", "NCCL_NTHREADS": "512"}
    assert sc.apply(python, WANTED)["changed"] is False
    assert sc.apply(python, {"NCCL_ALGO": "Tree"})["changed"] is True
    gone = sc.apply(python, {}, state="absent")
    assert (gone["changed"], gone["removed"], gone["environment"]) == (True, True, {})
    assert list(folder.rglob("sitecustomize*")) == []


def test_dangling_link_is_refused(venv: Path) -> None:
    python = str(venv / "bin" / "python")
    predicted = sc.apply(python, WANTED, check=True)
    if not predicted["created"]:
        pytest.skip("this interpreter has a sitecustomize of its own")
    link = Path(predicted["path"])
    link.symlink_to("nowhere")
    try:
        with pytest.raises(sc.SitecustomizeError, match="is a dangling link or no regular file, expected"):
            sc.apply(python, WANTED)
        assert os.readlink(link) == "nowhere"
    finally:
        link.unlink()


def test_created_file_with_hand_edits_stays(venv: Path) -> None:
    python = str(venv / "bin" / "python")
    result = sc.apply(python, WANTED)
    path = Path(result["path"])
    if not result["created"]:
        pytest.skip("this interpreter has a sitecustomize of its own")
    path.write_bytes(path.read_bytes() + b"mine = 1\n")
    assert sc.apply(python, {}, state="absent")["removed"] is False
    assert path.read_bytes() == b"mine = 1\n"
    path.unlink()


def test_debian_python_and_its_virtual_environments_share_one_file(tmp_path: Path) -> None:
    """Debian ships the file in the standard library's folder, which is searched before site-packages."""
    python = Path("/usr/bin/python3")
    if not list(Path("/usr/lib").glob("python3.*/sitecustomize.py")) or not python.exists():
        pytest.skip("needs Debian's or Ubuntu's python3 with its sitecustomize")
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    seen = [sc.apply(str(p), WANTED, check=True) for p in (python, tmp_path / "v" / "bin" / "python")]
    for result in seen:
        assert re.fullmatch(r"/usr/lib/python3\.\d+/sitecustomize\.py", result["path"])
        assert re.fullmatch(r"/etc/python3\.\d+/sitecustomize\.py", result["real_path"])
        assert result["changed"] is True


def test_interpreter_that_does_not_exist_yet(tmp_path: Path) -> None:
    python = str(tmp_path / "bin" / "python")
    result = sc.apply(python, WANTED, check=True)
    assert (result["changed"], result["path"]) == (True, "")
    assert "does not exist yet" in result["warnings"][0]
    assert sc.apply(python, {}, check=True)["changed"] is False
    assert sc.apply(python, {}, state="absent")["changed"] is False
    with pytest.raises(sc.SitecustomizeError, match="does not exist or is not executable, expected the python"):
        sc.apply(python, WANTED)


def test_bad_interpreters(tmp_path: Path) -> None:
    with pytest.raises(sc.SitecustomizeError, match="interpreter is 'bin/python', expected an absolute path"):
        sc.apply("bin/python", WANTED)
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no libraries >&2\nexit 7\n")
    script.chmod(0o755)
    with pytest.raises(sc.SitecustomizeError, match="ended with status 7 and said 'no libraries', expected an answer"):
        sc.apply(str(script), WANTED)


def test_every_state_returns_the_same_keys(box: Box, tmp_path: Path) -> None:
    box.put(APPORT)
    missing = str(tmp_path / "none")
    results = [
        box.apply(check=True),
        box.apply(),
        box.apply(state="absent"),
        sc.apply(missing, WANTED, check=True),
        sc.apply(missing, WANTED, state="absent"),
    ]
    assert {frozenset(result) for result in results} == {frozenset(results[0])}
