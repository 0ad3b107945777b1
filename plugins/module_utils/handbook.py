# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""What the handbook shows, as tables of text: made from the plan, the host as it was read, the release's manifest, the patch
series, the preflight's report and the measurements. The template only lays it out.

Nothing is computed that the plan decides, and no number is made up: a benchmark cell is the record's, a measured one, or `-`.
What changes from one look at a host to the next (free memory, temperature) is left out, so that a second rendering is the
same text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import benchmark as bench
from . import documented

NOT_ON_RECORD = "-"
#: Packages that decide what serves, in the order of the table.
PACKAGES = (
    "sglang", "torch", "sgl-kernel", "flashinfer-python", "flashinfer-cubin", "nvidia-nccl-cu13", "nvidia-cudnn-cu13",
    "transformers", "triton",
)  # fmt: skip
Rows = list[list[str]]


def cell(value: Any, code: bool = True) -> str:
    """A value as a cell of a Markdown table."""
    if value is None or value == "" or value == []:
        return "not set"
    if isinstance(value, bool):
        text = "on" if value else "off"
    elif isinstance(value, (list, tuple)):
        text = " ".join(str(item) for item in value)
    else:
        text = str(value)
    text = text.replace("|", "\\|").replace("\n", " ")
    return f"`{text}`" if code else text


def words(text: Any) -> str:
    """Running text in a cell."""
    return str(text).replace("|", "\\|").replace("\n", " ").strip()


def span(seconds: float) -> str:
    """570 -> `9 min 30 s`, 900 -> `15 min`, 20.9 -> `21 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return " ".join([*([f"{minutes} min"] if minutes else []), *([f"{rest} s"] if rest or not minutes else [])])


def number(value: Any, digits: int = 1) -> str:
    """A measured number; what was not measured is `-`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return NOT_ON_RECORD
    return f"{value:.{digits}f}"


def hardware(host: Mapping[str, Any]) -> Rows:
    """The host as it was read."""
    rows: Rows = []
    kinds: dict[tuple[Any, ...], int] = {}
    for gpu in host.get("gpus") or []:
        key = (gpu.get("name"), gpu.get("memory_total_mib"), gpu.get("compute_cap"))
        kinds[key] = kinds.get(key, 0) + 1
    for (name, memory, capability), count in kinds.items():
        rows.append(["GPUs", f"{count} x {name}, {memory} MiB each, compute capability {capability}"])
    if not kinds:
        rows.append(["GPUs", "none seen"])
    links = host.get("links") or {}
    topology = links.get("topology") or "unknown"
    matrix = links.get("matrix") or []
    kinds_of_links = sorted({str(entry) for row in matrix for entry in row if str(entry) != "X"})
    rows.append(
        ["links", topology + (f" ({', '.join(kinds_of_links)} in `nvidia-smi topo -m`)" if kinds_of_links else "")]
    )
    pcie = sorted(
        {
            f"gen {p.get('gen_max')} x{p.get('width_max')}"
            for p in (gpu.get("pcie") or {} for gpu in host.get("gpus") or [])
            if p.get("gen_max")
        }
    )
    if pcie:
        rows.append(["PCIe of each GPU, at most", ", ".join(pcie)])
    driver = host.get("driver") or {}
    installed = f"{driver['installed']} installed" if driver.get("installed") else "no driver package on this host"
    flavour = f", {driver['flavour']} module" if driver.get("flavour") else ""
    rows.append(["driver", f"{driver.get('loaded') or 'unknown'} loaded, {installed}{flavour}"])
    cpus = host.get("cpus") or {}
    rows.append(
        ["CPU", f"{cpus.get('count', 'unknown')} processors{', ' + cpus['model'] if cpus.get('model') else ''}"]
    )
    nodes = (host.get("numa") or {}).get("nodes")
    if nodes:
        rows.append(["NUMA nodes", str(nodes)])
    memory = host.get("memory") or {}
    if memory.get("total_mib"):
        rows.append(["main memory", f"{memory['total_mib'] / 1024:.0f} GiB"])
    if memory.get("shm_mib"):
        rows.append(["`/dev/shm`", f"{memory['shm_mib'] / 1024:.0f} GiB"])
    for disk in host.get("disks") or []:
        if disk.get("total_bytes"):
            rows.append(
                [f"file system of `{disk['path']}`", f"{disk['total_bytes'] / 1e9:.0f} GB ({disk.get('fstype')})"]
            )
    rows.append(["kernel", str(host.get("kernel") or "unknown")])
    system = host.get("os") or {}
    name = system.get("pretty_name") or system.get("name") or "unknown"
    inside = f", inside {host['container']}" if host.get("container") else ""
    rows.append(["system", f"{name}, process 1 is {host.get('init_system') or 'unknown'}{inside}"])
    return [[words(left), words(right)] for left, right in rows]


