"""Filter: what will happen to a service so that it follows a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils import switch

DOCUMENTATION = r"""
name: switch_plan
short_description: What will happen to a service so that it follows a plan
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Compares what runs with the plan, and says before anything happens whether the service is started or restarted, why, which
    settings and which release change, how long it will be away, and what a failure puts back.
options:
  _input:
    description: What M(gpuserve.sglang.service_info) returned, asked with the plan and the state directory.
    type: dict
    required: true
  plan:
    description: The plan, as P(gpuserve.sglang.launch_plan#filter) returns it.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Say what will happen
  ansible.builtin.debug:
    msg: "{{ (now | gpuserve.sglang.switch_plan(deployment_plan)).text }}"
"""

RETURN = r"""
_value:
  description:
    - C(action) (V(none), V(start) or V(restart)), C(reasons), C(changes) (settings), C(unit_changes) (settings of
      the unit that differ from the last good deployment's), C(release) (C(from), C(to)),
      C(away_seconds) (expected, or null), C(fallback) (id of the deployment that a failure puts back), C(proven) (whether this
      very deployment is the last that passed its gate), and C(text) with all of it.
  type: dict
"""


def switch_plan(now: Any, plan: Any) -> dict[str, Any]:
    """Think it through, or say what is missing."""
    if not isinstance(now, Mapping) or "reasons" not in now or "active_state" not in now:
        raise AnsibleFilterError("switch_plan: expected what the module service_info returns")
    if not isinstance(plan, Mapping) or not plan.get("process_hash"):
        raise AnsibleFilterError("switch_plan: expected a plan as the filter launch_plan returns it")
    return switch.switch_plan(now, plan)


class FilterModule:
    """The filter under its fully qualified name."""

    def filters(self) -> dict[str, Any]:
        return {"switch_plan": switch_plan}
