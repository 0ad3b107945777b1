"""Filter: the id of the engine release that a description determines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils.release import ReleaseError, release_id

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


class FilterModule:
    """The filter under its fully qualified name."""

    def filters(self) -> dict[str, Any]:
        return {"release_id": release_id_filter}
