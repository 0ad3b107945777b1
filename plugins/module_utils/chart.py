# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""Charts of benchmark results as SVG and PNG. Runs on the controller and needs matplotlib (requirements.txt).

Colours are those of Okabe and Ito, which also people with a colour vision deficiency can tell apart; every series has a
marker of its own besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import benchmark

BLUE, ORANGE, GREEN, VERMILION, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#6b6b6b"
SERIES = ((BLUE, "o"), (VERMILION, "s"), (GREEN, "^"), (PURPLE, "v"), (ORANGE, "P"), (GREY, "X"))
_STYLE = {
    "font.size": 9.5, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4", "axes.axisbelow": True,
    "legend.frameon": False, "legend.fontsize": 8.5, "svg.hashsalt": "gpuserve", "svg.fonttype": "none", "figure.facecolor": "white",
}  # fmt: skip

Points = list[tuple[int, float]]


def _series(document: Mapping[str, Any], *keys: str) -> Points:
    """(concurrency, value) of the levels that have the value."""
    found = []
    for entry in document["levels"]:
        value: Any = entry
        for key in keys:
            value = value[key]
        if value is not None:
            found.append((int(entry["concurrency"]), float(value)))
    return found


def _split(points: Points) -> tuple[list[int], list[float]]:
    return [x for x, __ in points], [y for __, y in points]


def _axis(axis: Any, levels: Sequence[int], title: str, unit: str, xlabel: bool = True) -> None:
    axis.set_xscale("log")
    axis.set_xticks(list(levels), [str(level) for level in levels])
    axis.minorticks_off()
    low, high = min(levels), max(levels)
    axis.set_xlim(low / 1.35, high * 1.35)
    axis.set_title(title)
    axis.set_ylabel(unit)
    if xlabel:
        axis.set_xlabel("concurrent requests (log scale)")


def _from_zero(axis: Any, room: float) -> None:
    """From zero up, with this share of room above the highest point: a limit that is set ends the scaling, so the room comes first."""
    axis.margins(y=room)
    axis.set_ylim(bottom=0)


def _lines(axis: Any, points: Points, **look: Any) -> None:
    if points:
        axis.plot(*_split(points), **look)


def _bars(axis: Any, document: Mapping[str, Any], color: str, marker: str, label: str) -> None:
    """Throughput with its noise band, where the repeats give one."""
    points = _series(document, "output_tok_s")
    if not points:
        return
    bands = {int(entry["concurrency"]): entry.get("noise") for entry in document["levels"]}
    errors = [y * (bands[x] or 0.0) for x, y in points]
    axis.errorbar(
        *_split(points),
        yerr=errors,
        color=color,
        marker=marker,
        markersize=6,
        linewidth=1.8,
        capsize=4,
        label=label,
        zorder=3,
    )


def _percentiles(axis: Any, document: Mapping[str, Any], key: str) -> None:
    _lines(axis, _series(document, key, "p50"), color=BLUE, marker="o", markersize=5, label="median")
    _lines(
        axis,
        _series(document, key, "p99"),
        color=ORANGE,
        marker="^",
        markersize=5,
        linestyle="--",
        label="99th percentile",
    )
    _from_zero(axis, 0.12)
    axis.legend(loc="best")


def _save(figure: Any, prefix: Path) -> list[str]:
    paths = [f"{prefix}.svg", f"{prefix}.png"]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=150, metadata={"Software": None})
    return paths


def _levels(*documents: Mapping[str, Any], record: Mapping[int, Any] | None = None) -> list[int]:
    found = {int(entry["concurrency"]) for document in documents for entry in document["levels"]}
    return sorted(found | {level for level, value in (record or {}).items() if value is not None})


def _foot(figure: Any, text: str) -> None:
    figure.text(0.012, 0.012, text, fontsize=7.5, color=GREY, ha="left", va="bottom")


