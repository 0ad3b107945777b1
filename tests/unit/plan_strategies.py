"""Hypothesis strategies for the planner: wanted deployments, hosts and models, good and bad."""

from __future__ import annotations

from typing import Any

import plan_cases as cases
from ansible_collections.gpuserve.sglang.plugins.module_utils import flags
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import PlanError, launch_plan
from hypothesis import strategies as st

SCHEMA = flags.load("0.5.9")
FIELDS = sorted(SCHEMA.by_field)
#: Fields that rules seldom refuse: they keep the share of draws that give a plan high.
HARMLESS = [
    field for field in FIELDS if SCHEMA.by_field[field].kind == "switch" or field.startswith(("log", "hicache", "mm_"))
]

junk: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
    st.sampled_from(
        [
            "true",
            "yep",
            "-1",
            "--x",
            "a\nb",
            "%h",
            "$HOME",
            "\u2028",
            "hf_" + "a" * 20,
            "12.0",
            {},
            [],
            [None],
            b"x",
            object(),
        ]
    ),
)


def _plausible(flag: flags.Flag) -> st.SearchStrategy[Any]:
    """Values that the parser would take for a flag."""
    if flag.kind == "switch":
        return st.booleans()
    one: st.SearchStrategy[Any]
    if flag.choices:
        one = st.sampled_from(flag.choices).map(int) if flag.type == "int" else st.sampled_from(flag.choices)
    elif flag.type == "int":
        one = st.one_of(st.integers(1, 512), st.integers(-2, 100_000))
    elif flag.type == "float":
        one = st.floats(-2, 2, allow_nan=False)
    elif flag.type in ("json", "json_list"):
        one = (
            st.just([1])
            if flag.type == "json_list"
            else st.dictionaries(st.text(max_size=4), st.integers(), max_size=2)
        )
    else:
        one = st.text("abcdefgh01234/.-_ %$'\"\\{}", min_size=1, max_size=12)
    if flag.nargs in ("+", "*"):
        return st.one_of(one, st.lists(one, min_size=1, max_size=3))
    return one


@st.composite
def settings(draw: st.DrawFn, spelled: bool) -> dict[Any, Any]:
    """Overrides (fields) or further arguments (any spelling), mostly of the right type."""
    found: dict[Any, Any] = {}
    for field in draw(st.lists(st.one_of(st.sampled_from(HARMLESS), st.sampled_from(FIELDS)), max_size=2)):
        flag = SCHEMA.by_field[field]
        name: Any = field
        if spelled:
            name = draw(st.sampled_from([field, flag.flag, *flag.aliases, field.replace("_", "-")]))
        if draw(st.integers(0, 29)) == 0:
            name = name[: draw(st.integers(1, len(name)))]
        found[name] = draw(junk) if draw(st.integers(0, 19)) == 0 else draw(_plausible(flag))
    if draw(st.integers(0, 19)) == 0:
        found[draw(st.one_of(st.text(max_size=8), st.integers()))] = draw(junk)
    return found


interesting: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "tp_size": st.integers(0, 16),
        "mem_fraction_static": st.floats(0.3, 1.0),
        "max_running_requests": st.integers(0, 300),
        "cuda_graph_max_bs": st.integers(0, 600),
        "speculative_num_steps": st.one_of(st.none(), st.integers(0, 5)),
        "speculative_eagle_topk": st.one_of(st.none(), st.integers(0, 5)),
        "speculative_num_draft_tokens": st.one_of(st.none(), st.integers(0, 40)),
        "enable_flashinfer_allreduce_fusion": st.booleans(),
        "enable_torch_symm_mem": st.booleans(),
        "context_length": st.sampled_from([2048, 131072, 262144, 300000]),
        "page_size": st.sampled_from([1, 16, 64]),
        "chunked_prefill_size": st.sampled_from([-1, 0, 1000, 4096, 8192]),
        "cuda_graph_bs": st.one_of(st.integers(0, 64), st.lists(st.integers(0, 64), max_size=4)),
        "kv_cache_dtype": st.sampled_from(["auto", "fp8_e4m3", "fp4_e2m1", "fp8"]),
        "device": st.sampled_from(["cuda", "cpu", "hpu"]),
        "attention_backend": st.sampled_from(["flashinfer", "triton", "fa3", "trtllm_mla", "torch_native"]),
        "dp_size": st.integers(0, 8),
        "enable_dp_attention": st.booleans(),
        "language_only": st.booleans(),
    },
)

environments: st.SearchStrategy[Any] = st.dictionaries(
    st.one_of(
        st.sampled_from([*sorted(SCHEMA.environment)[:40], "SGLANG_ENABLE_SPEC_V2", "HF_TOKEN", "A", "NCCL_ALGO"]),
        st.text(max_size=6),
    ),
    st.one_of(st.sampled_from(["True", "0", "1", True, False, None, 3, 0.5]), junk),
    max_size=3,
)

paths = st.one_of(
    st.sampled_from(["/data/kimi-k2.5", "/data/a b", "/", "x", "", "/a/../b", "/a\nb", "/-x", "/%i:x"]),
    st.text(max_size=8).map("/".__add__),
)


