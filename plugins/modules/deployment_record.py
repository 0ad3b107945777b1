#!/usr/bin/python
# Copyright: the gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: remember deployments that passed their gate."""

from __future__ import annotations

DOCUMENTATION = r"""
module: deployment_record
short_description: Remember deployments that passed their gate
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Keeps unit file and plan of deployments that served, so that the last one can be put back without a download or a build.
options:
  state_dir:
    description: State directory of the service.
    type: path
    required: true
  unit_file:
    description: Path of the unit file to record. Without it nothing is recorded and the module only reads.
    type: path
  plan:
    description: The plan that the unit was made from. Needed with O(unit_file).
    type: dict
attributes:
  check_mode:
    description: Says whether something would be recorded.
    support: full
  diff_mode:
    description: The record is a copy of what is shown elsewhere.
    support: none
  idempotence:
    description: A deployment that is recorded already is left alone.
    support: full
"""

EXAMPLES = r"""
- name: What would a rollback put back
  gpuserve.sglang.deployment_record:
    state_dir: /var/lib/sglang-kimi
  register: record
"""

RETURN = r"""
last_good:
  description: The last deployment that passed its gate, as C(id), C(unit) (text) and C(plan); null without one.
  type: dict
  returned: always
previous_good:
  description: The one before it.
  type: dict
  returned: always
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.record import (
    LAST,
    PREVIOUS,
    RecordError,
    Records,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "unit_file": {"type": "path"},
            "plan": {"type": "dict"},
        },
        required_by={"unit_file": ["plan"]},
        supports_check_mode=True,
    )
    records, changed = Records(Path(module.params["state_dir"])), False
    try:
        if module.params["unit_file"]:
            unit = Path(module.params["unit_file"]).read_text()
            changed = not records.is_recorded(unit, module.params["plan"])
            if changed and not module.check_mode:
                records.keep(unit, module.params["plan"])
        result = {"last_good": records.read(LAST), "previous_good": records.read(PREVIOUS)}
    except (RecordError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=changed, **result)


if __name__ == "__main__":
    main()
