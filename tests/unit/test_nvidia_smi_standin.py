"""The sandbox's stand-in prints what the real tool prints."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import gpu

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "sandbox" / "standins" / "nvidia-smi"
STATES = ROOT / "sandbox" / "standins" / "states"
REAL = Path(__file__).parent / "fixtures" / "h200-x2"

#: The real machine of the fixtures, as a state.
H200 = {
    "driver_version": "580.159.04",
    "cuda_version": "13.0",
    "gpus": 2,
    "nvlink": 18,
    "gpu": {
        **json.loads((STATES / "nvlink.json").read_text())["gpu"],
        "temperature_c": 38,
        "power_draw_w": 128.0,
    },
    "overrides": {"0": {"memory_used_mib": 4}, "1": {"memory_used_mib": 9}},
    "processes": [{"gpu": 1, "pid": 586, "name": "python3", "memory_mib": 4706}],
}


def smi(*words: str, state: str | Path | Mapping[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    if isinstance(state, Mapping):
        # In one step, under a name of its own: `inspected` asks from four threads at once.
        text = json.dumps(state)
        path = folder / f"state-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        if not path.exists():
            written = folder / f"{threading.get_ident()}.json"
            written.write_text(text)
            written.replace(path)
    else:
        path = STATES / f"{state}.json"
    return subprocess.run(
        [sys.executable, str(TOOL), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GPU_STANDIN_STATE": str(path)},
    )


def real(name: str) -> str:
    return (REAL / name).read_text(encoding="utf-8")


def inspected(state: str | Mapping[str, Any], folder: Path) -> dict[str, Any]:
    def run(argv: Sequence[str]) -> gpu.ToolResult:
        done = smi(*argv[1:], state=state, folder=folder)
        return gpu.ToolResult(done.returncode, done.stdout, done.stderr)

    return gpu.inspect("nvidia-smi", run)


def without_identity(record: dict[str, Any]) -> dict[str, Any]:
    """A GPU without what differs from machine to machine: addresses, and temperature and free memory of the moment."""
    skip = ("pci_bus_id", "temperature_c", "memory_free_mib")
    return {key: value for key, value in record.items() if key not in skip}


# ---------------------------------------------------------------------------------------- against the real output
def test_it_says_what_it_is() -> None:
    assert TOOL.read_text().splitlines()[3].startswith('"""STAND-IN')
    assert os.access(TOOL, os.X_OK)


def test_equal_state_parses_to_the_same_records(tmp_path: Path) -> None:
    ours = gpu.parse_xml(smi("-q", "-x", state=H200, folder=tmp_path).stdout)
    theirs = gpu.parse_xml(real("busy.xml"))
    assert [without_identity(record) for record in ours] == [without_identity(record) for record in theirs]


def element_paths(document: str) -> set[str]:
    root = ET.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", document))

    def walk(element: ET.Element, above: str) -> set[str]:
        here = f"{above}/{element.tag}"
        return {here}.union(*(walk(child, here) for child in element))

    return walk(root, "")


def test_the_xml_has_the_same_elements(tmp_path: Path) -> None:
    # Of the list of clocks the fixtures keep the memory clocks only.
    ours = element_paths(smi("-q", "-x", state=H200, folder=tmp_path).stdout)
    assert {path for path in ours if "supported_graphics_clock" not in path} == element_paths(real("busy.xml"))


def test_the_xml_is_laid_out_alike(tmp_path: Path) -> None:
    def shape(document: str) -> list[str]:
        short = re.sub(r"\t*<supported_clocks>.*?</supported_clocks>\n", "", document, flags=re.DOTALL)
        return [re.sub(r">[^<>]+<|id=\"[^\"]*\"", "><", line) for line in short.splitlines()]

    assert shape(smi("-q", "-x", state=H200, folder=tmp_path).stdout) == shape(real("busy.xml"))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["topo", "-m"], "topo-m.txt"),
        (["topo", "-p2p", "r"], "topo-p2p-r.txt"),
        (["nvlink", "--status"], "nvlink-status.txt"),
        (["-L"], "list.txt"),
        (["--version"], "version.txt"),
        (["--query-gpu=index,bogus,uuid", "--format=csv"], "unknown-field.txt"),
        (["--query-compute-apps=pid,process_name,used_gpu_memory,gpu_uuid", "--format=csv"], "busy-apps.csv"),
    ],
)
def test_text_is_the_same_to_the_letter(words: list[str], name: str, tmp_path: Path) -> None:
    # The real machine has one NUMA node of 32 processors.
    printed = smi(*words, state={**H200, "numa": [0]}, folder=tmp_path).stdout.replace("\t0-63\t", "\t0-31\t")
    assert printed == real(name)


def test_the_query_is_the_same_to_the_letter(tmp_path: Path) -> None:
    header, *rows = real("query-gpu.csv").splitlines()
    fields = ",".join(re.sub(r" \[.*", "", cell.strip()) for cell in header.split(","))
    idle = {**H200, "processes": [], "overrides": {"1": {"temperature_c": 39}}}
    done = smi(f"--query-gpu={fields}", "--format=csv", state=idle, folder=tmp_path)
    ours = done.stdout.splitlines()
    assert ours[0] == header

    def comparable(line: str) -> list[str]:
        return [cell for place, cell in enumerate(line.split(", ")) if place not in (3, 7)]  # address, free memory

    assert [comparable(line) for line in ours[1:]] == [comparable(line) for line in rows]
    plain = smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits", state=idle, folder=tmp_path).stdout
    assert plain == "\n".join(re.sub(r" (MiB|W)(?=,|$)", "", line) for line in ours[1:]) + "\n"


