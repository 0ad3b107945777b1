# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What nvidia-smi says, as plain data.

Every function takes text that the tool printed and returns dictionaries and lists; nothing here starts a process
except L(run_tool), which callers hand in so that tests can answer instead.  A value that the tool does not know
(C(N/A), C([Not Supported]), an absent element, an older field name) becomes C(None), never an exception.
"""

from __future__ import annotations

import os
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

MISSING_WORDS = frozenset(
    {
        "",
        "n/a",
        "[n/a]",
        "not supported",
        "[not supported]",
        "unknown",
        "unknown error",
        "[unknown error]",
        "err!",
        "insufficient permissions",
        "[insufficient permissions]",
        "none",
        "requested functionality has been deprecated",
        "[requested functionality has been deprecated]",
        "gpu requires reset",
        "[gpu requires reset]",
    }
)

#: The fields asked for when the XML cannot be read, and what each becomes. The first name is the one asked for first,
#: the others are what other driver branches call the same thing.
QUERY_FIELDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("index", ("index",)),
    ("uuid", ("uuid", "gpu_uuid")),
    ("name", ("name", "gpu_name")),
    ("pci_bus_id", ("pci.bus_id", "gpu_bus_id")),
    ("driver_version", ("driver_version",)),
    ("memory_total_mib", ("memory.total",)),
    ("memory_used_mib", ("memory.used",)),
    ("memory_free_mib", ("memory.free",)),
    ("compute_cap", ("compute_cap",)),
    ("gen_current", ("pcie.link.gen.current",)),
    ("gen_max", ("pcie.link.gen.max",)),
    ("width_current", ("pcie.link.width.current",)),
    ("width_max", ("pcie.link.width.max",)),
    ("persistence", ("persistence_mode",)),
    ("mig", ("mig.mode.current",)),
    ("ecc", ("ecc.mode.current",)),
    ("temperature_c", ("temperature.gpu",)),
    ("power_limit_w", ("power.limit",)),
    ("event_reasons", ("clocks_event_reasons.active", "clocks_throttle_reasons.active")),
    ("ecc_uncorrected", ("ecc.errors.uncorrected.volatile.total",)),
)
APP_FIELDS = ("pid", "process_name", "used_gpu_memory", "gpu_uuid")

_INVALID_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class ToolResult:
    """How a tool ended: C(rc) None means it was not there or did not end in time, C(error) says which."""

    rc: int | None
    out: str
    err: str = ""
    error: str | None = None


Runner = Callable[[Sequence[str]], ToolResult]


def run_tool(argv: Sequence[str], timeout: float = 20.0) -> ToolResult:
    """Run C(argv) without a shell, in the C locale; at most C(timeout) seconds. Never raises."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG"))}
    env["LC_ALL"] = "C"
    try:
        done = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return ToolResult(None, "", "", f"{' '.join(argv[:2])} did not answer within {timeout:g} s")
    except OSError as exc:
        return ToolResult(None, "", "", f"{argv[0]} could not be run: {exc.strerror or exc}")
    return ToolResult(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


# ---------------------------------------------------------------------------------------------------- single values
def text(value: str | None) -> str | None:
    """The value without blanks, or None when the tool says that it does not know."""
    if value is None:
        return None
    cleaned = value.strip()
    return None if cleaned.lower() in MISSING_WORDS else cleaned


def number(value: str | None) -> float | None:
    """The leading number of C('143771 MiB'), C('16x'), C('700.00 W'); None when there is none."""
    cleaned = text(value)
    match = re.match(r"[-+]?\d+(\.\d+)?", cleaned) if cleaned else None
    return float(match.group()) if match else None


def integer(value: str | None) -> int | None:
    """Like number, as an integer; hexadecimal masks such as C(0x0000000000000001) are understood too."""
    cleaned = text(value)
    if cleaned and re.fullmatch(r"0[xX][0-9a-fA-F]+", cleaned):
        return int(cleaned, 16)
    found = number(value)
    return None if found is None else int(found)


def switch(value: str | None) -> bool | None:
    """Enabled, Disabled, On, Off, Yes, No, Active as a boolean; None when unknown."""
    cleaned = (text(value) or "").lower()
    if cleaned in ("enabled", "on", "yes", "active", "1"):
        return True
    if cleaned in ("disabled", "off", "no", "not active", "0"):
        return False
    return None


# ------------------------------------------------------------------------------------------------------ whole tool
def error_of(result: ToolResult) -> str | None:
    """Why nvidia-smi gave no answer, in one line; None when it gave one.

    The tool writes its own errors to standard output and tells them apart by status: 2 bad argument, 6 no device,
    9 driver not reachable, 18 driver and library of different versions.
    """
    if result.error:
        return result.error
    if result.rc == 0:
        return None
    lines = [line.strip() for line in (result.out + "\n" + result.err).splitlines() if line.strip()]
    words = " ".join(lines[:4]) or "no message"
    return f"{words} (status {result.rc})"


def is_version_mismatch(message: str | None) -> bool:
    """True for the message of a driver library that is newer than the module that the kernel holds."""
    return bool(message) and "driver/library version mismatch" in str(message).lower()


def library_version(message: str | None) -> str | None:
    """The version in C(NVML library version: 590.48), which goes with a mismatch on newer branches."""
    match = re.search(r"NVML library version:\s*([0-9.]+[0-9])", message or "")
    return match.group(1) if match else None


# ------------------------------------------------------------------------------------------------------------- XML
def _at(element: ET.Element | None, *paths: str) -> str | None:
    """Text at the first of C(paths) that exists below C(element)."""
    if element is None:
        return None
    for path in paths:
        found = element.find(path)
        if found is not None and found.text is not None:
            return found.text
    return None


def _ecc_uncorrected(gpu: ET.Element) -> int | None:
    """Uncorrectable errors since the driver was loaded: the sum of the newer counters, or the older total."""
    volatile = gpu.find("ecc_errors/volatile")
    if volatile is None:
        return None
    counts = [integer(child.text) for child in volatile if "uncorrectable" in child.tag]
    known = [count for count in counts if count is not None]
    return sum(known) if known else integer(_at(volatile, "double_bit/total"))


def _event_reasons(gpu: ET.Element) -> list[str]:
    """Names of the clock event (formerly throttle) reasons that are active, without the reason of being idle."""
    for tag in ("clocks_event_reasons", "clocks_throttle_reasons"):
        block = gpu.find(tag)
        if block is not None:
            names = [
                re.sub(r"^clocks_(event|throttle)_reasons?_", "", child.tag) for child in block if switch(child.text)
            ]
            return [name for name in names if name != "gpu_idle"]
    return []


def blank_gpu(index: int) -> dict[str, Any]:
    """A GPU of which nothing is known: the keys that every reader can count on."""
    return {
        "index": index,
        "minor": None,
        "name": None,
        "uuid": None,
        "memory_total_mib": None,
        "memory_used_mib": None,
        "memory_free_mib": None,
        "compute_cap": None,
        "pci_bus_id": None,
        "pcie": {"gen_current": None, "gen_max": None, "width_current": None, "width_max": None},
        "mig": False,
        "ecc": None,
        "ecc_uncorrected": None,
        "persistence": None,
        "temperature_c": None,
        "power_limit_w": None,
        "driver_version": None,
        "event_reasons": [],
        "processes": [],
        "holders": [],
    }


def _gpu_from_xml(index: int, gpu: ET.Element, driver: str | None) -> dict[str, Any]:
    record = blank_gpu(index)
    link = "pci/pci_gpu_link_info"
    record.update(
        {
            "minor": integer(_at(gpu, "minor_number")),
            "name": text(_at(gpu, "product_name")),
            "uuid": text(_at(gpu, "uuid")),
            "memory_total_mib": integer(_at(gpu, "fb_memory_usage/total")),
            "memory_used_mib": integer(_at(gpu, "fb_memory_usage/used")),
            "memory_free_mib": integer(_at(gpu, "fb_memory_usage/free")),
            "pci_bus_id": text(_at(gpu, "pci/pci_bus_id")) or text(gpu.get("id")),
            "pcie": {
                "gen_current": integer(_at(gpu, f"{link}/pcie_gen/current_link_gen")),
                "gen_max": integer(_at(gpu, f"{link}/pcie_gen/max_link_gen")),
                "width_current": integer(_at(gpu, f"{link}/link_widths/current_link_width")),
                "width_max": integer(_at(gpu, f"{link}/link_widths/max_link_width")),
            },
            "mig": switch(_at(gpu, "mig_mode/current_mig")) is True,
            "ecc": switch(_at(gpu, "ecc_mode/current_ecc")),
            "ecc_uncorrected": _ecc_uncorrected(gpu),
            "persistence": switch(_at(gpu, "persistence_mode")),
            "temperature_c": integer(_at(gpu, "temperature/gpu_temp")),
            "power_limit_w": number(
                _at(
                    gpu,
                    "gpu_power_readings/requested_power_limit",
                    "gpu_power_readings/current_power_limit",
                    "power_readings/requested_power_limit",
                    "power_readings/power_limit",
                )
            ),
            "driver_version": driver,
            "event_reasons": _event_reasons(gpu),
            "processes": [],
        }
    )
    for process in gpu.iterfind("processes/process_info"):
        pid = integer(_at(process, "pid"))
        if pid is not None:
            record["processes"].append(
                {
                    "pid": pid,
                    "command": text(_at(process, "process_name")),
                    "user": None,
                    "unit": None,
                    "memory_mib": integer(_at(process, "used_memory")),
                }
            )
    return record


def parse_xml(document: str) -> list[dict[str, Any]]:
    """GPUs in C(nvidia-smi -q -x), in the tool's own order, which is its index.

    Raises ValueError when the text is no such document.
    """
    try:
        root = ET.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", document.strip()))
    except ET.ParseError as exc:
        raise ValueError(f"nvidia-smi -q -x printed no readable XML: {exc}") from exc
    if root.tag != "nvidia_smi_log":
        raise ValueError(f"nvidia-smi -q -x printed a document of type {root.tag}, expected nvidia_smi_log")
    driver = text(_at(root, "driver_version"))
    return [_gpu_from_xml(index, gpu, driver) for index, gpu in enumerate(root.iterfind("gpu"))]


# ------------------------------------------------------------------------------------------------------------- CSV
def parse_csv(output: str, fields: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Rows of C(--format=csv), keyed by field name without its unit.

    Give C(fields) for output without a header. A comma inside the last but one column (a process name) is kept
    where the row has more cells than names: the surplus belongs to C(process_name).
    """
    lines = [line for line in output.splitlines() if line.strip()]
    if not lines:
        return []
    if fields is None:
        names = [re.sub(r"\s*\[.*\]$", "", cell.strip()) for cell in lines.pop(0).split(",")]
    else:
        names = list(fields)
    rows = []
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        surplus = len(cells) - len(names)
        if surplus > 0 and "process_name" in names:
            at = names.index("process_name")
            cells[at : at + surplus + 1] = [",".join(cells[at : at + surplus + 1])]
        if len(cells) == len(names):
            rows.append(dict(zip(names, cells, strict=True)))
    return rows


def gpus_from_csv(rows: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """The same records as L(parse_xml), from rows of C(--query-gpu); fields that were not asked for stay None."""
    gpus = []
    for position, row in enumerate(rows):
        got: dict[str, str | None] = {}
        for key, names in QUERY_FIELDS:
            got[key] = next((row[name] for name in names if name in row), None)
        index = integer(got["index"])
        record = blank_gpu(position if index is None else index)
        for key in ("name", "uuid", "pci_bus_id", "driver_version", "compute_cap"):
            record[key] = text(got[key])
        for key in ("memory_total_mib", "memory_used_mib", "memory_free_mib", "temperature_c", "ecc_uncorrected"):
            record[key] = integer(got[key])
        record["pcie"] = {key: integer(got[key]) for key in record["pcie"]}
        record["power_limit_w"] = number(got["power_limit_w"])
        record["mig"] = switch(got["mig"]) is True
        record["ecc"] = switch(got["ecc"])
        record["persistence"] = switch(got["persistence"])
        gpus.append(record)
    return gpus


def processes_from_csv(rows: Iterable[Mapping[str, str]]) -> dict[str, list[dict[str, Any]]]:
    """Processes of C(--query-compute-apps) by the UUID of their GPU."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        pid = integer(row.get("pid"))
        if pid is None:
            continue
        memory = row.get("used_gpu_memory", row.get("used_memory"))
        found.setdefault(row.get("gpu_uuid", ""), []).append(
            {
                "pid": pid,
                "command": text(row.get("process_name", row.get("name"))),
                "user": None,
                "unit": None,
                "memory_mib": integer(memory),
            }
        )
    return found


def query_csv(
    run: Runner, tool: str, option: str, fields: Sequence[Sequence[str]]
) -> tuple[list[dict[str, str]], str | None]:
    """Ask for C(fields), each a list of names for one thing, and leave out what this driver branch does not know.

    The real tool refuses the whole query for one unknown field and names it; so drop or rename that one and ask again.
    Returns rows and an error.
    """
    wanted = [list(names) for names in fields]
    while wanted:
        names = [group[0] for group in wanted]
        result = run([tool, f"--{option}={','.join(names)}", "--format=csv,noheader,nounits"])
        if result.rc == 0:
            return parse_csv(result.out, names), None
        refused = _INVALID_FIELD.search(result.out + result.err)
        position = names.index(refused.group(1)) if refused and refused.group(1) in names else None
        if position is None:
            return [], error_of(result)
        wanted[position].pop(0)
        wanted = [group for group in wanted if group]
    return [], f"nvidia-smi knows none of the fields asked for with --{option}"


# -------------------------------------------------------------------------------------------------------- topology
def parse_matrix(output: str) -> list[list[str]]:
    """The GPU by GPU part of C(topo -m) or C(topo -p2p r), rows and columns in index order; [] when there is none."""
    lines = [_ANSI.sub("", line) for line in output.splitlines()]
    columns: list[int] = []
    matrix: list[list[str]] = []
    for line in lines:
        # "CPU Affinity" and its like hold blanks: cells are parted by tabs where there are tabs, else by two blanks.
        cells = [cell.strip() for cell in (line.split("\t") if "\t" in line else re.split(r"\s{2,}", line.strip()))]
        if not columns:
            heads = [cell for cell in cells if cell]
            if heads and re.fullmatch(r"GPU\d+", heads[0]) and not any(cell == "X" for cell in heads):
                columns = [place for place, cell in enumerate(heads) if re.fullmatch(r"GPU\d+", cell)]
            continue
        if cells and re.fullmatch(r"GPU\d+", cells[0]):
            values = [cell for cell in cells[1:] if cell]
            if len(values) >= len(columns):
                matrix.append([values[place] for place in columns])
    return matrix if matrix and len(matrix) == len(columns) else []


def topology(matrix: Sequence[Sequence[str]], count: int) -> dict[str, Any]:
    """Which links join the GPUs: C(nvlink) when any pair has one (C(partial) when not every pair), C(pcie),
    C(none) below two GPUs, C(unknown) when the matrix is missing."""
    if count < 2:
        return {"topology": "none", "partial": False}
    pairs = [cell for row, cells in enumerate(matrix) for column, cell in enumerate(cells) if row != column]
    if not pairs or len(matrix) < count:
        return {"topology": "unknown", "partial": False}
    joined = [bool(re.fullmatch(r"NV\d+", cell)) for cell in pairs]
    if any(joined):
        return {"topology": "nvlink", "partial": not all(joined)}
    return {"topology": "pcie", "partial": False}


# ------------------------------------------------------------------------------------------------------ everything
def inspect(tool: str | None, run: Runner) -> dict[str, Any]:
    """Everything the collection wants from nvidia-smi, its four questions asked side by side.

    C(tool) is the path of nvidia-smi, or None when the host has none. Returns C(gpus), C(nvidia_smi), C(links) and
    C(notes).
    """
    notes: list[str] = []
    if tool is None:
        return {
            "gpus": [],
            "nvidia_smi": {
                "present": False,
                "path": None,
                "error": "nvidia-smi is not on this host",
                "mismatch": False,
            },
            "links": {"topology": "unknown", "partial": False, "matrix": [], "p2p": []},
            "notes": ["gpus: nvidia-smi is not on this host"],
        }
    with ThreadPoolExecutor(max_workers=4) as pool:
        xml_job = pool.submit(run, [tool, "-q", "-x"])
        cap_job = pool.submit(query_csv, run, tool, "query-gpu", [["uuid", "gpu_uuid"], ["compute_cap"]])
        topo_job = pool.submit(run, [tool, "topo", "-m"])
        p2p_job = pool.submit(run, [tool, "topo", "-p2p", "r"])
        answer, (caps, cap_error), topo, p2p = xml_job.result(), cap_job.result(), topo_job.result(), p2p_job.result()

    error = error_of(answer)
    gpus: list[dict[str, Any]] = []
    if error is None:
        try:
            gpus = parse_xml(answer.out)
        except ValueError as exc:
            notes.append(f"gpus: {exc}; asked for the fields one by one instead")
            gpus, error = _by_fields(run, tool)
    if error is not None and "no devices were found" in error.lower():
        error = None
    if error is not None:
        notes.append(f"gpus: {error}")
    by_uuid = {row.get("uuid", row.get("gpu_uuid")): row.get("compute_cap") for row in caps}
    for gpu in gpus:
        gpu["compute_cap"] = gpu["compute_cap"] or text(by_uuid.get(gpu["uuid"]))
    if gpus and all(gpu["compute_cap"] is None for gpu in gpus):
        notes.append(f"gpus.compute_cap: {cap_error or 'this driver does not report it'}")
    matrix = parse_matrix(topo.out) if topo.rc == 0 else []
    peers = parse_matrix(p2p.out) if p2p.rc == 0 else []
    if len(gpus) > 1:
        if not matrix:
            notes.append(f"links.matrix: {error_of(topo) or 'nvidia-smi topo -m printed no matrix'}")
        if not peers:
            notes.append(f"links.p2p: {error_of(p2p) or 'nvidia-smi topo -p2p r printed no matrix'}")
    return {
        "gpus": gpus,
        "nvidia_smi": {"present": True, "path": tool, "error": error, "mismatch": is_version_mismatch(error)},
        "links": {**topology(matrix, len(gpus)), "matrix": matrix, "p2p": peers},
        "notes": notes,
    }


def usage(tool: str, run: Runner) -> tuple[list[dict[str, Any]], str | None]:
    """The GPUs with their memory and processes, and nothing else, for who looks often: one question instead of four.

    Returns the records of L(parse_xml) and an error; a host whose driver finds no GPU has none and no error.
    """
    answer = run([tool, "-q", "-x"])
    error = error_of(answer)
    if error is not None:
        return [], None if "no devices were found" in error.lower() else error
    try:
        return parse_xml(answer.out), None
    except ValueError:
        return _by_fields(run, tool)


def _by_fields(run: Runner, tool: str) -> tuple[list[dict[str, Any]], str | None]:
    rows, error = query_csv(run, tool, "query-gpu", [list(names) for _key, names in QUERY_FIELDS])
    gpus = gpus_from_csv(rows)
    if gpus:
        apps, _ignored = query_csv(run, tool, "query-compute-apps", [[name] for name in APP_FIELDS])
        processes = processes_from_csv(apps)
        for gpu in gpus:
            gpu["processes"] = processes.get(gpu["uuid"] or "", [])
    return gpus, error
