"""`/metrics` and `/v1/loads` as the engine wrote them, and the acceptance watch on top."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import acceptance, metrics, verify, verify_serve
from ansible_collections.gpuserve.sglang.plugins.module_utils.health_http import HttpAnswer

STORED = (Path(__file__).parent / "fixtures" / "health" / "cuda-0.5.11-eagle3.metrics").read_text()
EAGLE = {"--speculative-algorithm": "EAGLE3", "--enable-flashinfer-allreduce-fusion": True}
BENCHMARK = {"levels": [{"concurrency": 1, "accept_length": 2.4}, {"concurrency": 30, "accept_length": 2.2}]}


def test_the_stored_answer_of_a_real_server() -> None:
    seen = metrics.Metrics.parse(STORED)
    assert seen.total(metrics.RUNNING) == 5
    assert seen.total(metrics.QUEUED) == 0
    assert seen.total(metrics.GENERATED) == 25400
    assert seen.total(metrics.FINISHED) == 412
    assert seen.accept_length == pytest.approx(2.1221, abs=1e-4)
    assert {s.labels["endpoint"] for s in seen.named("sglang:http_requests_active")} >= {"/generate", "/health"}


def test_no_figure_is_not_zero() -> None:
    seen = metrics.Metrics.parse("# nothing\n")
    assert not seen
    assert seen.total(metrics.RUNNING) is None
    assert metrics.Metrics.parse('sglang:spec_accept_length{tp_rank="0"} 0.0').accept_length is None
    assert metrics.Metrics.parse("sglang:spec_accept_length NaN").accept_length is None


def test_ranks_of_a_replica_count_once_and_replicas_add_up() -> None:
    lines = [f'sglang:num_running_reqs{{dp_rank="{d}",tp_rank="{t}"}} {3 + d}' for d in (0, 1) for t in (0, 1)]
    assert metrics.Metrics.parse("\n".join(lines)).total(metrics.RUNNING) == 7


def test_label_values_may_hold_anything() -> None:
    (sample,) = metrics.samples(r'x{a="b,}\" c=\\",d="e"} 1e3 1700000000000')
    assert sample.labels == {"a": 'b,}" c=\\', "d": "e"}
    assert sample.value == 1000
    assert list(metrics.samples('broken{a="b} 1\nx{a=b} 1\nx one\n\n')) == []


def test_loads() -> None:
    body = json.dumps(
        {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 1, "num_waiting_reqs": 0}]}
    )
    load = metrics.parse_loads(body)
    assert load is not None
    assert (load.running, load.waiting, load.total) == (3, 1, 4)
    for wrong in ("", "[]", '{"loads": [{}]}', '{"detail": "Not Found"}', "null"):
        assert metrics.parse_loads(wrong) is None


@pytest.mark.parametrize(
    ("now", "args", "benchmark", "state"),
    [
        (None, {}, BENCHMARK, acceptance.OFF),
        (2.1, {}, BENCHMARK, acceptance.OFF),
        (None, EAGLE, BENCHMARK, acceptance.UNKNOWN),
        (2.1, EAGLE, None, acceptance.UNMEASURED),
        (2.1, EAGLE, {"levels": [{"concurrency": 1, "accept_length": None}]}, acceptance.UNMEASURED),
        (2.1, EAGLE, BENCHMARK, acceptance.OK),
        (2.0, EAGLE, BENCHMARK, acceptance.LOW),
        (1.0, EAGLE, None, acceptance.LOW),
    ],
)
def test_states(now, args, benchmark, state) -> None:
    assert acceptance.watch(now, args, benchmark, running=1).state == state


def test_the_level_next_to_the_load_is_the_measure() -> None:
    assert acceptance.measured(BENCHMARK, 0) == 2.4
    assert acceptance.measured(BENCHMARK, 28) == 2.2
    assert acceptance.watch(2.0, EAGLE, BENCHMARK, running=40).state == acceptance.OK


def test_a_drop_of_the_stored_server_names_causes_and_switch() -> None:
    now = metrics.Metrics.parse(STORED).accept_length
    seen = acceptance.watch(now, EAGLE, {"levels": [{"concurrency": 5, "accept_length": 2.9}]}, running=5)
    assert seen.state == acceptance.LOW
    assert "2.12" in seen.message
    assert "2.90" in seen.message
    assert "27 % less" in seen.message
    for word in ("other traffic", "wrong draft", "fusion defect", "baseline", "speculative_disable_batch_threshold"):
        assert word in seen.message


def test_nothing_accepted_is_not_the_traffic_and_no_fusion_is_not_its_defect() -> None:
    seen = acceptance.watch(1.0, {"--speculative-algorithm": "EAGLE3"}, BENCHMARK)
    assert "nothing of the draft is accepted" in seen.message
    assert [cause.split(":")[0] for cause in seen.causes] == ["wrong draft"]
    assert "fusion" not in seen.switch


@pytest.mark.parametrize(
    ("expected", "ok", "words"),
    [
        (2.2, True, ["2.30 since the start", "acceptance length is 2.12", "the last benchmark had 2.20"]),
        (
            2.9,
            False,
            ["2.12 in the last steps", "about 2.90", "other traffic", "wrong draft", "fusion defect", "baseline"],
        ),
        (None, True, ["no benchmark to compare with"]),
    ],
)
def test_verify_warns_of_a_drop_against_the_benchmark(expected, ok, words) -> None:
    info = HttpAnswer(200, "", json.dumps({"internal_states": [{"avg_spec_accept_length": 2.3}]}))
    benchmark = {"levels": [{"concurrency": 5, "accept_length": expected}]} if expected else None
    check = verify_serve.check_speculation({"args": EAGLE}, info, HttpAnswer(200, "", STORED), benchmark)
    assert check.ok is ok
    if not ok:
        assert check.severity == verify.WARNING
    text = f"{check.found} {check.expected} {check.action}"
    for word in words:
        assert word in text
