"""The all-reduce check: its arithmetic, its reasons to skip, and its hard end with ranks that hang."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "roles" / "allreduce_check" / "files" / "allreduce_check.py"
#: A stand-in for torch, so that the parent's side is tested without it: ranks do what the environment says.
FAKE_TORCH = """
import os, sys, time
rank = next(a.split("=")[1] for a in sys.argv if a.startswith("--worker="))
what = os.environ.get("FAKE_RANK_" + rank, "hang")
if what == "hang":
    time.sleep(600)
if what == "child":
    import subprocess
    child = subprocess.Popen(["sleep", "600"])
    open(os.environ["CHILD_PID"], "w").write(str(child.pid))
    time.sleep(600)
raise RuntimeError("NCCL WARN " + what)
"""


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("allreduce_check", SCRIPT)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def run(*arguments: str, **environment: str) -> tuple[int, dict[str, object], str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture
def fake_torch(tmp_path: Path) -> str:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "torch.py").write_text(FAKE_TORCH)
    return str(tmp_path / "lib")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_bandwidth_is_that_of_nccl_tests(module: ModuleType) -> None:
    row = module.row(128 * 1024 * 1024, 1.731e-3, 2)
    assert row == {"bytes": 134217728, "latency_us": 1731.0, "algorithm_gbps": 77.538, "bus_gbps": 77.538}
    assert module.row(1000, 1e-6, 8)["bus_gbps"] == 1.75


@pytest.mark.parametrize(("visible", "count"), [("", "no GPU"), ("-1", "no GPU"), ("0", "one GPU")])
def test_skips_with_the_reason(visible: str, count: str) -> None:
    status, report, _error = run(CUDA_VISIBLE_DEVICES=visible)
    assert (status, report["status"]) == (0, "skipped")
    assert str(report["message"]).startswith(f"skipped: {count} (CUDA_VISIBLE_DEVICES={visible})")


def test_more_processes_than_gpus_is_refused() -> None:
    status, report, error = run("--processes=8", CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6")
    assert (status, report["status"]) == (1, "failed")
    assert "8 processes asked for and 7 GPUs found" in error


@pytest.mark.parametrize("arguments", [["--timeout=0"], ["--sizes=1"], ["--sizes=,"], ["--backend=mpi"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2


def test_hard_end_kills_everything(tmp_path: Path, fake_torch: str) -> None:
    begin = time.monotonic()
    status, report, _error = run(
        "--backend=gloo",
        "--processes=2",
        "--timeout=6",
        f"--work-dir={tmp_path / 'work'}",
        PYTHONPATH=fake_torch,
        FAKE_RANK_1="child",
        CHILD_PID=str(tmp_path / "child"),
    )
    assert time.monotonic() - begin < 60
    message = str(report["message"])
    assert (status, report["status"]) == (1, "failed")
    assert "did not end within 6 s (ranks 0, 1 in import of torch)" in message
    assert "the fabric is wedged" in message and "dmesg" in message
    pids = [int((tmp_path / "work" / f"pid-{rank}").read_text()) for rank in (0, 1)]
    pids.append(int((tmp_path / "child").read_text()))
    assert [pid for pid in pids if alive(pid)] == []


def test_one_rank_that_falls_ends_the_others(tmp_path: Path, fake_torch: str) -> None:
    status, report, error = run(
        "--backend=gloo",
        "--timeout=50",
        f"--work-dir={tmp_path / 'work'}",
        PYTHONPATH=fake_torch,
        FAKE_RANK_1="unhandled system error",
    )
    assert status == 1
    assert "rank 1 ended with status 1" in error and "NCCL WARN unhandled system error" in error
    assert not alive(int((tmp_path / "work" / "pid-0").read_text()))
    assert report["processes"] == 2


def test_ranks_die_with_the_check(tmp_path: Path, fake_torch: str) -> None:
    """Also when it is killed without a chance to clean up."""
    work = tmp_path / "work"
    check = subprocess.Popen(
        [sys.executable, SCRIPT, "--backend=gloo", "--timeout=300", f"--work-dir={work}"],
        env={**os.environ, "PYTHONPATH": fake_torch},
    )
    end = time.monotonic() + 60
    while time.monotonic() < end and not all((work / f"phase-{rank}").exists() for rank in (0, 1)):
        time.sleep(0.1)
    pids = [int((work / f"pid-{rank}").read_text()) for rank in (0, 1)]
    assert all(map(alive, pids))
    check.send_signal(signal.SIGKILL)
    check.wait()
    end = time.monotonic() + 30
    while time.monotonic() < end and any(map(alive, pids)):
        time.sleep(0.1)
    assert [pid for pid in pids if alive(pid)] == []
