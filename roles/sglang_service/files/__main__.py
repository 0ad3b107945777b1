"""The programs of gpuserve.sglang that run on the host, without Ansible and without a network.

    /usr/bin/python3 -I -S /usr/local/lib/gpuserve-sglang SUBCOMMAND --settings /etc/gpuserve-sglang/UNIT.json [...]

Each subcommand is `main(argv)` of a module that the play uses as well, copied into this folder: there is one program for
the play, for systemd and for the operator at 3 a.m. SUBCOMMAND --help says what it takes.
"""

from __future__ import annotations

import importlib
import sys

PACKAGE = "ansible_collections.gpuserve.sglang.plugins.module_utils"
PROGRAMS = {
    "gate": ("health", "wait until the server serves, or say why it does not"),
    "liveness": ("liveness", "one probe of a serving server; restarts it when it is dead"),
    "incident": ("incident", "keep what explains a failure in a folder"),
}


def main(argv: list[str]) -> int:
    """Run the subcommand; 2 when there is none of that name."""
    name = argv[0] if argv else ""
    if name not in PROGRAMS:
        asked_for_help = name in ("", "-h", "--help")
        out = sys.stdout if asked_for_help else sys.stderr
        if not asked_for_help:
            print(f"found no subcommand {name!r}, expected one of these:", file=out)
        for known, (__, what) in PROGRAMS.items():
            print(f"  {known:10} {what}", file=out)
        return 0 if asked_for_help else 2
    program = importlib.import_module(f"{PACKAGE}.{PROGRAMS[name][0]}")
    sys.argv[0] = f"gpuserve-sglang {name}"
    return int(program.main(argv[1:]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
