"""One plan of a deployment: command line, environment, unit, memory, and the reason of every value.

``launch_plan`` is a pure function of the wanted deployment, the host's facts and the models' facts. Unit, handbook,
verify and benchmark read its result; none of them computes a flag. It either returns a plan that the engine's own
parser takes, or raises ``PlanError`` with every problem: the variable, what was found, what is expected, what to do.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import ipaddress
import json
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from . import budget as budgets
from . import documented, flags, profiles, rules
from .settings import (
    AT_START,
    CONTROL,
    PlanError,
    Problem,
    Setting,
    Warning_,
    as_dict,
    canonical,
    is_int,
    show,
    variable_of,
)
from .shapes import HostShape, ModelShape, host_shape, model_shape

__all__ = ["DEFAULTS", "PlanError", "checked_args", "launch_plan"]

#: What is wanted unless something else is said. The role's variables are called ``deployment_<key>``.
DEFAULTS: dict[str, Any] = {
    "engine_version": "0.5.9",
    "profile": "eagle3-topk1-v2",
    "profiles": {},
    "overrides": {},
    "extra_args": {},
    "extra_env": {},
    "model_path": "",
    "draft_model_path": "",
    "served_model_name": "",
    "listen_host": "127.0.0.1",
    "port": 30000,
    "python": "/opt/sglang/current/venv/bin/python",
    "cuda_home": "/usr/local/cuda-13.0",
    "torch_cuda": "13.0",
    "patches": [],
    "state_dir": "/var/lib/sglang-kimi",
    "cache_dir": "/var/cache/sglang-kimi",
    "load_budget_s": 900,
    "drain_budget_s": 120,
    "unit": {},
    "nccl_env": None,
}
#: Another word for a key.
_ALIASES = {"host": "listen_host"}
_TEXT = ("engine_version", "profile", "served_model_name", "listen_host", "torch_cuda")
_PATHS = ("model_path", "draft_model_path", "python", "cuda_home", "state_dir", "cache_dir")
_MAPPINGS = ("profiles", "overrides", "extra_args", "extra_env", "unit")
#: Fields that have a variable of their own.
_MANAGED = {
    "model_path": "model_path",
    "speculative_draft_model_path": "draft_model_path",
    "served_model_name": "served_model_name",
    "host": "listen_host",
    "port": "port",
}
#: Order of the command line: who and where first, then the profile's own order.
_FIRST = ("model_path", "served_model_name", "trust_remote_code", "host", "port", "device", "tp_size")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_ENV_VALUE = 65536

_RESTARTS = ("no", "on-failure", "on-abnormal", "on-abort", "on-watchdog", "on-success", "always")
_UNIT_CHOICES = {
    "restart": _RESTARTS,
    "kill_mode": ("mixed", "control-group"),
    "kill_signal": ("SIGINT", "SIGTERM"),
    "oom_policy": ("kill", "stop", "continue"),
}
_UNIT_SECONDS = ("restart_sec", "timeout_start_sec", "timeout_stop_sec", "start_limit_interval_sec")
_UNIT_NAMES = ("name", "user", "group")
_UNIT_LISTS = ("after", "wants")
_UNIT_SIZES = ("memory_max", "memory_high", "limit_memlock")
#: Seconds from the end of the last request to the end of the process: 2 to 7 were seen.
_END_S = 15


# --- the wanted deployment ------------------------------------------------------------------------


def _read_wanted(wanted: Any) -> tuple[dict[str, Any], list[Problem]]:
    """The wanted deployment with defaults, and what is wrong with its form."""
    if not isinstance(wanted, Mapping):
        problem = Problem(
            "input_type", "deployment_wanted", show(wanted), "a mapping", "Pass the variable deployment_wanted."
        )
        return {}, [problem]
    problems: list[Problem] = []
    values = dict(DEFAULTS)
    for raw, value in wanted.items():
        key = _ALIASES.get(raw, raw) if isinstance(raw, str) else raw
        if key not in DEFAULTS:
            near = difflib.get_close_matches(str(key), DEFAULTS, n=1)
            hint = f"Did you mean {variable_of(near[0])}?" if near else "Remove it."
            expected = "one of " + ", ".join(DEFAULTS)
            problems.append(Problem("input_unknown", variable_of(str(key)), show(value), expected, hint))
        elif value is not None and not (value == "" and isinstance(DEFAULTS[key], str)):
            values[str(key)] = value

    def refuse(key: str, expected: str, action: str, rule: str = "input_type") -> None:
        problems.append(Problem(rule, variable_of(key), show(values[key]), expected, action))

    for key in _TEXT:
        if not isinstance(values[key], str):
            refuse(key, "a string", "Put the value in quotes.")
            values[key] = ""
        elif CONTROL.search(values[key]):
            refuse(key, "text without control characters", "Remove them.", "control_characters")
        elif values[key].startswith("-"):
            refuse(key, "a value that does not begin with a dash", "The parser would read it as a flag.")
    for key in _PATHS:
        _check_path(key, values, refuse)
    for key in _MAPPINGS:
        if not isinstance(values[key], Mapping):
            refuse(key, "a mapping", "Write name: value lines, or {} for none.")
            values[key] = {}
    if values["nccl_env"] is not None and not isinstance(values["nccl_env"], Mapping):
        refuse("nccl_env", "null (chosen by topology) or a mapping", "Write name: value lines, {} for none, or null.")
        values["nccl_env"] = {}
    listen = values["listen_host"]
    if re.fullmatch(r"[\d.]+", listen) or ":" in listen:
        try:
            ipaddress.ip_address(listen)
        except ValueError:
            refuse("listen_host", "an address of this host", "Set it to 127.0.0.1, or to an address that is there.")
    if not is_int(values["port"]) or not 1024 <= values["port"] <= 65535:
        expected = "a port from 1024 to 65535: the service's user may not open lower ones"
        refuse("port", expected, "Set deployment_port to a free port, such as 30000.", "port_range")
    if not is_int(values["load_budget_s"]) or not 30 <= values["load_budget_s"] <= 86400:
        refuse(
            "load_budget_s",
            "seconds from 30 to 86400",
            "Kimi-K2.5 needs 570 s from a cold start; 900 leaves room.",
            "load_budget",
        )
        values["load_budget_s"] = DEFAULTS["load_budget_s"]
    if not is_int(values["drain_budget_s"]) or not 0 <= values["drain_budget_s"] <= 86400:
        refuse(
            "drain_budget_s",
            "seconds from 0 to 86400",
            "120 lets eight requests finish that took 18 s in tests.",
            "drain_budget",
        )
        values["drain_budget_s"] = DEFAULTS["drain_budget_s"]
    if not isinstance(values["patches"], (list, tuple)) or not all(isinstance(item, str) for item in values["patches"]):
        refuse("patches", "a list of patch ids", "Write [] when no patch is applied.")
        values["patches"] = []
    if isinstance(values["torch_cuda"], str) and not re.fullmatch(r"\d+\.\d+|cpu|none|", values["torch_cuda"]):
        refuse("torch_cuda", "a CUDA version such as 13.0, or cpu", "Write what torch.version.cuda prints, in quotes.")
    if re.search(r"\s", values["listen_host"]):
        refuse("listen_host", "an address or a name without spaces", "Write 127.0.0.1, or the address to listen on.")
    if values["engine_version"] not in flags.versions():
        expected = "an engine whose flags are known: " + ", ".join(flags.versions())
        action = "Run tools/dump_flag_schema.py with the interpreter of that engine; it writes the missing file."
        refuse("engine_version", expected, action, "engine_version")
    return values, problems


def _check_path(key: str, values: dict[str, Any], refuse: Any) -> None:
    value = values[key]
    if not isinstance(value, str):
        refuse(key, "an absolute path", "Put the path in quotes.")
        values[key] = ""
    elif value == "":
        if key != "draft_model_path":
            refuse(key, "an absolute path", f"Set {variable_of(key)}.", "absolute_path")
    elif not value.startswith("/"):
        action = "Write the whole path, beginning with /: a relative one resolves in the service's own folder."
        refuse(key, "an absolute path", action, "absolute_path")
    elif CONTROL.search(value):
        refuse(key, "a path without control characters", "Remove them.", "control_characters")
    elif ".." in value.split("/"):
        refuse(key, "a path without ..", "Write the path it leads to.", "absolute_path")
    elif value != (plain := posixpath.normpath(value)) and value.strip("/"):
        # A slash too many is the same path, and must not be another plan.
        values[key] = "/" + plain.lstrip("/")
    elif key != "model_path" and ":" in value and key in ("python", "cuda_home"):
        refuse(
            key, "a path without a colon", "PATH and LD_LIBRARY_PATH are lists separated by colons.", "absolute_path"
        )


# --- flags ----------------------------------------------------------------------------------------


def _find_flag(schema: flags.Schema, name: str, patches: frozenset[str]) -> flags.Flag | None:
    found = schema.find(name)
    field = name.lstrip("-").replace("-", "_")
    if found is None and rules.PATCHED_FIELDS.get(field) in patches:
        return _patched_flag(field)
    return found


@functools.lru_cache(maxsize=8)
def _patched_flag(field: str) -> flags.Flag:
    """A flag that a patch adds: every one of them takes one integer."""
    option = "--" + field.replace("_", "-")
    entry: dict[str, Any] = {
        "flag": option,
        "aliases": [],
        "dest": field,
        "field": field,
        "kind": "value",
        "type": "int",
        "nargs": None,
    }
    return flags.Flag(
        {**entry, "choices": None, "default": 0, "help": f"added by the patch {rules.PATCHED_FIELDS[field]}"}
    )


def _field(flag: flags.Flag) -> str:
    return flag.field or flag.dest


def _operator_settings(
    values: Mapping[str, Any], schema: flags.Schema, patches: frozenset[str]
) -> tuple[dict[str, Setting], list[Problem]]:
    """The flags that ``overrides`` and ``extra_args`` set, by field; checked against the parser's schema."""
    found: dict[str, Setting] = {}
    problems: list[Problem] = []
    for key in ("overrides", "extra_args"):
        for raw, value in values[key].items():
            variable = f"{variable_of(key)}.{raw}"
            if not isinstance(raw, str):
                problems.append(Problem("unknown_flag", variable, show(raw), "a name in text", "Put it in quotes."))
                continue
            flag = _find_flag(schema, raw, patches)
            if flag is None or (key == "overrides" and raw.startswith("-")):
                if flag is not None:
                    expected, action = "a field, not an option", f"Write {_field(flag)}."
                    problems.append(Problem("unknown_flag", variable, show(raw), expected, action))
                else:
                    problems.append(schema.complaint(variable, raw, rules.PATCHED_FIELDS))
                continue
            field = _field(flag)
            if field in _MANAGED:
                expected = f"nothing: this value has its own variable, {variable_of(_MANAGED[field])}"
                problems.append(
                    Problem("managed_flag", variable, show(value), expected, f"Set {variable_of(_MANAGED[field])}.")
                )
                continue
            if field in found:
                expected = f"one place: {found[field].variable} sets the same flag {flag.spelling}"
                problems.append(Problem("duplicate_setting", variable, show(value), expected, "Remove one of the two."))
                continue
            if flags.secret(field, value) is None and value is not None:
                problem = flags.check_value(flag, value, variable)
                if problem:
                    problems.append(problem)
                    continue
            reason = f"set by the operator in {variable}"
            found[field] = Setting(field, flags.normal(flag, value), reason, variable, variable)
    return found, problems


