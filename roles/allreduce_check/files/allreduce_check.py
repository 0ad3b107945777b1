#!/usr/bin/env python3
# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Do the GPUs of this host add up? One all-reduce over all of them, with a hard end, before a ten-minute load.

    allreduce_check.py [--backend auto|nccl|gloo] [--processes N] [--timeout S] [--sizes BYTES,...]
                       [--min-bandwidth GB/S]

Run it with the engine's own interpreter: it takes torch, NCCL and sitecustomize as the engine does. One JSON object on
stdout: status (ok, skipped, failed), message, and for each size latency_us, algorithm_gbps, bus_gbps. The bus bandwidth
is that of nccl-tests: 2 (n-1)/n times bytes over time. Exit status: 0 ok or skipped, 1 failed, 2 wrong arguments.

The parent imports no torch and touches no GPU, so that a wedged driver cannot hold it: when the time is over it kills
every process that it started and says where each of them stood.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import glob
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LARGE = 128 * 1024 * 1024
#: One token, a verified chain of three, and 32 sequences of a model with 7168 values of two bytes; then 128 MiB.
SIZES = (14336, 43008, 458752, LARGE)
ADVICE = (
    "Look at `dmesg | grep -iE 'xid|nvrm'`, at IOMMU and ACS (`iommu=pt` or off, redirect bits clear), and run this "
    "once more with NCCL_P2P_DISABLE=1 to tell peer access from the rest. GPUs that stay wedged need a reboot."
)


# --- worker --------------------------------------------------------------------------------------------------------


