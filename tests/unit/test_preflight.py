"""Policy as a table: the engine that applies it, and the role's own rows over hosts of every kind."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuserve.sglang.plugins.module_utils import gpu, host, preflight
from ansible_collections.gpuserve.sglang.plugins.module_utils.preflight import PreflightError, evaluate
from ansible_collections.gpuserve.sglang.plugins.modules import gpu_host_info

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles" / "gpu_preflight"
ROWS = yaml.safe_load((ROLE / "vars" / "main.yml").read_text())["__gpu_preflight_checks"]
UNIT = "sglang-kimi.service"
WANT = {
    "unit": "sglang-kimi",
    "require_gpus": True,
    "gpu_count": 8,
    "min_memory_mib": 96000,
    "compute_capabilities": ["9.0", "10.0", "12.0"],
    "max_idle_memory_mib": 1024,
    "supported_drivers": ["580", "590"],
    "ports": [30000],
    "min_disk_gib": 20.0,
    "disk_paths": ["/opt/sglang", "/data"],
    "interpreters": ["/usr/bin/python3"],
    "min_ram_mib": 65536,
    "min_shm_mib": 8192,
    "min_nofile": 65536,
}


def standin(state: str | Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What gpu.inspect makes of the sandbox's stand-in in a state."""
    path = ROOT / "sandbox" / "standins" / "states" / f"{state}.json"
    if isinstance(state, Mapping):
        path = folder / "state.json"
        path.write_text(json.dumps(state))

    def run(argv: Any) -> gpu.ToolResult:
        done = subprocess.run(
            [sys.executable, str(ROOT / "sandbox" / "standins" / "nvidia-smi"), *argv[1:]],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "GPU_STANDIN_STATE": str(path)},
        )
        return gpu.ToolResult(done.returncode, done.stdout, done.stderr)

    return gpu.inspect("/usr/bin/nvidia-smi", run)


