# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark's thinking: what to ask, what bench_serving answered, how sure that is, and how it compares.

Pure functions over dictionaries; `bench_run` does the work on the host. Standard library only. Times of bench_serving are
seconds in lists and milliseconds in keys that end in `_ms`; results here are milliseconds and tokens a second.

Four properties of bench_serving shape this file: it ends with status 0 even when requests fail, it counts a refusal that comes
as a stream as a full answer, it writes the whole `server_info` (with any key) into each record, and its `accept_length` is
cumulative since the last cache flush.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .health_text import scrub

SCHEMA = 1
TOOL = "sglang.bench_serving"
LEVELS = (1, 5, 30, 100, 250)
#: Two runs that differ by less say nothing, however close the repeats were.
LEAST_NOISE = 0.02
#: What is assumed where one run alone gives no band.
ASSUMED_NOISE = 0.05
#: Tokens that may appear in the quiet time before a run: the liveness probe and /health ask for a few.
PROBE_TOKENS = 64
#: Shortest answer that bench_serving accepts.
LEAST_OUTPUT = 4

FASTER, SLOWER, SAME, OTHER_METHOD = "faster", "slower", "same", "other method"

#: The keys of a record that are kept; `server_info` holds secrets and the texts are of no use.
_KEPT = (
    "tag", "backend", "dataset_name", "max_concurrency", "duration", "total_input_tokens", "concurrency", "accept_length",
    "mean_e2e_latency_ms", "median_e2e_latency_ms", "p99_e2e_latency_ms",
)  # fmt: skip
_BAR = re.compile(r"\|\s*(\d+)/(\d+) \[")


class BenchmarkError(Exception):
    """Says what was found, what was expected and what to do."""


# ----------------------------------------------------------------------------------------------------- what to ask


def check_method(method: Mapping[str, Any]) -> str:
    """Empty, or what was found and what was expected."""
    levels = method["levels"]
    if not levels or any(level < 1 for level in levels) or len(set(levels)) != len(levels):
        return f"levels are {levels}, expected different numbers of concurrent requests, each 1 or more"
    for name, least in (
        ("requests", 1),
        ("repeats", 1),
        ("warmup", 0),
        ("output_tokens", LEAST_OUTPUT),
        ("level_timeout", 1),
    ):
        if method[name] < least:
            return f"{name} is {method[name]}, expected {least} or more"
    return ""


def read_prompts(text: str, max_chars: int = 0) -> list[str]:
    """The prompts of a JSON-lines file (key `prompt`), those above `max_chars` characters left out (0: none)."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt.strip():
            raise BenchmarkError(f'line {number} of the prompts is not {{"prompt": "text"}}; correct it or remove it')
        if not max_chars or len(prompt) <= max_chars:
            found.append(prompt)
    if not found:
        limit = f" of at most {max_chars} characters" if max_chars else ""
        raise BenchmarkError(
            f"the prompts hold no line{limit}, expected one or more; name another file or raise the limit"
        )
    return found


def fingerprint(prompts: Sequence[str]) -> str:
    """Short name of a set of prompts: only runs over the same set compare."""
    return hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:12]


def choose_prompts(prompts: Sequence[str], count: int, seed: int) -> list[str]:
    """So many prompts in an order that the seed fixes; more than there are begin anew, each time with another first line.

    Without that line the engine would answer the prefill of a repeated prompt from its cache.
    """
    order = list(prompts)
    random.Random(seed).shuffle(order)
    chosen = []
    for number in range(count):
        turn, at = divmod(number, len(order))
        chosen.append(f"Request {turn + 1}-{at + 1} of this series.\n\n{order[at]}" if turn else order[at])
    return chosen


def dataset(prompts: Iterable[str]) -> str:
    """As bench_serving's `custom` dataset wants it: a conversation of two turns, of which it sends the first."""
    lines = []
    for prompt in prompts:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "A full answer follows."}]
        lines.append(json.dumps({"conversations": turns}))
    return "\n".join(lines) + "\n"


