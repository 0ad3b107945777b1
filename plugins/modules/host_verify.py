#!/usr/bin/python
# Copyright: the gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: is the host what was deployed on it?"""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_verify
short_description: Is the host what was deployed on it?
version_added: 0.2.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Holds a serving host against the record of its last good deployment, the manifest of its release and what the caller
    expects of it. Release, packages, patched files, driver, unit, process, sitecustomize, sockets, answers, log, APT's guards,
    disks, settings, timers and handbook are checked in one run.
  - Changes nothing and restarts nothing. It makes the server answer one short request.
  - Does not fail for what it finds; the play decides.
options:
  unit:
    description: Name of the unit.
    type: str
    default: sglang-kimi.service
  state_dir:
    description: State directory of the service, which holds the record of its deployments.
    type: path
    default: /var/lib/sglang-kimi
  settings_dir:
    description: Folder of the settings of the programs on the host.
    type: path
    default: /etc/gpuserve-sglang
  plan:
    description: The inventory's plan. Without it nobody can say whether the inventory was deployed.
    type: dict
  settings:
    description: What the settings file must hold, beyond what follows from the plan.
    type: dict
    default: {}
  programs:
    description: Programs below O(programs_dir) with the SHA-256 of each.
    type: dict
    default: {}
  programs_dir:
    description: Folder of the programs on the host.
    type: path
    default: /usr/local/lib/gpuserve-sglang
  variables:
    description: Variables that C(sitecustomize.py) gives to the interpreter. Without it that is not checked.
    type: dict
  interpreter:
    description: Interpreter to ask, instead of the one that the deployed plan starts.
    type: str
    default: ""
  drivers:
    description: Wanted versions or branches of the NVIDIA driver, any of them. With none the driver is not checked.
    type: list
    elements: str
    default: []
  holds:
    description: Patterns of package names; what is installed of them must be on hold.
    type: list
    elements: str
    default: []
  apt_files:
    description: Files of APT with the content that each must have.
    type: dict
    default: {}
  blacklist:
    description: Patterns that must be on the blacklist of unattended-upgrades.
    type: list
    elements: str
    default: []
  dropins:
    description: Paths of drop-ins of the unit that are known of.
    type: list
    elements: path
    default: []
  disk_paths:
    description: Paths whose file systems must have O(min_free_gb) free.
    type: list
    elements: path
    default: []
  min_free_gb:
    description: Gigabytes (10^9 bytes) that must be free.
    type: float
    default: 5
  handbook:
    description: Path of the handbook; empty when there is none.
    type: str
    default: ""
  timer:
    description: Name of the timer that probes the server; empty when there is none.
    type: str
    default: ""
  collector:
    description: Name of the unit that collects incidents; empty when there is none.
    type: str
    default: ""
  watchers:
    description:
      - Text of each unit file that watches over the service, by the name of the file. A template (C(@.)) is that of O(collector),
        the others are what O(timer) is and starts.
      - As O(settings), the texts count where the inventory's plan is the deployed one; drop-ins are findings in any case.
    type: dict
    default: {}
  all_files:
    description:
      - Whether every file of the release is held against its checksum, which reads all of it (seconds for each 10 GB), or only
        the Python files of O(guard) and of what is patched.
    type: bool
    default: true
  guard:
    description: Packages whose Python files are checked in any case.
    type: list
    elements: str
    default: []
  kv_tolerance:
    description: Share by which the KV pool may be smaller than planned.
    type: float
    default: 0.1
  generate:
    description: Whether to ask for one generation.
    type: bool
    default: true
  request_timeout:
    description: Seconds for a request to C(/health). The engine needs 20 s to say that its scheduler is dead.
    type: float
    default: 25
  generation_timeout:
    description: Seconds for the generation.
    type: float
    default: 180
  log_ignore:
    description: Regular expressions of log lines that are known and harmless.
    type: list
    elements: str
    default: []
  ignored_xids:
    description: Numbers of GPU faults that are no finding. 45 is the driver cleaning up after a process.
    type: list
    elements: int
    default: [45]
attributes:
  check_mode:
    description: Reads in check mode as well.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show.
    support: none
notes:
  - Needs root, to read the environment of the process and to see whose sockets are whose.
"""

EXAMPLES = r"""
- name: Is this host still what was deployed?
  gpuserve.sglang.host_verify:
    handbook: /var/lib/sglang-kimi/production.md
    drivers: ["590"]
  register: verified
  failed_when: not verified.ok
"""

RETURN = r"""
ok:
  description: Whether nothing failed and everything could be checked.
  type: bool
  returned: always
failures:
  description: Ids of the checks that failed.
  type: list
  elements: str
  returned: always
warnings_found:
  description: Ids of the checks that found something that is worth a look but no failure.
  type: list
  elements: str
  returned: always
unknown:
  description: Ids of the checks that could not be made.
  type: list
  elements: str
  returned: always
checks:
  description: Every check.
  type: list
  elements: dict
  returned: always
  contains:
    id: {description: Name of the check., type: str}
    subject: {description: What was looked at., type: str}
    ok: {description: Outcome; null when there is none., type: bool}
    found: {description: What was found., type: str}
    expected: {description: What was expected., type: str}
    action: {description: What to do., type: str}
    severity:
      description: >-
        V(error) or V(warning) for what a failed check means; V(skipped) for what does not apply and V(unknown) for what
        could not be checked, both without an outcome.
      type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.host_verify import verify
from ansible_collections.gpuserve.sglang.plugins.module_utils.verify import Expected


def main() -> None:
    text = {"type": "str", "default": ""}
    names = {"type": "list", "elements": "str", "default": []}
    paths = {"type": "list", "elements": "path", "default": []}
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "default": "sglang-kimi.service"},
            "state_dir": {"type": "path", "default": "/var/lib/sglang-kimi"},
            "settings_dir": {"type": "path", "default": "/etc/gpuserve-sglang"},
            "plan": {"type": "dict"},
            "settings": {"type": "dict", "default": {}},
            "programs": {"type": "dict", "default": {}},
            "programs_dir": {"type": "path", "default": "/usr/local/lib/gpuserve-sglang"},
            "variables": {"type": "dict"},
            "interpreter": text,
            "drivers": names,
            "holds": names,
            "apt_files": {"type": "dict", "default": {}},
            "blacklist": names,
            "dropins": paths,
            "disk_paths": paths,
            "min_free_gb": {"type": "float", "default": 5},
            "handbook": text,
            "timer": text,
            "collector": text,
            "watchers": {"type": "dict", "default": {}},
            "all_files": {"type": "bool", "default": True},
            "guard": names,
            "kv_tolerance": {"type": "float", "default": 0.1},
            "generate": {"type": "bool", "default": True},
            "request_timeout": {"type": "float", "default": 25},
            "generation_timeout": {"type": "float", "default": 180},
            "log_ignore": names,
            "ignored_xids": {"type": "list", "elements": "int", "default": [45]},
        },
        supports_check_mode=True,
    )
    given = dict(module.params)
    for key in ("state_dir", "settings_dir", "programs_dir"):
        given[key] = Path(given[key])
    found = verify(Expected(**given))
    # `warnings` is a word of Ansible's own: it would print each one.
    found["warnings_found"] = found.pop("warnings")
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
