# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a Linux host says about itself, read from files, as plain data.

No tool is started but the Python interpreters whose sitecustomize is asked for. Each function takes L(Roots), so that
tests feed it made-up trees, and appends to C(notes) what could not be read and why; it never raises for a host that
is different from what was expected.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import pwd
import re
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuserve.sglang.plugins.module_utils.gpu import Runner

#: What an unlimited resource limit becomes, so that "at least" needs no special case.
UNLIMITED = 2**63 - 1
MIB = 1024 * 1024
#: Longest command line returned, in characters.
COMMAND_LENGTH = 240


@dataclass(frozen=True)
class Roots:
    """Where the kernel's trees and the files of the system are."""

    proc: str = "/proc"
    sys: str = "/sys"
    root: str = "/"
    dev: str = "/dev"

    def file(self, path: str) -> str:
        """An absolute path of the host, below the given root."""
        return os.path.join(self.root, path.lstrip("/"))


def read(path: str, limit: int = 16 * MIB) -> str | None:
    """The text of a file, None when it cannot be read."""
    try:
        with open(path, "rb") as handle:
            return handle.read(limit).decode("utf-8", "replace")
    except OSError:
        return None


def _line(path: str) -> str | None:
    content = read(path, 65536)
    return content.strip() if content is not None else None


def _listing(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


# ------------------------------------------------------------------------------------------------------- processes
_SECRET_OPTION = re.compile(
    r"^--?[\w-]*(api[-_]?key|token|password|passwd|secret|credential|authorization)[\w-]*$", re.IGNORECASE
)
_SECRET_INLINE = re.compile(
    r"(?<!\S)(--?[\w-]*(?:api[-_]?key|token|password|passwd|secret|credential)[\w-]*)\s+[^\s-]\S*", re.IGNORECASE
)
_SECRET_PAIR = re.compile(
    r'([\w-]*(?:api[-_]?key|token|password|passwd|secret|credential|authorization)[\w-]*["\']?\s*[=:]\s*["\']?)'
    r'(?:bearer\s+|basic\s+)?[^\s"\',}]+',
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|eyJ[\w-]{10,}\.[\w.-]+)"
)
_SECRET_URL = re.compile(r"(\w+://[^/\s:@]*:)[^/\s@]+(@)")
#: Options whose names look secret but whose values are not.
_HARMLESS = re.compile(
    r"^--?(max-|num-|min-|chunked-|schedule-|speculative-|stream-|tokenizer|.*-tokens$|token-(usage|step)).*",
    re.IGNORECASE,
)
HIDDEN = "********"


def scrub(argv: Sequence[str]) -> list[str]:
    """The command line with every value hidden that a log must not show: keys, tokens, passwords, URL credentials."""
    cleaned: list[str] = []
    hide_next = False
    for word in argv:
        if hide_next:
            cleaned.append(HIDDEN)
            hide_next = False
            continue
        name = word.split("=", 1)[0]
        if name.startswith("-") and _HARMLESS.match(name):
            cleaned.append(word)
            continue
        if _SECRET_OPTION.match(name):
            hide_next = "=" not in word
            cleaned.append(name if hide_next else f"{name}={HIDDEN}")
            continue
        word = _SECRET_PAIR.sub(lambda match: match.group(1) + HIDDEN, word)
        word = _SECRET_VALUE.sub(HIDDEN, word)
        word = _SECRET_URL.sub(rf"\1{HIDDEN}\2", word)
        if " " in word:
            # A whole command as one word, as `sh -c` takes it.
            word = _SECRET_INLINE.sub(
                lambda m: m.group() if _HARMLESS.match(m.group(1)) else f"{m.group(1)} {HIDDEN}", word
            )
        cleaned.append(word)
    return cleaned


def argv_of(pid: int, roots: Roots) -> list[str]:
    """The arguments of a process; [] for kernel threads, for processes that are gone or not readable."""
    raw = read(os.path.join(roots.proc, str(pid), "cmdline"), 256 * 1024)
    if not raw:
        return []
    words = raw.rstrip("\0").split("\0")
    # A process that renamed itself (setproctitle) has one word, padded with blanks.
    return [word.strip() if len(words) == 1 else word for word in words]


def command_of(pid: int, roots: Roots) -> str | None:
    """The command line for people: secrets hidden, cut to COMMAND_LENGTH; the bare name when there is no more."""
    words = " ".join(scrub(argv_of(pid, roots)))
    if not words:
        name = _line(os.path.join(roots.proc, str(pid), "comm"))
        return f"[{name}]" if name else None
    return words if len(words) <= COMMAND_LENGTH else words[: COMMAND_LENGTH - 3] + "..."


