# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What the role C(cuda) installs on a host: packages, pins and refusals, from what was wanted and what was read.

Package names and the way of pinning are the vendor's: from branch 590 on, NVIDIA's repository carries no branch in the
names, C(nvidia-driver-pinning-BRANCH) (or -VERSION) holds the branch, and C(nvidia-open) is the driver with the open
kernel modules. Ubuntu's archive keeps the branch in the names (C(nvidia-dkms-590-open)).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

#: (ID, VERSION_ID) of os-release to the folder of NVIDIA's repository.
DISTRIBUTIONS = {
    ("ubuntu", "22.04"): "ubuntu2204",
    ("ubuntu", "24.04"): "ubuntu2404",
    ("debian", "12"): "debian12",
    ("debian", "13"): "debian13",
}
#: The origin that the distribution's own archive states in its Release file.
ARCHIVE_ORIGIN = {"ubuntu": "Ubuntu", "debian": "Debian"}
#: The label of NVIDIA's repository in its Release file; cuda-keyring's own preferences rely on it as well.
NVIDIA_LABEL = "NVIDIA CUDA"
#: The first branch without the branch in the package names of NVIDIA's repository.
FIRST_PLAIN_BRANCH = 590
#: What a driver consists of, as name patterns of APT.
DRIVER_PATTERNS = (
    "nvidia-*",
    "libnvidia-*",
    "libcuda1",
    "libcudadebugger1",
    "libnvcuvid1",
    "libnvoptix1",
    "libxnvctrl*",
    "cuda-drivers*",
    "firmware-nvidia-*",
    "linux-modules-nvidia-*",
    "linux-objects-nvidia-*",
    "linux-signatures-nvidia-*",
    "xserver-xorg-video-nvidia*",
)
#: Names like a driver's that are none: they may come from wherever they are.
NO_DRIVER_PATTERNS = (
    "nvidia-container-*",
    "libnvidia-container*",
    "nvidia-fs*",
    "nvidia-gds*",
    "nvidia-prime*",
    "nvidia-support",
    "nvidia-installer-cleanup",
    "nvidia-legacy-check",
    "nvidia-driver-pinning-*",
)
#: Packages of NVIDIA's repository with the driver's version that the pinning package need not name.
FLOATING = (
    "nvidia-persistenced",
    "nvidia-modprobe",
    "nvidia-settings",
    "nvidia-xconfig",
    "libxnvctrl0",
    "nvidia-fabricmanager",
    "nvidia-imex",
    "libnvidia-nscq",
    "libnvsdm",
)
#: What builds or carries kernel modules: never in a container whose kernel belongs to someone else.
KERNEL_PATTERNS = (
    "dkms",
    "nvidia-dkms*",
    "nvidia-kernel-dkms",
    "nvidia-kernel-open-dkms",
    "nvidia-kernel-source*",
    "linux-modules-nvidia-*",
    "linux-objects-nvidia-*",
)
_BRANCH = re.compile(r"^\d{3}$")
_VERSION = re.compile(r"^\d{3}\.\d+(\.\d+)?$")


def branch_of(version: str) -> str:
    """The branch of a driver version: C(590) for C(590.48.01)."""
    return version.partition(".")[0]


def upstream(version: str) -> str:
    """A package's version without epoch and revision: C(590.48.01) for C(590.48.01-1ubuntu1)."""
    return version.rpartition(":")[2].partition("-")[0]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of APT's name patterns fits."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_driver(name: str) -> bool:
    """Whether a package is a part of the driver."""
    return matches(name, DRIVER_PATTERNS) and not matches(name, NO_DRIVER_PATTERNS)


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def driver_packages(distribution: str, repository: str, branch: str, container: bool) -> list[str]:
    """The packages that make a driver: all of it, or the user's side alone when the kernel belongs to someone else."""
    if repository == "ubuntu":
        user = [f"libnvidia-compute-{branch}", f"nvidia-utils-{branch}", f"nvidia-compute-utils-{branch}"]
        return user if container else [f"nvidia-dkms-{branch}-open", *user]
    plain = int(branch) >= FIRST_PLAIN_BRANCH
    if container:
        if distribution.startswith("debian"):
            return ["libcuda1", "libnvidia-ml1", "nvidia-driver-cuda"]
        tail = "" if plain else f"-{branch}"
        return [f"libnvidia-compute{tail}", f"nvidia-utils{tail}"]
    return ["nvidia-open" if plain else f"nvidia-open-{branch}"]


