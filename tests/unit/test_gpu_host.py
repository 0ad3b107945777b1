"""What is read from files of a host, over made-up trees."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuserve.sglang.plugins.module_utils import gpu, host, host_info
from ansible_collections.gpuserve.sglang.plugins.modules import gpu_host_info


class Tree:
    """A host made of files below one folder."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.roots = host.Roots(
            proc=str(base / "proc"), sys=str(base / "sys"), root=str(base / "root"), dev=str(base / "dev")
        )
        for name in ("proc", "sys", "root", "dev"):
            (base / name).mkdir(parents=True)

    def put(self, path: str, content: str | bytes = "") -> Path:
        target = self.base / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
        return target

    def process(
        self, pid: int, argv: list[str], cgroup: str = "0::/\n", parent: int = 1, files: tuple[str, ...] = ()
    ) -> None:
        self.put(f"proc/{pid}/cmdline", "\0".join(argv) + "\0")
        self.put(f"proc/{pid}/comm", argv[0][:15] + "\n")
        self.put(f"proc/{pid}/cgroup", cgroup)
        self.put(f"proc/{pid}/status", f"Name:\tx\nPPid:\t{parent}\nUid:\t0\t0\t0\t0\n")
        folder = self.base / f"proc/{pid}/fd"
        folder.mkdir()
        for number, target in enumerate(files, start=3):
            (folder / str(number)).symlink_to(target)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


# --------------------------------------------------------------------------------------------------------- secrets
@pytest.mark.parametrize(
    ("argv", "secret"),
    [
        (["python", "-m", "sglang.launch_server", "--api-key", "hunter2"], "hunter2"),
        (["python", "--api-key=hunter2"], "hunter2"),
        (["python", "--admin-api-key", "hunter2", "--port", "1"], "hunter2"),
        (["python", "--ssl-keyfile-password", "hunter2"], "hunter2"),
        (["env", "HF_TOKEN=hunter2", "python"], "hunter2"),
        (["env", "HUGGING_FACE_HUB_TOKEN=hunter2"], "hunter2"),
        (["curl", "-H", "Authorization: Bearer hunter2"], "hunter2"),
        (["python", "--json-model-override-args", '{"api_key": "hunter2"}'], "hunter2"),
        (["python", "x", "hf_AbCdEfGhIjKl"], "hf_AbCdEfGhIjKl"),
        (["python", "https://user:hunter2@example.org/x"], "hunter2"),
        (["sh", "-c", "exec python -m sglang.launch_server --api-key hunter2"], "hunter2"),
    ],
)
def test_secrets_are_hidden(argv: list[str], secret: str) -> None:
    shown = " ".join(host.scrub(argv))
    assert secret not in shown
    assert host.HIDDEN in shown


def test_everything_else_stays() -> None:
    argv = ["python", "-m", "sglang.launch_server", "--max-total-tokens", "4096", "--speculative-num-draft-tokens", "3"]
    argv += ["--tokenizer-path", "/data/k", "--port", "30000", "--enable-metrics"]
    assert host.scrub(argv) == argv
    assert host.scrub(["sh", "-c", " ".join(argv)]) == ["sh", "-c", " ".join(argv)]


def test_long_command_lines_are_cut(tree: Tree) -> None:
    tree.process(7, ["python", "x" * 1000])
    assert len(host.command_of(7, tree.roots) or "") == host.COMMAND_LENGTH


def test_a_kernel_thread_has_its_name_only(tree: Tree) -> None:
    tree.put("proc/9/cmdline")
    tree.put("proc/9/comm", "kworker/0:1\n")
    assert host.command_of(9, tree.roots) == "[kworker/0:1]"
    assert host.command_of(10, tree.roots) is None


