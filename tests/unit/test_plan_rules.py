"""Each rule of the table: what trips it, what its message says, and that the same plan without the fault passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import plan_cases as cases
import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import PlanError, launch_plan
from ansible_collections.gpuserve.sglang.plugins.module_utils.rules import RULES

Change = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault in the documented deployment. ``words`` must appear in the message, ``variable`` begins it."""

    rule: str
    wanted: dict[str, Any]
    variable: str
    words: tuple[str, ...]
    change: Change | None = None
    warning: bool = False


def _over(**overrides: Any) -> dict[str, Any]:
    return {"overrides": overrides}


def _host(**changes: Any) -> Change:
    def change(_wanted: dict[str, Any], host: dict[str, Any], _models: dict[str, Any]) -> None:
        fresh = cases.host(**changes) if changes else cases.host()
        host.clear()
        host.update(fresh)

    return change


def _h200(_wanted: dict[str, Any], host: dict[str, Any], _models: dict[str, Any]) -> None:
    host.clear()
    host.update(cases.h200())


def _draft(**changes: Any) -> Change:
    def change(_wanted: dict[str, Any], _host: dict[str, Any], models: dict[str, Any]) -> None:
        models["draft"]["config"].update(changes)

    return change


def _no_draft(_wanted: dict[str, Any], _host: dict[str, Any], models: dict[str, Any]) -> None:
    models["draft"] = None


def _no_target(_wanted: dict[str, Any], _host: dict[str, Any], models: dict[str, Any]) -> None:
    models["target"] = None


def _weights(size: int) -> Change:
    def change(_wanted: dict[str, Any], _host: dict[str, Any], models: dict[str, Any]) -> None:
        models["target"]["weights_bytes"] = models["target"]["index_total_bytes"] = size

    return change


def _gpu(index: int, **changes: Any) -> Change:
    def change(_wanted: dict[str, Any], host: dict[str, Any], _models: dict[str, Any]) -> None:
        host["gpus"][index].update(changes)

    return change


def _driver(version: str | None) -> Change:
    def change(_wanted: dict[str, Any], host: dict[str, Any], _models: dict[str, Any]) -> None:
        host["driver"] = {"loaded": version, "installed": version}
        for gpu in host["gpus"]:
            gpu["driver_version"] = version

    return change


def _without(*patches: str) -> list[str]:
    return [patch for patch in cases.PATCHES if patch not in patches]


def _both(*changes: Change) -> Change:
    def change(wanted: dict[str, Any], host: dict[str, Any], models: dict[str, Any]) -> None:
        for item in changes:
            item(wanted, host, models)

    return change


BASE = {"profile": "baseline"}
FRACTION = "deployment_overrides.mem_fraction_static"
DRAFT = "deployment_draft_model_path"

