# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""One look at a host: what L(gpu) and L(host) read, put together under the keys that plan and policy rely on."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuserve.sglang.plugins.module_utils import gpu, host

#: Where nvidia-smi is when the search path of a remote shell does not tell.
TOOL_FOLDERS = ("/usr/bin", "/usr/local/bin", "/usr/sbin", "/usr/local/nvidia/bin", "/opt/bin", "/usr/lib/wsl/lib")


@dataclass(frozen=True)
class Wanted:
    """What is asked for beyond the host itself. Raises ValueError for values that cannot mean anything."""

    paths: tuple[str, ...] = ()
    interpreters: tuple[str, ...] = ()
    timeout: float = 20.0
    nvidia_smi: str | None = None

    def __post_init__(self) -> None:
        for option, values in (("paths", self.paths), ("interpreters", self.interpreters)):
            for value in values:
                if not value.startswith("/"):
                    raise ValueError(f"{option}: found {value!r}, expected an absolute path; give it from the root on")
        if not self.timeout > 0:
            raise ValueError(f"timeout: found {self.timeout:g}, expected seconds above 0")


def find_tool(given: str | None) -> str | None:
    """Path of nvidia-smi: the one given if it can be run, else the first one found in the usual places."""
    if given is not None:
        return given if os.access(given, os.X_OK) else None
    return shutil.which("nvidia-smi", path=os.pathsep.join([os.environ.get("PATH", ""), *TOOL_FOLDERS]))


def collect(wanted: Wanted, roots: host.Roots | None = None, run: gpu.Runner | None = None) -> dict[str, Any]:
    """Everything, as one dictionary that always has the same keys. Never raises for what the host is like."""
    tree = roots or host.Roots()
    notes: list[str] = []

    def default_run(argv: Sequence[str]) -> gpu.ToolResult:
        return gpu.run_tool(argv, wanted.timeout)

    runner = run or default_run

    def attempt(name: str, function: Callable[[], Any], otherwise: Any) -> Any:
        """One odd file must not cost all the others: its part is left out and named."""
        try:
            return function()
        except Exception as exc:  # whatever it is, the rest of the host is still worth reading
            notes.append(f"{name}: {type(exc).__name__}: {exc}")
            return otherwise

    with ThreadPoolExecutor(max_workers=2 + len(wanted.interpreters)) as pool:
        # The tools run while the files are read.
        asked = pool.submit(
            lambda: attempt(
                "gpus", lambda: gpu.inspect(find_tool(wanted.nvidia_smi), runner), gpu.inspect(None, runner)
            )
        )
        python_jobs = [pool.submit(host.sitecustomize, path, runner, notes) for path in wanted.interpreters]
        known = attempt("packages", lambda: host.packages(tree, notes), {})
        owners = attempt("ports", lambda: host.open_files(tree, notes), {})
        listening = attempt("ports", lambda: host.ports(tree, notes, owners), [])
        running = attempt("servers", lambda: host.servers(tree, listening), [])
        table = attempt("disks", lambda: host.mounts(tree), [])
        disks = [host.disk(path, tree, notes, table) for path in wanted.paths]
        release = platform.release()
        result: dict[str, Any] = {
            "device_files": attempt("device_files", lambda: host.device_files(tree), []),
            "toolkits": attempt("toolkits", lambda: host.toolkits(tree), []),
            "dkms": attempt("dkms", lambda: host.dkms(tree), []),
            "kernels": attempt("kernels", lambda: host.kernels(tree, release), []),
            "secure_boot": attempt("secure_boot", lambda: host.secure_boot(tree, notes), None),
            "iommu": attempt("iommu", lambda: host.iommu(tree), {}),
            "hmm": attempt("hmm", lambda: host.hmm(tree), {}),
            "kernel": release,
            "os": attempt("os", lambda: host.os_release(tree), {}),
            "virtualization": attempt("virtualization", lambda: host.virtualization(tree), None),
            "container": attempt("container", lambda: host.container(tree), None),
            "init_system": host.init_system(tree),
            "uid": os.geteuid(),
            "memory": attempt("memory", lambda: host.memory(tree, notes), {}),
            "limits": attempt("limits", lambda: host.limits(tree, notes), {}),
            "cpus": attempt("cpus", lambda: host.cpus(tree), {}),
            "disks": disks,
            "ports": listening,
            "servers": running,
            "unattended_upgrades": attempt("unattended_upgrades", lambda: host.unattended_upgrades(tree, known), {}),
        }
        seen = asked.result()
        sites = [job.result() for job in python_jobs]

    held = [process for record in seen["gpus"] for process in record["processes"]]
    for record in seen["gpus"]:
        record["holders"] = host.device_holders(record["minor"], tree, owners)
    attempt("gpus.processes", lambda: host.describe_processes(held, tree), None)
    addresses = {record["index"]: host.pci_address(record["pci_bus_id"]) for record in seen["gpus"]}
    result.update(
        {
            "gpus": seen["gpus"],
            "nvidia_smi": seen["nvidia_smi"],
            "links": seen["links"],
            "sitecustomize": sites,
            "acs": attempt(
                "acs", lambda: host.acs(tree, [address for address in addresses.values() if address], notes), {}
            ),
            "numa": attempt("numa", lambda: host.numa(tree, addresses), {}),
            "driver": attempt("driver", lambda: _driver(tree, known, seen), {}),
        }
    )
    if result["init_system"] is None:
        notes.append("init_system: /proc/1/comm cannot be read")
    return {**result, "notes": sorted({*notes, *seen["notes"]})}


def _driver(tree: host.Roots, known: dict[str, dict[str, Any]], seen: dict[str, Any]) -> dict[str, Any]:
    """Loaded and installed driver. Where the kernel's own files are hidden (a container may hide them), the version
    that NVML reports is the loaded one, since NVML refuses to start on any other."""
    loaded = host.loaded_driver(tree)
    installed = host.installed_driver(tree, known)
    source = "kernel" if loaded["loaded"] else None
    reported = next((record["driver_version"] for record in seen["gpus"] if record["driver_version"]), None)
    if loaded["loaded"] is None and reported:
        loaded["loaded"], source = reported, "nvidia-smi"
    return {
        "loaded": loaded["loaded"],
        "installed": installed["installed"] or gpu.library_version(seen["nvidia_smi"]["error"]),
        "flavour": loaded["flavour"] or installed["flavour"],
        "source": source,
        "packages": installed["packages"],
    }
