#!/usr/bin/python
# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0

"""Keep a folder of small text files; the thinking is in module_utils/text_files.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: text_files
short_description: Keep a folder of small text files
version_added: 0.1.0
description:
  - Writes many small text files in one go, where a loop of C(copy) would cost a connection each.
  - Each file is replaced in one step, so that a program which starts meanwhile reads the old text or the new one.
options:
  path:
    description: Folder of the files; it is made when it is not there.
    type: path
    required: true
  files:
    description: Text of each file by its path below O(path).
    type: dict
    required: true
  exclusive:
    description:
      - Whether files that are not named are removed; what Python compiled from them (C(__pycache__)) stays, unless somebody else
        can write to it.
    type: bool
    default: false
  own_directory:
    description:
      - Whether O(path) is this collection's alone, so that O(path) and the folders of the files get the user of the task (root)
        as owner and O(directory_mode), also when they are there already. With O(exclusive=true) that goes for every folder below.
      - As O(exclusive) when it is not given.
    type: bool
  mode:
    description: Permissions of the files, in octal digits. Those of another owner, or that others can write to, are written anew.
    type: str
    default: "0644"
  directory_mode:
    description: Permissions of folders that are made, and with O(own_directory) of those that are there, in octal digits.
    type: str
    default: "0755"
attributes:
  check_mode:
    description: Says what would be written and removed.
    support: full
  diff_mode:
    description: Shows the text of every file that changes.
    support: full
  idempotence:
    description: Files that are as wanted are left alone.
    support: full
author:
  - The gpuserve.sglang authors (@gpuserve)
"""

EXAMPLES = r"""
- name: Write the settings of the programs on the host
  gpuserve.sglang.text_files:
    path: /etc/gpuserve-sglang
    files:
      sglang-kimi.json: "{{ settings | to_nice_json }}\n"
"""

RETURN = r"""
written:
  description: Files that were written, or would be.
  returned: always
  type: list
  elements: str
removed:
  description: Files that were removed, or would be.
  returned: always
  type: list
  elements: str
repaired:
  description: Folders that got owner and permissions, or would.
  returned: always
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.text_files import TextFilesError, apply, compare


def main() -> None:
    """Arguments in, dictionary out."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "files": {"type": "dict", "required": True},
            "exclusive": {"type": "bool", "default": False},
            "own_directory": {"type": "bool"},
            "mode": {"type": "str", "default": "0644"},
            "directory_mode": {"type": "str", "default": "0755"},
        },
        supports_check_mode=True,
    )
    folder, files = Path(module.params["path"]), module.params["files"]
    modes = []
    for name in ("mode", "directory_mode"):
        try:
            modes.append(int(module.params[name], 8))
        except ValueError:
            module.fail_json(msg=f"{name} is {module.params[name]!r}, expected octal digits in quotes, such as '0644'")
    for name, text in files.items():
        if not isinstance(text, str):
            module.fail_json(
                msg=f"files.{name} is {type(text).__name__}, expected text; use the filter to_nice_json for data"
            )
    try:
        own, exclusive = module.params["own_directory"], module.params["exclusive"]
        difference = compare(folder, files, modes[0], exclusive, modes[1], own)
        if difference and not module.check_mode:
            apply(folder, files, *modes, difference)
    except (TextFilesError, OSError) as error:
        module.fail_json(msg=str(error))
    diff = [
        {
            "before_header": str(folder / name),
            "after_header": str(folder / name),
            "before": difference.before.get(name, ""),
            "after": files.get(name, ""),
        }
        for name in [*difference.write, *difference.remove]
    ]
    written, removed, repaired = difference.write, difference.remove, difference.repair
    module.exit_json(changed=bool(difference), written=written, removed=removed, repaired=repaired, diff=diff)


if __name__ == "__main__":
    main()