CASES = [
    Case(
        "spec_numbers_together",
        _over(speculative_eagle_topk=None),
        "deployment_overrides.speculative_eagle_topk",
        ("nothing", "together"),
    ),
    Case(
        "spec_numbers_together",
        _over(speculative_num_steps=0),
        "deployment_overrides.speculative_num_steps",
        ("0", "1 or more"),
    ),
    Case(
        "spec_numbers_together",
        {**BASE, **_over(speculative_num_steps=2)},
        "deployment_overrides.speculative_num_steps",
        ("ignores",),
    ),
    Case(
        "spec_topk_v2",
        _over(speculative_eagle_topk=4, speculative_num_draft_tokens=16),
        "deployment_overrides.speculative_eagle_topk",
        ("4", "SGLANG_ENABLE_SPEC_V2", "eagle3-topk4-v1"),
    ),
    Case(
        "spec_chain_tokens",
        _over(speculative_num_draft_tokens=5),
        "deployment_overrides.speculative_num_draft_tokens",
        ("5", "3", "overwrites"),
    ),
    Case(
        "spec_tree_size",
        {"profile": "eagle3-topk4-v1", **_over(speculative_num_draft_tokens=64)},
        "deployment_overrides.speculative_num_draft_tokens",
        ("64", "2 to 21"),
    ),
    Case("spec_algorithm", {**BASE, **_over(speculative_algorithm="NGRAM")}, "", ("NGRAM",), warning=True),
    Case(
        "spec_on_gpu",
        _over(device="cpu", attention_backend="torch_native", tp_size=1),
        "deployment_overrides.speculative_algorithm",
        ("cpu", "GPU"),
    ),
    Case("draft_present", {"draft_model_path": ""}, DRAFT, ("nothing", "baseline")),
    Case("draft_present", {}, DRAFT, ("no readable config.json",), _no_draft),
    Case(
        "draft_architecture",
        {},
        DRAFT,
        ("Eagle3DeepseekV2ForCausalLM",),
        _draft(architectures=["Eagle3DeepseekV2ForCausalLM"]),
    ),
    Case("draft_architecture", {}, DRAFT, ("2", "one layer"), _draft(num_hidden_layers=2)),
    Case(
        "draft_layer_ids",
        {},
        DRAFT,
        ("[2, 30, 58]", "[1, 29, 57]"),
        _draft(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}),
    ),
    Case(
        "draft_context",
        {},
        "deployment_overrides.context_length",
        ("4096", "262144"),
        _draft(max_position_embeddings=4096),
    ),
    Case("draft_hidden_size", {}, DRAFT, ("4096", "7168"), _draft(hidden_size=4096)),
    Case("kimi_eagle_patch", {"patches": _without("kimi-k25-eagle3")}, "deployment_patches", ("hooks", "baseline")),
    Case("threshold_patch", _over(speculative_disable_batch_threshold=32), "", ("32", "CUDA graphs"), warning=True),
    Case(
        "fusion_allowed",
        {"patches": _without("sm120-allreduce-fusion"), **_over(enable_flashinfer_allreduce_fusion=True)},
        "deployment_overrides.enable_flashinfer_allreduce_fusion",
        ("12.0", "sm120-allreduce-fusion"),
    ),
    Case(
        "fusion_allowed",
        {"patches": _without("eagle3-aux-capture"), **_over(enable_flashinfer_allreduce_fusion=True)},
        "deployment_overrides.enable_flashinfer_allreduce_fusion",
        ("partial sum", "eagle3-aux-capture"),
    ),
    Case(
        "fusion_allowed",
        {"torch_cuda": "12.8", "cuda_home": "/usr/local/cuda-12.8", **_over(enable_flashinfer_allreduce_fusion=True)},
        "deployment_overrides.enable_flashinfer_allreduce_fusion",
        ("CUDA 13", "12.8"),
    ),
    Case(
        "fusion_allowed",
        _over(enable_flashinfer_allreduce_fusion=True),
        "deployment_overrides.enable_flashinfer_allreduce_fusion",
        ("links between the GPUs are unknown",),
        _host(topology="unknown"),
    ),
    Case("fusion_allowed", {}, "", ("sglang #32330",), warning=True),
    Case(
        "fusion_by_itself",
        {"patches": _without("eagle3-aux-capture")},
        "deployment_patches",
        ("by itself", "acceptance"),
        _h200,
    ),
    Case(
        "fusion_by_itself",
        {**BASE, **_over(enable_flashinfer_allreduce_fusion=False)},
        "",
        ("no flag turns it off",),
        _h200,
        warning=True,
    ),
    Case(
        "symm_mem_allowed",
        {"patches": _without("sm120-symm-mem"), **_over(enable_torch_symm_mem=True)},
        "deployment_overrides.enable_torch_symm_mem",
        ("KeyError: 12", "sm120-symm-mem"),
    ),
    Case(
        "symm_mem_allowed",
        {**BASE, **_over(enable_torch_symm_mem=True, tp_size=2)},
        "deployment_overrides.enable_torch_symm_mem",
        ("2 ranks", "4, 6, 8"),
        _h200,
    ),
    Case("gpu_present", {}, "deployment_profile", ("no GPU",), _host(count=0)),
    Case("tp_gpu_count", _over(tp_size=16), "deployment_overrides.tp_size", ("16", "8 GPUs")),
    Case("tp_gpu_count", _over(base_gpu_id=4), "deployment_overrides.tp_size", ("base_gpu_id 4",)),
    Case(
        "tp_gpu_count",
        {**BASE, **_over(tp_size=4)},
        "",
        ("4 of 8",),
        _both(_h200, _weights(200_000_000_000)),
        warning=True,
    ),
    Case(
        "tp_heads",
        {**BASE, **_over(tp_size=6)},
        "deployment_overrides.tp_size",
        ("64 attention heads", "1, 2, 4, 8"),
        _h200,
    ),
    Case("gpus_equal", {}, "deployment_host.gpus", ("H200", "RTX"), _gpu(3, name="NVIDIA H200")),
    Case("gpu_mig", {}, "deployment_host.gpus", ("MIG on GPU 2", "-mig 0"), _gpu(2, mig=True)),
    Case("driver_toolkit", {}, "deployment_host.driver", ("570.211.01", "580"), _driver("570.211.01")),
    Case("driver_toolkit", {}, "", ("not known", "580"), _driver(None), warning=True),
    Case("driver_toolkit", {"torch_cuda": "13.1"}, "", ("590.44.1",), _driver("580.95.05"), warning=True),
    Case("toolkit_torch", {"cuda_home": "/usr/local/cuda-12.8"}, "deployment_cuda_home", ("cuda-12.8", "13.0")),
    Case(
        "toolkit_torch",
        {"torch_cuda": "12.6", "cuda_home": "/usr/local/cuda-12.6", **_over(enable_flashinfer_allreduce_fusion=False)},
        "sglang_torch_cuda",
        ("12.6", "12.8"),
    ),
    Case("toolkit_torch", {"torch_cuda": "none"}, "sglang_torch_cuda", ("none", "torch.version.cuda")),
    Case(
        "attention_hardware", _over(attention_backend="fa3"), "deployment_overrides.attention_backend", ("fa3", "12.0")
    ),
    Case(
        "attention_hardware",
        _over(attention_backend="flex_attention"),
        "deployment_overrides.attention_backend",
        ("speculate",),
    ),
    Case(
        "never_read",
        _over(num_continuous_decode_steps=4),
        "deployment_overrides.num_continuous_decode_steps",
        ("reads it nowhere",),
    ),
    Case(
        "never_read",
        {"extra_args": {"--file-storage-path": "/x"}},
        "deployment_extra_args.--file-storage-path",
        ("nowhere",),
    ),
    Case(
        "engine_overwrites",
        _over(disable_overlap_schedule=True),
        "deployment_overrides.disable_overlap_schedule",
        ("turns overlap on again", "SGLANG_ENABLE_SPEC_V2"),
    ),
    Case(
        "engine_overwrites", _over(enable_mixed_chunk=True), "deployment_overrides.enable_mixed_chunk", ("turns mixed",)
    ),
    Case(
        "engine_overwrites",
        _over(cuda_graph_bs=[1, 2, 4]),
        "deployment_overrides.cuda_graph_max_bs",
        ("128", "4 or null"),
    ),
    Case(
        "engine_overwrites",
        {**BASE, **_over(attention_backend="flashmla", page_size=1)},
        "deployment_overrides.page_size",
        ("64", "flashmla"),
        _h200,
    ),
    Case("engine_overwrites", {**_over(pp_size=2, tp_size=4)}, "deployment_overrides.pp_size", ("exclude each other",)),
    Case(
        "engine_overwrites",
        {"extra_env": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
        "deployment_extra_env.CUDA_DEVICE_MAX_CONNECTIONS",
        ("sets it to 8",),
    ),
    Case(
        "env_boolean",
        {"extra_env": {"SGLANG_ENABLE_SPEC_V2": "yep"}},
        "deployment_extra_env.SGLANG_ENABLE_SPEC_V2",
        ("yep", "true or false"),
    ),
    Case(
        "env_boolean",
        {"extra_env": {"SGLANG_FLASHINFER_WORKSPACE_SIZE": "big"}},
        "deployment_extra_env.SGLANG_FLASHINFER_WORKSPACE_SIZE",
        ("number",),
    ),
    Case(
        "exclusive_flags",
        _over(enable_hierarchical_cache=True, disable_radix_cache=True),
        "deployment_overrides.enable_hierarchical_cache",
        ("disable_radix_cache",),
    ),
    Case(
        "exclusive_flags",
        _over(export_metrics_to_file=True),
        "deployment_overrides.export_metrics_to_file_dir",
        ("export_metrics_to_file is set",),
    ),
    Case(
        "exclusive_flags",
        _over(enable_priority_scheduling=True, schedule_policy="lpm"),
        "deployment_overrides.schedule_policy",
        ("lof",),
    ),
    Case("one_host", _over(nnodes=2), "deployment_overrides.nnodes", ("one host",)),
    Case(
        "one_host", {"extra_args": {"--config": "/etc/x.yaml"}}, "deployment_extra_args.--config", ("behind the plan",)
    ),
    Case(
        "loader_config",
        {"extra_args": {"model_loader_extra_config": {"threads": 4}}},
        "deployment_extra_args.model_loader_extra_config",
        ("threads", "num_threads"),
    ),
    Case("device_known", _over(device="hpu"), "deployment_overrides.device", ("hpu", "cuda or cpu")),
    Case("data_parallel", _over(enable_dp_attention=True), "deployment_overrides.enable_dp_attention", ("dp_size 1",)),
    Case("data_parallel", _over(enable_dp_attention=True, dp_size=3), "deployment_overrides.dp_size", ("divisor",)),
    Case(
        "kv4_backend",
        _over(kv_cache_dtype="fp4_e2m1", attention_backend="triton"),
        "deployment_overrides.attention_backend",
        ("fp4",),
    ),
    Case(
        "spec_tree_pages",
        {"profile": "eagle3-topk4-v1", **_over(attention_backend="trtllm_mla")},
        "deployment_overrides.attention_backend",
        ("pages of 64", "flashinfer"),
    ),
    Case("tp_gpu_count", _over(dp_size=2), "deployment_overrides.tp_size", ("16 ranks",)),
    Case(
        "lora_paths",
        {"extra_args": {"lora_paths": ["a=/x", "{}"]}},
        "deployment_extra_args.lora_paths",
        ("lora_name", "name=path"),
    ),
    Case(
        "chunk_page",
        _over(chunked_prefill_size=1000, page_size=64),
        "deployment_overrides.chunked_prefill_size",
        ("1000", "64", "960"),
    ),
    Case(
        "sizes_positive", _over(max_running_requests=0), "deployment_overrides.max_running_requests", ("0", "1 or more")
    ),
    Case("sizes_positive", _over(mem_fraction_static=88), FRACTION, ("88", "between 0 and 1")),
    Case("sizes_positive", _over(chunked_prefill_size=0), "deployment_overrides.chunked_prefill_size", ("-1",)),
    Case("context_reach", _over(context_length=300000), "deployment_overrides.context_length", ("300000", "262144")),
    Case("graphs_cover_running", {}, "", ("128", "48", "max_running_requests"), warning=True),
    Case("graphs_cover_running", _over(max_running_requests=250), "", ("250", "128", "throughput"), warning=True),
    Case("served_name", {"served_model_name": "kimi:k2.5"}, "deployment_served_model_name", ("kimi:k2.5", "colon")),
    Case(
        "secret",
        {"extra_args": {"--api-key": "hunter2"}},
        "deployment_extra_args.--api-key",
        ("authentication in front", "command line"),
    ),
    Case(
        "secret",
        {"extra_args": {"admin_api_key": "hunter2"}},
        "deployment_extra_args.admin_api_key",
        ("authentication in front",),
    ),
    Case(
        "secret",
        {"extra_args": {"weight_version": "hf_" + "a" * 30}},
        "deployment_extra_args.weight_version",
        ("form of a secret",),
    ),
    Case("secret", {"extra_env": {"HF_TOKEN": "x"}}, "deployment_extra_env.HF_TOKEN", ("environment",)),
    Case("control_characters", {"extra_env": {"A": "b\nExecStartPre=/bin/rm"}}, "deployment_extra_env.A", ("control",)),
    Case(
        "flashinfer_arch",
        {"extra_env": {"FLASHINFER_CUDA_ARCH_LIST": "12.0"}},
        "deployment_extra_env.FLASHINFER_CUDA_ARCH_LIST",
        ("12.0a",),
    ),
    Case(
        "nccl_topology",
        {"nccl_env": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}},
        "",
        ("3.7 times",),
        _h200,
        warning=True,
    ),
    Case("nccl_topology", {**BASE}, "", ("unknown", "deployment_nccl_env"), _host(topology="unknown"), warning=True),
    Case("exposure", {"listen_host": "0.0.0.0"}, "", ("0.0.0.0", "gateway"), warning=True),
    Case("remote_code", _over(trust_remote_code=False), "", ("auto_map",), warning=True),
    Case("model_known", {**BASE}, "", ("config.json",), _no_target, warning=True),
    Case("unit_limits", {"unit": {"timeout_start_sec": 60}}, "deployment_unit.timeout_start_sec", ("60", "900")),
    Case(
        "unit_limits",
        {"unit": {"start_limit_interval_sec": 600}},
        "deployment_unit.start_limit_interval_sec",
        ("600", "3195"),
    ),
    Case("unit_limits", {"unit": {"timeout_stop_sec": 5}}, "", ("18 s",), warning=True),
    Case(
        "unit_memory",
        {"unit": {"memory_max": "100M"}},
        "deployment_unit.memory_max",
        ("found 100M", "at least 2048M", "infinity"),
    ),
    Case("unit_memory", {"unit": {"memory_high": "2047M"}}, "deployment_unit.memory_high", ("2047M", "at least 2048M")),
    Case("budget_known", {**BASE}, "", ("weights",), _weights(0), warning=True),
    Case("budget_weights", {}, "deployment_model_path", ("more GPUs",), _weights(900_000_000_000)),
    Case("budget_weights", _over(mem_fraction_static=0.5), FRACTION, ("0.5", "at least 0.702")),
    Case("budget_fit", _over(mem_fraction_static=0.97), FRACTION, ("0.97", "would be left", "at most")),
    Case("budget_fit", _over(mem_fraction_static=0.93), "", ("are left",), warning=True),
    Case("budget_context", _over(mem_fraction_static=0.8), "", ("smaller than one request",), warning=True),
]

