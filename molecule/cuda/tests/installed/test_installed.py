"""What a host has after the role, as APT and the files say."""

from __future__ import annotations

import json

import pytest

testinfra_hosts = ["podman://gpuserve-cuda", "podman://gpuserve-cuda-guest"]

KEYRING = "/usr/share/keyrings/cuda-archive-keyring.gpg"
PINNED = "590.48.01"


@pytest.fixture
def guest(host):
    return host.backend.get_hostname() == "gpuserve-cuda-guest"


def installed(host):
    lines = host.check_output("dpkg-query -W -f='${db:Status-Abbrev}|${Package}|${Version}\\n'").splitlines()
    rows = [line.split("|") for line in lines]
    return {name: version for status, name, version in rows if status[1] == "i"}


def candidate(host, package):
    lines = host.check_output(f"apt-cache policy {package}").splitlines()
    return next((line.split()[-1] for line in lines if "Candidate:" in line), "(none)")


def test_apt_works_and_has_one_entry(host):
    assert host.run("apt-get update").rc == 0
    listing = host.check_output(
        "grep -rhs compute/cuda/repos /etc/apt/sources.list /etc/apt/sources.list.d"
    ).splitlines()
    assert len(listing) == 1
    assert f"signed-by={KEYRING}" in listing[0]


def test_stray_keys_are_gone(host):
    assert not host.file("/etc/apt/trusted.gpg.d/cuda-retired.gpg").exists
    assert not host.file("/etc/apt/trusted.gpg.d/cuda-global.gpg").exists
    assert host.file(KEYRING).exists


def test_driver_is_of_the_pinned_branch(host, guest):
    packages = installed(host)
    drivers = {
        name: version
        for name, version in packages.items()
        if name.startswith(("nvidia-", "libnvidia-", "libcuda1", "firmware-nvidia")) and "pinning" not in name
    }
    assert drivers
    assert {name: v for name, v in drivers.items() if not v.startswith(f"{PINNED}-")} == {}
    # A machine follows the branch; a container is nailed to its host's version.
    assert f"nvidia-driver-pinning-{PINNED if guest else '590'}" in packages


def test_a_container_gets_no_kernel_side(host, guest):
    kernel_side = [name for name in installed(host) if "dkms" in name or name.startswith("linux-headers")]
    if guest:
        assert kernel_side == []
        assert candidate(host, "nvidia-dkms-open") == "(none)"
        assert not host.file("/etc/modprobe.d/gpuserve-cuda.conf").exists
    else:
        assert "linux-headers-6.1.0-99-amd64" in kernel_side
        assert any("dkms" in name for name in kernel_side)
        assert host.file("/lib/modules/6.1.0-99-amd64/updates/dkms/nvidia.ko").exists
        text = host.file("/etc/modprobe.d/gpuserve-cuda.conf").content_string
        assert "options nvidia_uvm uvm_disable_hmm=1\n" in text


def test_toolkit_is_the_documented_one(host):
    assert json.loads(host.file("/usr/local/cuda-13.0/version.json").content_string)["cuda"]["version"] == "13.0.1"
    assert host.file("/usr/local/cuda-13.0/bin/nvcc").mode & 0o111
    held = set(host.check_output("apt-mark showhold").split())
    assert "cuda-toolkit-13-0" in held
    # A hold on the driver would fight with the pinning.
    assert not [name for name in held if name.startswith(("nvidia", "libnvidia"))]


def test_the_daemon_runs(host):
    service = host.service("nvidia-persistenced")
    assert service.is_running
    assert service.is_enabled


def test_drivers_of_the_archive_are_pinned_out(host, guest):
    """The archive offers 999.10 of these, higher than anything of NVIDIA's."""
    for name in ("nvidia-modprobe", "nvidia-persistenced", "libnvidia-compute" if guest else "libnvidia-ml1"):
        assert candidate(host, name).startswith(f"{PINNED}-"), name


def test_upgrades_leave_driver_and_toolkit_alone(host):
    """The canary proves that both would upgrade what they may."""
    dry = host.run("unattended-upgrade --dry-run --debug")
    assert dry.rc == 0, dry.stderr
    said = dry.stdout + dry.stderr
    listed = next(line for line in said.splitlines() if "Packages that will be upgraded" in line)
    assert "gpuserve-canary" in listed
    assert "nvidia" not in listed.replace("gpuserve", "")
    assert "cuda" not in listed.replace("gpuserve-canary", "")
    simulated = host.check_output("apt-get --simulate dist-upgrade")
    moved = [line.split()[1] for line in simulated.splitlines() if line.startswith("Inst ")]
    assert moved == ["gpuserve-canary"]
    assert host.run("apt-get -y upgrade").rc == 0
    after = installed(host)
    assert after["gpuserve-canary"] == "2.0"
    assert {v for name, v in after.items() if name.startswith("libnvidia")} <= {f"{PINNED}-1", f"{PINNED}-1ubuntu1"}
    assert after["cuda-toolkit-13-0"] == "13.0.1-1"
    assert host.run("apt-get -y install --reinstall --allow-downgrades gpuserve-canary=1.0").rc == 0


def test_the_blacklist_alone_is_enough(host):
    """Unattended upgrades without APT's preferences: 595 and 999.10 would be taken, were it not for the blacklist."""
    host.run("echo 'Dir::Etc::PreferencesParts \"/nonexistent\";' >/tmp/no-pins.conf")
    dry = host.run("APT_CONFIG=/tmp/no-pins.conf unattended-upgrade --dry-run --debug")
    listed = next(line for line in (dry.stdout + dry.stderr).splitlines() if "Packages that will be upgraded" in line)
    assert listed.split(":")[-1].split() == ["gpuserve-canary"]


def test_without_the_guard_it_would_have_moved(host):
    """The counter-proof: the repository really offers 595, and only pins and blacklist keep it away."""
    simulated = host.check_output(
        "apt-get --simulate -o Dir::Etc::PreferencesParts=/nonexistent dist-upgrade | grep ^Inst"
    )
    assert "595.71.05" in simulated or "999.10" in simulated
