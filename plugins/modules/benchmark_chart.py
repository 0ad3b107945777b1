#!/usr/bin/python
# Copyright: the gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: draw benchmark results."""

from __future__ import annotations

DOCUMENTATION = r"""
module: benchmark_chart
short_description: Draw benchmark results
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Draws one result, or several profiles against each other, as SVG and as PNG. Meant to run on the controller
    (C(delegate_to=localhost)), because it needs matplotlib.
requirements:
  - matplotlib
options:
  prefix:
    description: Path of the files without their ending. The folder must be there. Without it nothing is drawn, and the module
      only says whether it could.
    type: path
  result:
    description: The result to draw, as M(gpuserve.sglang.benchmark_run) returns it.
    type: dict
  previous:
    description: An earlier result, drawn with O(result) when both were measured in the same way.
    type: dict
  candidates:
    description: Results of several profiles to draw against each other, instead of O(result).
    type: list
    elements: dict
    default: []
  host:
    description: Name of the host, for the title.
    type: str
    default: ""
  record:
    description: Figures on record to draw with O(result), as the filter P(gpuserve.sglang.benchmark_report#filter) returns them.
    type: dict
attributes:
  check_mode:
    description: Draws nothing.
    support: full
  diff_mode:
    description: Pictures have no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Draw what was measured
  gpuserve.sglang.benchmark_chart:
    prefix: /tmp/kimi-1
    result: "{{ measured.result }}"
    previous: "{{ measured.previous }}"
  delegate_to: localhost
  become: false
"""

RETURN = r"""
paths:
  description: The files, SVG first.
  returned: always
  type: list
  elements: str
"""

import importlib.util
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule, missing_required_lib
from ansible_collections.gpuserve.sglang.plugins.module_utils.chart import draw, draw_candidates


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "prefix": {"type": "path"},
            "result": {"type": "dict"},
            "previous": {"type": "dict"},
            "candidates": {"type": "list", "elements": "dict", "default": []},
            "host": {"type": "str", "default": ""},
            "record": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    if importlib.util.find_spec("matplotlib") is None:
        hint = "Install requirements.txt on the controller, or go without charts (benchmark_charts: false)."
        module.fail_json(msg=f"{missing_required_lib('matplotlib')}. {hint}")
    given = module.params
    paths: list[str] = []
    if given["prefix"] and not module.check_mode:
        prefix = Path(given["prefix"])
        if given["candidates"]:
            paths = draw_candidates(prefix, given["candidates"], given["host"])
        elif given["result"]:
            paths = draw(prefix, given["result"], given["previous"], given["record"], given["host"])
    module.exit_json(changed=bool(paths), paths=paths)


if __name__ == "__main__":
    main()
