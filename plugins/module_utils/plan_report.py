"""The plan as text for a terminal: every setting with its value, reason and source, the memory budget, what was warned of,
what deviates from the documented box, and whether a restart would follow.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .service import unit_changes

WIDTH = 140
_NAME_WIDTH = 40


def _value(value: Any) -> str:
    if value is None or value == "":
        return "(not set)"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "(none)"
    return str(value)


def _rows(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Three columns; the last one is wrapped, and a long name or value gets a line of its own."""
    if not rows:
        return ["  none"]
    first = min(max(len(row[0]) for row in rows), _NAME_WIDTH)
    second = min(max(len(row[1]) for row in rows), 24)
    lines = []
    for name, value, text in rows:
        left = f"  {name:<{first}}  {value:<{second}}  "
        indent = " " * (first + second + 6)
        if len(left) > len(indent):
            value_indent = " " * (first + 4)
            over = textwrap.wrap(value, WIDTH - len(value_indent), break_long_words=False, break_on_hyphens=False)
            lines.append(f"  {name:<{first}}  {over[0] if over else ''}".rstrip())
            lines += [value_indent + line for line in over[1:]]
            left = indent
        wrapped = textwrap.wrap(text, WIDTH - len(indent)) or [""]
        lines.append((left + wrapped[0]).rstrip())
        lines += [indent + line for line in wrapped[1:]]
    return lines


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _budget(budget: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for name, value in budget.items():
        if isinstance(value, (list, dict)) or value is None:
            continue
        shown = (
            _gib(value)
            if "bytes" in name and "per_token" not in name and isinstance(value, (int, float))
            else _value(value)
        )
        rows.append((name, shown, ""))
    return rows + [("assumed", "", str(text)) for text in budget.get("assumptions") or []]


def plan_report(
    plan: Mapping[str, Any],
    name: str = "",
    reasons: Sequence[str] | None = None,
    unit: Mapping[str, Any] | None = None,
) -> str:
    """The report. ``reasons`` are those of service_info: empty for no restart, None when nothing was compared.

    ``unit`` are the unit's settings of the last good deployment, whose differences are listed.
    """
    lines = [
        f"Plan {plan['hash'][:12]} for {name or 'this host'}: profile {plan['profile']}, SGLang {plan['engine_version']}",
        "",
    ]
    groups: dict[str, list[tuple[str, str, str]]] = {
        "Flags": [],
        "Environment": [],
        "Unit": [],
        "Left to the engine": [],
    }
    for note in plan["notes"]:
        setting = str(note["setting"])
        group = (
            "Flags" if setting.startswith("--")
            else "Unit" if setting.startswith("unit.")
            else "Left to the engine" if setting.startswith("engine.")
            else "Environment"
        )  # fmt: skip
        groups[group].append(
            (
                setting.removeprefix("unit.").removeprefix("engine."),
                _value(note["value"]),
                f"{note['reason']} [{note['source']}]",
            )
        )
    for title, rows in groups.items():
        lines += [title, *_rows(rows), ""]
    lines += ["Memory", *_rows(_budget(plan.get("budget") or {})), ""]
    lines += ["Warnings", *_rows([(str(w["id"]), "", str(w["message"])) for w in plan["warnings"]]), ""]
    lines += [
        "Deviations from the documented box (setting, here, documented and why)",
        *_rows(
            [
                (
                    str(d["setting"]),
                    _value(d["actual"]),
                    f"documented: {_value(d['documented'])}. {d['reason']} [take back: {d['take_back']}]",
                )
                for d in plan["deviations"]
            ]
        ),
        "",
        "Command",
        *[f"  {line}" for line in _command(plan["command"])],
        "",
    ]
    changes = unit_changes(unit or {}, plan["unit"])
    if changes:
        lines += [
            "Settings of the unit, from the last good deployment to this plan",
            *(f"  {text}" for text in changes),
            "",
        ]
    if reasons is None:
        lines.append("Restart: not compared with a running service.")
    elif reasons:
        lines.append(f"Restart: yes, {'; '.join(reasons)}.")
    else:
        lines.append("Restart: no, the running process follows this plan.")
    return "\n".join(lines)


def _command(command: Sequence[str]) -> list[str]:
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(word)
    return [" ".join(line) for line in lines]
