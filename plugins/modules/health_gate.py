#!/usr/bin/python
# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0

"""Wait until an SGLang server serves; the thinking is in module_utils/health.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: health_gate
short_description: Wait until an SGLang server really serves
version_added: 0.1.0
description:
  - Watches a systemd unit (or a process) and its C(/health) until the server answers 200, owns its listening socket and
    has generated one real, sampled answer.
  - Ends at once when the unit has failed, was stopped or restarted, or when somebody else holds the port; the message
    then ends with the last lines of the journal.
  - An open port and the log line "ready to roll" prove nothing and are not used.
  - The action plugin of the same name prints one progress line on the controller when something changes, and at least
    every 15 seconds.
options:
  unit:
    description:
      - systemd unit of the server.
      - An empty text watches no unit; then nothing is known about who answers on the port, unless O(pid) is given.
    type: str
    default: sglang-kimi.service
  pid:
    description: Process to watch instead of a unit; needs O(unit) to be empty.
    type: int
  host:
    description: Address that the server listens on, as seen from the managed host.
    type: str
    default: 127.0.0.1
  port:
    description: Port that the server listens on, 1 to 65535.
    type: int
    default: 30000
  timeout:
    description: Seconds that the whole gate may take, the generation included.
    type: float
    default: 900
  poll_interval:
    description: Seconds between two requests to C(/health). The unit is looked at every half second all the time.
    type: float
    default: 1
  request_timeout:
    description:
      - Seconds that one request to C(/health) may take.
      - The engine itself needs 20 seconds to say 503 when its scheduler is dead, so stay above that.
    type: float
    default: 25
  generation_timeout:
    description:
      - Seconds that the one generation may take.
      - On a host with cold kernel caches it compiles the sampling kernels, for which 98 seconds were seen.
    type: float
    default: 180
  generate:
    description: Whether one real generation is part of being ready.
    type: bool
    default: true
  settings:
    description:
      - Settings file on the host, C(/etc/gpuserve-sglang/sglang-kimi.json). Its part C(gate) gives O(expected_kv_tokens),
        O(kv_tolerance) and O(last_start) where they are not given here, so that play and unit judge alike.
      - A file that is not there yet says nothing.
    type: path
  expected_kv_tokens:
    description:
      - Tokens that the plan expects in the engine's KV pool, C(deployment_plan.budget.kv_tokens).
      - A pool that is smaller by more than O(kv_tolerance) fails the gate; that happens when others hold memory of the GPUs.
      - 0, the default, when nothing is known; then nothing is judged, and O(ignore:msg) says so.
    type: int
  kv_tolerance:
    description: Fraction of O(expected_kv_tokens) that may be missing; 0.1 where nothing says otherwise.
    type: float
  last_start:
    description: File on the host that says how long the last good start took, C(last-start.json) of the state directory.
    type: path
  model:
    description: Served model name for the generation; without it C(/v1/models) is asked.
    type: str
  prompt:
    description: What the model is asked.
    type: str
    default: Say one short sentence.
  max_tokens:
    description: Tokens to generate at most.
    type: int
    default: 16
  journal_lines:
    description: Journal lines to return when the gate fails; secrets are taken out.
    type: int
    default: 20
  _window:
    description:
      - Internal, set by the action plugin. Seconds after which an interim state is returned, unless a request is under way.
      - 0 waits to the end.
    type: float
    default: 0
  _since:
    description: Internal, set by the action plugin. What the window before knew.
    type: dict
attributes:
  check_mode:
    description: Can run in check mode and return changed status prediction without modifying target.
    details: One look at the unit, the socket and C(/health); no waiting, no generation, and it never fails.
    support: full
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in check_mode), when in diff mode.
    details: Nothing is ever changed.
    support: none
  platform:
    description: Target OS/families that can be operated against.
    platforms: linux
    support: full
  action:
    description: Indicates this has a corresponding action plugin so some parts of the options can be executed on the controller.
    details: The action plugin runs the module in windows of 5 seconds and prints the progress.
    support: full
  async:
    description: Supports being used with the C(async) keyword.
    details: The action plugin needs the connection for its progress lines.
    support: none
author:
  - The gpuserve.sglang authors (@gpuserve)
"""

EXAMPLES = r"""
- name: Wait until the server serves
  gpuserve.sglang.health_gate:
    timeout: "{{ health_gate_timeout }}"

- name: Wait for a server that was started by hand
  gpuserve.sglang.health_gate:
    unit: ""
    pid: 4711
    port: 31000

- name: Ask whether something serves, whoever it is
  gpuserve.sglang.health_gate:
    unit: ""
    timeout: 5
    generate: false

# ansible localhost -m gpuserve.sglang.health_gate -a "port=30000 timeout=5 unit=''"
"""

