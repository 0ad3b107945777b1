# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Filter launch_args: words or lines of a command line, over module_utils/plan.py and flags.py."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import PlanError, checked_args

DOCUMENTATION = r"""
name: launch_args
short_description: Turn flags into checked words or lines of a command line
version_added: 0.1.0
author:
  - The gpuserve.sglang authors (@gpuserve)
description:
  - Turns a mapping of flags or fields and values into the words that the engine's parser takes, checked for spelling,
    arity, type and choices against the parser of that version.
  - Of a plan (the result of P(gpuserve.sglang.launch_plan#filter)) it takes C(args).
  - Checks single flags only; the rules between them are those of P(gpuserve.sglang.launch_plan#filter).
positional: _input
options:
  _input:
    description: A plan, or a mapping of flags (V(--tp-size)) or fields (V(tp_size)) to values. True is a switch; null
      and false are left out.
    type: dict
    required: true
  engine_version:
    description: Version of SGLang. A plan brings its own.
    type: str
    default: 0.5.9
  lines:
    description: Return one shell-quoted line for each flag instead of words.
    type: bool
    default: false
seealso:
  - plugin: gpuserve.sglang.launch_plan
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show the command line, one flag a line
  ansible.builtin.debug:
    msg: "{{ deployment_plan | gpuserve.sglang.launch_args(lines=true) }}"

- name: Words of single flags
  ansible.builtin.debug:
    msg: "{{ {'tp_size': 8, '--enable-metrics': true} | gpuserve.sglang.launch_args }}"
"""

RETURN = r"""
_value:
  description: Words, or lines.
  type: list
  elements: str
  sample: ['--tp-size', '8', '--enable-metrics']
"""


def launch_args(value: Any, engine_version: str = "0.5.9", lines: bool = False) -> list[str]:
    """Words or lines for flags, or fail with one line for every problem."""
    patches: list[str] = []
    if isinstance(value, Mapping) and isinstance(value.get("args"), Mapping):
        engine_version = str(value.get("engine_version", engine_version))
        patches = [str(item) for item in value.get("patches") or []]
        value = value["args"]
    try:
        words = checked_args(value, engine_version, patches)
    except PlanError as error:
        raise AnsibleFilterError(f"These are no arguments of SGLang {engine_version}:\n{error}") from error
    if lines:
        return [shlex.join(group) for group in words]
    return [word for group in words for word in group]


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Any]:
        """Names and functions."""
        return {"launch_args": launch_args}
