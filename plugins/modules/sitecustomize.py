#!/usr/bin/python
# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Manage the environment block of an interpreter's sitecustomize.py; the work is in module_utils/sitecustomize.py."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sitecustomize
short_description: Default environment variables for every process of a Python interpreter
version_added: "0.1.0"
author:
  - The gpuserve.sglang authors (@gpuserve)
description:
  - Keeps one delimited block of C(os.environ.setdefault) lines in the C(sitecustomize.py) that the interpreter really
    imports. The interpreter itself is asked for that file, so virtual environments and Debian's link into C(/etc) are
    followed. What is outside the block (apport's hook, hand edits) stays byte for byte.
  - Unlike the environment of a unit, the file runs again in every child that the engine spawns. Variables that are
    already set win.
  - The result is compiled and run in the interpreter before it is written, in check mode too. A file with broken syntax
    is refused and left as it is. After writing the interpreter is asked for its environment; when the answer is not the
    expected one the old content is put back.
options:
  interpreter:
    description:
      - The Python interpreter that the engine runs with, an absolute path or a name in C(PATH).
      - One inside a virtual environment imports the file of its base interpreter when that has one (Debian and Ubuntu);
        otherwise the block goes into the virtual environment.
    type: str
    default: /usr/bin/python3
  variables:
    description:
      - Names and values. An empty dictionary is the same as O(state=absent).
    type: dict
    default: {}
  interpreter_environment:
    description:
      - Environment variables the engine is started with that change what is imported, such as C(PYTHONPATH).
    type: dict
    default: {}
  state:
    description:
      - V(absent) takes the block out. A file that was created for the block is removed when nothing else is in it.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    description: Can run in check mode and return what it would have returned.
    support: full
    details: When the interpreter does not exist yet the file is unknown and RV(path) is empty.
  diff_mode:
    description: Returns details on what has changed in diff mode.
    support: full
  idempotent:
    description: A second run changes nothing.
    support: full
  platform:
    description: The systems it runs on.
    platforms: posix
    support: full
"""

EXAMPLES = r"""
- name: NCCL for a PCIe box without NVLink
  gpuserve.sglang.sitecustomize:
    interpreter: /root/ml-env/bin/python
    variables:
      NCCL_DEBUG: INFO
      NCCL_P2P_LEVEL: PHB

- name: Take it back
  gpuserve.sglang.sitecustomize:
    interpreter: /root/ml-env/bin/python
    state: absent
"""

RETURN = r"""
path:
  description:
    - The file that the interpreter imports, as it finds it; empty when there is no such interpreter.
    - Ansible adds owner, group, mode, size and state of every returned path by itself; they are no part of the contract.
  returned: always
  type: str
  sample: /usr/lib/python3.12/sitecustomize.py
real_path:
  description: The same file with links followed, the one that is written.
  returned: always
  type: str
  sample: /etc/python3.12/sitecustomize.py
interpreter:
  description: The interpreter as found.
  returned: always
  type: str
  sample: /usr/bin/python3
version:
  description: Its version; empty when there is no such interpreter.
  returned: always
  type: str
  sample: 3.12.3
block:
  description: The block with its markers; empty when there is none.
  returned: always
  type: str
environment:
  description:
    - The interpreter's own answer, limited to O(variables), to what the old block set, and to names with C(NCCL_).
    - In check mode what it would be.
  returned: always
  type: dict
  sample: {NCCL_DEBUG: INFO, NCCL_P2P_LEVEL: PHB}
created:
  description: Whether the file was made by this run.
  returned: always
  type: bool
removed:
  description: Whether the file was removed by this run.
  returned: always
  type: bool
conflicts:
  description: Variables that a line outside the block sets to another value. Each is a warning as well.
  returned: always
  type: list
  elements: dict
  contains:
    name:
      description: The variable.
      type: str
    wanted:
      description: The value in O(variables).
      type: str
    effective:
      description: The value the interpreter has.
      type: str
    line:
      description: The line that sets it; 0 when it is not a plain assignment.
      type: int
diff:
  description: Content before and after.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.sitecustomize import SitecustomizeError, apply, normalize


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "interpreter": {"type": "str", "default": "/usr/bin/python3"},
            "variables": {"type": "dict", "default": {}},
            "interpreter_environment": {"type": "dict", "default": {}},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    try:
        result = apply(
            module.params["interpreter"],
            module.params["variables"],
            module.params["state"],
            normalize(module.params["interpreter_environment"]),
            check=module.check_mode,
        )
    except SitecustomizeError as error:
        module.fail_json(msg=str(error))
    for warning in result.pop("warnings"):
        module.warn(warning)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
