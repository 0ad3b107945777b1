#!/usr/bin/python
# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Module: who holds the GPUs, and ending what belongs to this service."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_release
short_description: Say who holds the GPUs, and free them of what this service left behind
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Reads who has NVIDIA's device files open or GPU memory in use, and gives every process a kind. V(own) is in the control
    group of O(unit), or a worker of it that was left behind. V(named) is an old server that O(servers) names, with its
    workers. V(monitor) has device files open without using a GPU, as every client of NVML does, and is left alone.
    V(foreign) is everything else.
  - With O(state=released) it ends what is V(own) or V(named) and nothing else. SIGTERM goes to main processes first, so that
    running requests finish; then SIGKILL; then it waits until the device files are closed and the memory is back.
  - A foreign process is refused by name before anything is signalled, and so is O(state=released) while the unit runs.
  - A process is signalled only while it is the one that was looked at; numbers that were given again are safe.
options:
  state:
    description: V(reported) only looks. V(released) ends what may be ended, and fails when the GPUs do not become free.
    type: str
    choices: [reported, released]
    default: reported
  unit:
    description: The systemd unit whose processes are V(own); with or without its suffix.
    type: str
    default: sglang-kimi.service
  servers:
    description:
      - Old servers that may be ended, each with O(servers[].pid) or O(servers[].match).
      - Only inference servers and processes that use a GPU can be named. A server that a systemd unit runs is refused, since
        systemd would start it again; one that was started from cron or a login is none, whatever control group it lives in.
    type: list
    elements: dict
    default: []
    suboptions:
      pid:
        description: Number of its main process.
        type: int
      match:
        description: Regular expression that its command line contains.
        type: str
  roots:
    description:
      - Folders of this service's releases. A worker without a server is known as left behind by the libraries that it has
        mapped from there, since a worker that gave itself a title has no environment any more.
    type: list
    elements: path
    default: [/opt/sglang]
  foreign:
    description:
      - V(refuse) fails when somebody else uses a GPU. V(leave) lets those stay that are there now, and does not look at the
        memory of their GPUs.
    type: str
    choices: [refuse, leave]
    default: refuse
  term_timeout:
    description:
      - Seconds after SIGTERM in which the running requests of O(servers) finish. What was left behind has none, and waits 5
        seconds at most.
    type: float
    default: 120
  kill_timeout:
    description: Seconds after SIGKILL.
    type: float
    default: 10
  free_timeout:
    description: Seconds until device files are closed and memory is back, once the processes are gone.
    type: float
    default: 30
  memory_threshold_mib:
    description: Memory in MiB that an idle GPU may show as used (the driver's own share).
    type: int
    default: 1024
  nvidia_smi:
    description: Path of nvidia-smi; looked for in the usual places without it.
    type: path
  tool_timeout:
    description: Seconds for one answer of nvidia-smi.
    type: float
    default: 20
attributes:
  check_mode:
    description: >-
      Signals nothing and says in RV(released) who would be ended. Processes of the unit itself are not among them while it
      runs; they end with it.
    support: full
  diff_mode:
    description: There are no files to compare.
    support: none
  action:
    description: Indicates this has a corresponding action plugin so some parts of the options can be executed on the controller.
    details: While processes end, the action plugin says every 15 seconds that it still works, and how long it may take.
    support: full
  async:
    description: Supports being used with the C(async) keyword.
    support: none
"""

EXAMPLES = r"""
- name: Who holds the GPUs
  gpuserve.sglang.gpu_release:

- name: Replace a server that was started by hand
  gpuserve.sglang.gpu_release:
    state: released
    servers:
      - match: sglang\.launch_server.*--port 30000
"""

RETURN = r"""
holders:
  description: Every process that has a device file open or uses a GPU, and every process that may be ended.
  returned: always
  type: list
  elements: dict
  contains:
    pid:
      description: Process id.
      type: int
    command:
      description: Command line without secrets.
      type: str
    user:
      description: Effective user, null when it is not visible.
      type: str
    unit:
      description: Its systemd service, or null.
      type: str
    memory_mib:
      description: GPU memory that nvidia-smi attributes to it.
      type: int
    gpus:
      description: Indexes of the GPUs that it touches.
      type: list
      elements: int
    files:
      description: Device files that it has open or mapped.
      type: list
      elements: str
    kind:
      description: V(own), V(named), V(monitor) or V(foreign).
      type: str
    reason:
      description: Why it is of that kind.
      type: str
    visible:
      description: Whether it is in this host's C(/proc). What another container runs is not.
      type: bool
released:
  description: >-
    What was ended (in check mode, would be), like RV(holders) and with the C(signals) that were sent; without any, it ended
    together with its main process.
  returned: always
  type: list
  elements: dict
blockers:
  description: One line for each foreign process.
  returned: always
  type: list
  elements: str
gpus:
  description: Memory in use (MiB) by index, as the last look found it.
  returned: always
  type: dict
seconds:
  description: How long it took.
  returned: always
  type: float
notes:
  description: What could not be read and why, and which of O(servers) is not there.
  returned: always
  type: list
  elements: str
msg:
  description: What was done or found; on failure also what was expected and what to do.
  returned: always
  type: str
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils import gpu, host, host_info
from ansible_collections.gpuserve.sglang.plugins.module_utils.gpu_release import (
    Decision,
    Limits,
    Release,
    ReleaseError,
    Scene,
    Server,
    judge,
    look,
    refusal,
    unit_in_the_way,
)
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import observe_unit
from ansible_collections.gpuserve.sglang.plugins.module_utils.preflight import unit_name


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["reported", "released"], "default": "reported"},
            "unit": {"type": "str", "default": "sglang-kimi.service"},
            "servers": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {"pid": {"type": "int"}, "match": {"type": "str"}},
            },
            "roots": {"type": "list", "elements": "path", "default": ["/opt/sglang"]},
            "foreign": {"type": "str", "choices": ["refuse", "leave"], "default": "refuse"},
            "term_timeout": {"type": "float", "default": 120},
            "kill_timeout": {"type": "float", "default": 10},
            "free_timeout": {"type": "float", "default": 30},
            "memory_threshold_mib": {"type": "int", "default": 1024},
            "nvidia_smi": {"type": "path"},
            "tool_timeout": {"type": "float", "default": 20},
        },
        supports_check_mode=True,
    )
    given = module.params
    began = time.monotonic()
    unit = unit_name(given["unit"])
    tree = host.Roots()
    tool = host_info.find_tool(given["nvidia_smi"])
    result: dict[str, Any] = {"changed": False, "released": [], "holders": [], "blockers": [], "gpus": {}, "notes": []}

    def main_pid(name: str) -> int | None:
        status = observe_unit(name)
        return None if status.error else status.main_pid

    def see(wanted: tuple[int, ...] = ()) -> Scene:
        def run(argv: Any) -> gpu.ToolResult:
            return gpu.run_tool(argv, given["tool_timeout"])

        return look(tree, tool, run, given["roots"], wanted, main_pid)

    def answer(scene: Scene, decision: Decision) -> None:
        result["holders"] = [holder.public() for holder in decision.holders]
        result["blockers"] = [holder.process.text() for holder in decision.foreign]
        result["gpus"] = {str(index): used for index, used in scene.memory.items()}
        result["notes"] = [*decision.notes, *([f"nvidia-smi: {scene.smi_error}"] if scene.smi_error else [])]

    def fail(text: str) -> None:
        module.fail_json(msg=text, **{**result, "seconds": round(time.monotonic() - began, 2)})

    try:
        limits = Limits(
            given["term_timeout"], given["kill_timeout"], given["free_timeout"], given["memory_threshold_mib"]
        )
        servers = [Server.load(entry) for entry in given["servers"]]
        scene = see(tuple(server.pid for server in servers if server.pid))
        decision = judge(scene, unit, servers)
        answer(scene, decision)
        if given["state"] == "reported":
            counts = ", ".join(
                f"{len(decision.of(kind))} {kind}"
                for kind in ("own", "named", "foreign", "monitor")
                if decision.of(kind)
            )
            result["msg"] = f"holders of the GPUs: {counts or 'none'}"
            module.exit_json(**{**result, "seconds": round(time.monotonic() - began, 2)})
        # What cannot be seen from here may be this service's own, on its way out: that is waited for.
        strangers = [holder for holder in decision.foreign if holder.process.visible]
        if strangers and given["foreign"] == "refuse":
            raise ReleaseError(refusal(strangers))
        status = observe_unit(unit) if unit else None
        if module.check_mode:
            running = status is not None and not status.error and status.active_state not in ("inactive", "failed")
            targets = [h for h in decision.targets if not (running and h.process.unit == unit)]
            result["released"] = [{**holder.public(), "signals": []} for holder in targets]
            result["changed"] = bool(targets)
            result["msg"] = "would end: " + ("; ".join(h.process.text() for h in targets) or "nothing")
            module.exit_json(**{**result, "seconds": round(time.monotonic() - began, 2)})
        if status is not None and (why := unit_in_the_way(status)):
            raise ReleaseError(why)
        # A number that was named is gone afterwards; whoever has it then is not meant.
        patterns = [server for server in servers if server.match]
        release = Release(
            decision, limits, see, lambda now: judge(now, unit, patterns), given["foreign"] == "leave", tree
        )
        try:
            release.run()
        finally:
            result["released"] = release.released
            result["changed"] = any(entry["signals"] for entry in release.released)
            if release.last is not None:
                result["gpus"] = {str(index): used for index, used in release.last.memory.items()}
    except (ReleaseError, ValueError) as error:
        fail(str(error))
    ended = "; ".join(f"pid {entry['pid']} ({entry['command']})" for entry in result["released"])
    seconds = round(time.monotonic() - began, 2)
    result["msg"] = f"ended {ended}; the GPUs are free" if ended else "the GPUs are free; nothing had to be ended"
    module.exit_json(**{**result, "seconds": seconds})


if __name__ == "__main__":
    main()
