#!/usr/bin/python
# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: apply or take back a series of patches on a package, all or nothing."""

from __future__ import annotations

DOCUMENTATION = r"""
module: patch_series
short_description: Apply or take back a series of patches on a package, all or nothing
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Brings the files of a package into the state that O(state) and O(patches) name. The series says which checksum each
    touched file has in each combination of its patches; a file that has none of them is drift, and the run fails before
    anything is written. It names file, found and expected.
  - C(git apply) works on copies. The files are replaced only when all copies have their expected checksums, each by a
    rename, so that files shared with a package manager's cache stay what they are there.
  - The files of the series are read on the controller and sent along; the host needs nothing but C(git).
  - What was done by an interrupted run, or a subset, is found as V(partly_applied) and completed.
options:
  series:
    description:
      - Name of a series such as V(sglang/0.5.9), looked for in C(patches/) beside the playbook and then in the
        collection, or the path of a folder on the controller that holds C(series.yml) and its patch files.
    type: raw
    required: true
  root:
    description:
      - Absolute path of the folder that holds the package on the host. A checkout of the upstream repository, an
        unpacked source, or C(site-packages).
    type: path
    required: true
  layout:
    description: How the package lies in O(root). V(auto) looks.
    type: str
    choices: [auto, git, source, site-packages]
    default: auto
  state:
    description:
      - V(applied) makes the package carry exactly O(patches). V(pristine) takes O(patches) away.
    type: str
    choices: [applied, pristine]
    default: applied
  patches:
    description: Ids of patches; all of the series when it is not given.
    type: list
    elements: str
requirements:
  - git on the host
attributes:
  check_mode:
    description: Does all but replacing the files, on copies.
    support: full
  diff_mode:
    description: Shows the real difference of the files.
    support: full
  idempotence:
    description: A package in the wanted state is only read.
    support: full
"""

EXAMPLES = r"""
- name: Patch the engine of a release
  gpuserve.sglang.patch_series:
    series: sglang/0.5.9
    root: /opt/sglang/releases/3f1c2ab09d7e/venv/lib/python3.12/site-packages

- name: Carry only what the Kimi draft needs
  gpuserve.sglang.patch_series:
    series: sglang/0.5.9
    root: /root/sglang
    layout: git
    patches: [kimi-k25-eagle3, logprobs-crash]

- name: Take everything back
  gpuserve.sglang.patch_series:
    series: sglang/0.5.9
    root: /root/sglang
    state: pristine

- name: Look for drift without changing anything
  gpuserve.sglang.patch_series:
    series: sglang/0.5.9
    root: /root/sglang
  check_mode: true
  register: patch_state
  failed_when: patch_state.drift | length > 0 or patch_state is changed
"""

RETURN = r"""
state:
  description:
    - State of the package before the run. V(pristine), V(applied) (all patches of the series), V(partly_applied),
      V(drifted), or V(superseded) (a newer version that carries every patch). V(unknown) when it could not be read.
  type: str
  returned: always
root:
  description: The folder that holds the package.
  type: str
  returned: always
layout:
  description: The layout that was found.
  type: str
  returned: always
distribution:
  description: Name of the package.
  type: str
  returned: always
version:
  description: Version of the package as its metadata tells; none when nothing does.
  type: str
  returned: always
expected_version:
  description: Version that the series is for.
  type: str
  returned: always
patches:
  description:
    - The patches in their order, as C(id), C(title), C(state) before the run, C(applied) after it (in check mode, as it
      would be), C(upstream) and C(fixed_in).
  type: list
  elements: dict
  returned: always
applied:
  description: Ids of the patches that the package carries after the run; in check mode, that it would carry.
  type: list
  elements: str
  returned: always
files:
  description: Every touched file after the run (in check mode, as it would be), by path, with C(sha256) and C(patches).
  type: dict
  returned: always
drift:
  description: Files in no known state, as C(path), C(found), C(expected) (checksums) and C(patches).
  type: list
  elements: dict
  returned: always
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.patch_series import (
    LAYOUTS,
    PatchError,
    Tree,
    load_series,
    report,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "series": {"type": "raw", "required": True},
            "root": {"type": "path", "required": True},
            "layout": {"type": "str", "choices": ["auto", *LAYOUTS], "default": "auto"},
            "state": {"type": "str", "choices": ["applied", "pristine"], "default": "applied"},
            "patches": {"type": "list", "elements": "str"},
        },
        supports_check_mode=True,
    )
    options = module.params
    sent = options["series"]
    result: dict[str, Any] = {
        "changed": False,
        "state": "unknown",
        "root": options["root"],
        "layout": options["layout"],
        "distribution": "",
        "version": None,
        "expected_version": "",
        "patches": [],
        "applied": [],
        "files": {},
        "drift": [],
    }
    try:
        if not isinstance(sent, dict) or not isinstance(sent.get("definition"), dict):
            raise PatchError(
                f"series is {sent!r}, expected what the action plugin sends. Call gpuserve.sglang.patch_series."
            )
        if not options["root"].startswith("/"):
            raise PatchError(f"root is {options['root']!r}, expected an absolute path. Correct it.")
        series = load_series(sent["definition"], sent.get("texts") or {})
        tree = Tree(series, Path(options["root"]), options["layout"])
        before, state = tree.states, tree.state
        result.update(report(tree, before, state))
        changes = tree.change(options["state"], options["patches"])
        if module._diff and changes:
            result["diff"] = {"prepared": tree.difference(changes)}
        result["changed"] = bool(changes)
        if module.check_mode:
            tree.assume(changes)
        else:
            tree.write(changes)
        result.update(report(tree, before, state))
    except PatchError as error:
        module.fail_json(msg=str(error), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
