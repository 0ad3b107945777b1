# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Take out of the engine's own logs what the collection predicts or parses, as a report that docs/proof.md is made from.

    python tests/gpu/read_logs.py --host 'NVIDIA H200' --gpus 1 --memory-mib 143771 --model CONFIG.json [--draft CONFIG.json] LOG...

Prints JSON: for each log its hash, dates, settings, the phases in which it started, the memory it saw and the KV pool it made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gpuserve.sglang.plugins.module_utils import health  # noqa: E402

#: Settings of ServerArgs that the memory budget depends on.
SETTINGS = (
    "mem_fraction_static", "max_total_tokens", "max_running_requests", "cuda_graph_max_bs", "attention_backend", "tp_size",
    "context_length", "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "disable_overlap_schedule",
)  # fmt: skip


def value(text: str) -> Any:
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    if text.startswith(("'", '"')):
        return text[1:-1]
    return float(text) if "." in text else int(text)


def phases(lines: list[str]) -> list[str]:
    """The phases that the gate shows while these lines come, in order and without counters."""
    found: list[str] = []
    context: list[str] = []
    for line in lines:
        if not str(health.parse_progress([line])):
            continue
        # A bar of graphs does not say whose they are; the line before it does.
        context = [*context[-2:], line]
        phase = health.phase_name(str(health.parse_progress(context)))
        if not found or found[-1] != phase:
            found.append(phase)
    return found


def read(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    text = raw.decode("utf-8", "replace")
    arguments = next((line for line in text.splitlines() if "server_args=ServerArgs(" in line), "")
    settings = {}
    for name in SETTINGS:
        match = re.search(rf"\b{name}=('[^']*'|[^,)]+)", arguments)
        settings[name] = value(match.group(1)) if match else None
    dates = re.findall(r"^\[(\d{4}-\d\d-\d\d) ", text, re.MULTILINE)
    available = re.findall(r"Load weight begin\. avail mem=([\d.]+) GB", text)
    weights = re.findall(r"Load weight end\..*?mem usage=([\d.]+) GB", text)
    pools = re.findall(r"KV Cache is allocated\. #tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB", text)
    return {
        "file": path.name,
        "sha256": hashlib.sha256(raw).hexdigest(),
        "date": min(dates) if dates else None,
        "settings": settings,
        "phases": phases(text.split("\n")),
        "available_gib": float(available[0]) if available else None,
        "weights_gib": float(weights[0]) if weights else None,
        "draft_weights_gib": float(weights[1]) if len(weights) > 1 else None,
        "kv_tokens": int(pools[0][0]) if pools else None,
        "kv_gib": round(float(pools[0][1]) + float(pools[0][2]), 2) if pools else None,
        "draft_kv_gib": round(float(pools[1][1]) + float(pools[1][2]), 2) if len(pools) > 1 else None,
        "ready_line": "The server is fired up and ready to roll" in text,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True, help="name of the GPU")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--memory-mib", type=int, required=True)
    parser.add_argument("--engine", default="0.5.11")
    parser.add_argument("--model", type=Path, required=True, help="config.json of the target")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("logs", type=Path, nargs="+")
    given = parser.parse_args()
    report = {
        "schema": 1,
        "kind": "engine-logs",
        "engine": given.engine,
        "host": {"gpu": given.host, "gpus": given.gpus, "memory_mib": given.memory_mib},
        "model": json.loads(given.model.read_text(encoding="utf-8")),
        "draft": json.loads(given.draft.read_text(encoding="utf-8")) if given.draft else None,
        "logs": [read(path) for path in given.logs],
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
