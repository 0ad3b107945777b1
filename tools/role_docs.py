#!/usr/bin/env python3
# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Render the variable table of every roles/*/README.md from meta/argument_specs.yml and defaults/main.yml.

    tools/role_docs.py [--check] [--roles roles] [ROLE ...]

What stands between the two markers is replaced. Exit status: 0 done (or nothing to do), 1 a README differs (--check),
2 a role lacks specs, README or markers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from doc_pages import DocsError, between, settle

ROOT = Path(__file__).resolve().parents[1]


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's mapping; an empty one when there is no such file."""
    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if content is not None and not isinstance(content, dict):
        raise DocsError(f"{path} holds a {type(content).__name__}, expected a mapping. Correct the file.")
    return content or {}


def options_of(role: Path) -> dict[str, dict[str, Any]]:
    """The options of all entry points of a role, main's first and each name once."""
    specs = load_yaml(role / "meta" / "argument_specs.yml").get("argument_specs")
    if not isinstance(specs, dict) or "main" not in specs:
        raise DocsError(f"{role}/meta/argument_specs.yml has no entry point main, expected one. Write it.")
    options: dict[str, dict[str, Any]] = {}
    for entry in sorted(specs, key=lambda name: (name != "main", name)):
        for name, option in (specs[entry].get("options") or {}).items():
            options.setdefault(name, option or {})
    return options


def plain(text: Any) -> str:
    """Description text, a string or a list of paragraphs, as one line of Markdown without Ansible's markup."""
    line = " ".join(str(part).strip() for part in (text if isinstance(text, list) else [text or ""]))
    line = re.sub(r"\b[CVOFE]\(((?:[^()]|\([^()]*\))*)\)", r"`\1`", line)
    line = re.sub(r"\bB\(([^()]*)\)", r"**\1**", line)
    line = re.sub(r"\bI\(([^()]*)\)", r"*\1*", line)
    return re.sub(r"\s+", " ", line).replace("|", "\\|")


def code(value: Any) -> str:
    """A default as it would stand in YAML, on one line."""
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    text = re.sub(r"\s+", " ", text).strip()
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}".replace("|", "\\|")


def kind(option: dict[str, Any]) -> str:
    """Type of an option, with the type of its elements or its choices."""
    text = str(option.get("type", "str"))
    if option.get("elements"):
        text += f" of {option['elements']}"
    choices = option.get("choices")
    return f"{text}: {', '.join(str(choice) for choice in choices)}" if choices else text


def rows_of(
    options: dict[str, dict[str, Any]], defaults: dict[str, Any], prefix: str = ""
) -> list[tuple[str, str, str, str, str]]:
    """Name, type, default, required and meaning of every option; those of nested ones follow with a dotted name."""
    rows = []
    for name, option in options.items():
        has_default = name in defaults or "default" in option
        default = code(defaults.get(name, option.get("default"))) if has_default else ""
        required = "yes" if option.get("required") else "no"
        rows.append((f"`{prefix}{name}`", kind(option), default, required, plain(option.get("description"))))
        nested = option.get("options") or {}
        inner = f"{prefix}{name}{'[]' if option.get('type') == 'list' else ''}."
        # The outer row has shown the whole default.
        rows += [
            (row[0], row[1], "", row[3], row[4]) if name in defaults else row for row in rows_of(nested, {}, inner)
        ]
    return rows


def render(role: Path) -> str:
    """The table of one role."""
    rows = rows_of(options_of(role), load_yaml(role / "defaults" / "main.yml"))
    if not rows:
        return "This role has no variables."
    lines = ["| name | type | default | required | meaning |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def updated(role: Path) -> str:
    """The README of a role as it should be."""
    path = role / "README.md"
    if not path.is_file():
        raise DocsError(f"{path} does not exist, expected a README with the markers of its variables. Write it.")
    return between(path.read_text(encoding="utf-8"), "variables", render(role) + "\n", str(path))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="Render the variable tables of the roles' READMEs.")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when a README differs")
    parser.add_argument("--roles", type=Path, default=ROOT / "roles", help="folder of the roles")
    parser.add_argument("names", nargs="*", metavar="ROLE", help="only these roles")
    options = parser.parse_args(arguments)
    names = options.names or sorted(path.name for path in options.roles.iterdir() if path.is_dir())
    status = 0
    for name in names:
        try:
            wanted = updated(options.roles / name)
        except (DocsError, yaml.YAMLError) as error:
            print(error, file=sys.stderr)
            status = 2
            continue
        status = max(status, settle(options.roles / name / "README.md", wanted, options.check, "make docs"))
    return status


if __name__ == "__main__":
    sys.exit(main())
