"""Filter: what host_verify found, as table, document, JUnit and metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils import verify_report as report

DOCUMENTATION = r"""
name: verify_report
short_description: What host_verify found, for people and for machines
version_added: 0.2.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Turns the result of M(gpuserve.sglang.host_verify) into the forms in which it is read.
options:
  _input:
    description: The result of M(gpuserve.sglang.host_verify).
    type: dict
    required: true
  name:
    description: Name of the host, for the texts.
    type: str
    default: ""
  unit:
    description: Name of the unit, the label of the metrics.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Show it
  ansible.builtin.debug:
    msg: "{{ (verified | gpuserve.sglang.verify_report(name=inventory_hostname)).table }}"
"""

RETURN = r"""
_value:
  description: >-
    C(table) and C(summary) (text for people), C(problems) (a line for each check that failed or could not be made),
    C(document) (for JSON, with C(host), C(ok), C(failures), C(warnings), C(unknown), C(checks)),
    C(junit) (XML) and C(metrics) (the text file of a node exporter).
  type: dict
"""


def verify_report(result: Any, name: str = "", unit: str = "") -> dict[str, Any]:
    """Render the result, or say what is none."""
    if not isinstance(result, Mapping) or "checks" not in result:
        raise AnsibleFilterError("verify_report: expected what the module host_verify returns")
    return {
        "table": report.table(result, name),
        "summary": report.summary(result, name),
        "problems": report.problems(result),
        "document": report.document(result, name),
        "junit": report.junit(result, name),
        "metrics": report.metrics(result, unit, time.time()),
    }


class FilterModule:
    """The filter under its fully qualified name."""

    def filters(self) -> dict[str, Any]:
        return {"verify_report": verify_report}