def draw(
    prefix: Path,
    document: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    record: Mapping[str, Any] | None,
    host: str = "",
) -> list[str]:
    """Draw one result, with the record's and the last run's figures; returns the paths of the SVG and the PNG file.

    Raises ImportError without matplotlib.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = benchmark.record_rows(record) if record else []
    own = next((row for row in rows if row["profile"] == document["profile"]), None)
    with matplotlib.rc_context(_STYLE):
        accepts = _series(document, "accept_length")
        figure = Figure(figsize=(11, 6.6), layout=ConstrainedLayoutEngine(rect=(0.005, 0.045, 0.99, 0.945)))
        small = ["ttft", "itl", "accept"] if accepts else ["ttft", "itl"]
        axes = figure.subplot_mosaic([["rate", name] for name in small], width_ratios=[1.35, 1])
        levels = _levels(document, record=own["figures"] if own else None)
        rate = axes["rate"]
        _axis(rate, levels, "Output throughput", "output tokens a second")
        if before is not None and benchmark.same_method(document, before):
            _lines(
                rate,
                _series(before, "output_tok_s"),
                color=GREY,
                marker=".",
                linestyle=":",
                label=f"run before ({before['when'][:10]})",
            )
        if own is not None:
            points = [(x, y) for x, y in own["figures"].items() if y is not None]
            other = f"; {benchmark.OTHER_METHOD}" if record and benchmark.other_than_record(document, record) else ""
            _lines(
                rate,
                points,
                color=VERMILION,
                marker="D",
                markersize=7,
                markerfacecolor="white",
                linestyle="none",
                label=f"record ({own['title']}{other})",
            )
        measured = any(entry.get("noise") is not None for entry in document["levels"])
        _bars(rate, document, BLUE, "o", "this run" + (" (bar: spread of the repeats)" if measured else ""))
        for x, y in _series(document, "output_tok_s"):
            rate.annotate(
                f"{y:.1f}",
                (x, y),
                textcoords="offset points",
                xytext=(0, -17),
                ha="center",
                fontsize=8.5,
                color=BLUE,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
            )
        failed = [entry for entry in document["levels"] if entry["failed"]]
        for entry in failed:
            note = f"{entry['failed']} failed"
            rate.annotate(
                note,
                (entry["concurrency"], 0),
                textcoords="offset points",
                xytext=(0, 4),
                ha="center",
                fontsize=8.5,
                color=VERMILION,
            )
        _from_zero(rate, 0.14)
        rate.legend(loc="best")
        last = small[-1]
        _axis(axes["ttft"], levels, "Time to first token", "ms", last == "ttft")
        _percentiles(axes["ttft"], document, "ttft_ms")
        _axis(axes["itl"], levels, "Time between tokens", "ms", last == "itl")
        _percentiles(axes["itl"], document, "itl_ms")
        if accepts:
            _axis(axes["accept"], levels, "Acceptance length", "tokens a step")
            _lines(axes["accept"], accepts, color=GREEN, marker="s", markersize=5)
            axes["accept"].set_ylim(0, max(y for __, y in accepts) * 1.25)
            axes["accept"].axhline(1, color=GREY, linewidth=1, linestyle=":")
        place = f" on {host}" if host else ""
        figure.suptitle(
            f"{document['profile']}{place}, SGLang {document['engine_version']}, {document['when']}",
            fontsize=12,
            x=0.012,
            ha="left",
        )
        _foot(figure, benchmark.how(document) + f"; plan {document['plan_hash'][:12]}")
        return _save(figure, prefix)


def draw_candidates(prefix: Path, documents: Sequence[Mapping[str, Any]], host: str = "") -> list[str]:
    """Draw the throughput of several profiles over the levels, with their noise; returns the paths."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 5.6), layout=ConstrainedLayoutEngine(rect=(0.005, 0.05, 0.99, 0.94)))
        rate, first = figure.subplots(1, 2, width_ratios=[1.5, 1])
        levels = _levels(*documents)
        _axis(rate, levels, "Output throughput", "output tokens a second")
        _axis(first, levels, "Time to first token, median", "ms")
        for number, document in enumerate(documents):
            color, marker = SERIES[number % len(SERIES)]
            failed = " (failed in another round)" if "failure" in document else ""
            _bars(rate, document, color, marker, document["profile"] + failed)
            _lines(first, _series(document, "ttft_ms", "p50"), color=color, marker=marker, markersize=5)
        for axis in (rate, first):
            _from_zero(axis, 0.12)
        rate.legend(loc="best")
        place = f" on {host}" if host else ""
        figure.suptitle(
            f"Profiles compared{place}, {documents[0]['when'][:10]} (bar: spread of the repeats)",
            fontsize=12,
            x=0.012,
            ha="left",
        )
        _foot(figure, benchmark.how(documents[0]))
        return _save(figure, prefix)