#: Ids under which a rule's warning appears when it is not the rule's own.
ALSO = {"fusion_allowed": ("fusion_pcie",), "nccl_topology": ("topology_unknown",)}


def _inputs(case: Case) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    wanted, host, models = cases.wanted(**case.wanted), cases.host(), cases.models()
    if case.change:
        case.change(wanted, host, models)
    return wanted, host, models


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.variable or 'warning'}")
def test_rule(case: Case) -> None:
    wanted, host, models = _inputs(case)
    if case.warning:
        plan = launch_plan(wanted, host, models)
        ids = (case.rule, *ALSO.get(case.rule, ()))
        texts = [item["message"] for item in plan["warnings"] if item["id"] in ids]
        assert texts, plan["warnings"]
        assert any(all(word in text for word in case.words) for text in texts), texts
        return
    with pytest.raises(PlanError) as caught:
        launch_plan(wanted, host, models)
    lines = [problem.line() for problem in caught.value.problems if problem.rule == case.rule]
    assert lines, str(caught.value)
    assert any(
        line.startswith(case.variable + ": found ") and all(word in line for word in case.words) for line in lines
    ), lines
    assert all(", expected " in line and line.endswith(f"[{case.rule}]") and "\n" not in line for line in lines)


@pytest.mark.parametrize("value", ["infinity", "2G", "2048M", "2097152K", "1T", "90%", "1%"])
def test_memory_limits_that_the_engine_can_run_with(value: str) -> None:
    """One percent of the documented host is more than ten GiB."""
    plan = launch_plan(cases.wanted(unit={"memory_max": value}), cases.host(), cases.models())
    assert plan["unit"]["memory_max"] == value


