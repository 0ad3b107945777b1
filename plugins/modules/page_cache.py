#!/usr/bin/python
# Copyright: the gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: read weights into the page cache."""

from __future__ import annotations

DOCUMENTATION = r"""
module: page_cache
short_description: Read weights into the page cache
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Reads the files of weights in some folders with many threads, so that a server that is started next finds them in memory.
  - Reads only what is not in memory yet, and never more than fits beside what runs (C(MemAvailable), less a reserve of 8 GiB or
    5 % of the memory).
options:
  folders:
    description: Folders with weights (C(*.safetensors), C(*.bin), C(*.pt), C(*.pth), C(*.gguf)).
    type: list
    elements: path
    required: true
  mode:
    description: V(auto) reads all of it or, when it does not fit, nothing; V(true) as much as fits; V(false) nothing.
    type: str
    choices: [auto, "true", "false"]
    default: auto
  threads:
    description: Threads that read.
    type: int
    default: 16
  time_limit:
    description: Seconds after which the rest is left to the server.
    type: float
    default: 900
  _window:
    description: Internal, set by the action plugin. Seconds after which an interim state is returned; 0 goes to the end.
    type: float
    default: 0
  _since:
    description: Internal, set by the action plugin. What the window before knew.
    type: dict
attributes:
  check_mode:
    description: Says whether something would be read.
    support: full
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    details: The content of memory is nothing to show a difference of.
    support: none
  idempotence:
    description: What is in memory is not read again.
    support: full
  action:
    description: Indicates this has a corresponding action plugin so some parts of the options can be executed on the controller.
    details: The action plugin runs the module in windows of 10 seconds and prints the progress.
    support: full
  async:
    description: Supports being used with the C(async) keyword.
    support: none
  platform:
    description: Target OS/families that can be operated against.
    platforms: linux
    support: full
"""

EXAMPLES = r"""
- name: Have the weights in memory before the old server is stopped
  gpuserve.sglang.page_cache:
    folders: [/data/kimi-k2.5]
"""

RETURN = r"""
state:
  description:
    - V(done) when all that was decided is in memory, V(skipped) when nothing was to be read, V(stopped) when the time was over
      or a file could not be read.
    - V(reading) is an interim state, and what check mode predicts.
  type: str
  returned: always
total_bytes:
  description: Size of the weights.
  type: int
  returned: always
resident_bytes:
  description: What was in memory before.
  type: int
  returned: always
read_bytes:
  description: What was read.
  type: int
  returned: always
seconds:
  description: Time that it took.
  type: float
  returned: always
msg:
  description: What was done and why.
  type: str
  returned: always
"""

import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.page_cache import (
    Reader,
    Residency,
    decide,
    find_weights,
    pieces,
    read_meminfo,
    text_gb,
)


def begin(mode: str, work: list[tuple[str, int, int]]) -> dict[str, Any]:
    """What is there, and what is to be done."""
    total = sum(piece[2] for piece in work)
    resident = Residency().total(work)
    decision = decide(total, resident, read_meminfo(Path("/proc/meminfo").read_text()), mode)
    return {
        "first": 0,
        "done": 0,
        "limit": decision.limit,
        "why": decision.why,
        "total": total,
        "resident": resident,
        "read": 0,
        "began": time.time(),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "folders": {"type": "list", "elements": "path", "required": True},
            "mode": {"type": "str", "choices": ["auto", "true", "false"], "default": "auto"},
            "threads": {"type": "int", "default": 16},
            "time_limit": {"type": "float", "default": 900.0},
            "_window": {"type": "float", "default": 0.0},
            "_since": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    given = module.params
    result = {
        "changed": False,
        "state": "skipped",
        "total_bytes": 0,
        "resident_bytes": 0,
        "read_bytes": 0,
        "seconds": 0.0,
    }
    if given["mode"] == "false":
        module.exit_json(**result, msg="the page cache is left alone (mode false)")
    try:
        work = pieces(find_weights(given["folders"]))
        since = dict(given["_since"] or {}) or begin(given["mode"], work)
    except OSError as error:
        module.fail_json(msg=f"the weights cannot be read: {error}. Expected folders that hold a model.", **result)
    result |= {"total_bytes": since["total"], "resident_bytes": since["resident"]}
    if not since["limit"]:
        module.exit_json(**result, msg=since["why"])
    if module.check_mode:
        module.exit_json(**{**result, "changed": True, "state": "reading"}, msg=f"would read: {since['why']}")
    left = given["time_limit"] - (time.time() - since["began"])
    reader = Reader(work, given["threads"], since["limit"])
    seconds = min(left, given["_window"]) if given["_window"] else left
    since["first"], since["done"] = reader.run(since["first"], since["done"], max(0.0, seconds))
    since["read"] += reader.read_bytes
    spent = time.time() - since["began"]
    if reader.errors or (not reader.over() and spent >= given["time_limit"]):
        state, why = (
            "stopped",
            reader.errors[0] if reader.errors else f"the time of {given['time_limit']:.0f} s is over",
        )
        msg = f"{text_gb(since['read'])} were read, then stopped: {why}; the new server reads the rest"
    else:
        state = "done" if reader.over() else "reading"
        rate = since["read"] / max(spent, 0.001)
        msg = f"{text_gb(since['read'])} were read in {spent:.0f} s ({text_gb(rate)}/s): {since['why']}"
    result |= {"changed": since["read"] > 0, "state": state, "read_bytes": since["read"], "seconds": round(spent, 1)}
    if given["_window"] and state == "reading":
        result["_since"] = since
    module.exit_json(**result, msg=msg)


if __name__ == "__main__":
    main()
