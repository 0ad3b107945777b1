# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Render the tables of docs/proof.md from stored reports: tests/gpu/reports/*.json and docs/data/nccl-*.json.

    python tools/proof_docs.py [--check]

A report of tests/gpu/proof.py that is put into tests/gpu/reports is proof from then on; nothing in the tables is typed by hand.
Exit status: 0 done (or nothing to do), 1 the page differs (--check), 2 a report is not what it should be, or a marker is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "collections"), str(ROOT / "tests" / "gpu")]

import yaml  # noqa: E402
from ansible_collections.gpuserve.sglang.plugins.module_utils import budget, shapes  # noqa: E402
from doc_pages import DocsError, between, settle  # noqa: E402
from proof import ORPHAN_ENDED, ORPHAN_HELD  # noqa: E402

PAGE = ROOT / "docs" / "proof.md"
REPORTS = ROOT / "tests" / "gpu" / "reports"
OTHERS = ROOT / "docs" / "data"
GIB = 1 << 30
SMALL = "`make gpu-proof`"
PRODUCTION = "`make gpu-proof PROFILE=production INVENTORY=...`"
TOLERANCE = 0.05
#: The documented model has 547 GB.
WEIGHTS = 500 * 10**9
SERIES = yaml.safe_load((ROOT / "patches" / "sglang" / "0.5.9" / "series.yml").read_text(encoding="utf-8"))
LEVELS = yaml.safe_load((ROOT / "roles" / "benchmark" / "defaults" / "main.yml").read_text(encoding="utf-8"))[
    "benchmark_levels"
]
#: A report of one GPU has no all-reduce, and not the last of these.
NCCL_CLAIMS = (
    "the first run changed the file",
    "the second run changed nothing",
    "absent restored the file byte for byte",
    "NCCL's own log names every variable of the block",
)


@dataclass(frozen=True)
class Report:
    """A stored report: its file, its hash, and what it says."""

    path: Path
    digest: str
    data: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """small or production (tests/gpu/proof.py), engine-logs (tests/gpu/read_logs.py), nccl (tests/gpu/nccl_proof.sh)."""
        if "profile" in self.data:
            return str(self.data["profile"])
        return str(self.data.get("kind") or ("nccl" if "allreduce" in self.data else "unknown"))

    @property
    def date(self) -> str:
        if self.kind == "engine-logs":
            return min(log["date"] for log in self.data["logs"] if log["date"])
        return str(self.data.get("when") or self.data["date"])[:10]

    @property
    def machine(self) -> str:
        host = self.data["host"]
        if self.kind == "engine-logs":
            return f"{host['gpus']} x {host['gpu']}"
        if self.kind == "nccl":
            return f"{len(host['gpus'])} x {host['gpus'][0]}"
        if self.data["device"] == "cpu":
            return "a CPU, no GPU"
        return f"{host['gpu_count']} x {', '.join(host['gpus'])}"

    @property
    def versions(self) -> str:
        if self.kind == "engine-logs":
            return f"sglang {self.data['engine']}"
        if self.kind == "nccl":
            return f"torch {self.data['allreduce'].get('torch')}, NCCL {self.data['allreduce'].get('nccl')}, driver {self.data['host']['driver']['loaded']}"
        driver = self.data["host"].get("driver")
        words = [f"{name} {value}" for name, value in self.data["versions"].items() if name in ("sglang", "torch")]
        return ", ".join([*words, *([f"driver {driver}"] if driver else [])])

    def step(self, name: str) -> Mapping[str, Any] | None:
        return next((step for step in self.data.get("steps") or [] if step["name"] == name), None)


def load(path: Path) -> Report:
    """Raises DocsError for a file that is no report."""
    raw = path.read_bytes()
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise DocsError(f"{path}: found no JSON ({error}), expected a report. Store what the proof wrote.") from error
    report = Report(path, hashlib.sha256(raw).hexdigest(), data)
    if report.kind not in ("small", "production", "engine-logs", "nccl"):
        raise DocsError(
            f"{path}: found a report of unknown kind, expected one of tests/gpu. Take it away or store a real one."
        )
    if report.kind in ("small", "production"):
        missing = {"schema", "when", "device", "collection", "host", "versions", "steps", "proven"} - set(data)
        if missing or data["schema"] != 1:
            raise DocsError(
                f"{path}: found no {', '.join(sorted(missing)) or 'schema 1'}, expected a report of schema 1."
            )
        for step in data["steps"]:
            if step["outcome"] not in ("passed", "failed", "skipped"):
                raise DocsError(
                    f"{path}: step {step['name']} has the outcome {step['outcome']!r}, expected passed, failed or skipped."
                )
            if step["outcome"] == "passed" and not all(step["claims"].values()):
                raise DocsError(
                    f"{path}: step {step['name']} passed with a claim that does not hold. Store the report as it was written."
                )
            if step["outcome"] == "skipped" and not step["reason"]:
                raise DocsError(f"{path}: step {step['name']} was skipped without a reason.")
    return report


