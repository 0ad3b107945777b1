#!/usr/bin/python
# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_host_info
short_description: Read everything that a GPU server's policy and plan need from a host, in one run
version_added: 0.1.0
description:
  - Returns GPUs, links, driver, toolkits, kernel settings, memory, limits, disks, listeners and running inference
    servers.
  - Changes nothing, needs no package on the host beyond Python, and reads files where it can instead of starting tools.
  - What cannot be read is C(null) in the result, with the reason in RV(notes). The module fails only when its own
    options are wrong.
options:
  paths:
    description: Paths whose file systems are measured. One that does not exist yet is measured at its nearest folder.
    type: list
    elements: str
    default: []
  interpreters:
    description:
      - Python interpreters whose C(sitecustomize) is looked up and checked for its syntax, as absolute paths.
      - The file itself is not run.
    type: list
    elements: str
    default: []
  timeout:
    description: The longest wait, in seconds, for each tool that is started. A wedged GPU can make C(nvidia-smi) hang.
    type: float
    default: 20
  nvidia_smi:
    description: Path of C(nvidia-smi). Looked for on the search path and in the usual places when not given.
    type: str
attributes:
  check_mode:
    description: Runs in check mode, since it changes nothing.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
  facts:
    description: Returns its result as a normal dictionary; the play decides under which name to keep it.
    support: none
  platform:
    description: Hosts on which it works.
    support: full
    platforms: linux
notes:
  - Works without root. Root adds the owners of other users' sockets, the ACS state of PCI bridges and the state of
    processes of other users; RV(notes) says what was missed.
author:
  - The gpuserve.sglang authors (@gpuserve)
"""

EXAMPLES = r"""
- name: Read the host once
  gpuserve.sglang.gpu_host_info:
    paths: [/data, /opt/sglang]
    interpreters: [/opt/sglang/current/venv/bin/python]
  register: inspected

- name: Say what is there
  ansible.builtin.debug:
    msg: "{{ inspected.gpus | length }} GPUs over {{ inspected.links.topology }}, driver {{ inspected.driver.loaded }}"
"""

RETURN = r"""
gpus:
  description: GPUs in the order of C(nvidia-smi).
  returned: always
  type: list
  elements: dict
  contains:
    index: {description: Number in C(nvidia-smi)., type: int}
    minor: {description: 'Number of the device file, C(/dev/nvidiaN).', type: int}
    name: {description: Product name., type: str}
    uuid: {description: Identity of the device., type: str}
    memory_total_mib: {description: Memory of the device in MiB., type: int}
    memory_used_mib: {description: Memory in use in MiB., type: int}
    memory_free_mib: {description: Memory that is free in MiB., type: int}
    compute_cap: {description: 'Compute capability, such as C(12.0).', type: str}
    pci_bus_id: {description: PCI address as C(nvidia-smi) prints it., type: str}
    pcie:
      description: PCIe link, generation and lanes now and at most. The generation drops while a GPU is idle.
      type: dict
    mig: {description: Whether the GPU is split into instances., type: bool}
    ecc: {description: 'Whether memory errors are corrected, C(null) when not supported.', type: bool}
    ecc_uncorrected: {description: Uncorrectable memory errors since the driver was loaded., type: int}
    persistence: {description: Whether the driver stays initialised without a client., type: bool}
    temperature_c: {description: Temperature in degrees Celsius., type: int}
    power_limit_w: {description: Power limit in watts., type: float}
    driver_version: {description: Version of the driver that answers., type: str}
    event_reasons: {description: 'Reasons, other than idling, for clocks below their maximum.', type: list}
    processes:
      description: Processes that hold memory of the GPU, each with C(pid), C(command), C(user), C(unit), C(memory_mib).
      type: list
    holders:
      description: Processes that have the device file open (monitors too), each with C(pid), C(command), C(unit).
      type: list
nvidia_smi:
  description: Whether C(nvidia-smi) is there, its path, why it gave no answer, and whether that was a version mismatch.
  returned: always
  type: dict
  sample: {present: true, path: /usr/bin/nvidia-smi, error: null, mismatch: false}
device_files:
  description: NVIDIA device files.
  returned: always
  type: list
  elements: str
  sample: [/dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm]
links:
  description:
    - How the GPUs are joined. C(topology) is C(nvlink), C(pcie), C(none) (below two GPUs) or C(unknown).
    - C(partial) is true when only some pairs have NVLink. C(matrix) and C(p2p) are GPU by GPU, in index order.
  returned: always
  type: dict
  sample: {topology: pcie, partial: false, matrix: [[X, NODE], [NODE, X]], p2p: [[X, OK], [OK, X]]}
