"""Check mode on a bare host has predicted and changed nothing."""

from __future__ import annotations

import pytest

testinfra_hosts = ["podman://gpuserve-cuda", "podman://gpuserve-cuda-guest"]


@pytest.mark.parametrize(
    "path",
    [
        "/etc/apt/preferences.d/00-gpuserve-cuda",
        "/etc/apt/apt.conf.d/52gpuserve-cuda",
        "/etc/modprobe.d/gpuserve-cuda.conf",
        "/usr/share/keyrings/cuda-archive-keyring.gpg",
        "/usr/local/cuda-13.0",
    ],
)
def test_nothing_is_there(host, path):
    assert not host.file(path).exists


def test_leftovers_are_untouched(host):
    assert host.file("/etc/apt/sources.list.d/cuda-by-hand.list").exists
    assert host.file("/etc/apt/sources.list.d/nvidia.sources").exists
    assert host.file("/etc/apt/trusted.gpg.d/cuda-retired.gpg").exists
    # Two entries that disagree: APT does not work at all, which is what the role finds.
    assert "Conflicting values" in host.run("apt-get update").stderr