def _context(
    values: Mapping[str, Any],
    schema: flags.Schema,
    settings: Mapping[str, Setting],
    env: Mapping[str, Setting],
    unit: Mapping[str, Setting],
    host: HostShape,
    models: tuple[ModelShape | None, ModelShape | None],
    budget: budgets.Budget | None = None,
) -> rules.Context:
    return rules.Context(
        schema=schema,
        settings=settings,
        env=env,
        unit=unit,
        host=host,
        target=models[0],
        draft=models[1],
        patches=frozenset(values["patches"]),
        torch_cuda=values["torch_cuda"],
        cuda_home=values["cuda_home"],
        load_budget_s=values["load_budget_s"],
        topology_nccl=values["nccl_env"] is None,
        budget=budget,
    )


def _condition(name: str, context: rules.Context) -> tuple[bool, str]:
    """Whether a condition of a profile holds, and why not."""
    if name == "remote_code":
        return bool(context.target and context.target.has_remote_code), "the model directory ships no code of its own"
    if name == "fusion_allowed":
        obstacles = rules.fusion_obstacles(context)
        return not obstacles, "; ".join(why for why, _action in obstacles)
    return context.host.topology == name, f"the links between the GPUs are {context.host.topology}"


def _computed(name: str, host: HostShape) -> Any:
    """A value that a profile leaves to the host."""
    return max(1, len(host.gpus)) if name == "all_gpus" else None