def requests_at(concurrency: int, requests: int, fill: bool) -> int:
    """Requests of a level; with `fill` at least as many as run at once."""
    return max(requests, concurrency) if fill else requests


def schedule(levels: Sequence[int], repeats: int) -> list[tuple[int, int]]:
    """(repeat, concurrency) in the order of the run: all levels, then all again, so that a slow drift of the machine
    shows in the noise band instead of in one level."""
    return [(repeat, level) for repeat in range(1, repeats + 1) for level in levels]


def command(
    python: str,
    server: Mapping[str, Any],
    method: Mapping[str, Any],
    concurrency: int,
    count: int,
    files: Mapping[str, str],
) -> list[str]:
    """The command line of one run of bench_serving."""
    return [
        python, "-m", TOOL, "--backend", "sglang", "--host", str(server["host"]), "--port", str(server["port"]),
        "--model", str(server["model_path"]), "--tokenizer", str(server["model_path"]),
        "--served-model-name", str(server["served_model_name"]),
        "--dataset-name", "custom", "--dataset-path", files["dataset"], "--apply-chat-template",
        "--num-prompts", str(count), "--sharegpt-output-len", str(method["output_tokens"]),
        "--max-concurrency", str(concurrency), "--warmup-requests", str(method["warmup"]),
        "--seed", str(method["seed"]), "--flush-cache", "--output-details", "--output-file", files["output"],
        "--tag", str(server["tag"]),
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------- what came back


def progress_bar(text: str) -> tuple[int, int] | None:
    """(done, of) of the last progress bar in the output."""
    found = _BAR.findall(text)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear between the two nearest, as numpy does it; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def _flat(lists: Iterable[Any]) -> list[float]:
    return [float(item) for inner in lists for item in (inner or [])]


def clean(record: Mapping[str, Any], output_tokens: int) -> dict[str, Any]:
    """A record without what must not be kept (server_info, texts), counted anew; errors shortened and without secrets.

    bench_serving takes every stream with status 200 for an answer. The engine refuses with 200 too (an error in the stream,
    such as a prompt that is too long), and then bench_serving counts the tokens that it asked for. So an answer is what
    brought a first token and all tokens: the end of text is ignored, so less is an answer that was cut short.
    """
    kept = {name: record[name] for name in _KEPT if name in record}
    ttfts, itls, errors = record.get("ttfts") or [], record.get("itls") or [], record.get("errors") or []
    lengths = record.get("output_lens") or []
    counted: dict[str, int] = {}
    good = []
    for at, ttft in enumerate(ttfts):
        error = str(errors[at]).strip() if at < len(errors) else ""
        length = int(lengths[at]) if at < len(lengths) else 0
        if error:
            # The last line of a traceback says what it was.
            error = scrub(error.splitlines()[-1])[:200]
        elif not ttft:
            error = "no token came: the server refused it within the stream"
        elif length < output_tokens:
            error = f"cut short after {length} of {output_tokens} tokens"
        if error:
            counted[error] = counted.get(error, 0) + 1
        else:
            good.append(at)
    tokens = sum(int(lengths[at]) for at in good)
    duration = float(record.get("duration") or 0)
    kept["completed"] = len(good)
    kept["total_output_tokens"] = tokens
    kept["output_throughput"] = tokens / duration if duration > 0 else 0.0
    kept["ttfts"] = [round(float(ttfts[at]), 5) for at in good]
    kept["itls"] = [round(value, 6) for value in _flat(itls[at] for at in good if at < len(itls))]
    kept["errors"] = dict(sorted(counted.items(), key=lambda item: -item[1])[:5])
    return kept


def parse_record(text: str, output_tokens: int) -> dict[str, Any] | None:
    """The last record of an output file, cleaned; None when there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        record = json.loads(lines[-1])
    except (IndexError, ValueError):
        return None
    return clean(record, output_tokens) if isinstance(record, Mapping) else None


def measure(
    record: Mapping[str, Any] | None,
    asked: int,
    accept_before: float | None = None,
    flushed: bool = True,
    problem: str = "",
    other_requests: int | None = None,
) -> dict[str, Any]:
    """One repeat of one level.

    The engine goes on reporting the last acceptance length when it has none since the flush, so the very same number as
    `accept_before` is no figure; without a flush the figure would be everybody's.
    """
    record = record or {}
    completed = int(record.get("completed") or 0)
    accept = record.get("accept_length")
    own = isinstance(accept, (int, float)) and accept > 0 and accept != accept_before and flushed and completed > 0
    ttfts, itls = record.get("ttfts") or [], record.get("itls") or []
    errors = dict(record.get("errors") or {})
    if problem:
        errors[problem] = asked - completed
    return {
        "requests": asked,
        "completed": completed,
        "failed": max(0, asked - completed),
        "seconds": _rounded(record.get("duration")),
        "output_tok_s": _rounded(record.get("output_throughput")) if completed else None,
        "output_tokens": record.get("total_output_tokens") if completed else None,
        "ttft_ms": {f"p{p}": _rounded(_scaled(percentile(ttfts, p))) for p in (50, 99)},
        "itl_ms": {f"p{p}": _rounded(_scaled(percentile(itls, p))) for p in (50, 99)},
        "accept_length": _rounded(float(accept), 3) if own and accept is not None else None,
        "other_requests": other_requests,
        "errors": errors,
    }


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def noise(values: Sequence[float]) -> float | None:
    """Half the spread of the repeats, as a share of their median; None of fewer than two."""
    if len(values) < 2:
        return None
    middle = statistics.median(values)
    return (max(values) - min(values)) / 2 / middle if middle > 0 else None


def level(
    concurrency: int, repeats: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A level from its repeats: the median of their throughput, percentiles over the requests of all of them."""
    rates = [repeat["output_tok_s"] for repeat in repeats if repeat["output_tok_s"] is not None]
    accepts = [repeat["accept_length"] for repeat in repeats if repeat["accept_length"] is not None]
    ttfts = [value for record in records for value in record.get("ttfts") or []]
    itls = [value for record in records for value in record.get("itls") or []]
    return {
        "concurrency": concurrency,
        "requests": sum(repeat["requests"] for repeat in repeats),
        "completed": sum(repeat["completed"] for repeat in repeats),
        "failed": sum(repeat["failed"] for repeat in repeats),
        "output_tok_s": _rounded(statistics.median(rates)) if rates else None,
        "noise": _rounded(noise(rates), 4),
        "ttft_ms": {f"p{p}": _rounded(_scaled(percentile(ttfts, p))) for p in (50, 99)},
        "itl_ms": {f"p{p}": _rounded(_scaled(percentile(itls, p))) for p in (50, 99)},
        "accept_length": _rounded(statistics.fmean(accepts), 3) if accepts else None,
        "repeats": [dict(repeat) for repeat in repeats],
    }


def result(
    when: str,
    plan: Mapping[str, Any],
    method: Mapping[str, Any],
    runs: Sequence[tuple[int, Mapping[str, Any], Mapping[str, Any]]],
    stopped: str = "",
) -> dict[str, Any]:
    """The document that is stored. ``runs`` are (concurrency, repeat of `measure`, cleaned record)."""
    levels = [concurrency for concurrency in method["levels"] if any(run[0] == concurrency for run in runs)]
    document = {
        "schema": SCHEMA,
        "when": when,
        "plan_hash": plan["hash"],
        "profile": plan["profile"],
        "engine_version": plan["engine_version"],
        "method": {"tool": TOOL, **method},
        "levels": [
            level(
                concurrency,
                [run[1] for run in runs if run[0] == concurrency],
                [run[2] for run in runs if run[0] == concurrency],
            )
            for concurrency in levels
        ],
    }
    if stopped:
        document["stopped"] = stopped
    return document


# ----------------------------------------------------------------------------------------------------- who else is there


def served_others(seen: Sequence[tuple[int | None, float | None]], probe_tokens: int = PROBE_TOKENS) -> str:
    """Whether somebody else is served: empty, or what was seen.

    ``seen`` are looks at (requests in the scheduler, generated tokens so far) over the quiet time, None for what the engine
    does not tell. One request in a single look may be the liveness probe's.
    """
    loads = [load for load, __ in seen if load is not None]
    busy = [load for load in loads if load > 0]
    if busy and (len(busy) > 1 or len(loads) == 1 or max(busy) > 1):
        return f"{max(busy)} requests running or waiting, in {len(busy)} of {len(loads)} looks"
    tokens = [generated for __, generated in seen if generated is not None]
    if len(tokens) > 1 and tokens[-1] - tokens[0] > probe_tokens:
        return f"{tokens[-1] - tokens[0]:.0f} tokens generated for somebody else meanwhile"
    return ""


# ----------------------------------------------------------------------------------------------------- comparing


def _by_level(document: Mapping[str, Any] | None) -> dict[int, Mapping[str, Any]]:
    return {int(entry["concurrency"]): entry for entry in (document or {}).get("levels") or []}


def same_method(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two results were measured in the same way (the levels themselves and the repeats may differ)."""
    names = ("tool", "requests", "fill", "output_tokens", "prompts", "warmup")
    first, second = one.get("method") or {}, other.get("method") or {}
    return all(first.get(name) == second.get(name) for name in names)


def verdict(now: float, before: float, bands: Iterable[float | None]) -> str:
    """Faster or slower only outside the noise of both."""
    width = max(LEAST_NOISE, *(ASSUMED_NOISE if band is None else band for band in bands))
    change = now / before - 1
    return SAME if abs(change) <= width else FASTER if change > 0 else SLOWER


def compare(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[int, dict[str, Any]]:
    """For each level that both have: the earlier figure, the change as a share, and what it is worth."""
    found: dict[int, dict[str, Any]] = {}
    earlier = _by_level(before)
    for concurrency, entry in _by_level(now).items():
        old = earlier.get(concurrency, {}).get("output_tok_s")
        new = entry["output_tok_s"]
        if not old or new is None:
            continue
        bands = (entry.get("noise"), earlier[concurrency].get("noise"))
        what = verdict(new, old, bands) if same_method(now, before or {}) else OTHER_METHOD
        found[concurrency] = {"output_tok_s": old, "change": _rounded(new / old - 1, 4), "verdict": what}
    return found


def record_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The record's configurations with their figures by level; a figure that is not on record stays None."""
    rows = []
    for row in record["rows"]:
        figures = dict(zip(record["levels"], row["output_tok_s"], strict=True))
        rows.append({"profile": row["profile"], "title": row["title"], "figures": figures})
    return rows


def other_than_record(now: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """In what a run was measured otherwise than the record, in words; empty where it was not.

    The record's prompts are not on record: the collection's own stand for them, and no others.
    """
    own, wanted = now["method"], record["method"]
    names = {"requests": "requests a level", "warmup": "warm-up requests", "output_tokens": "new tokens"}
    found = [f"{own[key]} {name} instead of {wanted[key]}" for key, name in names.items() if own[key] != wanted[key]]
    if own.get("fill"):
        found.append("at least as many requests as the level is high")
    if own["prompts"] != record["stand_in_prompts"]:
        found.append(f"prompts {own['prompts']} instead of the collection's {record['stand_in_prompts']}")
    return ", ".join(found)


def record_remark(now: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """What a reader must know who holds a run against the record; empty where both were measured in the same way."""
    other = other_than_record(now, record)
    return f"Not the method of the record ({other}): its figures are no measure for these" if other else ""


def record_for(profile: str, record: Mapping[str, Any]) -> dict[int, float | None]:
    """The record's figures of a profile; empty when it is not on record."""
    return next((row["figures"] for row in record_rows(record) if row["profile"] == profile), {})


# ----------------------------------------------------------------------------------------------------- showing


def number(value: Any, digits: int = 1) -> str:
    """`86.8`; `-` for what is not known."""
    return "-" if value is None else f"{float(value):.{digits}f}"


def percent(share: float | None) -> str:
    """`+3.1 %`; `-` for what is not known."""
    return "-" if share is None else f"{share * 100:+.1f} %"


def change(seen: Mapping[str, Any]) -> str:
    """`+3.1 % (faster)`; a share of what was measured in another way says nothing."""
    verdict_ = seen["verdict"]
    return OTHER_METHOD if verdict_ == OTHER_METHOD else f"{percent(seen['change'])} ({verdict_})"


def rate(entry: Mapping[str, Any]) -> str:
    """`86.8 ±1.2 %`, with the band where there is one."""
    band = entry.get("noise")
    return number(entry["output_tok_s"]) + (f" ±{band * 100:.1f} %" if band is not None else "")


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def table(
    now: Mapping[str, Any], before: Mapping[str, Any] | None = None, record: Mapping[str, Any] | None = None
) -> list[list[str]]:
    """The rows of the benchmark table, head first; columns for the record and the run before only where there is one."""
    against = compare(now, before)
    documented = record_for(str(now["profile"]), record) if record else {}
    other = bool(record and other_than_record(now, record))
    head = ["C", "output tok/s", "TTFT p50 / p99 ms", "inter-token p50 / p99 ms", "acceptance length", "failed"]
    rows = [
        head
        + (["record tok/s", "to record"] if documented else [])
        + (["run before tok/s", "change"] if against else [])
    ]
    for concurrency, entry in _by_level(now).items():
        row = [
            str(concurrency),
            rate(entry),
            f"{number(entry['ttft_ms']['p50'])} / {number(entry['ttft_ms']['p99'])}",
            f"{number(entry['itl_ms']['p50'])} / {number(entry['itl_ms']['p99'])}",
            number(entry["accept_length"], 2),
            f"{entry['failed']} of {entry['requests']}",
        ]
        if documented:
            old = documented.get(concurrency)
            share = entry["output_tok_s"] / old - 1 if old and entry["output_tok_s"] is not None else None
            row += [number(old), OTHER_METHOD if other and old else percent(share)]
        if against:
            seen = against.get(concurrency)
            row += [number(seen["output_tok_s"]), change(seen)] if seen else ["-", "-"]
        rows.append(row)
    return rows


def how(now: Mapping[str, Any]) -> str:
    """The method in one sentence."""
    method = now["method"]
    amount = f"{method['requests']} requests a level" + (" (or as many as the level)" if method.get("fill") else "")
    repeats = f"{method['repeats']} runs of each level" if method["repeats"] > 1 else "one run of each level"
    return (
        f"{method['tool']}, {amount}, {method['output_tokens']} new tokens, {method['warmup']} warm-up requests, "
        f"{repeats}, prompts {method['prompts']}"
    )


def report(
    now: Mapping[str, Any], before: Mapping[str, Any] | None = None, record: Mapping[str, Any] | None = None
) -> list[str]:
    """Lines for people: the table in columns, then what it is worth."""
    rows = table(now, before, record)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [f"{now['profile']}, SGLang {now['engine_version']}, {now['when']}", how(now), ""]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    notes = remarks(now)
    if record and record_for(str(now["profile"]), record) and (note := record_remark(now, record)):
        notes.insert(0, note)
    return lines + (["", *notes] if notes else [])


def remarks(now: Mapping[str, Any]) -> list[str]:
    """What a reader must know about the figures."""
    notes = []
    for entry in now["levels"]:
        many, concurrency = entry["repeats"][0]["requests"], entry["concurrency"]
        if many < concurrency:
            notes.append(
                f"C={concurrency}: {many} requests never fill it, at most {many} run at once (benchmark_fill changes that)"
            )
        for repeat in entry["repeats"]:
            for error, count in repeat["errors"].items():
                notes.append(f"C={concurrency}: {count} failed: {error}")
        others = sum(repeat.get("other_requests") or 0 for repeat in entry["repeats"])
        if others > 2 * len(entry["repeats"]):
            notes.append(
                f"C={concurrency}: {others} requests of others were served meanwhile, so the figures are too low"
            )
    if now.get("stopped"):
        notes.append(f"Stopped: {now['stopped']}")
    return notes
