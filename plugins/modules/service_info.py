#!/usr/bin/python
# Copyright: the gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: what a service runs now, and which plan it was started with."""

from __future__ import annotations

DOCUMENTATION = r"""
module: service_info
short_description: What a service runs now, and which plan it was started with
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Reads the unit from systemd and its main process from C(/proc). Changes nothing.
options:
  unit:
    description: Name of the unit.
    type: str
    default: sglang-kimi.service
  newer:
    description: Paths to compare with the start of the process.
    type: list
    elements: path
    default: []
  plan:
    description:
      - The plan that the service is meant to follow, as the filter P(gpuserve.sglang.launch_plan#filter) returns it.
        RV(reasons) then says whether and why it must be started or restarted, and RV(difference) compares the running
        command line and environment with the planned ones.
    type: dict
  settings_dir:
    description: Folder of the settings of the unit, where the plan of RV(installed) lies.
    type: path
    default: /etc/gpuserve-sglang
  state_dir:
    description: State directory of the service, whose records RV(last_good), RV(last_start) and RV(benchmark) come from.
    type: path
attributes:
  check_mode:
    description: Reads in check mode as well.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show; RV(difference) is a return value.
    support: none
"""

EXAMPLES = r"""
- name: What serves now
  gpuserve.sglang.service_info:
    unit: sglang-kimi.service
  register: serving
"""

RETURN = r"""
exists:
  description: Whether systemd knows the unit.
  type: bool
  returned: always
active_state:
  description: State of the unit, such as V(active), V(activating), V(inactive) or V(failed).
  type: str
  returned: always
sub_state:
  description: Sub-state of the unit, such as V(running) or V(auto-restart).
  type: str
  returned: always
main_pid:
  description: Process id of the main process; 0 when there is none.
  type: int
  returned: always
invocation_id:
  description: Id of this run of the unit.
  type: str
  returned: always
n_restarts:
  description: How often systemd restarted the unit by itself.
  type: int
  returned: always
started:
  description: Start of the main process in seconds since the epoch.
  type: float
  returned: always, null without a process
command:
  description: Command line of the main process, without secrets.
  type: list
  elements: str
  returned: always
plan_hash:
  description: The C(process_hash) of the plan that the process was started with; empty when unknown.
  type: str
  returned: always
environment:
  description: The variables that O(plan) sets, as the process has them.
  type: dict
  returned: always, empty without O(plan)
reasons:
  description: >-
    Why the service must be started or restarted to follow O(plan); empty when it need not be, and
    without O(plan).
  type: list
  elements: str
  returned: always
changes:
  description: Each setting in which process and O(plan) differ, as text; empty without O(plan) or without a process.
  type: list
  elements: str
  returned: always
drop_ins:
  description: Files that change this unit besides its own, as C(systemctl edit) makes them.
  type: list
  elements: str
  returned: always
last_good:
  description:
    - The last deployment that passed its gate, as C(id), C(process_hash), C(profile), C(endpoint), C(unit) (its settings, as in the
      plan), C(error) (why it cannot be read), C(untrusted) (it was not read, since others than root can change it),
      C(differing) (paths of its files that are not in place as they were recorded) and C(unproven) (its last start that passed had
      other files than those).
    - Null without O(state_dir) or without one.
  type: dict
  returned: always
installed:
  description:
    - The plan that is in place with the unit, and need not have served, as C(hash), C(process_hash), C(profile), C(endpoint),
      C(unit) (its settings) and C(error) (why it is not the plan of the unit).
    - Null without one.
  type: dict
  returned: always
last_start:
  description:
    - The record of the last start that served; empty without O(state_dir) or without one.
    - One that cannot be read counts as none, with a warning that names the file.
  type: dict
  returned: always
benchmark:
  description: The last good measurements, as RV(last_start).
  type: dict
  returned: always
served:
  description: Whether there is a record of a start, be it readable or not; false without O(state_dir).
  type: bool
  returned: always
difference:
  description: >-
    Command line and environment of the process against those of O(plan), as a unified diff; empty when equal, and
    without O(plan).
  type: str
  returned: always
newer:
  description: Those of O(newer) that changed after the process started.
  type: list
  elements: str
  returned: always
error:
  description: Why systemd could not be asked; empty when it could.
  type: str
  returned: always
unit:
  description: The unit that was asked for.
  type: str
  returned: always
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.record import (
    LAST,
    RecordError,
    Records,
    UntrustedError,
    document,
    files_of,
)
from ansible_collections.gpuserve.sglang.plugins.module_utils.service import (
    difference,
    installed_plan,
    read_service,
    setting_changes,
    start_reasons,
)
from ansible_collections.gpuserve.sglang.plugins.module_utils.switch import UNIT_DIR, differing


def last_good(state_dir: Path, unit_file: Path) -> dict[str, Any] | None:
    """The last good deployment in short, and which of its files are not in place."""
    try:
        found = Records(state_dir).read(LAST)
    except RecordError as error:
        return {
            "id": Records(state_dir).linked(LAST),
            "process_hash": "",
            "profile": "",
            "endpoint": {},
            "unit": {},
            "error": str(error),
            "untrusted": isinstance(error, UntrustedError),
            "differing": [],
            "unproven": False,
        }
    if found is None:
        return None
    plan = found["plan"]
    shown = ("process_hash", "profile", "endpoint", "unit")
    return {
        "id": found["id"],
        "error": "",
        "untrusted": False,
        "differing": differing(files_of(found, str(unit_file), recorded=True)),
        "unproven": found["proven"] is not None,
        **{key: plan.get(key) for key in shown},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "default": "sglang-kimi.service"},
            "newer": {"type": "list", "elements": "path", "default": []},
            "plan": {"type": "dict"},
            "settings_dir": {"type": "path", "default": "/etc/gpuserve-sglang"},
            "state_dir": {"type": "path"},
        },
        supports_check_mode=True,
    )
    plan = module.params["plan"]
    wanted = {str(name): str(value) for name, value in (plan or {}).get("env", {}).items()}
    result = {"changed": False, **read_service(module.params["unit"], module.params["newer"], list(wanted))}
    result |= {"reasons": [], "difference": "", "changes": [], "last_good": None, "last_start": {}}
    result |= {"benchmark": {}, "served": False}
    unit_file = UNIT_DIR / module.params["unit"]
    result["installed"] = installed_plan(module.params["unit"], unit_file, Path(module.params["settings_dir"]))
    if module.params["state_dir"]:
        state_dir = Path(module.params["state_dir"])
        result |= {
            "last_good": last_good(state_dir, unit_file),
            "served": os.path.lexists(state_dir / "last-start.json"),
        }
        for key, path in (("last_start", "last-start.json"), ("benchmark", "benchmarks/latest.json")):
            result[key], why = document(state_dir / path)
            if why:
                module.warn(why)
    if plan is not None:
        missing = [key for key in ("process_hash", "command", "env") if not plan.get(key)]
        if missing:
            module.fail_json(
                msg=f"plan has no {', '.join(missing)}; expected a plan as the filter launch_plan returns it"
            )
        # One word: a title that the process gave itself in place of its command line.
        if result["main_pid"] and len(result["command"]) > 1:
            result["changes"] = setting_changes(result["command"], result["environment"], plan["command"], wanted)
        result["reasons"] = start_reasons(result, plan["process_hash"], result["changes"])
        result["difference"] = difference(result["command"], result["environment"], plan["command"], wanted)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
