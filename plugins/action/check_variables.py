# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Holds a host's variables against the roles' argument specs, on the controller, before anything is connected to."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible_collections.gpuserve.sglang.plugins.module_utils import role_variables

ROLES = Path(__file__).resolve().parents[2] / "roles"
OTHERS = "gpuserve_other_variables"


@lru_cache(maxsize=1)
def known_variables(roles: Path = ROLES) -> role_variables.Known:
    """The options of every role, and the names that tasks of the roles set or register."""
    options: dict[str, dict[str, Any]] = {}
    made: set[str] = set()
    for role in sorted(path for path in roles.iterdir() if path.is_dir()):
        specs = role / "meta" / "argument_specs.yml"
        content = yaml.safe_load(specs.read_text(encoding="utf-8")) if specs.is_file() else {}
        options[role.name] = {}
        for entry in content.get("argument_specs", {}).values():
            options[role.name].update(entry.get("options") or {})
        for file in [*role.glob("tasks/**/*.yml"), *role.glob("handlers/*.yml")]:
            text = file.read_text(encoding="utf-8")
            made.update(re.findall(r"^\s+([a-z]\w*):(?:\s|$)", text, re.MULTILINE))
            made.update(re.findall(r"^\s+register:\s*(\w+)", text, re.MULTILINE))
    return role_variables.Known(options, made)


class ActionModule(ActionBase):
    """See the module of the same name."""

    _supports_check_mode = True
    _supports_async = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Fail with one line for each variable that is wrong."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        roles = self._task.args.get("roles") or []
        unexpected = set(self._task.args) - {"roles"}
        if unexpected or not isinstance(roles, list):
            raise AnsibleActionFail(
                f"check_variables got {', '.join(sorted(self._task.args))}, expected roles, a list of names."
            )
        known = known_variables()
        if strangers := sorted(set(roles) - set(known.roles)):
            raise AnsibleActionFail(
                f"check_variables got the roles {', '.join(strangers)}, expected roles of the collection."
            )
        others = self._value(variables, OTHERS)
        findings = role_variables.unknown_names(variables, known, others if isinstance(others, list) else [])
        findings += role_variables.missing_names(variables, roles, known)
        checked = 0
        for name in sorted(variables):
            if not role_variables.is_ours(name, known) or known.option(name) is None:
                continue
            checked += 1
            try:
                findings += role_variables.wrong_value(name, self._value(variables, name), known)
            except AnsibleError:
                # Only a part of it needs facts; that shows when the part is looked at.
                continue
        result.update(changed=False, checked=checked)
        if findings:
            result.update(failed=True, msg="\n".join(findings))
        return result

    def _value(self, variables: dict[str, Any], name: str) -> Any:
        """A variable's value; None when it needs facts that nobody has read yet (its role looks at it again)."""
        try:
            return self._templar.template(variables[name]) if name in variables else None
        except AnsibleError:
            return None
