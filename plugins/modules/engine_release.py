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
  - O(patches) are part of the id. They are applied after the installation and before the manifest is written, in a step
    that installs from git before it; the manifest keeps the checksums of the files that they touch.
  - A release that is complete costs one comparison of its packages and files with the manifest. What was changed by hand
    is named, with what was expected and found, and put back.
  - After a build old releases are removed, never one that a process uses, that a unit or a deployment on record names, or that
    C(current) or C(last-good) beside C(releases/) points to.
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
        description:
          - Requirement lines, pinned. Comments are ignored, lines that end in a backslash are joined with the next.
          - A line may end in C(--hash=sha256:...). When all lines do, nothing that they do not name is installed.
          - C(name @ https://.../file.whl#sha256=...) takes a file whose checksum must fit.
        type: list
        elements: str
        default: []
      git:
        description: Install from a repository at one commit. The tree stays at C(source/<step>) in the release.
        type: dict
        suboptions:
          package:
            description: Name of the package that the tree makes.
            type: str
            required: true
          url:
            description: Address of the repository, without credentials.
            type: str
            required: true
          ref:
            description: Tag or branch.
            type: str
            required: true
          commit:
            description: The commit that O(steps[].git.ref) must be, 7 to 40 hexadecimal digits.
            type: str
            required: true
          subdirectory:
            description: Folder of the package inside of the repository.
            type: str
          version:
            description: Version of the package, for projects that compute it with setuptools-scm; taken from a tag by default.
            type: str
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
  patches:
    description: What the filter P(gpuserve.sglang.release_patches#filter) makes of a list of series.
    type: list
    elements: dict
    default: []
    suboptions:
      series:
        description: Name of the series, for messages.
        type: str
        required: true
      patches:
        description: Ids of the patches; all of the series by default.
        type: list
        elements: str
      definition:
        description: Content of C(series.yml).
        type: dict
        required: true
      texts:
        description: Texts of the patch files by name.
        type: dict
        required: true
  guard:
    description:
      - Packages whose Python files are held against their own RECORD. Those that O(patches) touch and those from git always
        are.
    type: list
    elements: str
    default: []
  check_all_files:
    description:
      - Hold every file of every package against its RECORD, not only the Python files of O(guard). It reads the whole release.
    type: bool
    default: false
  keep:
    description: Number of releases that stay after a build, the new one included; all when it is not given.
    type: int
  caches:
    description: Folders with one subfolder for each release, which is removed together with it.
    type: list
    elements: path
    default: []
  state_dirs:
    description: State directories of services, whose deployments on record keep the releases that they are started from.
    type: list
    elements: path
    default: []
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
release_state:
  description:
    - State before the run, V(absent), V(incomplete), V(drifted) or V(present).
    - Not C(state), which Ansible itself sets to V(directory) for every result with a C(path).
  type: str
  returned: always
drift:
  description:
    - What differed from the manifest before the run. Packages as C(package) with the versions C(expected) and C(found),
      files as C(package), C(file) with the sha256 C(expected) and C(found), folders that the service's user cannot enter
      as C(package) with their modes.
  type: list
  elements: dict
  returned: always
message:
  description: The drift in words, one line for each package or file; empty when there was none.
  type: str
  returned: always
pruned:
  description: Ids of releases that were removed.
  type: list
  elements: str
  returned: always
manifest:
  description: The manifest, with C(packages), C(python_version), C(torch_cuda), C(installer), C(built_at),
    C(patches), C(files) (the patched ones) and C(commits) (of steps from git).
  type: dict
  returned: always, empty in check mode when there is none yet
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.release import (
    ReleaseBuilder,
    ReleaseError,
    explain_drift,
    read_manifest,
)


def main() -> None:
    step = {
        "name": {"type": "str", "required": True},
        "requirements": {"type": "list", "elements": "str", "default": []},
        "index_url": {"type": "str"},
        "extra_index_urls": {"type": "list", "elements": "str"},
        "no_deps": {"type": "bool", "default": False},
        "overrides": {"type": "list", "elements": "str"},
        "git": {
            "type": "dict",
            "options": {
                "package": {"type": "str", "required": True},
                "url": {"type": "str", "required": True},
                "ref": {"type": "str", "required": True},
                "commit": {"type": "str", "required": True},
                "subdirectory": {"type": "str"},
                "version": {"type": "str"},
            },
        },
    }
    series = {
        "series": {"type": "str", "required": True},
        "patches": {"type": "list", "elements": "str"},
        "definition": {"type": "dict", "required": True},
        "texts": {"type": "dict", "required": True},
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
            "patches": {"type": "list", "elements": "dict", "default": [], "options": series},
            "guard": {"type": "list", "elements": "str", "default": []},
            "check_all_files": {"type": "bool", "default": False},
            "keep": {"type": "int"},
            "caches": {"type": "list", "elements": "path", "default": []},
            "state_dirs": {"type": "list", "elements": "path", "default": []},
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
    # The texts of all patches help nobody in a log.
    brief = {**options, "patches": [{key: p[key] for key in ("series", "patches")} for p in options["patches"]]}
    invocation = {"module_args": brief}
    if not options["root"].startswith("/"):
        module.fail_json(msg=f"root is {options['root']!r}, expected an absolute path", invocation=invocation)
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
            guard=None if options["check_all_files"] else options["guard"],
            keep=options["keep"],
            caches=[Path(folder) for folder in options["caches"]],
            state_dirs=[Path(folder) for folder in options["state_dirs"]],
        )
        state, drifted = builder.state()
        result = {
            "changed": state != "present",
            "id": builder.id,
            "path": str(builder.path),
            "python": str(builder.python),
            "release_state": state,
            "drift": drifted,
            "message": explain_drift(drifted),
            "pruned": builder.pruned,
            "invocation": invocation,
            "manifest": read_manifest(builder.path) or {},
        }
        if module._diff and drifted:
            result["diff"] = {
                side: "".join(f"{d.get('file', d['package'])} {d[key] or 'absent'}\n" for d in drifted)
                for side, key in (("before", "found"), ("after", "expected"))
            }
        if result["changed"] and not module.check_mode:
            result["manifest"] = builder.ensure()
    except ReleaseError as error:
        module.fail_json(msg=str(error), invocation=invocation)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
