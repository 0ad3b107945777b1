"""Whole plans: the documented box flag for flag, the other profiles, topology, overrides, errors in the input."""

from __future__ import annotations

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import plan_cases as cases
import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import documented, flags, profiles
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import DEFAULTS, PlanError, launch_plan
from ansible_collections.gpuserve.sglang.plugins.module_utils.systemd_text import exec_line

ROOT = Path(__file__).resolve().parents[2]
NCCL = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216",
    "NCCL_NTHREADS": "512",
}
#: The record's command line, and what this collection says in addition.
DOCUMENTED = {
    "--tp-size": 8,
    "--speculative-algorithm": "EAGLE3",
    "--speculative-draft-model-path": "/data/eagle3/output_100k_sglang/4",
    "--speculative-num-steps": 2,
    "--speculative-eagle-topk": 1,
    "--speculative-num-draft-tokens": 3,
    "--attention-backend": "flashinfer",
    "--enable-flashinfer-allreduce-fusion": True,
    "--cuda-graph-max-bs": 128,
    "--mem-fraction-static": 0.88,
    "--host": "127.0.0.1",
    "--port": 30000,
}
ADDED = {
    "--served-model-name": "kimi-k2.5",
    "--trust-remote-code": True,
    "--enable-metrics": True,
    "--max-running-requests": 48,
}


def plan(
    changes: dict[str, Any] | None = None, host: dict[str, Any] | None = None, models: Any = None
) -> dict[str, Any]:
    return launch_plan(cases.wanted(**(changes or {})), host or cases.host(), models or cases.models())


def problems(changes: dict[str, Any], host: dict[str, Any] | None = None, models: Any = None) -> list[str]:
    with pytest.raises(PlanError) as caught:
        plan(changes, host, models)
    return [problem.line() for problem in caught.value.problems]


# --- the documented box ---------------------------------------------------------------------------


def test_documented_command_line_flag_for_flag() -> None:
    made = plan()
    assert made["args"] == {"--model-path": "/data/kimi-k2.5", **DOCUMENTED, **ADDED}
    assert made["command"][:3] == ["/opt/sglang/current/venv/bin/python", "-m", "sglang.launch_server"]
    assert made["command"][3:] == made["argv"]
    assert made["endpoint"] == {
        "host": "127.0.0.1",
        "port": 30000,
        "url": "http://127.0.0.1:30000",
        "served_model_name": "kimi-k2.5",
    }


def test_documented_environment() -> None:
    env = plan()["env"]
    assert {name: value for name, value in env.items() if name.startswith("NCCL_")} == NCCL
    assert env["SGLANG_ENABLE_SPEC_V2"] == "True"
    assert env["SGLANG_DISABLE_CUDNN_CHECK"] == "1"
    assert env["CUDA_HOME"] == "/usr/local/cuda-13.0"
    assert env["TRITON_PTXAS_PATH"] == "/usr/local/cuda-13.0/bin/ptxas"
    assert env["LD_LIBRARY_PATH"] == "/usr/local/cuda-13.0/lib64"
    assert env["PATH"].split(":")[:2] == ["/opt/sglang/current/venv/bin", "/usr/local/cuda-13.0/bin"]
    assert all(isinstance(value, str) for value in env.values())


def test_documented_unit() -> None:
    unit = plan()["unit"]
    assert unit["name"] == "sglang-kimi" and unit["restart_sec"] == 30 and unit["timeout_start_sec"] == 900
    assert unit["limit_memlock"] == "infinity" and unit["after"] == ["nvidia-persistenced.service"]
    assert unit["start_limit_interval_sec"] >= unit["start_limit_burst"] * (900 + 30)
    assert unit["memory_max"] == "956G"


def test_a_stop_is_drained_and_a_loop_of_slow_failures_trips() -> None:
    unit = plan({"drain_budget_s": 300, "load_budget_s": 1200})["unit"]
    assert (unit["kill_mode"], unit["kill_signal"], unit["restart"]) == ("mixed", "SIGINT", "always")
    assert unit["timeout_stop_sec"] == 315
    # Starts that use up their whole budget, each followed by a stop that does so too, still fall into one window. Seen on real
    # systemd: with exactly three rounds the fourth start came half a second late, every time, and the loop never ended.
    cycle = unit["timeout_start_sec"] + unit["timeout_stop_sec"] + unit["restart_sec"]
    assert unit["start_limit_interval_sec"] >= unit["start_limit_burst"] * cycle * 1.2
    assert unit["start_limit_interval_sec"] < (unit["start_limit_burst"] + 2) * cycle


