"""sandbox/setup on machines with different Pythons; apt and the Pythons are stand-ins that remember what they were told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: What the script calls beside the stand-ins.
REAL = ("bash", "env", "dirname", "basename", "id", "cat", "sha256sum", "mkdir", "chmod", "cp", "rm")
TOOLS = ("podman", "runc", "mmdebstrap", "git", "gpg", "dpkg-deb")

#: Says that it is of another version; knows ensurepip when its -venv package is there; `-m venv` makes a folder that does.
PYTHON = """#!{real} -S
import pathlib, sys
home, name, version = pathlib.Path({home!r}), {name!r}, {version!r}
words = sys.argv[1:]
if words == ["-V"]:
    print("Python " + ".".join(map(str, version)))
elif words[0] == "-c":
    sys.version_info = version
    if not (home / "venv" / ".".join(map(str, version[:2]))).exists():
        sys.modules["ensurepip"] = None
    exec(words[1])
elif words[:2] == ["-m", "venv"]:
    with (home / "calls").open("a") as file:
        file.write(name + " " + " ".join(words) + "\\n")
    folder = pathlib.Path(words[-1]) / "bin"
    folder.mkdir(parents=True)
    for tool in ("python", "pip"):
        (folder / tool).write_text("#!/bin/sh\\n")
        (folder / tool).chmod(0o755)
"""

#: A package is a folder in the archive; its files go into bin and venv.
APT_GET = """#!/bin/bash
echo "apt-get $*" >>"{home}/calls"
[ "$1" = install ] || exit 0
for word in "${{@:2}}"; do
    case $word in -*) continue ;; esac
    [ -d "{home}/archive/$word" ] || {{ echo "E: Unable to locate package $word" >&2; exit 100; }}
    cp -r "{home}/archive/$word/." "{home}/"
done
"""
APT_CACHE = """#!/bin/bash
[ "$1" = show ] && [ -d "{home}/archive/$2" ]
"""


class Machine:
    """A machine with nothing but what a test puts there."""

    def __init__(self, home: Path) -> None:
        self.home, self.root = home, home / "checkout"
        for folder in ("bin", "venv", "archive", "checkout/sandbox"):
            (home / folder).mkdir(parents=True)
        shutil.copy(ROOT / "sandbox" / "setup", self.root / "sandbox" / "setup")
        for name in ("requirements.txt", "requirements-dev.txt"):
            (self.root / name).write_text("x\n")
        for name in REAL:
            (home / "bin" / name).symlink_to(shutil.which(name) or name)
        self.program("bin/apt-get", APT_GET.format(home=home))
        self.program("bin/apt-cache", APT_CACHE.format(home=home))
        self.program("bin/sudo", '#!/bin/bash\nexec "$@"\n')
        for name in TOOLS:
            self.program(f"bin/{name}", "#!/bin/bash\n")
        (home / "calls").touch()

    def program(self, path: str, text: str) -> None:
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def python(self, name: str, version: str, where: str = "bin", venv: bool = False) -> None:
        """A Python on this machine, or with `where` in a package of the archive."""
        numbers = tuple(int(part) for part in version.split("."))
        text = PYTHON.format(real=Path(sys.executable).resolve(), home=str(self.home), name=name, version=numbers)
        self.program(f"{where}/{name}", text)
        if venv:
            self.venv_of(version, "venv")

    def package(self, name: str, version: str) -> None:
        """`name` of the archive: a Python of that version, or what its venv needs."""
        if name.endswith("-venv"):
            self.venv_of(version, f"archive/{name}/venv")
        else:
            self.python(name, version, f"archive/{name}/bin")

    def venv_of(self, version: str, where: str) -> None:
        (self.home / where).mkdir(parents=True, exist_ok=True)
        (self.home / where / ".".join(version.split(".")[:2])).touch()

    def setup(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.home / "bin" / "bash"), str(self.root / "sandbox" / "setup")],
            capture_output=True, text=True, check=False, env={"PATH": str(self.home / "bin"), "HOME": str(self.home)},
        )  # fmt: skip

    @property
    def installed(self) -> list[str]:
        lines = [line.split() for line in (self.home / "calls").read_text().splitlines()]
        return [word for line in lines if line[:2] == ["apt-get", "install"] for word in line[2:] if word[0] != "-"]

    @property
    def made_with(self) -> list[str]:
        lines = (self.home / "calls").read_text().splitlines()
        return [line.split()[0] for line in lines if " -m venv " in line]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_that_has_all_asks_apt_for_nothing(machine: Machine) -> None:
    machine.python("python3", "3.12.3", venv=True)
    for _round in range(2):
        done = machine.setup()
        assert done.returncode == 0, done.stderr
    assert "apt-get" not in (machine.home / "calls").read_text()
    assert machine.made_with == ["python3"]


def test_a_machine_without_python_gets_one(machine: Machine) -> None:
    machine.package("python3", "3.13.5")
    machine.package("python3-venv", "3.13.5")
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.installed == ["python3", "python3-venv"]
    assert machine.made_with == ["python3"]
    assert (machine.home / "calls").read_text().count("apt-get update") == 1


def test_the_venv_package_is_that_of_the_chosen_python(machine: Machine) -> None:
    """Ubuntu 22.04 with python3.11 added: python3-venv is 3.10's."""
    machine.python("python3", "3.10.12", venv=True)
    machine.python("python3.11", "3.11.0")
    machine.package("python3-venv", "3.10.12")
    machine.package("python3.11-venv", "3.11.0")
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.installed == ["python3.11-venv"]
    assert machine.made_with == ["python3.11"]


@pytest.mark.parametrize("own", ["3.14.0", "3.10.12"])
def test_beside_a_python_that_does_not_fit_one_of_the_archive_is_taken(machine: Machine, own: str) -> None:
    machine.python("python3", own, venv=True)
    for name, version in (("python3.11", "3.11.9"), ("python3.12", "3.12.3")):
        machine.package(name, version)
        machine.package(f"{name}-venv", version)
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.installed == ["python3.12", "python3.12-venv"]
    assert machine.made_with == ["python3.12"]


def test_where_apt_has_no_fitting_python_the_error_says_what_works(machine: Machine) -> None:
    machine.python("python3", "3.14.0", venv=True)
    machine.package("python3", "3.14.0")
    done = machine.setup()
    assert done.returncode == 1
    assert "found Python 3.14.0, expected Python 3.11 to 3.13, and apt has none of them" in done.stderr
    assert "`uv python install 3.13`" in done.stderr
    assert "apt-get install python3" not in done.stderr
    assert machine.installed == []


def test_a_machine_without_python_whose_archive_has_an_old_one(machine: Machine) -> None:
    machine.package("python3", "3.10.12")
    done = machine.setup()
    assert done.returncode == 1
    assert "found Python 3.10.12, expected" in done.stderr
    assert machine.installed == ["python3"]


def test_tools_that_are_missing_are_installed(machine: Machine) -> None:
    machine.python("python3.13", "3.13.1", venv=True)
    (machine.home / "bin" / "gpg").unlink()
    (machine.home / "archive" / "gnupg").mkdir()
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.installed == ["gnupg"]


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(
        ["shellcheck", str(ROOT / "sandbox" / "setup")],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout
