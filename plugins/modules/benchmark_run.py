#!/usr/bin/python
# Copyright: the gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Module: measure a server with SGLang's own bench_serving."""

from __future__ import annotations

DOCUMENTATION = r"""
module: benchmark_run
short_description: Measure a server with SGLang's own bench_serving
version_added: 0.1.0
author: The gpuserve.sglang authors (@gpuserve)
description:
  - Runs C(sglang.bench_serving) of the release that serves, on the host, once for each level and repeat, and stores the
    result below O(state_dir). Progress is shown on the controller.
  - Refuses a server that serves somebody else, because both would suffer.
  - The records that bench_serving writes hold the server's settings and any key. They are kept without them.
options:
  plan:
    description: The plan that the server follows, as the filter P(gpuserve.sglang.launch_plan#filter) returns it.
    type: dict
    required: true
  state_dir:
    description: State directory of the service; results lie in its folder C(benchmarks).
    type: path
    required: true
  prompts:
    description: The prompts, as text of JSON lines with the key C(prompt).
    type: str
    required: true
  levels:
    description: Numbers of concurrent requests to measure.
    type: list
    elements: int
    default: [1, 5, 30, 100, 250]
  requests:
    description: Requests of each level.
    type: int
    default: 30
  fill:
    description: Send at least as many requests as the level is high, so that it is really reached.
    type: bool
    default: false
  warmup:
    description: Requests before each level that are not measured.
    type: int
    default: 5
  output_tokens:
    description: New tokens of each request, 4 or more; the end-of-text token is ignored.
    type: int
    default: 200
  repeats:
    description: How often all levels are measured; the spread is the noise band.
    type: int
    default: 3
  seed:
    description: Fixes which prompts are asked, and in which order.
    type: int
    default: 1
  max_prompt_chars:
    description: Leave longer prompts out; 0 keeps all.
    type: int
    default: 0
  level_timeout:
    description: Seconds after which one run of one level is killed.
    type: int
    default: 900
  quiet_seconds:
    description: Seconds for which the server must serve nobody before the first level.
    type: float
    default: 10
  allow_others:
    description: Measure although somebody else is served. The figures are then worth little.
    type: bool
    default: false
  latest:
    description: Make the result the latest one, which the handbook and the acceptance watch read.
    type: bool
    default: true
  _phase:
    description: Internal, set by the action plugin.
    type: str
    choices: [start, poll]
    default: start
  _run:
    description: Internal, set by the action plugin. The folder of the run.
    type: path
  _known:
    description: Internal, set by the action plugin. The step that was shown last.
    type: str
    default: ""
  _window:
    description: Internal, set by the action plugin. Seconds to wait for news.
    type: float
    default: 0
attributes:
  check_mode:
    description: Looks whether somebody else is served, and measures nothing.
    support: full
  diff_mode:
    description: A result is new each time.
    support: none
  platform:
    description: Target OS/families that can be operated against.
    platforms: linux
    support: full
  action:
    description: Indicates this has a corresponding action plugin so some parts of the options can be executed on the controller.
    details: The action plugin asks for the progress and prints it.
    support: full
  async:
    description: Supports being used with the C(async) keyword.
    details: The action plugin needs the connection for its progress lines.
    support: none
"""

EXAMPLES = r"""
- name: Measure two levels
  gpuserve.sglang.benchmark_run:
    plan: "{{ deployment_plan }}"
    state_dir: /var/lib/sglang-kimi
    prompts: "{{ lookup('ansible.builtin.file', 'prompts.jsonl') }}"
    levels: [1, 30]
  register: measured
"""

