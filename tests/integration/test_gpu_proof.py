"""The proof on real GPUs, rehearsed: the path for the owner of the documented box, on a box without GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, Box

#: Small enough for two cores; the documented box measures the levels of the record.
SHORT = (
    "benchmark_levels=[1]",
    "benchmark_requests=2",
    "benchmark_warmup=1",
    "benchmark_repeats=1",
    "benchmark_output_tokens=16",
)


def test_the_production_path_runs_from_start_to_report(serving_box: Box, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    words = [
        "--profile",
        "production",
        "--inventory",
        str(serving_box.inventory),
        "--out",
        str(out),
        "--work",
        str(tmp_path / "work"),
    ]
    # Another deployment than the one that serves, so that the first play has something to do.
    extra = ['deployment_overrides={"max_running_requests": 6}', *SHORT]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu" / "proof.py"), *words, *(w for e in extra for w in ("--extra", e))],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=2200,
    )  # fmt: skip
    assert out.exists(), done.stdout + done.stderr
    report = json.loads(out.read_text())
    steps = {step["name"]: step for step in report["steps"]}
    assert [(n, s["reason"]) for n, s in steps.items() if s["outcome"] == "failed"] == [], done.stdout
    assert (done.returncode, report["proven"]) == (0, True)
    assert report["profile"] == "production"
    assert report["device"] == "cpu", "a stand-in's word about GPUs is no proof"
    assert report["versions"]["sglang"] == "0.5.9"
    assert report["host"]["gpu_count"] == 8
    for name in ("host", "preflight", "site", "site-again", "plan", "verify", "site-changed", "rollback"):
        assert steps[name]["outcome"] == "passed", steps[name]
    assert steps["site"]["figures"]["changed"] > 0
    assert steps["site-again"]["figures"]["changed"] == 0
    assert report["deployment"]["profile"] == "cpu"
    assert report["deployment"]["engine_version"] == "0.5.9"
    assert report["deployment"]["weights_bytes"] > 0
    assert serving_box.command_line.split().count("--max-running-requests") == 1
    assert "--max-running-requests 6" in serving_box.command_line, "it is left with what its inventory asks for"
    # Whatever is skipped says why, and names no more than this.
    for name, step in steps.items():
        if step["outcome"] == "skipped":
            assert step["reason"].startswith("this checkout has no playbooks/"), (name, step)
    assert serving_box.name not in out.read_text(), "a report names no machine"
