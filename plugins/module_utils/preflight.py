# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Policy as a table: rows of data are held against one inspected host, and a report comes out.

A row asks one JMESPath question of C({host, plan, want, found}) and says what answer it expects:

    id, title   name of the check, unique, and what people read
    query       JMESPath; null means "not known on this host"
    expect      one operator of OPERATORS with its value, or with {query: JMESPath} for a value that is computed
    severity    error | warning
    waivable    may the inventory let it pass, with a reason (default true)
    when        JMESPath; the row is skipped unless the answer is true (default: always). Mind that C(!a.b) means
                C((!a).b), write C(!(a.b)); and that there is no C($)
    unknown     what "not known" counts as: warn (default), fail, skip
    message     found, expected, do: texts with {found} and {expected}; item: the text of each entry of a list; unread:
                JMESPath for the list of paths that nobody looked at, where the answer is "not known"

C(found) holds what needs more than a query, see L(derive). Runs on the controller only; JMESPath is its one need.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

UNLIMITED = 2**63 - 1
GIB = 2**30
#: Longest text in the table's column "found"; the whole text is in the report. A waiver's reason is never shortened.
TABLE_WIDTH = 96


class PreflightError(ValueError):
    """The policy itself (a row, a waiver, the controller) is wrong, not the host."""


# ----------------------------------------------------------------------------------------------------------- values
def plain(value: Any) -> Any:
    """C(value) as dictionaries, lists and scalars of Python's own types: JMESPath looks at exact types, and Ansible's
    are subclasses."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(entry) for entry in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return str(value)


def words(value: Any, item: str | None = None) -> str:
    """C(value) for people; C(item) is the text of each entry of a list."""
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and value >= UNLIMITED:
        return "unlimited"
    if isinstance(value, list):
        if not value:
            return "none"
        texts = [fill(item, entry) if item and isinstance(entry, Mapping) else words(entry) for entry in value]
        times = {text: texts.count(text) for text in texts}
        return "; ".join(text if count == 1 else f"{text} ({count} times)" for text, count in times.items())
    if isinstance(value, Mapping):
        return " ".join(f"{key}={words(entry)}" for key, entry in value.items())
    if isinstance(value, float):
        return f"{value:.1f}".rstrip("0").rstrip(".")
    return str(value)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """C({name}) in C(template) by the words of C(values); names that are not there stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda m: words(values[m.group(1)]) if m.group(1) in values else m.group(), template)


def short(text: str, width: int = TABLE_WIDTH) -> str:
    """C(text), cut where it is longer than C(width)."""
    return text if len(text) <= width else text[: width - 3] + "..."


# -------------------------------------------------------------------------------------------------------- operators
def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PreflightError(f"found {value!r} ({type(value).__name__}), expected a number")
    return value


def _sized(value: Any) -> int:
    if not isinstance(value, (list, str, Mapping)):
        raise PreflightError(f"found {value!r} ({type(value).__name__}), expected a list or a text")
    return len(value)


def _same(value: Any, wanted: Any) -> bool:
    return type(value) is type(wanted) and bool(value == wanted) if isinstance(wanted, bool) else bool(value == wanted)


