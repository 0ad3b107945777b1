"""The programs on the host: a folder that Python runs without Ansible, made of the modules' own code."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import Gate, Options, with_settings
from ansible_collections.gpuserve.sglang.plugins.modules import health_gate

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles" / "sglang_service"
UTILS = ROOT / "plugins" / "module_utils"
VARS = yaml.safe_load((ROLE / "vars" / "main.yml").read_text())
MODULES: list[str] = VARS["__sglang_service_modules"]
PACKAGE = "ansible_collections.gpuserve.sglang.plugins.module_utils"
PROGRAMS = ["gate", "liveness", "incident"]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Modules of the collection that a file imports, and top names of everything else."""
    ours: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            ours |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{PACKAGE}."):
            ours.add(node.module.removeprefix(f"{PACKAGE}.").split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            ours |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            others.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
    return ours, others


def test_the_list_holds_every_module_that_a_program_imports() -> None:
    assert sorted(set(MODULES)) == MODULES, "in alphabetical order and each once"
    for name in MODULES:
        ours, others = imports(UTILS / f"{name}.py")
        assert ours <= set(MODULES), f"{name}.py imports what is not copied"
        assert others - set(sys.stdlib_module_names) == set(), f"{name}.py needs more than the standard library"


def test_subcommands_are_named(programs: Path) -> None:
    shown = run(programs, "--help")
    assert shown.returncode == 0
    for name in PROGRAMS:
        assert f"\n  {name} " in f"\n{shown.stdout}"
    wrong = run(programs, "gates")
    assert wrong.returncode == 2
    assert "found no subcommand 'gates', expected one of these" in wrong.stderr


def test_the_gate_runs_from_its_folder(programs: Path, tmp_path: Path) -> None:
    settings = tmp_path / "x.json"
    gate = {"unit": "", "port": 1, "timeout": 0.3, "generate": False, "of_a_newer_play": 1}
    settings.write_text(json.dumps({"unit": "x.service", "gate": gate}))
    done = run(programs, "gate", "--settings", str(settings))
    assert done.returncode == 1, done.stderr
    assert "on 127.0.0.1:1 within 0.3 s" in done.stdout
    # What is said on the command line goes over the file.
    assert "on 127.0.0.1:2 within" in run(programs, "gate", "--settings", str(settings), "--port", "2").stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["cannot be read", "expected the settings that site.yml writes"]),
        ("{", ["cannot be read", "expected the settings that site.yml writes"]),
        ("[]", ["holds no part named gate"]),
        ('{"gate": {"port": "30000"}}', ["gate.port is '30000', expected int"]),
        ('{"gate": {"generate": 1}}', ["gate.generate is 1, expected bool"]),
        ('{"gate": {"port": 0}}', ["port is 0, expected 1 to 65535"]),
    ],
)
def test_settings_that_cannot_be_used_are_one_clear_error(
    programs: Path, tmp_path: Path, text: str, words: list
) -> None:
    settings = tmp_path / "x.json"
    if text is not None:
        settings.write_text(text)
    done = run(programs, "gate", "--settings", str(settings))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_play_and_unit_judge_alike(tmp_path: Path) -> None:
    """What the play does not say comes from the settings of the unit; what neither says is the default."""
    settings = tmp_path / "x.json"
    given = {"port": 30001, "expected_kv_tokens": None, "kv_tolerance": None, "last_start": None}
    defaults = {"port": 30001, "expected_kv_tokens": 0, "kv_tolerance": 0.1, "last_start": ""}
    assert with_settings(given, str(settings)) == with_settings(given, "") == defaults
    settings.write_text(json.dumps({"gate": {"port": 30000, "expected_kv_tokens": 4096, "kv_tolerance": 0.2}}))
    assert with_settings(given, str(settings)) == {**defaults, "expected_kv_tokens": 4096, "kv_tolerance": 0.2}
    assert with_settings({**given, "kv_tolerance": 0.0}, str(settings))["kv_tolerance"] == 0.0
    settings.write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        with_settings(given, str(settings))


def test_what_the_gate_returns_is_documented() -> None:
    now = Gate(Options(unit="", port=1, timeout=0.1, generate=False)).once()
    assert set(now) - {"_since"} == set(yaml.safe_load(health_gate.RETURN))
    options = set(yaml.safe_load(health_gate.DOCUMENTATION)["options"]) - {"_window", "_since", "settings"}
    assert options == set(asdict(Options()))


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_runs_from_its_folder_and_wants_settings(programs: Path, name: str) -> None:
    done = run(programs, name, "--settings", "/nonexistent/settings.json")
    assert done.returncode == 2, done.stderr
    assert "/nonexistent/settings.json cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