RETURN = r"""
state:
  description:
    - V(ready) when the server serves.
    - V(failed) when the unit or process is gone, was stopped or was restarted.
    - V(foreign) when the port is held by, or answered by, somebody else.
    - V(pool_too_small) when the engine's KV pool is smaller than planned.
    - V(generation_failed) when C(/health) is fine and the generation is not.
    - V(timeout) when the time is over.
    - V(refused) (loading), V(warming) and V(generating) are seen in check mode only.
  returned: always
  type: str
  sample: ready
ready:
  description: Whether O(ignore:state) is V(ready).
  returned: always
  type: bool
elapsed:
  description: Seconds since the gate began.
  returned: always
  type: float
  sample: 57.3
attempts:
  description: Requests to C(/health).
  returned: always
  type: int
  sample: 41
last_status:
  description: Last answer of C(/health), a status code or one of refused, timeout, broken; empty when it was never asked.
  returned: always
  type: str
  sample: "200"
unit:
  description: What systemd said last about the unit; empty without a unit.
  returned: always
  type: dict
  sample:
    name: sglang-kimi.service
    active_state: active
    sub_state: running
    main_pid: 4711
    exec_main_code: 0
    exec_main_status: 0
    result: success
    n_restarts: 0
    invocation_id: 0123456789abcdef0123456789abcdef
pid:
  description: Main process that was watched; 0 when there is none.
  returned: always
  type: int
  sample: 4711
phase:
  description: Last phase of the start that the journal showed.
  returned: always
  type: str
  sample: weights 12/64
doing:
  description: What the server does, in words.
  returned: always
  type: str
  sample: loading weights 12/64
usual:
  description: Seconds that the last good start took, from O(last_start); 0 when that is not known.
  returned: always
  type: float
  sample: 570.0
pool:
  description: The KV pool against the plan; empty when the server never answered 200.
  returned: always
  type: dict
  sample:
    ok: true
    judged: true
    seen: 1684715
    planned: 1680000
    text: KV pool 1 684 715 tokens, 1 680 000 planned
generation:
  description: The one generation; empty when none was made.
  returned: always
  type: dict
  sample: {text: "The sky is blue.", tokens: 6, seconds: 0.4}
journal:
  description: Last journal lines when the gate failed, without secrets.
  returned: always
  type: list
  elements: str
msg:
  description: What was found; on failure also what was expected, what to do, what the gate of the start itself said, and the
    last journal lines.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import (
    INTERIM,
    Gate,
    Options,
    Since,
    check_options,
    with_settings,
)


def main() -> None:
    """Arguments in, dictionary out."""
    defaults = Options()
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "default": defaults.unit},
            "pid": {"type": "int"},
            "host": {"type": "str", "default": defaults.host},
            "port": {"type": "int", "default": defaults.port},
            "settings": {"type": "path"},
            "expected_kv_tokens": {"type": "int", "no_log": False},
            "kv_tolerance": {"type": "float"},
            "last_start": {"type": "path"},
            "timeout": {"type": "float", "default": defaults.timeout},
            "poll_interval": {"type": "float", "default": defaults.poll_interval},
            "request_timeout": {"type": "float", "default": defaults.request_timeout},
            "generation_timeout": {"type": "float", "default": defaults.generation_timeout},
            "generate": {"type": "bool", "default": defaults.generate},
            "model": {"type": "str"},
            "prompt": {"type": "str", "default": defaults.prompt},
            "max_tokens": {"type": "int", "default": defaults.max_tokens, "no_log": False},
            "journal_lines": {"type": "int", "default": defaults.journal_lines},
            "_window": {"type": "float", "default": 0.0},
            "_since": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    given = dict(module.params)
    window = given.pop("_window")
    since = given.pop("_since")
    settings = given.pop("settings") or ""
    # What is None without being a question to the settings file.
    pid, model = given.pop("pid"), given.pop("model") or ""
    try:
        known = with_settings(given, settings)
    except ValueError as error:
        module.fail_json(msg=str(error))
    options = Options(**known, pid=pid or 0, model=model)
    wrong = check_options(options)
    if pid == 0:
        wrong = "pid is 0, expected a process number above 0"
    if wrong:
        module.fail_json(msg=wrong)
    try:
        gate = Gate(options, Since.load(since))
    except (TypeError, ValueError) as error:
        module.fail_json(msg=f"_since is not what an earlier window returned ({error}): leave it out")
    if module.check_mode:
        result = gate.once()
        result["msg"] = f"check mode, one look and no generation: {result['msg']}"
        module.exit_json(changed=False, **result)
    result = gate.wait(window)
    if result["ready"] or result["state"] in INTERIM:
        module.exit_json(changed=False, **result)
    module.fail_json(changed=False, **result)


if __name__ == "__main__":
    main()