#: Name -> (does the found value meet the expected one, the expectation in words).
OPERATORS: dict[str, tuple[Callable[[Any, Any], bool], Callable[[Any], str]]] = {
    "equals": (_same, words),
    "not_equals": (lambda value, wanted: not _same(value, wanted), lambda wanted: f"anything but {words(wanted)}"),
    "at_least": (lambda value, wanted: _number(value) >= _number(wanted), lambda wanted: f"at least {words(wanted)}"),
    "at_most": (lambda value, wanted: _number(value) <= _number(wanted), lambda wanted: f"at most {words(wanted)}"),
    "one_of": (
        lambda value, wanted: value in wanted,
        lambda wanted: f"one of {', '.join(words(entry) for entry in wanted)}",
    ),
    "all_one_of": (
        lambda value, wanted: all(entry in wanted for entry in value),
        lambda wanted: f"only {', '.join(words(entry) for entry in wanted)}",
    ),
    "contains": (
        lambda value, wanted: all(entry in value for entry in (wanted if isinstance(wanted, list) else [wanted])),
        lambda wanted: f"{words(wanted)} among them",
    ),
    "matches": (
        lambda value, wanted: re.search(wanted, str(value)) is not None,
        lambda wanted: f"a match of {wanted}",
    ),
    "at_most_entries": (
        lambda value, wanted: _sized(value) <= _number(wanted),
        lambda wanted: f"at most {words(wanted)}",
    ),
    "empty": (
        lambda value, wanted: (_sized(value) == 0) is wanted,
        lambda wanted: "none" if wanted else "at least one",
    ),
}

LISTS = ("failures", "warnings", "waived", "passed", "skipped")
ROW_KEYS = {"id", "title", "query", "expect", "severity", "waivable", "when", "unknown", "message"}
MESSAGE_KEYS = {"found", "expected", "do", "item", "unread"}
UNREAD_DO = "Correct these paths, or read the host again when deployment_host was given and lacks them."


def _jmespath() -> Any:
    try:
        return importlib.import_module("jmespath")
    except ImportError as exc:
        raise PreflightError(
            "found no Python package jmespath on the controller, expected it beside ansible-core. "
            "Run `pip install -r requirements.txt` in the environment that ansible-playbook runs in."
        ) from exc


class _Query:
    """A compiled question. Raises PreflightError for one that cannot be parsed."""

    def __init__(self, text: Any, where: str) -> None:
        library = _jmespath()
        self.text = str(text)
        self._type_error = library.exceptions.JMESPathError
        try:
            self._compiled = library.compile(self.text)
        except library.exceptions.JMESPathError as exc:
            first = str(exc).splitlines()[0]
            raise PreflightError(f"{where}: found {self.text!r}, expected a JMESPath expression ({first})") from exc

    def ask(self, context: Mapping[str, Any]) -> Any:
        """The answer; None also where a function meets a value that is not known."""
        try:
            return self._compiled.search(context)
        except self._type_error:
            return None


