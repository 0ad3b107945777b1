"""What the role cuda would install, pin and refuse, from what was wanted and what was read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import cuda

WANTED: dict[str, Any] = {
    "repository": "nvidia",
    "driver": True,
    "driver_branch": "590",
    "driver_version": "",
    "driver_packages": [],
    "vendor_pinning": True,
    "persistenced": True,
    "container": "auto",
    "toolkit_package": "cuda-toolkit-13-0",
    "toolkit_version": "13.0.1",
    "extra_packages": [],
}
HOST: dict[str, Any] = {
    "os": {"id": "ubuntu", "version_id": "24.04", "architecture": "x86_64"},
    "container": None,
    "driver": {"loaded": None, "installed": None, "flavour": None},
    "nvidia_smi": {"mismatch": False},
    "kernels": [{"version": "6.8.0-90-generic", "running": True, "nvidia_module": False, "headers": False}],
    "secure_boot": False,
    "servers": [],
    "hmm": {"uvm_loaded": False, "disabled": None, "configured": None},
}


def host(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(HOST), **changes}


def guest(loaded: str | None = "590.48.01", **changes: Any) -> dict[str, Any]:
    driver = {"loaded": loaded, "installed": loaded, "flavour": "open"}
    return host(**{"container": "lxc", "driver": driver, "kernels": [], **changes})


def plan(found: dict[str, Any], packages: dict[str, str] | None = None, **wanted: Any) -> dict[str, Any]:
    return cuda.plan({**WANTED, **wanted}, found, packages or {})


def test_a_bare_machine_gets_the_vendors_way() -> None:
    result = plan(host())
    assert result["errors"] == [] and result["warnings"] == []
    assert result["distribution"] == "ubuntu2404"
    assert result["pin_package"] == "nvidia-driver-pinning-590"
    assert result["packages"] == [
        "cuda-toolkit-13-0=13.0.1-*",
        "nvidia-open",
        "nvidia-persistenced",
        "linux-headers-generic",
        "linux-headers-6.8.0-90-generic",
    ]
    assert set(result["missing"]) == {"nvidia-driver-pinning-590", *(p.partition("=")[0] for p in result["packages"])}
    assert result["container"] is False and result["changes"] is False


@pytest.mark.parametrize(
    ("system", "version", "folder"),
    [
        ("ubuntu", "22.04", "ubuntu2204"),
        ("ubuntu", "24.04", "ubuntu2404"),
        ("debian", "12", "debian12"),
        ("debian", "13", "debian13"),
    ],
)
def test_repository_folders(system: str, version: str, folder: str) -> None:
    result = plan(host(os={"id": system, "version_id": version, "architecture": "x86_64"}))
    assert (result["distribution"], result["errors"]) == (folder, [])


def test_an_exact_version_moves_everything_that_keeps_its_name() -> None:
    packages = {
        "nvidia-open": "590.48.01-1ubuntu1",
        "libnvidia-compute": "590.48.01-1ubuntu1",
        "nvidia-persistenced": "590.48.01-1ubuntu1",
        "nvidia-container-toolkit": "1.19.1-1",
        "libnvidia-cfg1-580": "580.159.04-1ubuntu1",
        "nvidia-driver-pinning-590": "590.48.01-0ubuntu1",
    }
    found = host(driver={"loaded": "590.48.01", "installed": "590.48.01", "flavour": "open"})
    result = plan(found, packages, driver_version="590.44.01")
    moves = [spec for spec in result["packages"] if spec.endswith("=590.44.01-*")]
    assert [spec.partition("=")[0] for spec in moves] == ["libnvidia-compute", "nvidia-open", "nvidia-persistenced"]
    assert result["pin_package"] == "nvidia-driver-pinning-590.44.01"
    assert result["changes"] is True
    assert "nvidia-open" not in result["packages"], "wanted by name alone it would stay what it is"


def test_a_newer_patch_of_the_branch_is_left_alone() -> None:
    packages = {"nvidia-open": "590.48.01-1ubuntu1"}
    found = host(driver={"loaded": "590.48.01", "installed": "590.48.01", "flavour": "open"})
    result = plan(found, packages)
    assert "nvidia-open" in result["packages"] and result["changes"] is False
    assert [spec for spec in result["packages"] if "=590" in spec] == []


def test_the_long_term_branch_has_its_number_in_the_names() -> None:
    assert "nvidia-open-580" in plan(host(), driver_branch="580")["packages"]
    assert plan(guest("580.159.04"), driver_branch="580")["packages"][1:3] == [
        "libnvidia-compute-580",
        "nvidia-utils-580",
    ]


def test_a_container_gets_the_hosts_version_and_nothing_of_the_kernel() -> None:
    result = plan(guest())
    assert result["errors"] == [] and result["container"] is True
    assert result["pin_package"] == "nvidia-driver-pinning-590.48.01"
    assert result["headers"] == []
    assert not [name for name in result["packages"] if "dkms" in name or "open" in name or "headers" in name]
    assert "Package: dkms nvidia-dkms*" in result["preferences"]


@pytest.mark.parametrize(
    ("loaded", "wanted", "words"),
    [
        ("580.159.04", {}, ["580.159.04", "cuda_driver_branch is 590", "Set cuda_driver_branch to 580"]),
        (
            "590.44.01",
            {"driver_version": "590.48.01"},
            ["590.44.01", "cuda_driver_version is 590.48.01", "Set cuda_driver_version to 590.44.01"],
        ),
        (None, {}, ["no loaded NVIDIA module", "/proc/driver/nvidia/version", "cuda_driver to false"]),
    ],
)
def test_a_container_that_differs_from_its_host_is_refused(
    loaded: str | None, wanted: dict[str, Any], words: list[str]
) -> None:
    result = plan(guest(loaded), **wanted)
    assert len(result["errors"]) == 1
    assert [word for word in words if word not in result["errors"][0]] == []
    assert result["pin_package"] is None and result["preferences"] == ""


def test_a_mismatch_that_hides_the_hosts_version_is_refused() -> None:
    found = guest(None, nvidia_smi={"mismatch": True}, driver={"loaded": None, "installed": "595.20", "flavour": None})
    assert "mismatch" in plan(found)["errors"][0] and "595.20" in plan(found)["errors"][0]


def test_a_container_may_have_the_toolkit_without_a_driver() -> None:
    result = plan(guest(None), driver=False)
    assert result["errors"] == []
    assert result["packages"] == ["cuda-toolkit-13-0=13.0.1-*"]
    assert result["pin_package"] is None


def test_dkms_in_a_container_is_named() -> None:
    result = plan(guest(), {"nvidia-dkms-590-open": "590.48.01-0ubuntu0.24.04.1"})
    assert "apt-get purge nvidia-dkms-590-open" in result["warnings"][0]


@pytest.mark.parametrize(
    ("value", "container"), [("auto", True), ("true", True), (True, True), ("false", False), (False, False)]
)
def test_the_operator_decides_what_a_container_is(value: Any, container: bool) -> None:
    assert plan(guest(), container=value)["container"] is container


@pytest.mark.parametrize(
    ("found", "wanted", "words"),
    [
        ({"os": {"id": "fedora", "version_id": "42", "architecture": "x86_64"}}, {}, "found fedora 42"),
        ({"os": {"id": "ubuntu", "version_id": "24.04", "architecture": "aarch64"}}, {}, "aarch64"),
        (
            {"os": {"id": "debian", "version_id": "12", "architecture": "x86_64"}},
            {"repository": "ubuntu"},
            "runs debian",
        ),
        ({}, {"driver_branch": "590.48.01"}, "three digits"),
        ({}, {"driver_version": "590"}, "expected one such as 590.48.01"),
        ({}, {"driver_version": "595.71.05"}, "expected the branch of the version"),
    ],
)
def test_refusals(found: dict[str, Any], wanted: dict[str, Any], words: str) -> None:
    errors = plan(host(**found), **wanted)["errors"]
    assert len(errors) == 1 and words in errors[0]


def test_a_running_server_keeps_its_driver() -> None:
    driver = {"loaded": "580.159.04", "installed": "580.159.04", "flavour": "open"}
    server = {"engine": "sglang", "pid": 4242}
    errors = plan(host(driver=driver, servers=[server]))["errors"]
    assert len(errors) == 1
    assert "580.159.04" in errors[0] and "sglang (PID 4242)" in errors[0] and "systemctl stop" in errors[0]
    same = {"loaded": "590.44.01", "installed": "590.44.01", "flavour": "open"}
    assert plan(host(driver=same, servers=[server]))["errors"] == []


def test_the_archives_driver() -> None:
    result = plan(host(), repository="ubuntu")
    assert result["pin_package"] is None
    assert result["packages"][1:5] == [
        "nvidia-dkms-590-open",
        "libnvidia-compute-590",
        "nvidia-utils-590",
        "nvidia-compute-utils-590",
    ]
    assert "Pin: release l=NVIDIA CUDA\nPin-Priority: -1" in result["preferences"]
    assert "Pin: version 590.*\nPin-Priority: 1000" in result["preferences"]


def records(text: str) -> list[tuple[list[str], str, int]]:
    """(name patterns, pin, priority) of each record, in order."""
    found = [dict(line.split(": ", 1) for line in part.splitlines()) for part in text.strip().split("\n\n")]
    return [(record["Package"].split(), record["Pin"], int(record["Pin-Priority"])) for record in found]


def fitting(text: str, name: str) -> list[tuple[str, int]]:
    return [(pin, priority) for patterns, pin, priority in records(text) if cuda.matches(name, patterns)]


@pytest.mark.parametrize("vendor", [True, False])
def test_foreign_sources_come_before_versions(vendor: bool) -> None:
    """APT takes the first record that fits a version: the archive's 590.48.01 must not pass for NVIDIA's."""
    text = cuda.preferences("ubuntu", "nvidia", "590.48.01", container=False, vendor=vendor)
    foreign = [("release o=Ubuntu", -1), ("release o=LP-PPA-graphics-drivers", -1)]
    own = ("version 590.48.01-*", 1000)
    assert fitting(text, "nvidia-persistenced") == [*foreign, own]
    assert fitting(text, "libnvidia-compute") == (foreign if vendor else [*foreign, own])
    assert fitting(text, "nvidia-container-toolkit")[0] == ("version *", 500)
    # The vendor's pinning package itself must stay installable from the vendor.
    assert ("version *", 500) not in fitting(text, "nvidia-driver-pinning-590")


def test_pins_of_a_container_and_of_the_archive() -> None:
    text = cuda.preferences("debian", "nvidia", "590", container=True)
    assert fitting(text, "nvidia-kernel-open-dkms")[0] == ("version *", -1)
    assert fitting(text, "nvidia-persistenced")[-1] == ("version 590.*", 1000)
    text = cuda.preferences("ubuntu", "ubuntu", "590", container=False)
    assert fitting(text, "libnvidia-compute-590")[0] == ("release l=NVIDIA CUDA", -1)
    assert fitting(text, "nvidia-dkms-590-open")[-1] == ("version 590.*", 1000)


def test_without_the_vendors_pinning_package() -> None:
    result = plan(host(), vendor_pinning=False)
    assert result["pin_package"] is None and "nvidia-open" in result["packages"]


def test_secure_boot_is_warned_of() -> None:
    assert "mokutil" in plan(host(secure_boot=True))["warnings"][0]
    assert plan(guest(secure_boot=True))["warnings"] == []


@pytest.mark.parametrize(
    ("installed", "spec", "warned"),
    [
        ({}, "cuda-toolkit-13-0=13.0.1-*", False),
        ({"cuda-toolkit-13-0": "13.0.0-1"}, "cuda-toolkit-13-0=13.0.1-*", False),
        ({"cuda-toolkit-13-0": "13.0.1-1"}, "cuda-toolkit-13-0", False),
        ({"cuda-toolkit-13-0": "13.0.2-1"}, "cuda-toolkit-13-0", True),
    ],
)
def test_the_toolkit(installed: dict[str, str], spec: str, warned: bool) -> None:
    result = plan(host(), installed)
    assert result["packages"][0] == spec
    assert any("newer one is left alone" in warning for warning in result["warnings"]) is warned


def test_no_toolkit_and_own_packages() -> None:
    result = plan(host(kernels=[]), toolkit_package="", driver_packages=["x"], extra_packages=["nvidia-fabricmanager"])
    assert result["packages"] == ["x", "nvidia-persistenced", "nvidia-fabricmanager"]


@pytest.mark.parametrize(
    ("installed", "kernels", "expected"),
    [
        (["linux-image-generic-hwe-24.04", "linux-image-6.14.0-37-generic"], [], ["linux-headers-generic-hwe-24.04"]),
        (["linux-image-cloud-amd64"], [("6.1.0-40-cloud-amd64", True)], ["linux-headers-cloud-amd64"]),
        ([], [("6.1.0-40-rt-amd64", True)], ["linux-headers-rt-amd64"]),
        ([], [("6.12.48+deb13-amd64", False)], ["linux-headers-amd64", "linux-headers-6.12.48+deb13-amd64"]),
        (["linux-image-extra-virtual"], [], []),
        ([], [("6.8.0", True)], []),
    ],
)
def test_headers(installed: list[str], kernels: list[tuple[str, bool]], expected: list[str]) -> None:
    rows = [{"version": version, "headers": headers} for version, headers in kernels]
    assert cuda.header_packages("debian", rows, installed) == expected


@pytest.mark.parametrize(
    ("driver", "hmm", "container", "expected"),
    [
        (("590.48.01", "590.48.01"), (True, True), False, []),
        (("590.44.01", "590.48.01"), (True, True), False, ["driver 590.44.01 is loaded, 590.48.01 is installed"]),
        ((None, "590.48.01"), (False, None), False, ["driver none is loaded, 590.48.01 is installed"]),
        (
            ("590.48.01", "590.48.01"),
            (True, False),
            False,
            ["nvidia_uvm runs with uvm_disable_hmm=0, 1 is configured"],
        ),
        (("590.48.01", "590.48.01"), (True, False), True, []),
        (("590.48.01", "590.48.01"), (True, None), False, []),
        ((None, None), (False, None), False, []),
    ],
)
def test_differences(driver: Any, hmm: Any, container: bool, expected: list[str]) -> None:
    found = {
        "driver": {"loaded": driver[0], "installed": driver[1]},
        "hmm": {"uvm_loaded": hmm[0], "disabled": hmm[1]},
    }
    assert cuda.differences(found, container, True) == expected


def test_versions() -> None:
    assert cuda.upstream("1:590.48.01-1ubuntu1") == "590.48.01"
    assert cuda.branch_of("590.48.01") == "590"
    assert cuda.is_driver("nvidia-utils") and not cuda.is_driver("nvidia-container-toolkit")
