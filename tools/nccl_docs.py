# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Render the tables of docs/nccl.md from docs/data/nccl-*.json (what tests/gpu/nccl_proof.sh wrote) and from the role's data.

    python tools/nccl_docs.py [--check]

What stands between the markers is replaced. Exit status: 0 done (or nothing to do), 1 the page differs (--check), 2 a
measurement does not prove what the page says, or a marker is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from doc_pages import DocsError, between, settle

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "nccl.md"
DATA = ROOT / "docs" / "data" / "nccl-h200-x2.json"
VALUES = ROOT / "plugins" / "module_utils" / "data" / "nccl.json"
KIB, MIB = 1024, 1024 * 1024


def size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // KIB} KiB"


def spread(cell: dict[str, float]) -> str:
    return f"{cell['median']:.1f} ({cell['least']:.1f}-{cell['most']:.1f})"


def values(proof: dict[str, Any]) -> list[str]:
    """The role's values, each with the words in which NCCL took it."""
    pcie: dict[str, str] = json.loads(VALUES.read_text(encoding="utf-8"))["pcie"]["values"]
    lines = ["| variable | PCIe | NVLink | NCCL's log on PCIe settings |", "|---|---|---|---|"]
    log = proof["allreduce"]["nccl_log"]["pcie"]
    for name, value in pcie.items():
        took = [line for line in log if line.startswith(f"{name} set by environment to {value}")]
        if not took:
            raise DocsError(
                f"{DATA.name}: NCCL's log does not say that it took {name}={value}, which plugins/module_utils/data/nccl.json "
                "has; expected a measurement of the present values. Run tests/gpu/nccl_proof.sh again."
            )
        lines.append(f"| `{name}` | `{value}` | not set | `{took[0]}` |")
    return lines


def host(proof: dict[str, Any]) -> list[str]:
    found, measured = proof["host"], proof["allreduce"]
    driver = found["driver"]
    links = found["matrix"][0][1]
    toolkit = ", ".join(entry["version"] for entry in found["toolkits"])
    handed = {n: v for n, v in measured["environment"]["auto"].items() if n in measured["nccl_took"]["auto"]}
    rows = {
        "date": proof["date"],
        "GPUs": f"{len(found['gpus'])} x {found['gpus'][0]}, {links} between them",
        "driver": f"{driver['loaded']} ({driver['flavour']} module)",
        "CUDA toolkit": toolkit,
        "torch, NCCL": f"{measured['torch']}, {measured['nccl']}",
        "system": f"{found['os']}, Python {found['python']}",
        "runs": f"{measured['runs']['auto']} of each setting, in turn, each of {measured['trials_in_a_run']} trials a size",
        "set in the shell for both": ", ".join(f"`{n}={v}`" for n, v in handed.items()) or "nothing",
    }
    return ["| what | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def comparison(proof: dict[str, Any]) -> list[str]:
    lines = [
        "| size | graph, none | graph, PCIe settings | times | one by one, none | one by one, PCIe settings | times |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {size(row['bytes'])} | {spread(row['auto_graph_us'])} | {spread(row['pcie_graph_us'])} | {row['ratio_graph']:.2f} "
        f"| {spread(row['auto_eager_us'])} | {spread(row['pcie_eager_us'])} | {row['ratio_eager']:.2f} |"
        for row in proof["allreduce"]["rows"]
    ]
    return lines


def claims(proof: dict[str, Any]) -> list[str]:
    failed = [claim for claim, holds in proof["claims"].items() if not holds]
    if failed or proof["allreduce"]["status"] != "ok":
        raise DocsError(
            f"{DATA.name}: found {'; '.join(failed) or 'no all-reduce'}, expected every claim to hold. "
            "Run tests/gpu/nccl_proof.sh again and look at what it says."
        )
    changed = proof["sitecustomize"]["changed"]
    path, digest, *rest = proof["sitecustomize"]["after"].split()
    runs = ", ".join(f"{name} {'changed' if value else 'unchanged'}" for name, value in changed.items())
    return [
        *(f"- {claim}" for claim in proof["claims"]),
        "",
        f"Runs of the role, in order: {runs}. `{path}` before and after: SHA-256 `{digest[:16]}...`, {' '.join(rest)}.",
        "",
        f"The preflight ended with status {proof['preflight']['exit_status']}: {len(proof['preflight']['passed'])} checks passed, "
        f"failed: {', '.join(entry['id'] for entry in proof['preflight']['failures']) or 'none'}; "
        f"warnings: {', '.join(entry['id'] for entry in proof['preflight']['warnings']) or 'none'}.",
    ]


def render(page: str) -> str:
    proof: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    for name, lines in (
        ("values", values(proof)),
        ("host", host(proof)),
        ("comparison", comparison(proof)),
        ("claims", claims(proof)),
    ):
        page = between(page, name, "\n".join(lines) + "\n", str(PAGE))
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, say whether something would")
    arguments = parser.parse_args()
    try:
        wanted = render(PAGE.read_text(encoding="utf-8"))
    except DocsError as error:
        print(error, file=sys.stderr)
        return 2
    return settle(PAGE, wanted, arguments.check, "python tools/nccl_docs.py")


if __name__ == "__main__":
    sys.exit(main())
