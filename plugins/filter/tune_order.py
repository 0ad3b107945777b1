"""Filter: which profiles are tried, in which order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils import tuning

DOCUMENTATION = r"""
name: tune_order
short_description: Which profiles are tried, in which order
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Leaves out what the planner refuses and what starts the same process as another profile, and shuffles the rest anew for each
    round.
positional: rounds, seed
options:
  _input:
    description: The plans of all wanted profiles, by name; a refused one has C(error).
    type: dict
    required: true
  rounds:
    description: How often each profile is started and measured.
    type: int
    default: 1
  seed:
    description: Fixes the order.
    type: int
    default: 1
"""

EXAMPLES = r"""
- name: Show the order
  ansible.builtin.debug:
    msg: "{{ (plans | gpuserve.sglang.tune_order(2, 1)).steps }}"
"""

RETURN = r"""
_value:
  description: C(steps) (list of C(round) and C(profile)) and C(refused) (reason by profile).
  type: dict
"""


def tune_order(plans: Any, rounds: int = 1, seed: int = 1) -> dict[str, Any]:
    if not isinstance(plans, Mapping):
        raise AnsibleFilterError(f"tune_order: expected a dictionary of plans, got {type(plans).__name__}")
    able, refused = tuning.candidates(plans)
    return {"steps": tuning.order(list(able), int(rounds), int(seed)), "refused": refused}


class FilterModule:
    """The filter under its fully qualified name."""

    def filters(self) -> dict[str, Any]:
        return {"tune_order": tune_order}
