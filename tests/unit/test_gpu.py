"""nvidia-smi's output, mostly real (two H200, driver 580.159.04), as data."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import gpu

REAL = Path(__file__).parent / "fixtures" / "h200-x2"


def real(name: str) -> str:
    return (REAL / name).read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------- single values
@pytest.mark.parametrize("word", ["N/A", "[N/A]", "[Not Supported]", "Not Supported", "[Unknown Error]", "", " ", None])
def test_words_for_unknown_become_none(word: str | None) -> None:
    assert (gpu.text(word), gpu.number(word), gpu.integer(word), gpu.switch(word)) == (None, None, None, None)


@pytest.mark.parametrize(
    ("printed", "value"), [("143771 MiB", 143771), ("16x", 16), ("-8 C", -8), ("0x0000000000000011", 17), ("7", 7)]
)
def test_integers_lose_their_units(printed: str, value: int) -> None:
    assert gpu.integer(printed) == value


def test_numbers_keep_fractions() -> None:
    assert gpu.number("109.03 W") == 109.03


# ------------------------------------------------------------------------------------------------- the real machine
def test_real_xml() -> None:
    first, second = gpu.parse_xml(real("nvidia-smi-q.xml"))
    assert first == {
        "index": 0,
        "minor": 0,
        "name": "NVIDIA H200",
        "uuid": "GPU-00000000-0000-4000-8000-000000000001",
        "memory_total_mib": 143771,
        "memory_used_mib": 0,
        "memory_free_mib": 143156,
        "compute_cap": None,
        "pci_bus_id": "00000000:00:06.0",
        "pcie": {"gen_current": 5, "gen_max": 5, "width_current": 16, "width_max": 16},
        "mig": False,
        "ecc": True,
        "ecc_uncorrected": 0,
        "persistence": True,
        "temperature_c": 38,
        "power_limit_w": 700.0,
        "driver_version": "580.159.04",
        "event_reasons": [],
        "processes": [],
        "holders": [],
    }
    assert (second["index"], second["minor"], second["uuid"][-1]) == (1, 1, "2")


def test_real_csv_says_what_the_real_xml_says() -> None:
    from_xml = gpu.parse_xml(real("nvidia-smi-q.xml"))
    from_csv = gpu.gpus_from_csv(gpu.parse_csv(real("query-gpu.csv")))
    assert [record["compute_cap"] for record in from_csv] == ["9.0", "9.0"]
    for record in from_csv:
        # What each way alone knows; the temperature changed between the two questions.
        for key in ("compute_cap", "minor", "temperature_c"):
            record[key] = None
    for record in from_xml:
        record["minor"] = record["temperature_c"] = None
    assert from_csv == from_xml


def test_real_process_in_both_forms() -> None:
    idle, busy = gpu.parse_xml(real("busy.xml"))
    expected = {"pid": 586, "command": "python3", "user": None, "unit": None, "memory_mib": 4706}
    assert (idle["processes"], busy["processes"], busy["memory_used_mib"]) == ([], [expected], 4715)
    assert gpu.processes_from_csv(gpu.parse_csv(real("busy-apps.csv"))) == {busy["uuid"]: [expected]}
    assert gpu.processes_from_csv(gpu.parse_csv(real("apps.csv"))) == {}


def test_real_topology_with_its_escape_codes() -> None:
    assert "\x1b[4m" in real("topo-m.txt")
    matrix = gpu.parse_matrix(real("topo-m.txt"))
    assert matrix == [["X", "NV18"], ["NV18", "X"]]
    assert gpu.topology(matrix, 2) == {"topology": "nvlink", "partial": False}
    assert gpu.parse_matrix(real("topo-p2p-r.txt")) == [["X", "OK"], ["OK", "X"]]


def test_everything_from_the_real_machine() -> None:
    seen = gpu.inspect("nvidia-smi", _real_machine)
    assert [record["compute_cap"] for record in seen["gpus"]] == ["9.0", "9.0"]
    assert seen["links"]["topology"] == "nvlink"
    assert seen["nvidia_smi"] == {"present": True, "path": "nvidia-smi", "error": None, "mismatch": False}
    assert seen["notes"] == []


def _real_machine(argv: Sequence[str]) -> gpu.ToolResult:
    if argv[1] == "-q":
        return gpu.ToolResult(0, real("busy.xml"))
    if argv[1].startswith("--query-gpu"):
        rows = [f"GPU-00000000-0000-4000-8000-00000000000{number}, 9.0" for number in (1, 2)]
        return gpu.ToolResult(0, "\n".join(rows))
    return gpu.ToolResult(0, real("topo-m.txt" if argv[2] == "-m" else "topo-p2p-r.txt"))


# -------------------------------------------------------------------------------------------------- other machines
def test_fields_that_older_drivers_call_otherwise() -> None:
    older = real("nvidia-smi-q.xml").replace("clocks_event_reason", "clocks_throttle_reason")
    older = older.replace("<gpu_power_readings>", "<power_readings>").replace("gpu_power_readings>", "power_readings>")
    older = older.replace("requested_power_limit", "power_limit")
    older = older.replace(
        "hw_thermal_slowdown>Not Active</clocks_throttle_reason_hw_thermal_slowdown",
        "hw_thermal_slowdown>Active</clocks_throttle_reason_hw_thermal_slowdown",
    )
    record = gpu.parse_xml(older)[0]
    assert record["power_limit_w"] == 700.0
    assert record["event_reasons"] == ["hw_thermal_slowdown"]


def test_uncorrectable_errors_are_added_up() -> None:
    text = real("nvidia-smi-q.xml")
    text = text.replace("<dram_uncorrectable>0", "<dram_uncorrectable>2", 1)
    text = text.replace("<sram_uncorrectable_parity>0", "<sram_uncorrectable_parity>1", 1)
    assert [record["ecc_uncorrected"] for record in gpu.parse_xml(text)] == [3, 0]


def test_ecc_not_supported_is_not_zero_errors() -> None:
    text = re.sub(r"<(\w*correctable\w*)>0<", r"<\1>N/A<", real("nvidia-smi-q.xml"))
    record = gpu.parse_xml(text.replace("<current_ecc>Enabled", "<current_ecc>N/A"))[0]
    assert (record["ecc"], record["ecc_uncorrected"]) == (None, None)


def test_mig_and_missing_parts() -> None:
    text = real("nvidia-smi-q.xml").replace("<current_mig>Disabled", "<current_mig>Enabled", 1)
    text = re.sub(r"<used>0 MiB</used>", "<used>N/A</used>", text, count=1)
    text = re.sub(r"<pci_gpu_link_info>.*?</pci_gpu_link_info>", "", text, count=1, flags=re.DOTALL)
    first, second = gpu.parse_xml(text)
    assert (first["mig"], second["mig"]) == (True, False)
    assert first["memory_used_mib"] is None
    assert set(first["pcie"].values()) == {None}


def test_a_document_that_is_none() -> None:
    with pytest.raises(ValueError, match="no readable XML"):
        gpu.parse_xml("<nvidia_smi_log><gpu>")
    with pytest.raises(ValueError, match="type html"):
        gpu.parse_xml("<html/>")


def test_broken_xml_falls_back_to_fields() -> None:
    def run(argv: Sequence[str]) -> gpu.ToolResult:
        if argv[1] == "-q":
            return gpu.ToolResult(0, "<nvidia_smi_log>")
        if argv[1].startswith("--query-gpu="):
            header, *rows = real("query-gpu.csv").splitlines()
            names = [re.sub(r" \[.*", "", cell.strip()) for cell in header.split(",")]
            asked = argv[1].split("=")[1].split(",")
            table = [dict(zip(names, row.split(", "), strict=True)) for row in rows]
            return gpu.ToolResult(0, "\n".join(", ".join(row[name] for name in asked) for row in table))
        if argv[1].startswith("--query-compute-apps="):
            return gpu.ToolResult(0, real("busy-apps.csv").splitlines()[1])
        return gpu.ToolResult(0, real("topo-m.txt"))

    seen = gpu.inspect("nvidia-smi", run)
    assert [record["name"] for record in seen["gpus"]] == ["NVIDIA H200", "NVIDIA H200"]
    assert [len(record["processes"]) for record in seen["gpus"]] == [0, 1]
    assert seen["nvidia_smi"]["error"] is None
    assert any("one by one" in note for note in seen["notes"])


# ------------------------------------------------------------------------------------------------------- failures
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 590.48\n"


def test_version_mismatch_is_told_from_other_errors() -> None:
    seen = gpu.inspect("nvidia-smi", lambda argv: gpu.ToolResult(18, MISMATCH))
    error = seen["nvidia_smi"]["error"]
    assert error.startswith("Failed to initialize NVML: Driver/library version mismatch")
    assert error.endswith("(status 18)")
    assert seen["nvidia_smi"]["mismatch"] is True
    assert gpu.library_version(error) == "590.48"
    assert seen["gpus"] == []
    assert len(seen["notes"]) == 1
    other = gpu.inspect("nvidia-smi", lambda argv: gpu.ToolResult(9, "NVIDIA-SMI has failed because ..."))
    assert other["nvidia_smi"]["mismatch"] is False
    assert gpu.library_version(other["nvidia_smi"]["error"]) is None


def test_no_devices_is_an_answer_not_an_error() -> None:
    seen = gpu.inspect("nvidia-smi", lambda argv: gpu.ToolResult(6, "No devices were found\n"))
    assert seen["nvidia_smi"] == {"present": True, "path": "nvidia-smi", "error": None, "mismatch": False}
    assert seen["gpus"] == []
    assert seen["links"]["topology"] == "none"


def test_memory_and_processes_are_one_question() -> None:
    asked: list[str] = []

    def run(argv: Sequence[str]) -> gpu.ToolResult:
        asked.append(argv[1])
        return gpu.ToolResult(0, real("busy.xml")) if argv[1] == "-q" else pytest.fail(f"ran {argv}")

    seen, error = gpu.usage("nvidia-smi", run)
    assert (asked, error) == (["-q"], None)
    assert [record["memory_used_mib"] for record in seen] == [4, 4715]
    assert [process["pid"] for process in seen[1]["processes"]] == [586]

    assert gpu.usage("nvidia-smi", lambda argv: gpu.ToolResult(6, "No devices were found\n")) == ([], None)
    assert "talk" in str(gpu.usage("nvidia-smi", lambda argv: gpu.ToolResult(9, "cannot talk to the driver"))[1])


def test_no_tool() -> None:
    seen = gpu.inspect(None, lambda argv: pytest.fail(f"ran {argv}"))
    assert (seen["nvidia_smi"]["present"], seen["gpus"], seen["links"]["topology"]) == (False, [], "unknown")
    assert seen["notes"]


def test_a_tool_that_hangs_is_left_after_the_timeout() -> None:
    start = time.monotonic()
    result = gpu.run_tool([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.3)
    assert time.monotonic() - start < 30
    assert result.rc is None
    assert "did not answer within 0.3 s" in (gpu.error_of(result) or "")


def test_a_tool_that_cannot_be_run() -> None:
    assert "could not be run" in (gpu.error_of(gpu.run_tool(["/nowhere/nvidia-smi"])) or "")


def test_unknown_fields_are_renamed_or_left_out() -> None:
    asked: list[list[str]] = []

    def run(argv: Sequence[str]) -> gpu.ToolResult:
        names = argv[1].split("=")[1].split(",")
        asked.append(names)
        for name in names:
            if name in ("clocks_event_reasons.active", "compute_cap"):
                # The words and the status of the real tool, see fixtures/h200-x2/unknown-field.txt.
                return gpu.ToolResult(2, real("unknown-field.txt").replace("bogus", name))
        return gpu.ToolResult(0, ", ".join(f"<{name}>" for name in names))

    fields = [["uuid"], ["compute_cap"], ["clocks_event_reasons.active", "clocks_throttle_reasons.active"]]
    rows, error = gpu.query_csv(run, "nvidia-smi", "query-gpu", fields)
    assert error is None
    assert rows == [{"uuid": "<uuid>", "clocks_throttle_reasons.active": "<clocks_throttle_reasons.active>"}]
    assert len(asked) == 3


def test_a_field_error_that_names_none_of_ours_ends_the_search() -> None:
    rows, error = gpu.query_csv(
        lambda argv: gpu.ToolResult(2, 'Field "x" is not a valid field to query.'), "s", "q", [["a"]]
    )
    assert rows == []
    assert 'Field "x"' in (error or "")


def test_a_comma_in_a_process_name() -> None:
    rows = gpu.parse_csv("586, python3 -c 'a, b', 4706, GPU-1\n", gpu.APP_FIELDS)
    assert rows[0]["process_name"] == "python3 -c 'a,b'"
    assert (rows[0]["used_gpu_memory"], rows[0]["gpu_uuid"]) == ("4706", "GPU-1")


# ------------------------------------------------------------------------------------------------------- topology
def test_network_cards_between_the_gpus_are_left_out() -> None:
    # From NVIDIA/nccl#1505, cut to two GPUs and two cards; parted by blanks as people paste it.
    text = """
        GPU0    GPU1    NIC0    NIC1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NODE    PXB     SYS     48-63,176-191   3               N/A
GPU1    NODE     X      SYS     PXB     48-63,176-191   3               N/A
NIC0    PXB     SYS      X      SYS
"""
    assert gpu.parse_matrix(text) == [["X", "NODE"], ["NODE", "X"]]


@pytest.mark.parametrize(
    ("matrix", "count", "kind", "partial"),
    [
        ([["X", "NODE"], ["NODE", "X"]], 2, "pcie", False),
        ([["X", "NV4", "SYS"], ["NV4", "X", "SYS"], ["SYS", "SYS", "X"]], 3, "nvlink", True),
        ([["X"]], 1, "none", False),
        ([], 0, "none", False),
        ([], 8, "unknown", False),
        ([["X", "SYS"], ["SYS", "X"]], 3, "unknown", False),
    ],
)
def test_kinds_of_topology(matrix: list[list[str]], count: int, kind: str, partial: bool) -> None:
    assert gpu.topology(matrix, count) == {"topology": kind, "partial": partial}
