"""The sandbox's way into a box: the runtime itself where it runs for root, podman where that knows better."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("box_connection", ROOT / "sandbox" / "connection" / "box.py")
assert spec is not None and spec.loader is not None
box = importlib.util.module_from_spec(spec)
spec.loader.exec_module(box)

ID = "0a" * 32


class Machine:
    """What runs: answers by the first two words of a command, and the commands that were asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.answers: dict[tuple[str, str], tuple[int, str, str]] = {
            ("podman", "inspect"): (0, f"/usr/bin/runc {ID}\n", ""),
            ("runc", "exec"): (0, "by runc", ""),
            ("podman", "exec"): (0, "by podman", ""),
        }

    def run(self, words: list[str], **options: Any) -> subprocess.CompletedProcess:
        self.asked.append(words)
        code, out, err = self.answers[words[0], words[1]]
        if options.get("text"):
            return subprocess.CompletedProcess(words, code, out, err)
        return subprocess.CompletedProcess(words, code, out.encode(), err.encode())

    @property
    def programs(self) -> list[str]:
        return [" ".join(words[:2]) for words in self.asked]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    found = Machine()
    monkeypatch.setattr(box.subprocess, "run", found.run)
    monkeypatch.setattr(box.os, "geteuid", lambda: 0)
    monkeypatch.setattr(box, "KNOWN", tmp_path / "known")
    monkeypatch.setattr(box, "RUNTIMES", {"runc": tmp_path / "runc", "crun": tmp_path / "crun"})
    (tmp_path / "runc" / ID).mkdir(parents=True)
    return found


def connection(monkeypatch: pytest.MonkeyPatch, user: str | None = None) -> Any:
    made = box.Connection.__new__(box.Connection)
    options = {"remote_addr": "mine", "remote_user": user}
    monkeypatch.setattr(made, "get_option", options.get, raising=False)
    return made


def test_the_runtime_is_asked_for_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for _number in range(2):
        assert connection(monkeypatch)._exec(["true"], b"in") == (0, b"by runc", b"")
    assert machine.programs == ["podman inspect", "runc exec", "runc exec"]
    assert machine.asked[1] == ["runc", "exec", ID, "true"]


def test_a_box_that_was_made_anew_has_another_identifier(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert box.runtime_of("mine") == ("runc", ID)
    (tmp_path / "runc" / ID).rmdir()
    (tmp_path / "runc" / "new").mkdir()
    machine.answers["podman", "inspect"] = (0, "runc new\n", "")
    assert box.runtime_of("mine") == ("runc", "new")


@pytest.mark.parametrize("answer", [(0, "runc stopped\n", ""), (0, f"kata {ID}\n", ""), (125, "", "no such container")])
def test_podman_where_no_runtime_runs_it(machine: Machine, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    machine.answers["podman", "inspect"] = answer
    assert connection(monkeypatch)._exec(["true"], None) == (0, b"by podman", b"")


def test_podman_for_other_users_and_without_root(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connection(monkeypatch, "sglang")._exec(["true"], None)[1] == b"by podman"
    assert machine.asked[-1][:5] == ["podman", "exec", "--interactive", "--user", "sglang"]
    assert connection(monkeypatch, "root")._exec(["true"], None)[1] == b"by runc"
    monkeypatch.setattr(box.os, "geteuid", lambda: 1000)
    assert connection(monkeypatch)._exec(["true"], None)[1] == b"by podman"


def test_a_command_that_fails_is_not_run_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.answers["runc", "exec"] = (1, "", f"ls: cannot access '/sys/fs/cgroup/{ID}': No such file or directory")
    assert connection(monkeypatch)._exec(["ls", "x"], None)[0] == 1
    assert "podman exec" not in machine.programs


@pytest.mark.parametrize(
    "said",
    [
        'level=error msg="exec failed: container does not exist"',
        'level=error msg="exec failed: cannot exec in a stopped container"',
        f"container `{ID}` is not running",
        f"error opening file `/run/crun/{ID}/status`: No such file or directory",
    ],
)
def test_podman_says_what_is_wrong_with_a_box(machine: Machine, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    machine.answers["runc", "exec"] = (1, "", said)
    machine.answers["podman", "exec"] = (
        255,
        "",
        "Error: can only create exec sessions on running containers: container state improper",
    )
    with pytest.raises(AnsibleConnectionFailure, match="boot it with `sandbox/box up mine`"):
        connection(monkeypatch)._exec(["true"], None)