def test_limits_of_the_unit() -> None:
    unit = plan()["unit"]
    assert (unit["oom_policy"], unit["oom_score_adjust"], unit["memory_high"]) == ("kill", -500, "infinity")
    assert unit["limit_nofile"] >= 65535
    # Eight ranks on 128 CPUs with a thread pool each, and room.
    assert unit["tasks_max"] >= 8 * 128 * 4
    assert unit["tasks_max"] % 1024 == 0


@pytest.mark.parametrize(
    ("listen", "wants"),
    [("127.0.0.1", []), ("::1", []), ("0.0.0.0", []), ("localhost", []), ("192.0.2.7", ["network-online.target"]),
     ("box.example.org", ["network-online.target"])],
)  # fmt: skip
def test_an_address_that_must_be_there_is_waited_for(listen: str, wants: list[str]) -> None:
    unit = plan({"listen_host": listen})["unit"]
    assert unit["wants"] == wants
    assert unit["after"] == ["nvidia-persistenced.service", *wants]


def test_deviations_are_complete_and_say_how_to_return() -> None:
    made = plan()
    found = {item["setting"]: item for item in made["deviations"]}
    flags_ = {name for name in found if name.startswith("--")}
    assert flags_ == set(ADDED)
    assert {name for name in found if name.startswith("unit.") and found[name]["documented"]} == {
        "unit.user",
        "unit.working_directory",
        "unit.restart",
        "unit.kill_mode",
    }
    for item in found.values():
        assert item["reason"] and item["take_back"].startswith(("deployment_", "sglang_")), item


def test_what_neither_side_sets_is_no_deviation() -> None:
    assert plan()["unit"]["wants"] == []
    assert "unit.wants" not in [item["setting"] for item in plan()["deviations"]]
    wide = plan({"listen_host": "192.0.2.10"})
    assert wide["unit"]["wants"] and "unit.wants" in [item["setting"] for item in wide["deviations"]]


def test_a_deviation_can_be_taken_back() -> None:
    changes = {
        "overrides": {"max_running_requests": None, "enable_metrics": False, "trust_remote_code": False},
        "unit": {
            "user": "root",
            "working_directory": "/root/sglang",
            "restart": "on-failure",
            "kill_mode": "control-group",
        },
    }
    made = plan(changes)
    assert made["args"] == {"--model-path": "/data/kimi-k2.5", **DOCUMENTED, "--served-model-name": "kimi-k2.5"}
    assert [item["setting"] for item in made["deviations"] if item["documented"] is not None] == []


def test_every_setting_has_a_note() -> None:
    made = plan()
    noted = {note["setting"]: note for note in made["notes"]}
    for label, value in [
        *made["args"].items(),
        *made["env"].items(),
        *((f"unit.{k}", v) for k, v in made["unit"].items()),
    ]:
        assert noted[label]["value"] == value or str(noted[label]["value"]) == value, label
        assert noted[label]["reason"] and noted[label]["source"], label


def test_what_the_engine_decides_silently_is_noted() -> None:
    noted = {note["setting"]: note["value"] for note in plan({"profile": "baseline"})["notes"]}
    assert noted["engine.chunked_prefill_size"] == 8192
    assert noted["engine.mem_fraction_static"] == pytest.approx(0.78, abs=0.005)
    assert noted["engine.max_running_requests"] == 2048


def test_plan_is_plain_data_and_stable() -> None:
    first, second = plan(), plan()
    assert first == second == json.loads(json.dumps(first))
    assert re.fullmatch(r"[0-9a-f]{64}", first["hash"])
    assert plan({"port": 30001})["hash"] != first["hash"]
    assert plan({"extra_env": {"A": "1"}})["hash"] != first["hash"]
    assert plan({"unit": {"restart_sec": 31}})["hash"] != first["hash"]


def test_process_hash_changes_only_with_what_a_restart_would_change() -> None:
    first = plan()
    assert re.fullmatch(r"[0-9a-f]{64}", first["process_hash"])
    for change in ({"port": 30001}, {"extra_env": {"A": "1"}}, {"unit": {"user": "other"}}):
        assert plan(change)["process_hash"] != first["process_hash"], change
    for change in (
        {"unit": {"restart_sec": 31}},
        {"unit": {"memory_max": "100G"}},
        {"load_budget_s": 1200},
        {"drain_budget_s": 60},
    ):
        assert plan(change)["process_hash"] == first["process_hash"], change


