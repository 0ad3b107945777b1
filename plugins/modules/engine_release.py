#!/usr/bin/python
# Copyright: the gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: build an engine release, whole or not at all."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_release
short_description: Build a virtual environment of pinned packages, whole or not at all
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Builds O(root)C(/releases/<id>/venv) from O(steps), in their order, with uv or pip. The id is the hash of
    O(python), O(steps) and the package sources, so that a changed pin builds beside the release that serves.
  - The manifest is written last. A folder without one is the rest of an interrupted build and is built anew.
  - A release that is complete costs one comparison of its packages with the manifest. Packages that were changed by
    hand are put back.
options:
  root:
    description: Absolute path below which C(releases/) lies.
    type: path
    required: true
  python:
    description: Absolute path of the base interpreter.
    type: path
    required: true
  steps:
    description:
      - What to install, one step after the other. A later step may rely on what an earlier one installed.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the step, for messages and file names.
        type: str
        required: true
      requirements:
        description: Requirement lines, pinned. Comments are ignored.
        type: list
        elements: str
        required: true
      index_url:
        description: Package index of this step, instead of O(index_url).
        type: str
      extra_index_urls:
        description: Further package indexes of this step.
        type: list
        elements: str
      no_deps:
        description: Install exactly the named packages, without what they ask for.
        type: bool
        default: false
      overrides:
        description: Requirement lines that win over what packages ask for (uv only).
        type: list
        elements: str
  index_url:
    description: Package index; the installer's own default when it is not given. May hold credentials.
    type: str
  extra_index_urls:
    description: Further package indexes. May hold credentials.
    type: list
    elements: str
    default: []
  find_links:
    description: Folders of wheels on the host, or pages that list wheels.
    type: list
    elements: str
    default: []
  offline:
    description: Ask no index; everything comes from O(find_links).
    type: bool
    default: false
  installer:
    description: V(auto) takes uv where it can be installed from the same sources, and pip otherwise.
    type: str
    choices: [auto, uv, pip]
    default: auto
  uv_requirement:
    description: Requirement line of uv.
    type: str
    default: uv
  min_free_gb:
    description: Space that the file system must have free before a build starts, in GB.
    type: float
    default: 0
  imports:
    description: Modules that must import in the finished environment.
    type: list
    elements: str
    default: []
  torch_cuda:
    description: CUDA version that torch must report. V(none) expects a build without CUDA; nothing is asked by default.
    type: str
  environment:
    description: Environment variables of the import check.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Says whether a release would be built, and builds none.
    support: full
  diff_mode:
    description: Lists packages that differ from the manifest.
    support: full
  idempotence:
    description: A complete release is not touched.
    support: full
"""

EXAMPLES = r"""
- name: Build a release from a folder of wheels
  gpuserve.sglang.engine_release:
    root: /opt/sglang
    python: /usr/bin/python3
    steps:
      - name: engine
        requirements: [sglang==0.5.9]
    find_links: [/srv/wheels]
    offline: true
    imports: [sglang]
"""

RETURN = r"""
id:
  description: Id of the release.
  type: str
  returned: always
path:
  description: Folder of the release.
  type: str
  returned: always
python:
  description: Interpreter of the release.
  type: str
  returned: always
state:
  description: State before the run, V(absent), V(incomplete), V(drifted) or V(present).
  type: str
  returned: always
drift:
  description: Packages that differed from the manifest before the run, as C(package), C(expected), C(found).
  type: list
  elements: dict
  returned: always
manifest:
  description: The manifest, with C(packages), C(python_version), C(torch_cuda), C(installer), C(built_at).
  type: dict
  returned: always, empty in check mode when there is none yet
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.release import (
    ReleaseBuilder,
    ReleaseError,
    read_manifest,
)


def main() -> None:
    step = {
        "name": {"type": "str", "required": True},
        "requirements": {"type": "list", "elements": "str", "required": True},
        "index_url": {"type": "str"},
        "extra_index_urls": {"type": "list", "elements": "str"},
        "no_deps": {"type": "bool", "default": False},
        "overrides": {"type": "list", "elements": "str"},
    }
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "python": {"type": "path", "required": True},
            "steps": {"type": "list", "elements": "dict", "required": True, "options": step},
            "index_url": {"type": "str"},
            "extra_index_urls": {"type": "list", "elements": "str", "default": []},
            "find_links": {"type": "list", "elements": "str", "default": []},
            "offline": {"type": "bool", "default": False},
            "installer": {"type": "str", "choices": ["auto", "uv", "pip"], "default": "auto"},
            "uv_requirement": {"type": "str", "default": "uv"},
            "min_free_gb": {"type": "float", "default": 0},
            "imports": {"type": "list", "elements": "str", "default": []},
            "torch_cuda": {"type": "str"},
            "environment": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    options = module.params
    if not options["root"].startswith("/"):
        module.fail_json(msg=f"root is {options['root']!r}, expected an absolute path")
    try:
        builder = ReleaseBuilder(
            Path(options["root"]),
            options,
            installer=options["installer"],
            uv_requirement=options["uv_requirement"],
            min_free_bytes=int(options["min_free_gb"] * 1e9),
            imports=options["imports"],
            torch_cuda="" if options["torch_cuda"] == "none" else options["torch_cuda"],
            environment={str(k): str(v) for k, v in options["environment"].items()},
        )
        state, drifted = builder.state()
        result = {
            "changed": state != "present",
            "id": builder.id,
            "path": str(builder.path),
            "python": str(builder.python),
            "state": state,
            "drift": drifted,
            "manifest": read_manifest(builder.path) or {},
        }
        if module._diff and drifted:
            result["diff"] = {
                "before": "".join(f"{d['package']} {d['found'] or 'absent'}\n" for d in drifted),
                "after": "".join(f"{d['package']} {d['expected'] or 'absent'}\n" for d in drifted),
            }
        if result["changed"] and not module.check_mode:
            result["manifest"] = builder.ensure()
    except ReleaseError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
