"""The flag schema: spelling, arity, types, choices, rendering, secrets."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import flags
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import PlanError, checked_args

SCHEMA = flags.load("0.5.9")


def test_versions() -> None:
    assert "0.5.9" in flags.versions()


def test_the_whole_parser_is_there() -> None:
    assert len(SCHEMA.flags) == 331
    assert SCHEMA.by_option["--tp-size"].field == "tp_size"
    assert SCHEMA.by_option["--tensor-parallel-size"].spelling == "--tp-size"
    assert SCHEMA.by_option["--model"].spelling == "--model-path"
    assert "num_continuous_decode_steps" in SCHEMA.never_read


@pytest.mark.parametrize("name", ["tp_size", "tp-size", "--tp-size", "--tensor-parallel-size", "tensor_parallel_size"])
def test_find(name: str) -> None:
    found = SCHEMA.find(name)
    assert found is not None and found.field == "tp_size"


@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        ("speculative_num_step", "abbreviated_flag", "speculative_num_steps"),
        ("--mem-fraction", "abbreviated_flag", "mem_fraction_static"),
        ("mem_fraction_statik", "unknown_flag", "Did you mean mem_fraction_static"),
        ("--cuda-graf-max-bs", "unknown_flag", "cuda_graph_max_bs"),
        ("qqqqqq", "unknown_flag", "No flag has a similar name"),
    ],
)
def test_nearest(name: str, rule: str, words: str) -> None:
    assert SCHEMA.find(name) is None
    problem = SCHEMA.complaint("v", name, {})
    assert problem.rule == rule and words in problem.line()


def _flag(name: str) -> flags.Flag:
    return SCHEMA.by_field[name]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tp_size", 8, ["--tp-size", "8"]),
        ("mem_fraction_static", 0.88, ["--mem-fraction-static", "0.88"]),
        ("mem_fraction_static", 1e-05, ["--mem-fraction-static", "1e-05"]),
        (
            "prefill_delayer_token_usage_low_watermark",
            -5e-07,
            ["--prefill-delayer-token-usage-low-watermark", "-0.0000005"],
        ),
        ("enable_metrics", True, ["--enable-metrics"]),
        ("enable_metrics", False, []),
        ("chunked_prefill_size", -1, ["--chunked-prefill-size", "-1"]),
        ("cuda_graph_bs", [1, 2, 4], ["--cuda-graph-bs", "1", "2", "4"]),
        ("preferred_sampling_params", {"temperature": 0.6}, ["--preferred-sampling-params", '{"temperature":0.6}']),
        ("attention_backend", "flashinfer", ["--attention-backend", "flashinfer"]),
    ],
)
def test_render(field: str, value: Any, words: list[str]) -> None:
    assert flags.check_value(_flag(field), value, "v") is None
    assert flags.render(_flag(field), value) == words


@pytest.mark.parametrize(
    ("field", "value", "rule", "words"),
    [
        ("tp_size", "8", "flag_type", "an integer"),
        ("tp_size", True, "flag_type", "an integer"),
        ("tp_size", 8.0, "flag_type", "an integer"),
        ("mem_fraction_static", "0.88", "flag_type", "a number"),
        ("mem_fraction_static", float("nan"), "flag_type", "a number"),
        ("mem_fraction_static", float("inf"), "flag_type", "a number"),
        ("enable_metrics", "true", "flag_type", "true or false"),
        ("enable_metrics", 1, "flag_type", "true or false"),
        ("attention_backend", "flashinfr", "flag_choice", "Did you mean flashinfer"),
        ("attention_backend", ["flashinfer"], "flag_arity", "one string"),
        ("cuda_graph_bs", [], "flag_arity", "at least one"),
        ("cuda_graph_bs", [1, "2"], "flag_type", "an integer"),
        ("weight_version", "-x", "flag_type", "dash"),
        ("weight_version", "", "flag_type", "not empty"),
        ("weight_version", " x", "flag_type", "without spaces around it"),
        ("lora_paths", [" "], "flag_type", "without spaces around it"),
        ("weight_version", 3, "flag_type", "a string"),
        ("weight_version", "a\nb", "control_characters", "control"),
        ("preferred_sampling_params", "{", "flag_type", "JSON"),
        ("preferred_sampling_params", 3, "flag_type", "mapping"),
        ("hybrid_kvcache_ratio", 1, "deprecated_flag", "only prints"),
        ("model_loader_extra_config", 3, "flag_type", "a string"),
    ],
)
def test_refused_values(field: str, value: Any, rule: str, words: str) -> None:
    problem = flags.check_value(_flag(field), value, "v")
    assert problem is not None and problem.rule == rule and words in problem.line()


@pytest.mark.parametrize(
    "name", ["--api-key", "admin_api_key", "ssl_keyfile_password", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]
)
def test_secret_names(name: str) -> None:
    assert flags.secret(name, "x")


def test_null_renders_nothing() -> None:
    assert flags.render(_flag("tp_size"), None) == []


def test_no_other_flag_is_taken_for_a_secret() -> None:
    found = {field for field in SCHEMA.by_field if flags.secret(field, None)}
    assert found == {"api_key", "admin_api_key"}


@pytest.mark.parametrize(
    "value",
    [
        "hf_" + "a" * 20,
        "sk-" + "a" * 20,
        "ghp_" + "a" * 36,
        "AKIA" + "A" * 16,
        "http://user:pass@host/",
        "Bearer abcdefgh",
        {"Authorization": "Bearer abcdefgh"},
        ["x", "hf_" + "b" * 20],
        {"api_key": "x"},
        "-----BEGIN PRIVATE KEY-----",
    ],
)
def test_secret_values(value: Any) -> None:
    assert flags.secret("weight_version", value)


@pytest.mark.parametrize(
    "value", ["kimi-k2.5", "/data/eagle3/output_100k_sglang/4", "sk-1", {"a": 1}, 3, None, True, "task-force"]
)
def test_ordinary_values_are_no_secrets(value: Any) -> None:
    assert flags.secret("weight_version", value) is None


def _stock_parser() -> argparse.ArgumentParser:
    """argparse as the schema describes it: the shipped data must suffice to rebuild the parser's arity."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    types: dict[str, Any] = {"int": int, "float": float, "json": json.loads, "json_list": json.loads}
    for flag in SCHEMA.flags:
        options = [flag.flag, *flag.aliases]
        if flag.kind == "switch":
            parser.add_argument(*options, dest=flag.dest, action="store_true")
        elif flag.kind == "value":
            parser.add_argument(*options, dest=flag.dest, nargs=flag.nargs, type=types.get(flag.type, str))
    return parser


