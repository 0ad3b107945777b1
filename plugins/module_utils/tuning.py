# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Tuning's thinking: in which order profiles are tried, what their results are worth together, and which one to take.

Pure functions. A profile is measured in several rounds, each in another order and each after a start of its own, so that a
machine that warms up, or a start that went badly, shows as noise instead of as a better profile.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from . import benchmark

SINGLE, THROUGHPUT, BOTH = "single", "throughput", "both"
OBJECTIVES = (SINGLE, THROUGHPUT, BOTH)
LOW, MEDIUM, HIGH = "low", "medium", "high"
_RISKS = (LOW, MEDIUM, HIGH)


class TuneError(Exception):
    """Says what was found, what was expected and what to do."""


def order(profiles: Sequence[str], rounds: int, seed: int) -> list[dict[str, Any]]:
    """Every profile once in each round, each round shuffled; the seed fixes the order.

    The first profile of a round is not the last one of the round before, where that can be: it would be measured twice in one go.
    """
    source = random.Random(seed)
    steps: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        names = list(profiles)
        source.shuffle(names)
        if steps and len(names) > 1 and names[0] == steps[-1]["profile"]:
            names.append(names.pop(0))
        steps += [{"round": number, "profile": name} for name in names]
    return steps


def risk(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What can go wrong with a plan beyond being slow: `{level, reasons}`."""
    args, env = plan["args"], plan["env"]
    reasons = []
    if args.get("--speculative-algorithm"):
        reasons.append(
            "speculates: the gain depends on how well the draft fits the traffic; watch the acceptance length"
        )
    if str(env.get("SGLANG_ENABLE_SPEC_V2", "")).lower() in ("1", "true"):
        reasons.append("spec v2 is an experimental path of this engine")
    if args.get("--enable-flashinfer-allreduce-fusion"):
        reasons.append(
            "fused all-reduce over PCIe has regressed and deadlocked elsewhere, and needs patches for compute capability 12.0"
        )
    patches = list(plan.get("patches") or [])
    if args.get("--speculative-algorithm") and patches:
        reasons.append(f"needs patches of the engine ({len(patches)})")
    return {"level": LOW if not reasons else MEDIUM if len(reasons) < 3 else HIGH, "reasons": reasons}


def candidates(plans: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Which profiles can be tried, and which cannot and why; two that start the same process are tried once."""
    able: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    seen: dict[str, str] = {}
    for name, plan in plans.items():
        if plan.get("error"):
            refused[name] = " ".join(str(plan["error"]).split())
        elif plan["process_hash"] in seen:
            refused[name] = f"on this host it starts the same process as {seen[plan['process_hash']]}"
        else:
            seen[plan["process_hash"]] = name
            able[name] = dict(plan)
    return able, refused


def merge(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result from those of several rounds of the same profile: the repeats of all, and the noise over all."""
    first = results[0]
    levels = []
    for concurrency in [int(entry["concurrency"]) for entry in first["levels"]]:
        entries = [entry for found in results for entry in found["levels"] if entry["concurrency"] == concurrency]
        repeats = [repeat for entry in entries for repeat in entry["repeats"]]
        merged = benchmark.level(concurrency, repeats, [])
        # The requests' own times are not kept with a result: the middle of the rounds' percentiles stands for them.
        for key in ("ttft_ms", "itl_ms"):
            for name in ("p50", "p99"):
                values = [entry[key][name] for entry in entries if entry[key][name] is not None]
                merged[key][name] = benchmark.percentile(values, 50)
        levels.append(merged)
    method = {**first["method"], "repeats": sum(int(found["method"]["repeats"]) for found in results)}
    return {**first, "method": method, "levels": levels}


def _figure(document: Mapping[str, Any], concurrency: int) -> tuple[float | None, float | None]:
    """(output tok/s, noise) at a level."""
    for entry in document["levels"]:
        if int(entry["concurrency"]) == concurrency and not entry["failed"]:
            return entry["output_tok_s"], entry.get("noise")
    return None, None


def scores(
    measured: Mapping[str, Mapping[str, Any]], objective: str, single: int, concurrency: int
) -> dict[str, tuple[float, float | None]]:
    """(score, noise) of each profile; what failed at a level of the objective has none.

    For both, the geometric mean of the shares of the best at either level: losing a tenth here and gaining a tenth there is even.
    """
    levels = {SINGLE: [single], THROUGHPUT: [concurrency], BOTH: [single, concurrency]}[objective]
    figures = {name: [_figure(document, level) for level in levels] for name, document in measured.items()}
    figures = {name: found for name, found in figures.items() if all(value for value, __ in found)}
    best = [max((float(found[at][0] or 0) for found in figures.values()), default=0) for at in range(len(levels))]
    result: dict[str, tuple[float, float | None]] = {}
    for name, found in figures.items():
        shares = [float(value or 0) / top for (value, __), top in zip(found, best, strict=True)]
        bands = [band for __, band in found if band is not None]
        mean = math.prod(shares) ** (1 / len(shares))
        result[name] = (mean if objective == BOTH else float(found[0][0] or 0), max(bands) if bands else None)
    return result


def recommend(
    measured: Mapping[str, Mapping[str, Any]],
    risks: Mapping[str, Mapping[str, Any]],
    serving: str,
    objective: str,
    single: int = 1,
    concurrency: int = 30,
) -> dict[str, Any]:
    """The profile for an objective. Among those that the noise cannot tell from the best: the one that serves already, else
    the least risky, else the fastest."""
    found = scores(measured, objective, single, concurrency)
    if not found:
        return {
            "objective": objective,
            "profile": None,
            "why": "no profile came up each time and answered every request at the levels of this objective",
        }
    best = max(found, key=lambda name: found[name][0])
    top, band = found[best]
    even = [
        name for name, (score, noise) in found.items() if benchmark.verdict(score, top, (noise, band)) == benchmark.SAME
    ]
    if len(even) == 1:
        rest = sorted((score for name, (score, __) in found.items() if name != best), reverse=True)
        if not rest:
            return {"objective": objective, "profile": best, "why": "fastest, the only one measured without a failure"}
        bands = (
            "outside the noise" if band is not None else "more than the 5 % that are assumed as noise of a single run"
        )
        return {
            "objective": objective,
            "profile": best,
            "why": f"fastest, {benchmark.percent(top / rest[0] - 1)} before the next, {bands}",
        }
    least = min(even, key=lambda name: (_RISKS.index(risks[name]["level"]), -found[name][0]))
    chosen = serving if serving in even and risks[serving]["level"] == risks[least]["level"] else least
    others = ", ".join(sorted(name for name in even if name != chosen))
    reason = "it serves already" if chosen == serving else f"its risk is {risks[chosen]['level']}"
    return {"objective": objective, "profile": chosen, "why": f"within the noise of {others}, and {reason}"}


def summary(
    results: Sequence[Mapping[str, Any]],
    plans: Mapping[str, Mapping[str, Any]],
    failures: Mapping[str, str],
    serving: str,
    objective: str = BOTH,
    single: int = 1,
    concurrency: int = 30,
) -> dict[str, Any]:
    """Everything that is known after the last round.

    ``results`` are those of the benchmark in the order of the run, ``plans`` those of all wanted profiles (with `error` where
    one was refused), ``failures`` what became of the profiles that failed in a round. The figures of such a one's earlier
    rounds are shown; it is never recommended, because what failed in one start of a few can fail again.
    """
    __, refused = candidates(plans)
    names = list(dict.fromkeys(str(found["profile"]) for found in results))
    measured = {name: merge([found for found in results if found["profile"] == name]) for name in names}
    risks = {name: risk(plans[name]) for name in names}
    sound = {name: found for name, found in measured.items() if name not in failures}
    advice = {aim: recommend(sound, risks, serving, aim, single, concurrency) for aim in OBJECTIVES}
    return {
        "measured": [
            {**found, "failure": failures[name]} if name in failures else found for name, found in measured.items()
        ],
        "risks": risks,
        "refused": {**refused, **failures},
        "recommended": advice,
        "profile": advice[objective]["profile"],
        "objective": objective,
        "serving": serving,
    }


_AIMS = {SINGLE: "single stream (C={single})", THROUGHPUT: "throughput at C={concurrency}", BOTH: "both"}


def lines(found: Mapping[str, Any], single: int = 1, concurrency: int = 30) -> list[str]:
    """For people: the table, what was not tried and why, and the recommendation for each objective."""
    documents: Sequence[Mapping[str, Any]] = found["measured"]
    text = []
    if documents:
        levels = [int(entry["concurrency"]) for entry in documents[0]["levels"]]
        rows = [["profile", *[f"C={level} tok/s" for level in levels], "acceptance", "failed", "risk"]]
        for document in documents:
            name = str(document["profile"])
            accepts = [entry["accept_length"] for entry in document["levels"] if entry["accept_length"] is not None]
            failed = sum(entry["failed"] for entry in document["levels"])
            rates = [benchmark.rate(entry) for entry in document["levels"]]
            accept = benchmark.number(sum(accepts) / len(accepts), 2) if accepts else "-"
            marks = {"serves": name == found["serving"], "failed": "failure" in document}
            shown = ", ".join(mark for mark, given in marks.items() if given)
            rows.append(
                [name + (f" ({shown})" if shown else ""), *rates, accept, str(failed), found["risks"][name]["level"]]
            )
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        text += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        text += ["", benchmark.how(documents[0])]
    measured = {str(document["profile"]) for document in documents}
    for name, why in found["refused"].items():
        text.append(f"{'never recommended' if name in measured else 'not measured'}: {name}: {why}")
    text.append("")
    for aim in OBJECTIVES:
        advice = found["recommended"][aim]
        label = _AIMS[aim].format(single=single, concurrency=concurrency)
        text.append(f"{label}: {advice['profile'] or 'no recommendation'} ({advice['why']})")
    for name in dict.fromkeys(found["recommended"][aim]["profile"] for aim in OBJECTIVES):
        if name:
            text += [f"risk of {name}: {reason}" for reason in found["risks"][name]["reasons"]]
    return text


def result_file(found: Mapping[str, Any], host: str, when: str, single: int = 1, concurrency: int = 30) -> str:
    """Variables for the next deployment, `-e @file`: the profile, with all that is known as comments. Raises TuneError."""
    if not found["profile"]:
        raise TuneError(
            f"no profile can be recommended: {found['recommended'][found['objective']]['why']}; nothing is written"
        )
    head = [
        f"Tuning of {host}, {when}. Use: ansible-playbook ... site.yml -e @THIS_FILE",
        f"objective: {found['objective']}",
        "",
    ]
    comments = [f"# {line}".rstrip() for line in [*head, *lines(found, single, concurrency)]]
    return "\n".join(["---", *comments, f"deployment_profile: {found['profile']}", ""])
