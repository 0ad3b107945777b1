#!/usr/bin/python
# Copyright: the gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: one play at a time on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: deployment_lock
short_description: One play at a time on a host
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Takes a lock on the host that names its holder, so that a second play refuses instead of working against the first.
  - A holder that is gone is found at once by a play on the same controller. From another controller its lock ends O(lease)
    seconds after the last sign of life; M(gpuserve.sglang.service_switch) gives one with each step.
options:
  state:
    description: Whether to take the lock or to give it back.
    type: str
    choices: [held, released]
    default: held
  token:
    description: RV(token) of the one who took it. Needed with O(state=released); without one nothing is released.
    type: str
  lease:
    description: Seconds that the lock holds without being renewed.
    type: float
    default: 1800
  unit:
    description: Unit whose maintenance mark is cleared with O(state=released).
    type: str
  path:
    description: The lock file.
    type: path
    default: /run/gpuserve-sglang.lock
  _holder:
    description: Internal, set by the action plugin. Who takes the lock.
    type: dict
  _dead:
    description: Internal, set by the action plugin. Token of a holder that is known to be gone.
    type: str
attributes:
  check_mode:
    description: Can run in check mode and return changed status prediction without modifying target.
    details: The lock is not taken, since nothing will be changed.
    support: full
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    details: A lock is no part of the host's configuration.
    support: none
  action:
    description: Indicates this has a corresponding action plugin so some parts of the options can be executed on the controller.
    details: Only the controller knows whether a holder of its own still lives.
    support: full
  async:
    description: Supports being used with the C(async) keyword.
    support: none
  platform:
    description: Target OS/families that can be operated against.
    platforms: linux
    support: full
"""

EXAMPLES = r"""
- name: Let no other play work on this host
  gpuserve.sglang.deployment_lock:
  register: lock

- name: Give the lock back
  gpuserve.sglang.deployment_lock:
    state: released
    token: "{{ lock.token }}"
"""

RETURN = r"""
held:
  description: Whether the lock is held by the caller now.
  type: bool
  returned: always
token:
  description: What the lock is released and renewed with; empty when it is not held.
  type: str
  returned: always
broken:
  description: The holder whose lock was taken over, because it is gone or gave no sign of life; empty otherwise.
  type: dict
  returned: always
holder:
  description: The holder that keeps the caller out; empty otherwise.
  type: dict
  returned: always
"""

import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils import maintenance
from ansible_collections.gpuserve.sglang.plugins.module_utils.lock import KEYS, LEASE, PATH, Lock


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "released"], "default": "held"},
            "token": {"type": "str", "no_log": False},
            "lease": {"type": "float", "default": LEASE},
            "unit": {"type": "str"},
            "path": {"type": "path", "default": str(PATH)},
            "_holder": {"type": "dict"},
            "_dead": {"type": "str"},
        },
        supports_check_mode=True,
    )
    given = module.params
    result = {"changed": False, "held": False, "token": "", "broken": {}, "holder": {}}
    if module.check_mode:
        module.exit_json(**result)
    lock = Lock(Path(given["path"]))
    try:
        if given["state"] == "released":
            lock.release(given["token"] or "")
            if given["unit"] and given["token"]:
                maintenance.clear(given["unit"])
        else:
            who = given["_holder"] or {}
            if not all(who.get(key) for key in KEYS):
                module.fail_json(msg="_holder is missing; the action plugin sets it: use the module by its full name")
            taken, found = lock.take(who, given["lease"], time.time(), given["_dead"] or "")
            result |= {
                "held": taken,
                "token": who["token"] if taken else "",
                "broken": found if taken else {},
                "holder": {} if taken else found,
            }
    except OSError as error:
        module.fail_json(msg=f"the lock {given['path']} cannot be used: {error}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
