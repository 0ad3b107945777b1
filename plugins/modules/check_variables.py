#!/usr/bin/python
# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: hold the variables of a host against what the roles know. The work is in the action plugin."""

from __future__ import annotations

DOCUMENTATION = r"""
module: check_variables
short_description: Hold the variables of a host against what the roles know
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Looks at every variable of the host whose name begins like those of a role of the collection, or with C(gpuserve_). One that
    nothing reads is an error and names the nearest that is; so is a value of another type than the role's argument
    specification says, a value that is none of its choices, and a required variable that is not set.
  - Each finding is one line of the message, and all of them are in it.
  - Runs on the controller alone. Nothing is connected to.
  - A value that cannot be computed yet, because it needs facts of the host, is left to its role.
options:
  roles:
    description: Roles whose required variables must be set.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Reads only.
    support: full
  diff_mode:
    description: Changes nothing that could be shown.
    support: none
"""

EXAMPLES = r"""
- name: Check the variables
  gpuserve.sglang.check_variables:
    roles: [deployment]
  tags: [always]

- name: A variable of this site that begins like one of the collection
  gpuserve.sglang.check_variables:
  vars:
    gpuserve_other_variables: [model_registry]
"""

RETURN = r"""
checked:
  description: Number of variables whose values were looked at.
  returned: always
  type: int
  sample: 24
msg:
  description: What is wrong, a line each.
  returned: when something is wrong
  type: str
  sample: deployment_port is "http", expected a whole number. Correct it, or remove deployment_port for its default 30000.
"""

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    """The action plugin of the same name answers; getting here means that it was not found."""
    module = AnsibleModule(
        argument_spec={"roles": {"type": "list", "elements": "str", "default": []}}, supports_check_mode=True
    )
    module.fail_json(
        msg="check_variables runs on the controller, expected its action plugin. Install the whole collection."
    )


if __name__ == "__main__":
    main()
