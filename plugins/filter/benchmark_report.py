"""Filter: show a benchmark result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils import benchmark
from ansible_collections.gpuserve.sglang.plugins.module_utils.documented import record

DOCUMENTATION = r"""
name: benchmark_report
short_description: Show a benchmark result
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Makes the table of a result of M(gpuserve.sglang.benchmark_run), beside the figures on record for its profile and those of an
    earlier run. A change counts only outside the noise of both runs, and is C(other method) where they were not measured alike.
positional: previous
options:
  _input:
    description: The result, as C(<state>/benchmarks/latest.json) holds it.
    type: dict
    required: true
  previous:
    description: An earlier result.
    type: dict
"""

EXAMPLES = r"""
- name: Show what was measured
  ansible.builtin.debug:
    msg: "{{ (measured.result | gpuserve.sglang.benchmark_report(measured.previous)).text }}"
"""

RETURN = r"""
_value:
  description:
    - C(text) (for people), C(markdown) (the table), C(remarks) (what a reader must know), C(how) (the method in one
      sentence), C(changes) (by level, with C(change) and C(verdict)), C(asked) and C(failed) (numbers of requests) and C(record)
      (the benchmark table of the documented box).
  type: dict
"""


def benchmark_report(result: Any, previous: Any = None) -> dict[str, Any]:
    if not isinstance(result, Mapping) or result.get("schema") != benchmark.SCHEMA:
        raise AnsibleFilterError(
            f"benchmark_report: expected a benchmark result of schema {benchmark.SCHEMA}, got {type(result).__name__}"
        )
    before = previous if isinstance(previous, Mapping) and previous.get("schema") == benchmark.SCHEMA else None
    documented = record()["benchmark"]
    return {
        "text": "\n".join(benchmark.report(result, before, documented)),
        "markdown": benchmark.markdown(benchmark.table(result, before, documented)),
        "remarks": benchmark.remarks(result),
        "how": benchmark.how(result),
        "changes": benchmark.compare(result, before),
        "asked": sum(level["requests"] for level in result["levels"]),
        "failed": sum(level["failed"] for level in result["levels"]),
        "record": documented,
    }


class FilterModule:
    """The filter under its fully qualified name."""

    def filters(self) -> dict[str, Any]:
        return {"benchmark_report": benchmark_report}