def header_packages(system: str, kernels: Sequence[Mapping[str, Any]], installed: Iterable[str]) -> list[str]:
    """Headers for every kernel on disk, and the metapackages that bring them with the next kernel.

    The metapackage follows the image's (C(linux-image-generic-hwe-24.04)); without one, the flavour of the kernels.
    """
    versions = [str(kernel["version"]) for kernel in kernels]
    metas = {
        name.replace("linux-image-", "linux-headers-", 1)
        for name in installed
        if re.match(r"linux-image-(?!\d|extra|unsigned|dbg|debug)", name) and not name.endswith("-dbg")
    }
    if not metas:
        flavours = (re.sub(r"^.*?\d-(?=[a-z])", "", version) for version in versions)
        metas = {f"linux-headers-{flavour}" for flavour in flavours if re.fullmatch(r"[a-z][a-z0-9-]*", flavour)}
    missing = [f"linux-headers-{kernel['version']}" for kernel in kernels if not kernel.get("headers")]
    return sorted(metas) + sorted(missing)


def stanza(packages: Iterable[str], pin: str, priority: int, why: str) -> str:
    """One record of APT's preferences."""
    return f"Explanation: {why}\nPackage: {' '.join(packages)}\nPin: {pin}\nPin-Priority: {priority}\n"


def preferences(system: str, repository: str, target: str, container: bool, vendor: bool = True) -> str:
    """APT's preferences beside the vendor's pinning package, or instead of it. The first record that fits a version of
    a package decides, so the foreign sources come before the versions."""
    branch = branch_of(target)
    glob = f"{target}-*" if "." in target else f"{branch}.*"
    parts = []
    if container:
        parts.append(stanza(KERNEL_PATTERNS, "version *", -1, "the kernel of this container belongs to its host"))
    harmless = [name for name in NO_DRIVER_PATTERNS if name != "nvidia-driver-pinning-*"]
    parts.append(stanza(harmless, "version *", 500, "not part of the driver"))
    why = "drivers come from one source"
    foreign = f"o={ARCHIVE_ORIGIN[system]}" if repository == "nvidia" else f"l={NVIDIA_LABEL}"
    for release in (foreign, "o=LP-PPA-graphics-drivers"):
        parts.append(stanza(DRIVER_PATTERNS, f"release {release}", -1, why))
    if repository == "nvidia":
        names, why = (FLOATING, "these carry the driver's version, too") if vendor else (DRIVER_PATTERNS, "the branch")
        parts.append(stanza(names, f"version {glob}", 1000, why))
    else:
        why = "a later branch can come under this branch's names"
        parts.append(stanza([f"*nvidia*-{branch}", f"*nvidia*-{branch}-*"], f"version {glob}", 1000, why))
    return "\n".join(parts)