@pytest.fixture(scope="session")
def documented(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return standin("documented-box", tmp_path_factory.mktemp("state"))


def box(seen: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A healthy documented box around what nvidia-smi said; C(changes) replace whole keys."""
    seen = copy.deepcopy(dict(seen))
    version = next((record["driver_version"] for record in seen["gpus"]), None)
    healthy: dict[str, Any] = {
        "gpus": seen["gpus"],
        "nvidia_smi": seen["nvidia_smi"],
        "links": seen["links"],
        "device_files": ["/dev/nvidiactl", "/dev/nvidia-uvm", *(f"/dev/nvidia{number}" for number in range(8))],
        "driver": {"loaded": version, "installed": version, "flavour": "open", "packages": {}},
        "toolkits": [{"path": "/usr/local/cuda-13.0", "version": "13.0.1", "nvcc": True}],
        "dkms": [],
        "kernels": [],
        "secure_boot": False,
        "iommu": {"state": "passthrough"},
        "acs": {"readable": True, "bridges": [], "redirecting": []},
        "numa": {"nodes": 2, "gpus": [], "balancing": False},
        "hmm": {"uvm_loaded": True, "disabled": True, "configured": True},
        "kernel": "6.8.0-1",
        "os": {"id": "ubuntu", "version_id": "24.04"},
        "container": None,
        "init_system": "systemd",
        "uid": 0,
        "memory": {
            "total_mib": 515000,
            "available_mib": 500000,
            "limit_mib": None,
            "shm_mib": 250000,
            "shm_free_mib": 250000,
        },
        "limits": {"nofile": 1048576, "memlock": host.UNLIMITED, "raisable": True},
        "disks": [
            {"path": path, "exists": True, "mount": "/", "fstype": "ext4", "total_bytes": 2**43, "free_bytes": 2**42}
            for path in ("/opt/sglang", "/data")
        ],
        "ports": [],
        "servers": [],
        "sitecustomize": [
            {"interpreter": "/usr/bin/python3", "path": "/usr/lib/python3.12/sitecustomize.py", "valid": True}
        ],
        "unattended_upgrades": {"installed": True, "enabled": True, "blacklist": ["nvidia"], "exposed": []},
    }
    return {**healthy, **changes}


def report_of(inspected: Mapping[str, Any], want: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return evaluate({"host": inspected, "want": {**WANT, **(want or {})}}, ROWS, **more)


def ids(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["id"] for entry in entries]


# ------------------------------------------------------------------------------------------------ the role's table
def test_a_healthy_box_passes_every_check(documented: dict[str, Any]) -> None:
    report = report_of(box(documented))
    assert (ids(report["failures"]), ids(report["warnings"]), report["waived"]) == ([], [], [])
    assert report["ok"] is True
    # dkms and Secure Boot have nothing to say where DKMS built nothing.
    assert report["skipped"] == ["secure_boot"]
    assert len(report["passed"]) == len(ROWS) - 1


#: One fault each: what changes, the check that must notice, as what, and words that its message must hold.
FAULTS: list[tuple[str, dict[str, Any], str, str, list[str]]] = [
    ("no systemd", {"init_system": "bash"}, "init_system", "failures", ["bash", "systemd"]),
    ("other system", {"os": {"id": "fedora"}}, "operating_system", "warnings", ["fedora", "ubuntu"]),
    ("not root", {"uid": 1000}, "root", "warnings", ["1000", "become"]),
    (
        "mismatch",
        {"driver": {"loaded": "590.48.01", "installed": "595.20", "flavour": "open"}},
        "driver_versions",
        "failures",
        ["590.48.01", "595.20", "Reboot"],
    ),
    (
        "new branch",
        {"driver": {"loaded": "595.20", "installed": "595.20", "flavour": "open"}},
        "driver_supported",
        "failures",
        ["595.20", "gpu_preflight_supported_drivers"],
    ),
    (
        "proprietary",
        {"driver": {"loaded": "590.48.01", "installed": "590.48.01", "flavour": "proprietary"}},
        "driver_flavour",
        "failures",
        ["proprietary", "nvidia-open"],
    ),
    (
        "kernel without module",
        {
            "dkms": [{"kernel": "6.8.0-1"}],
            "kernels": [
                {"version": "6.8.0-1", "nvidia_module": True},
                {"version": "6.8.0-2", "nvidia_module": False},
            ],
        },
        "dkms_kernels",
        "warnings",
        ["6.8.0-2", "headers"],
    ),
    ("secure boot", {"dkms": [{"kernel": "6.8.0-1"}], "secure_boot": True}, "secure_boot", "warnings", ["mokutil"]),
    (
        "no uvm",
        {"device_files": ["/dev/nvidiactl"]},
        "device_files",
        "failures",
        ["/dev/nvidia-uvm", "nvidia-modprobe"],
    ),
    ("hmm", {"hmm": {"uvm_loaded": True, "disabled": False}}, "hmm_disabled", "warnings", ["uvm_disable_hmm=1"]),
    (
        "upgrades",
        {"unattended_upgrades": {"enabled": True, "exposed": ["libnvidia-compute-590"]}},
        "unattended_upgrades",
        "warnings",
        ["libnvidia-compute-590", "Blacklist"],
    ),
    ("no toolkit", {"toolkits": []}, "toolkit", "warnings", ["cuda-toolkit-13-0"]),
    ("iommu", {"iommu": {"state": "translated"}}, "iommu", "warnings", ["translated", "iommu=pt"]),
    (
        "acs",
        {"acs": {"readable": True, "redirecting": ["0000:00:01.0"]}},
        "acs_redirect",
        "warnings",
        ["0000:00:01.0", "isolation"],
    ),
    ("acs unread", {"acs": {"readable": False, "redirecting": None}}, "acs_redirect", "warnings", ["not known"]),
    ("numa", {"numa": {"nodes": 2, "balancing": True}}, "numa_balancing", "warnings", ["numa_balancing = 0"]),
    (
        "small shm",
        {"memory": {"available_mib": 500000, "limit_mib": None, "shm_free_mib": 64}},
        "shm",
        "failures",
        ["64 MiB", "8192 MiB", "/dev/shm"],
    ),
    (
        "little memory",
        {"memory": {"available_mib": 500000, "limit_mib": 4096, "shm_free_mib": 250000}},
        "ram",
        "failures",
        ["4096 MiB", "65536 MiB"],
    ),
    (
        "full disk",
        {
            "disks": [
                {"path": "/opt/sglang", "mount": "/opt", "free_bytes": 3 * 2**30},
                {"path": "/data", "mount": "/data", "free_bytes": 2**42},
            ]
        },
        "disk",
        "failures",
        ["/opt/sglang (on /opt)", "3 of 20 GiB"],
    ),
    ("disk not measured", {"disks": []}, "disk", "warnings", ["not known"]),
    ("memlock", {"limits": {"nofile": 65536, "memlock": 65536}}, "memlock", "warnings", ["65536", "unlimited"]),
    ("nofile", {"limits": {"nofile": 1024, "memlock": host.UNLIMITED}}, "nofile", "warnings", ["1024", "65536"]),
    (
        "port taken",
        {"ports": [{"port": 30000, "address": "0.0.0.0", "pid": 77, "command": "nc -l", "unit": "nc.service"}]},
        "port_free",
        "failures",
        ["30000", "pid 77", "nc -l", "nc.service"],
    ),
    (
        "hand-started server",
        {
            "servers": [
                {
                    "pid": 99,
                    "engine": "sglang",
                    "command": "python -m sglang.launch_server",
                    "unit": None,
                    "user": "root",
                    "port": 31000,
                    "orphan": False,
                }
            ]
        },
        "other_servers",
        "failures",
        ["pid 99", "launch_server", "31000"],
    ),
    (
        "broken sitecustomize",
        {
            "sitecustomize": [
                {"interpreter": "/usr/bin/python3", "path": "/x.py", "valid": False, "error": "line 2: bad"}
            ]
        },
        "sitecustomize",
        "failures",
        ["/x.py", "line 2"],
    ),
]


@pytest.mark.parametrize(
    ("changes", "check", "kind", "words"), [fault[1:] for fault in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_each_fault_gives_its_own_message(
    documented: dict[str, Any], changes: dict[str, Any], check: str, kind: str, words: list[str]
) -> None:
    report = report_of(box(documented, **changes))
    other = "warnings" if kind == "failures" else "failures"
    assert (ids(report[kind]), ids(report[other])) == ([check], [])
    assert report["ok"] is (kind == "warnings")
    message = report[kind][0]["message"]
    assert [word for word in words if word not in message] == []
    assert (message in report["summary"]) is (kind == "failures")


#: What the GPUs can have: the state of the stand-in, the check, words. Every other check stays silent.
GPU_FAULTS: list[tuple[str | dict[str, Any], str, str, list[str]]] = [
    ("seven-gpus", "gpu_count", "failures", ["found 7", "at least 8", "Xid 79"]),
    ("no-devices", "gpu_count", "failures", ["found 0"]),
    ("no-driver", "nvidia_smi", "failures", ["couldn't communicate", "modprobe nvidia"]),
    ("driver-mismatch", "driver_versions", "failures", ["Reboot"]),
    ("degraded-link", "pcie_width", "failures", ["found GPU 5: x8 of x16, expected none"]),
    ("foreign-process", "gpu_processes", "failures", ["GPU 3", "pid 4242", "40960 MiB"]),
    ("mig", "mig", "failures", ["GPU 0", "-mig 0"]),
    ({"overrides": {"2": {"ecc_uncorrected": 3}}}, "ecc_errors", "failures", ["GPU 2: 3"]),
    ({"overrides": {"6": {"persistence": "Disabled"}}}, "persistence", "warnings", ["GPU 6", "nvidia-persistenced"]),
    ({"overrides": {"1": {"name": "NVIDIA RTX PRO 5000"}}}, "gpu_model", "failures", ["RTX PRO 5000", "RTX PRO 6000"]),
    ({"gpu": {"compute_cap": "8.9"}}, "compute_capability", "failures", ["8.9 (8 times)", "9.0, 10.0, 12.0"]),
    ({"overrides": {"7": {"memory_total_mib": 49140}}}, "gpu_memory", "failures", ["49140 MiB", "96000 MiB"]),
    ({"overrides": {"4": {"memory_used_mib": 60000}}}, "gpu_memory_held", "failures", ["GPU 4: 60000 MiB"]),
    ({"overrides": {"0": {"gen_max": 4}}}, "pcie_generation", "warnings", ["GPU 0: generation 4"]),
]


@pytest.mark.parametrize(("state", "check", "kind", "words"), GPU_FAULTS, ids=[str(f[0])[:40] for f in GPU_FAULTS])
def test_each_fault_of_a_gpu_gives_its_own_message(
    tmp_path: Path, state: str | dict[str, Any], check: str, kind: str, words: list[str]
) -> None:
    report = report_of(box(standin(state, tmp_path)))
    other = "warnings" if kind == "failures" else "failures"
    assert (ids(report[kind]), ids(report[other])) == ([check], [])
    assert [word for word in words if word not in report[kind][0]["message"]] == []


def test_every_check_of_the_table_has_a_fault_that_it_notices() -> None:
    noticed = {fault[2] for fault in FAULTS} | {fault[1] for fault in GPU_FAULTS}
    assert {row["id"] for row in ROWS} - noticed == {"links_known", "peer_access"}


def test_an_idle_link_is_no_fault(tmp_path: Path) -> None:
    report = report_of(box(standin({"gpu": {"gen_current": 1}}, tmp_path)))
    assert (ids(report["failures"]), ids(report["warnings"])) == ([], [])


def test_links(documented: dict[str, Any]) -> None:
    lost = {**documented["links"], "topology": "unknown", "matrix": []}
    assert ids(report_of(box(documented, links=lost))["warnings"]) == ["links_known"]
    blocked = {**documented["links"], "p2p": [["X", "CNS"], ["CNS", "X"]]}
    report = report_of(box(documented, links=blocked))
    assert ids(report["warnings"]) == ["peer_access"]
    assert "CNS (2 times)" in report["warnings"][0]["message"]


def test_pcie_advice_is_not_given_on_nvlink(tmp_path: Path) -> None:
    seen = box(standin("nvlink", tmp_path), iommu={"state": "translated"}, acs={"redirecting": ["0000:00:01.0"]})
    report = report_of(seen)
    assert (report["ok"], ids(report["warnings"])) == (True, [])
    assert {"iommu", "acs_redirect"} <= set(report["skipped"])


def test_a_cpu_engine_needs_no_gpu() -> None:
    seen = gpu.inspect(None, lambda argv: pytest.fail("no tool"))
    inspected = box(seen, device_files=[], toolkits=[])
    report = report_of(inspected, {"require_gpus": False})
    assert (ids(report["failures"]), ids(report["warnings"])) == ([], [])
    assert "port_free" in report["passed"]
    assert ids(report_of(inspected)["failures"]) == ["nvidia_smi"]


def test_every_row_says_what_to_do() -> None:
    assert [row["id"] for row in ROWS if not row["message"].get("do")] == []
    assert [row["id"] for row in ROWS if "title" not in row or "severity" not in row] == []


# ------------------------------------------------------------------------------------- our own service on the box
def serving(documented: dict[str, Any], unit: str | None, **gpu_changes: Any) -> dict[str, Any]:
    inspected = box(
        documented,
        ports=[{"port": 30000, "address": "127.0.0.1", "pid": 500, "command": "python", "unit": unit}],
        servers=[
            {
                "pid": 500,
                "engine": "sglang",
                "command": "python",
                "unit": unit,
                "user": "root",
                "port": 30000,
                "orphan": False,
            }
        ],
    )
    for record in inspected["gpus"]:
        record["memory_used_mib"] = 90000
        record.update(copy.deepcopy(gpu_changes))
    return inspected


PROCESS = {"pid": 501, "command": "sglang::scheduler", "user": "root", "memory_mib": 89500}


def test_a_second_run_on_a_serving_box_passes(documented: dict[str, Any]) -> None:
    inspected = serving(documented, UNIT, processes=[{**PROCESS, "unit": UNIT}])
    inspected["memory"]["available_mib"] = 1000
    report = report_of(inspected)
    assert (ids(report["failures"]), ids(report["warnings"])) == ([], [])
    assert "ram" in report["skipped"]


def test_the_same_things_of_another_unit_do_not(documented: dict[str, Any]) -> None:
    for unit in ("other.service", None):
        report = report_of(serving(documented, unit, processes=[{**PROCESS, "unit": unit}]))
        assert ids(report["failures"]) == ["gpu_processes", "port_free", "other_servers"]


def test_in_a_container_the_unit_is_known_by_the_device_it_holds(documented: dict[str, Any]) -> None:
    holders = [{"pid": 501, "command": "sglang::scheduler", "unit": UNIT}]
    assert report_of(serving(documented, UNIT, holders=holders))["ok"] is True
    unseen = [{"pid": 90210, "command": None, "user": None, "unit": None, "memory_mib": 89500}]
    assert report_of(serving(documented, UNIT, holders=holders, processes=unseen))["ok"] is True
    # Nobody of the unit holds the device: then the memory is somebody else's, whatever runs here.
    assert ids(report_of(serving(documented, UNIT))["failures"]) == ["gpu_memory_held"]
    assert ids(report_of(serving(documented, UNIT, processes=unseen))["failures"]) == ["gpu_processes"]
    # A visible stranger is one even beside the unit.
    stranger = [{**PROCESS, "unit": None}]
    assert ids(report_of(serving(documented, UNIT, holders=holders, processes=stranger))["failures"]) == [
        "gpu_processes"
    ]


def test_a_worker_left_behind_is_named_even_in_our_unit(documented: dict[str, Any]) -> None:
    inspected = serving(documented, UNIT, processes=[{**PROCESS, "unit": UNIT}])
    inspected["servers"][0]["orphan"] = True
    report = report_of(inspected)
    assert ids(report["failures"]) == ["other_servers"]
    assert "left behind: yes" in report["failures"][0]["message"]


def test_what_the_start_will_end_is_in_nobodys_way(documented: dict[str, Any]) -> None:
    """A server that was started by hand and is taken over, or a worker left behind: gpu_release says which."""
    inspected = serving(documented, None, processes=[{**PROCESS, "unit": None}])
    inspected["servers"][0]["pids"] = [500, 501]
    inspected["memory"]["available_mib"] = 1000
    report = report_of(inspected, {"releasable": [500, 501]})
    assert (ids(report["failures"]), ids(report["warnings"])) == ([], [])
    assert ids(report_of(inspected, {"releasable": [500]})["failures"]) == ["gpu_processes"]


def test_other_ports_are_nobodys_business(documented: dict[str, Any]) -> None:
    ports = [{"port": 22, "address": "0.0.0.0", "pid": 1, "command": "sshd", "unit": "ssh.service"}]
    assert report_of(box(documented, ports=ports))["ok"] is True
    assert ids(report_of(box(documented, ports=ports), {"ports": [22, 30000]})["failures"]) == ["port_free"]


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("590.48.01", "590.48.01", True),
        ("590.48.01", "590.48", True),
        ("590.48.01", "590.44.01", False),
        ("590.48.01", "595.20", False),
        (None, "590.48.01", None),
    ],
)
def test_driver_versions(one: str | None, two: str | None, same: bool | None) -> None:
    assert preflight.same_version(one, two) is same


def test_a_branch_is_no_prefix_of_digits(documented: dict[str, Any]) -> None:
    driver = {"loaded": "59.1", "installed": "59.1", "flavour": "open"}
    assert ids(report_of(box(documented, driver=driver), {"supported_drivers": ["5"]})["failures"]) == [
        "driver_supported"
    ]
    exact = {"supported_drivers": ["59.1"]}
    assert report_of(box(documented, driver=driver), exact)["ok"] is True


# --------------------------------------------------------------------------------------------------------- waivers
def test_a_waived_check_passes_and_is_listed(documented: dict[str, Any]) -> None:
    inspected = box(documented, iommu={"state": "translated"}, toolkits=[])
    inspected["memory"]["shm_free_mib"] = 1
    waivers = [
        {"id": "shm", "reason": "a toy model"},
        {"id": "iommu", "reason": "two tenants"},
        {"id": "mig", "reason": "not needed after all"},
    ]
    report = report_of(inspected, waivers=waivers)
    assert report["ok"] is True
    assert [(entry["id"], entry["reason"]) for entry in report["waived"]] == [
        ("iommu", "two tenants"),
        ("shm", "a toy model"),
    ]
    assert ids(report["warnings"]) == ["toolkit"]
    assert report["waivers_unused"] == ["mig"]
    assert "a toy model" in report["table"]


def test_a_long_finding_does_not_hide_the_reason_of_its_waiver(documented: dict[str, Any]) -> None:
    inspected = box(documented)
    for number, record in enumerate(inspected["gpus"]):
        record["processes"] = [
            {"pid": number, "command": "/usr/bin/python3 train.py", "user": "ann", "unit": None, "memory_mib": 900}
        ]
    reason = "Ann's jobs are small, and they end before the night in which this server is started."
    report = report_of(inspected, waivers=[{"id": "gpu_processes", "reason": reason}])
    (line,) = [line for line in report["table"].splitlines() if line.startswith("waived")]
    assert line.endswith(f"... - waived: {reason}")
    assert report["waived"][0]["found"].count("train.py") == 8


@pytest.mark.parametrize(
    ("waiver", "words"),
    [
        ({"id": "smh", "reason": "x"}, ["'smh'", "shm"]),
        ({"id": "shm"}, ["no reason", "'shm'"]),
        ({"id": "shm", "reason": "  "}, ["no reason"]),
        ({"id": "port_free", "reason": "x"}, ["cannot be waived"]),
        ({"id": "shm", "reason": "x", "until": "2027"}, ["id and reason"]),
        ("shm", ["id and reason"]),
    ],
)
def test_waivers_that_are_refused(documented: dict[str, Any], waiver: Any, words: list[str]) -> None:
    with pytest.raises(PreflightError) as caught:
        report_of(box(documented), waivers=[waiver])
    assert [word for word in words if word not in str(caught.value)] == []


# ------------------------------------------------------------------------------------------------------ the engine
HOST = {"gpus": [{"index": 0, "pcie": {"gen_max": 5}, "name": "a"}], "kernel": "6.8.0", "n": 3, "zero": 0}


def one(row: dict[str, Any], **more: Any) -> dict[str, Any]:
    return evaluate({"host": HOST, "plan": {"port": 1}, "want": {"limit": 3}}, [{"id": "x", **row}], **more)


@pytest.mark.parametrize(
    ("query", "expect", "met"),
    [
        ("host.n", {"equals": 3}, True),
        ("host.n", {"equals": 4}, False),
        ("host.zero", {"equals": False}, False),
        ("host.n", {"not_equals": 3}, False),
        ("host.n", {"at_least": 3}, True),
        ("host.n", {"at_least": {"query": "want.limit"}}, True),
        ("host.n", {"at_least": 3.5}, False),
        ("host.n", {"at_most": 2}, False),
        ("host.kernel", {"one_of": ["6.8.0", "6.9"]}, True),
        ("host.kernel", {"matches": "^5"}, False),
        ("host.gpus[].name", {"all_one_of": ["a"]}, True),
        ("host.gpus[].name", {"all_one_of": ["b"]}, False),
        ("host.gpus[].name", {"contains": "a"}, True),
        ("host.gpus[].name", {"contains": ["a", "b"]}, False),
        ("host.gpus", {"empty": True}, False),
        ("host.gpus", {"empty": False}, True),
        ("host.gpus", {"at_most_entries": 0}, False),
        ("plan.port", {"equals": 1}, True),
        ("found.gpu_models", {"equals": ["a"]}, True),
    ],
)
def test_operators(query: str, expect: dict[str, Any], met: bool) -> None:
    assert one({"query": query, "expect": expect})["ok"] is met


def test_every_operator_is_tried() -> None:
    marks = test_operators.pytestmark  # type: ignore[attr-defined]
    assert {next(iter(case[1])) for case in marks[0].args[1]} == set(preflight.OPERATORS)


@pytest.mark.parametrize(
    ("unknown", "severity", "where"),
    [
        (None, "error", "warnings"),
        ("warn", "error", "warnings"),
        ("fail", "error", "failures"),
        ("fail", "warning", "warnings"),
        ("skip", "error", "skipped"),
    ],
)
@pytest.mark.parametrize("query", ["host.nothing", "length(host.nothing)"])
def test_what_is_not_known_is_never_a_pass(unknown: str | None, severity: str, where: str, query: str) -> None:
    row = {"query": query, "expect": {"equals": 1}, "severity": severity, **({"unknown": unknown} if unknown else {})}
    report = one(row)
    assert len(report[where]) == 1
    assert report["passed"] == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"expect": {"equals": 1}}, "no 'query'"),
        ({"query": "host.n"}, "no 'expect'"),
        ({"query": "host.n", "expect": {"like": 1}}, "one of equals"),
        ({"query": "host.n", "expect": {"equals": 1, "at_least": 1}}, "one of equals"),
        ({"query": "host.", "expect": {"equals": 1}}, "JMESPath"),
        ({"query": "host.n", "expect": {"equals": 1}, "when": "a &&"}, "when"),
        ({"query": "host.n", "expect": {"at_least": {"query": "want."}}}, "JMESPath"),
        ({"query": "host.n", "expect": {"at_least": {"query": "want.nothing"}}}, "no value at want.nothing"),
        ({"query": "host.kernel", "expect": {"at_least": 1}}, "expected a number"),
        ({"query": "host.kernel", "expect": {"matches": "("}}, "cannot be applied"),
        ({"query": "host.n", "expect": {"equals": 1}, "severity": "fatal"}, "error or warning"),
        ({"query": "host.n", "expect": {"equals": 1}, "unknown": "pass"}, "warn or fail or skip"),
        ({"query": "host.n", "expect": {"equals": 1}, "waivable": "no"}, "true or false"),
        ({"query": "host.n", "expect": {"equals": 1}, "mesage": {}}, "found key mesage"),
        ({"query": "host.n", "expect": {"equals": 1}, "message": {"fix": "x"}}, "do, expected, found, item"),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(PreflightError) as caught:
        one(row)
    assert words in str(caught.value)
    assert "'x'" in str(caught.value)


def test_a_site_row_cannot_take_the_place_of_another() -> None:
    row = {"id": "shm", "query": "host.n", "expect": {"equals": 3}}
    with pytest.raises(PreflightError, match=r"'shm'.*twice"):
        preflight.check_rows([*ROWS, row])


def test_a_wrong_row_is_refused_even_where_it_does_not_apply() -> None:
    with pytest.raises(PreflightError, match="JMESPath"):
        one({"query": "host.", "expect": {"equals": 1}, "when": "host.nothing"})


def test_a_host_that_was_not_read_is_refused() -> None:
    for wrong in (None, {}, {"skipped": True}):
        with pytest.raises(PreflightError, match="deployment_host"):
            evaluate({"host": wrong}, [])


def test_no_jmespath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jmespath", None)
    with pytest.raises(PreflightError, match="pip install"):
        one({"query": "host.n", "expect": {"equals": 3}})


def test_ansible_types_are_made_plain() -> None:
    class Text(str):
        pass

    class Lazy(dict[str, Any]):
        def items(self) -> Any:
            return [(Text(key), value) for key, value in super().items()]

    made = preflight.plain(Lazy(a=Text("x"), b=[Lazy(c=1)], d=True))
    assert made == {"a": "x", "b": [{"c": 1}], "d": True}
    assert {type(made), type(made["a"]), type(made["b"][0]), type(next(iter(made)))} == {dict, str}
    # jmespath's functions refuse subclasses of str, so this fails without plain().
    assert evaluate(
        {"host": {"gpus": [], "name": Text("abc")}},
        [{"id": "x", "query": "length(host.name)", "expect": {"equals": 3}}],
    )["ok"]


def test_the_table_is_aligned_and_counts(documented: dict[str, Any]) -> None:
    inspected = box(documented, toolkits=[], init_system="bash")
    report = report_of(inspected, name="box1")
    head, *rest = report["table"].splitlines()
    assert head == f"Preflight of box1: {len(ROWS) - 3} passed, 1 failed, 1 warnings, 0 waived, 1 do not apply"
    body = rest[3 : 3 + len(ROWS) - 1]
    column = rest[1].index("found")
    assert {line[column - 1] for line in body} == {" "}
    assert all(line[column] != " " for line in body)
    assert [line.split()[0] for line in body[:3]] == ["FAILED", "WARNING", "ok"]
    assert report["summary"].splitlines()[0] == "1 preflight check failed on box1; nothing was changed."


def test_the_report_is_json(documented: dict[str, Any]) -> None:
    report = report_of(box(documented, toolkits=[]))
    assert json.loads(json.dumps(report)) == report


# -------------------------------------------------------------------------------------------------------- the role
def test_want_has_what_the_rows_ask_for() -> None:
    given = yaml.safe_load((ROLE / "vars" / "main.yml").read_text())["__gpu_preflight_want"]
    assert set(given) == set(WANT)
    used = set(re.findall(r"\bwant\.(\w+)", json.dumps(ROWS)))
    assert used <= set(given)


def test_found_has_what_the_rows_ask_for(documented: dict[str, Any]) -> None:
    derived = preflight.derive(box(documented), WANT)
    used = set(re.findall(r"\bfound\.(\w+)", json.dumps(ROWS)))
    assert used <= set(derived)
    described = preflight.derive.__doc__ or ""
    assert [key for key in derived if f"\n    {key} " not in described] == []


def test_host_keys_of_the_rows_exist() -> None:
    documented_keys = yaml.safe_load(gpu_host_info.RETURN)
    used = set(re.findall(r"\bhost\.(\w+)", json.dumps(ROWS)))
    assert used <= set(documented_keys)


def playbook(folder: Path, variables: Mapping[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
    path = folder / "variables.json"
    path.write_text(json.dumps({"ansible_become": False, "ansible_python_interpreter": sys.executable, **variables}))
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", "-c", "local"]
    return subprocess.run(
        [*command, "playbooks/preflight.yml", "-e", f"@{path}", *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
    )


PATHS = {"gpu_preflight_disk_paths": WANT["disk_paths"]}


def test_the_playbook_passes_a_fit_host_and_writes_the_report(documented: dict[str, Any], tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    variables = {"deployment_host": box(documented), "gpu_preflight_report_file": str(target), **PATHS}
    done = playbook(tmp_path, variables, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=0" in done.stdout
    report = json.loads(target.read_text())
    assert (report["ok"], report["failures"], report["skipped"]) == (True, [], ["secure_boot"])


def test_the_playbook_ends_with_one_error_for_all_failures(documented: dict[str, Any], tmp_path: Path) -> None:
    unfit = box(documented, init_system="bash")
    unfit["memory"]["shm_free_mib"] = 64
    waivers = [{"id": "iommu", "reason": "two tenants"}]
    extra = [{"id": "site", "query": "host.kernel", "expect": {"matches": "^7"}, "message": {"do": "Boot 7."}}]
    variables = {
        "deployment_host": unfit,
        "gpu_preflight_waivers": waivers,
        "gpu_preflight_checks_extra": extra,
        **PATHS,
    }
    done = playbook(tmp_path, variables)
    assert done.returncode == 2
    assert done.stdout.count("FAILED!") == 1
    for words in (
        "3 preflight checks failed on localhost",
        "[init_system]",
        "[shm]",
        "[site] site: found 6.8.0-1",
        "Boot 7.",
    ):
        assert words in done.stdout


def test_the_playbook_refuses_a_wrong_policy(documented: dict[str, Any], tmp_path: Path) -> None:
    waivers = [{"id": "smh", "reason": "x"}]
    done = playbook(tmp_path, {"deployment_host": box(documented), "gpu_preflight_waivers": waivers, **PATHS})
    assert done.returncode == 2
    assert "found 'smh', expected the id of a check" in done.stdout


@pytest.mark.parametrize(
    "sites",
    [
        [],
        [{"interpreter": "/opt/py", "present": False, "valid": None, "error": None}],
        [{"interpreter": "/opt/py", "present": True, "valid": None, "error": "status 1"}],
    ],
    ids=["not asked", "not there", "no answer"],
)
def test_an_interpreter_that_was_not_read_is_no_pass(documented: dict[str, Any], sites: list[dict[str, Any]]) -> None:
    sound = {"interpreter": "/usr/bin/python3", "present": True, "valid": None, "error": None}
    want = {"interpreters": ["/usr/bin/python3", "/opt/py"]}
    (warning,) = report_of(box(documented, sitecustomize=[sound, *sites]), want)["warnings"]
    assert (warning["id"], warning["found"]) == ("sitecustomize", "not known of /opt/py")
    assert "deployment_host" in warning["do"]
    broken = {"interpreter": "/opt/q", "present": True, "valid": False, "path": "/q", "error": "line 1"}
    report = report_of(box(documented, sitecustomize=[sound, *sites, broken]), want)
    assert ids(report["failures"]) == ["sitecustomize"]


def test_a_path_that_was_not_measured_is_named(documented: dict[str, Any]) -> None:
    (warning,) = report_of(box(documented), {"disk_paths": ["/opt/sglang", "/scratch"]})["warnings"]
    assert (warning["id"], warning["found"]) == ("disk", "not known of /scratch")


def test_a_wrong_question_for_what_was_not_read_is_refused() -> None:
    row = {"id": "x", "query": "host.x", "expect": {"equals": 1}, "message": {"unread": "a["}}
    with pytest.raises(PreflightError, match="unread"):
        preflight.check_rows([row])


def resolved(names: list[str], variables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Private variables of the role deployment, as its tasks see them in a play."""
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [str(ROOT / "roles" / role / "defaults" / "main.yml") for role in ("sglang", "deployment")]
        + [str(ROOT / "roles/deployment/vars/main.yml")],
        "vars": {"deployment_model_path": "/data/m", **variables},
        "tasks": [{"ansible.builtin.debug": {"msg": {name: f"{{{{ {name} }}}}" for name in names}}}],
    }
    path = folder / "play.yml"
    path.write_text(yaml.safe_dump([play]))
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default",
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(re.search(r"=> (\{.*?^\})", done.stdout, re.DOTALL | re.MULTILINE).group(1))[
        "msg"
    ]
    return found


def test_the_deployment_reads_what_the_preflight_will_judge(tmp_path: Path) -> None:
    names = ["__deployment_paths", "__deployment_interpreters"]
    own = ["/data/m", "/opt/sglang", "/var/lib/sglang-kimi", "/var/cache/sglang-kimi"]
    assert resolved(names, {}, tmp_path) == {names[0]: own, names[1]: ["/usr/bin/python3"]}
    asked = {
        "gpu_preflight_disk_paths": ["/opt/sglang", "/scratch"],
        "gpu_preflight_interpreters": ["/opt/py", "/usr/bin/python3"],
    }
    assert resolved(names, asked, tmp_path) == {names[0]: [*own, "/scratch"], names[1]: ["/usr/bin/python3", "/opt/py"]}
    (look,) = [
        task["gpuserve.sglang.gpu_host_info"]
        for task in yaml.safe_load((ROOT / "roles/deployment/tasks/inspect.yml").read_text())
        if "gpuserve.sglang.gpu_host_info" in task
    ]
    assert [look["paths"], look["interpreters"]] == [f"{{{{ {name} }}}}" for name in names]


def test_the_role_reads_the_host_itself(tmp_path: Path) -> None:
    """Whatever this machine is: the module ran, and its answer was judged."""
    target = tmp_path / "report.json"
    playbook(tmp_path, {"gpu_preflight_report_file": str(target), "gpu_preflight_require_gpus": False})
    report = json.loads(target.read_text())
    assert report["error"] is None
    judged = {*report["passed"], *(entry["id"] for key in ("failures", "warnings") for entry in report[key])}
    assert {"init_system", "root", "shm", "memlock", "nofile", "port_free", "other_servers"} <= judged