def test_input_is_not_changed() -> None:
    wanted, host, models = cases.wanted(overrides={"page_size": 1}), cases.host(), cases.models()
    before = copy.deepcopy((wanted, host, models))
    launch_plan(wanted, host, models)
    assert (wanted, host, models) == before


# --- other profiles and hosts ---------------------------------------------------------------------


def test_tree_profile() -> None:
    made = plan({"profile": "eagle3-topk4-v1"})
    assert made["args"]["--speculative-eagle-topk"] == 4 and made["args"]["--speculative-num-draft-tokens"] == 16
    assert made["env"]["SGLANG_ENABLE_SPEC_V2"] == "False"


def test_baseline_has_no_speculation() -> None:
    made = plan({"profile": "baseline"})
    assert not [flag for flag in made["args"] if "speculative" in flag]
    assert "SGLANG_ENABLE_SPEC_V2" not in made["env"] and "--mem-fraction-static" not in made["args"]
    assert made["model"]["draft_path"] == ""
    missing = {item["setting"]: item for item in made["deviations"] if item["actual"] is None}
    assert {"--speculative-algorithm", "--mem-fraction-static", "SGLANG_ENABLE_SPEC_V2"} <= set(missing)
    assert missing["--speculative-algorithm"]["take_back"] == "deployment_profile"


