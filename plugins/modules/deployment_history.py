#!/usr/bin/python
# Copyright: the gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: keep the history of a server's deployments."""

from __future__ import annotations

DOCUMENTATION = r"""
module: deployment_history
short_description: Keep the history of a server's deployments
version_added: 0.2.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Keeps a Markdown file that begins with what is on record of the documented box and grows by one dated entry for each
    deployment that served, with what it changed against the one before, and for each rollback of the operator.
  - A benchmark of the present plan is added to the last entry. What people write between the entries stays.
options:
  path:
    description: The file.
    type: path
    required: true
  plan:
    description: The plan that serves. One that is not on record as the last good deployment is not entered.
    type: dict
    required: true
  state_dir:
    description: State directory of the service, with the record of its deployments, its last start and its benchmarks.
    type: path
    required: true
  driver:
    description: Version of the loaded NVIDIA driver.
    type: str
    default: ""
  rollback:
    description:
      - The operator went back to O(plan). Gets an entry of its own, once for each start; a file that does not exist is not begun.
    type: dict
    suboptions:
      left:
        description: Plan of the deployment that was left; empty when what ran was not on record as good.
        type: dict
      found:
        description: What was found of such a one.
        type: list
        elements: str
      reason:
        description: Why, in the operator's words.
        type: str
        default: ""
attributes:
  check_mode:
    description: Says whether the file would change.
    support: full
  diff_mode:
    description: Shows the lines that come.
    support: full
  idempotence:
    description: The same deployment is entered once.
    support: full
"""

EXAMPLES = r"""
- name: Enter the deployment into the history
  gpuserve.sglang.deployment_history:
    path: /var/lib/sglang-kimi/eagle-fast-verify.md
    state_dir: /var/lib/sglang-kimi
    plan: "{{ deployment_plan }}"

- name: Enter that the operator went back
  gpuserve.sglang.deployment_history:
    path: /var/lib/sglang-kimi/eagle-fast-verify.md
    state_dir: /var/lib/sglang-kimi
    plan: "{{ record.last_good.plan }}"
    rollback:
      left: "{{ record.previous_good.plan }}"
      reason: slower at 30 requests
"""

RETURN = r"""
entries:
  description: Number of entries in the file, deployments and rollbacks.
  type: int
  returned: always
"""

import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.history import updated
from ansible_collections.gpuserve.sglang.plugins.module_utils.record import read_text, write_document


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "plan": {"type": "dict", "required": True},
            "state_dir": {"type": "path", "required": True},
            "driver": {"type": "str", "default": ""},
            "rollback": {
                "type": "dict",
                "options": {
                    "left": {"type": "dict"},
                    "found": {"type": "list", "elements": "str"},
                    "reason": {"type": "str", "default": ""},
                },
            },
        },
        supports_check_mode=True,
    )
    path = Path(module.params["path"])
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    try:
        old = read_text(path)
        given = module.params
        new = updated(old, given["plan"], Path(given["state_dir"]), when, given["driver"], given["rollback"])
        changed = new != old
        if changed and not module.check_mode:
            write_document(path, new)
    except (OSError, UnicodeDecodeError) as error:
        module.fail_json(
            msg=f"{path} cannot be kept ({error}), expected a text file, no link, in a folder that exists. Move it away, or set "
            "runbook_history_path."
        )
    header = str(path)
    module.exit_json(
        changed=changed,
        entries=new.count("<!-- deployment: "),
        diff={"before": old, "after": new, "before_header": header, "after_header": header},
    )


if __name__ == "__main__":
    main()