driver:
  description:
    - C(loaded) is what the kernel holds, C(installed) what a new process will load from disk, C(flavour) C(open) or
      C(proprietary), C(source) where C(loaded) was read, C(packages) the driver packages with their versions.
  returned: always
  type: dict
toolkits:
  description: CUDA toolkits with C(path), C(version) and whether C(nvcc) is there.
  returned: always
  type: list
  elements: dict
dkms:
  description: NVIDIA modules in the DKMS tree with C(module), C(version), C(kernel), C(arch), C(state).
  returned: always
  type: list
  elements: dict
kernels:
  description: Kernels on disk with C(version), C(running), C(nvidia_module), C(headers).
  returned: always
  type: list
  elements: dict
secure_boot:
  description: Whether the firmware insists on signed kernel modules.
  returned: always
  type: bool
iommu:
  description: C(state) is C(off), C(passthrough) or C(translated); C(groups), C(types), C(units), C(cmdline) say why.
  returned: always
  type: dict
acs:
  description: C(bridges) above the GPUs, those that are C(redirecting) peer traffic, and whether that was C(readable).
  returned: always
  type: dict
numa:
  description: Number of C(nodes), the node of each of the C(gpus), and automatic C(balancing) of pages.
  returned: always
  type: dict
hmm:
  description:
    - Whether C(nvidia_uvm) is loaded (C(uvm_loaded)), has HMM C(disabled), and what modprobe.d has C(configured).
  returned: always
  type: dict
kernel:
  description: Release of the running kernel.
  returned: always
  type: str
os:
  description: Distribution with C(id), C(version_id), C(codename), C(pretty_name), C(architecture).
  returned: always
  type: dict
virtualization:
  description: Kind of virtual machine, C(null) on bare metal.
  returned: always
  type: str
container:
  description: Container manager whose guest this is, C(null) otherwise.
  returned: always
  type: str
init_system:
  description: Name of process 1, C(systemd) where systemd runs the host.
  returned: always
  type: str
uid:
  description: Number of the user that the module ran as.
  returned: always
  type: int
memory:
  description: Main memory, limit of the control group, C(/dev/shm) and swap, in MiB.
  returned: always
  type: dict
  sample: {total_mib: 24064, available_mib: 20000, limit_mib: null, shm_mib: 12032, shm_free_mib: 12032,
           swap: {total_mib: 0, free_mib: 0}}
limits:
  description:
    - The most that a service of this host can be given. C(nofile) in files, C(memlock) in bytes; 9223372036854775807
      means unlimited. C(raisable) tells whether process 1 may go beyond its own hard limits.
  returned: always
  type: dict
cpus:
  description: C(count) and C(model) of the processors.
  returned: always
  type: dict
disks:
  description: For each of O(paths), C(path), C(exists), C(mount), C(fstype), C(total_bytes), C(free_bytes).
  returned: always
  type: list
  elements: dict
ports:
  description: TCP listeners with C(port), C(address), C(pid), C(command), C(unit).
  returned: always
  type: list
  elements: dict
servers:
  description:
    - Inference servers that run, with C(pid), C(engine), C(command), C(unit), C(user), C(port), C(listening),
      C(listening_ports), C(orphan) (a worker whose server is gone) and the C(pids) of the whole family.
  returned: always
  type: list
  elements: dict
sitecustomize:
  description:
    - For each of O(interpreters), C(interpreter), C(present), C(version), C(path), C(exists), C(valid), C(error),
      C(stdlib).
  returned: always
  type: list
  elements: dict
unattended_upgrades:
  description:
    - Whether it is C(installed) and C(enabled), its C(blacklist), and the driver packages that it could replace
      (C(exposed)).
  returned: always
  type: dict
notes:
  description: What could not be read and why.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuserve.sglang.plugins.module_utils import host_info


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "str", "default": []},
            "interpreters": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "float", "default": 20},
            "nvidia_smi": {"type": "str"},
        },
        supports_check_mode=True,
    )
    try:
        wanted = host_info.Wanted(
            paths=tuple(module.params["paths"]),
            interpreters=tuple(module.params["interpreters"]),
            timeout=module.params["timeout"],
            nvidia_smi=module.params["nvidia_smi"],
        )
    except ValueError as exc:
        module.fail_json(msg=str(exc))
    module.exit_json(changed=False, **host_info.collect(wanted))


if __name__ == "__main__":
    main()