# ------------------------------------------------------------------------------------------------------------- tables
Condition = Callable[[Report], bool]


@dataclass(frozen=True)
class Way:
    """One way to prove something: all of it in one report of C(kind), that of steps on a GPU."""

    kind: str
    steps: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()

    def holds(self, report: Report) -> bool:
        if report.kind != self.kind:
            return False
        found = [report.step(name) for name in self.steps]
        if found and report.data["device"] != "cuda":
            return False
        if any(step is None or step["outcome"] != "passed" for step in found):
            return False
        claims = dict(report.data.get("claims") or {})
        for step in found:
            claims |= (step or {})["claims"]
        return all(claims.get(name) is True for name in self.claims) and all(met(report) for met in self.conditions)


def _said(report: Report, name: str) -> Any:
    """What a report says about the deployment; None where it says nothing, as reports of older checkouts do."""
    return (report.data.get("deployment") or {}).get(name)


def proven_as_a_whole(report: Report) -> bool:
    return bool(report.data["proven"])


def pools_within_tolerance(report: Report) -> bool:
    rows = pools(report)
    return bool(rows) and all(abs(row["off"]) <= TOLERANCE for row in rows)


def topk1_with_overlap(report: Report) -> bool:
    return any(
        log["ready_line"]
        and log["settings"]["speculative_eagle_topk"] == 1
        and not log["settings"]["disable_overlap_schedule"]
        for log in report.data["logs"]
    )


def parent_took_all_along(report: Report) -> bool:
    """Nothing was left for gpu_release to end."""
    step = report.step("parent-killed") or {}
    return bool(step) and step["figures"]["gpu_release"]["released"] == []


def under_systemd(report: Report) -> bool:
    return report.data["host"].get("systemd") is True


def capability_12(report: Report) -> bool:
    return report.data["host"].get("compute_capability") == ["12.0"]


def patched_059(report: Report) -> bool:
    """The whole series, and the engine that serves is the one that was planned."""
    engine = report.data["versions"].get("sglang")
    return engine == _said(report, "engine_version") == SERIES["version"] and set(_said(report, "patches") or []) >= {
        patch["id"] for patch in SERIES["patches"]
    }


def eight_over_pcie(report: Report) -> bool:
    host = report.data["host"]
    return host.get("gpu_count") == 8 and host.get("topology") == "pcie" and _said(report, "tp_size") == 8


def real_weights(report: Report) -> bool:
    return (_said(report, "weights_bytes") or 0) >= WEIGHTS and _said(report, "load_format") == "auto"


def documented_profile(report: Report) -> bool:
    return _said(report, "profile") == "eagle3-topk1-v2"


def documented_levels(report: Report) -> bool:
    """Every level of the record was measured, and no request failed."""
    measured = (report.step("benchmark") or {"figures": {}})["figures"].get("benchmark") or {}
    return {str(level) for level in LEVELS} <= set(measured) and not any(
        entry.get("failed") for entry in measured.values()
    )