def test_cpu_profile() -> None:
    made = launch_plan(cases.sandbox(), cases.cpu_host(), {})
    assert made["args"] == {
        "--model-path": "/srv/tiny",
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": 30000,
        "--device": "cpu",
        "--tp-size": 1,
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--disable-cuda-graph": True,
        "--context-length": 2048,
        "--chunked-prefill-size": 1024,
        "--max-total-tokens": 4096,
        "--max-running-requests": 8,
        "--sleep-on-idle": True,
        "--mem-fraction-static": 0.1,
        "--enable-metrics": True,
    }
    assert {name: made["env"][name] for name in ("SGLANG_USE_CPU_ENGINE", "HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE")} == {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    assert not [name for name in made["env"] if name.startswith(("CUDA", "NCCL", "TRITON", "LD_"))]
    assert "cuda" not in made["env"]["PATH"] and made["unit"]["after"] == []
    assert made["budget"]["kv_tokens"] == 4096 and made["budget"]["full_length_requests"] == 2.0


def test_nvlink_gets_no_pcie_settings() -> None:
    made = plan(host=cases.h200())
    assert not [name for name in made["env"] if name.startswith("NCCL_")]
    reasons = [item["reason"] for item in made["deviations"] if item["setting"] == "NCCL_PROTO"]
    assert "3.7 times" in reasons[0]


@pytest.mark.parametrize("topology", ["none", "unknown"])
def test_unknown_links_get_no_nccl_settings_and_no_fusion(topology: str) -> None:
    made = plan(host=cases.host(topology=topology))
    assert not [name for name in made["env"] if name.startswith("NCCL_")]
    assert "--enable-flashinfer-allreduce-fusion" not in made["args"]
    (reason,) = [item["reason"] for item in made["deviations"] if item["setting"] == "NCCL_PROTO"]
    assert reason == (
        f"of use to several ranks on PCIe only; here: topology {topology}, 8 rank(s). "
        "What the role nccl keeps in sitecustomize.py is set all the same"
    )


def test_nccl_by_hand() -> None:
    assert plan({"nccl_env": {"NCCL_ALGO": "Tree"}})["env"]["NCCL_ALGO"] == "Tree"
    bare = plan({"nccl_env": {}})
    assert not [name for name in bare["env"] if name.startswith("NCCL_")]
    (item,) = [item for item in bare["deviations"] if item["setting"] == "NCCL_PROTO"]
    assert item["reason"].startswith("deployment_nccl_env is set and does not name it.")
    assert item["take_back"] == "deployment_nccl_env"


def test_fusion_is_left_out_with_its_reason_where_it_must_not_be() -> None:
    made = plan({"patches": ["kimi-k25-eagle3", "sm120-allreduce-fusion"]})
    assert "--enable-flashinfer-allreduce-fusion" not in made["args"]
    deviation = [item for item in made["deviations"] if item["setting"] == "--enable-flashinfer-allreduce-fusion"]
    assert deviation[0]["documented"] is True and deviation[0]["actual"] is None
    assert "partial sum" in deviation[0]["reason"]


def test_tensor_parallelism_is_the_hosts_gpus() -> None:
    llama = cases.models(cases.LLAMA)
    assert plan({"profile": "baseline"}, cases.host(2), llama)["args"]["--tp-size"] == 2
    assert plan({"profile": "baseline"}, cases.host(1), llama)["args"]["--tp-size"] == 1


def test_partial_host_gives_warnings() -> None:
    host = {"gpus": [{"index": index, "compute_cap": "12.0"} for index in range(8)]}
    made = plan({"profile": "baseline"}, host)
    ids = {warning["id"] for warning in made["warnings"]}
    assert {"driver_toolkit", "budget_known", "topology_unknown"} <= ids
    assert made["budget"]["kv_tokens"] is None and made["unit"]["memory_max"] == "infinity"


def test_memory_limit_follows_the_control_group() -> None:
    host = cases.host()
    host["memory"]["limit_mib"] = 600000
    assert plan(host=host)["unit"]["memory_max"] == "556G"


def test_all_interfaces_are_reached_over_loopback() -> None:
    assert plan({"listen_host": "0.0.0.0"})["endpoint"]["url"] == "http://127.0.0.1:30000"
    assert plan({"host": "::"})["endpoint"]["url"] == "http://[::1]:30000"


def test_served_name_falls_back_to_the_path() -> None:
    assert plan({"served_model_name": ""})["args"]["--served-model-name"] == "kimi-k2.5"


# --- overrides and profiles of a site -------------------------------------------------------------


def test_the_loader_s_threads_are_left_alone_and_can_be_set() -> None:
    untouched = plan()
    (note,) = [entry for entry in untouched["notes"] if "model_loader_extra_config" in entry["setting"]]
    assert (note["setting"], note["value"], note["source"]) == (
        "engine.model_loader_extra_config", "{}", "engine default, not rendered",
    )  # fmt: skip
    assert "--model-loader-extra-config" not in untouched["command"]
    for value in (
        {"enable_multithread_load": True, "num_threads": 8},
        '{"num_threads": 8, "enable_multithread_load": true}',
    ):
        made = plan({"overrides": {"model_loader_extra_config": value}})
        at = made["command"].index("--model-loader-extra-config")
        assert json.loads(made["command"][at + 1]) == {"enable_multithread_load": True, "num_threads": 8}
        assert not made["command"][at + 2 : at + 3] or made["command"][at + 2].startswith("--")
        # The unit's text carries it to the engine as one word.
        assert made["command"][at + 1] in shlex.split(exec_line(made["command"]).replace("\\\n", ""))
        assert [entry["source"] for entry in made["notes"] if "loader" in entry["setting"]] == [
            "deployment_overrides.model_loader_extra_config"
        ]


def test_override_keeps_its_own_source() -> None:
    made = plan({"overrides": {"mem_fraction_static": 0.85}, "extra_args": {"--schedule-policy": "lpm"}})
    noted = {note["setting"]: note for note in made["notes"]}
    assert noted["--mem-fraction-static"]["source"] == "deployment_overrides.mem_fraction_static"
    assert noted["--schedule-policy"]["source"] == "deployment_extra_args.--schedule-policy"
    assert noted["--cuda-graph-max-bs"]["source"] == "record"
    deviation = [item for item in made["deviations"] if item["setting"] == "--mem-fraction-static"]
    assert deviation == [
        {
            "setting": "--mem-fraction-static",
            "documented": 0.88,
            "actual": 0.85,
            "reason": "set by the operator in deployment_overrides.mem_fraction_static",
            "take_back": "deployment_overrides.mem_fraction_static",
        }
    ]


def test_null_leaves_a_value_to_the_engine() -> None:
    made = plan({"overrides": {"cuda_graph_max_bs": None}, "extra_env": {"SGLANG_DISABLE_CUDNN_CHECK": None}})
    assert "--cuda-graph-max-bs" not in made["args"] and "SGLANG_DISABLE_CUDNN_CHECK" not in made["env"]


def test_extra_env_booleans_are_canonical() -> None:
    env = plan({"extra_env": {"SGLANG_ENABLE_SPEC_V2": True, "OMP_NUM_THREADS": 4}})["env"]
    assert env["SGLANG_ENABLE_SPEC_V2"] == "True" and env["OMP_NUM_THREADS"] == "4"


def test_patched_flag_needs_its_patch() -> None:
    changes = {"overrides": {"speculative_disable_batch_threshold": 0}}
    assert plan(changes)["args"]["--speculative-disable-batch-threshold"] == 0
    lines = problems({**changes, "patches": ["kimi-k25-eagle3"]})
    assert "spec-disable-batch-threshold" in lines[0] and "exists only with the patch" in lines[0]


def test_site_profile_extends_a_built_in_one() -> None:
    site = {
        "mine": {
            "base": "eagle3-topk1-v2",
            "title": "Ours",
            "flags": {
                "mem_fraction_static": 0.86,
                "max_running_requests": {"value": 96, "reason": "our traffic", "source": "measured here"},
                "schedule_policy": {"value": "lpm", "when": "pcie"},
                "cuda_graph_max_bs": None,
            },
            "env": {"OMP_NUM_THREADS": 8, "ONLY_NVLINK": {"value": "1", "when": "nvlink"}},
        }
    }
    made = plan({"profile": "mine", "profiles": site})
    assert made["args"]["--mem-fraction-static"] == 0.86 and made["args"]["--max-running-requests"] == 96
    assert made["args"]["--schedule-policy"] == "lpm" and "--cuda-graph-max-bs" not in made["args"]
    assert made["env"]["OMP_NUM_THREADS"] == "8" and "ONLY_NVLINK" not in made["env"]
    noted = {note["setting"]: note for note in made["notes"]}
    assert noted["--max-running-requests"]["reason"] == "our traffic"
    deviation = {item["setting"]: item for item in made["deviations"]}
    assert deviation["--mem-fraction-static"]["take_back"] == "deployment_profiles.mine.flags.mem_fraction_static"


@pytest.mark.parametrize(
    ("site", "variable", "words"),
    [
        ({"mine": 3}, "deployment_profiles.mine", "a mapping"),
        ({"mine": {"flag": {}}}, "deployment_profiles.mine.flag", "flags"),
        ({"mine": {"base": 4}}, "deployment_profiles.mine.base", "the name of a profile"),
        ({"mine": {"base": "other"}}, "deployment_profiles.mine.base", "one of"),
        ({"mine": {"base": "mine"}}, "deployment_profiles.mine.base", "a chain of bases that ends"),
        ({"mine": {"flags": {"tp_siz": 8}}}, "deployment_profiles.mine.flags.tp_siz", "tp_size"),
        ({"mine": {"flags": {"tp_size": "8"}}}, "deployment_profiles.mine.flags.tp_size", "an integer"),
        ({"mine": {"flags": {"port": 8}}}, "deployment_profiles.mine.flags.port", "deployment_port"),
        (
            {"mine": {"flags": {"tp_size": {"value": 1, "when": "sunny"}}}},
            "deployment_profiles.mine.flags.tp_size.when",
            "pcie",
        ),
        (
            {"mine": {"flags": {"tp_size": {"compute": "magic"}}}},
            "deployment_profiles.mine.flags.tp_size.compute",
            "all_gpus",
        ),
        ({"mine": {"flags": {"tp_size": {"value": 1, "why": ""}}}}, "deployment_profiles.mine.flags.tp_size", "why"),
        ({"mine": {"flags": {3: 4}}}, "deployment_profiles.mine.flags.3", "in text"),
        ({"mine": {"flags": []}}, "deployment_profiles.mine.flags", "a mapping"),
        ({"mine": {"env": {"A B": "1"}}}, "deployment_extra_env.A B", "letters"),
    ],
)
def test_wrong_site_profiles(site: Any, variable: str, words: str) -> None:
    lines = problems({"profile": "mine", "profiles": site})
    wanted = variable.replace("deployment_extra_env", "deployment_profiles.mine.env")
    assert any(line.startswith(wanted + ":") and words in line for line in lines), lines


# --- errors in the input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "variable", "found", "hint"),
    [
        ({"profile": "eagle3-topk1"}, "deployment_profile", "eagle3-topk1", "Did you mean eagle3-topk1-v2"),
        ({"profile": "_cuda"}, "deployment_profile", "_cuda", "baseline"),
        ({"port": 99999}, "deployment_port", "99999", "1024 to 65535"),
        ({"port": "30000"}, "deployment_port", '"30000" (string)', "1024 to 65535"),
        ({"port": True}, "deployment_port", "true (boolean)", "1024 to 65535"),
        ({"port": 80}, "deployment_port", "80", "may not open lower ones"),
        ({"model_path": "models/kimi"}, "deployment_model_path", "models/kimi", "absolute path"),
        ({"model_path": ""}, "deployment_model_path", '""', "absolute path"),
        ({"model_path": "/data/../x"}, "deployment_model_path", "..", "without .."),
        ({"draft_model_path": "draft"}, "deployment_draft_model_path", "draft", "absolute path"),
        (
            {"overrides": {"mem_fraction": 0.8}},
            "deployment_overrides.mem_fraction",
            "mem_fraction",
            "mem_fraction_static",
        ),
        ({"overrides": {"tp_sise": 8}}, "deployment_overrides.tp_sise", "tp_sise", "Did you mean tp_size"),
        (
            {"overrides": {"mem_fraction_static": "0.8"}},
            "deployment_overrides.mem_fraction_static",
            '"0.8" (string)',
            "a number",
        ),
        ({"overrides": {"--tp-size": 8}}, "deployment_overrides.--tp-size", "--tp-size", "Write tp_size"),
        ({"overrides": {"port": 1}}, "deployment_overrides.port", "1", "Set deployment_port"),
        ({"overrides": [1]}, "deployment_overrides", "[1] (list)", "a mapping"),
        (
            {"extra_args": {"--enable-metric": True}},
            "deployment_extra_args.--enable-metric",
            "--enable-metric",
            "enable_metrics",
        ),
        ({"extra_args": {"model_path": "/x"}}, "deployment_extra_args.model_path", "/x", "Set deployment_model_path"),
        ({"extra_args": {7: "x"}}, "deployment_extra_args.7", "7", "in text"),
        (
            {"overrides": {"page_size": 1}, "extra_args": {"--page-size": 16}},
            "deployment_extra_args.--page-size",
            "16",
            "deployment_overrides.page_size",
        ),
        ({"extra_env": {"A-B": "1"}}, "deployment_extra_env.A-B", "A-B", "letters"),
        ({"extra_env": {"A": [1]}}, "deployment_extra_env.A", "[1]", "a string"),
        ({"nccl_env": "no"}, "deployment_nccl_env", "no", "null"),
        ({"engine_version": "0.5.8"}, "deployment_engine_version", "0.5.8", "dump_flag_schema.py"),
        ({"torch_cuda": 13.0}, "sglang_torch_cuda", "13.0 (number)", "quotes"),
        ({"load_budget_s": 5}, "deployment_load_budget", "5", "30 to 86400"),
        ({"patches": "kimi"}, "deployment_patches", "kimi", "a list"),
        ({"python": "python3"}, "deployment_python", "python3", "absolute path"),
        ({"listen_host": "a b"}, "deployment_listen_host", "a b", "without spaces"),
        ({"served_model_name": "--x"}, "deployment_served_model_name", "--x", "dash"),
        ({"served_model_name": "a\nb"}, "deployment_served_model_name", "a", "control"),
        ({"unit": {"restart_secs": 3}}, "deployment_unit.restart_secs", "3", "restart_sec"),
        ({"unit": {"restart_sec": "3"}}, "deployment_unit.restart_sec", '"3"', "whole number"),
        ({"unit": {"name": "a b"}}, "deployment_unit.name", "a b", "letters"),
        ({"unit": {"restart": "sometimes"}}, "deployment_unit.restart", "sometimes", "on-failure"),
        ({"unit": {"after": ["x"]}}, "deployment_unit.after", "x", "unit names"),
        ({"unit": {"memory_max": "lots"}}, "deployment_unit.memory_max", "lots", "infinity"),
        ({"unit": {"kill_mode": "none"}}, "deployment_unit.kill_mode", "none", "mixed"),
        ({"unit": {"kill_signal": "SIGKILL"}}, "deployment_unit.kill_signal", "SIGKILL", "SIGINT"),
        ({"unit": {"oom_policy": "never"}}, "deployment_unit.oom_policy", "never", "kill"),
        ({"unit": {"oom_score_adjust": -2000}}, "deployment_unit.oom_score_adjust", "-2000", "-1000"),
        ({"unit": {"tasks_max": 1}}, "deployment_unit.tasks_max", "1", "64"),
        ({"unit": {"limit_nofile": "many"}}, "deployment_unit.limit_nofile", "many", "whole number"),
        ({"unit": {"memory_high": "lots"}}, "deployment_unit.memory_high", "lots", "infinity"),
        ({"drain_budget_s": -1}, "deployment_drain_budget", "-1", "0 to 86400"),
        ({"unit": {"working_directory": "x"}}, "deployment_unit.working_directory", "x", "absolute"),
        ({"prot": 1}, "deployment_prot", "1", "Did you mean deployment_port"),
    ],
)
def test_input_errors(changes: dict[str, Any], variable: str, found: str, hint: str) -> None:
    lines = problems(changes)
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"{variable}: found ") and found in lines[0] and hint in lines[0], lines[0]
    assert ", expected " in lines[0] and "\n" not in lines[0]


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_wanted_must_be_a_mapping(value: Any) -> None:
    with pytest.raises(PlanError, match="deployment_wanted: found"):
        launch_plan(value, cases.host(), cases.models())


