#!/usr/bin/env python3
# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Measure all-reduces under the settings that this interpreter's sitecustomize gives, and compare two sets of them.

    allreduce_ab.py measure --label LABEL [--timeout S] >ONE.json
    allreduce_ab.py compare FOLDER >COMPARED.json

measure starts one process for each GPU and prints one JSON object: what NCCL itself said it took from the environment, and
the time of an all-reduce at each size, launched one by one (eager_us) and replayed from a CUDA graph (graph_us), as an engine
decodes. compare takes the median over all runs of a label in FOLDER/*.json, with labels auto and pcie.

Exit status: 0 done or skipped (below two GPUs; the object says so), 1 failed, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KIB, MIB = 1024, 1024 * 1024
#: One token of a model with 4096 values of two bytes up to a verified batch of them; then a prefill.
SIZES = (8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 128 * MIB)
TRIALS = 7
LABELS = ("auto", "pcie")
#: What NCCL prints about its environment with NCCL_DEBUG=INFO.
TOOK = re.compile(r"NCCL INFO (?:Environment variable )?(NCCL_\w+) set (?:by environment )?to (\S+?)\.?$", re.MULTILINE)


# --- worker --------------------------------------------------------------------------------------------------------


def work(rank: int, world: int, folder: Path) -> None:
    """One rank; rank 0 writes the result."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, device_id=device
    )

    def timed(launch: Any, times: int) -> float:
        """Seconds of one launch, as the slowest rank's events saw it."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        for _ in range(times):
            launch()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end) / 1e3 / times], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest.item())

    rows = []
    for size in SIZES:
        iterations = 20 if size > MIB else 200
        tensor = torch.full((size // 2,), float(rank + 1), dtype=torch.bfloat16, device=device)
        dist.all_reduce(tensor)
        wanted = world * (world + 1) / 2
        found = tensor[[0, size // 4, -1]].float().cpu().tolist()
        if any(value != wanted for value in found):
            raise SystemExit(f"all-reduce of {size} bytes gave {found}, expected {wanted}: data is damaged on its way")
        tensor.zero_()
        for _ in range(20):
            dist.all_reduce(tensor)
        eager = [timed(lambda tensor=tensor: dist.all_reduce(tensor), iterations) for _ in range(TRIALS)]
        graph = torch.cuda.CUDAGraph()
        inner = 10
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(inner):
                dist.all_reduce(tensor)
        graph.replay()
        replayed = [timed(graph.replay, iterations // inner) / inner for _ in range(TRIALS)]
        rows.append(
            {
                "bytes": size,
                "eager_us": round(statistics.median(eager) * 1e6, 2),
                "graph_us": round(statistics.median(replayed) * 1e6, 2),
            }
        )
        del graph, tensor
    if rank == 0:
        result = {
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "gpus": [torch.cuda.get_device_name(index) for index in range(world)],
            # Of this process: set by sitecustomize, or handed down.
            "environment": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG")
            },
            "rows": rows,
        }
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


# --- parent --------------------------------------------------------------------------------------------------------


def count_gpus() -> int:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE)) if done.returncode == 0 else 0


def measure(label: str, timeout: float) -> dict[str, Any]:
    """One run over all GPUs; never longer than C(timeout) seconds, and nothing of it is left afterwards."""
    gpus = count_gpus()
    if gpus < 2:
        return {"label": label, "status": "skipped", "message": f"{gpus} GPU found, an all-reduce needs two."}
    with tempfile.TemporaryDirectory(prefix="allreduce-ab-") as name:
        folder = Path(name)
        # Ranks that die with their parent leave no wedged GPU behind; NCCL's words go into files of their own.
        environment = {**os.environ, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/nccl-%p.log"}
        ranks = []
        try:
            for rank in range(gpus):
                command = [sys.executable, __file__, "rank", str(rank), str(gpus), str(folder)]
                with open(folder / f"rank-{rank}.log", "wb") as log:
                    ranks.append(
                        subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
                    )
            begun = time.monotonic()
            deadline = begun + timeout
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
                if any(rank.poll() not in (None, 0) for rank in ranks):
                    break
                time.sleep(0.2)
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
        words = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("nccl-*.log")))
        took = dict(sorted(TOOK.findall(words)))
        # Without host, process and thread, which differ from run to run.
        said = [line.partition("NCCL INFO ")[2] for line in words.splitlines()]
        lines = list(dict.fromkeys(line for line in said if "NCCL_" in line or "coll channels" in line))
        if not (folder / "result.json").exists():
            logs = {path.name: path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("rank-*.log"))}
            ends = [rank.returncode for rank in ranks]
            return {
                "label": label, "status": "failed",
                "message": f"no result after {time.monotonic() - begun:.0f} s, ranks ended with {ends}, expected 0",
                "logs": logs, "nccl_took": took,
            }  # fmt: skip
        result = json.loads((folder / "result.json").read_text())
        return {"label": label, "status": "ok", "nccl_took": took, "nccl_log": lines[:40], **result}


def compare(folder: Path) -> dict[str, Any]:
    """Median, least and most of each size over the runs of a label, and how many times slower pcie is than auto."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    by_label = {label: [run for run in runs if run["label"] == label and run["status"] == "ok"] for label in LABELS}
    if not all(by_label.values()):
        reasons = sorted({run.get("message", "") for run in runs} - {""})
        status = "failed" if any(run["status"] == "failed" for run in runs) else "skipped"
        return {"status": status, "message": " ".join(reasons) or "below two GPUs: no run was made", "rows": []}
    rows = []
    for position, size in enumerate(row["bytes"] for row in by_label["auto"][0]["rows"]):
        row: dict[str, Any] = {"bytes": size}
        for kind in ("eager_us", "graph_us"):
            for label in LABELS:
                values = [run["rows"][position][kind] for run in by_label[label]]
                row[f"{label}_{kind}"] = {
                    "median": round(statistics.median(values), 2),
                    "least": min(values),
                    "most": max(values),
                }
            ratio = row[f"pcie_{kind}"]["median"] / row[f"auto_{kind}"]["median"]
            row[f"ratio_{kind.removesuffix('_us')}"] = round(ratio, 2)
        rows.append(row)
    first = by_label["auto"][0]
    return {
        "status": "ok",
        "runs": {label: len(found) for label, found in by_label.items()},
        "trials_in_a_run": TRIALS,
        "torch": first["torch"],
        "nccl": first["nccl"],
        "gpus": first["gpus"],
        "environment": {label: found[0]["environment"] for label, found in by_label.items()},
        "nccl_took": {label: found[0]["nccl_took"] for label, found in by_label.items()},
        "nccl_log": {label: found[0]["nccl_log"] for label, found in by_label.items()},
        "rows": rows,
    }


def main() -> int:
    if sys.argv[1:2] == ["rank"] and len(sys.argv) == 5:
        work(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("--label", choices=LABELS, required=True)
    measuring.add_argument("--timeout", type=float, default=90)
    verbs.add_parser("compare").add_argument("folder", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.label, arguments.timeout) if arguments.verb == "measure" else compare(arguments.folder)
    print(json.dumps(result, indent=1))
    return 1 if result["status"] == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
