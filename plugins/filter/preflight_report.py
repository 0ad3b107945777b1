"""Filter: hold policy against an inspected host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils.preflight import PreflightError, evaluate, refused

DOCUMENTATION = r"""
name: preflight_report
short_description: Hold a table of checks against an inspected host
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Asks the JMESPath question of each check and compares the answer with what the check expects.
  - Needs the Python package C(jmespath) on the controller.
positional: checks
options:
  _input:
    description:
      - What is known, with the keys C(host) (result of M(gpuserve.sglang.gpu_host_info)), C(plan) and C(want) (the
        role's variables).
    type: dict
    required: true
  checks:
    description: The checks, see the role C(gpu_preflight) for their keys.
    type: list
    elements: dict
    required: true
  waivers:
    description: Checks that may fail, with C(id) and C(reason).
    type: list
    elements: dict
    default: []
  name:
    description: The host's name, for the texts.
    type: str
    default: ""
  report_errors:
    description:
      - What happens when a check or a waiver itself is wrong. V(false) raises an error, V(true) returns a report that
        is not C(ok) and has the reason as C(error).
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Refuse a host whose kernel is too old
  ansible.builtin.debug:
    msg: "{{ ({'host': deployment_host} | gpuserve.sglang.preflight_report(checks)).table }}"
  vars:
    checks:
      - id: kernel
        query: host.kernel
        expect: {matches: '^6[.]'}
        severity: error
"""

RETURN = r"""
_value:
  description:
    - C(ok), C(error) (null unless the policy itself is wrong), the lists C(failures), C(warnings), C(waived)
      (dictionaries with C(id), C(title), C(severity), C(found), C(expected), C(do), C(value), C(message), and
      C(reason) for waived ones), the ids C(passed), C(skipped) and C(waivers_unused), and the texts C(table) and
      C(summary).
  type: dict
"""


def preflight_report(
    context: Any, checks: Any, waivers: Any = (), name: str = "", report_errors: bool = False
) -> dict[str, Any]:
    if not isinstance(context, Mapping):
        raise AnsibleFilterError(f"preflight_report: expected a dictionary, got {type(context).__name__}")
    for option, value in (("checks", checks), ("waivers", waivers)):
        if not isinstance(value, (list, tuple)):
            raise AnsibleFilterError(f"preflight_report: {option}: expected a list, got {type(value).__name__}")
    try:
        return evaluate(context, checks, waivers, str(name))
    except PreflightError as error:
        if report_errors:
            return refused(error)
        raise AnsibleFilterError(f"preflight: {error}") from error


class FilterModule:
    """The filter under its fully qualified name."""

    def filters(self) -> dict[str, Any]:
        return {"preflight_report": preflight_report}