def test_null_and_empty_mean_the_default() -> None:
    changes = {
        key: None for key in DEFAULTS if key not in ("model_path", "draft_model_path", "patches", "served_model_name")
    }
    assert plan({**changes, "python": "", "cuda_home": ""}) == plan()


def test_many_problems_in_one_error() -> None:
    lines = problems({"port": 0, "model_path": "x", "profile": "nope", "overrides": {"tp_siz": 1}, "unit": {"user": 3}})
    assert len(lines) == 5


# --- one home for every number --------------------------------------------------------------------


def test_changing_one_number_in_a_profile_changes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = copy.deepcopy(profiles.builtin())
    changed["_eagle3"]["flags"]["mem_fraction_static"]["value"] = 0.87
    monkeypatch.setattr(profiles, "builtin", lambda: changed)
    made = plan()
    assert made["argv"][made["argv"].index("--mem-fraction-static") + 1] == "0.87"
    assert made["budget"]["mem_fraction_static"] == 0.87
    assert {item["setting"] for item in made["deviations"]} >= {"--mem-fraction-static"}


def test_no_other_file_holds_the_number() -> None:
    """profiles.json holds the configuration, documented.json the record; roles, inventories and code hold neither."""
    holders = []
    for folder in ("plugins", "roles", "playbooks", "inventories"):
        for path in (ROOT / folder).rglob("*"):
            text = path.suffix in (".py", ".yml", ".yaml", ".json", ".j2") and path.is_file()
            if text and re.search(r"(?<![\d.])0\.88\b", path.read_text(encoding="utf-8")):
                holders.append(str(path.relative_to(ROOT)))
    data = "plugins/module_utils/data/"
    assert sorted(set(holders) - {data + "documented.json"}) == [data + "profiles.json"]


