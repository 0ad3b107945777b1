# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""What host_verify returned, for people (a table), for machines (JSON), for CI (JUnit) and for a node exporter."""

from __future__ import annotations

import re
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

from .verify import SKIPPED, UNKNOWN, WARNING

WIDTH = 140
KEYS = ("id", "subject", "ok", "found", "expected", "action", "severity")
#: What XML 1.0 cannot hold.
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def word(check: Mapping[str, Any]) -> str:
    """The outcome in one word."""
    if check["ok"] is True:
        return "ok"
    if check["ok"] is False:
        return "warning" if check["severity"] == WARNING else "FAILED"
    return "UNKNOWN" if check["severity"] == UNKNOWN else "-"


def document(result: Mapping[str, Any], host: str = "") -> dict[str, Any]:
    """The stable document: ``{host, ok, failures, warnings, unknown, checks}``."""
    checks = [{key: check[key] for key in KEYS} for check in result["checks"]]
    return {
        "host": host,
        "ok": bool(result["ok"]),
        "failures": list(result["failures"]),
        "warnings": [check["id"] for check in checks if check["ok"] is False and check["severity"] == WARNING],
        "unknown": list(result["unknown"]),
        "checks": checks,
    }


def _row(name: str, outcome: str, found: str, first: int) -> list[str]:
    left = f"{outcome:<8}{name:<{first}}  "
    lines = textwrap.wrap(found, max(40, WIDTH - len(left)), break_long_words=False, break_on_hyphens=False) or [""]
    return [(left + lines[0]).rstrip(), *(" " * len(left) + line for line in lines[1:])]


def table(result: Mapping[str, Any], host: str = "") -> str:
    """Every check in a line; of what is not as expected also what was expected and what to do."""
    checks = result["checks"]
    first = max([len(check["id"]) for check in checks] or [0])
    lines: list[str] = []
    for check in checks:
        outcome = word(check)
        if outcome == "ok" or outcome == "-":
            lines += _row(check["id"], outcome, f"{check['subject']}: {check['found']}", first)
        else:
            text = f"{check['subject']}: {check['found']}"
            lines += _row(check["id"], outcome, text, first)
            lines += _row("", "", f"expected: {check['expected']}", first)
            if check["action"]:
                lines += _row("", "", f"do: {check['action']}", first)
    return "\n".join([summary(result, host), "", *lines])


def summary(result: Mapping[str, Any], host: str = "") -> str:
    """One line."""
    checks = result["checks"]
    counts = [
        (sum(check["ok"] is True for check in checks), "ok"),
        (len(result["failures"]), "failed"),
        (sum(word(check) == "warning" for check in checks), "with a warning"),
        (len(result["unknown"]), "not known"),
        (sum(check["severity"] == SKIPPED for check in checks), "not applicable"),
    ]
    said = ", ".join(f"{number} {text}" for number, text in counts if number)
    named = f": {', '.join([*result['failures'], *result['unknown']])}" if not result["ok"] else ""
    return f"{host or 'host'} is {'what was deployed' if result['ok'] else 'NOT what was deployed'} ({said}){named}"


def problems(result: Mapping[str, Any]) -> list[str]:
    """What keeps the host from being well, one line each: found, expected, what to do."""
    return [
        f"{check['id']} ({check['subject']}): {check['found']}, expected {check['expected']}. {check['action']}".rstrip()
        for check in result["checks"]
        if word(check) in ("FAILED", "UNKNOWN")
    ]


def junit(result: Mapping[str, Any], host: str = "") -> str:
    """A suite with one test case a check. A warning is a passed case with its text as output."""
    checks = result["checks"]
    suite = ET.Element(
        "testsuite",
        name=f"verify {host}".strip(),
        tests=str(len(checks)),
        failures=str(len(result["failures"])),
        errors=str(len(result["unknown"])),
        skipped=str(sum(check["severity"] == SKIPPED for check in checks)),
    )
    for check in checks:
        case = ET.SubElement(suite, "testcase", classname=f"gpuserve.verify.{host or 'host'}", name=check["id"])
        text = f"found {check['found']}, expected {check['expected']}. {check['action']}".strip()
        text = _NOT_XML.sub("?", f"{check['subject']}: {text}")
        outcome = word(check)
        tag = {"FAILED": "failure", "UNKNOWN": "error", "-": "skipped"}.get(outcome)
        if tag:
            ET.SubElement(case, tag, message=text)
        else:
            ET.SubElement(case, "system-out").text = text
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def metrics(result: Mapping[str, Any], unit: str, now: float) -> str:
    """Text file of a node exporter: 1 is well, 0 is not, -1 is not known; what does not apply is left out."""
    name = _label(unit)
    lines = [
        "# HELP gpuserve_verify_ok Whether the host is what was deployed on it.",
        "# TYPE gpuserve_verify_ok gauge",
        f'gpuserve_verify_ok{{unit="{name}"}} {int(bool(result["ok"]))}',
        "# HELP gpuserve_verify_check Outcome of one check: 1 well, 0 not, -1 not known.",
        "# TYPE gpuserve_verify_check gauge",
    ]
    for check in result["checks"]:
        if check["severity"] == SKIPPED and check["ok"] is None:
            continue
        value = {True: 1, False: 0, None: -1}[check["ok"]]
        severity = "warning" if check["severity"] == WARNING else "error"
        lines.append(
            f'gpuserve_verify_check{{unit="{name}",check="{_label(check["id"])}",severity="{severity}"}} {value}'
        )
    lines += [
        "# HELP gpuserve_verify_timestamp_seconds When this was checked.",
        "# TYPE gpuserve_verify_timestamp_seconds gauge",
        f'gpuserve_verify_timestamp_seconds{{unit="{name}"}} {now:.0f}',
    ]
    return "\n".join(lines) + "\n"