def test_on_the_cpu_the_weights_count_and_a_share_is_one_of_the_host() -> None:
    weights = 500 << 20
    host = {**cases.cpu_host(), "memory": {"total_mib": 32768, "available_mib": 32768}}
    tiny = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    models = {"target": cases.model(tiny, weights, "/srv/tiny")}
    for value, found in (("2G", "found 2G,"), ("2547M", "found 2547M,"), ("7%", "found 7% (2.2 GiB),")):
        with pytest.raises(PlanError) as caught:
            launch_plan(cases.sandbox(unit={"memory_max": value}), host, models)
        assert found in str(caught.value) and "at least 2548M" in str(caught.value), str(caught.value)
    for value in ("2548M", "8%", "infinity"):
        assert launch_plan(cases.sandbox(unit={"memory_max": value}), host, models)["unit"]["memory_max"] == value
    small = {**host, "memory": {"total_mib": 3072, "available_mib": 3072}}
    assert launch_plan(cases.sandbox(), small, models)["unit"]["memory_max"] == "1G", (
        "computed: the planner's own business"
    )


def test_every_rule_has_a_case() -> None:
    assert set(RULES) == {case.rule for case in CASES}


def test_every_rule_tells_its_reason() -> None:
    for rule in RULES.values():
        assert rule.reason and rule.source, rule.id


def test_secrets_are_not_repeated() -> None:
    for wanted in (
        {"extra_args": {"--api-key": "hunter2-secret"}},
        {"extra_args": {"--weight-version": "hf_" + "abcdefgh" * 4}},
        {"extra_env": {"HF_TOKEN": "hunter2-secret"}},
        {"overrides": {"api_key": ["hunter2-secret"]}},
    ):
        with pytest.raises(PlanError) as caught:
            launch_plan(cases.wanted(**wanted), cases.host(), cases.models())
        assert "hunter2" not in str(caught.value) and "abcdefgh" not in str(caught.value)


def test_problems_are_reported_together() -> None:
    changes = {
        "extra_args": {"--api-key": "x"},
        "overrides": {"speculative_num_draft_tokens": 5, "context_length": 300000},
    }
    with pytest.raises(PlanError) as caught:
        launch_plan(cases.wanted(**changes), cases.host(), cases.models())
    assert {"secret", "spec_chain_tokens", "context_reach"} <= {problem.rule for problem in caught.value.problems}
    assert len(str(caught.value).splitlines()) == len(caught.value.problems)
