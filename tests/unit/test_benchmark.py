"""The benchmark's thinking, with a record that the real bench_serving of SGLang 0.5.9 wrote (one of its five prompts was too
long, which the engine refused within the stream)."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.action.benchmark_run import progress_line
from ansible_collections.gpuserve.sglang.plugins.filter.benchmark_report import benchmark_report
from ansible_collections.gpuserve.sglang.plugins.module_utils import bench_run, benchmark, chart, documented
from ansible_collections.gpuserve.sglang.plugins.module_utils.benchmark import BenchmarkError

ROOT = Path(__file__).resolve().parents[2]
RECORD = (Path(__file__).parent / "fixtures" / "bench-serving-0.5.9.jsonl").read_text()
METHOD = {
    "tool": "sglang.bench_serving", "levels": [1, 30, 100], "requests": 30, "fill": False, "warmup": 5, "output_tokens": 200, "repeats": 3,
    "seed": 1, "max_prompt_chars": 0, "level_timeout": 900, "prompts": documented.record()["benchmark"]["stand_in_prompts"],
}  # fmt: skip
PLAN = {"hash": "a" * 64, "profile": "eagle3-topk1-v2", "engine_version": "0.5.9"}
RECORDED = documented.record()["benchmark"]


def seen(rate: float | None, accept: float | None = None, failed: int = 0, **more: Any) -> dict[str, Any]:
    """One repeat as `measure` returns it."""
    return {
        "requests": 30, "completed": 30 - failed, "failed": failed, "seconds": 70.0, "output_tok_s": rate, "output_tokens": 6000,
        "ttft_ms": {"p50": 200.0, "p99": 400.0}, "itl_ms": {"p50": 11.0, "p99": 30.0}, "accept_length": accept,
        "other_requests": 0, "errors": {"refused": failed} if failed else {}, **more,
    }  # fmt: skip


def document(rates: dict[int, list[float | None]], accept: float | None = 2.2, **more: Any) -> dict[str, Any]:
    record = {"ttfts": [0.2, 0.4], "itls": [0.01, 0.03]}
    runs = [(level, seen(rate, accept), record) for level, found in rates.items() for rate in found]
    method = {**METHOD, "levels": list(rates), "repeats": len(next(iter(rates.values())))}
    return {**benchmark.result("2026-01-02T03:04:05Z", PLAN, method, runs), **more}


# --- prompts


def test_our_own_prompts_are_enough_and_differ() -> None:
    lines = (ROOT / "roles" / "benchmark" / "files" / "prompts.jsonl").read_text().splitlines()
    prompts = benchmark.read_prompts("\n".join(lines))
    assert len(prompts) == len(set(prompts)) >= 60
    sizes = sorted(map(len, prompts))
    assert sizes[0] < 150
    assert sizes[-1] > 1500
    assert len({json.loads(line)["id"] for line in lines}) == len(lines)


def test_a_limit_leaves_long_prompts_out_and_says_when_none_is_left() -> None:
    text = '{"prompt": "short"}\n\n{"prompt": "much longer"}\n'
    assert benchmark.read_prompts(text, 6) == ["short"]
    with pytest.raises(BenchmarkError, match="no line of at most 3 characters"):
        benchmark.read_prompts(text, 3)
    for wrong in ('{"text": "x"}', "plain", '{"prompt": " "}', '["prompt"]'):
        with pytest.raises(BenchmarkError, match="line 1"):
            benchmark.read_prompts(wrong)


def test_the_choice_is_fixed_by_the_seed_and_never_repeats_a_text() -> None:
    prompts = [f"prompt {n}" for n in range(10)]
    assert benchmark.choose_prompts(prompts, 10, 1) == benchmark.choose_prompts(prompts, 10, 1)
    assert sorted(benchmark.choose_prompts(prompts, 10, 1)) == sorted(prompts)
    assert benchmark.choose_prompts(prompts, 10, 1) != benchmark.choose_prompts(prompts, 10, 2)
    many = benchmark.choose_prompts(prompts, 35, 1)
    assert len(set(many)) == 35
    # No common beginning either: the prefix cache would answer it.
    assert len({text[:14] for text in many[10:]}) == 25


def test_what_bench_serving_reads() -> None:
    rows = [json.loads(line) for line in benchmark.dataset(["a", "b\nc"]).splitlines()]
    assert [row["conversations"][0]["content"] for row in rows] == ["a", "b\nc"]
    assert all(len(row["conversations"]) == 2 for row in rows)


# --- method


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, ""),
        ({"levels": []}, "levels are"),
        ({"levels": [0]}, "levels are"),
        ({"levels": [2, 2]}, "levels are"),
        ({"requests": 0}, "requests is 0"),
        ({"output_tokens": 3}, "output_tokens is 3, expected 4 or more"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_a_method_that_cannot_be_is_refused(change, word) -> None:
    assert benchmark.check_method({**METHOD, **change}).startswith(word)
    assert bool(benchmark.check_method({**METHOD, **change})) == bool(word)


def test_levels_come_in_turns_and_fill_is_a_choice() -> None:
    assert benchmark.schedule([1, 5], 2) == [(1, 1), (1, 5), (2, 1), (2, 5)]
    assert benchmark.requests_at(100, 30, False) == 30
    assert benchmark.requests_at(100, 30, True) == 100
    assert benchmark.requests_at(5, 30, True) == 30


def test_the_command_line() -> None:
    server = {"host": "127.0.0.1", "port": 30000, "model_path": "/data/k", "served_model_name": "kimi", "tag": "abc"}
    argv = benchmark.command("/r/python", server, METHOD, 30, 30, {"dataset": "/d", "output": "/o"})
    pairs = dict(itertools.pairwise(argv))
    assert pairs["--max-concurrency"] == "30"
    assert pairs["--warmup-requests"] == "5"
    assert pairs["--sharegpt-output-len"] == "200"
    assert pairs["--dataset-name"] == "custom"
    assert pairs["--tag"] == "abc"
    assert "--flush-cache" in argv


# --- what came back


def test_a_real_record_is_kept_without_secrets_and_a_refusal_is_no_answer() -> None:
    raw = json.loads(RECORD)
    assert raw["completed"] == 5
    assert "sk-not-for-keeping" in RECORD
    kept = benchmark.parse_record(RECORD, 8)
    assert kept is not None
    text = json.dumps(kept, allow_nan=False)
    assert "sk-not-for-keeping" not in text
    assert "server_info" not in text
    assert "Hello from the sandbox" not in text
    assert kept["completed"] == 4
    assert kept["errors"] == {"no token came: the server refused it within the stream": 1}
    assert kept["total_output_tokens"] == 32
    assert kept["output_throughput"] == pytest.approx(raw["output_throughput"] * 4 / 5)
    measured = benchmark.measure(kept, 5)
    assert (measured["completed"], measured["failed"]) == (4, 1)
    assert measured["itl_ms"]["p50"] == pytest.approx(raw["median_itl_ms"], abs=0.01)


def test_errors_are_counted_shortened_and_scrubbed() -> None:
    record = {
        "duration": 1.0, "ttfts": [0.1, 0.0, 0.0, 0.1], "itls": [[0.1], [], [], [0.1]], "output_lens": [4, 0, 0, 2],
        "errors": ["", "Traceback\nValueError: api_key=sk-abc", "Traceback\nValueError: api_key=sk-abc", ""],
    }  # fmt: skip
    kept = benchmark.clean(record, 4)
    assert kept["errors"] == {"ValueError: api_key=***": 2, "cut short after 2 of 4 tokens": 1}
    assert kept["completed"] == 1


@pytest.mark.parametrize("text", ["", "\n", "no json", "[1]"])
def test_no_record(text: str) -> None:
    assert benchmark.parse_record(text, 8) is None
    measured = benchmark.measure(None, 30, problem="bench_serving ended with status 1: Warmup failed")
    assert (measured["completed"], measured["failed"], measured["output_tok_s"]) == (0, 30, None)
    assert measured["errors"] == {"bench_serving ended with status 1: Warmup failed": 30}


@pytest.mark.parametrize(
    ("accept", "before", "flushed", "expected"),
    [
        (2.2, 2.5, True, 2.2),
        (2.2, None, True, 2.2),
        (2.2, 2.2, True, None),
        (2.2, 2.5, False, None),
        (None, None, True, None),
    ],
)
def test_an_acceptance_length_is_the_levels_own_or_none(accept, before, flushed, expected) -> None:
    record = {"completed": 4, "accept_length": accept, "output_throughput": 10.0}
    assert benchmark.measure(record, 4, before, flushed)["accept_length"] == expected


def test_progress_bars() -> None:
    text = "warm-up\r  0%|          | 0/5 [00:00<?, ?it/s]\r 20%|██        | 1/5 [00:02<00:08]\r 80%|████████  | 4/5 [00:03<00:00]"
    assert benchmark.progress_bar(text) == (4, 5)
    assert benchmark.progress_bar("Loading 3/4") is None


@pytest.mark.parametrize("share", [0, 50, 99, 100])
def test_percentiles_are_numpys(share: int) -> None:
    values = [0.3, 0.1, 0.7, 0.2, 0.9]
    assert benchmark.percentile(values, share) == pytest.approx(float(np.percentile(values, share)))
    assert benchmark.percentile([], share) is None


# --- who else is there


@pytest.mark.parametrize(
    ("looks", "word"),
    [
        ([(0, 100.0), (0, 100.0)], ""),
        ([(0, 100.0), (1, 108.0), (0, 116.0)], ""),  # the liveness probe
        ([(1, 100.0), (1, 110.0), (0, 120.0)], "1 requests running or waiting, in 2 of 3 looks"),
        ([(0, 100.0), (3, 100.0), (0, 100.0)], "3 requests"),
        ([(0, 100.0), (0, 300.0)], "200 tokens"),
        ([(None, 100.0), (None, 300.0)], "200 tokens"),
        ([(0, None), (0, None)], ""),
        ([(2, None)], "2 requests"),
    ],
)
def test_somebody_else_is_served(looks, word) -> None:
    found = benchmark.served_others(looks)
    assert found.startswith(word)
    assert bool(found) == bool(word)


# --- comparing


def test_noise_is_half_the_spread() -> None:
    assert benchmark.noise([95.0, 100.0, 105.0]) == pytest.approx(0.05)
    assert benchmark.noise([100.0]) is None


def test_a_level_is_the_median_of_its_repeats() -> None:
    (level,) = document({1: [80.0, 90.0, 86.0]})["levels"]
    assert level["output_tok_s"] == 86.0
    assert level["noise"] == pytest.approx(0.0581, abs=1e-4)
    assert (level["requests"], level["completed"], level["failed"]) == (90, 90, 0)
    assert level["ttft_ms"] == {"p50": 300.0, "p99": 400.0}
    assert level["accept_length"] == 2.2
    assert len(level["repeats"]) == 3


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        ([99.5, 100.5, 101.5], [98.0, 99.0, 100.0], "same"),
        ([110.0, 111.0, 112.0], [98.0, 99.0, 100.0], "faster"),
        ([90.0, 91.0, 92.0], [98.0, 99.0, 100.0], "slower"),
        ([90.0, 110.0, 130.0], [98.0, 99.0, 100.0], "same"),  # 11 % more, but the repeats differ by more
        ([104.0], [100.0], "same"),  # a single run: 5 % are assumed
        ([106.0], [100.0], "faster"),
    ],
)
def test_only_what_is_outside_the_noise_counts(now, before, expected) -> None:
    found = benchmark.compare(document({1: now}), document({1: before}))
    assert found[1]["verdict"] == expected


def test_another_method_does_not_compare() -> None:
    old = document({1: [50.0]})
    old["method"]["output_tokens"] = 64
    assert benchmark.compare(document({1: [100.0]}), old)[1]["verdict"] == "other method"
    assert benchmark.compare(document({1: [100.0]}), None) == {}
    assert benchmark.compare(document({1: [None]}), document({1: [1.0]})) == {}


def test_the_record_is_as_it_was_written_down() -> None:
    rows = {row["title"]: row["figures"] for row in benchmark.record_rows(RECORDED)}
    assert rows == {
        "baseline, no speculation": {1: 92.7, 30: 689.4, 100: 773.1, 250: None},
        "topk 4, spec v1": {1: 80.9, 30: 313.3, 100: None, 250: 353.8},
        "topk 1, spec v2 (production)": {1: 86.8, 30: 759.3, 100: 775.0, 250: 754.4},
        "old stack: CUDA 12.8, no fusion": {1: 54.1, 30: None, 100: None, 250: None},
    }


def test_the_table_shows_what_is_known_and_nothing_else() -> None:
    now, before = document({1: [86.8, 86.8], 5: [300.0, 310.0], 100: [775.0, 775.0]}), document({1: [80.0, 80.0]})
    rows = benchmark.table(now, before, RECORDED)
    assert rows[0][-4:] == ["record tok/s", "to record", "run before tok/s", "change"]
    assert rows[1][0] == "1"
    assert rows[1][-4:] == ["86.8", "+0.0 %", "80.0", "+8.5 % (faster)"]
    # C=5 is not on record.
    assert rows[2][-4:] == ["-", "-", "-", "-"]
    assert rows[3][-4:] == ["775.0", "+0.0 %", "-", "-"]
    assert "record tok/s" not in benchmark.table({**now, "profile": "cpu"}, None, RECORDED)[0]
    lines = benchmark.markdown(rows).splitlines()
    assert len({line.count("|") for line in lines}) == 1


def test_the_prompts_that_stand_for_the_record_s_are_the_collection_s() -> None:
    prompts = benchmark.read_prompts((ROOT / "roles" / "benchmark" / "files" / "prompts.jsonl").read_text())
    assert RECORDED["stand_in_prompts"] == f"{len(prompts)} ({benchmark.fingerprint(prompts)})"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fill": True}, "at least as many requests as the level is high"),
        ({"requests": 250}, "250 requests a level instead of 30"),
        ({"output_tokens": 16}, "16 new tokens instead of 200"),
        ({"warmup": 0}, "0 warm-up requests instead of 5"),
        ({"prompts": "3 (abc)"}, "prompts 3 (abc) instead of the collection's 67 (691ee1d5e237)"),
    ],
)
def test_what_was_measured_otherwise_is_not_held_against_the_record(change: dict[str, Any], words: str) -> None:
    now = document({1: [86.8], 30: [1500.0], 5: [300.0]})
    assert benchmark.other_than_record(now, RECORDED) == ""
    now["method"].update(change)
    rows = benchmark.table(now, None, RECORDED)
    # C=5 is not on record.
    assert [row[-2:] for row in rows[1:]] == [["86.8", "other method"], ["759.3", "other method"], ["-", "-"]]
    text = benchmark_report(now)["text"]
    assert f"Not the method of the record ({words}): its figures are no measure for these" in text
    assert "%" not in text.partition("record tok/s")[2]
    # Where nothing of the profile is on record, nothing is said of it.
    assert "record" not in benchmark_report({**now, "profile": "cpu"})["text"]


def test_the_highest_point_of_a_chart_is_not_cut() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axis = figure.add_subplot()
    axis.plot([1, 2], [80.0, 90.0])
    chart._from_zero(axis, 0.12)
    low, high = axis.get_ylim()
    assert (low, high >= 91) == (0, True), high


def test_charts_mark_another_method_and_a_failed_profile(tmp_path: Path) -> None:
    now = document({1: [86.8, 87.0]})
    svg = Path(chart.draw(tmp_path / "same", now, None, RECORDED)[0]).read_text()
    assert "record (topk 1" in svg and "other method" not in svg
    now["method"]["output_tokens"] = 16
    assert "other method)" in Path(chart.draw(tmp_path / "other", now, None, RECORDED)[0]).read_text()
    documents = [document({1: [80.0]}, profile="good"), document({1: [90.0]}, profile="bad", failure="died in round 2")]
    svg = Path(chart.draw_candidates(tmp_path / "candidates", documents)[0]).read_text()
    assert "bad (failed in another round)" in svg and "good (failed" not in svg


def test_a_share_of_another_method_is_not_shown() -> None:
    old = document({1: [50.0]})
    old["method"]["output_tokens"] = 64
    assert benchmark.table(document({1: [100.0]}), old, None)[1][-2:] == ["50.0", "other method"]


def test_remarks_say_what_a_reader_must_know() -> None:
    now = document({1: [80.0], 100: [700.0]})
    now["levels"][0]["repeats"] = [seen(80.0, failed=2, other_requests=40)]
    text = "\n".join(benchmark.remarks(now))
    assert "C=100: 30 requests never fill it" in text
    assert "C=1: 2 failed: refused" in text
    assert "40 requests of others" in text
    assert benchmark.remarks(document({1: [80.0]})) == []


def test_the_filter() -> None:
    report = benchmark_report(document({1: [80.0]}), None)
    assert (report["asked"], report["failed"]) == (30, 0)
    assert report["markdown"].startswith("| C |")
    for wrong in (None, {}, {"schema": 2}, "text"):
        with pytest.raises(AnsibleFilterError, match="schema 1"):
            benchmark_report(wrong)


def test_the_line_on_the_controller() -> None:
    progress = {
        "level": 2,
        "levels": 5,
        "concurrency": 5,
        "repeat": 1,
        "repeats": 3,
        "done": 12,
        "requests": 30,
        "doing": "measuring",
    }
    assert progress_line("box", progress) == "benchmark on box: level 2 of 5 (C=5), run 1 of 3: 12/30 requests"
    assert progress_line("box", {**progress, "repeats": 1, "doing": "warming up"}).endswith(
        "level 2 of 5 (C=5): warming up"
    )


# --- on the host


def test_results_are_stored_linked_and_pruned(tmp_path: Path) -> None:
    first = bench_run.store(tmp_path, document({1: [80.0]}), [{"a": 1}], True)
    assert first["previous"] is None
    latest = tmp_path / "benchmarks" / "latest.json"
    assert json.loads(latest.read_text())["profile"] == "eagle3-topk1-v2"
    # The same second, and a run that was stopped: stored, but not the latest.
    second = bench_run.store(tmp_path, document({1: [70.0]}, stopped="no request was answered"), [], False)
    assert second["id"] != first["id"]
    assert second["previous"]["levels"][0]["output_tok_s"] == 80.0
    assert os.readlink(latest) == f"{first['id']}.json"
    for day in range(1, 28):
        bench_run.store(tmp_path, document({1: [80.0]}, when=f"2026-02-{day:02d}T00:00:00Z"), [], True)
    names = {path.name for path in (tmp_path / "benchmarks").iterdir()}
    assert len([name for name in names if name.endswith("Z.json")]) == bench_run.KEPT
    assert len([name for name in names if name.endswith(".jsonl")]) == bench_run.KEPT
    assert os.readlink(latest) in names


def test_results_go_into_a_folder_of_roots_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "benchmarks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BenchmarkError, match="benchmarks is a link or no folder, expected a folder of root's"):
        bench_run.store(tmp_path, document({1: [80.0]}), [], True)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def script(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python apart from the tests: adopting orphans and killing below a process is not for pytest's own."""
    text = "import sys\nfrom pathlib import Path\nfrom ansible_collections.gpuserve.sglang.plugins.module_utils import bench_run\n"
    path = os.pathsep.join([str(ROOT / "collections"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", text + textwrap.dedent(body), *arguments],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_a_command_that_hangs_is_killed_with_what_it_detached(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hang = f"setsid sh -c 'echo $$ >>{pids}; trap \"\" TERM; sleep 300' & echo $$ >>{pids}; trap '' TERM; echo ' 50%|x | 1/2 [0'; sleep 300"
    done = script(
        """
        bench_run.adopt_orphans()
        ended = bench_run.run_watched(["sh", "-c", sys.argv[1]], 3, lambda text: None, lambda: "")
        print(ended.why, bench_run.benchmark.progress_bar(ended.tail), bench_run.descendants(bench_run.os.getpid()) - {bench_run.os.getpid()})
        """,
        hang,
    )
    assert done.stdout.strip() == "killed after 3 s (1, 2) set()", done.stderr
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 2
    assert not any(bench_run.alive(pid) for pid in found)


def test_a_detached_child_does_not_outlive_a_command_that_ends(tmp_path: Path) -> None:
    done = script(
        """
        bench_run.adopt_orphans()
        argv = ["sh", "-c", "setsid sleep 300 >/dev/null 2>&1 & echo said; exit 3"]
        ended = bench_run.run_watched(argv, 60, lambda text: None, lambda: "")
        print(ended.rc, ended.tail.strip(), repr(ended.why), bench_run.kill_below())
        """
    )
    assert done.stdout.strip() == "3 said '' []", done.stderr


ORDER: dict[str, Any] = {
    "plan": PLAN, "python": "/nothing", "user": "", "environment": {}, "latest": True, "prompts": '{"prompt": "x"}', "allow_others": True,
    "server": {"host": "127.0.0.1", "port": 1, "model_path": "/m", "served_model_name": "m", "tag": "t"},
    "method": {**METHOD, "levels": [1], "repeats": 1, "requests": 2},
}  # fmt: skip


def test_the_worker_reports_stores_and_cleans_up(tmp_path: Path) -> None:
    """From start to poll, with a program in the place of bench_serving that answers nothing."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'ValueError: Warmup failed api_key=sk-1' >&2\nexit 1\n")
    fake.chmod(0o755)
    order = {**ORDER, "python": str(fake), "state_dir": str(tmp_path / "state")}
    folder = Path(
        script(
            "print(bench_run.start(__import__('json').loads(sys.argv[1]), Path(sys.argv[2])))",
            json.dumps(order),
            str(tmp_path / "runs"),
        ).stdout.strip()
    )
    until = time.monotonic() + 60
    answer = bench_run.poll(folder, 1.0)
    while answer["state"] == "running" and time.monotonic() < until:
        answer = bench_run.poll(folder, 1.0)
    assert answer["state"] == "done", answer
    assert "Warmup failed api_key=***" in answer["result"]["stopped"]
    assert not folder.exists()
    stored = list((tmp_path / "state" / "benchmarks").iterdir())
    assert {path.suffix for path in stored} == {".json", ".jsonl"}
    assert not any("sk-1" in path.read_text() for path in stored)


def test_a_worker_that_died_is_told_from_one_that_works(tmp_path: Path) -> None:
    folder = tmp_path / "benchmark-x"
    folder.mkdir()
    (folder / "asked").write_text(str(time.time()))
    assert bench_run.poll(folder, 0)["state"] == "running"
    sleeper = subprocess.Popen(["sleep", "300"])
    try:
        bench_run.write_json(folder / "worker.json", {"pid": sleeper.pid})
        assert bench_run.poll(folder, 0)["state"] == "running"
        # Another level is told at once, whatever the window is.
        bench_run.write_json(folder / "progress.json", {"repeat": 1, "level": 2})
        assert bench_run.poll(folder, 3600, "1/1")["progress"]["level"] == 2
        with pytest.raises(BenchmarkError, match=rf"already \(pid {sleeper.pid}\)"):
            bench_run.clear_stale(tmp_path)
    finally:
        sleeper.send_signal(signal.SIGKILL)
        sleeper.wait()
    assert "died" in bench_run.poll(folder, 0)["error"]
    assert not folder.exists()
    with pytest.raises(BenchmarkError, match="no folder of a benchmark"):
        bench_run.poll(tmp_path / "etc", 0)


def test_an_abandoned_run_ends(tmp_path: Path) -> None:
    worker = bench_run.Worker({**ORDER, "state_dir": str(tmp_path)}, tmp_path)
    (tmp_path / "asked").touch()
    assert worker.abandoned() == ""
    os.utime(tmp_path / "asked", (1, 1))
    assert "does not ask" in worker.abandoned()
    (tmp_path / "asked").unlink()
    assert "removed" in worker.abandoned()
