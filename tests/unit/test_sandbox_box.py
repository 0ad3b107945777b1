"""What several processes and checkouts share in the sandbox; podman is a stand-in that remembers what it was told."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROOT = Path(__file__).resolve().parents[2]

#: Answers from boxes.json, removes boxes from it, and writes every call down.
PODMAN = """#!{python}
import json, pathlib, sys
home = pathlib.Path({home!r})
words = sys.argv[1:]
boxes = json.loads((home / "boxes.json").read_text())
with (home / "calls").open("a") as file:
    file.write(" ".join(words) + "\\n")
if words[:2] == ["container", "inspect"]:
    if words[2] not in boxes:
        sys.exit("no such container")
    labels = {{"gpuserve.sandbox": "x", **boxes[words[2]]}}
    print(json.dumps([{{"Config": {{"Labels": labels}}, "State": {{"Running": True}}, "Mounts": []}}]))
elif words[0] == "ps":
    print("\\n".join(boxes))
elif words[0] == "rm":
    boxes.pop(words[-1])
    (home / "boxes.json").write_text(json.dumps(boxes))
elif words[0] == "images":
    print("localhost/gpuserve-sandbox:1\\nlocalhost/other:2")
"""


class Sandbox:
    """A checkout with a copy of sandbox/box, and the machine's podman."""

    def __init__(self, folder: Path, name: str) -> None:
        self.home, self.root = folder, folder / name
        (self.root / "sandbox").mkdir(parents=True)
        shutil.copy(ROOT / "sandbox" / "box", self.root / "sandbox" / "box")
        self.cache = self.root / ".cache" / "sandbox"
        self.cache.mkdir(parents=True)

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{self.home}:{os.environ['PATH']}"}
        command = [sys.executable, str(self.root / "sandbox" / "box"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    @property
    def calls(self) -> list[str]:
        return (self.home / "calls").read_text().splitlines()


@pytest.fixture
def boxes(tmp_path: Path):
    """Two checkouts on one machine; each has a box, and a third box's checkout is gone."""
    here, there = Sandbox(tmp_path, "here"), Sandbox(tmp_path, "there")
    podman = tmp_path / "podman"
    podman.write_text(PODMAN.format(python=sys.executable, home=str(tmp_path)))
    podman.chmod(0o755)
    owners = {"ours": str(here.root), "theirs": str(there.root), "orphan": str(tmp_path / "gone")}
    (tmp_path / "boxes.json").write_text(json.dumps({name: {"gpuserve.checkout": o} for name, o in owners.items()}))

    def left() -> set[str]:
        return set(json.loads((tmp_path / "boxes.json").read_text()))

    return here, there, left


@pytest.mark.parametrize("verb", ["up", "restart", "down"])
def test_a_box_of_another_checkout_is_left_alone(boxes, verb: str) -> None:
    here, there, left = boxes
    if verb == "up":
        states = here.root / "sandbox" / "standins" / "states"
        states.mkdir(parents=True)
        (states / "documented-box.json").write_text("{}")
    done = here(verb, "theirs")
    assert done.returncode == 1
    assert f"box theirs belongs to the checkout {there.root}; expected none of that name" in done.stderr
    assert f"`sandbox/box {verb} theirs --force`" in done.stderr
    assert all(call.startswith("container inspect") for call in here.calls)
    assert "theirs" in left()


def test_force_takes_it(boxes) -> None:
    here, there, left = boxes
    done = here("down", "theirs", "--force")
    assert done.returncode == 0, done.stderr
    assert f"taking box theirs from {there.root}" in done.stderr
    assert left() == {"ours", "orphan"}


def test_own_boxes_and_orphans_need_no_force(boxes) -> None:
    here, __, left = boxes
    for name in ("ours", "orphan", "nothing"):
        assert here("down", name).returncode == 0
    assert left() == {"theirs"}


def test_clean_leaves_what_another_checkout_uses(boxes) -> None:
    here, there, left = boxes
    done = here("clean")
    assert done.returncode == 0, done.stderr
    assert left() == {"theirs"}
    assert "kept the images: other checkouts have the boxes theirs" in done.stderr
    assert not [call for call in here.calls if call.startswith("rmi")]
    assert not here.cache.exists()
    assert there.cache.exists()
    # The last one turns off the light, but touches no image of somebody else.
    assert there("clean").returncode == 0
    assert [call for call in here.calls if call.startswith("rmi")] == ["rmi --force localhost/gpuserve-sandbox:1"]


def test_clean_leaves_a_cache_that_is_only_linked_to(boxes) -> None:
    here, there, __ = boxes
    shutil.rmtree(here.root / ".cache")
    (here.root / ".cache").symlink_to(there.root / ".cache")
    assert here("clean").returncode == 0
    assert not (here.root / ".cache").is_symlink()
    assert there.cache.exists()


HOLD = """
import importlib.machinery, importlib.util, sys, time
loader = importlib.machinery.SourceFileLoader("box", sys.argv[1])
box = importlib.util.module_from_spec(importlib.util.spec_from_loader("box", loader))
loader.exec_module(box)
with box.locked("wheels"):
    print("in", flush=True)
    time.sleep(float(sys.argv[2]))
    print("out", flush=True)
"""


def test_two_at_once_wait_for_each_other_and_a_killed_one_is_not_waited_for(tmp_path: Path) -> None:
    box = Sandbox(tmp_path, "here").root / "sandbox" / "box"

    def hold(seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(box), str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    first = hold(600)
    assert first.stdout.readline() == "in\n"
    second = hold(0)
    assert second.stderr.readline() == "sandbox: waiting for another sandbox/box that works on wheels\n"
    assert second.poll() is None
    first.send_signal(signal.SIGKILL)
    assert second.communicate(timeout=60)[0] == "in\nout\n"
    first.communicate()


def system_packages(**variables: str) -> set[str]:
    """What the role sglang installs with apt."""
    defaults = yaml.safe_load((ROOT / "roles" / "sglang" / "defaults" / "main.yml").read_text())
    given = {"sglang_base_python": defaults["sglang_base_python"], **variables}
    text = trust_as_template(defaults["sglang_system_packages"].strip())
    return set(Templar(DataLoader(), variables=given).template(text))


def test_a_box_has_what_the_role_installs_and_nothing_else_that_the_engine_needs() -> None:
    """A box has no network: what only its image brings along would be missing on a real host."""
    role = system_packages()
    assert {"build-essential", "python3-dev", "python3-venv", "libnuma1", "git"} == role
    image = (ROOT / "sandbox" / "image" / "Containerfile").read_text()
    install = re.search(r"apt-get install.*?\n(.*?) && rm", image, re.DOTALL)
    assert install
    packages = set(install[1].replace("\\", " ").split())
    of_the_box = {
        "systemd", "systemd-sysv", "dbus", "python3", "python3-apt", "ca-certificates", "curl", "sudo", "psmisc", "procps",
        "iproute2", "kmod", "less",
    }  # fmt: skip
    assert packages - of_the_box == role


@pytest.mark.parametrize(
    ("python", "named"),
    [("/usr/bin/python3.11", {"python3.11-venv", "python3.11-dev"}), ("/opt/python/bin/python3", set())],
)
def test_the_packages_of_python_are_those_of_the_interpreter(python: str, named: set[str]) -> None:
    assert system_packages(sglang_base_python=python) - {"git", "build-essential", "libnuma1"} == named
