"""Filters: the id of the engine release that a description determines, and the patches that are part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.action.patch_series import find_series, read_series
from ansible_collections.gpuserve.sglang.plugins.module_utils.release import ReleaseError, load_patches, release_id

DOCUMENTATION = r"""
name: release_id
short_description: Id of the engine release that a description determines
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Hashes everything that determines a release, so that the path of its interpreter is known before it is built.
options:
  _input:
    description: The description, as the role C(sglang) composes it in C(__sglang_spec).
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Where the interpreter will be
  ansible.builtin.debug:
    msg: "/opt/sglang/releases/{{ spec | gpuserve.sglang.release_id }}/venv/bin/python"
  vars:
    spec:
      python: /usr/bin/python3
      steps:
        - name: engine
          requirements: [sglang==0.5.9]
"""

RETURN = r"""
_value:
  description: Twelve hexadecimal digits.
  type: str
"""


def release_id_filter(spec: Any) -> str:
    if not isinstance(spec, Mapping):
        raise AnsibleFilterError(f"release_id: expected a dictionary, got {type(spec).__name__}")
    try:
        return release_id(spec)
    except ReleaseError as error:
        raise AnsibleFilterError(str(error)) from error


def release_patches_filter(wanted: Any, beside: str = ".") -> list[dict[str, Any]]:
    if not isinstance(wanted, Sequence) or isinstance(wanted, str):
        raise AnsibleFilterError(f"sglang_patches is a {type(wanted).__name__}, expected a list of series")
    found: list[dict[str, Any]] = []
    for number, entry in enumerate(wanted):
        where = f"sglang_patches[{number}]"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("series"), str):
            raise AnsibleFilterError(f"{where} names no series, expected one such as sglang/0.5.9 under series")
        unknown = sorted(set(entry) - {"series", "patches"})
        if unknown:
            raise AnsibleFilterError(f"{where} has the unknown keys {', '.join(unknown)}; expected series and patches")
        ids = entry.get("patches")
        if ids is not None and ids != "all" and (isinstance(ids, str) or not isinstance(ids, Sequence)):
            raise AnsibleFilterError(f"{where}.patches is {ids!r}, expected a list of ids, or all")
        try:
            content = read_series(find_series(entry["series"], Path(beside)))
            full = {**content, "series": str(entry["series"]), "patches": ids}
            full["patches"] = [name for item in load_patches([full]) for name in item.ids]
        except (AnsibleActionFail, ReleaseError) as error:
            raise AnsibleFilterError(str(error)) from error
        found.append(full)
    return found


class FilterModule:
    """The filters under their fully qualified names."""

    def filters(self) -> dict[str, Any]:
        return {"release_id": release_id_filter, "release_patches": release_patches_filter}