def test_the_table_is_the_same_but_for_live_values(tmp_path: Path) -> None:
    def shape(text: str) -> list[str]:
        lines = text.splitlines()[1:]  # the first is the time
        return [
            re.sub(r"\d+C|\d+W /|\d+W|00:\S+|\d+MiB /", lambda match: "#" * len(match.group()), line) for line in lines
        ]

    ours = smi(state=H200, folder=tmp_path).stdout
    theirs = real("busy-table.txt")
    assert [re.sub(r"[ #]+", " ", line) for line in shape(ours)] == [
        re.sub(r"[ #]+", " ", line) for line in shape(theirs)
    ]
    assert [len(line) for line in ours.splitlines()[1:]] == [len(line) for line in theirs.splitlines()[1:]]


def test_unknown_words_are_refused(tmp_path: Path) -> None:
    done = smi("--bogus", state=H200, folder=tmp_path)
    assert (done.returncode, done.stdout) == (
        255,
        "ERROR: Option --bogus is not recognized. Please run 'nvidia-smi -h'.\n\n",
    )
    assert smi("--query-gpu=bogus", "--format=csv", state=H200, folder=tmp_path).returncode == 2
    assert smi("-i", "7", state=H200, folder=tmp_path).returncode == 6


# --------------------------------------------------------------------------------------------------------- states
def test_every_field_that_the_collection_asks_for_is_answered(tmp_path: Path) -> None:
    for _key, names in gpu.QUERY_FIELDS:
        for name in names:
            done = smi(f"--query-gpu={name}", "--format=csv,noheader", state="documented-box", folder=tmp_path)
            assert (done.returncode, len(done.stdout.splitlines())) == (0, 8), name


def test_the_documented_box(tmp_path: Path) -> None:
    seen = inspected("documented-box", tmp_path)
    assert [record["index"] for record in seen["gpus"]] == list(range(8))
    assert {record["name"] for record in seen["gpus"]} == {"NVIDIA RTX PRO 6000 Blackwell Server Edition"}
    assert {(record["memory_total_mib"], record["compute_cap"]) for record in seen["gpus"]} == {(97887, "12.0")}
    assert {tuple(record["pcie"].values()) for record in seen["gpus"]} == {(5, 5, 16, 16)}
    assert {(record["persistence"], record["mig"]) for record in seen["gpus"]} == {(True, False)}
    assert len({record["uuid"] for record in seen["gpus"]}) == 8
    assert len({record["pci_bus_id"] for record in seen["gpus"]}) == 8
    assert seen["links"]["topology"] == "pcie"
    assert {cell for row in seen["links"]["matrix"] for cell in row} == {"X", "PHB", "NODE", "SYS"}
    assert seen["notes"] == []
    assert inspected({}, tmp_path) == seen


def test_fields_and_document_agree(tmp_path: Path) -> None:
    asked = [list(names) for _key, names in gpu.QUERY_FIELDS]

    def run(argv: Sequence[str]) -> gpu.ToolResult:
        done = smi(*argv[1:], state="foreign-process", folder=tmp_path)
        return gpu.ToolResult(done.returncode, done.stdout, done.stderr)

    rows, error = gpu.query_csv(run, "nvidia-smi", "query-gpu", asked)
    assert error is None
    by_fields = gpu.gpus_from_csv(rows)
    by_document = inspected("foreign-process", tmp_path)["gpus"]
    for record in by_document:
        record["minor"], record["processes"] = None, []
    assert by_fields == by_document


def test_states_for_faults(tmp_path: Path) -> None:
    lanes = [record["pcie"]["width_current"] for record in inspected("degraded-link", tmp_path)["gpus"]]
    assert lanes == [16, 16, 16, 16, 16, 8, 16, 16]
    assert len(inspected("seven-gpus", tmp_path)["gpus"]) == 7
    assert [record["mig"] for record in inspected("mig", tmp_path)["gpus"]].index(True) == 0
    foreign = inspected("foreign-process", tmp_path)["gpus"]
    assert [(record["memory_used_mib"], len(record["processes"])) for record in foreign][2:4] == [(0, 0), (40960, 1)]
    assert inspected("nvlink", tmp_path)["links"]["topology"] == "nvlink"
    assert inspected("no-devices", tmp_path)["nvidia_smi"]["error"] is None
    assert "couldn't communicate" in inspected("no-driver", tmp_path)["nvidia_smi"]["error"]
    errors = inspected("ecc-errors", tmp_path)["gpus"]
    assert [record["ecc_uncorrected"] for record in errors] == [0, 0, 3, 0, 0, 0, None, 0]
    assert (errors[6]["ecc"], errors[6]["persistence"]) == (False, False)


def test_mismatch_reads_like_the_real_one(tmp_path: Path) -> None:
    done = smi(state="driver-mismatch", folder=tmp_path)
    assert done.returncode == 18
    assert done.stdout.startswith("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: ")
    seen = inspected("driver-mismatch", tmp_path)["nvidia_smi"]
    assert (seen["mismatch"], gpu.library_version(seen["error"])) == (True, "595.20")


def test_every_state_file_is_understood(tmp_path: Path) -> None:
    for path in sorted(STATES.glob("*.json")):
        done = smi("-L", state=path.stem, folder=tmp_path)
        assert done.returncode in (0, 6, 9, 18), path.name
        assert done.stderr == "", path.name
    wrong = smi("-L", state={"gpu_count": 8}, folder=tmp_path)
    assert wrong.returncode == 1
    assert "unknown keys ['gpu_count']" in wrong.stderr