ON_12 = (capability_12, patched_059)
BOX = (*ON_12, eight_over_pcie, real_weights)
#: What is to be proven, the ways to do it, and the command for it.
AREAS: tuple[tuple[str, tuple[Way, ...], str], ...] = (
    (
        "`gpu_host_info` and `gpu_preflight` on a real GPU host",
        (
            Way("small", ("host", "preflight")),
            Way("production", ("host", "preflight")),
            Way("nccl", conditions=(proven_as_a_whole,)),
        ),
        SMALL,
    ),
    ("the NCCL block is written, seen by a new interpreter, and taken out", (Way("small", ("nccl",)),), SMALL),
    (
        "the NCCL block is written, taken by NCCL, and taken out",
        (Way("nccl", (), NCCL_CLAIMS, (proven_as_a_whole,)),),
        "`tests/gpu/nccl_proof.sh FOLDER` (two GPUs)",
    ),
    ("the plan of a host starts the real engine on CUDA, the gate passes, every token is right", (Way("small", ("baseline",)),), SMALL),
    ("EAGLE-3, topk 1, with overlap: the engine itself, started by hand", (Way("engine-logs", conditions=(topk1_with_overlap,)),), SMALL),
    ("EAGLE-3, topk 1, with overlap, from the plan", (Way("small", ("eagle3",)),), SMALL),
    (
        "the planned KV pool is within 5 % of the engine's",
        (Way("engine-logs", conditions=(pools_within_tolerance,)), Way("small", ("baseline", "eagle3"))),
        SMALL,
    ),
    ("GPU release after SIGTERM", (Way("small", ("sigterm",)),), SMALL),
    ("GPU release after SIGKILL of the scheduler", (Way("small", ("scheduler-killed",)),), SMALL),
    (
        "GPU release after SIGKILL of the parent (everything follows)",
        (Way("small", ("parent-killed",), conditions=(parent_took_all_along,)),),
        SMALL,
    ),
    (
        "an orphan that still holds the GPU is ended by `gpu_release`",
        (Way("small", ("orphan",), (ORPHAN_HELD, ORPHAN_ENDED)),),
        SMALL,
    ),
    ("the unit's stop signal on CUDA: the running request is answered, exit status 0, GPUs free", (Way("small", ("stop",)),), SMALL),
    ("speculation against baseline, measured", (Way("small", ("baseline", "eagle3", "speculation")),), SMALL),
    (
        "the unit of systemd on a real GPU: start, stop, second run without change",
        (Way("production", ("site", "site-again", "stop", "start"), conditions=(under_systemd,)),),
        PRODUCTION,
    ),
    ("the patched 0.5.9 serves on compute capability 12.0", (Way("production", ("site", "plan", "verify"), conditions=ON_12),), PRODUCTION),
    ("tensor parallel 8 over PCIe with real weights, verified", (Way("production", ("site", "plan", "verify"), conditions=BOX),), PRODUCTION),
    (
        "the benchmark of the documented deployment",
        (Way("production", ("site", "plan", "benchmark"), conditions=(*BOX, documented_profile, documented_levels)),),
        PRODUCTION,
    ),
    (
        "rollback on the documented box",
        (Way("production", ("site", "plan", "site-changed", "rollback", "site-after-rollback"), conditions=BOX),),
        PRODUCTION,
    ),
)  # fmt: skip


def areas(reports: Sequence[Report]) -> list[str]:
    lines = ["| what | proven on | by | otherwise |", "|---|---|---|---|"]
    for title, ways, command in AREAS:
        found = [report for report in reports if any(way.holds(report) for way in ways)]
        where = "; ".join(sorted({f"{r.machine}, {r.date}" for r in found})) or "**not proven**"
        names = ", ".join(f"`{r.path.name}`" for r in found) or "-"
        lines.append(f"| {title} | {where} | {names} | {'-' if found else command} |")
    return lines


def files(reports: Sequence[Report]) -> list[str]:
    lines = ["| report | kind | date | machine | versions | result | SHA-256 |", "|---|---|---|---|---|---|---|"]
    for report in reports:
        if report.kind == "engine-logs":
            result = f"{len(report.data['logs'])} logs"
        elif report.kind == "nccl":
            result = "proven" if report.data["proven"] else "NOT proven"
        else:
            outcomes = [step["outcome"] for step in report.data["steps"]]
            result = ", ".join(
                f"{outcomes.count(word)} {word}" for word in ("passed", "failed", "skipped") if word in outcomes
            )
        kind = report.kind if report.data.get("device") != "cpu" else f"{report.kind}, rehearsal"
        lines.append(
            f"| `{report.path.relative_to(ROOT) if report.path.is_relative_to(ROOT) else report.path.name}` | {kind} | {report.date} "
            f"| {report.machine} | {report.versions} | {result} | `{report.digest}` |"
        )
    return lines


def pools(report: Report) -> list[dict[str, Any]]:
    """The pool that today's budget plans, for each log whose engine chose its own and had the GPU for itself."""
    rows = []
    host = report.data["host"]
    for log in report.data["logs"]:
        settings = {name: value for name, value in log["settings"].items() if value is not None}
        if not log["kv_tokens"] or "max_total_tokens" in settings:
            continue
        free = log["available_gib"]
        machine = {
            "gpus": [{"index": 0, "name": host["gpu"], "memory_total_mib": host["memory_mib"], "compute_cap": "9.0"}],
            "links": {"topology": "none"},
        }
        whole = budget.compute(settings, {}, shapes.host_shape(machine), None, None).available_bytes or 0
        # A GPU of which others hold a part is to the engine what a smaller GPU is.
        if free is not None and free * GIB < 0.95 * whole:
            machine["gpus"][0]["memory_total_mib"] -= int(whole / 2**20 - free * 1024)
        models = []
        for config, weights in (
            (report.data["model"], log["weights_gib"]),
            (report.data["draft"], log["draft_weights_gib"]),
        ):
            size = int((weights or 0) * GIB)
            models.append(
                shapes.model_shape({"path": "/m", "config": config, "weights_bytes": size, "index_total_bytes": size})
                if config and weights
                else None
            )
        found = budget.compute(settings, {}, shapes.host_shape(machine), models[0], models[1])
        planned = found.kv_tokens or 0
        rows.append(
            {
                "file": log["file"], "fraction": settings["mem_fraction_static"], "free": free, "planned": planned,
                "engine": log["kv_tokens"], "off": planned / log["kv_tokens"] - 1,
            }
        )  # fmt: skip
    return rows