def test_built_in_profiles_are_well_formed() -> None:
    schema = flags.load("0.5.9")
    for name, profile in profiles.builtin().items():
        assert set(profile) <= {"title", "base", "flags", "env"} and profile["title"], name
        for field, story in profile["flags"].items():
            assert field in schema.by_field, field
            assert story["reason"] and story["source"], field
        for variable, story in profile.get("env", {}).items():
            assert story["reason"] and story["source"], variable


def test_record_is_spelled_like_the_plan() -> None:
    record = documented.record()
    schema = flags.load("0.5.9")
    assert all(schema.by_option[option].spelling == option for option in record["flags"])
    assert set(record["unit"]) <= set(plan()["unit"])
    assert set(record["env"]) <= set(plan()["env"])


def test_a_serving_box_gets_the_same_plan_as_an_idle_one() -> None:
    """The weights that fill the GPUs on a second run are those of the server that the plan describes."""
    busy = cases.host()
    for gpu in busy["gpus"]:
        gpu.update(memory_used_mib=90000, memory_free_mib=7000, processes=[{"pid": 7, "memory_mib": 90000}])
    busy["memory"]["available_mib"] = 40000
    assert plan(host=busy) == plan()


def test_a_slash_too_many_is_the_same_plan() -> None:
    assert plan({"model_path": "/data//kimi-k2.5/"}) == plan({"model_path": "/data/kimi-k2.5"})


@pytest.mark.parametrize("address", ["10.0.0.999", "1.2.3", "fe80::zz"])
def test_an_impossible_address_is_refused(address: str) -> None:
    with pytest.raises(PlanError, match=rf'deployment_listen_host: found "{re.escape(address)}"'):
        plan({"listen_host": address})
