"""Filter: the patches of an engine release, with their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.action.patch_series import find_series, read_series
from ansible_collections.gpuserve.sglang.plugins.module_utils.release import ReleaseError, load_patches

DOCUMENTATION = r"""
name: release_patches
short_description: The patches of an engine release, with their texts
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Reads the named patch series on the controller, so that their texts become part of the id of a release and travel to the host.
  - A patch file that is not the one that its series knows is refused, with the checksums found and expected.
positional: _input, beside
options:
  _input:
    description: Entries with C(series) (as in M(gpuserve.sglang.patch_series)) and C(patches) (ids, or V(all)).
    type: list
    elements: dict
    required: true
  beside:
    description: Folder whose C(patches/) is looked into before that of the collection.
    type: str
    default: .
"""

EXAMPLES = r"""
- name: Build a release with one patch
  gpuserve.sglang.engine_release:
    root: /opt/sglang
    python: /usr/bin/python3
    steps: "{{ sglang_steps }}"
    patches: "{{ [{'series': 'sglang/0.5.9', 'patches': ['kimi-k25-eagle3']}] | gpuserve.sglang.release_patches(playbook_dir) }}"
"""

RETURN = r"""
_value:
  description: The entries with C(series), C(patches) (ids in their order), C(definition) and C(texts).
  type: list
  elements: dict
"""


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
    """The filter under its fully qualified name."""

    def filters(self) -> dict[str, Any]:
        return {"release_patches": release_patches_filter}