def software(host: Mapping[str, Any], manifest: Mapping[str, Any]) -> Rows:
    """What is installed, beside what the record names."""
    record = documented.record()["software"]
    packages = manifest.get("packages") or {}
    rows: Rows = []
    for name in PACKAGES:
        if name in packages or name in record:
            # A whole manifest names every package; a part of one says nothing of the others.
            absent = "not installed" if manifest.get("id") else NOT_ON_RECORD
            rows.append([f"`{name}`", str(packages.get(name) or absent), str(record.get(name, NOT_ON_RECORD))])
    toolkits = [f"{entry['version'] or '?'} at `{entry['path']}`" for entry in host.get("toolkits") or []]
    none = "none seen" if "toolkits" in host else NOT_ON_RECORD
    rows.append(["CUDA toolkit", ", ".join(toolkits) or none, record["CUDA toolkit"]])
    driver = (host.get("driver") or {}).get("loaded")
    rows.append(["NVIDIA driver", str(driver or "unknown"), record["NVIDIA driver"]])
    rows.append(["Python", str(manifest.get("python_version") or "unknown"), record["Python"]])
    return rows


def _here(deviation: Mapping[str, Any]) -> str:
    """The value of a deviation; sitecustomize may hold what the unit does not."""
    absent = deviation["actual"] is None and str(deviation["setting"]).startswith("NCCL_")
    return "not in the unit" if absent else cell(deviation["actual"])


def beyond_settings(
    plan: Mapping[str, Any], manifest: Mapping[str, Any], series: Sequence[Mapping[str, Any]], path: str
) -> Rows:
    """Deviations from the record that are no settings of the plan: where things lie, how the engine came there, its patches."""
    record = documented.record()
    places: Mapping[str, str] = record["places"]
    rows: Rows = []

    def row(what: str, was: str, here: str, reason: str, variable: str) -> None:
        rows.append([what, was, here, words(reason), f"`{variable}`"])

    python = str(plan["command"][0])
    released = "/releases/" in python or "/current/" in python
    venv = posixpath.dirname(posixpath.dirname(python))
    if venv != places["virtual environment"]:
        reason = (
            "each release has its own, beside the one that serves: a rollback has something to go back to"
            if released
            else "the interpreter that the inventory names"
        )
        variable = "sglang_root" if released else "deployment_python"
        row("virtual environment", cell(places["virtual environment"]), cell(venv), reason, variable)
    version = (manifest.get("packages") or {}).get("sglang")
    if version:
        steps = (manifest.get("spec") or {}).get("steps") or []
        tree = next((s["git"] for s in steps if str((s.get("git") or {}).get("package")).lower() == "sglang"), None)
        addressed = any(re.match(r"sglang\s*@", str(r)) for step in steps for r in step.get("requirements") or [])
        if tree or addressed:
            here = f"package {version}" + (f", built from {tree['url']} at {tree['ref']}" if tree else "")
            reason = "what serves is the package that was built, not a tree that somebody edits"
        else:
            here = f"package {version}" + (", a wheel" if steps else "")
            reason = (
                "the patches are made for the published wheel, whose bytes their checksums prove; no record proves that the commit "
                "holds the same files"
            )
        row("engine", f"source tree {cell(places['source tree'])}", words(here), reason, "sglang_steps")
    if path and path != places["handbook"]:
        reason = "it lies with the rest of the service's state, so that two services on a host have one each"
        row("handbook", cell(places["handbook"]), cell(path), reason, "runbook_path")
    return rows + _environment(plan) + _patches(plan, series, released)


