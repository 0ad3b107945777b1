#!/usr/bin/python
# Copyright: the gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: the steps of a switch, each in one go on the host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: service_switch
short_description: The steps of a switch, each in one go on the host
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Stops and starts a service, and puts the files of a recorded deployment back. A step waits for another one that a killed
    play left running on the host, keeps the liveness timer quiet and renews the lock of the play.
options:
  unit:
    description: Name of the unit.
    type: str
    default: sglang-kimi.service
  state:
    description:
      - V(stopped) stops it; running requests finish, as long as the unit's own stop timeout allows.
      - V(started) starts it, without waiting until it serves; M(gpuserve.sglang.health_gate) does that. A unit that systemd means
        to start again after a pause is started now.
      - V(restored) keeps evidence, puts the unit and the settings of the last start of the deployment O(record) that passed back,
        and stops what runs. The files come first, so that whoever dies from here on leaves the deployment that served. Where they
        cannot be put back, all of them, nothing is stopped.
      - V(serving) notes that the gate has passed, so that the time without a server is over; M(gpuserve.sglang.deployment_record)
        does the same for a deployment.
    type: str
    choices: [stopped, started, restored, serving]
    required: true
  state_dir:
    description: State directory of the service, for records and evidence.
    type: path
    default: /var/lib/sglang-kimi
  record:
    description: Which deployment O(state=restored) puts back.
    type: str
    choices: [last-good, previous-good]
    default: last-good
  stop:
    description:
      - Whether O(state=restored) stops what runs. Without it only files are put back, and since nothing is started by them now they
        are those that were in place when the deployment was recorded.
    type: bool
    default: true
  spare:
    description: Process hash of a plan. A server that follows it, and whose start has passed, is not stopped.
    type: str
    default: ''
  drain:
    description: Whether running requests finish before a stop. Without it the service has ten seconds to end.
    type: bool
    default: true
  port:
    description:
      - Port that the server will listen on. With it O(state=started) refuses, before it starts anything, when a process that does
        not belong to the unit listens there; 0 does not look.
    type: int
    default: 0
  host:
    description: Address that the server will listen on; see O(port).
    type: str
    default: 127.0.0.1
  enabled:
    description: Whether the unit starts at boot. Without it this is left as it is.
    type: bool
  evidence:
    description:
      - What the gate said about a deployment that failed. With it the unit's properties, its journal, the unit and its
        settings are kept in a folder below C(incidents) of O(state_dir), without secrets.
    type: str
  settings_dir:
    description: Folder of the settings that the programs on the host read.
    type: path
    default: /etc/gpuserve-sglang
  quiet_seconds:
    description: Seconds that the liveness timer leaves the service alone, and that the lock is renewed for.
    type: float
    default: 1800
  token:
    description: The RV(ignore:token) of M(gpuserve.sglang.deployment_lock). A step refuses when the lock is somebody else's by now.
    type: str
attributes:
  check_mode:
    description: Says what would be stopped, started or put back.
    support: full
  diff_mode:
    description: Shows the unit that is put back.
    support: full
  idempotence:
    description: A service that is in the wanted state is left alone.
    support: full
  platform:
    description: Target OS/families that can be operated against.
    platforms: linux
    support: full
"""

EXAMPLES = r"""
- name: Stop the service after its requests have finished
  gpuserve.sglang.service_switch:
    state: stopped

- name: Put the files of the last good deployment back
  gpuserve.sglang.service_switch:
    state: restored
    drain: false
    evidence: "{{ ansible_failed_result.msg }}"
"""

RETURN = r"""
stopped_at:
  description: When the service was gone, in seconds since the epoch; null when it did not run.
  type: float
  returned: always
stop_seconds:
  description: How long the stop took.
  type: float
  returned: always
killed:
  description: Whether it had to be killed.
  type: bool
  returned: always
started_at:
  description: When it was started, in seconds since the epoch; null when it ran already.
  type: float
  returned: always
away_since:
  description: Since when there is (or was) no server, in seconds since the epoch; null when no serving one was stopped.
  type: float
  returned: always
restored:
  description: The deployment that was put back, as C(id), C(plan), C(files) (paths that changed), C(at)
    (time) and C(seconds) (how long that took).
  type: dict
  returned: always
spared:
  description: Whether a server that follows the plan of O(spare) was left running.
  type: bool
  returned: always
incident:
  description: Folder with the evidence; empty without O(evidence).
  type: str
  returned: always