def unit_in_cgroup(content: str) -> str | None:
    """The systemd service in the text of C(/proc/PID/cgroup), of either cgroup version; None for a login session,
    a bare scope, or a host without systemd. A user's service manager (C(user@1000.service)) is no service."""
    lines = [line.split(":", 2) for line in content.splitlines() if line.count(":") >= 2]
    lines.sort(key=lambda parts: 0 if parts[1] == "" else 1 if parts[1] == "name=systemd" else 2)
    for parts in lines:
        services = [part for part in parts[2].split("/") if part.endswith(".service") and not part.startswith("user@")]
        if services:
            return services[-1]
    return None


def unit_of(pid: int, roots: Roots) -> str | None:
    """The systemd service that a process belongs to, or None."""
    content = read(os.path.join(roots.proc, str(pid), "cgroup"), 65536)
    return unit_in_cgroup(content) if content else None


def _status(pid: int | str, roots: Roots) -> dict[str, str]:
    content = read(os.path.join(roots.proc, str(pid), "status"), 65536) or ""
    return {key: value.strip() for key, _colon, value in (line.partition(":") for line in content.splitlines())}


def user_of(pid: int, roots: Roots) -> str | None:
    """The name (or the number) of the effective user of a process, None when it is gone."""
    words = _status(pid, roots).get("Uid", "").split()
    if len(words) < 2:
        return None
    try:
        return pwd.getpwuid(int(words[1])).pw_name
    except (KeyError, ValueError):
        return words[1]


def pids(roots: Roots) -> list[int]:
    """All processes, in the order of their numbers."""
    return sorted(int(name) for name in _listing(roots.proc) if name.isdigit())


def describe_processes(processes: Iterable[dict[str, Any]], roots: Roots) -> None:
    """Complete records that hold a C(pid) (and what the GPU driver calls the command) with user, unit, command line."""
    for process in processes:
        process["user"] = user_of(process["pid"], roots)
        process["unit"] = unit_of(process["pid"], roots)
        process["command"] = command_of(process["pid"], roots) or process.get("command")


