"""What every role of the collection keeps to: specs, defaults, README and the shape of its tasks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2.nativetypes
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "role_docs.py"
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
CONTENTS = {
    f"ansible.builtin.{word}" for word in ("include_tasks", "import_tasks", "include_role", "import_role", "meta")
}
SHELLS = {"shell", "raw", "ansible.builtin.shell", "ansible.builtin.raw"}

every_role = pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None


def tasks_in(document: Any) -> Iterator[dict[str, Any]]:
    """Every task of a file, those of blocks included."""
    for task in document or []:
        yield task
        for part in ("block", "rescue", "always"):
            yield from tasks_in(task.get(part))


def test_there_are_roles() -> None:
    assert {"model", "nccl"} <= {role.name for role in ROLES}


@every_role
def test_specs_and_defaults_agree(role: Path) -> None:
    specs = load(role / "meta" / "argument_specs.yml")["argument_specs"]
    defaults = load(role / "defaults" / "main.yml") or {}
    options: dict[str, Any] = {}
    for entry in specs.values():
        assert entry["short_description"]
        options.update(entry.get("options") or {})
    required = {name for name, option in options.items() if option.get("required")}
    assert required & set(defaults) == set(), "a required variable has no default"
    assert set(options) - required == set(defaults)
    assert {n: o["default"] for n, o in options.items() if "default" in o and o["default"] != defaults[n]} == {}
    assert [name for name, option in options.items() if not (option.get("description") and option.get("type"))] == []


@every_role
def test_names_carry_the_role(role: Path) -> None:
    public, private = f"{role.name}_", f"__{role.name}_"
    defaults = load(role / "defaults" / "main.yml") or {}
    assert [name for name in defaults if not name.startswith(public)] == []
    variables = [name for path in sorted(role.glob("vars/*.yml")) for name in load(path) or {}]
    assert [name for name in variables if not name.startswith(private)] == []
    made = [
        name
        for path in sorted(role.glob("tasks/*.yml"))
        for task in tasks_in(load(path))
        for name in [*([task["register"]] if "register" in task else []), *task.get("ansible.builtin.set_fact", {})]
        if name != "cacheable"
    ]
    assert [name for name in made if not name.startswith((public, private))] == []


@every_role
def test_main_is_a_table_of_contents(role: Path) -> None:
    tasks = load(role / "tasks" / "main.yml")
    assert tasks
    assert [task.get("name") for task in tasks if not CONTENTS & set(task)] == []
    # meta needs no tag; everything else can be asked for by <role>_<phase>.
    named = [(task["name"], task.get("tags") or []) for task in tasks if "ansible.builtin.meta" not in task]
    tags = {name: [tags] if isinstance(tags, str) else tags for name, tags in named}
    assert [name for name, own in tags.items() if not any(tag.startswith(f"{role.name}_") for tag in own)] == []


@every_role
def test_no_shell(role: Path) -> None:
    files = sorted([*role.glob("tasks/**/*.yml"), *role.glob("handlers/*.yml")])
    assert [
        (path.name, task.get("name")) for path in files for task in tasks_in(load(path)) if SHELLS & set(task)
    ] == []


@every_role
def test_files_that_tasks_include_exist(role: Path) -> None:
    named = []
    for path in sorted(role.glob("tasks/**/*.yml")):
        for task in tasks_in(load(path)):
            for action in ("ansible.builtin.include_tasks", "ansible.builtin.import_tasks"):
                value = task.get(action)
                file = value.get("file") if isinstance(value, dict) else value
                if file and "{{" not in file:
                    named.append(file)
    assert [file for file in named if not (role / "tasks" / file).is_file()] == []


@every_role
def test_readme_table_is_up_to_date(role: Path) -> None:
    done = subprocess.run([sys.executable, TOOL, "--check", role.name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@every_role
def test_meta(role: Path) -> None:
    info = load(role / "meta" / "main.yml")["galaxy_info"]
    assert info["license"] == "Apache-2.0"
    assert info["description"]
    assert info["min_ansible_version"] == "2.17"


# --- the tool ----------------------------------------------------------------------------------------------------------


def tool(roles: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, "--roles", roles, *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture
def roles(tmp_path: Path) -> Path:
    role = tmp_path / "x"
    (role / "meta").mkdir(parents=True)
    (role / "defaults").mkdir()
    spec = {
        "x_port": {"type": "int", "default": 80, "description": ["The port,", "C(1) to V(65535) | more."]},
        "x_name": {"type": "str", "required": True, "description": "A name."},
        "x_list": {
            "type": "list",
            "elements": "dict",
            "description": "Rows.",
            "options": {"key": {"type": "str", "required": True, "description": "A key."}},
        },
    }
    (role / "meta" / "argument_specs.yml").write_text(yaml.safe_dump({"argument_specs": {"main": {"options": spec}}}))
    (role / "defaults" / "main.yml").write_text("x_port: 80\nx_list: []\n")
    (role / "README.md").write_text("# x\n<!-- variables: begin -->\nold\n<!-- variables: end -->\ntail\n")
    return tmp_path


def test_tool_writes_once(roles: Path) -> None:
    readme = roles / "x" / "README.md"
    before = readme.read_text()
    checked = tool(roles, "--check")
    assert checked.returncode == 1
    assert "Run `make docs`" in checked.stderr
    assert "-old" in checked.stdout
    assert readme.read_text() == before
    assert tool(roles).returncode == 0
    text = readme.read_text()
    assert text.startswith("# x\n<!-- variables: begin -->\n| name |")
    assert text.endswith("|\n<!-- variables: end -->\ntail\n")
    assert "| `x_port` | int | `80` | no | The port, `1` to `65535` \\| more. |" in text
    assert "| `x_name` | str |  | yes | A name. |" in text
    assert "| `x_list` | list of dict | `[]` | no | Rows. |" in text
    assert "| `x_list[].key` | str |  | yes | A key. |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}
    stamp = readme.stat().st_mtime_ns
    assert tool(roles).stdout == ""
    assert readme.stat().st_mtime_ns == stamp
    assert tool(roles, "--check").returncode == 0


def test_tool_names_what_is_missing(roles: Path) -> None:
    (roles / "x" / "README.md").write_text("# x\n")
    done = tool(roles)
    assert done.returncode == 2
    assert "has 0 '<!-- variables: begin -->'" in done.stderr
    assert "Add them" in done.stderr
    (roles / "x" / "README.md").unlink()
    assert "does not exist, expected a README" in tool(roles).stderr
    (roles / "x" / "meta" / "argument_specs.yml").unlink()
    (roles / "x" / "README.md").write_text("<!-- variables: begin --><!-- variables: end -->")
    assert "has no entry point main" in tool(roles, "--check").stderr


@pytest.mark.parametrize(
    ("unit", "seconds"), [({"timeout_start_sec": 3600}, 3600), ({}, 900), (None, 900)], ids=["plan", "older", "none"]
)
def test_a_start_waits_as_long_as_the_installed_deployment_has(unit: Any, seconds: int) -> None:
    role = ROOT / "roles/sglang_service"
    block = next(task for task in load(role / "tasks/operator_start.yml") if "block" in task)
    names = {"__sglang_service_now": {"installed": {"unit": unit}}}
    template = jinja2.nativetypes.NativeEnvironment().from_string
    plan = template(block["vars"]["deployment_plan"]).render(names)
    defaults = load(role / "defaults/main.yml")
    assert template(defaults["sglang_service_health_timeout"]).render(deployment_plan=plan) == seconds
    gate = next(task for task in block["block"] if "gpuserve.sglang.health_gate" in task)
    assert gate["gpuserve.sglang.health_gate"]["timeout"] == "{{ sglang_service_health_timeout }}"


def test_a_start_by_the_operator_looks_at_the_port_of_what_it_starts() -> None:
    tasks = tasks_in(load(ROOT / "roles/sglang_service/tasks/operator_start.yml"))
    start = next(task for task in tasks if task.get("gpuserve.sglang.service_switch", {}).get("state") == "started")
    given = start["gpuserve.sglang.service_switch"]
    assert given["host"] == "{{ __sglang_service_now.installed.endpoint.host }}"
    assert given["port"] == "{{ __sglang_service_now.installed.endpoint.port }}"