def _managed_settings(values: Mapping[str, Any], speculative: bool) -> dict[str, Setting]:
    """The flags that have a variable of their own."""
    name = values["served_model_name"] or posixpath.basename(values["model_path"].rstrip("/"))
    named = (
        "the name clients ask for"
        if values["served_model_name"]
        else "the last part of the model's path: no name was given"
    )
    table = [
        ("model_path", values["model_path"], "the model to serve, on this host's own disk", "model_path"),
        ("served_model_name", name, named, "served_model_name"),
        ("host", values["listen_host"], "where the engine listens; it has no authentication of its own", "listen_host"),
        ("port", values["port"], "where the engine listens", "port"),
    ]
    if speculative and values["draft_model_path"]:
        reason = "the draft model that proposes the tokens"
        table.append(("speculative_draft_model_path", values["draft_model_path"], reason, "draft_model_path"))
    return {
        field: Setting(field, value, reason, variable_of(key), variable_of(key)) for field, value, reason, key in table
    }


# --- environment ----------------------------------------------------------------------------------


def _env_text(value: Any) -> str:
    return flags.text_of(value)


@functools.lru_cache(maxsize=1)
def nccl_env(topology: str) -> dict[str, str]:
    """The NCCL variables that are right for a topology (``pcie``, ``nvlink``, ``none``): measured, see data/nccl.json."""
    values = _nccl_record().get(topology, {}).get("values", {})
    return {str(name): str(value) for name, value in values.items()}


def _nccl_record() -> dict[str, Any]:
    with (flags.DATA / "nccl.json").open(encoding="utf-8") as stream:
        document: dict[str, Any] = json.load(stream)
    return document