def work(rank: int, options: argparse.Namespace) -> None:
    """One rank. What it is doing stands in a file, for the case that it never comes back."""
    folder = Path(options.work_dir)
    # Dies with its parent, whatever that dies of (PR_SET_PDEATHSIG).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def at(phase: str) -> None:
        (folder / f"phase-{rank}").write_text(phase)

    at("import of torch")
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    cuda = options.backend == "nccl"
    at("first use of the GPU" if cuda else "start")
    if cuda:
        torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    at("joining the group")
    dist.init_process_group(
        options.backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=options.processes,
        timeout=timedelta(seconds=options.timeout * 2),
    )
    dtype = torch.bfloat16 if cuda else torch.float32
    expected = options.processes * (options.processes + 1) / 2
    rows = []
    for size in options.sizes:
        at(f"all-reduce of {size} bytes")
        count = max(size // dtype.itemsize, 1)
        tensor = torch.full((count,), float(rank + 1), dtype=dtype, device=device)
        dist.all_reduce(tensor)
        total = tensor[[0, count // 2, -1]].float().cpu().tolist()
        if any(value != expected for value in total):
            raise SystemExit(
                f"all-reduce of {size} bytes gave {total}, expected {expected}: data is damaged on its way"
            )
        tensor.zero_()
        times = []
        for __ in range(5):
            dist.barrier()
            if cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for __ in range(options.iterations):
                dist.all_reduce(tensor)
            if cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / options.iterations)
        seconds = statistics.median(times)
        rows.append(row(count * dtype.itemsize, seconds, options.processes))
        del tensor
    at("leaving the group")
    if rank == 0:
        version = ".".join(map(str, torch.cuda.nccl.version())) if cuda else None
        found = {"sizes": rows, "torch": torch.__version__, "nccl": version}
        (folder / "result.new").write_text(json.dumps(found))
        os.replace(folder / "result.new", folder / "result.json")
    dist.barrier()
    dist.destroy_process_group()
    at("done")


def row(size: int, seconds: float, processes: int) -> dict[str, Any]:
    """One line of the report; bandwidths in GB/s (10^9 bytes)."""
    algorithm = size / seconds / 1e9
    return {
        "bytes": size,
        "latency_us": round(seconds * 1e6, 1),
        "algorithm_gbps": round(algorithm, 3),
        "bus_gbps": round(algorithm * 2 * (processes - 1) / processes, 3),
    }


# --- parent --------------------------------------------------------------------------------------------------------


def count_gpus() -> tuple[int, str]:
    """Number of GPUs and how it was found. Never waits long: nvidia-smi hangs on a wedged GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
        return len(names), f"CUDA_VISIBLE_DEVICES={visible}"
    tool = shutil.which("nvidia-smi")
    if tool:
        try:
            done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
            if done.returncode == 0:
                return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE)), "nvidia-smi -L"
        except (OSError, subprocess.TimeoutExpired):
            pass
    return len([path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)]), "device files"


def stop(workers: list[subprocess.Popen[bytes]]) -> list[int]:
    """Kill every worker with all that it has started; the PIDs of those that do not even die of that."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    stuck = []
    for worker in workers:
        try:
            worker.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            stuck.append(worker.pid)
    return stuck


def last_words(folder: Path, rank: int) -> str:
    """The end of what a rank has said."""
    try:
        lines = (folder / f"log-{rank}").read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return " | ".join(line.strip() for line in lines[-3:])[-600:]


def places(folder: Path, processes: int) -> str:
    """Where the ranks stand: `rank 3 in all-reduce of 14336 bytes, ranks 0, 1, 2 in ...`."""
    where: dict[str, list[str]] = {}
    for rank in range(processes):
        try:
            phase = (folder / f"phase-{rank}").read_text() or "start"
        except OSError:
            phase = "start"
        where.setdefault(phase, []).append(str(rank))
    return ", ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} in {phase}" for phase, ranks in where.items())


def supervise(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the ranks and wait for them, not longer than allowed. Nothing of them is left afterwards."""
    environment = dict(os.environ)
    if options.backend == "gloo":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("OMP_NUM_THREADS", "1")
    what = f"all-reduce over {options.processes} {'GPUs' if options.backend == 'nccl' else 'processes'}"
    workers: list[subprocess.Popen[bytes]] = []
    start = time.monotonic()
    try:
        for rank in range(options.processes):
            command = [
                sys.executable, os.path.abspath(__file__), f"--worker={rank}", f"--work-dir={folder}",
                f"--backend={options.backend}", f"--processes={options.processes}", f"--timeout={options.timeout}",
                f"--iterations={options.iterations}", f"--sizes={','.join(map(str, options.sizes))}",
            ]  # fmt: skip
            with open(folder / f"log-{rank}", "wb") as log:
                workers.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        start_new_session=True,
                    )
                )
            (folder / f"pid-{rank}").write_text(str(workers[-1].pid))
        while True:
            states = [worker.poll() for worker in workers]
            fallen = [rank for rank, state in enumerate(states) if state not in (None, 0)]
            if fallen:
                rank = fallen[0]
                where = places(folder, options.processes)
                words = last_words(folder, rank)
                return {
                    "status": "failed",
                    "message": f"{what}: rank {rank} ended with status {states[rank]} ({where}), expected 0: {words}",
                }
            if all(state == 0 for state in states):
                break
            if time.monotonic() - start > options.timeout:
                where = places(folder, options.processes)
                stuck = stop(workers)
                undead = (
                    f" Process {', '.join(map(str, stuck))} does not die of SIGKILL: the driver holds it."
                    if stuck
                    else ""
                )
                return {
                    "status": "failed",
                    "message": f"{what} did not end within {options.timeout:g} s ({where}), expected a few seconds: "
                    f"the fabric is wedged. Every process of the check was killed.{undead} {ADVICE}",
                }
            time.sleep(0.1)
    finally:
        stop(workers)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    largest = max(found["sizes"], key=lambda entry: int(entry["bytes"]))
    smallest = min(found["sizes"], key=lambda entry: int(entry["bytes"]))
    summary = (
        f"{what}: {largest['bus_gbps']} GB/s on the bus at {largest['bytes']} bytes, "
        f"{smallest['latency_us']} us at {smallest['bytes']} bytes"
    )
    if largest["bus_gbps"] < options.min_bandwidth:
        return {
            **found,
            "status": "failed",
            "message": f"{summary}, expected at least {options.min_bandwidth:g} GB/s. Look at width and generation "
            f"of the links (`nvidia-smi -q`), at ACS, and at the NCCL settings.",
        }
    return {**found, "status": "ok", "message": f"{summary}."}


def check(options: argparse.Namespace) -> dict[str, Any]:
    """The report; always with status and message."""
    gpus, source = count_gpus()
    report: dict[str, Any] = {"gpus": gpus, "sizes": [], "torch": None, "nccl": None}
    if options.backend == "auto":
        options.backend = "nccl"
    report["backend"] = options.backend
    if not options.processes:
        options.processes = gpus if options.backend == "nccl" else 2
    report["processes"] = options.processes
    report["environment"] = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    if options.backend == "nccl" and gpus < 2:
        count = "no GPU" if gpus == 0 else "one GPU"
        return {**report, "status": "skipped", "message": f"skipped: {count} ({source}), an all-reduce needs two."}
    if options.backend == "nccl" and options.processes > gpus:
        return {
            **report,
            "status": "failed",
            "message": f"{options.processes} processes asked for and {gpus} GPUs found ({source}), expected a GPU for "
            f"each; ask for {gpus} or find out where the others are.",
        }
    folder = Path(options.work_dir or tempfile.mkdtemp(prefix="allreduce-check-"))
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    try:
        report.update(supervise(options, folder))
    finally:
        if not options.work_dir:
            shutil.rmtree(folder, ignore_errors=True)
    report["seconds"] = round(time.monotonic() - begin, 1)
    return report


def positive(text: str) -> float:
    value = float(text)
    if math.isnan(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"found {text}, expected a number above 0")
    return value


def sizes(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(",") if part.strip())
    if not found or min(found) < 4:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected numbers of bytes from 4 on, separated by commas")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="gloo needs no GPU")
    parser.add_argument("--processes", type=int, default=0, help="one for each GPU when 0")
    parser.add_argument("--timeout", type=positive, default=180, help="seconds for all of it")
    parser.add_argument("--sizes", type=sizes, default=SIZES, help="bytes of the buffers, separated by commas")
    parser.add_argument("--iterations", type=int, default=20, help="all-reduces in a measurement; five are made")
    parser.add_argument("--min-bandwidth", type=float, default=0, help="GB/s on the bus at the largest size")
    parser.add_argument("--work-dir", default="", help="keep the logs of the ranks here")
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker >= 0:
        work(options.worker, options)
        return 0
    # Whoever stops the check stops what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = check(options)
    print(json.dumps(report))
    if report["status"] == "failed":
        print(report["message"], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
