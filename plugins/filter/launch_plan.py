# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Filter launch_plan: one plan of a deployment, over module_utils/plan.py."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import PlanError
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import launch_plan as make_plan

DOCUMENTATION = r"""
name: launch_plan
short_description: Make one plan of a wanted deployment, the host's facts and the models' facts
version_added: 0.1.0
author:
  - The gpuserve.sglang authors (@gpuserve)
description:
  - Computes command line, environment, unit settings and memory budget of an SGLang server, with the reason of every
    value, the warnings, and every deviation from the documented production box.
  - Unit, handbook, verify and benchmark read this plan; none of them computes a flag.
  - Each plan passes the engine's own parser without abbreviations. What the engine would overwrite, ignore or choke on
    is refused, never corrected. All problems are reported together, one line each, with the variable, what was found,
    what is expected and what to do.
  - Reads nothing but its input and the data files of the collection; it can be used without touching a host.
positional: _input
options:
  _input:
    description:
      - The wanted deployment. A key that is missing, null or an empty string has its default. The role C(deployment)
        builds it of its variables C(deployment_<key>); C(torch_cuda) is C(sglang_torch_cuda), C(load_budget_s) is
        C(deployment_load_budget), C(drain_budget_s) is C(deployment_drain_budget).
      - Any other key is refused.
    type: dict
    required: true
    suboptions:
      engine_version:
        description: Version of SGLang. Its flags must be known (C(plugins/module_utils/data/flags-<version>.json)).
        type: str
        default: 0.5.9
      profile:
        description: Name of a built-in profile (V(eagle3-topk1-v2), V(eagle3-topk4-v1), V(eagle3-topk4-nofusion), V(baseline), V(cpu)) or of one
          in O(_input.profiles).
        type: str
        default: eagle3-topk1-v2
      profiles:
        description: Profiles of this site, by name. Each has C(title), C(base), C(flags), C(env); a value is written
          plainly or as C({value, reason, source, when}).
        type: dict
        default: {}
      overrides:
        description: Values over the profile's, by field of the engine, such as C(mem_fraction_static). Null leaves a
          value to the engine.
        type: dict
        default: {}
      extra_args:
        description: Further flags, by flag or field. True is a switch.
        type: dict
        default: {}
      extra_env:
        description: Environment variables over the planned ones. Null removes one.
        type: dict
        default: {}
      model_path:
        description: Absolute path of the target model.
        type: path
        required: true
      draft_model_path:
        description: Absolute path of the draft model. Used by profiles that speculate.
        type: str
        default: ''
      served_model_name:
        description: Name that clients ask for. Empty takes the last part of O(_input.model_path).
        type: str
        default: ''
      listen_host:
        description: Address to listen on.
        type: str
        default: 127.0.0.1
        aliases: [host]
      port:
        description: Port to listen on, 1024 to 65535.
        type: int
        default: 30000
      python:
        description: Interpreter of the engine's environment.
        type: path
        default: /opt/sglang/current/venv/bin/python
      cuda_home:
        description: Folder of the CUDA toolkit.
        type: path
        default: /usr/local/cuda-13.0
      torch_cuda:
        description: CUDA version torch was built for, as a string.
        type: str
        default: '13.0'
      patches:
        description: Ids of the applied patches.
        type: list
        elements: str
        default: []
      state_dir:
        description: Working folder of the service.
        type: path
        default: /var/lib/sglang-kimi
      cache_dir:
        description: Folder of compiled kernels.
        type: path
        default: /var/cache/sglang-kimi
      load_budget_s:
        description: Seconds a start may take until the gate has passed.
        type: int
        default: 900
      drain_budget_s:
        description: Seconds in which running requests may finish when the server is stopped.
        type: int
        default: 120
      unit:
        description: Values over the planned unit settings, by key, such as C(timeout_stop_sec).
        type: dict
        default: {}
      nccl_env:
        description: NCCL variables; null chooses by topology (those of the record on PCIe, none on NVLink).
        type: dict
  host:
    description:
      - What M(gpuserve.sglang.gpu_host_info) returns. Missing keys are tolerated where no rule needs them.
    type: dict
    default: {}
  models:
    description:
      - C(target) and C(draft), each what M(gpuserve.sglang.model_info) returns, or null.
    type: dict
    default: {}
  report_errors:
    description:
      - Return C({error}) with the message instead of failing, so that the play can show it without Ansible's preamble.
        A plan has an empty C(error).
    type: bool
    default: false
seealso:
  - plugin: gpuserve.sglang.launch_args
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Plan the deployment
  ansible.builtin.set_fact:
    deployment_plan: >-
      {{ deployment_wanted | gpuserve.sglang.launch_plan(host=deployment_host, models=deployment_models) }}

- name: See what the production profile would run here
  ansible.builtin.debug:
    msg: >-
      {{ (wanted | gpuserve.sglang.launch_plan(host=deployment_host, models=deployment_models)).command | join(' ') }}
  vars:
    wanted:
      model_path: /data/kimi-k2.5
      draft_model_path: /data/eagle3/output_100k_sglang/4
      patches: [kimi-k25-eagle3, sm120-allreduce-fusion, eagle3-aux-capture]
      overrides:
        max_running_requests: 128
"""