def kv(reports: Sequence[Report]) -> list[str]:
    lines = [
        "| from | memory fraction | free at load | planned tokens | the engine's tokens | off |",
        "|---|---|---|---|---|---|",
    ]
    for report in reports:
        if report.kind == "engine-logs":
            for row in pools(report):
                if abs(row["off"]) > TOLERANCE:
                    raise DocsError(
                        f"{row['file']}: the budget plans {row['planned']} tokens where the engine had {row['engine']}, expected them "
                        "within 5 %. Mend module_utils/budget.py."
                    )
                lines.append(
                    f"| `{row['file']}` | {row['fraction']} | {row['free']} GiB | {row['planned']} | {row['engine']} | {row['off'] * 100:+.2f} % |"
                )
        for step in report.data.get("steps") or []:
            found = step["figures"].get("kv_tokens") or {}
            if found.get("off_percent") is not None and report.data["device"] == "cuda":
                flags = str(step["figures"]["flags"]).split()
                model = flags[flags.index("--model-path") + 1].rpartition("/")[2]
                fraction = flags[flags.index("--mem-fraction-static") + 1]
                lines.append(
                    f"| `{report.path.name}`, {step['name']} (model {model}) | {fraction} | | {found['planned']} | {found['engine']} "
                    f"| {found['off_percent']:+.2f} % |"
                )
    return lines


def phases(reports: Sequence[Report]) -> list[str]:
    lines = ["| start | phases, as the gate shows them |", "|---|---|"]
    for report in reports:
        if report.kind == "engine-logs":
            lines += [f"| `{log['file']}` | {', '.join(log['phases'])} |" for log in report.data["logs"]]
        for step in report.data.get("steps") or []:
            found = step["figures"].get("phases")
            if found:
                words = ", ".join(f"{entry['phase']} ({entry['at_s']:.0f} s)" for entry in found)
                lines.append(
                    f"| `{report.path.name}`, {step['name']} | {words}, ready ({step['figures']['seconds_to_ready']:.0f} s) |"
                )
    return lines


def _short(value: Any) -> str:
    """A figure in one cell."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_short(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(_short(item) for item in value)
    return str(value).replace("|", "\\|").replace("\n", " ")


#: Figures that are text for a reader of the report, or have a table of their own.
HIDDEN = ("flags", "phases", "notes", "kv_tokens", "gpu_release", "added_by_this_script")


def steps(reports: Sequence[Report]) -> list[str]:
    lines: list[str] = []
    for report in reports:
        if "steps" not in report.data:
            continue
        collection = report.data["collection"]
        lines += [
            f"`{report.path.name}`: collection {collection['version']} ({collection['commit']}), {report.machine}; {report.data['supervisor']}.",
            "",
            "| step | outcome | seconds | figures |",
            "|---|---|---|---|",
        ]
        for step in report.data["steps"]:
            figures = "; ".join(
                f"{name.replace('_', ' ')}: {_short(value)}"
                for name, value in step["figures"].items()
                if name not in HIDDEN and value not in (None, [], {}, "")
            )
            words = (
                figures if step["outcome"] == "passed" else "; ".join(filter(None, [_short(step["reason"]), figures]))
            )
            lines.append(f"| {step['title']} | {step['outcome']} | {step['seconds']} | {words} |")
        lines.append("")
    return lines[:-1] if lines else ["No run of `tests/gpu/proof.py` is stored yet."]


def render(page: str, reports: Sequence[Report]) -> str:
    for name, make in (("areas", areas), ("files", files), ("kv", kv), ("phases", phases), ("steps", steps)):
        page = between(page, name, "\n".join(make(reports)) + "\n", str(PAGE))
    return page


def stored() -> list[Report]:
    return [load(path) for path in [*sorted(OTHERS.glob("nccl-*.json")), *sorted(REPORTS.glob("*.json"))]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, say whether something would")
    given = parser.parse_args()
    try:
        wanted = render(PAGE.read_text(encoding="utf-8"), stored())
    except DocsError as error:
        print(error, file=sys.stderr)
        return 2
    return settle(PAGE, wanted, given.check, "python tools/proof_docs.py")


if __name__ == "__main__":
    sys.exit(main())
