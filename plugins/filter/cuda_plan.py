# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Filters: the plan of the role cuda."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils import cuda

DOCUMENTATION = r"""
name: cuda_plan
short_description: Say which driver and toolkit packages a host needs, how they are pinned and what is against it
version_added: 0.1.0
description:
  - Pure arithmetic over what was wanted and what was read; nothing on the host is asked.
positional: _input, host, packages
options:
  _input:
    description: The variables of the role P(gpuserve.sglang.cuda#role) without their prefix.
    type: dict
    required: true
  host:
    description: What M(gpuserve.sglang.gpu_host_info) returned.
    type: dict
    required: true
  packages:
    description: Installed packages, name to version.
    type: dict
    required: true
author:
  - The gpuserve.sglang authors
"""

EXAMPLES = r"""
- name: Say what would be installed
  ansible.builtin.debug:
    msg: "{{ (wanted | gpuserve.sglang.cuda_plan(deployment_host, packages)).packages }}"
"""

RETURN = r"""
_value:
  description:
    - C(errors) and C(warnings) as sentences, C(packages) for APT, C(pin_package), C(preferences) as text, whether this
      is a C(container) whose kernel belongs to someone else, C(missing) names, C(changes) of the driver.
  type: dict
"""


def cuda_plan(wanted: Any, host: Any, packages: Any) -> dict[str, Any]:
    for name, value in (("input", wanted), ("host", host), ("packages", packages)):
        if not isinstance(value, Mapping):
            raise AnsibleFilterError(f"cuda_plan: {name} is a {type(value).__name__}, expected a mapping")
    try:
        return cuda.plan(wanted, host, packages)
    except (KeyError, TypeError, ValueError) as exc:
        raise AnsibleFilterError(f"cuda_plan: {type(exc).__name__}: {exc}; expected the role's variables") from exc


def cuda_differences(host: Any, container: bool = False, hmm_disabled: bool | None = None) -> list[str]:
    """What a reboot would change; see module_utils/cuda."""
    if not isinstance(host, Mapping):
        raise AnsibleFilterError(f"cuda_differences: input is a {type(host).__name__}, expected a mapping")
    return cuda.differences(host, container, hmm_disabled)


class FilterModule:
    """Filters of the role cuda."""

    def filters(self) -> dict[str, Any]:
        return {"cuda_plan": cuda_plan, "cuda_differences": cuda_differences}
