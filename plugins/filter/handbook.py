"""Filter: what the handbook shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils.handbook import view

DOCUMENTATION = r"""
name: handbook
short_description: What the handbook shows, as tables of text
version_added: 0.2.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Makes of plan, host, manifest, patch series, measurements and report what the template of the role C(runbook) lays out.
  - A number of a benchmark is the record's, a measured one, or C(-).
options:
  _input:
    description: A plan, as P(gpuserve.sglang.launch_plan#filter) returns it.
    type: dict
    required: true
  host:
    description: The host, as M(gpuserve.sglang.gpu_host_info) returns it.
    type: dict
    required: true
  name:
    description: Name of the host.
    type: str
    default: ""
  manifest:
    description: The manifest of the release; empty when there is none.
    type: dict
  series:
    description: The definitions of the patch series that the release carries (content of each series.yml).
    type: list
    elements: dict
    default: []
  measured:
    description: The last benchmark (C(benchmarks/latest.json) below the state directory); empty when there is none.
    type: dict
  last_start:
    description: The record of the last start (C(last-start.json) below the state directory).
    type: dict
  report:
    description: The preflight's report, as P(gpuserve.sglang.preflight_report#filter) returns it; empty when it did not run.
    type: dict
  path:
    description: Path of the handbook on the host, which is held against the documented one.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: The hardware, as the handbook shows it
  ansible.builtin.debug:
    msg: "{{ (deployment_plan | gpuserve.sglang.handbook(host=deployment_host)).hardware }}"
"""

RETURN = r"""
_value:
  description: Tables as lists of rows of text, and single texts; see the template C(production.md.j2) of the role C(runbook).
  type: dict
"""


def handbook(
    plan: Any,
    host: Any = None,
    name: str = "",
    manifest: Any = None,
    series: Sequence[Mapping[str, Any]] = (),
    measured: Any = None,
    last_start: Any = None,
    report: Any = None,
    path: str = "",
) -> dict[str, Any]:
    """Make the view, or say what is no plan."""
    if not isinstance(plan, Mapping) or "notes" not in plan:
        raise AnsibleFilterError("handbook: expected a plan as the filter launch_plan returns it")
    return view(
        plan, host or {}, name, manifest or {}, series, measured or {}, last_start or {}, report or {}, str(path)
    )


class FilterModule:
    """The filter under its fully qualified name."""

    def filters(self) -> dict[str, Any]:
        return {"handbook": handbook}