def test_every_flag_renders_to_words_the_parser_takes() -> None:
    parser = _stock_parser()
    samples: dict[str, Any] = {"int": 3, "float": 0.5, "json": {"a": 1}, "json_list": [1]}
    for flag in SCHEMA.flags:
        if flag.kind == "deprecated":
            continue
        value = True if flag.kind == "switch" else samples.get(flag.type, "text")
        if flag.choices:
            value = int(flag.choices[0]) if flag.type == "int" else flag.choices[0]
        if flag.nargs in ("+", "*"):
            value = [value, value]
        assert flags.check_value(flag, value, "v") is None, flag.flag
        parser.parse_args(flags.render(flag, value))


def test_one_value_for_a_list_becomes_a_list() -> None:
    assert flags.normal(_flag("cuda_graph_bs"), 4) == [4]
    assert flags.normal(_flag("cuda_graph_bs"), (4, 8)) == [4, 8]
    assert flags.normal(_flag("tp_size"), 4) == 4


def test_checked_args() -> None:
    assert checked_args({"tp_size": 8, "--enable-metrics": True, "page-size": None}, "0.5.9") == [
        ["--tp-size", "8"],
        ["--enable-metrics"],
    ]
    with pytest.raises(PlanError) as caught:
        checked_args({"tp_siz": 8, "port": "x"}, "0.5.9")
    assert len(caught.value.problems) == 2
    for bad, version in ((3, "0.5.9"), ({}, "9.9.9")):
        with pytest.raises(PlanError):
            checked_args(bad, version)


@pytest.mark.parametrize("value", [-1e-05, -6.108951245544583e-12, -1e-300, -0.0, -2.5, 1e-300, 3e22, -3e22])
def test_every_float_is_read_back_exactly(value: float) -> None:
    words = flags.render(_flag("mem_fraction_static"), value)
    assert _stock_parser().parse_args(words).mem_fraction_static == value
