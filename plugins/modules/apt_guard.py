#!/usr/bin/python
# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Keep one vendor repository in order; the work is in module_utils/apt_guard.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_guard
short_description: One entry, no stray keys and the right holds for one vendor's APT repository
version_added: 0.1.0
author:
  - The gpuserve.sglang authors (@gpuserve)
description:
  - Finds a repository under all its spellings in APT's source files (both styles) and leaves exactly one entry, the one
    that a package brought if there is one. Two entries with different C(Signed-By) make APT refuse to work at all.
  - Takes the vendor's keys out of where APT trusts a key for every repository, and its retired keys out everywhere.
    Files that belong to a package are left alone.
  - Puts packages on hold and takes them off, many in one run.
  - Without options it changes nothing and returns the installed packages.
options:
  uri:
    description: Address of the repository. Entries and keys are looked at only when it is given.
    type: str
    default: ''
  keyring:
    description: Path of the vendor's keyring, the C(Signed-By) that the one entry must have.
    type: str
    default: ''
  pattern:
    description: Regular expression for the addresses under which the same vendor's packages are known elsewhere.
    type: str
    default: '$^'
  retired_keys:
    description: Fingerprints of keys that the vendor has withdrawn.
    type: list
    elements: str
    default: []
  hold:
    description: Name patterns (as of a shell) of installed packages that are to be on hold.
    type: list
    elements: str
    default: []
  unhold:
    description: Name patterns of packages that must not be on hold. O(hold) is stronger.
    type: list
    elements: str
    default: []
  report:
    description: Name patterns of the packages in RV(packages).
    type: list
    elements: str
    default: ['*']
attributes:
  check_mode:
    description: Returns what would have changed.
    support: full
  diff_mode:
    description: Shows the source files before and after; of key files the sizes.
    support: full
  platform:
    description: The systems it runs on.
    support: full
    platforms: debian
"""

EXAMPLES = r"""
- name: One entry for NVIDIA's repository
  gpuserve.sglang.apt_guard:
    uri: https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64/
    keyring: /usr/share/keyrings/cuda-archive-keyring.gpg
    pattern: /compute/cuda/repos/
    retired_keys: [AE09FE4BBD223A84B2CCFCE3F60F4B3D7FA2AF80]
    unhold: ['nvidia-*', 'libnvidia-*']
"""

RETURN = r"""
configured:
  description: Whether the one entry was there before.
  returned: always
  type: bool
sources_changed:
  description: Whether an entry was added or removed, so that APT's lists are out of date.
  returned: always
  type: bool
added:
  description: The entry that was written, if any.
  returned: always
  type: list
  elements: str
entries_removed:
  description: Entries that were taken out, with file, line and C(Signed-By).
  returned: always
  type: list
  elements: str
keys_removed:
  description: Keys that were taken out, with file and fingerprint.
  returned: always
  type: list
  elements: str
held:
  description: Packages put on hold.
  returned: always
  type: list
  elements: str
released:
  description: Packages taken off hold.
  returned: always
  type: list
  elements: str
packages:
  description: Installed packages, name to version.
  returned: always
  type: dict
residual:
  description: Removed packages whose configuration is still there, of those that O(report) names.
  returned: always
  type: list
  elements: str
notes:
  description: What was left alone and why.
  returned: always
  type: list
  elements: str
"""

import re

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils import apt_guard


def main() -> None:
    """Entry point."""
    strings = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "uri": {"type": "str", "default": ""},
            "keyring": {"type": "str", "default": "", "no_log": False},
            "pattern": {"type": "str", "default": "$^"},
            "retired_keys": {**strings, "no_log": False},
            "hold": strings,
            "unhold": strings,
            "report": {**strings, "default": ["*"]},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        wanted = apt_guard.Wanted(
            uri=given["uri"],
            keyring=given["keyring"],
            pattern=given["pattern"],
            retired_keys=tuple(given["retired_keys"]),
            hold=tuple(given["hold"]),
            unhold=tuple(given["unhold"]),
            report=tuple(given["report"]),
        )
        result = apt_guard.apply(wanted, module.check_mode)
    except (apt_guard.GuardError, OSError) as error:
        module.fail_json(msg=str(error))
    except re.error as error:
        module.fail_json(
            msg=f"pattern: found {given['pattern']!r}, expected a regular expression ({error}); correct it"
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