def _environment(
    values: Mapping[str, Any], from_profile: Mapping[str, Setting], cuda: bool, tp: int, host: HostShape
) -> tuple[dict[str, Setting], dict[str, tuple[str, str]], list[Problem]]:
    """The environment of the unit; what the topology leaves out; what is wrong with the operator's part."""
    env: dict[str, Setting] = {}
    absent: dict[str, tuple[str, str]] = {}
    problems: list[Problem] = []
    nccl = values["nccl_env"]

    def put(name: str, value: str, reason: str, source: str, variable: str) -> None:
        env[name] = Setting(name, value, reason, source, variable)

    folder = posixpath.dirname(values["python"])
    home = values["cuda_home"].rstrip("/")
    middle = f"{home}/bin:" if cuda else ""
    put(
        "PATH",
        f"{folder}:{middle}{_SYSTEM_PATH}",
        "the release's own programs first",
        "collection",
        "deployment_python",
    )
    if cuda:
        why = "the toolkit that kernels are compiled with at first use"
        put("CUDA_HOME", home, why, "record", "deployment_cuda_home")
        put("LD_LIBRARY_PATH", f"{home}/lib64", why, "record", "deployment_cuda_home")
        put(
            "TRITON_PTXAS_PATH",
            f"{home}/bin/ptxas",
            "Triton's own ptxas may be older than the GPU",
            "record",
            "deployment_cuda_home",
        )
        cached = "compiled kernels outlive a restart: 55 s instead of 213 s to ready in tests"
        for name, child in (
            ("TRITON_CACHE_DIR", "triton"),
            ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
            ("FLASHINFER_WORKSPACE_BASE", "flashinfer"),
            ("TVM_FFI_CACHE_DIR", "tvm-ffi"),
        ):
            put(name, posixpath.join(values["cache_dir"], child), cached, "measured", "deployment_cache_dir")
    put(
        "XDG_CACHE_HOME",
        values["cache_dir"],
        "the service's user has no home to write to",
        "collection",
        "deployment_cache_dir",
    )
    for name, setting in from_profile.items():
        if setting.value is not None:
            env[name] = Setting(name, _env_text(setting.value), setting.reason, setting.source, setting.variable)
    record = _nccl_record()["pcie"]
    by_topology = cuda and tp > 1 and host.topology == "pcie"
    if nccl is None:
        for name, value in record["values"].items():
            if by_topology:
                put(name, value, record["reason"], record["source"], "deployment_nccl_env")
            elif host.topology == "nvlink":
                absent[name] = (_nccl_record()["elsewhere"]["reason"], "deployment_nccl_env")
            else:
                why = (
                    f"of use to several ranks on PCIe only; here: topology {host.topology}, {tp} rank(s). "
                    "What the role nccl keeps in sitecustomize.py is set all the same"
                )
                absent[name] = (why, "deployment_nccl_env")
    else:
        why = "deployment_nccl_env is set and does not name it. What the role nccl keeps in sitecustomize.py is set all the same"
        absent.update((name, (why, "deployment_nccl_env")) for name in record["values"])
    for key, chosen in (("nccl_env", nccl or {}), ("extra_env", values["extra_env"])):
        for name, value in chosen.items():
            variable = f"{variable_of(key)}.{name}"
            problem = _env_problem(name, value, variable)
            if problem:
                problems.append(problem)
            elif value is None:
                env.pop(name, None)
                absent[name] = (f"removed by {variable}", variable)
            else:
                put(name, _env_text(value), f"set by the operator in {variable}", variable, variable)
    return env, absent, problems


def _env_problem(name: Any, value: Any, variable: str) -> Problem | None:
    if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
        return Problem("env_name", variable, show(name), "a name of letters, digits and underscores", "Rename it.")
    if value is not None and not isinstance(value, (str, int, float)):
        return Problem(
            "env_type",
            variable,
            show(value),
            "a string, a number, true, false, or null to remove it",
            "Write one value.",
        )
    if isinstance(value, str) and len(value) > _MAX_ENV_VALUE:
        found = f"{len(value)} characters"
        return Problem("env_type", variable, found, f"at most {_MAX_ENV_VALUE} characters", "Put it in a file.")
    return None


# --- unit -----------------------------------------------------------------------------------------