RETURN = r"""
_value:
  description: The plan.
  type: dict
  contains:
    schema:
      description: Version of this structure.
      type: int
      sample: 1
    hash:
      description: SHA-256 over command, environment and unit; equal plans have equal hashes.
      type: str
    paths:
      description: Folders that the service writes to, C(state) and C(cache); the cache is the release's own.
      type: dict
    hardening:
      description: Sandboxing directives of the unit, each with C(directive), C(value), C(reason) and C(source).
      type: list
      elements: dict
    hardening_off:
      description: Sandboxing directives that stay off, each with C(directive) and C(reason).
      type: list
      elements: dict
    process_hash:
      description:
        - SHA-256 over what a process gets when it starts (command, environment, user, working directory, memory lock). Only a
          change of this one asks for a restart.
      type: str
    engine_version:
      description: Version of SGLang.
      type: str
    profile:
      description: Name of the profile.
      type: str
    model:
      description: C(path), C(draft_path) (empty without speculation), C(served_model_name), C(architecture),
        C(context_length) in tokens.
      type: dict
    command:
      description: Words of the whole command line.
      type: list
      elements: str
    argv:
      description: Words after the module's name.
      type: list
      elements: str
    args:
      description: Flags in order, with their values; true for a switch.
      type: dict
    env:
      description: Environment of the unit; every value is a string.
      type: dict
    unit:
      description:
        - Settings of the unit. C(name), C(description), C(user), C(group), C(working_directory), C(restart),
          C(kill_mode), C(after) (list), C(limit_memlock), C(memory_max) (text such as V(979450M) or V(infinity)), and
          in seconds C(restart_sec), C(timeout_start_sec), C(timeout_stop_sec), C(start_limit_interval_sec);
          C(start_limit_burst) is a count.
      type: dict
    endpoint:
      description: C(host), C(port), C(url) (reachable from the host itself), C(served_model_name).
      type: dict
    budget:
      description:
        - Memory of one rank in bytes, C(kv_tokens), C(kv_uncertainty) (fraction of them that the plan cannot know),
          C(full_length_requests), C(mem_fraction_static), C(largest_fraction) that leaves 1 GiB free, C(smallest_fraction)
          that holds the weights, C(margin_bytes) that stay free, C(assumptions).
        - A value is null when the facts do not suffice.
      type: dict
    notes:
      description: One entry for every flag, variable and unit setting; C(setting), C(value), C(reason), C(source).
      type: list
      elements: dict
    warnings:
      description: C(id) and C(message) of what the operator should know.
      type: list
      elements: dict
    deviations:
      description: What differs from the documented box; C(setting), C(documented), C(actual), C(reason), C(take_back)
        (a variable).
      type: list
      elements: dict
    patches:
      description: Ids of the applied patches.
      type: list
      elements: str
    error:
      description: Empty; the message, and the only key, when O(report_errors) is true and there is no plan.
      type: str
"""


def launch_plan(wanted: Any, host: Any = None, models: Any = None, report_errors: bool = False) -> dict[str, Any]:
    """Make the plan, or fail with one line for every problem."""
    try:
        return {**make_plan(wanted, host, models), "error": ""}
    except PlanError as error:
        message = f"No plan can be made:\n{error}"
        if report_errors:
            return {"error": message}
        raise AnsibleFilterError(message) from error


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Any]:
        """Names and functions."""
        return {"launch_plan": launch_plan}