def _environment(plan: Mapping[str, Any]) -> Rows:
    """Variables that the record sets without saying to what: those that cannot be the same here, because they do not hold the
    documented environment's programs or the documented toolkit's libraries."""
    notes = {str(note["setting"]): str(note["reason"]) for note in plan["notes"]}
    gone = {str(d["setting"]): str(d["reason"]) for d in plan["deviations"]}
    variables = {"PATH": "deployment_python", "LD_LIBRARY_PATH": "deployment_cuda_home"}
    rows: Rows = []
    for name, held in documented.record()["env_without_value"].items():
        value = str(plan["env"].get(name) or "")
        if not any(entry == held or entry.startswith(f"{held}/") for entry in value.split(":")):
            reason = notes.get(name) or gone.get("CUDA_HOME") or "this plan does not set it"
            was = "set, to a value that is not on record"
            rows.append([f"`{name}`", was, cell(value), words(reason), f"`{variables[name]}`"])
    return rows


def _patches(plan: Mapping[str, Any], series: Sequence[Mapping[str, Any]], released: bool) -> Rows:
    """The documented patches that are not carried here, and those that are carried and were not documented."""
    purposes: Mapping[str, str] = documented.record()["patches"]
    carried = list(plan["patches"])
    if not carried and not released:
        return [
            ["patches", f"{len(purposes)}", "not known", "no release of this collection serves", "`deployment_python`"]
        ]
    known = [patch for definition in series for patch in definition.get("patches") or []]
    needed = {
        str(name): str(patch["id"]) for patch in known for name in patch.get("requires") or [] if patch["id"] in carried
    }
    titles = {str(patch["id"]): str(patch.get("title") or "") for patch in known}
    left_out = "`sglang_patches` leaves it out"
    rows = [
        [f"patch `{name}`", words(purpose), "not carried", left_out, "`sglang_patches`"]
        for name, purpose in purposes.items()
        if name not in carried
    ]
    for name in (*(name for name in titles if name in carried), *(name for name in carried if name not in titles)):
        if name not in purposes:
            reason = titles.get(name) or "not in a series that this play knows"
            reason += f"; `{needed[name]}` needs it" if name in needed else ""
            rows.append([f"patch `{name}`", "not among its patches", "carried", words(reason), "`sglang_patches`"])
    return rows