def _unit(
    values: Mapping[str, Any], served: str, cuda: bool, tp: int, host: HostShape
) -> tuple[dict[str, Setting], list[Problem]]:
    """The unit's settings, computed, then overridden by the operator."""
    given = {str(key): value for key, value in values["unit"].items()}
    unit: dict[str, Setting] = {}
    problems: list[Problem] = []

    def put(key: str, value: Any, reason: str, source: str = "collection") -> None:
        variable = f"deployment_unit.{key}"
        if key in given:
            value, reason, source = given[key], f"set by the operator in {variable}", variable
            problem = _unit_problem(key, value, variable)
            if problem:
                problems.append(problem)
                return
        unit[key] = Setting(key, list(value) if isinstance(value, (list, tuple)) else value, reason, source, variable)

    def number(key: str) -> int:
        return int(unit[key].value) if key in unit and is_int(unit[key].value) else 0

    put("name", "sglang-kimi", "the name on record")
    put("description", f"SGLang serving {served}", "what systemctl and the journal show")
    put("user", "sglang", "a system user: RemoveIPC deletes the shared memory of others, and root is not needed")
    put("group", "sglang", "the user's own group")
    put("working_directory", values["state_dir"], "relative paths resolve in a folder of the service's own")
    put(
        "restart",
        "always",
        "no end that nobody asked for is a good one: statuses do not tell a crash from a stop",
        "measured",
    )
    put("restart_sec", 30, "lets the driver release the GPUs' memory", "record")
    put(
        "timeout_start_sec",
        values["load_budget_s"],
        "the load budget (deployment_load_budget): a start ends ready or fails",
        "computed",
    )
    put(
        "timeout_stop_sec",
        values["drain_budget_s"] + _END_S,
        f"the drain budget (deployment_drain_budget) in which running requests finish, and {_END_S} s for the engine's own end",
        "computed",
    )
    put("start_limit_burst", 3, "three failed starts in a row are no accident: stop and let the operator look")
    # One round more than the burst: the killing takes its time too, and a window that is a second short never trips.
    window = (number("start_limit_burst") + 1) * (
        number("timeout_start_sec") + number("timeout_stop_sec") + number("restart_sec")
    )
    window = -(-window // 60) * 60
    why = "(burst + 1) x (start + stop + pause): a shorter window never trips when one load takes minutes"
    put("start_limit_interval_sec", window, why, "computed")
    put(
        "kill_mode",
        "mixed",
        "the signal goes to the main process only, so that requests finish; the rest of the group is killed afterwards",
        "measured",
    )
    put(
        "kill_signal",
        "SIGINT",
        "the engine takes no new request, finishes the running ones and ends with status 0; after SIGTERM it goes on taking "
        "requests and kills itself (status 9), which looks like a crash",
        "measured",
    )
    memory = "infinity"
    if host.memory_total_mib:
        # Whole GiB: a kernel update changes the total by some MiB, and must not change the plan.
        memory = f"{max(1, (host.memory_total_mib - max(2048, host.memory_total_mib // 20)) // 1024)}G"
    why = "all of the host's memory but 5 % (at least 2 GiB), in whole GiB: a leak ends the service, not the host"
    put("memory_max", memory, why if host.memory_total_mib else "the host's memory is not known: no limit", "computed")
    put("memory_high", "infinity", "throttling would turn a leak into a server that hangs; memory_max ends it")
    tasks = 1024 + tp * (8 * (host.cpus or 64) + 512)
    why = "threads of the ranks (8 a CPU, and 512 for NCCL and compilers), several times what is needed: a runaway ends the service, not the host"
    put("tasks_max", -(-tasks // 1024) * 1024, why, "computed")
    put(
        "oom_score_adjust",
        -500,
        "memory_max ends the engine's own leak; when the host runs out it is somebody else's, and a start takes minutes",
    )
    put(
        "oom_policy",
        "kill",
        "a scheduler that is killed alone goes unnoticed (0.5.9): all of the service ends and starts again",
    )
    put("limit_memlock", "infinity", "NCCL and the driver pin memory", "record")
    put(
        "limit_nofile",
        1048576,
        "the engine wants 65535 and gives up where it may not: a connection takes a file, and so does shared memory",
    )
    after = ["nvidia-persistenced.service"] if cuda else []
    reason, source = (
        ("the driver must be initialised first", "record") if cuda else ("no driver to wait for", "sandbox")
    )
    wants: list[str] = []
    if not _always_there(values["listen_host"]):
        wants = ["network-online.target"]
        reason, source = f"{reason}; the address to listen on must be there", "collection"
    put("after", after + wants, reason, source)
    put(
        "wants",
        wants,
        "the address to listen on must be there" if wants else "it listens on an address that is always there",
    )
    hardening, found = _hardening(
        values, given.pop("hardening", {}), str(unit["working_directory"].value) if "working_directory" in unit else ""
    )
    problems += found
    put("hardening", [f"{name}={setting.value}" for name, setting in hardening.items()], _HARDENED)
    refused = {problem.variable for problem in problems}
    for key, value in given.items():
        if key not in unit and f"deployment_unit.{key}" not in refused:
            near = difflib.get_close_matches(key, unit, n=1)
            hint = f"Did you mean {near[0]}?" if near else "Remove it."
            expected = "one of " + ", ".join(unit)
            problems.append(Problem("unit_key", f"deployment_unit.{key}", show(value), expected, hint))
    return unit, problems


def _always_there(address: str) -> bool:
    """Whether an address can be listened on before the network is up."""
    if address in ("0.0.0.0", "::", "localhost"):
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


_HARDENED = "a hole in the engine is not a hole in the host; what must stay off for CUDA is listed with its reason"
#: Below these lie people's files, which ProtectHome hides.
_HOMES = ("/home/", "/root/", "/run/user/")


@functools.lru_cache(maxsize=1)
def _hardening_table() -> dict[str, Any]:
    with (flags.DATA / "hardening.json").open(encoding="utf-8") as stream:
        table: dict[str, Any] = json.load(stream)
    return table


def _hardening(
    values: Mapping[str, Any], given: Any, working_directory: str
) -> tuple[dict[str, Setting], list[Problem]]:
    """The sandboxing directives of the unit: the table's, with those of the operator over them (null takes one away)."""
    variable = "deployment_unit.hardening"
    if not isinstance(given, Mapping):
        expected = "a mapping of systemd directives, such as ProtectHome: read-only"
        return {}, [Problem("unit_value", variable, show(given), expected, "Correct it, or remove it.")]
    paths = [str(values[key]) for key in (*_PATHS,)] + [working_directory]
    writable = dict.fromkeys(path for path in (values["state_dir"], values["cache_dir"], working_directory) if path)
    computed = {
        "protect_home": "read-only" if any(f"{path}/".startswith(_HOMES) for path in paths) else "yes",
        # A cache folder that is made later must not keep the service from starting.
        "read_write_paths": " ".join(f"-{path}" for path in writable),
    }
    settings: dict[str, Setting] = {}
    for name, entry in _hardening_table()["on"].items():
        value = computed[entry["compute"]] if "compute" in entry else entry["value"]
        settings[name] = Setting(name, value, entry["reason"], "collection", f"{variable}.{name}")
    problems = []
    for raw, value in given.items():
        name, own = str(raw), f"{variable}.{raw}"
        if not re.fullmatch(r"[A-Z][A-Za-z]+", name):
            expected = "the name of a systemd directive, such as ProtectHome"
            problems.append(Problem("unit_key", own, show(raw), expected, "Correct it, or remove it."))
        elif value is None:
            settings.pop(name, None)
        elif not isinstance(value, str) or CONTROL.search(value):
            expected = "text in quotes, or null to take the directive away"
            problems.append(Problem("unit_value", own, show(value), expected, "Correct it, or remove it."))
        else:
            settings[name] = Setting(name, value, f"set by the operator in {own}", own, own)
    return settings, problems


def _unit_problem(key: str, value: Any, variable: str) -> Problem | None:
    def refuse(expected: str, action: str = "Correct it, or remove it.") -> Problem:
        return Problem("unit_value", variable, show(value), expected, action)

    if key in _UNIT_SECONDS or key == "start_limit_burst":
        low = 0 if key == "start_limit_interval_sec" else 1
        if not is_int(value) or not low <= value <= 604800:
            return refuse(f"a whole number from {low} to 604800" + (" (seconds)" if key != "start_limit_burst" else ""))
    elif key in ("tasks_max", "limit_nofile"):
        if not is_int(value) or not 64 <= value <= 1 << 30:
            return refuse(f"a whole number from 64 to {1 << 30}")
    elif key == "oom_score_adjust":
        if not is_int(value) or not -1000 <= value <= 1000:
            return refuse("a whole number from -1000 (killed last) to 1000 (killed first)")
    elif key in _UNIT_LISTS:
        if not isinstance(value, (list, tuple)) or not all(
            isinstance(item, str)
            and re.fullmatch(r"[A-Za-z0-9:_.@\\-]+\.(service|target|mount|socket|path|device)", item)
            for item in value
        ):
            return refuse("a list of unit names, such as nvidia-persistenced.service")
    elif key in _UNIT_CHOICES:
        choices = _UNIT_CHOICES[key]
        if value not in choices:
            return refuse("one of " + ", ".join(choices))
    elif key in _UNIT_SIZES:
        if not isinstance(value, str) or not re.fullmatch(r"infinity|[1-9]\d*[KMGT]?|[1-9]\d?%", value):
            return refuse("infinity, or a size such as 64G, in quotes")
    elif not isinstance(value, str) or not value.strip() or CONTROL.search(value):
        return refuse("a string without control characters")
    elif key in _UNIT_NAMES and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*", value):
        return refuse("a name of letters, digits, dots, dashes and underscores")
    elif key == "working_directory" and not value.startswith("/"):
        return refuse("an absolute path")
    return None


# --- the plan -------------------------------------------------------------------------------------


def _profile_settings(
    values: Mapping[str, Any], schema: flags.Schema, patches: frozenset[str]
) -> tuple[dict[str, profiles.Entry], dict[str, profiles.Entry], list[Problem]]:
    """The chosen profile's flags and environment, with a site profile's names and values checked like an operator's."""
    entries, env, problems = profiles.resolve(values["profile"], values["profiles"])
    checked: dict[str, profiles.Entry] = {}
    for name, entry in entries.items():
        flag = _find_flag(schema, name, patches)
        if flag is None:
            problems.append(schema.complaint(entry.setting.variable, name, rules.PATCHED_FIELDS))
            continue
        field = _field(flag)
        if field in _MANAGED:
            expected = f"nothing: this value has its own variable, {variable_of(_MANAGED[field])}"
            problems.append(
                Problem("managed_flag", entry.setting.variable, show(entry.setting.value), expected, "Remove it.")
            )
            continue
        value = entry.setting.value
        if entry.compute is None and value is not None and flags.secret(field, value) is None:
            problem = flags.check_value(flag, value, entry.setting.variable)
            if problem:
                problems.append(problem)
                continue
            entry.setting = dataclasses.replace(entry.setting, value=flags.normal(flag, value))
        checked[field] = entry
    good_env: dict[str, profiles.Entry] = {}
    for name, entry in env.items():
        problem = _env_problem(name, entry.setting.value, entry.setting.variable)
        if problem:
            problems.append(problem)
        else:
            good_env[name] = entry
    return checked, good_env, problems


def launch_plan(wanted: Any, host: Any = None, models: Any = None) -> dict[str, Any]:
    """Make the plan of a deployment.

    :param wanted: what the operator wants, the keys of ``DEFAULTS``.
    :param host: what ``gpu_host_info`` returns; missing keys are tolerated where no rule needs them.
    :param models: ``target`` and ``draft``, each what ``model_info`` returns.
    :returns: the plan; its keys are described in the documentation of the filter ``launch_plan``.
    :raises PlanError: when there is no plan; it holds every problem that was found.
    """
    values, problems = _read_wanted(wanted)
    if not values or any(problem.rule == "engine_version" for problem in problems):
        raise PlanError(problems)
    schema = flags.load(values["engine_version"])
    patches = frozenset(values["patches"])
    machine = host_shape(host)
    pair = as_dict(models)
    shapes = (model_shape(pair.get("target")), model_shape(pair.get("draft")))

    entries, env_entries, found = _profile_settings(values, schema, patches)
    problems += found
    chosen, found = _operator_settings(values, schema, patches)
    problems += found

    # 1. unconditional values, then the operator's, then those that depend on the rest
    settings: dict[str, Setting] = {}
    for field, entry in entries.items():
        setting = entry.setting
        if entry.compute:
            setting = Setting(
                field, _computed(entry.compute, machine), setting.reason, setting.source, setting.variable
            )
        if entry.when is None and setting.value is not None:
            settings[field] = setting
    absent: dict[str, tuple[str, str]] = {}
    settings |= chosen
    first = _context(values, schema, settings, {}, {}, machine, shapes)
    speculative = first.speculative
    settings |= _managed_settings(values, speculative)
    first = _context(values, schema, settings, {}, {}, machine, shapes)
    for field, entry in entries.items():
        if entry.when is None or field in chosen:
            continue
        holds, why = _condition(entry.when, first)
        if holds and entry.setting.value is not None:
            settings[field] = entry.setting
        elif not holds:
            flag = _find_flag(schema, field, patches)
            absent[flag.spelling if flag else field] = (why, entry.setting.variable)
    for field, setting in chosen.items():
        if setting.value is None or setting.value is False:
            flag = _find_flag(schema, field, patches)
            absent[flag.spelling if flag else field] = (f"taken away by {setting.variable}", setting.variable)
    settings = _ordered({field: setting for field, setting in settings.items() if setting.value is not None}, entries)

    cuda = first.cuda
    tp = first.tp
    env_settings = {}
    for name, entry in env_entries.items():
        if entry.when is None or _condition(entry.when, first)[0]:
            env_settings[name] = entry.setting
    env, env_absent, found = _environment(values, env_settings, cuda, tp, machine)
    problems += found
    absent |= env_absent
    served = str(settings["served_model_name"].value)
    unit, found = _unit(values, served, cuda, tp, machine)
    problems += found
    if problems:
        # The form is wrong: rules over half-read values would only add noise.
        raise PlanError(problems)

    context = _context(values, schema, settings, env, unit, machine, shapes)
    problems, warnings = rules.run(context)
    if problems:
        raise PlanError(problems)
    plain = {field: setting.value for field, setting in settings.items()}
    memory = budgets.compute(plain, {name: str(item.value) for name, item in env.items()}, machine, *shapes)
    context = _context(values, schema, settings, env, unit, machine, shapes, memory)
    problems, more = rules.run(context, only_with_budget=True)
    if problems:
        raise PlanError(problems)
    return _assemble(values, context, warnings + more, absent, patches)


def _ordered(settings: Mapping[str, Setting], entries: Mapping[str, Any]) -> dict[str, Setting]:
    """Settings in the order of the command line."""
    names = list(_FIRST)
    for field in entries:
        if field not in names:
            names.append(field)
        if field == "speculative_algorithm":
            names.append("speculative_draft_model_path")
    names += sorted(field for field in settings if field not in names)
    return {field: settings[field] for field in names if field in settings}


def _assemble(
    values: Mapping[str, Any],
    context: rules.Context,
    warnings: list[Warning_],
    absent: Mapping[str, tuple[str, str]],
    patches: frozenset[str],
) -> dict[str, Any]:
    argv: list[str] = []
    args: dict[str, Any] = {}
    printed: dict[str, Setting] = {}
    for field, setting in context.settings.items():
        flag = _find_flag(context.schema, field, patches)
        if flag is None:
            continue
        words = flags.render(flag, setting.value)
        if not words:
            continue
        argv += words
        args[flag.spelling] = setting.value
        printed[flag.spelling] = setting
    env = {name: str(setting.value) for name, setting in context.env.items()}
    unit = {key: setting.value for key, setting in context.unit.items()}
    command = [values["python"], "-m", "sglang.launch_server", *argv]
    listen = values["listen_host"]
    reach = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen, listen)
    url = f"http://[{reach}]:{values['port']}" if ":" in reach else f"http://{reach}:{values['port']}"
    served = str(context.settings["served_model_name"].value)
    notes = [
        {"setting": label, "value": setting.value, "reason": setting.reason, "source": setting.source}
        for label, setting in [
            *printed.items(),
            *context.env.items(),
            *((f"unit.{key}", setting) for key, setting in context.unit.items()),
        ]
    ]
    digest = hashlib.sha256(canonical({"command": command, "env": env, "unit": unit}).encode()).hexdigest()
    at_start = {key: unit[key] for key in AT_START}
    process_digest = hashlib.sha256(canonical({"command": command, "env": env, "unit": at_start}).encode()).hexdigest()
    if context.budget is None:
        raise PlanError([Problem("budget", "deployment_wanted", "no memory budget", "one", "Report this as a fault.")])
    hardening, _not_again = _hardening(
        values, as_dict(values["unit"]).get("hardening", {}), str(unit["working_directory"])
    )
    return {
        "schema": 1,
        "hash": digest,
        "process_hash": process_digest,
        "engine_version": values["engine_version"],
        "profile": values["profile"],
        "model": {
            "path": values["model_path"],
            "draft_path": values["draft_model_path"] if context.speculative else "",
            "served_model_name": served,
            "architecture": context.architecture,
            "context_length": context.budget.context_length,
        },
        "command": command,
        "argv": argv,
        "args": args,
        "env": env,
        "unit": unit,
        "endpoint": {"host": listen, "port": values["port"], "url": url, "served_model_name": served},
        "budget": context.budget.as_dict(),
        "notes": notes + _implicit(context),
        "warnings": [warning.as_dict() for warning in dict.fromkeys(warnings)],
        "deviations": documented.deviations({"flags": printed, "env": context.env, "unit": context.unit}, absent),
        "patches": sorted(patches),
        "paths": {"state": values["state_dir"], "cache": values["cache_dir"]},
        "hardening": [
            {"directive": name, "value": setting.value, "reason": setting.reason, "source": setting.source}
            for name, setting in hardening.items()
        ],
        "hardening_off": [
            {"directive": name, "reason": reason}
            for name, reason in _hardening_table()["off"].items()
            if name not in hardening
        ],
    }


def _implicit(context: rules.Context) -> list[dict[str, Any]]:
    """What the engine decides when nobody says it, as far as it can be foreseen; marked by its source."""
    memory = context.host.gpu_memory_mib
    budget = context.budget
    notes: list[dict[str, Any]] = []

    def note(field: str, value: Any, reason: str) -> None:
        if context.get(field) is None and value is not None:
            notes.append(
                {
                    "setting": f"engine.{field}",
                    "value": value,
                    "reason": reason,
                    "source": "engine default, not rendered",
                }
            )

    if context.cuda:
        note("chunked_prefill_size", budgets.default_chunk(memory), "chosen by GPU memory (server_args.py:911)")
        fraction = budget.mem_fraction_static if budget else None
        note("mem_fraction_static", fraction and round(fraction, 3), "the engine's own formula (server_args.py:1030)")
        if context.get("cuda_graph_bs") is None:
            largest = budgets.default_graph_max(memory, context.tp)
            note("cuda_graph_max_bs", largest, "chosen by GPU memory (server_args.py:911)")
        if budget and budget.kv_tokens and budget.context_length and not context.speculative:
            running = min(max(int(budget.kv_tokens / budget.context_length * 512), 2048), 4096)
            note(
                "max_running_requests",
                running,
                "chosen from the KV pool (model_runner_kv_cache_mixin.py); each row takes memory",
            )
        note(
            "model_loader_extra_config",
            "{}",
            "one loader thread a rank: more read nothing sooner, since shards are mapped and read when a tensor is copied "
            "(weight_utils.py:794), and without mmap each rank keeps every shard in memory; the play reads the weights into the "
            "page cache in parallel before the old server is stopped (sglang_service_page_cache)",
        )
    note("page_size", 1, "one token a page (server_args.py:2055)")
    note("context_length", budget.context_length if budget else None, "the model's own")
    note("kv_cache_dtype", "auto", "the model's own type: bfloat16 for Kimi-K2.5")
    return notes


def checked_args(args: Any, engine_version: str, patches: list[str] | None = None) -> list[list[str]]:
    """The words of each flag of a mapping, in its order.

    :param args: flags or fields and their values.
    :raises PlanError: when a name is no flag, or a value is none that the parser takes.
    """
    if not isinstance(args, Mapping):
        raise PlanError(
            [Problem("input_type", "launch_args", show(args), "a plan, or a mapping of flags", "Pass a mapping.")]
        )
    if engine_version not in flags.versions():
        expected = "an engine whose flags are known: " + ", ".join(flags.versions())
        problem = Problem(
            "engine_version", "engine_version", show(engine_version), expected, "Run tools/dump_flag_schema.py."
        )
        raise PlanError([problem])
    schema = flags.load(engine_version)
    groups: list[list[str]] = []
    problems: list[Problem] = []
    for name, value in args.items():
        flag = _find_flag(schema, str(name), frozenset(patches or ()))
        if flag is None:
            problems.append(schema.complaint(str(name), str(name), rules.PATCHED_FIELDS))
            continue
        problem_ = None if value is None else flags.check_value(flag, value, str(name))
        if problem_:
            problems.append(problem_)
        else:
            groups.append(flags.render(flag, flags.normal(flag, value)))
    if problems:
        raise PlanError(problems)
    return [group for group in groups if group]
