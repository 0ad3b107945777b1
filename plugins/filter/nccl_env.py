"""Filter: the NCCL variables that are right for a topology."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils import plan

DOCUMENTATION = r"""
name: nccl_env
short_description: NCCL variables that are right for a topology
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - On PCIe without NVLink these are the values of the documented box, without which its single stream falls from about 89 to
    about 63 tok/s. On NVLink there are none, since the same values made a 128 MiB all-reduce 3.7 times slower.
options:
  _input:
    description: The topology, V(pcie), V(nvlink) or V(none).
    type: str
    required: true
"""

EXAMPLES = r"""
- name: What a PCIe box gets
  ansible.builtin.debug:
    msg: "{{ 'pcie' | gpuserve.sglang.nccl_env }}"
"""

RETURN = r"""
_value:
  description: Names and values.
  type: dict
"""

TOPOLOGIES = ("pcie", "nvlink", "none")


def nccl_env(topology: Any) -> dict[str, str]:
    """The variables, or an error for what is no topology."""
    if topology not in TOPOLOGIES:
        raise AnsibleFilterError(f"nccl_env: found {topology!r}, expected one of {', '.join(TOPOLOGIES)}")
    return plan.nccl_env(topology)


class FilterModule:
    """The filter under its fully qualified name."""

    def filters(self) -> dict[str, Any]:
        return {"nccl_env": nccl_env}
