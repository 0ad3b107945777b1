"""The benchmark on a real server: SGLang's own bench_serving against the real engine on the CPU.

The tests share one box and run in the order written. The figures mean nothing here; that they come, and what is done with
them, is what is tested.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from box_helpers import ANSWER, STATE, Box, Run

SMALL = {
    "benchmark_levels": [1, 2, 4],
    "benchmark_requests": 4,
    "benchmark_repeats": 1,
    "benchmark_output_tokens": 8,
    "benchmark_warmup": 1,
    "benchmark_quiet_seconds": 3,
}
FOLDER = f"{STATE}/benchmarks"
# bench_serving's own count of what follows is 0: the engine refuses a prompt that is too long within a stream of status 200.
TOO_LONG = "Explain every word of this: " + "word " * 2000


def latest(box: Box) -> dict[str, Any]:
    return json.loads(box.sh(f"cat {FOLDER}/latest.json"))


@pytest.fixture(scope="module")
def measured(serving_box: Box, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path, int]:
    """One benchmark of three levels, with copies on the controller."""
    folder = tmp_path_factory.mktemp("results")
    pid = serving_box.main_pid
    run = serving_box.play("playbooks/benchmark.yml", **SMALL, benchmark_controller_dir=str(folder))
    assert run.rc == 0, run.report
    return run, folder, pid


def test_three_levels_are_measured_and_stored(serving_box: Box, measured: tuple[Run, Path, int]) -> None:
    __, folder, pid = measured
    found = latest(serving_box)
    assert found["schema"] == 1
    assert [level["concurrency"] for level in found["levels"]] == [1, 2, 4]
    for level in found["levels"]:
        assert (level["requests"], level["completed"], level["failed"]) == (4, 4, 0)
        assert level["output_tok_s"] > 0
        assert 0 < level["ttft_ms"]["p50"] <= level["ttft_ms"]["p99"]
        assert 0 < level["itl_ms"]["p50"] <= level["itl_ms"]["p99"]
        # EAGLE-3 does not run on a CPU: no figure, and not 0 or 1.
        assert level["accept_length"] is None
    plan = json.loads(serving_box.sh(f"cat {STATE}/deployments/last-good/plan.json"))
    assert (found["plan_hash"], found["profile"]) == (plan["hash"], "cpu")
    assert serving_box.main_pid == pid
    (copy,) = folder.glob("*.json")
    assert json.loads(copy.read_text()) == found


def test_progress_is_shown(measured: tuple[Run, Path, int]) -> None:
    for number, level in enumerate(SMALL["benchmark_levels"], 1):
        assert f"level {number} of 3 (C={level})" in measured[0].stdout


def test_the_charts_are_pictures(serving_box: Box, measured: tuple[Run, Path, int]) -> None:
    __, folder, __pid = measured
    (png,), (svg,) = folder.glob("*.png"), folder.glob("*.svg")
    pixels = matplotlib.image.imread(png)
    assert pixels.shape[0] > 600
    assert pixels.shape[1] > 900
    # Not an empty page: something is drawn in many places, in the colour of this run.
    assert (pixels[..., :3].std(axis=2) > 0.1).sum() > 1000
    text = "".join(ElementTree.parse(svg).getroot().itertext())
    for label in ("Output throughput", "output tokens a second", "Time to first token", "ms", "concurrent requests"):
        assert label in text
    stem = serving_box.sh(f"basename $(readlink {FOLDER}/latest.json) .json")
    assert serving_box.sh(f"head -c 4 {FOLDER}/{stem}.png | od -An -c").split()[1:] == ["P", "N", "G"]
    assert serving_box.sh(f"test -s {FOLDER}/{stem}.svg && echo yes") == "yes"


def test_the_table_is_in_the_handbook(serving_box: Box, measured: tuple[Run, Path, int]) -> None:
    handbook = serving_box.sh(f"cat {STATE}/production.md")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in handbook.splitlines() if line.startswith("| ")]
    # Four requests of eight tokens are not how the record was measured.
    assert "**other method**" in handbook and "- Not the method of the record (" in handbook
    for level in latest(serving_box)["levels"]:
        (row,) = [row for row in rows if row[0] == str(level["concurrency"]) and len(row) == 9]
        assert row[1:3] == ["4", "0"]
        assert float(row[3]) == pytest.approx(level["output_tok_s"], abs=0.06)


def test_no_file_holds_what_bench_serving_says_of_the_server(serving_box: Box, measured: tuple[Run, Path, int]) -> None:
    """Its records hold the whole of /server_info, with any key; so would everything that is left of a run."""
    __, folder, __pid = measured
    words = "api_key|server_info|internal_states|generated_texts|tiny model runs"
    assert (
        serving_box.sh(f"grep -rlE '{words}' {FOLDER} /run/gpuserve-sglang /tmp --include='*.json*'", check=False) == ""
    )
    assert serving_box.sh("ls -d /run/gpuserve-sglang/benchmark-*", check=False) == ""
    assert not [path for path in folder.glob("*.json") if "api_key" in path.read_text()]
    records = [json.loads(line) for line in serving_box.sh(f"cat $(readlink -f {FOLDER}/latest.json)l").splitlines()]
    assert len(records) == 3
    assert {record["plan_hash"] for record in records} == {latest(serving_box)["plan_hash"]}


def test_failed_requests_are_counted_and_fail_the_play(
    serving_box: Box, measured: tuple[Run, Path, int], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ["Say something.", "Say something else.", "Say a word.", TOO_LONG]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    before = latest(serving_box)
    run = serving_box.play(
        "playbooks/benchmark.yml",
        **{**SMALL, "benchmark_levels": [2]},
        benchmark_max_prompt_chars=0,
        benchmark_prompts_file=str(prompts),
        benchmark_charts=False,
        benchmark_handbook=False,
    )
    assert run.rc != 0
    assert "1 of 4 requests failed, expected none" in run.failure
    assert "no token came" in run.failure
    (level,) = latest(serving_box)["levels"]
    assert (level["completed"], level["failed"]) == (3, 1)
    assert level["repeats"][0]["output_tokens"] == 3 * 8
    assert latest(serving_box)["when"] != before["when"]


def test_a_server_that_serves_somebody_is_left_alone(serving_box: Box, measured: tuple[Run, Path, int]) -> None:
    before = serving_box.sh(f"ls {FOLDER}")
    body = json.dumps({"text": "hello", "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}})
    serving_box.write("/srv/busy.json", body)
    ask = "curl -s -o /dev/null -d @/srv/busy.json -H 'Content-Type: application/json' http://127.0.0.1:30000/generate"
    serving_box.background("sh", "-c", f"while [ -e /srv/busy.json ]; do {ask} || sleep 1; done")
    try:
        serving_box.wait_for(
            lambda: '"num_running_reqs":1' in serving_box.sh("curl -s http://127.0.0.1:30000/v1/loads"), 60
        )
        run = serving_box.play("playbooks/benchmark.yml", **SMALL)
    finally:
        serving_box.sh("rm -f /srv/busy.json")
    assert run.rc != 0
    assert "the server serves somebody else" in run.failure
    assert "benchmark_allow_others" in run.failure
    assert serving_box.sh(f"ls {FOLDER}") == before


def test_another_plan_than_the_serving_one_is_refused(serving_box: Box, measured: tuple[Run, Path, int]) -> None:
    run = serving_box.play("playbooks/benchmark.yml", **SMALL, deployment_overrides={"max_running_requests": 5})
    assert run.rc != 0
    assert "does not follow this plan" in run.failure
    assert run.changed == []
    assert serving_box.chat() == ANSWER
