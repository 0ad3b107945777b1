#!/usr/bin/env python3
# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Resolve the steps of a release and write a lock file with hashes for each: every package, version and checksum.

    tools/lock_requirements.py [--vars FILE]... [--python-version 3.12] [--platform x86_64-manylinux_2_39] FOLDER

The steps are the role's (roles/sglang/defaults/main.yml), or those of FILE (YAML with sglang_* variables, such as a
group_vars file). FOLDER gets <step>.txt. A step uses its own indexes and overrides, and what earlier steps locked. Then,
in the inventory, for each step:

    sglang_steps:
      - name: torch
        requirements: "{{ lookup('ansible.builtin.file', inventory_dir ~ '/locks/torch.txt') | split('\\n') }}"
        no_deps: true
        index_url: ...            # as before; overrides are in the lock file already

Needs uv and the indexes. Exit status: 0 done, 1 a step could not be resolved, 2 wrong input.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jinja2.nativetypes
import yaml

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = ROOT / "roles" / "sglang" / "defaults" / "main.yml"


class LockError(Exception):
    """Says what was found, what was expected and what to do."""


def render(value: Any, variables: dict[str, Any]) -> Any:
    """A value with its {{ }} replaced; only variables of the same files are known, no lookups."""
    if isinstance(value, str) and "{{" in value:
        try:
            environment = jinja2.nativetypes.NativeEnvironment(undefined=jinja2.StrictUndefined)
            return render(environment.from_string(value).render(variables), variables)
        except jinja2.TemplateError as error:
            raise LockError(
                f"{value!r} cannot be rendered ({error}), expected variables of the given files only. Write the value."
            ) from error
    if isinstance(value, list):
        return [render(item, variables) for item in value]
    if isinstance(value, dict):
        return {key: render(item, variables) for key, item in value.items()}
    return value


def find_uv() -> str:
    """uv beside this interpreter, or in PATH."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if not found:
        raise LockError("uv was not found, expected it in PATH. pip install uv.")
    return found


def pins(lock: str) -> list[str]:
    """The name==version lines of a lock file, as constraints for later steps."""
    return re.findall(r"^([A-Za-z0-9._-]+==[^\s;\\]+)", lock, re.MULTILINE)


def lock_step(
    step: dict[str, Any], variables: dict[str, Any], constraints: list[str], options: argparse.Namespace, work: Path
) -> str:
    """The text of the lock file of one step."""
    files = {"requirements": step["requirements"], "overrides": step.get("overrides") or [], "constraints": constraints}
    for name, lines in files.items():
        (work / name).write_text("\n".join(lines) + "\n")
    target = work / "lock"
    command = [find_uv(), "pip", "compile", "--quiet", "--generate-hashes", "--no-header", str(work / "requirements")]
    command += [f"--output-file={target}", f"--override={work / 'overrides'}", f"--constraint={work / 'constraints'}"]
    command += [f"--python-version={options.python_version}", f"--python-platform={options.platform}"]
    command += ["--index-strategy=unsafe-best-match", "--no-annotate"]
    command += ["--no-deps"] if step.get("no_deps") else []
    links = variables.get("sglang_find_links") or []
    command += [f"--find-links={place}" for place in links]
    command += ["--no-index"] if variables.get("sglang_offline") else []
    # In the environment: the addresses may hold a password.
    environment = {
        name: value for name, value in os.environ.items() if not re.match(r"UV_(DEFAULT_)?INDEX|UV_EXTRA", name)
    }
    environment["UV_NO_CONFIG"] = "1"
    if index := step.get("index_url") or variables.get("sglang_index_url"):
        environment["UV_DEFAULT_INDEX"] = index
    if extra := step.get("extra_index_urls") or variables.get("sglang_extra_index_urls"):
        environment["UV_INDEX"] = " ".join(extra)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = re.sub(r"(\w+://)[^/\s]+@", r"\1***@", done.stderr.strip())
        raise LockError(f"the step {step['name']} cannot be resolved (status {done.returncode}). uv said:\n{said}")
    return target.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vars", type=Path, action="append", default=[], help="YAML with sglang_* variables")
    parser.add_argument("--python-version", default="3.12", help="Python of the host (%(default)s)")
    parser.add_argument("--platform", default="x86_64-manylinux_2_39", help="platform of the host (%(default)s)")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        variables: dict[str, Any] = {}
        for file in [DEFAULTS, *options.vars]:
            content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
            if not isinstance(content, dict):
                raise LockError(
                    f"{file} holds no variables, expected YAML with sglang_steps or others. Correct --vars."
                )
            variables.update({name: value for name, value in content.items() if str(name).startswith("sglang_")})
        locked: dict[str, str] = {}
        constraints: list[str] = []
        for step in render(variables["sglang_steps"], variables):
            if not step.get("requirements"):
                print(f"{step['name']}: nothing to lock, it comes from git")
                continue
            with tempfile.TemporaryDirectory() as work:
                locked[step["name"]] = lock_step(
                    step, render(variables, {**variables}), constraints, options, Path(work)
                )
            constraints += [pin for pin in pins(locked[step["name"]]) if pin not in constraints]
    except LockError as error:
        print(error, file=sys.stderr)
        return 1 if "cannot be resolved" in str(error) else 2
    # All or nothing: half a set of lock files fits nothing.
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, text in locked.items():
        (options.folder / f"{name}.txt").write_text(text)
        print(f"{options.folder / name}.txt: {len(pins(text)) or 'a file'} locked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