def check_rows(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """C(rows), each whole and with defaults filled in. Raises PreflightError naming the row and its fault."""
    checked: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise PreflightError(f"check {number}: found {type(row).__name__}, expected a dictionary")
        where = f"check {row.get('id', number)!r}"
        for key in ("id", "query", "expect"):
            if row.get(key) in (None, ""):
                raise PreflightError(f"{where}: found no {key!r}, expected id, query and expect in every check")
        strange = sorted(set(row) - ROW_KEYS)
        if strange:
            raise PreflightError(
                f"{where}: found key {', '.join(strange)}, expected only {', '.join(sorted(ROW_KEYS))}"
            )
        if row["id"] in seen:
            raise PreflightError(
                f"{where}: found twice, expected each id once. Give your own check another id; "
                "to let one pass, name it in gpu_preflight_waivers with a reason."
            )
        seen.add(row["id"])
        expect = row["expect"]
        if not isinstance(expect, Mapping) or len(expect) != 1 or next(iter(expect)) not in OPERATORS:
            raise PreflightError(f"{where}: found expect {words(expect)}, expected one of {', '.join(OPERATORS)}")
        for key, choices in (("severity", ("error", "warning")), ("unknown", ("warn", "fail", "skip"))):
            if row.get(key, choices[0]) not in choices:
                raise PreflightError(f"{where}: found {key} {row[key]!r}, expected {' or '.join(choices)}")
        _Query(row["query"], where)
        if row.get("when") is not None:
            _Query(row["when"], f"{where}, when")
        if isinstance(expect[operator := next(iter(expect))], Mapping) and "query" in expect[operator]:
            _Query(expect[operator]["query"], f"{where}, expect")
        message = row.get("message") or {}
        if not isinstance(message, Mapping) or set(message) - MESSAGE_KEYS:
            raise PreflightError(f"{where}: found message {words(message)}, expected {', '.join(sorted(MESSAGE_KEYS))}")
        if message.get("unread") is not None:
            _Query(message["unread"], f"{where}, unread")
        if not isinstance(row.get("waivable", True), bool):
            raise PreflightError(f"{where}: found waivable {row['waivable']!r}, expected true or false")
        checked.append(
            {
                "title": row["id"],
                "severity": "error",
                "waivable": True,
                "when": None,
                "unknown": "warn",
                **row,
                "message": message,
            }
        )
    return checked


def check_waivers(waivers: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Reason by id. Raises PreflightError for an id that is no check, one that must not be waived, or no reason."""
    known = {row["id"]: row for row in rows}
    reasons: dict[str, str] = {}
    for waiver in waivers:
        if not isinstance(waiver, Mapping) or set(waiver) - {"id", "reason"} or not waiver.get("id"):
            raise PreflightError(f"gpu_preflight_waivers: found {words(waiver)}, expected entries with id and reason")
        name = str(waiver["id"])
        if name not in known:
            raise PreflightError(
                f"gpu_preflight_waivers: found {name!r}, expected the id of a check. "
                f"Checks are: {', '.join(sorted(known))}"
            )
        if not str(waiver.get("reason") or "").strip():
            raise PreflightError(
                f"gpu_preflight_waivers: found no reason for {name!r}, expected why this host may pass without it. "
                "The handbook shows the reason."
            )
        if not known[name]["waivable"]:
            raise PreflightError(
                f"gpu_preflight_waivers: found {name!r}, which cannot be waived: the server cannot work without it. "
                "Remove the waiver and mend the host."
            )
        if name in reasons:
            raise PreflightError(f"gpu_preflight_waivers: found {name!r} twice, expected each id once")
        reasons[name] = str(waiver["reason"]).strip()
    return reasons


# ---------------------------------------------------------------------------------------------------- derived facts
def unit_name(unit: str) -> str:
    """The name with its suffix: C(sglang-kimi) and C(sglang-kimi.service) are the same unit."""
    return unit if not unit or unit.endswith(".service") else f"{unit}.service"


def same_version(one: str | None, two: str | None) -> bool | None:
    """Whether two driver versions agree as far as both go (590.48 names 590.48.01 too); None when one is not known."""
    if not one or not two:
        return None
    pair = list(zip(one.split("."), two.split("."), strict=False))
    return all(left == right for left, right in pair)


def _gpu_claims(gpu: Mapping[str, Any], unit: str, releasable: set[int]) -> tuple[list[dict[str, Any]], int]:
    """Processes on a GPU that are not the unit's, and how much of the memory in use is the unit's or accounted for.

    A container sees the memory in use but often not the processes, whose numbers belong to its host. So where a process
    of the unit has the device file open, what nobody visible accounts for is taken as the unit's.
    """
    owns_device = any(holder.get("unit") == unit for holder in gpu.get("holders") or [])
    foreign, accounted = [], 0
    for process in gpu.get("processes") or []:
        visible = process.get("user") is not None
        if process.get("unit") == unit or process["pid"] in releasable or (not visible and owns_device):
            accounted += process.get("memory_mib") or 0
        else:
            foreign.append({"gpu": gpu["index"], **process})
            accounted += process.get("memory_mib") or 0
    if owns_device:
        accounted = max(accounted, gpu.get("memory_used_mib") or 0)
    return foreign, accounted


def derive(host: Mapping[str, Any], want: Mapping[str, Any]) -> dict[str, Any]:
    """What rows need and a query cannot say: everything that tells our own unit from others, and sums over lists.

    unit                    the name of the server's unit, with its suffix
    ours                    a server of that unit is running, or one that it replaces
    gpu_models              the different names of the GPUs
    older_generation        GPUs (gpu, gen) whose PCIe link reaches a lower generation than the best one's
    foreign_processes       processes of others on the GPUs (gpu, pid, command, user, unit, memory_mib)
    unseen_memory           memory in use that no visible process accounts for, above the idle allowance
    foreign_ports           listeners of others on the wanted ports
    foreign_servers         inference servers, and workers left behind, of others
    device_files_missing    device files that the GPUs need
    driver_agrees           loaded and installed driver are the same; null when one is not known
    driver_supported        the driver's branch or version is on the list
    kernels_without_module  kernels that would boot without the NVIDIA module, where DKMS builds it
    disks_short             file systems with less room than wanted; null when a wanted path was not measured
    disks_unread            wanted paths that were not measured
    ram_available_mib       main memory available, within the control group's limit
    sitecustomize_broken    interpreters whose sitecustomize cannot be compiled; null when a wanted one was not read
    interpreters_unread     wanted interpreters that were not read: not asked, not there, or without an answer
    driver_packages_exposed driver packages that unattended upgrades could replace
    """
    unit = unit_name(str(want.get("unit") or ""))
    # What gpu_release may end: a start ends it, so it is in nobody's way.
    releasable = {int(pid) for pid in want.get("releasable") or []}
    replaced = [
        server for server in host.get("servers") or [] if releasable & {server["pid"], *(server.get("pids") or [])}
    ]
    gpus = host.get("gpus") or []
    foreign_processes: list[dict[str, Any]] = []
    unseen: list[dict[str, Any]] = []
    for gpu in gpus:
        foreign, accounted = _gpu_claims(gpu, unit, releasable)
        foreign_processes += foreign
        rest = (gpu.get("memory_used_mib") or 0) - accounted
        if rest > want.get("max_idle_memory_mib", 0):
            unseen.append({"gpu": gpu["index"], "memory_mib": rest})
    generations = [(gpu["index"], gpu["pcie"]["gen_max"]) for gpu in gpus if gpu["pcie"]["gen_max"] is not None]
    best = max((generation for _index, generation in generations), default=0)
    minors = [gpu["index"] if gpu.get("minor") is None else gpu["minor"] for gpu in gpus]
    needed = ["/dev/nvidiactl", "/dev/nvidia-uvm", *(f"/dev/nvidia{minor}" for minor in minors)]
    present = host.get("device_files")
    driver = host.get("driver") or {}
    loaded = driver.get("loaded")
    supported = want.get("supported_drivers") or []
    memory = host.get("memory") or {}
    amounts = [memory[key] for key in ("available_mib", "limit_mib") if memory.get(key) is not None]
    floor = want.get("min_disk_gib", 0)
    paths = want.get("disk_paths") or []
    measured = {disk["path"]: disk for disk in host.get("disks") or [] if disk.get("free_bytes") is not None}
    unread = [path for path in paths if path not in measured]
    short = [
        {
            "path": path,
            "mount": measured[path]["mount"],
            "free_gib": round(measured[path]["free_bytes"] / GIB, 1),
            "wanted_gib": floor,
        }
        for path in paths
        if path in measured and measured[path]["free_bytes"] < floor * GIB
    ]
    sites = host.get("sitecustomize") or []
    broken = [site for site in sites if site.get("valid") is False]
    answered = {
        site["interpreter"]
        for site in sites
        if site.get("present", True) and not (site.get("valid") is None and site.get("error"))
    }
    mute = [path for path in want.get("interpreters") or [] if path not in answered]
    upgrades = host.get("unattended_upgrades") or {}
    built = [row for row in host.get("dkms") or [] if row.get("kernel")]
    return {
        "unit": unit,
        "ours": bool(replaced) or any(server.get("unit") == unit for server in host.get("servers") or []),
        "gpu_models": sorted({str(gpu["name"]) for gpu in gpus}),
        "older_generation": [
            {"gpu": index, "gen": generation} for index, generation in generations if generation < best
        ],
        "foreign_processes": foreign_processes,
        "unseen_memory": unseen,
        "foreign_ports": [
            entry
            for entry in host.get("ports") or []
            if entry["port"] in (want.get("ports") or [])
            and (entry.get("unit") != unit or not unit)
            and entry.get("pid") not in releasable
        ],
        "foreign_servers": [
            server
            for server in host.get("servers") or []
            if (server.get("unit") != unit or server.get("orphan")) and server not in replaced
        ],
        "device_files_missing": None if present is None else [path for path in needed if path not in present],
        "driver_agrees": same_version(loaded, driver.get("installed")),
        "driver_supported": None
        if not loaded
        else any(loaded == entry or loaded.startswith(f"{entry}.") for entry in map(str, supported)),
        "kernels_without_module": [
            kernel["version"] for kernel in host.get("kernels") or [] if built and not kernel["nvidia_module"]
        ],
        "disks_short": short if short or not unread else None,
        "disks_unread": unread,
        "ram_available_mib": min(amounts) if amounts else None,
        "sitecustomize_broken": broken if broken or not mute else None,
        "interpreters_unread": mute,
        "driver_packages_exposed": (upgrades.get("exposed") or []) if upgrades.get("enabled") else [],
    }


# ----------------------------------------------------------------------------------------------------------- report
def _entry(
    row: Mapping[str, Any], value: Any, wanted: Any, operator: str, result: str, unread: Sequence[str] = ()
) -> dict[str, Any]:
    message = row["message"]
    item = message.get("item")
    found = words(value, item)
    expected = OPERATORS[operator][1](wanted)
    texts = {"found": found, "expected": expected}
    if value is None:
        found = f"not known of {', '.join(unread)}" if unread else f"not known ({row['query']})"
    elif message.get("found") and value != []:
        found = fill(str(message["found"]), texts)
    if message.get("expected"):
        expected = fill(str(message["expected"]), texts)
    do = UNREAD_DO if unread else fill(str(message.get("do") or ""), texts).strip()
    text = f"{row['title']}: found {found}, expected {expected}."
    return {
        "id": row["id"],
        "title": row["title"],
        "severity": row["severity"],
        "result": result,
        "found": found,
        "expected": expected,
        "do": do,
        "value": value,
        "message": f"{text} {do}".strip(),
    }


def evaluate(
    context: Mapping[str, Any], rows: Sequence[Any], waivers: Sequence[Any] = (), name: str = ""
) -> dict[str, Any]:
    """Hold C(rows) against C(context) (C(host), C(plan), C(want)) and report.

    Returns C(ok), C(failures), C(warnings), C(waived) (each with found, expected, do, message; waived ones with their
    reason), C(passed) and C(skipped) (ids), C(waivers_unused), and C(table) and C(summary) for people. Raises
    PreflightError when a row or a waiver is wrong.
    """
    given = plain(context)
    host = given.get("host")
    if not isinstance(host, dict) or "gpus" not in host:
        raise PreflightError(
            f"found {type(host).__name__} without 'gpus' as the host, expected the result of gpu_host_info. "
            "Run gpuserve.sglang.gpu_host_info and keep what it returns as deployment_host."
        )
    want = given.get("want") or {}
    table = check_rows(plain(rows))
    reasons = check_waivers(plain(waivers), table)
    scene = {"host": host, "plan": given.get("plan") or {}, "want": want, "found": derive(host, want)}
    report: dict[str, Any] = {"ok": True, "error": None, **{key: [] for key in LISTS}}
    lines: list[tuple[str, str, str]] = []
    for row in table:
        where = f"check {row['id']!r}"
        if row["when"] is not None and not _Query(row["when"], f"{where}, when").ask(scene):
            report["skipped"].append(row["id"])
            continue
        operator, wanted = next(iter(row["expect"].items()))
        if isinstance(wanted, dict) and set(wanted) == {"query"}:
            wanted = _Query(wanted["query"], f"{where}, expect").ask(scene)
            if wanted is None:
                raise PreflightError(f"{where}: found no value at {row['expect'][operator]['query']}, expected one")
        value = _Query(row["query"], where).ask(scene)
        if value is None:
            if row["unknown"] == "skip":
                report["skipped"].append(row["id"])
                continue
            result = row["severity"] if row["unknown"] == "fail" else "warning"
        else:
            try:
                met = OPERATORS[operator][0](value, wanted)
            except (PreflightError, TypeError, re.error) as exc:
                raise PreflightError(f"{where}: {operator} cannot be applied: {exc}") from exc
            result = "passed" if met else row["severity"]
        query = row["message"].get("unread")
        unread = _Query(query, f"{where}, unread").ask(scene) if value is None and query else None
        entry = _entry(row, value, wanted, operator, result, [str(path) for path in unread or []])
        if result == "passed":
            report["passed"].append(row["id"])
            lines.append(("ok", row["id"], short(entry["found"])))
        elif row["id"] in reasons:
            report["waived"].append({**entry, "result": "waived", "reason": reasons[row["id"]]})
            found = short(entry["found"], TABLE_WIDTH // 2)
            lines.append(("waived", row["id"], f"{found} - waived: {reasons[row['id']]}"))
        else:
            report["failures" if result == "error" else "warnings"].append(entry)
            mark = "FAILED" if result == "error" else "WARNING"
            lines.append((mark, row["id"], short(f"{entry['found']} (expected {entry['expected']})")))
    used = {entry["id"] for entry in report["waived"]}
    report["waivers_unused"] = sorted(set(reasons) - used)
    report["ok"] = not report["failures"]
    report["table"] = render(lines, report, name)
    report["summary"] = _failure_text(report, name)
    return report


def refused(error: PreflightError) -> dict[str, Any]:
    """The report of a policy that cannot be applied: not ok, with the reason as C(error)."""
    lists: dict[str, Any] = {key: [] for key in (*LISTS, "waivers_unused")}
    text = f"The preflight policy cannot be applied; nothing was changed.\n{error}"
    return {"ok": False, "error": str(error), **lists, "table": text, "summary": text}


def render(lines: Sequence[tuple[str, str, str]], report: Mapping[str, Any], name: str = "") -> str:
    """The report as an aligned table with a line that counts."""
    order = {"ok": 3, "waived": 2, "WARNING": 1, "FAILED": 0}
    heads = ("result", "check", "found")
    widths = (
        [max(len(heads[column]), *(len(line[column]) for line in lines), 0) for column in (0, 1)] if lines else [6, 5]
    )

    def row(cells: Sequence[str]) -> str:
        return f"{cells[0]:<{widths[0]}}  {cells[1]:<{widths[1]}}  {cells[2]}".rstrip()

    body = [row(line) for line in sorted(lines, key=lambda line: order[line[0]])]
    counts = ", ".join(
        f"{len(report[key])} {label}"
        for key, label in (
            ("passed", "passed"),
            ("failures", "failed"),
            ("warnings", "warnings"),
            ("waived", "waived"),
            ("skipped", "do not apply"),
        )
    )
    todo = [f"  {entry['id']}: {entry['do']}" for entry in report["warnings"] if entry["do"]]
    return "\n".join(
        [
            f"Preflight{' of ' + name if name else ''}: {counts}",
            "",
            row(heads),
            row(["-" * widths[0], "-" * widths[1], "-" * len(heads[2])]),
            *body,
            *(["", "What to do about the warnings:", *todo] if todo else []),
        ]
    )


def _failure_text(report: Mapping[str, Any], name: str) -> str:
    failures = report["failures"]
    if not failures:
        return ""
    noun = "check" if len(failures) == 1 else "checks"
    rows = [f"{number}. [{entry['id']}] {entry['message']}" for number, entry in enumerate(failures, start=1)]
    return "\n".join(
        [f"{len(failures)} preflight {noun} failed{' on ' + name if name else ''}; nothing was changed.", *rows]
    )