def plan(wanted: Mapping[str, Any], host: Mapping[str, Any], packages: Mapping[str, str]) -> dict[str, Any]:
    """What to install and why not. C(wanted) holds the role's variables without their prefix, C(host) what
    C(gpu_host_info) returned, C(packages) the installed packages with their versions.

    Nothing is raised for what host or operator have got wrong: C(errors) says it.
    """
    errors: list[str] = []
    warnings: list[str] = []
    system = str((host.get("os") or {}).get("id"))
    release = str((host.get("os") or {}).get("version_id"))
    machine = str((host.get("os") or {}).get("architecture"))
    distribution = DISTRIBUTIONS.get((system, release))
    if distribution is None:
        errors.append(
            f"found {system} {release}, expected one of {', '.join(' '.join(name) for name in DISTRIBUTIONS)}; "
            f"install driver and toolkit by other means and leave this role out."
        )
    if machine not in ("x86_64", "None"):
        errors.append(f"found a {machine} machine, expected x86_64; this role knows no other repository.")
    repository = str(wanted["repository"])
    if repository == "ubuntu" and system != "ubuntu":
        errors.append(
            f"cuda_repository is 'ubuntu' and the host runs {system}, expected Ubuntu; set cuda_repository to nvidia."
        )
    branch, version = str(wanted["driver_branch"]), str(wanted["driver_version"] or "")
    if not _BRANCH.match(branch):
        errors.append(f"cuda_driver_branch is '{branch}', expected three digits such as 590; correct it.")
    if version and not _VERSION.match(version):
        errors.append(f"cuda_driver_version is '{version}', expected one such as {branch}.48.01 or ''; correct it.")
    elif version and branch_of(version) != branch:
        errors.append(
            f"cuda_driver_version is {version} and cuda_driver_branch is {branch}, expected the branch of the version; "
            f"correct one of them."
        )

    guest = host.get("container")
    container = bool(guest) if wanted["container"] == "auto" else wanted["container"] in (True, "true")
    driver = host.get("driver") or {}
    loaded, installed = driver.get("loaded"), driver.get("installed")
    present = {name: entry for name, entry in packages.items() if is_driver(name)}
    manage = bool(wanted["driver"])
    target = version or branch
    if manage and container:
        # The library must be the module's twin to the last digit: the branch alone would float.
        target = version or str(loaded or branch)
        if not loaded:
            mismatch = (host.get("nvidia_smi") or {}).get("mismatch")
            found = (
                f"nvidia-smi reports a mismatch between the libraries here ({installed}) and the host's module"
                if mismatch
                else "no loaded NVIDIA module is visible"
            )
            errors.append(
                f"this is a container ({guest or 'cuda_container is true'}) and {found}, expected the host's module in "
                f"/proc/driver/nvidia/version; load the driver on the host and give the GPUs to the container, or set "
                f"cuda_driver to false."
            )
        elif version and version != loaded:
            errors.append(
                f"the host's kernel module is {loaded} and cuda_driver_version is {version}, expected the same: "
                f"this container ({guest or 'cuda_container is true'}) cannot change its host's module. Set "
                f"cuda_driver_version to {loaded} and cuda_driver_branch to {branch_of(str(loaded))}, or have "
                f"{version} installed on the host."
            )
        elif not version and branch_of(str(loaded)) != branch:
            errors.append(
                f"the host's kernel module is {loaded} and cuda_driver_branch is {branch}, expected a {branch} module: "
                f"this container ({guest or 'cuda_container is true'}) cannot change its host's module. Set "
                f"cuda_driver_branch to {branch_of(str(loaded))}, or have {branch} installed on the host."
            )
        odd = sorted(name for name in packages if matches(name, KERNEL_PATTERNS) and name != "dkms")
        if odd:
            warnings.append(
                f"{', '.join(odd)} in a container whose kernel belongs to its host: it builds nothing that could be "
                f"loaded. `apt-get purge {' '.join(odd)}` takes it away."
            )

    drivers: list[str] = []
    moves: list[str] = []
    headers: list[str] = []
    pin_package = None
    if manage and not errors and distribution:
        drivers = list(wanted["driver_packages"]) or driver_packages(
            distribution, repository, branch_of(target), container
        )
        if repository == "nvidia" and wanted["vendor_pinning"]:
            pin_package = f"nvidia-driver-pinning-{target}"
        if wanted["persistenced"] and repository == "nvidia":
            drivers.append("nvidia-persistenced")
        drivers = list(dict.fromkeys(drivers))
        # A package that stays under its name does not move by being wanted: it is asked for by version.
        strays = sorted(
            name
            for name, found in present.items()
            if upstream(found) != target
            and branch_of(upstream(found)) != target
            and not re.search(r"-\d{3}(?=-|$)", name)
            and upstream(found)[:1].isdigit()
            and _VERSION.match(upstream(found))
        )
        if repository == "nvidia" and int(branch_of(target)) >= FIRST_PLAIN_BRANCH:
            glob = f"{target}-*" if "." in target else f"{target}.*"
            moves = [f"{name}={glob}" for name in strays]
        if not container:
            headers = header_packages(system, host.get("kernels") or [], packages)
            if host.get("secure_boot"):
                warnings.append(
                    "Secure Boot is on: the kernel refuses modules that dkms has built until their key is enrolled. "
                    "Look at `mokutil --sb-state`, then `mokutil --import /var/lib/shim-signed/mok/MOK.der` and reboot "
                    "with a console at hand."
                )
    changes = bool(manage and installed and str(installed) != target and branch_of(str(installed)) != target)
    servers = host.get("servers") or []
    if changes and servers and not errors:
        named = ", ".join(f"{server.get('engine')} (PID {server.get('pid')})" for server in servers)
        errors.append(
            f"driver {installed} is installed, {target} is wanted, and {named} is running on it, expected no server "
            f"while the driver changes; stop it first (`systemctl stop` of its unit)."
        )

    toolkit = str(wanted["toolkit_package"] or "")
    toolkit_version = str(wanted["toolkit_version"] or "")
    toolkit_spec, toolkit_moves = toolkit, False
    if toolkit and toolkit_version:
        have = upstream(packages.get(toolkit, ""))
        if not have:
            toolkit_spec = f"{toolkit}={toolkit_version}-*"
        elif _key(have) < _key(toolkit_version):
            toolkit_spec, toolkit_moves = f"{toolkit}={toolkit_version}-*", True
        elif have != toolkit_version:
            warnings.append(
                f"{toolkit} {have} is installed and cuda_toolkit_version is {toolkit_version}: a newer one is left "
                f"alone. Set cuda_toolkit_version to {have} to say so, or take the newer one off."
            )
    moved = {spec.partition("=")[0] for spec in moves}
    names = [name for name in [*drivers, *headers] if name not in moved]
    specs = [*([toolkit_spec] if toolkit else []), *names, *moves, *wanted["extra_packages"]]
    wanted_names = [spec.partition("=")[0] for spec in specs]
    return {
        "errors": errors,
        "warnings": warnings,
        "distribution": distribution,
        "container": container,
        "target": target,
        "pin_package": pin_package,
        "packages": list(dict.fromkeys(specs)),
        "missing": sorted({name for name in [*wanted_names, pin_package or ""] if name and name not in packages}),
        "headers": headers,
        "changes": changes,
        "toolkit_moves": toolkit_moves,
        "preferences": preferences(system, repository, target, container, bool(wanted["vendor_pinning"]))
        if manage and not errors and distribution
        else "",
    }


def differences(host: Mapping[str, Any], container: bool, hmm_disabled: bool | None, driver: bool = True) -> list[str]:
    """What the running kernel holds otherwise than the disk, as sentences; none when a reboot would change nothing.
    C(hmm_disabled) is what is wanted of C(uvm_disable_hmm), None when nothing is."""
    found = []
    version = host.get("driver") or {}
    loaded, installed = version.get("loaded"), version.get("installed")
    if driver and installed and loaded != installed:
        found.append(f"driver {loaded or 'none'} is loaded, {installed} is installed")
    parameter = host.get("hmm") or {}
    if (
        not container
        and hmm_disabled is not None
        and parameter.get("uvm_loaded")
        and parameter.get("disabled") is not None
        and parameter.get("disabled") != hmm_disabled
    ):
        now = int(bool(parameter["disabled"]))
        found.append(f"nvidia_uvm runs with uvm_disable_hmm={now}, {int(hmm_disabled)} is configured")
    return found


def kernels_without_module(host: Mapping[str, Any]) -> list[str]:
    """Kernels on disk that would come up without NVIDIA's module."""
    return [str(kernel["version"]) for kernel in host.get("kernels") or [] if not kernel.get("nvidia_module")]
