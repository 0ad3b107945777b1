#!/usr/bin/python
# Copyright: the gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: what a service runs now, and which plan it was started with."""

from __future__ import annotations

DOCUMENTATION = r"""
module: service_info
short_description: What a service runs now, and which plan it was started with
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Reads the unit from systemd and its main process from C(/proc). Changes nothing.
options:
  unit:
    description: Name of the unit.
    type: str
    default: sglang-kimi.service
  newer:
    description: Paths to compare with the start of the process.
    type: list
    elements: path
    default: []
attributes:
  check_mode:
    description: Reads in check mode as well.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: What serves now
  gpuserve.sglang.service_info:
    unit: sglang-kimi.service
  register: serving
"""

RETURN = r"""
exists:
  description: Whether systemd knows the unit.
  type: bool
  returned: always
active_state:
  description: State of the unit, such as V(active), V(activating), V(inactive) or V(failed).
  type: str
  returned: always
sub_state:
  description: Sub-state of the unit, such as V(running) or V(auto-restart).
  type: str
  returned: always
main_pid:
  description: Process id of the main process; 0 when there is none.
  type: int
  returned: always
invocation_id:
  description: Id of this run of the unit.
  type: str
  returned: always
n_restarts:
  description: How often systemd restarted the unit by itself.
  type: int
  returned: always
started:
  description: Start of the main process in seconds since the epoch.
  type: float
  returned: always, null without a process
command:
  description: Command line of the main process, without secrets.
  type: list
  elements: str
  returned: always
plan_hash:
  description: Hash of the plan that the process was started with; empty when unknown.
  type: str
  returned: always
newer:
  description: Those of O(newer) that changed after the process started.
  type: list
  elements: str
  returned: always
error:
  description: Why systemd could not be asked; empty when it could.
  type: str
  returned: always
unit:
  description: The unit that was asked for.
  type: str
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible_collections.gpuserve.sglang.plugins.module_utils.service import read_service  # noqa: E402


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "default": "sglang-kimi.service"},
            "newer": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **read_service(module.params["unit"], module.params["newer"]))


if __name__ == "__main__":
    main()