"""

import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils import maintenance
from ansible_collections.gpuserve.sglang.plugins.module_utils.lock import Lock
from ansible_collections.gpuserve.sglang.plugins.module_utils.record import (
    RecordError,
    Records,
    files_of,
    settings_files,
)
from ansible_collections.gpuserve.sglang.plugins.module_utils.switch import (
    UNIT_DIR,
    Evidence,
    Switch,
    SwitchError,
    differing,
)


def restored(given: dict[str, Any], check_mode: bool, switch: Switch, result: dict[str, Any], began: float) -> None:
    """The files of a recorded deployment."""
    record = Records(Path(given["state_dir"])).read(given["record"])
    if record is None:
        raise SwitchError(
            f"{given['state_dir']} has no {given['record']} deployment on record; expected one that served. Run site.yml first."
        )
    program = Path(record["plan"]["command"][0])
    if given["stop"] and not program.exists():
        raise SwitchError(
            f"deployment {record['id']} runs {program}, which is gone; expected its release beside the others. "
            "Deploy it again with site.yml."
        )
    unit_path = UNIT_DIR / given["unit"]
    files = files_of(record, str(unit_path), recorded=not given["stop"])
    plan = ((given["stop"] and record["proven"]) or record)["plan"]
    result["diff"] = {
        "before_header": str(unit_path),
        "after_header": f"{unit_path} of {record['id']}",
        "before": unit_path.read_text(errors="replace") if unit_path.exists() else "",
        "after": files[str(unit_path)],
    }
    changed = differing(files) if check_mode else switch.restore(files)
    result["changed"] = bool(changed)
    result["restored"] = {"id": record["id"], "plan": plan, "files": changed}
    result["restored"] |= {"at": time.time(), "seconds": round(time.monotonic() - began, 2)}


def work(given: dict[str, Any], check_mode: bool, switch: Switch, result: dict[str, Any]) -> None:
    """One step: look, files, evidence, stop or start. The files come first, so that little can be lost on the way."""
    evidence, began = None, time.monotonic()
    if given["evidence"] and not check_mode:
        files = (UNIT_DIR / given["unit"], *settings_files(given["unit"], Path(given["settings_dir"])))
        evidence = Evidence(given["unit"], given["evidence"], files, time.time())
    if given["state"] == "restored":
        restored(given, check_mode, switch, result, began)
    if evidence is not None:
        try:
            result["incident"] = str(evidence.write(Path(given["state_dir"])))
        except OSError as error:
            # A full disk must not keep the server that worked from coming back.
            result["incident"] = f"none: {error}"
    if given["state"] == "serving":
        if not check_mode:
            switch.away.end()
        return
    stops = given["state"] == "stopped" or (given["state"] == "restored" and given["stop"])
    result["spared"] = bool(stops and given["spare"] and switch.is_serving(given["spare"]))
    if given["state"] == "started":
        done = {"changed": switch.wants_start()} if check_mode else switch.start(given["host"], given["port"])
    elif result["spared"] or not stops:
        done = {}
    else:
        done = {"changed": switch.is_running()} if check_mode else switch.stop(given["drain"])
    result |= {**done, "changed": result["changed"] or done.get("changed", False)}
    if given["enabled"] is not None and switch.is_enabled() != given["enabled"]:
        result["changed"] = True
        if not check_mode:
            switch.enable(given["enabled"])


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "default": "sglang-kimi.service"},
            "state": {"type": "str", "choices": ["stopped", "started", "restored", "serving"], "required": True},
            "state_dir": {"type": "path", "default": "/var/lib/sglang-kimi"},
            "record": {"type": "str", "choices": ["last-good", "previous-good"], "default": "last-good"},
            "stop": {"type": "bool", "default": True},
            "spare": {"type": "str", "default": ""},
            "drain": {"type": "bool", "default": True},
            "port": {"type": "int", "default": 0},
            "host": {"type": "str", "default": "127.0.0.1"},
            "enabled": {"type": "bool"},
            "evidence": {"type": "str"},
            "settings_dir": {"type": "path", "default": "/etc/gpuserve-sglang"},
            "quiet_seconds": {"type": "float", "default": 1800.0},
            "token": {"type": "str", "no_log": False},
        },
        supports_check_mode=True,
    )
    given = module.params
    result: dict[str, Any] = {
        "changed": False,
        "stopped_at": None,
        "stop_seconds": 0.0,
        "killed": False,
        "started_at": None,
        "restored": {},
        "spared": False,
        "incident": "",
    }
    switch = Switch(given["unit"])
    result["away_since"] = switch.away.since()
    try:
        if module.check_mode:
            work(given, True, switch, result)
        else:
            with switch.alone():
                now = time.time()
                if given["token"] and not Lock().renew(given["token"], given["quiet_seconds"], now):
                    raise SwitchError(
                        "the lock of this play is gone: it gave no sign of life for too long and another play took over. "
                        "Expected to hold it. Nothing was changed by this step; wait for the other play, then run this one again."
                    )
                maintenance.mark(given["unit"], given["quiet_seconds"], f"{given['state']} by a play")
                work(given, False, switch, result)
    except (SwitchError, RecordError, OSError) as error:
        module.fail_json(msg=str(error), **result)
    result["away_since"] = switch.away.since() or result["away_since"]
    module.exit_json(**result)


if __name__ == "__main__":
    main()