def benchmark(measured: Mapping[str, Any] | None, plan: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The table of the record with the last measurement beside it, that measurement in full, and what has to be said about it."""
    record = documented.record()["benchmark"]
    levels: list[int] = list(record["levels"])
    rows: Rows = []
    for row in record["rows"]:
        title = f"**{row['title']}**" if row["profile"] == plan["profile"] else row["title"]
        rows.append([title, "record", *(number(value) for value in row["output_tok_s"])])
    shown: dict[str, Any] = {
        "method": record["method"],
        "header": ["configuration", "source", *(f"C={level}" for level in levels)],
        "rows": rows,
        "detail_header": [
            "concurrency", "requests", "failed", "output tok/s", "TTFT p50 ms", "TTFT p99 ms", "inter-token p50 ms",
            "inter-token p99 ms", "acceptance length",
        ],
        "detail": [],
        "remarks": [],
        "note": "Nothing was measured on this host yet: `playbooks/benchmark.yml` measures it.",
    }  # fmt: skip
    if not measured:
        return shown
    if measured.get("schema") != bench.SCHEMA:
        shown["note"] = (
            f"The last measurement has the schema {measured.get('schema')}, this handbook reads {bench.SCHEMA}: measure again with "
            "`playbooks/benchmark.yml`."
        )
        return shown
    try:
        return shown | _measured(measured, plan, name, record, rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # The file lies in the service's own folder. A server that serves needs its handbook all the same.
        why = words(f"{type(error).__name__}: {error}")
        shown["note"] = (
            f"The last measurement cannot be read ({why}), expected a result of `playbooks/benchmark.yml`: measure again."
        )
        return shown


def _measured(
    measured: Mapping[str, Any], plan: Mapping[str, Any], name: str, record: Mapping[str, Any], rows: Rows
) -> dict[str, Any]:
    """What a measurement adds to the table of the record."""
    by_level = {int(level["concurrency"]): level for level in measured["levels"]}
    remark = bench.record_remark(measured, record)
    source = f"measured {str(measured['when'])[:10]}" + (f", **{bench.OTHER_METHOD}**" if remark else "")
    rates = [_rate(by_level[level]) if level in by_level else NOT_ON_RECORD for level in record["levels"]]
    own = [f"{measured['profile']} on {name}", source, *rates]
    detail: Rows = []
    for level, found in sorted(by_level.items()):
        ttft, itl = found["ttft_ms"], found["itl_ms"]
        detail.append(
            [
                str(level),
                str(found["requests"]),
                f"**{found['failed']}**" if found["failed"] else "0",
                bench.rate(found),
                number(ttft["p50"]),
                number(ttft["p99"]),
                number(itl["p50"]),
                number(itl["p99"]),
                number(found["accept_length"], 2),
            ]
        )
    note = (
        f"Measured {measured['when']} with the profile `{measured['profile']}`, SGLang {measured['engine_version']}, by "
        f"{bench.how(measured)}{'; ± is half the spread of the runs' if measured['method']['repeats'] > 1 else ''}."
    )
    if measured["plan_hash"] != plan["hash"]:
        note += (
            f" **That was another plan** (`{str(measured['plan_hash'])[:12]}`): these numbers are not those of what serves now. "
            "Measure again with `playbooks/benchmark.yml`."
        )
    remarks = [words(text) for text in ([remark] if remark else []) + bench.remarks(measured)]
    return {"rows": [*rows, own], "detail": detail, "note": note, "remarks": remarks}


def _rate(level: Mapping[str, Any]) -> str:
    """A measured throughput; where requests failed, it says so itself."""
    return bench.rate(level) + (f" ({level['failed']} of {level['requests']} failed)" if level["failed"] else "")


def settings(plan: Mapping[str, Any]) -> dict[str, Rows]:
    """Every setting with its value, reason and source: flags, NCCL, other environment, unit, what is left to the engine."""
    groups: dict[str, Rows] = {"flags": [], "nccl": [], "environment": [], "unit": [], "engine": []}
    for note in plan["notes"]:
        name = str(note["setting"])
        kind = (
            "flags" if name.startswith("--")
            else "unit" if name.startswith("unit.")
            else "engine" if name.startswith("engine.")
            else "nccl" if name.startswith("NCCL_")
            else "environment"
        )  # fmt: skip
        shown = name.removeprefix("unit.").removeprefix("engine.")
        groups[kind].append([f"`{shown}`", cell(note["value"]), words(note["reason"]), words(note["source"])])
    return groups


def patch_rows(plan: Mapping[str, Any], series: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> Rows:
    """The patches that the engine carries, with what their series says of each."""
    known = {
        str(patch["id"]): {**patch, "package": definition.get("package")}
        for definition in series
        for patch in definition.get("patches") or []
    }
    order = [name for name in known if name in plan["patches"]]
    rows: Rows = []
    for name in [*order, *(name for name in plan["patches"] if name not in known)]:
        patch = known.get(name) or {}
        upstream = patch.get("upstream") or {}
        retire = upstream.get("fixed_in")
        files = sorted(
            path for path, entry in (manifest.get("files") or {}).items() if name in (entry.get("patches") or [])
        )
        rows.append(
            [
                f"`{name}`",
                words(patch.get("title") or "not in a series that this play knows"),
                words(upstream.get("ref") or "none"),
                f"{patch.get('package')} {retire}" if retire else "until upstream has it",
                ", ".join(f"`{path}`" for path in files) or NOT_ON_RECORD,
            ]
        )
    return rows


def isolation(host: Mapping[str, Any]) -> list[str]:
    """What the host's settings mean for DMA isolation, in sentences."""
    found = []
    state = (host.get("iommu") or {}).get("state")
    if state == "off":
        found.append(
            "The IOMMU is off: every device can read and write all of the host's memory. This host must belong to one "
            "tenant; no virtual machine and no device may be handed to anybody else on it."
        )
    elif state == "passthrough":
        found.append(
            "The IOMMU passes the host's devices through: their DMA is not confined. This host must belong to one tenant."
        )
    elif state == "translated":
        found.append(
            "The IOMMU translates: DMA is confined, and peer-to-peer copies between GPUs over PCIe may be slower or hang."
        )
    else:
        found.append("Whether the IOMMU confines DMA could not be seen on this host.")
    acs = host.get("acs") or {}
    if acs.get("readable") and acs.get("bridges"):
        redirecting = acs.get("redirecting") or []
        found.append(
            f"ACS redirects peer traffic on {len(redirecting)} bridge(s) above the GPUs: it goes through the root complex."
            if redirecting
            else "ACS does not redirect peer traffic: GPUs reach each other directly, and nothing above them checks that."
        )
    return found


def view(
    plan: Mapping[str, Any],
    host: Mapping[str, Any],
    name: str = "",
    manifest: Mapping[str, Any] | None = None,
    series: Sequence[Mapping[str, Any]] = (),
    measured: Mapping[str, Any] | None = None,
    last_start: Mapping[str, Any] | None = None,
    report: Mapping[str, Any] | None = None,
    path: str = "",
) -> dict[str, Any]:
    """Everything that the template lays out."""
    known = manifest or {}
    unit = plan["unit"]
    began = (last_start or {}).get("seconds_to_ready")
    budget = float(unit["timeout_start_sec"])
    preflight = report or {}
    return {
        "unit": f"{unit['name']}.service",
        "hardware": hardware(host),
        "software": software(host, known),
        "benchmark": benchmark(measured, plan, name),
        "settings": settings(plan),
        "patches": patch_rows(plan, series, known),
        "checksums": [
            [f"`{path}`", f"`{entry['sha256']}`"] for path, entry in sorted((known.get("files") or {}).items())
        ],
        "deviations": beyond_settings(plan, known, series, path)
        + [
            [f"`{d['setting']}`", cell(d["documented"]), _here(d), words(d["reason"]), f"`{d['take_back']}`"]
            for d in plan["deviations"]
        ],
        "preflight": {
            "known": bool(report),
            "error": words(preflight.get("error") or ""),
            "failures": [{"id": e["id"], "message": words(e["message"])} for e in preflight.get("failures") or []],
            "waived": [[f"`{e['id']}`", words(e["title"]), words(e["reason"])] for e in preflight.get("waived") or []],
            # What was found changes from run to run, and the handbook must not. With a failure there is no such handbook: `site.yml`
            # refuses, and what renders it all the same has to say what is wrong now.
            "warnings": [
                [f"`{e['id']}`", words(e["title"]), words(e["expected"]), words(e["do"])]
                for e in preflight.get("warnings") or []
            ],
        },
        "isolation": isolation(host),
        "start": {
            "budget": span(budget),
            "last": span(float(began)) if began is not None else "",
            "loop": span(float(unit["start_limit_interval_sec"])),
        },
        "release": plan["command"][0].partition("/venv/bin/")[0] if "/releases/" in plan["command"][0] else "",
        "root": plan["command"][0].partition("/releases/")[0] if "/releases/" in plan["command"][0] else "",
        "hardening_off": [[f"`{e['directive']}`", words(e["reason"])] for e in plan["hardening_off"]],
    }
