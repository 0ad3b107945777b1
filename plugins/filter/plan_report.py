"""Filter: a plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils import plan_report as report

DOCUMENTATION = r"""
name: plan_report
short_description: A plan as text for a terminal
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Lists every setting with its value, reason and source, the memory budget, warnings, deviations from the documented box,
    the command, and whether a restart would follow.
options:
  _input:
    description: A plan, as P(gpuserve.sglang.launch_plan#filter) returns it.
    type: dict
    required: true
  name:
    description: Name of the host, for the heading.
    type: str
    default: ""
  reasons:
    description: The C(reasons) of M(gpuserve.sglang.service_info); not given when nothing was compared.
    type: list
    elements: str
  unit:
    description: C(last_good.unit) of M(gpuserve.sglang.service_info), whose differences from the plan's are listed.
    type: dict
"""

EXAMPLES = r"""
- name: Show the plan
  ansible.builtin.debug:
    msg: "{{ deployment_plan | gpuserve.sglang.plan_report(name=inventory_hostname) }}"
"""

RETURN = r"""
_value:
  description: The text, of several lines.
  type: str
"""


def plan_report(
    plan: Any, name: str = "", reasons: Sequence[str] | None = None, unit: Mapping[str, Any] | None = None
) -> str:
    """Render the plan, or say what is no plan."""
    if not isinstance(plan, Mapping) or "notes" not in plan:
        raise AnsibleFilterError("plan_report: expected a plan as the filter launch_plan returns it")
    return report.plan_report(plan, name, reasons, unit)


class FilterModule:
    """The filter under its fully qualified name."""

    def filters(self) -> dict[str, Any]:
        return {"plan_report": plan_report}