# ----------------------------------------------------------------------------------------------------------- ports
def _address(raw: str) -> str:
    data = bytes.fromhex(raw)
    words = struct.unpack(f"<{len(data) // 4}I", data)
    packed = struct.pack(f">{len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def _listeners(roots: Roots) -> list[tuple[int, str, str]]:
    """(port, address, inode) of every TCP socket that listens."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in (read(os.path.join(roots.proc, "net", table)) or "").splitlines()[1:]:
            cells = line.split()
            if len(cells) < 10 or cells[3] != "0A":
                continue
            try:
                host, port = cells[1].split(":")
                found.append((int(port, 16), _address(host), cells[9]))
            except (ValueError, struct.error, OSError):
                continue
    return found


def open_files(roots: Roots, notes: list[str]) -> dict[str, list[int]]:
    """Which processes hold which socket (C(socket:[inode])) or NVIDIA device file open."""
    owners: dict[str, list[int]] = {}
    hidden = 0
    for pid in pids(roots):
        folder = os.path.join(roots.proc, str(pid), "fd")
        try:
            names = os.listdir(folder)
        except PermissionError:
            hidden += 1
            continue
        except OSError:
            continue
        for name in names:
            try:
                target = os.readlink(os.path.join(folder, name))
            except OSError:
                continue
            if target.startswith(("socket:[", "/dev/nvidia")):
                holders = owners.setdefault(target, [])
                if pid not in holders:
                    holders.append(pid)
    if hidden:
        notes.append(f"ports, holders: the open files of {hidden} processes of other users need root to be read")
    return owners


def ports(roots: Roots, notes: list[str], owners: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """TCP listeners with the process that holds each (the first, where several share one), C(pid) None where that
    process cannot be seen. C(owners) comes from open_files."""
    if read(os.path.join(roots.proc, "net", "tcp"), 16) is None:
        notes.append("ports: /proc/net/tcp cannot be read")
    result = []
    for port, address, inode in _listeners(roots):
        holders = owners.get(f"socket:[{inode}]")
        owner = holders[0] if holders else None
        result.append(
            {
                "port": port,
                "address": address,
                "pid": owner,
                "command": command_of(owner, roots) if owner else None,
                "unit": unit_of(owner, roots) if owner else None,
            }
        )
    return sorted(result, key=lambda entry: (entry["port"], entry["address"]))


def device_holders(minor: int | None, roots: Roots, owners: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Processes that have C(/dev/nvidiaN) open. Any client of the driver shows here, a monitor as well as an engine."""
    return [
        {"pid": pid, "command": command_of(pid, roots), "unit": unit_of(pid, roots)}
        for pid in owners.get(f"/dev/nvidia{minor}", [])
    ]


# --------------------------------------------------------------------------------------------------------- servers
DEFAULT_PORTS = {"sglang": 30000, "vllm": 8000}


def engine_of(argv: Sequence[str]) -> tuple[str, bool] | None:
    """(C(sglang) or C(vllm), is it a worker that only a server starts) for the command line of an inference server."""
    if not argv:
        return None
    title = argv[0].lower()
    for engine in ("sglang", "vllm"):
        if title.startswith(f"{engine}::"):
            return engine, not title.startswith(f"{engine}::http")
    names = [os.path.basename(word) for word in argv[:8]]
    for position, word in enumerate(argv[:8]):
        if word in ("sglang.launch_server", "sglang.srt.server") and position and argv[position - 1] == "-m":
            return "sglang", False
        if word.endswith("sglang/launch_server.py"):
            return "sglang", False
        if word == "vllm.entrypoints.openai.api_server" and position and argv[position - 1] == "-m":
            return "vllm", False
        if names[position] in ("sglang", "vllm") and position + 1 < len(argv) and argv[position + 1] == "serve":
            return names[position], False
    return None


def _port_argument(argv: Sequence[str]) -> int | None:
    for position, word in enumerate(argv):
        value = None
        if word == "--port" and position + 1 < len(argv):
            value = argv[position + 1]
        elif word.startswith("--port="):
            value = word[7:]
        if value is not None and value.isdigit():
            return int(value)
    return None


def servers(roots: Roots, listening: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Inference servers that run, one record a server, its workers folded in; a worker whose server is gone is one by
    itself (C(orphan)), since it still holds the GPU."""
    engines: dict[int, tuple[str, bool]] = {}
    parents: dict[int, int] = {}
    own = os.getpid()
    for pid in pids(roots):
        kind = engine_of(argv_of(pid, roots)) if pid != own else None
        if kind is not None:
            engines[pid] = kind
    for pid in engines:
        above = pid
        while above > 1 and above not in parents:
            raw = _status(above, roots).get("PPid", "0")
            parents[above] = int(raw) if raw.isdigit() else 0
            above = parents[above]

    def top(pid: int) -> int:
        best, above = pid, parents.get(pid, 0)
        while above > 1:
            if above in engines:
                best = above
            above = parents.get(above, 0)
        return best

    families: dict[int, list[int]] = {}
    for pid in engines:
        families.setdefault(top(pid), []).append(pid)
    found = []
    for leader, members in sorted(families.items()):
        engine, worker = engines[leader]
        held = sorted({entry["port"] for entry in listening if entry["pid"] in members})
        asked = _port_argument(argv_of(leader, roots))
        port = asked if asked is not None else None if worker else DEFAULT_PORTS[engine]
        found.append(
            {
                "pid": leader,
                "engine": engine,
                "command": command_of(leader, roots),
                "unit": unit_of(leader, roots),
                "user": user_of(leader, roots),
                "port": port,
                "listening": port in held,
                "listening_ports": held,
                "orphan": worker,
                "pids": sorted(members),
            }
        )
    return found


# -------------------------------------------------------------------------------------------------- memory and CPU
def memory(roots: Roots, notes: list[str]) -> dict[str, Any]:
    """Main memory and /dev/shm in MiB; C(limit_mib) is what the control group allows, where there is a limit."""
    table = {
        key: value.split()[0]
        for key, _colon, value in (
            line.partition(":") for line in (read(os.path.join(roots.proc, "meminfo")) or "").splitlines()
        )
        if value.split()
    }

    def mib(key: str) -> int | None:
        return int(table[key]) // 1024 if table.get(key, "").isdigit() else None

    if not table:
        notes.append("memory: /proc/meminfo cannot be read")
    shm_total = shm_free = None
    try:
        shm = os.statvfs(os.path.join(roots.dev, "shm"))
        shm_total, shm_free = shm.f_blocks * shm.f_frsize // MIB, shm.f_bavail * shm.f_frsize // MIB
    except OSError as exc:
        notes.append(f"memory.shm_mib: {roots.dev}/shm: {exc.strerror}")
    total = mib("MemTotal")
    limit = None
    for name in ("fs/cgroup/memory.max", "fs/cgroup/memory/memory.limit_in_bytes"):
        raw = _line(os.path.join(roots.sys, name))
        if raw and raw.isdigit():
            limit = int(raw) // MIB
            break
    if limit is not None and total is not None and limit >= total:
        limit = None
    return {
        "total_mib": total,
        "available_mib": mib("MemAvailable"),
        "limit_mib": limit,
        "shm_mib": shm_total,
        "shm_free_mib": shm_free,
        "swap": {"total_mib": mib("SwapTotal"), "free_mib": mib("SwapFree")},
    }


def limits(roots: Roots, notes: list[str]) -> dict[str, Any]:
    """The most that a service can be given: open files, and locked memory in bytes (UNLIMITED for no limit).

    A service gets its limits from process 1, which may raise them up to its own hard limit, and beyond it when it has
    CAP_SYS_RESOURCE (then C(raisable)); open files are bounded by fs.nr_open in any case.
    """
    content = read(os.path.join(roots.proc, "1", "limits"), 65536)
    if content is None:
        notes.append("limits: /proc/1/limits cannot be read")
        return {"nofile": None, "memlock": None, "raisable": None}
    hard: dict[str, int] = {}
    for label, key in (("Max open files", "nofile"), ("Max locked memory", "memlock")):
        match = re.search(rf"^{label}\s+(\S+)\s+(\S+)", content, re.MULTILINE)
        if match:
            hard[key] = UNLIMITED if match.group(2) == "unlimited" else int(match.group(2))
    effective = _status(1, roots).get("CapEff")
    raisable = bool(int(effective, 16) >> 24 & 1) if effective else None
    nofile, memlock = hard.get("nofile"), hard.get("memlock")
    if raisable:
        ceiling = _line(os.path.join(roots.proc, "sys/fs/nr_open"))
        nofile = int(ceiling) if ceiling and ceiling.isdigit() else nofile
        memlock = UNLIMITED
    return {"nofile": nofile, "memlock": memlock, "raisable": raisable}


def cpus(roots: Roots) -> dict[str, Any]:
    """How many processors this host may use, and their model."""
    content = read(os.path.join(roots.proc, "cpuinfo")) or ""
    model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", content, re.MULTILINE)
    count = len(re.findall(r"^processor\s*:", content, re.MULTILINE)) or None
    if roots.proc == "/proc":
        count = len(os.sched_getaffinity(0))
    return {"count": count, "model": model.group(1).strip() if model else None}


# ----------------------------------------------------------------------------------------------------------- disks
def _unescape(value: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), value)


def mounts(roots: Roots) -> list[tuple[str, str]]:
    """(mount point, file system type), in the order of mounting: the last one on a path is the one seen."""
    found = []
    for line in (read(os.path.join(roots.proc, "self/mountinfo")) or "").splitlines():
        head, _dash, tail = line.partition(" - ")
        cells, after = head.split(), tail.split()
        if len(cells) > 4 and after:
            found.append((_unescape(cells[4]), after[0]))
    return found


def disk(path: str, roots: Roots, notes: list[str], table: Sequence[tuple[str, str]] | None = None) -> dict[str, Any]:
    """The file system that holds C(path), or would hold it: of a path that does not exist yet, its nearest folder."""
    record: dict[str, Any] = {
        "path": path,
        "exists": os.path.exists(path),
        "mount": None,
        "fstype": None,
        "total_bytes": None,
        "free_bytes": None,
    }
    near = os.path.realpath(path)
    while not os.path.exists(near) and near != "/":
        near = os.path.dirname(near)
    for point, kind in mounts(roots) if table is None else table:
        inside = near == point or near.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(record["mount"] or ""):
            record["mount"], record["fstype"] = point, kind
    try:
        state = os.statvfs(near)
        record["total_bytes"], record["free_bytes"] = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    except OSError as exc:
        notes.append(f"disks: {path}: {exc.strerror}")
    return record


# --------------------------------------------------------------------------------------------------- kernel and PCI
def loaded_driver(roots: Roots) -> dict[str, Any]:
    """Version and flavour of the NVIDIA module that the kernel holds, from C(/proc/driver/nvidia/version)."""
    content = read(os.path.join(roots.proc, "driver/nvidia/version"), 65536)
    version = flavour = None
    if content:
        match = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", content, re.MULTILINE)
        version = match.group(1) if match else None
        flavour = "open" if "open kernel module" in content.lower() else "proprietary"
    if version is None:
        version = _line(os.path.join(roots.sys, "module/nvidia/version"))
    return {"loaded": version, "flavour": flavour}


def secure_boot(roots: Roots, notes: list[str]) -> bool | None:
    """Whether the firmware insists on signed modules; False on a host without EFI, None when that cannot be seen."""
    folder = os.path.join(roots.sys, "firmware/efi")
    if not os.path.isdir(folder):
        return False
    for path in glob.glob(os.path.join(folder, "efivars/SecureBoot-*")):
        try:
            with open(path, "rb") as handle:
                return handle.read(5)[4:5] == b"\x01"
        except OSError:
            break
    notes.append("secure_boot: EFI variables are not readable here")
    return None


def iommu(roots: Roots) -> dict[str, Any]:
    """C(state): off, passthrough (devices keep their own addresses) or translated (peer to peer over PCIe suffers)."""
    base = os.path.join(roots.sys, "kernel/iommu_groups")
    groups = _listing(base)
    words = (_line(os.path.join(roots.proc, "cmdline")) or "").split()
    options = [word for word in words if re.match(r"(iommu|intel_iommu|amd_iommu|iommu\.\w+)=", word)]
    kinds = {_line(os.path.join(base, group, "type")) for group in groups} - {None}
    if not groups:
        state = "off"
    elif kinds == {"identity"} or (not kinds and "iommu=pt" in options):
        state = "passthrough"
    else:
        state = "translated"
    return {
        "state": state,
        "groups": len(groups),
        "types": sorted(str(kind) for kind in kinds),
        "units": _listing(os.path.join(roots.sys, "class/iommu")),
        "cmdline": options,
    }


def pci_address(bus_id: str | None) -> str | None:
    """The kernel's spelling (0000:41:00.0) of the address that nvidia-smi prints (00000000:41:00.0)."""
    match = re.fullmatch(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])", bus_id or "")
    return f"{match.group(1)[-4:]}:{match.group(2)}".lower() if match else None


def _acs_control(config: bytes) -> int | None:
    """The ACS control word in a PCI configuration space; None without that capability, -1 when the space is cut."""
    if len(config) <= 0x100:
        return -1
    offset, seen = 0x100, 0
    while offset and offset + 8 <= len(config) and seen < 64:
        head = struct.unpack_from("<I", config, offset)[0]
        if head & 0xFFFF == 0x000D:
            return int(struct.unpack_from("<H", config, offset + 6)[0])
        offset, seen = head >> 20 & 0xFFC, seen + 1
    return None


def acs(roots: Roots, addresses: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """Bridges above the GPUs that send peer traffic up to the root complex (request or completion redirect, upstream
    forwarding). C(readable) is False when the configuration space cannot be read, which needs root."""
    bridges: set[str] = set()
    base = os.path.join(roots.sys, "bus/pci/devices")
    for address in addresses:
        path = os.path.realpath(os.path.join(base, address))
        bridges.update(
            part for part in path.split("/") if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", part)
        )
    bridges -= set(addresses)
    redirecting, blind = [], []
    for address in sorted(bridges):
        try:
            with open(os.path.join(base, address, "config"), "rb") as handle:
                control = _acs_control(handle.read(4096))
        except OSError:
            control = -1
        if control == -1:
            blind.append(address)
        elif control is not None and control & 0b0001_1100:
            redirecting.append(address)
    if blind:
        notes.append(f"acs: the configuration space of {len(blind)} bridges needs root to be read")
    return {
        "readable": not blind,
        "bridges": sorted(bridges),
        "redirecting": redirecting if redirecting or not blind else None,
    }


def numa(roots: Roots, addresses: Mapping[int, str | None]) -> dict[str, Any]:
    """Memory nodes, the node of each GPU (None: not told) and whether the kernel moves pages between nodes."""
    nodes = [
        name for name in _listing(os.path.join(roots.sys, "devices/system/node")) if re.fullmatch(r"node\d+", name)
    ]
    where: list[dict[str, Any]] = []
    for index, address in sorted(addresses.items()):
        raw = _line(os.path.join(roots.sys, "bus/pci/devices", address, "numa_node")) if address else None
        where.append({"index": index, "node": int(raw) if raw and raw.isdigit() else None})
    balancing = _line(os.path.join(roots.proc, "sys/kernel/numa_balancing"))
    return {"nodes": len(nodes) or None, "gpus": where, "balancing": None if balancing is None else balancing != "0"}


def hmm(roots: Roots) -> dict[str, Any]:
    """Heterogeneous memory management of nvidia_uvm: C(disabled) is the parameter now, None without the module."""
    folder = os.path.join(roots.sys, "module/nvidia_uvm")
    raw = _line(os.path.join(folder, "parameters/uvm_disable_hmm"))
    configured = None
    for path in sorted(glob.glob(roots.file("/etc/modprobe.d/*.conf"))):
        for match in re.finditer(
            r"^\s*options\s+nvidia[_-]uvm\b.*\buvm_disable_hmm=(\w+)", read(path) or "", re.MULTILINE
        ):
            configured = match.group(1) in ("1", "Y", "y")
    return {
        "uvm_loaded": os.path.isdir(folder),
        "disabled": None if raw is None else raw in ("Y", "y", "1"),
        "configured": configured,
    }


def device_files(roots: Roots) -> list[str]:
    """The NVIDIA device files, as the host names them."""
    found = []
    for name in _listing(roots.dev):
        if re.fullmatch(r"nvidia(\d+|ctl|-uvm|-uvm-tools|-modeset|-nvlink|-nvswitch\d*)", name):
            found.append(f"/dev/{name}")
    found += [f"/dev/nvidia-caps/{name}" for name in _listing(os.path.join(roots.dev, "nvidia-caps"))]
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


# ---------------------------------------------------------------------------------------------------------- system
def os_release(roots: Roots) -> dict[str, Any]:
    """Distribution from C(/etc/os-release)."""
    table: dict[str, str] = {}
    for line in (read(roots.file("/etc/os-release")) or read(roots.file("/usr/lib/os-release")) or "").splitlines():
        key, equals, value = line.partition("=")
        if equals:
            table[key.strip()] = value.strip().strip("\"'")
    return {
        "id": table.get("ID"),
        "version_id": table.get("VERSION_ID"),
        "codename": table.get("VERSION_CODENAME"),
        "pretty_name": table.get("PRETTY_NAME"),
        "architecture": platform.machine(),
    }


def container(roots: Roots) -> str | None:
    """The container manager whose guest this is (docker, podman, lxc ...), None on a machine of its own."""
    named = _line(roots.file("/run/systemd/container"))
    if named:
        return named
    if os.path.exists(roots.file("/run/.containerenv")):
        return "podman"
    if os.path.exists(roots.file("/.dockerenv")):
        return "docker"
    environment = read(os.path.join(roots.proc, "1/environ"), 65536) or ""
    match = re.search(r"(?:^|\0)container=([^\0]+)", environment)
    if match:
        return match.group(1)
    groups = read(os.path.join(roots.proc, "1/cgroup"), 65536) or ""
    match = re.search(r"/(docker|lxc|kubepods|libpod|machine\.slice)[-/.]", groups)
    return (
        {"libpod": "podman", "kubepods": "kubernetes", "machine.slice": "systemd-nspawn"}.get(
            match.group(1), match.group(1)
        )
        if match
        else None
    )


def virtualization(roots: Roots) -> str | None:
    """The kind of virtual machine, C(vm) when only the processor tells, None on bare metal."""
    vendor = " ".join(
        filter(
            None,
            (
                _line(os.path.join(roots.sys, "class/dmi/id", name))
                for name in ("sys_vendor", "product_name", "bios_vendor")
            ),
        )
    ).lower()
    for words, kind in (
        (("qemu", "kvm", "openstack", "google compute", "amazon ec2", "alibaba"), "kvm"),
        (("vmware",), "vmware"),
        (("virtualbox", "innotek"), "oracle"),
        (("xen",), "xen"),
        (("microsoft",), "microsoft"),
        (("bochs", "parallels"), "vm"),
    ):
        if any(word in vendor for word in words):
            return kind
    flags = re.search(r"^flags\s*:.*\bhypervisor\b", read(os.path.join(roots.proc, "cpuinfo"), MIB) or "", re.MULTILINE)
    return "vm" if flags else None


def init_system(roots: Roots) -> str | None:
    """The name of process 1."""
    return _line(os.path.join(roots.proc, "1/comm"))


def toolkits(roots: Roots) -> list[dict[str, Any]]:
    """CUDA toolkits below /usr/local and /opt, each once, with the version that they carry."""
    found: dict[str, dict[str, Any]] = {}
    for pattern in ("/usr/local/cuda-*", "/usr/local/cuda", "/opt/cuda-*", "/opt/cuda"):
        for path in sorted(glob.glob(roots.file(pattern))):
            real = os.path.realpath(path)
            if not os.path.isdir(real) or real in found:
                continue
            version = None
            try:
                version = str(json.loads(read(os.path.join(real, "version.json")) or "{}")["cuda"]["version"])
            except (ValueError, KeyError, TypeError):
                match = re.search(
                    r"CUDA Version (\d+\.\d+(?:\.\d+)?)", read(os.path.join(real, "version.txt"), 4096) or ""
                )
                match = match or re.search(r"cuda-(\d+\.\d+(?:\.\d+)?)$", real)
                version = match.group(1) if match else None
            nvcc = os.access(os.path.join(real, "bin/nvcc"), os.X_OK)
            if version is None and not nvcc:
                continue
            shown = real if roots.root == "/" else "/" + os.path.relpath(real, os.path.realpath(roots.root))
            found[real] = {"path": shown, "version": version, "nvcc": nvcc}
    return sorted(found.values(), key=lambda entry: str(entry["path"]))


def dkms(roots: Roots) -> list[dict[str, Any]]:
    """The state of NVIDIA's module in the DKMS tree: one row a version and kernel; C(kernel) None when only added."""
    rows: list[dict[str, Any]] = []
    base = roots.file("/var/lib/dkms")
    for module in (name for name in _listing(base) if name.startswith("nvidia")):
        for version in _listing(os.path.join(base, module)):
            folder = os.path.join(base, module, version)
            if version.startswith("kernel-") or os.path.islink(folder) or not os.path.isdir(folder):
                continue
            built = False
            for kernel in _listing(folder):
                if kernel in ("build", "source") or not os.path.isdir(os.path.join(folder, kernel)):
                    continue
                for arch in _listing(os.path.join(folder, kernel)):
                    names = [
                        os.path.basename(path)
                        for path in glob.glob(os.path.join(folder, kernel, arch, "module/nvidia.ko*"))
                    ]
                    if not names:
                        continue
                    built = True
                    placed = any(
                        glob.glob(roots.file(f"{lib}/modules/{kernel}/{place}/nvidia.ko*"))
                        for lib in ("/lib", "/usr/lib")
                        for place in ("updates/dkms", "updates", "extra")
                    )
                    rows.append(
                        {
                            "module": module,
                            "version": version,
                            "kernel": kernel,
                            "arch": arch,
                            "state": "installed" if placed else "built",
                        }
                    )
            if not built:
                rows.append({"module": module, "version": version, "kernel": None, "arch": None, "state": "added"})
    return rows


def kernels(roots: Roots, running: str) -> list[dict[str, Any]]:
    """Every kernel that could be booted: has it headers to build against, has it a module of NVIDIA's."""
    found = []
    for version in _listing(roots.file("/lib/modules")):
        folder = roots.file(f"/lib/modules/{version}")
        if not os.path.isdir(os.path.join(folder, "kernel")):
            continue
        module = any(
            glob.glob(os.path.join(folder, place, "nvidia.ko*"))
            for place in (
                "updates/dkms",
                "updates",
                "extra",
                "kernel/drivers/video",
                "kernel/drivers/video/nvidia",
                "kernel/nvidia-*",
            )
        )
        found.append(
            {
                "version": version,
                "running": version == running,
                "nvidia_module": module,
                "headers": os.path.exists(os.path.join(folder, "build", "Makefile")),
            }
        )
    return found


# -------------------------------------------------------------------------------------------------------- packages
_DRIVER_PACKAGE = re.compile(
    r"^(nvidia-(open|driver|dkms|kernel|headless|utils|compute|persistenced|modprobe|settings|firmware|smi)\b.*"
    r"|nvidia-(driver-)?pinning-.*|libnvidia-.*|xserver-xorg-video-nvidia.*|cuda-drivers.*"
    r"|linux-(modules|objects|signatures)-nvidia.*)$"
)


def packages(roots: Roots, notes: list[str]) -> dict[str, dict[str, Any]]:
    """Installed packages that concern the driver, toolkit and upgrades: name to C(version) and C(hold), from dpkg's own
    status file."""
    content = read(roots.file("/var/lib/dpkg/status"), 64 * MIB)
    if content is None:
        notes.append("packages: no dpkg on this host")
        return {}
    found: dict[str, dict[str, Any]] = {}
    pattern = re.compile(r"^Package: (\S*(?:nvidia|cuda|unattended-upgrades)\S*)\n((?:.+\n?)*)", re.MULTILINE)
    for match in pattern.finditer(content):
        status = re.search(r"^Status: (\S+) (\S+) (\S+)$", match.group(2), re.MULTILINE)
        version = re.search(r"^Version: (\S+)$", match.group(2), re.MULTILINE)
        if status and version and status.group(3) == "installed":
            found[match.group(1)] = {"version": version.group(1), "hold": status.group(1) == "hold"}
    return found


def upstream_version(version: str) -> str:
    """590.48.01 of C(590.48.01-0ubuntu0.24.04.1) or C(1:590.48.01-1)."""
    return re.split(r"[-+~]", version.split(":", 1)[-1], maxsplit=1)[0]


def installed_driver(roots: Roots, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The version of the driver's libraries on disk, which a new process will load: from the library's own file name,
    else from the packages."""
    versions = set()
    for pattern in (
        "/usr/lib/*-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/nvidia/lib64",
        "/usr/local/nvidia/lib",
    ):
        link = glob.glob(roots.file(f"{pattern}/libnvidia-ml.so.1"))
        for path in link:
            match = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)$", os.path.realpath(path))
            if match and os.path.exists(path):
                versions.add(match.group(1))
    driver_packages = {name: str(entry["version"]) for name, entry in known.items() if _DRIVER_PACKAGE.match(name)}
    version = max(versions) if versions else None
    if version is None:
        order = (
            r"libnvidia-compute(-\d+)?(-server)?$",
            r"libnvidia-ml1$",
            r"nvidia-driver-\d+(-server)?(-open)?$",
            r"nvidia-open$",
            r"nvidia-driver$",
            r"nvidia-dkms-\d+(-server)?(-open)?$",
            r"nvidia-kernel-open-dkms$",
            r"cuda-drivers$",
        )
        for pattern in order:
            hits = sorted(name for name in driver_packages if re.match(pattern, name))
            if hits:
                version = upstream_version(driver_packages[hits[-1]])
                break
    flavour = None
    for name in driver_packages:
        if re.match(
            r"nvidia-(dkms|driver|kernel-source)-\d+(-server)?-open$|nvidia-(kernel-)?open(-dkms|-\d+)?$", name
        ):
            flavour = "open"
        elif flavour is None and re.match(r"nvidia-(dkms|kernel-source)-\d+(-server)?$|nvidia-kernel-dkms$", name):
            flavour = "proprietary"
    return {"installed": version, "flavour": flavour, "packages": dict(sorted(driver_packages.items()))}


def _apt_settings(content: str) -> list[tuple[str, str]]:
    """(name, value) of an apt configuration text, nested blocks flattened with C(::), list entries under C(name::)."""
    content = re.sub(r"/\*.*?\*/", "", content, flags=re.DOTALL)
    tokens = re.findall(r'"(?:[^"\\]|\\.)*"|//[^\n]*|^\s*#[^\n]*|[{};]|[^\s{};"]+', content, re.MULTILINE)
    found: list[tuple[str, str]] = []
    scope: list[str] = []
    pending: list[str] = []
    for token in tokens:
        if token.startswith("//") or token.lstrip().startswith("#"):
            continue
        if token == "{":
            scope.append(pending[-1] if pending else "")
            pending = []
        elif token == "}":
            if scope:
                scope.pop()
            pending = []
        elif token == ";":
            if pending:
                value = pending[-1].strip('"').replace("\\\\", "\\")
                name = pending[0] if len(pending) > 1 else ""
                found.append(("::".join([*scope, name]), value))
            pending = []
        else:
            pending.append(token)
    return found


def unattended_upgrades(roots: Roots, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Whether packages are upgraded behind the operator's back, and which driver packages that could touch
    (C(exposed): neither held nor on the blacklist)."""
    enabled = False
    blacklist: list[str] = []
    for path in [roots.file("/etc/apt/apt.conf"), *sorted(glob.glob(roots.file("/etc/apt/apt.conf.d/*")))]:
        name = os.path.basename(path)
        if name.endswith(("~", ".bak", ".save", ".dpkg-old", ".dpkg-dist", ".dpkg-new", ".ucf-dist")):
            continue
        for key, value in _apt_settings(read(path) or ""):
            lowered = key.lower()
            if lowered == "apt::periodic::unattended-upgrade":
                enabled = value not in ("", "0")
            elif lowered.rstrip(":") == "unattended-upgrade::package-blacklist":
                blacklist.append(value)
    exposed = []
    for package, entry in known.items():
        if not _DRIVER_PACKAGE.match(package) or entry["hold"]:
            continue
        if not any(_matches(pattern, package) for pattern in blacklist):
            exposed.append(package)
    installed = "unattended-upgrades" in known
    return {
        "installed": installed,
        "enabled": installed and enabled,
        "blacklist": blacklist,
        "exposed": sorted(exposed),
    }


def _matches(pattern: str, package: str) -> bool:
    try:
        return re.match(pattern, package) is not None
    except re.error:
        return False


# --------------------------------------------------------------------------------------------------- sitecustomize
#: Asks an interpreter for its sitecustomize without running it: -S leaves site out, then the folders are added by hand.
SITE_PROBE = r"""
import json, sys
from importlib.machinery import PathFinder
answer = {"version": "%d.%d.%d" % sys.version_info[:3], "path": None, "exists": False, "valid": None, "error": None,
          "stdlib": None}
try:
    import site, sysconfig
    answer["stdlib"] = sysconfig.get_path("stdlib")
    known = site.removeduppaths()
    known = site.venv(known)
    site.addsitepackages(known)
except Exception as exc:
    answer["error"] = "%s: %s" % (type(exc).__name__, exc)
spec = PathFinder.find_spec("sitecustomize")
if spec is not None and spec.origin:
    answer["path"], answer["exists"] = spec.origin, True
    try:
        with open(spec.origin, "rb") as handle:
            compile(handle.read(), spec.origin, "exec", dont_inherit=True)
        answer["valid"] = True
    except (SyntaxError, ValueError) as exc:
        answer["valid"] = False
        answer["error"] = "line %s: %s" % (getattr(exc, "lineno", None), getattr(exc, "msg", exc))
    except OSError as exc:
        answer["error"] = str(exc)
print(json.dumps(answer))
"""


def sitecustomize(interpreter: str, run: Runner, notes: list[str]) -> dict[str, Any]:
    """Which sitecustomize C(interpreter) would load, and whether its syntax is valid (None: nothing to judge)."""
    record: dict[str, Any] = {
        "interpreter": interpreter,
        "present": os.access(interpreter, os.X_OK),
        "version": None,
        "path": None,
        "exists": False,
        "valid": None,
        "error": None,
        "stdlib": None,
    }
    if not record["present"]:
        notes.append(f"sitecustomize: {interpreter} does not exist")
        return record
    result = run([interpreter, "-S", "-s", "-E", "-c", SITE_PROBE])
    try:
        record.update(json.loads(result.out.strip().splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        record["error"] = result.error or (result.err.strip().splitlines() or [f"status {result.rc}"])[-1]
        notes.append(f"sitecustomize: {interpreter}: {record['error']}")
    return record
