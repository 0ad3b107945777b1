#!/usr/bin/env python3
# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Are the hosts of an inventory still what was deployed on them? Runs playbooks/verify.yml, which only reads.

    tools/verify.py [-i INVENTORY] [--limit HOSTS] [--json FILE|-] [--junit FILE] [-e KEY=VALUE ...]

Exit status: 0 every host is what was deployed, 1 something is not (named on standard output), 2 it could not be checked.
The JSON document is {ok, failures, unknown, hosts: {NAME: {host, ok, failures, warnings, unknown, checks, error}}}.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gpuserve.sglang.plugins.module_utils import verify_report as report  # noqa: E402

WELL, DRIFT, NOT_CHECKED = 0, 1, 2
TASK = "Hold the host against what was deployed"


def run(inventory: list[str], limit: str, extra: list[str]) -> tuple[list[dict[str, Any]], str]:
    """The playbook's events, and what it printed."""
    import ansible_runner

    arguments = [word for path in inventory for word in ("-i", path)]
    arguments += ["--limit", limit] if limit else []
    # The verdict is this program's: the play only collects.
    arguments += [word for value in [*extra, "verify_enforce=false"] for word in ("-e", value)]
    with tempfile.TemporaryDirectory(prefix="gpuserve-verify-") as private:
        done = ansible_runner.run(
            private_data_dir=private,
            project_dir=str(ROOT),
            playbook="playbooks/verify.yml",
            cmdline=shlex.join(arguments) or None,
            envvars={
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_CONFIG": os.environ.get("ANSIBLE_CONFIG", str(ROOT / "ansible.cfg")),
                "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            },
            quiet=True,
        )
        return list(done.events), done.stdout.read()


def read(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Host to its document. A host that ended before it was looked at has an ``error`` and no checks."""
    hosts: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    for event in events:
        data = event.get("event_data") or {}
        name, outcome = data.get("host"), event["event"]
        if outcome == "runner_on_ok" and data.get("task") == TASK:
            hosts[name] = {**report.document(data["res"], name), "error": ""}
        elif outcome in ("runner_on_failed", "runner_on_unreachable") and not data.get("ignore_errors"):
            result = data.get("res") or {}
            errors[name] = str(result.get("msg") or "no reason given")
    for name, why in errors.items():
        if name not in hosts:
            empty = {"ok": False, "failures": [], "unknown": ["reach"], "checks": []}
            hosts[name] = {**report.document(empty, name), "error": why}
    return hosts


def document(hosts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All hosts as one document; failures carry the host's name."""
    return {
        "ok": bool(hosts) and all(host["ok"] for host in hosts.values()),
        "failures": [f"{name}: {check}" for name, host in hosts.items() for check in host["failures"]],
        "unknown": [f"{name}: {check}" for name, host in hosts.items() for check in host["unknown"]],
        "hosts": hosts,
    }


def status(hosts: dict[str, dict[str, Any]]) -> int:
    """A drift that was found counts more than what could not be checked beside it."""
    if any(host["failures"] for host in hosts.values()):
        return DRIFT
    return WELL if hosts and all(host["ok"] for host in hosts.values()) else NOT_CHECKED


def junit(hosts: dict[str, dict[str, Any]]) -> str:
    """One suite a host."""
    root = ET.Element("testsuites")
    for name, host in hosts.items():
        (suite,) = ET.fromstring(report.junit(host, name))
        if host["error"]:
            suite.set("tests", "1")
            suite.set("errors", "1")
            case = ET.SubElement(suite, "testcase", classname=f"gpuserve.verify.{name}", name="reach")
            ET.SubElement(case, "error", message=host["error"][:1000])
        root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-i", "--inventory", action="append", default=[], help="as for ansible-playbook")
    parser.add_argument("-l", "--limit", default="", help="hosts, as for ansible-playbook")
    parser.add_argument("-e", "--extra-vars", action="append", default=[], help="variables, as for ansible-playbook")
    parser.add_argument("--json", metavar="FILE", default="", help="write the document there; - is standard output")
    parser.add_argument("--junit", metavar="FILE", default="", help="write JUnit XML there")
    options = parser.parse_args(argv)
    inventory = [str(Path(path).resolve()) if Path(path).exists() else path for path in options.inventory]
    events, printed = run(inventory, options.limit, options.extra_vars)
    hosts = read(events)
    whole = document(hosts)
    if options.json == "-":
        print(json.dumps(whole, indent=2))
    else:
        for name, host in hosts.items():
            print(report.table(host, name) if not host["error"] else f"{name} could not be checked: {host['error']}")
        if options.json:
            Path(options.json).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    if options.junit:
        Path(options.junit).write_text(junit(hosts), encoding="utf-8")
    if not hosts:
        print(f"No host was checked, expected at least one:\n{printed[-3000:]}", file=sys.stderr)
    return status(hosts)


if __name__ == "__main__":
    sys.exit(main())