RETURN = r"""
result:
  description:
    - The stored document, with C(schema), C(when), C(plan_hash), C(profile), C(engine_version), C(method) and C(levels).
    - Each level has C(concurrency), C(requests), C(completed), C(failed), C(output_tok_s) (median of the repeats), C(noise) (half
      their spread as a share), C(ttft_ms) and C(itl_ms) (each with C(p50) and C(p99)), C(accept_length) and C(repeats).
  returned: when something was measured
  type: dict
previous:
  description: The last result before this one; null when there is none.
  returned: when something was measured
  type: dict
path:
  description: Where the result lies on the host. The cleaned records lie beside it, as C(.jsonl).
  returned: when something was measured
  type: str
id:
  description: Name of the result, its time.
  returned: when something was measured
  type: str
  sample: 20260102T030405Z
state:
  description: V(done), V(failed), or V(checked) in check mode.
  returned: always
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils.bench_run import Server, poll, start
from ansible_collections.gpuserve.sglang.plugins.module_utils.benchmark import (
    BenchmarkError,
    check_method,
    read_prompts,
)

METHOD = (
    "levels",
    "requests",
    "fill",
    "warmup",
    "output_tokens",
    "repeats",
    "seed",
    "max_prompt_chars",
    "level_timeout",
)


def order_of(params: dict, plan: dict) -> dict:
    """What the worker needs to know."""
    return {
        "plan": {name: plan[name] for name in ("hash", "profile", "engine_version")},
        "server": {
            **{name: plan["endpoint"][name] for name in ("host", "port", "served_model_name")},
            "model_path": plan["model"]["path"],
            "tag": plan["hash"],
        },
        "python": plan["command"][0],
        "user": plan["unit"]["user"],
        "environment": plan["env"],
        "prompts": params["prompts"],
        "state_dir": params["state_dir"],
        "allow_others": params["allow_others"],
        "latest": params["latest"],
        "method": {name: params[name] for name in METHOD},
    }


def begin(module: AnsibleModule) -> dict:
    """Check, look whether the server is free, start the worker."""
    params, plan = module.params, module.params["plan"]
    wrong = check_method(params)
    if wrong:
        module.fail_json(msg=wrong, state="failed")
    missing = [name for name in ("hash", "command", "endpoint", "model", "unit", "env") if not plan.get(name)]
    if missing:
        module.fail_json(
            msg=f"plan has no {', '.join(missing)}; expected a plan as the filter launch_plan returns it",
            state="failed",
        )
    order = order_of(params, plan)
    read_prompts(params["prompts"], params["max_prompt_chars"])
    server = Server(plan["endpoint"]["host"], plan["endpoint"]["port"])
    gone = server.answers()
    if gone:
        raise BenchmarkError(
            f"nothing serves on {server.host}:{server.port} ({gone}), expected the server of this plan; start it first"
        )
    others = "" if params["allow_others"] else server.watch(params["quiet_seconds"])
    if others:
        raise BenchmarkError(
            f"the server serves somebody else: {others}. Expected {params['quiet_seconds']:g} s without, because a benchmark would slow "
            "them down and measure them too. Take the traffic away, or set allow_others (benchmark_allow_others)"
        )
    if module.check_mode:
        return {"state": "checked"}
    return {"state": "running", "_run": start(order), "progress": {}}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "required": True},
            "state_dir": {"type": "path", "required": True},
            "prompts": {"type": "str", "required": True},
            "levels": {"type": "list", "elements": "int", "default": [1, 5, 30, 100, 250]},
            "requests": {"type": "int", "default": 30},
            "fill": {"type": "bool", "default": False},
            "warmup": {"type": "int", "default": 5},
            "output_tokens": {"type": "int", "default": 200, "no_log": False},
            "repeats": {"type": "int", "default": 3},
            "seed": {"type": "int", "default": 1},
            "max_prompt_chars": {"type": "int", "default": 0},
            "level_timeout": {"type": "int", "default": 900},
            "quiet_seconds": {"type": "float", "default": 10.0},
            "allow_others": {"type": "bool", "default": False},
            "latest": {"type": "bool", "default": True},
            "_phase": {"type": "str", "choices": ["start", "poll"], "default": "start"},
            "_run": {"type": "path"},
            "_known": {"type": "str", "default": ""},
            "_window": {"type": "float", "default": 0.0},
        },
        supports_check_mode=True,
    )
    try:
        if module.params["_phase"] == "start":
            module.exit_json(changed=False, **begin(module))
        answer = poll(Path(module.params["_run"] or ""), module.params["_window"], module.params["_known"])
    except (BenchmarkError, OSError) as error:
        module.fail_json(msg=str(error), state="failed")
    if answer["state"] == "failed":
        module.fail_json(msg=answer["error"], state="failed")
    stopped = answer.get("result", {}).get("stopped")
    if stopped:
        module.fail_json(
            msg=f"{stopped}. What was measured before lies in {answer['path']}.", **{**answer, "state": "failed"}
        )
    module.exit_json(changed=answer["state"] == "done", **answer)


if __name__ == "__main__":
    main()