# ----------------------------------------------------------------------------------------------------------- units
@pytest.mark.parametrize(
    ("content", "unit"),
    [
        ("0::/system.slice/sglang-kimi.service\n", "sglang-kimi.service"),
        ("0::/system.slice/sglang-kimi.service/payload\n", "sglang-kimi.service"),
        ("0::/user.slice/user-0.slice/session-3.scope\n", None),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope\n", None),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/web.service\n", "web.service"),
        ("12:memory:/x.service\n1:name=systemd:/system.slice/a.service\n0::/\n", "a.service"),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_unit_of_a_process(content: str, unit: str | None) -> None:
    assert host.unit_in_cgroup(content) == unit


# ----------------------------------------------------------------------------------------------------------- ports
TCP = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def listener(address: str, port: int, inode: int, state: str = "0A") -> str:
    return f"   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1\n"


def test_listeners_and_their_owners(tree: Tree) -> None:
    tree.put("proc/net/tcp", TCP + listener("0100007F", 30000, 11) + listener("0100007F", 40000, 12, "01"))
    tree.put("proc/net/tcp6", TCP + listener("0" * 32, 22, 13) + listener("0000000000000000FFFF00000100007F", 8000, 14))
    tree.process(42, ["python", "--api-key", "hunter2"], "0::/system.slice/a.service\n", files=("socket:[11]",))
    notes: list[str] = []
    owners = host.open_files(tree.roots, notes)
    found = host.ports(tree.roots, notes, owners)
    assert [(entry["port"], entry["address"], entry["pid"], entry["unit"]) for entry in found] == [
        (22, "::", None, None),
        (8000, "::ffff:127.0.0.1", None, None),
        (30000, "127.0.0.1", 42, "a.service"),
    ]
    assert found[2]["command"] == f"python --api-key {host.HIDDEN}"
    assert notes == []


def test_a_real_listener_is_found_with_this_process() -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        owners = host.open_files(host.Roots(), [])
        found = {entry["port"]: entry for entry in host.ports(host.Roots(), [], owners)}
        assert found[server.getsockname()[1]]["pid"] == os.getpid()
        assert found[server.getsockname()[1]]["address"] == "127.0.0.1"


def test_ports_that_cannot_be_read(tree: Tree) -> None:
    notes: list[str] = []
    assert host.ports(tree.roots, notes, {}) == []
    assert notes == ["ports: /proc/net/tcp cannot be read"]


# --------------------------------------------------------------------------------------------------------- servers
SGLANG = ["/opt/venv/bin/python", "-m", "sglang.launch_server"]


@pytest.mark.parametrize(
    ("argv", "engine"),
    [
        (SGLANG, ("sglang", False)),
        (["python3", "/root/sglang/python/sglang/launch_server.py"], ("sglang", False)),
        (["/usr/bin/python3", "/opt/venv/bin/sglang", "serve", "--model", "x"], ("sglang", False)),
        (["sglang::scheduler_TP0"], ("sglang", True)),
        (["vllm", "serve", "x"], ("vllm", False)),
        (["python", "-m", "vllm.entrypoints.openai.api_server"], ("vllm", False)),
        (["VLLM::EngineCore"], ("vllm", True)),
        (["python", "-m", "sglang.bench_serving"], None),
        (["grep", "sglang.launch_server"], None),
        (["vim", "/root/sglang/README.md"], None),
        (["bash", "-c", "python -m sglang.launch_server"], None),
        ([], None),
    ],
)
def test_what_is_an_inference_server(argv: list[str], engine: tuple[str, bool] | None) -> None:
    assert host.engine_of(argv) == engine


def test_one_record_for_a_server_and_its_workers(tree: Tree) -> None:
    unit = "0::/system.slice/sglang-kimi.service\n"
    tree.process(100, [*SGLANG, "--port", "31000", "--api-key=hunter2"], unit)
    tree.process(101, ["sglang::scheduler_TP0"], unit, parent=100)
    tree.process(102, ["sglang::detokenizer"], unit, parent=100)
    listening = [{"port": 31000, "pid": 100}]
    (found,) = host.servers(tree.roots, listening)
    assert found["pids"] == [100, 101, 102]
    assert (found["pid"], found["port"], found["listening"]) == (100, 31000, True)
    assert (found["unit"], found["orphan"], found["user"]) == ("sglang-kimi.service", False, "root")
    assert "hunter2" not in found["command"]


def test_a_worker_left_behind_is_an_orphan(tree: Tree) -> None:
    tree.process(201, ["sglang::scheduler_TP3"], parent=1)
    (found,) = host.servers(tree.roots, [])
    assert (found["orphan"], found["port"], found["listening"], found["unit"]) == (True, None, False, None)


def test_a_server_behind_a_starter_is_one_server(tree: Tree) -> None:
    tree.process(300, ["uv", "run", "python", "-m", "sglang.launch_server"])
    tree.process(301, SGLANG, parent=300)
    tree.process(400, ["vllm", "serve", "m"])
    found = host.servers(tree.roots, [{"port": 30000, "pid": 301}])
    assert [(entry["engine"], entry["pids"], entry["port"]) for entry in found] == [
        ("sglang", [300, 301], 30000),
        ("vllm", [400], 8000),
    ]
    assert [entry["listening"] for entry in found] == [True, False]


# ------------------------------------------------------------------------------------------------ memory and limits
def test_memory_and_the_limit_of_the_group(tree: Tree) -> None:
    tree.put("proc/meminfo", "MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n")
    tree.put("sys/fs/cgroup/memory.max", str(512 * host.MIB))
    (tree.base / "dev/shm").mkdir()
    found = host.memory(tree.roots, [])
    assert (found["total_mib"], found["available_mib"], found["limit_mib"]) == (2048, 1024, 512)
    assert found["swap"] == {"total_mib": 0, "free_mib": 0}
    assert found["shm_mib"] >= found["shm_free_mib"] > 0
    tree.put("sys/fs/cgroup/memory.max", "max\n")
    assert host.memory(tree.roots, [])["limit_mib"] is None


def test_memory_without_proc(tree: Tree) -> None:
    notes: list[str] = []
    found = host.memory(tree.roots, notes)
    assert (found["total_mib"], found["shm_mib"]) == (None, None)
    assert len(notes) == 2


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 4096                 files
Max locked memory         65536                {memlock}                bytes
"""


@pytest.mark.parametrize(
    ("capabilities", "memlock", "expected"),
    [
        ("0000000000000000", "65536", {"nofile": 4096, "memlock": 65536, "raisable": False}),
        ("0000000000000000", "unlimited", {"nofile": 4096, "memlock": host.UNLIMITED, "raisable": False}),
        ("0000000001000000", "65536", {"nofile": 1048576, "memlock": host.UNLIMITED, "raisable": True}),
    ],
)
def test_what_process_one_can_give(tree: Tree, capabilities: str, memlock: str, expected: dict[str, Any]) -> None:
    tree.put("proc/1/limits", LIMITS.format(memlock=memlock))
    tree.put("proc/1/status", f"CapEff:\t{capabilities}\n")
    tree.put("proc/sys/fs/nr_open", "1048576\n")
    assert host.limits(tree.roots, []) == expected


# ----------------------------------------------------------------------------------------------------------- disks
def test_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    table = [(str(tmp_path), "xfs"), (str(tmp_path / "data-2"), "zfs"), ("/", "ext4")]
    found = host.disk(str(tmp_path / "data/models/x"), host.Roots(), [], table)
    assert (found["exists"], found["mount"], found["fstype"]) == (False, str(tmp_path), "xfs")
    state = os.statvfs(tmp_path)
    assert found["total_bytes"] == state.f_blocks * state.f_frsize
    assert host.disk(str(tmp_path), host.Roots(), [], table)["exists"] is True


def test_mounts_with_blanks(tree: Tree) -> None:
    tree.put("proc/self/mountinfo", "36 35 98:0 / /mnt/my\\040disk rw,noatime master:1 - ext4 /dev/x rw\n")
    assert host.mounts(tree.roots) == [("/mnt/my disk", "ext4")]


# ---------------------------------------------------------------------------------------------------------- driver
@pytest.mark.parametrize(
    ("line", "version", "flavour"),
    [
        # The first line is the real machine's.
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  ",
            "580.159.04",
            "open",
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024",
            "535.183.01",
            "proprietary",
        ),
    ],
)
def test_loaded_driver(tree: Tree, line: str, version: str, flavour: str) -> None:
    tree.put("proc/driver/nvidia/version", f"{line}\nGCC version:  gcc version 15.3.0 (GCC)\n")
    assert host.loaded_driver(tree.roots) == {"loaded": version, "flavour": flavour}


def dpkg(**packages: str) -> str:
    rows = []
    for name, words in packages.items():
        status, version = words.split("|")
        rows.append(f"Package: {name.replace('_', '-')}\nStatus: {status}\nArchitecture: amd64\nVersion: {version}\n")
    return "\n".join(rows)


def test_installed_driver_from_packages(tree: Tree) -> None:
    tree.put(
        "root/var/lib/dpkg/status",
        dpkg(
            bash="install ok installed|5.2",
            libnvidia_compute_590="hold ok installed|590.48.01-0ubuntu1",
            nvidia_dkms_590_open="install ok installed|590.48.01-0ubuntu1",
            nvidia_driver_535="deinstall ok config-files|535.183.01-0ubuntu1",
            nvidia_container_toolkit="install ok installed|1.18.0-1",
        ),
    )
    known = host.packages(tree.roots, [])
    assert set(known) == {"libnvidia-compute-590", "nvidia-dkms-590-open", "nvidia-container-toolkit"}
    found = host.installed_driver(tree.roots, known)
    assert (found["installed"], found["flavour"]) == ("590.48.01", "open")
    assert set(found["packages"]) == {"libnvidia-compute-590", "nvidia-dkms-590-open"}


def test_the_library_on_disk_counts_more_than_packages(tree: Tree) -> None:
    tree.put("root/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.595.20")
    (tree.base / "root/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.595.20")
    known = {"libnvidia-compute-590": {"version": "590.48.01-1", "hold": False}}
    assert host.installed_driver(tree.roots, known)["installed"] == "595.20"


def test_dkms_and_kernels(tree: Tree) -> None:
    base = "root/var/lib/dkms/nvidia/590.48.01"
    tree.put(f"{base}/6.8.0-1/x86_64/module/nvidia.ko.zst")
    tree.put(f"{base}/6.8.0-2/x86_64/module/nvidia.ko.zst")
    tree.put(f"{base}/source/dkms.conf")
    tree.put("root/lib/modules/6.8.0-1/updates/dkms/nvidia.ko.zst")
    for kernel in ("6.8.0-1", "6.8.0-2", "6.8.0-3"):
        (tree.base / f"root/lib/modules/{kernel}/kernel").mkdir(parents=True)
    tree.put("root/lib/modules/6.8.0-1/build/Makefile")
    assert [(row["kernel"], row["state"]) for row in host.dkms(tree.roots)] == [
        ("6.8.0-1", "installed"),
        ("6.8.0-2", "built"),
    ]
    assert host.kernels(tree.roots, "6.8.0-1") == [
        {"version": "6.8.0-1", "running": True, "nvidia_module": True, "headers": True},
        {"version": "6.8.0-2", "running": False, "nvidia_module": False, "headers": False},
        {"version": "6.8.0-3", "running": False, "nvidia_module": False, "headers": False},
    ]


def test_toolkits_once_each(tree: Tree) -> None:
    tree.put("root/usr/local/cuda-13.0/version.json", '{"cuda": {"name": "CUDA SDK", "version": "13.0.1"}}')
    tree.put("root/usr/local/cuda-13.0/bin/nvcc").chmod(0o755)
    tree.put("root/usr/local/cuda-12.8/version.json", "{broken")
    (tree.base / "root/usr/local/cuda-13").symlink_to("cuda-13.0")
    (tree.base / "root/usr/local/cuda").symlink_to("cuda-13.0")
    assert host.toolkits(tree.roots) == [
        {"path": "/usr/local/cuda-12.8", "version": "12.8", "nvcc": False},
        {"path": "/usr/local/cuda-13.0", "version": "13.0.1", "nvcc": True},
    ]


# ------------------------------------------------------------------------------------------------------------- PCIe
@pytest.mark.parametrize(
    ("types", "cmdline", "state"),
    [
        ([], "quiet", "off"),
        (["DMA-FQ", "DMA"], "quiet", "translated"),
        (["identity", "identity"], "iommu=pt", "passthrough"),
        (["identity", "DMA"], "iommu=pt", "translated"),
    ],
)
def test_iommu(tree: Tree, types: list[str], cmdline: str, state: str) -> None:
    tree.put("proc/cmdline", cmdline)
    for number, kind in enumerate(types):
        tree.put(f"sys/kernel/iommu_groups/{number}/type", kind + "\n")
    found = host.iommu(tree.roots)
    assert (found["state"], found["groups"]) == (state, len(types))


def configuration(control: int | None) -> bytes:
    """A configuration space whose second extended capability is ACS, or that has none."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | (0x140 << 20 if control is not None else 0))
    if control is not None:
        struct.pack_into("<IHH", space, 0x140, 0x000D | 1 << 16, 0x1F, control)
    return bytes(space)


def test_acs_of_the_bridges_above_a_gpu(tree: Tree) -> None:
    devices = tree.base / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    chain = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:11:00.0"
    (tree.base / chain).mkdir(parents=True)
    for depth, address in enumerate(("0000:00:01.0", "0000:01:00.0", "0000:11:00.0")):
        (devices / address).symlink_to(tree.base / Path(*Path(chain).parts[: 4 + depth]))
    tree.put("sys/devices/pci0000:00/0000:00:01.0/config", configuration(0x1D))
    tree.put("sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/config", configuration(0x01))
    found = host.acs(tree.roots, ["0000:11:00.0"], [])
    assert found == {"readable": True, "bridges": ["0000:00:01.0", "0000:01:00.0"], "redirecting": ["0000:00:01.0"]}

    # Without root the kernel gives the first 64 bytes only: not known, which is not the same as none.
    tree.put("sys/devices/pci0000:00/0000:00:01.0/config", configuration(0x1D)[:64])
    notes: list[str] = []
    found = host.acs(tree.roots, ["0000:11:00.0"], notes)
    assert (found["readable"], found["redirecting"]) == (False, None)
    assert "needs root" in notes[0]


def test_pci_address() -> None:
    assert host.pci_address("00000000:C1:00.0") == "0000:c1:00.0"
    assert host.pci_address(None) is None


def test_numa(tree: Tree) -> None:
    for node in (0, 1):
        (tree.base / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    tree.put("sys/bus/pci/devices/0000:11:00.0/numa_node", "1\n")
    tree.put("sys/bus/pci/devices/0000:31:00.0/numa_node", "-1\n")
    tree.put("proc/sys/kernel/numa_balancing", "1\n")
    assert host.numa(tree.roots, {0: "0000:11:00.0", 1: "0000:31:00.0", 2: None}) == {
        "nodes": 2,
        "gpus": [{"index": 0, "node": 1}, {"index": 1, "node": None}, {"index": 2, "node": None}],
        "balancing": True,
    }


# ---------------------------------------------------------------------------------------------------------- system
def test_hmm(tree: Tree) -> None:
    assert host.hmm(tree.roots) == {"uvm_loaded": False, "disabled": None, "configured": None}
    tree.put("sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N\n")
    tree.put(
        "root/etc/modprobe.d/nvidia.conf",
        "# options nvidia_uvm uvm_disable_hmm=0\noptions nvidia-uvm uvm_disable_hmm=1\n",
    )
    assert host.hmm(tree.roots) == {"uvm_loaded": True, "disabled": False, "configured": True}


@pytest.mark.parametrize(("last", "enabled"), [(b"\x01", True), (b"\x00", False)])
def test_secure_boot(tree: Tree, last: bytes, enabled: bool) -> None:
    assert host.secure_boot(tree.roots, []) is False
    tree.put("sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", b"\x06\0\0\0" + last)
    assert host.secure_boot(tree.roots, []) is enabled


def test_secure_boot_that_cannot_be_seen(tree: Tree) -> None:
    (tree.base / "sys/firmware/efi").mkdir(parents=True)
    notes: list[str] = []
    assert host.secure_boot(tree.roots, notes) is None
    assert notes


def test_device_files_in_order(tree: Tree) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null", "nvidia-caps/nvidia-cap1"):
        tree.put(f"dev/{name}")
    found = host.device_files(tree.roots)
    assert found.index("/dev/nvidia2") < found.index("/dev/nvidia10")
    assert set(found) == {
        "/dev/nvidia2",
        "/dev/nvidia10",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-caps/nvidia-cap1",
    }


def test_os_and_container(tree: Tree) -> None:
    tree.put(
        "root/etc/os-release",
        'ID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
    )
    found = host.os_release(tree.roots)
    assert (found["id"], found["version_id"], found["codename"]) == ("ubuntu", "24.04", "noble")
    assert host.container(tree.roots) is None
    tree.put("proc/1/environ", "PATH=/bin\0container=lxc\0")
    assert host.container(tree.roots) == "lxc"
    tree.put("root/run/systemd/container", "podman\n")
    assert host.container(tree.roots) == "podman"


def test_virtualization(tree: Tree) -> None:
    assert host.virtualization(tree.roots) is None
    tree.put("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu hypervisor lahf_lm\n")
    assert host.virtualization(tree.roots) == "vm"
    tree.put("sys/class/dmi/id/sys_vendor", "QEMU\n")
    assert host.virtualization(tree.roots) == "kvm"


# -------------------------------------------------------------------------------------------------------- upgrades
PERIODIC = 'APT::Periodic::Update-Package-Lists "1";\nAPT::Periodic::Unattended-Upgrade "1";\n'
UNATTENDED = """
// Python regular expressions, matching packages to exclude from upgrading
Unattended-Upgrade::Package-Blacklist {
    // "linux-";
    "libnvidia";
    "nvidia-dkms-\\d+$"; /* not -open */
};
Unattended-Upgrade::Allowed-Origins { "${distro_id}:${distro_codename}"; };
"""


def test_which_driver_packages_unattended_upgrades_could_touch(tree: Tree) -> None:
    known = {
        "unattended-upgrades": {"version": "2.9", "hold": False},
        "libnvidia-compute-590": {"version": "1", "hold": False},
        "nvidia-dkms-590-open": {"version": "1", "hold": False},
        "nvidia-utils-590": {"version": "1", "hold": True},
        "nvidia-container-toolkit": {"version": "1", "hold": False},
    }
    tree.put("root/etc/apt/apt.conf.d/20auto-upgrades", PERIODIC)
    tree.put("root/etc/apt/apt.conf.d/50unattended-upgrades", UNATTENDED)
    tree.put("root/etc/apt/apt.conf.d/99old.bak", 'APT::Periodic::Unattended-Upgrade "0";')
    found = host.unattended_upgrades(tree.roots, known)
    assert found == {
        "installed": True,
        "enabled": True,
        "blacklist": ["libnvidia", "nvidia-dkms-\\d+$"],
        "exposed": ["nvidia-dkms-590-open"],
    }
    tree.put("root/etc/apt/apt.conf.d/99site", 'APT { Periodic { Unattended-Upgrade "0"; }; };')
    assert host.unattended_upgrades(tree.roots, known)["enabled"] is False
    assert host.unattended_upgrades(tree.roots, {})["installed"] is False


# --------------------------------------------------------------------------------------------------- sitecustomize
@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


def test_sitecustomize_of_a_virtual_environment(venv: Path, tmp_path: Path) -> None:
    python = str(venv / "bin/python")
    target = next((venv / "lib").glob("python3*/site-packages")) / "sitecustomize.py"
    witness = tmp_path / "ran"
    target.write_text(f"open({str(witness)!r}, 'w')\n")
    good = host.sitecustomize(python, gpu.run_tool, [])
    assert (good["path"], good["exists"], good["valid"], good["error"]) == (str(target), True, True, None)
    assert not witness.exists(), "looking must not run it"
    target.write_text("import os\nos.environ.setdefault('A', '1'\n")
    bad = host.sitecustomize(python, gpu.run_tool, [])
    assert (bad["exists"], bad["valid"]) == (True, False)
    assert bad["error"].startswith("line 2:")


def test_an_interpreter_that_is_not_there() -> None:
    notes: list[str] = []
    assert host.sitecustomize("/nowhere/python", gpu.run_tool, notes)["present"] is False
    assert notes == ["sitecustomize: /nowhere/python does not exist"]


def test_an_interpreter_that_is_none() -> None:
    notes: list[str] = []
    found = host.sitecustomize("/bin/false", gpu.run_tool, notes)
    assert (found["present"], found["valid"]) == (True, None)
    assert found["error"]
    assert notes


# ------------------------------------------------------------------------------------------------------ everything
KEYS = {
    "gpus",
    "nvidia_smi",
    "device_files",
    "links",
    "driver",
    "toolkits",
    "dkms",
    "kernels",
    "secure_boot",
    "iommu",
    "acs",
    "numa",
    "hmm",
    "kernel",
    "os",
    "virtualization",
    "container",
    "init_system",
    "uid",
    "memory",
    "limits",
    "cpus",
    "disks",
    "ports",
    "servers",
    "sitecustomize",
    "unattended_upgrades",
    "notes",
}


def test_an_empty_host_gives_every_key_and_says_what_is_missing(tree: Tree) -> None:
    found = host_info.collect(host_info.Wanted(nvidia_smi="/nowhere/nvidia-smi"), tree.roots)
    assert set(found) == KEYS
    assert (found["gpus"], found["init_system"], found["driver"]["loaded"]) == ([], None, None)
    named = " ".join(found["notes"])
    for what in ("gpus", "init_system", "memory", "limits", "packages", "ports"):
        assert what in named


def test_documented_keys_are_the_returned_ones() -> None:
    documented = yaml.safe_load(gpu_host_info.RETURN)
    assert set(documented) == KEYS
    assert set(documented["gpus"]["contains"]) == set(gpu.blank_gpu(0))


def test_processes_get_user_unit_and_command(tree: Tree) -> None:
    real = (Path(__file__).parent / "fixtures/h200-x2/busy.xml").read_text()
    tree.process(
        586, ["python3", "train.py", "--token=hunter2"], "0::/system.slice/job.service\n", files=("/dev/nvidia1",)
    )

    def run(argv: Any) -> gpu.ToolResult:
        return gpu.ToolResult(0, real) if "-x" in argv else gpu.ToolResult(255, "")

    tool = tree.put("root/nvidia-smi")
    tool.chmod(0o755)
    found = host_info.collect(host_info.Wanted(nvidia_smi=str(tool)), tree.roots, run)
    (process,) = found["gpus"][1]["processes"]
    assert process == {
        "pid": 586,
        "command": f"python3 train.py --token={host.HIDDEN}",
        "user": "root",
        "unit": "job.service",
        "memory_mib": 4706,
    }
    assert [holder["pid"] for holder in found["gpus"][1]["holders"]] == [586]
    assert found["gpus"][0]["holders"] == []
    # The kernel's own file is hidden here: the version that NVML answers with is the loaded one.
    assert (found["driver"]["loaded"], found["driver"]["source"]) == ("580.159.04", "nvidia-smi")


def test_one_odd_part_does_not_cost_the_others(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: Any) -> Any:
        raise RuntimeError("odd")

    monkeypatch.setattr(host, "iommu", broken)
    found = host_info.collect(host_info.Wanted(nvidia_smi="/nowhere"), tree.roots)
    assert set(found) == KEYS
    assert found["iommu"] == {}
    assert "iommu: RuntimeError: odd" in found["notes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"paths": ("data",)}, "absolute path"),
        ({"interpreters": ("python3",)}, "absolute path"),
        ({"timeout": 0}, "above 0"),
    ],
)
def test_options_that_mean_nothing(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        host_info.Wanted(**arguments)