@st.composite
def wanteds(draw: st.DrawFn) -> Any:
    """Wanted deployments."""
    if draw(st.integers(0, 49)) == 0:
        return draw(junk)
    wanted = cases.wanted(
        profile=draw(st.sampled_from([*["eagle3-topk1-v2"] * 4, "eagle3-topk4-v1", "baseline", "cpu", "mine", "no"]))
    )
    chosen = draw(interesting)
    # most draws change little, so that many of them give a plan
    keep = draw(st.sampled_from([0, 0, 0, 1, 2]))
    wanted["overrides"] = {key: chosen[key] for key in list(chosen)[:keep]} | draw(settings(spelled=False))
    changes: dict[str, st.SearchStrategy[Any]] = {
        "extra_args": settings(spelled=True),
        "extra_env": environments,
        "model_path": paths,
        "draft_model_path": paths,
        "served_model_name": st.one_of(st.sampled_from(["a", "a:b", " a", ""]), st.text(max_size=6)),
        "listen_host": st.sampled_from(["127.0.0.1", "0.0.0.0", "::", "a b", "-h", ""]),
        "port": st.one_of(st.integers(-1, 70000), junk),
        "python": paths,
        "cuda_home": st.sampled_from(["/usr/local/cuda-13.0", "/usr/local/cuda-12.8", "/usr/local/cuda", "cuda"]),
        "torch_cuda": st.sampled_from(["13.0", "12.8", "12.6", "13.1", "none", 13.0, "x"]),
        "patches": st.one_of(st.lists(st.sampled_from(cases.PATCHES), unique=True), junk),
        "load_budget_s": st.one_of(st.integers(0, 2000), junk),
        "unit": st.dictionaries(
            st.sampled_from(
                [
                    "name",
                    "user",
                    "restart_sec",
                    "timeout_stop_sec",
                    "start_limit_burst",
                    "start_limit_interval_sec",
                    "memory_max",
                    "after",
                    "restart",
                    "kill_mode",
                    "timeout_start_sec",
                    "working_directory",
                    "x",
                ]
            ),
            st.one_of(st.sampled_from(["a", "infinity", "64G", 30, 3, 4000, "always", "mixed", []]), junk),
            max_size=2,
        ),
        "nccl_env": st.one_of(st.none(), environments),
        "engine_version": st.sampled_from(["0.5.9", "0.5.9", "0.5.9", "9", 5]),
        "profiles": st.one_of(
            junk,
            st.builds(
                lambda base, chosen, env: {"mine": {"base": base, "flags": chosen, "env": env}},
                st.sampled_from(["baseline", "cpu", "eagle3-topk1-v2", "mine", "no", None, 3]),
                settings(spelled=False),
                environments,
            ),
        ),
    }
    for key in draw(
        st.lists(st.sampled_from(sorted(changes)), max_size=draw(st.sampled_from([0, 0, 1, 2])), unique=True)
    ):
        wanted[key] = draw(changes[key])
    return wanted


@st.composite
def hosts(draw: st.DrawFn) -> Any:
    """Hosts: whole, partial, odd."""
    if draw(st.integers(0, 29)) == 0:
        return draw(junk)
    kind = draw(st.sampled_from(["box", "box", "box", "box", "h200", "cpu", "small"]))
    host = {
        "box": cases.host,
        "h200": cases.h200,
        "cpu": cases.cpu_host,
        "small": lambda: cases.host(2, "NVIDIA L4", 23034, "8.9"),
    }[kind]()
    if draw(st.integers(0, 4)) == 0:
        host.pop(draw(st.sampled_from(sorted(host))))
    if draw(st.integers(0, 4)) == 0 and host.get("gpus"):
        gpu = host["gpus"][draw(st.integers(0, len(host["gpus"]) - 1))]
        key = draw(st.sampled_from(sorted(gpu)))
        if draw(st.booleans()):
            gpu.pop(key)
        else:
            gpu[key] = draw(junk)
    if draw(st.integers(0, 9)) == 0:
        host["links"] = draw(
            st.sampled_from([{"topology": "unknown"}, {"topology": "nvlink", "partial": True}, {}, 3, {"topology": 3}])
        )
    return host


@st.composite
def models(draw: st.DrawFn) -> Any:
    """Models: whole, partial, odd."""
    if draw(st.integers(0, 29)) == 0:
        return draw(junk)
    both = cases.models() if draw(st.integers(0, 3)) else cases.models(cases.LLAMA)
    if draw(st.integers(0, 4)) == 0:
        side = draw(st.sampled_from(["target", "draft"]))
        config = both[side]["config"]
        place = config["text_config"] if "text_config" in config and draw(st.booleans()) else config
        key = draw(st.sampled_from(sorted(place)))
        if draw(st.booleans()):
            place.pop(key)
        else:
            place[key] = draw(junk)
    if draw(st.integers(0, 9)) == 0:
        both[draw(st.sampled_from(["target", "draft"]))] = draw(junk)
    return both


@st.composite
def deployments(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """A wanted deployment, a host and models: in most draws ones that fit each other, so that many give a plan."""
    wanted = draw(wanteds())
    if not isinstance(wanted, dict) or draw(st.integers(0, 3)) == 0:
        return wanted, draw(hosts()), draw(models())
    profile = wanted.get("profile")
    if profile == "cpu":
        return wanted, draw(st.sampled_from([cases.cpu_host(), cases.host()])), {}
    if profile == "baseline":
        host = draw(st.sampled_from([cases.host(), cases.h200(), cases.h200(2), cases.host(4)]))
        return wanted, host, cases.models(cases.LLAMA) if len(host["gpus"]) < 8 else draw(models())
    return wanted, draw(st.sampled_from([cases.host(), cases.h200()])), cases.models()


def plan_or_problems(wanted: Any, host: Any, found: Any) -> dict[str, Any] | None:
    """A plan; or nothing, after the error was found to be a good one. Any other exception passes through and fails the
    test."""
    try:
        return launch_plan(wanted, host, found)
    except PlanError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.variable.startswith(("deployment_", "sglang_")), problem
            assert problem.found and problem.expected and problem.action and problem.rule, problem
            assert len(problem.line().splitlines()) == 1, problem
        return None
