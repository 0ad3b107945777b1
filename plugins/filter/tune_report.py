"""Filters: tuning's order, candidates and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils import tuning

DOCUMENTATION = r"""
name: tune_report
short_description: What the measurements of several profiles say
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Merges the rounds of each profile, ranks them for each objective and says which to take. Among profiles that the noise
    cannot tell apart it prefers the one that serves already, then the least risky.
positional: plans
options:
  _input:
    description: Results of M(gpuserve.sglang.benchmark_run), in the order of the run.
    type: list
    elements: dict
    required: true
  plans:
    description: The plans of all wanted profiles, by name; a refused one has C(error).
    type: dict
    required: true
  failures:
    description: Profiles that failed in a round, with the reason. They are never recommended, whatever was measured before.
    type: dict
    default: {}
  serving:
    description: The profile that serves.
    type: str
    default: ""
  objective:
    description: What the profile in RV(_value) is chosen for.
    type: str
    choices: [single, throughput, both]
    default: both
  single:
    description: The level of the single stream.
    type: int
    default: 1
  concurrency:
    description: The level of the throughput.
    type: int
    default: 30
  host:
    description: Name of the host, for the file.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Show what was found
  ansible.builtin.debug:
    msg: "{{ (results | gpuserve.sglang.tune_report(plans, serving='baseline')).text }}"
"""

RETURN = r"""
_value:
  description:
    - C(profile) (null when none can be recommended), C(recommended) (by objective, with C(profile) and C(why)), C(measured) (one
      merged result for each profile, with C(failure) for one that failed in another round), C(refused) (profiles that are not
      recommended, with the reason), C(risks), C(text) (for people) and C(file) (variables for C(-e @file), empty
      without a profile).
  type: dict
"""


def tune_report(
    results: Any,
    plans: Any,
    failures: Any = None,
    serving: str = "",
    objective: str = tuning.BOTH,
    single: int = 1,
    concurrency: int = 30,
    host: str = "",
) -> dict[str, Any]:
    if not isinstance(results, Sequence) or not isinstance(plans, Mapping):
        raise AnsibleFilterError("tune_report: expected a list of results and a dictionary of plans")
    if objective not in tuning.OBJECTIVES:
        raise AnsibleFilterError(
            f"tune_report: objective is {objective!r}, expected one of {', '.join(tuning.OBJECTIVES)}"
        )
    levels = {"single": int(single), "concurrency": int(concurrency)}
    found = tuning.summary(results, plans, failures or {}, str(serving), objective, **levels)
    when = str(results[0]["when"]) if results else ""
    file = tuning.result_file(found, str(host), when, **levels) if found["profile"] else ""
    return {**found, "text": "\n".join(tuning.lines(found, **levels)), "file": file}


class FilterModule:
    """The filter under its fully qualified name."""

    def filters(self) -> dict[str, Any]:
        return {"tune_report": tune_report}
