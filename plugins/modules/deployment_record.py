#!/usr/bin/python
# Copyright: the gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: remember deployments that passed their gate."""

from __future__ import annotations

DOCUMENTATION = r"""
module: deployment_record
short_description: Remember deployments that passed their gate
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Keeps unit file and plan of deployments that served, so that the last one can be put back without a download or a build.
  - Files that were changed under a process that went on are recorded as what is in place, and those of the last start that passed
    stay beside them. A start with the new files makes these the proven ones, be it O(start), or one that is seen by a process that
    is younger than they are.
options:
  state_dir:
    description: State directory of the service.
    type: path
    required: true
  unit_file:
    description: Path of the unit file to record. Without it nothing is recorded and the module only reads.
    type: path
  plan:
    description: The plan that the unit was made from. Needed with O(unit_file).
    type: dict
  settings_dir:
    description: Folder of the settings files of the unit, which are recorded with it.
    type: path
    default: /etc/gpuserve-sglang
  start:
    description:
      - The start that has ended well, as C(seconds_to_ready) and C(invocation_id). Kept in C(last-start.json), with the time
        that there was no server before it; that time is over with this call.
      - Without C(seconds_to_ready) systemd is asked; that is for a start that another play began.
    type: dict
  tuning:
    description:
      - Folder of the session that the role C(tune) keeps while it tries profiles. What is in there is returned.
      - With O(unit_file) somebody else has deployed, which ends the session of this service. It puts nothing back any more, and
        the deployments on record are those of before it and this one.
    type: path
attributes:
  check_mode:
    description: Says whether something would be recorded, and which tuning would be ended.
    support: full
  diff_mode:
    description: The record is a copy of what is shown elsewhere.
    support: none
  idempotence:
    description: A deployment that is recorded already is left alone.
    support: full
"""

EXAMPLES = r"""
- name: What would a rollback put back
  gpuserve.sglang.deployment_record:
    state_dir: /var/lib/sglang-kimi
  register: record
"""

RETURN = r"""
last_good:
  description: The last deployment that passed its gate, as C(id), C(unit) (text), C(plan), C(settings) (texts by
    path) and C(proven) (C(unit), C(plan) and C(settings) of its last start that passed; null when they are the same); null without one.
  type: dict
  returned: always
previous_good:
  description: The one before it.
  type: dict
  returned: always
last_start:
  description:
    - The record of O(start), with C(when) (seconds since the epoch) and C(seconds_away); null when no serving server
      had been stopped before. Empty without O(start).
  type: dict
  returned: always
tuning:
  description:
    - The session in O(tuning), as C(token), C(began), C(plan), C(unit) and C(state_dir); with O(unit_file) the one that was
      ended. Empty without one.
  type: dict
  returned: always
"""

import json
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import observe_unit
from ansible_collections.gpuserve.sglang.plugins.module_utils.record import (
    LAST,
    PREVIOUS,
    RecordError,
    Records,
    Tuning,
    settings_files,
    write_document,
)
from ansible_collections.gpuserve.sglang.plugins.module_utils.service import started_after
from ansible_collections.gpuserve.sglang.plugins.module_utils.switch import Away, ready_times


def record_start(start: dict[str, Any], plan: dict[str, Any], unit: str, state_dir: Path) -> dict[str, Any]:
    """Write ``last-start.json``: the server is back."""
    away, now = Away(unit), time.time()
    since, seconds = away.since(), start.get("seconds_to_ready")
    if seconds is None:
        seconds, now = ready_times(unit) or (0.0, now)
    record = {
        "seconds_to_ready": round(float(seconds), 1),
        "seconds_away": None if since is None else round(now - since, 1),
        "when": round(now),
        "plan_hash": plan["hash"],
        "process_hash": plan["process_hash"],
        "invocation_id": str(start.get("invocation_id") or ""),
    }
    write_document(state_dir / "last-start.json", json.dumps(record, indent=4, sort_keys=True) + "\n")
    away.end()
    return record


def is_started_with(unit: str, files: list[Path]) -> bool:
    """Whether the start of what serves has passed with these files."""
    status = observe_unit(unit)
    return status.active_state == "active" and started_after(status.main_pid, files)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state_dir": {"type": "path", "required": True},
            "unit_file": {"type": "path"},
            "plan": {"type": "dict"},
            "settings_dir": {"type": "path", "default": "/etc/gpuserve-sglang"},
            "start": {"type": "dict"},
            "tuning": {"type": "path"},
        },
        required_by={"unit_file": ["plan"], "start": ["unit_file"]},
        supports_check_mode=True,
    )
    given = module.params
    state_dir, changed, start, session = Path(given["state_dir"]), False, {}, {}
    records = Records(state_dir)
    try:
        if given["tuning"]:
            tuning = Tuning(Path(given["tuning"]))
            session = tuning.of(state_dir) if given["unit_file"] else tuning.read()
            if session and given["unit_file"] and not module.check_mode:
                tuning.end(state_dir)
        if given["unit_file"]:
            unit_file = Path(given["unit_file"])
            unit = unit_file.read_text()
            paths = settings_files(unit_file.name, Path(given["settings_dir"]))
            settings = {str(path): path.read_text() for path in paths}
            proven = (given["start"] or {}).get("seconds_to_ready") is not None
            proven = proven or is_started_with(unit_file.name, [unit_file, *paths])
            changed = not records.is_recorded(unit, given["plan"], settings, proven)
            if changed and not module.check_mode:
                records.keep(unit, given["plan"], settings, proven)
            changed = changed or bool(session)
            if given["start"] is not None and not module.check_mode:
                start, changed = record_start(given["start"], given["plan"], unit_file.name, state_dir), True
        result = {"last_good": records.read(LAST), "previous_good": records.read(PREVIOUS), "last_start": start}
        result["tuning"] = session
    except (RecordError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=changed, **result)


if __name__ == "__main__":
    main()
