"""Plans against the real parser of the engine (level 1) and its whole construction and check of arguments (level 2)."""

from __future__ import annotations

import copy
import json
from typing import Any

import plan_cases as cases
import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import budget, flags, shapes
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import PlanError, launch_plan

LLAMA_DRAFT = {**cases.DRAFT, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8} | {
    "max_position_embeddings": 131072,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]},
}


def _case(wanted: dict[str, Any], host: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    return {"wanted": wanted, "host": host, "models": models}


def _llama(**changes: Any) -> dict[str, Any]:
    return cases.wanted(model_path="/data/llama", served_model_name="llama", patches=[], **changes)


GPU_CASES = {
    "documented box": _case(cases.wanted(), cases.host(), cases.models()),
    "tree of 16": _case(cases.wanted(profile="eagle3-topk4-v1"), cases.host(), cases.models()),
    "baseline": _case(cases.wanted(profile="baseline"), cases.host(), cases.models()),
    "unpatched baseline": _case(cases.wanted(profile="baseline", patches=[]), cases.host(), cases.models()),
    "no fusion": _case(
        cases.wanted(overrides={"enable_flashinfer_allreduce_fusion": False}), cases.host(), cases.models()
    ),
    "H200 with NVLink": _case(cases.wanted(), cases.h200(), cases.models()),
    "H200 baseline": _case(cases.wanted(profile="baseline"), cases.h200(), cases.models()),
    "two GPUs, Llama": _case(_llama(profile="baseline"), cases.h200(2), cases.models(cases.LLAMA)),
    "one GPU, Llama with a draft": _case(_llama(), cases.h200(1), cases.models(cases.LLAMA, LLAMA_DRAFT)),
    "small graphs": _case(
        cases.wanted(profile="baseline", overrides={"cuda_graph_max_bs": 64, "max_running_requests": 64}),
        cases.host(),
        cases.models(),
    ),
    "graph list": _case(
        cases.wanted(overrides={"cuda_graph_bs": [1, 2, 4, 8, 16, 32, 48], "cuda_graph_max_bs": None}),
        cases.host(),
        cases.models(),
    ),
    "loader, json, floats": _case(
        cases.wanted(
            extra_args={
                "--model-loader-extra-config": {"enable_multithread_load": True, "num_threads": 16},
                "schedule-conservativeness": 0.3,
                "chunked_prefill_size": 4096,
                "--extra-metric-labels": {"box": "one"},
                "bucket_time_to_first_token": [0.1, 0.5, 1],
                "kv_cache_dtype": "bfloat16",
            }
        ),
        cases.host(),
        cases.models(),
    ),
    "triton with pages": _case(
        cases.wanted(overrides={"attention_backend": "triton", "page_size": 64}), cases.host(), cases.models()
    ),
}


@pytest.fixture(scope="session")
def model_paths(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the engine finds the config.json files: a folder of its own machine."""
    base = str(tmp_path_factory.mktemp("models"))
    files = {}
    for name, config in (("kimi", cases.KIMI), ("llama", cases.LLAMA), ("draft", cases.DRAFT)):
        content = copy.deepcopy(config)
        content.pop("auto_map", None)  # the code beside a real config.json is not here; the engine has its own class
        files[f"{base}/{name}/config.json"] = json.dumps(content)
    assert engine.ask("write", files=files)["ok"]
    return base


def construct(engine: Any, plan: dict[str, Any], host: dict[str, Any], base: str, extra: tuple[str, ...] = ()) -> Any:
    schema = flags.load(plan["engine_version"])
    fields = {schema.by_option[option].field: value for option, value in plan["args"].items()}
    argv = list(plan["argv"])
    argv[argv.index("--model-path") + 1] = f"{base}/{'llama' if 'llama' in plan['model']['path'] else 'kimi'}"
    env = {name: value for name, value in plan["env"].items() if name.startswith("SGLANG_")}
    wanted = [*fields, *extra]
    answer = engine.ask("construct", argv=argv, env=env, gpu=host["gpus"][0], fields=wanted)
    return answer, {name: value for name, value in fields.items() if name != "model_path"}


def test_version(engine: Any) -> None:
    assert engine.ask("version")["version"] in flags.versions()


def test_schema_is_the_parser(engine: Any) -> None:
    """The shipped schema equals a dump of the installed engine."""
    dumped = engine.ask("schema")["schema"]
    path = flags.DATA / f"flags-{dumped['engine_version']}.json"
    assert json.loads(path.read_text(encoding="utf-8")) == dumped


@pytest.mark.parametrize("name", [*GPU_CASES, "sandbox"])
def test_level_1(engine: Any, name: str) -> None:
    """The parser takes every word, without abbreviations, and understands the value that the plan means."""
    case = GPU_CASES.get(name) or _case(cases.sandbox(), cases.cpu_host(), {})
    plan = launch_plan(**case)
    answer = engine.ask("argv", argv=plan["argv"])
    assert answer["ok"], answer["error"]
    schema = flags.load(plan["engine_version"])
    for option, value in plan["args"].items():
        understood = answer["fields"][schema.by_option[option].field]
        if isinstance(value, dict):
            understood = json.loads(understood) if isinstance(understood, str) else understood
        assert understood == value, option


@pytest.mark.parametrize("name", GPU_CASES)
def test_level_2(engine: Any, model_paths: str, name: str) -> None:
    """The engine constructs and checks its arguments, and leaves every value of the plan as it is."""
    case = GPU_CASES[name]
    plan = launch_plan(**case)
    extra = (
        "mem_fraction_static",
        "chunked_prefill_size",
        "cuda_graph_max_bs",
        "cuda_graph_bs",
        "max_running_requests",
    )
    answer, meant = construct(engine, plan, case["host"], model_paths, extra)
    assert answer["ok"], answer["error"]
    for field, value in meant.items():
        got = answer["fields"][field]
        if isinstance(value, dict) and isinstance(got, str):
            got = json.loads(got)
        assert got == value, f"the engine changes {field} from {value} to {got}"
    # what the engine decided silently is what the plan foresaw
    foreseen = {note["setting"].removeprefix("engine."): note["value"] for note in plan["notes"]}
    for field in ("chunked_prefill_size", "cuda_graph_max_bs"):
        if field in foreseen:
            assert answer["fields"][field] == foreseen[field], field
    assert answer["fields"]["mem_fraction_static"] == pytest.approx(plan["budget"]["mem_fraction_static"], abs=1e-9)
    settings = {**meant, "cuda_graph_max_bs": answer["fields"]["cuda_graph_max_bs"]}
    settings.pop("max_running_requests", None)
    if "cuda_graph_bs" not in settings:
        assert (
            budget.graph_sizes(settings, shapes.host_shape(case["host"]).gpu_memory_mib)
            == answer["fields"]["cuda_graph_bs"]
        )


#: What the planner refuses, and what the engine makes of it: an error text, or a field that it overwrites.
REFUSED: dict[str, tuple[dict[str, Any], str, str, Any]] = {
    "topk 4 with spec v2": (
        {"overrides": {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}},
        "spec_topk_v2",
        "only supports topk = 1",
        None,
    ),
    "chain of the wrong length": (
        {"overrides": {"speculative_num_draft_tokens": 5}},
        "spec_chain_tokens",
        "speculative_num_draft_tokens",
        3,
    ),
    "steps without topk": ({"overrides": {"speculative_eagle_topk": None}}, "spec_numbers_together", "TypeError", None),
    "topk without steps": (
        {"overrides": {"speculative_num_steps": None}},
        "spec_numbers_together",
        "AssertionError",
        None,
    ),
    "overlap off with spec v2": (
        {"overrides": {"disable_overlap_schedule": True}},
        "engine_overwrites",
        "disable_overlap_schedule",
        False,
    ),
    "mixed chunk": ({"overrides": {"enable_mixed_chunk": True}}, "engine_overwrites", "enable_mixed_chunk", False),
    "chunk and page": (
        {"overrides": {"chunked_prefill_size": 1000, "page_size": 64}},
        "chunk_page",
        "chunked_prefill_size must be divisible by page_size",
        None,
    ),
    "colon in the name": ({"served_model_name": "kimi:2"}, "served_name", "cannot contain a colon", None),
    "graph list and maximum": (
        {"overrides": {"cuda_graph_bs": [1, 2, 4], "cuda_graph_max_bs": 128}},
        "engine_overwrites",
        "cuda_graph_max_bs",
        4,
    ),
    "trtllm_mha": (
        {"overrides": {"attention_backend": "trtllm_mha"}},
        "attention_hardware",
        "only supported on Blackwell",
        None,
    ),
    "page of flashmla": (
        {"overrides": {"decode_attention_backend": "cutlass_mla", "page_size": 64}},
        "engine_overwrites",
        "page_size",
        128,
    ),
    "hierarchical without radix": (
        {"overrides": {"enable_hierarchical_cache": True, "disable_radix_cache": True}},
        "exclusive_flags",
        "mutually exclusive",
        None,
    ),
    "pipeline and speculation": (
        {"overrides": {"pp_size": 2, "tp_size": 4}},
        "engine_overwrites",
        "AssertionError",
        None,
    ),
    "context beyond the model": (
        {"overrides": {"context_length": 300000}},
        "context_reach",
        "greater than the derived",
        None,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_deserved(engine: Any, model_paths: str, name: str) -> None:
    """Each refused value is one that the engine chokes on or overwrites: the rule is no superstition."""
    changes, rule, text, value = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        launch_plan(cases.wanted(**changes), cases.host(), cases.models())
    assert rule in {problem.rule for problem in caught.value.problems}
    plan = launch_plan(cases.wanted(), cases.host(), cases.models())
    schema = flags.load("0.5.9")
    fields = {schema.by_option[option].field: item for option, item in plan["args"].items()}
    fields |= changes.get("overrides", {})
    fields |= {key: item for key, item in changes.items() if key == "served_model_name"}
    plan["argv"] = [word for field, item in fields.items() for word in flags.render(schema.by_field[str(field)], item)]
    answer, _ = construct(engine, plan, cases.host(), model_paths, (text,) if value is not None else ())
    if value is None:
        assert not answer["ok"] and text in answer["error"], answer
    else:
        assert answer["ok"], answer
        assert answer["fields"][text] == value != changes["overrides"][text]
