"""The handbook: laid out from data, the same text twice, no number of its own, and a launch command that is the plan's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import plan_cases as cases
import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.filter import handbook as handbook_filter
from ansible_collections.gpuserve.sglang.plugins.module_utils import benchmark, documented, handbook, history, preflight
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import launch_plan
from ansible_collections.gpuserve.sglang.plugins.module_utils.record import Records
from ansible_collections.gpuserve.sglang.plugins.module_utils.verify_host import (
    HANDBOOK_PLAN,
    check_handbook,
    launch_words,
)

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "handbook_docs.py"
sys.path.insert(0, str(TOOL.parent))

import handbook_docs  # noqa: E402

SECTIONS = [
    "Hardware", "Software stack", "Configuration and why", "Flags explained", "NCCL", "Exact launch command",
    "Service management", "Patches", "Paths and logs",
]  # fmt: skip


def measured_level(concurrency: int, rates: list[float], failed: int = 0, **more: Any) -> dict[str, Any]:
    repeats = [
        {"requests": 30, "completed": 30 - failed, "failed": failed, "output_tok_s": rate, "accept_length": None,
         "errors": {"refused": failed} if failed else {}, "other_requests": 0} for rate in rates
    ]  # fmt: skip
    return {**benchmark.level(concurrency, repeats, []), **more}


RECORD_METHOD = {
    "tool": "sglang.bench_serving", "levels": [1, 100], "requests": 30, "fill": False, "warmup": 5, "output_tokens": 200, "repeats": 2,
    "prompts": documented.record()["benchmark"]["stand_in_prompts"],
}  # fmt: skip
MEASURED = {
    "schema": 1, "when": "2026-11-30T05:00:00Z", "profile": "eagle3-topk1-v2", "engine_version": "0.5.9", "method": RECORD_METHOD,
    "levels": [
        measured_level(1, [87.25, 87.25], ttft_ms={"p50": 110.0, "p99": 240.0}, itl_ms={"p50": 11.0, "p99": 30.0}, accept_length=2.345),
        measured_level(100, [760.0, 780.08], failed=1),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return launch_plan(cases.wanted(), cases.host(), cases.models())


def rendered(plan: dict[str, Any], keep_trailing_newline: bool = True, **given: Any) -> str:
    name, manifest = "kimi-1", given.pop("manifest", {})
    host = given.pop("host", cases.host())
    return handbook_docs.render(
        {
            "deployment_plan": plan,
            "deployment_host": host,
            "inventory_hostname": name,
            "runbook_path": "/var/lib/x/production.md",
            "runbook_history_path": "/var/lib/x/eagle-fast-verify.md",
            "__runbook_view": handbook.view(plan, host, name, manifest, **given),
            "__runbook_release": manifest,
        },
        keep_trailing_newline,
    )


def test_the_sections_of_the_record_in_their_order(plan: dict[str, Any]) -> None:
    text = rendered(plan)
    titles = re.findall(r"^## (?:(\d+)\. )?(.+)$", text, re.MULTILINE)
    assert titles[0] == ("", "At 3 a.m.")
    numbered = [title for number, title in titles if number]
    assert numbered[: len(SECTIONS)] == SECTIONS
    assert [number for number, __ in titles if number] == [str(n + 1) for n in range(len(numbered))]
    for title in (
        "Incidents, and how to read them",
        "Rollback",
        "Upgrade",
        "Deviations from the record",
        "Security notes",
    ):
        assert title in numbered


def test_the_launch_command_and_environment_are_the_plan_s(plan: dict[str, Any]) -> None:
    text = rendered(plan)
    assert launch_words(text) == plan["command"]
    block = text.split("## 6.")[1].split("```")[3]
    assert dict(line.split("=", 1) for line in block.split("\n") if line) == plan["env"]
    match = HANDBOOK_PLAN.search(text)
    assert match and plan["hash"].startswith(match.group(1))


@pytest.mark.parametrize("keep_trailing_newline", [True, False])
def test_an_edit_of_any_part_shows(plan: dict[str, Any], keep_trailing_newline: bool) -> None:
    text = rendered(plan, keep_trailing_newline, measured={**MEASURED, "plan_hash": plan["hash"]})
    assert check_handbook("/h", text, plan).ok
    name, value = next(iter(plan["env"].items()))
    for old in (f"{name}={value}", "| measured ", f"{plan['unit']['restart_sec']} s", "\n\n## 1."):
        assert old in text
        found = check_handbook("/h", text.replace(old, old.replace(old[-1], "x"), 1), plan)
        assert (found.failed, found.found) == (True, "it was edited")


def test_a_heading_stands_alone_on_the_host_too(plan: dict[str, Any]) -> None:
    """Ansible drops the last newline of an included file."""
    there = rendered(plan, keep_trailing_newline=False)
    assert there + "\n" == rendered(plan)
    lines = there.splitlines()
    headings = [number for number, line in enumerate(lines) if re.match(r"## (\d+\.|At)", line)]
    assert len(headings) == 16
    for number in headings:
        assert lines[number - 1] == "", lines[number]


def test_the_first_command_is_quiet_on_a_host_without_incidents(plan: dict[str, Any]) -> None:
    text = rendered(plan)
    assert "\nls -1t /var/lib/sglang-kimi/incidents 2>/dev/null | head -3\n" in text
    assert "loses every" not in text and "lets running requests finish\n(at most 135 s;" in text


def test_the_unit_s_nccl_rows_do_not_say_that_nothing_sets_them() -> None:
    text = rendered(launch_plan(cases.wanted(), cases.host(topology="none"), cases.models()))
    section = text.split("## 13. Deviations")[1].split("\n## ")[0]
    (row,) = [line for line in section.splitlines() if line.startswith("| `NCCL_PROTO` |")]
    assert row.startswith("| `NCCL_PROTO` | `LL` | not in the unit | of use to several ranks on PCIe only; here")
    assert "baseline falls" not in section and "`unit.wants`" not in section


def test_odd_words_survive(plan: dict[str, Any]) -> None:
    odd = {**plan, "command": [*plan["command"], "--json", '{"a": "50% of $HOME"}', "it's"]}
    assert launch_words(rendered(odd)) == odd["command"]


def test_every_flag_is_explained(plan: dict[str, Any]) -> None:
    section = rendered(plan).split("## 4. Flags explained")[1].split("\n## ")[0]
    for flag in plan["args"]:
        assert f"| `{flag}` |" in section


def test_tables_are_tables(plan: dict[str, Any]) -> None:
    """Every row of a table has as many cells as its head, pipes in texts included."""
    odd = {**plan, "notes": [*plan["notes"], {"setting": "--x", "value": "a|b", "reason": "c|d\ne", "source": "s"}]}
    lines = rendered(odd, measured={**MEASURED, "plan_hash": plan["hash"]}).splitlines()
    cells = [len(re.findall(r"(?<!\\)\|", line)) for line in lines]
    seen = 0
    for number, line in enumerate(lines):
        if line.startswith("|"):
            seen += 1
            if lines[number - 1].startswith("|"):
                assert cells[number] == cells[number - 1], line
    assert seen > 60


def numbers_of_table(text: str) -> list[str]:
    section = text.split("## 3. Configuration and why")[1].split("### Memory")[0]
    rows = [line for line in section.splitlines() if line.startswith("|") and "---" not in line]
    return [cell for row in rows for cell in re.findall(r"(?<=\| )[\d.]+(?= \|)", row)]


def test_numbers_of_the_benchmark_are_the_record_s_or_measured(plan: dict[str, Any]) -> None:
    record = {
        f"{value:.1f}" for row in documented.record()["benchmark"]["rows"] for value in row["output_tok_s"] if value
    }
    assert set(numbers_of_table(rendered(plan))) == record
    with_measured = numbers_of_table(rendered(plan, measured={**MEASURED, "plan_hash": plan["hash"]}))
    mine = {"110.0", "240.0", "11.0", "30.0", "2.35", "2.34", "1", "100", "60", "0"}
    assert set(with_measured) - record <= mine


def benchmark_section(plan: dict[str, Any], measured: dict[str, Any]) -> str:
    text = rendered(plan, measured={**measured, "plan_hash": plan["hash"]})
    return text.split("## 3. Configuration and why")[1].split("### Memory")[0]


def test_a_measurement_is_shown_with_its_method_its_noise_and_its_failures(plan: dict[str, Any]) -> None:
    text = benchmark_section(plan, MEASURED)
    row = "| eagle3-topk1-v2 on kimi-1 | measured 2026-11-30 | 87.2 ±0.0 % | - | 770.0 ±1.3 % (2 of 60 failed) | - |"
    assert row in text
    assert "| 1 | 60 | 0 | 87.2 ±0.0 % | 110.0 |" in text
    assert "| 100 | 60 | **2** | 770.0 ±1.3 % | - |" in text
    assert (
        f"SGLang 0.5.9, by {benchmark.how(MEASURED)}; ± is half the spread of the runs.\n\n- C=100: 30 requests" in text
    )
    for remark in benchmark.remarks(MEASURED):
        assert f"\n- {remark}\n" in text
    assert "other method" not in text


def test_a_measurement_by_another_method_is_marked_beside_the_record(plan: dict[str, Any]) -> None:
    method = {**RECORD_METHOD, "fill": True, "output_tokens": 16, "repeats": 1}
    text = benchmark_section(plan, {**MEASURED, "method": method, "levels": [measured_level(1, [1500.0])]})
    assert "| eagle3-topk1-v2 on kimi-1 | measured 2026-11-30, **other method** | 1500.0 | - | - | - |" in text
    assert "(or as many as the level), 16 new tokens" in text and "±" not in text
    assert (
        "\n- Not the method of the record (16 new tokens instead of 200, at least as many requests as the level is high): "
        "its figures are no measure for these\n"
    ) in text


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"levels": 3},
        {"levels": [{}]},
        {"levels": [{"concurrency": "x"}]},
        {"method": 5},
        {"method": {}},
        {"levels": ["x"]},
    ],
)
def test_a_measurement_that_the_services_user_has_damaged_costs_no_handbook(
    plan: dict[str, Any], broken: dict[str, Any]
) -> None:
    measured = {"schema": 1, "plan_hash": plan["hash"], **broken}
    text = rendered(plan, measured=measured)
    assert "The last measurement cannot be read (" in text and "measure again" in text
    whole = rendered(plan)
    assert text.count("| record |") == whole.count("| record |") > 0
    assert history.measured_block(measured, plan) == history.measured_block(None, plan)


def test_a_measurement_of_another_schema_is_not_read(plan: dict[str, Any]) -> None:
    assert "has the schema 2, this handbook reads 1" in rendered(plan, measured={"schema": 2, "when": "x"})


def test_a_measurement_of_another_plan_says_so(plan: dict[str, Any]) -> None:
    assert "That was another plan" in rendered(plan, measured={**MEASURED, "plan_hash": "f" * 64})
    assert "That was another plan" not in rendered(plan, measured={**MEASURED, "plan_hash": plan["hash"]})


def test_what_changes_by_itself_is_left_out(plan: dict[str, Any]) -> None:
    now, later = cases.host(), cases.host()
    later["memory"] = {**later.get("memory", {}), "available_mib": 1}
    for gpu in later["gpus"]:
        gpu.update(memory_used_mib=5000, memory_free_mib=1, temperature_c=80, processes=[{"pid": 1}])
    later["ports"] = [{"port": 30000, "pid": 1}]
    report = {"waived": [], "warnings": [{"id": "w", "title": "t", "found": "1", "expected": "e", "do": "d"}]}
    again = {"waived": [], "warnings": [{"id": "w", "title": "t", "found": "2", "expected": "e", "do": "d"}]}
    assert rendered(plan, host=now, report=report) == rendered(plan, host=later, report=again)


def test_waivers_patches_and_checksums_are_shown(plan: dict[str, Any]) -> None:
    series = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "patches").glob("*/*/series.yml"))]
    patch = plan["patches"][0]
    manifest = {
        "id": "abc", "installer": "uv", "built_at": "2026-01-01", "torch_cuda": "13.0", "python_version": "3.12.3",
        "packages": {"sglang": "0.5.9"}, "files": {"sglang/x.py": {"package": "sglang", "sha256": "f" * 64, "patches": [patch]}},
    }  # fmt: skip
    released = {**plan, "command": ["/opt/sglang/releases/abc/venv/bin/python", *plan["command"][1:]]}
    text = rendered(
        released, manifest=manifest, series=series, last_start={"seconds_to_ready": 570.4},
        report={"waived": [{"id": "iommu", "title": "IOMMU", "reason": "one tenant"}], "warnings": []},
    )  # fmt: skip
    assert f"| `{patch}` |" in text and "`sglang/x.py`" in text and "f" * 64 in text
    assert "| `iommu` | IOMMU | one tenant |" in text
    assert "the last one took 9 min 30 s" in text
    assert "Release `abc` in `/opt/sglang/releases/abc`" in text
    assert "not in a series that this play knows" not in text


SERIES = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "patches").glob("*/*/series.yml"))]
DOCUMENTED_PATCHES = list(documented.record()["patches"])


def beyond(plan: dict[str, Any], manifest: dict[str, Any] | None = None, path: str = "") -> dict[str, list[str]]:
    """The rows of section 13 that are no settings, by what they are about."""
    view = handbook.view(plan, cases.host(), "kimi-1", manifest, SERIES, path=path)
    assert all(len(row) == 5 and all(row) for row in view["deviations"])
    settings = {f"`{item['setting']}`" for item in plan["deviations"]}
    return {row[0]: row[1:] for row in view["deviations"] if row[0] not in settings}


def test_a_box_as_documented_deviates_in_nothing_beyond_its_settings() -> None:
    same = launch_plan(
        cases.wanted(patches=DOCUMENTED_PATCHES, python="/root/ml-env/bin/python"), cases.host(), cases.models()
    )
    assert beyond(same, path="/root/production_v2.md") == {}


def test_what_differs_beyond_the_settings_is_a_deviation_with_its_reason() -> None:
    carried = [str(patch["id"]) for definition in SERIES for patch in definition["patches"]]
    python = "/opt/sglang/releases/0123abcd/venv/bin/python"
    made = launch_plan(cases.wanted(patches=carried, python=python), cases.host(), cases.models())
    manifest = {
        "id": "0123abcd", "installer": "uv", "built_at": "2026-01-01", "torch_cuda": "13.0", "packages": {"sglang": "0.5.9"},
        "spec": {"steps": [{"name": "engine", "requirements": ["sglang==0.5.9"]}]},
    }  # fmt: skip
    found = beyond(made, manifest, "/var/lib/sglang-kimi/production.md")
    assert found["virtual environment"][:2] == ["`/root/ml-env`", "`/opt/sglang/releases/0123abcd/venv`"]
    assert found["engine"][:2] == ["source tree `/root/sglang`", "package 0.5.9, a wheel"]
    assert found["handbook"][:2] == ["`/root/production_v2.md`", "`/var/lib/sglang-kimi/production.md`"]
    assert found["`PATH`"][0] == "set, to a value that is not on record" and "releases/0123abcd" in found["`PATH`"][1]
    # The toolkit's folder is the documented one.
    assert "`LD_LIBRARY_PATH`" not in found
    assert [name for name in found if name.startswith("patch ")] == [
        f"patch `{name}`" for name in carried if name not in DOCUMENTED_PATCHES
    ]
    (title,) = [patch["title"] for patch in SERIES[1]["patches"] if patch["id"] == "symm-mem-in-place"]
    assert found["patch `symm-mem-in-place`"][2] == f"{title}; `sm120-symm-mem` needs it"
    tree = {"package": "sglang", "url": "https://example.org/sglang.git", "ref": "v0.5.9"}
    built = beyond(made, {**manifest, "spec": {"steps": [{"name": "engine", "git": tree}]}})["engine"]
    assert built[1] == "package 0.5.9, built from https://example.org/sglang.git at v0.5.9"
    text = rendered(made, manifest=manifest, series=SERIES, path="/x/production.md")
    section = text.split("## 13. Deviations")[1].split("\n### ")[0]
    assert (
        "| virtual environment | `/root/ml-env` |" in section and "| handbook | `/root/production_v2.md` |" in section
    )


def test_documented_patches_and_variables_that_are_missing_are_deviations() -> None:
    fewer = launch_plan(cases.wanted(patches=DOCUMENTED_PATCHES[:3]), cases.host(), cases.models())
    purposes = documented.record()["patches"]
    found = beyond(fewer)
    for name in DOCUMENTED_PATCHES[3:]:
        assert found[f"patch `{name}`"] == [
            purposes[name], "not carried", "`sglang_patches` leaves it out", "`sglang_patches`",
        ]  # fmt: skip
    assert not any(f"patch `{name}`" in found for name in DOCUMENTED_PATCHES[:3])
    # An interpreter of somebody else's, on a host without CUDA.
    other = launch_plan(
        cases.sandbox(python="/srv/venv/bin/python"), cases.cpu_host(), {"target": cases.model(cases.LLAMA, 1)}
    )
    found = beyond(other)
    assert found["virtual environment"] == [
        "`/root/ml-env`", "`/srv/venv`", "the interpreter that the inventory names", "`deployment_python`",
    ]  # fmt: skip
    assert found["`LD_LIBRARY_PATH`"][1] == "not set"
    assert found["patches"][:2] == ["5", "not known"]
    assert "engine" not in found and "handbook" not in found


def test_the_documented_patches_are_patches_of_the_collection() -> None:
    assert set(DOCUMENTED_PATCHES) <= {patch["id"] for definition in SERIES for patch in definition["patches"]}


def preflight_section(plan: dict[str, Any], **given: Any) -> str:
    return rendered(plan, **given).split("## 14. Preflight")[1].split("\n## ")[0].strip()


CHECKS = [
    {"id": "memory", "title": "Memory", "query": "host.memory.total_mib", "expect": {"at_least": 2000000}, "severity": "error",
     "message": {"do": "Add memory | move."}},
    {"id": "kernel", "title": "Kernel", "query": "host.kernel", "expect": {"equals": "7"}, "severity": "error"},
    {"id": "system", "title": "Process 1", "query": "host.init_system", "expect": {"equals": "systemd"}, "severity": "error"},
]  # fmt: skip


def test_failed_checks_are_listed_and_never_denied(plan: dict[str, Any]) -> None:
    """benchmark.yml, tune.yml and rollback.yml render without refusing the host."""
    host = {**cases.cpu_host(), "kernel": "6.8", "init_system": "systemd"}
    good = preflight.evaluate({"host": host}, CHECKS[2:])
    assert preflight_section(plan, report=good) == "No check failed, none is waived."
    waivers = [{"id": "kernel", "reason": "it is new"}]
    report = preflight.evaluate({"host": host}, CHECKS, waivers)
    assert not report["ok"]
    section = preflight_section(plan, report=report)
    assert "No check failed" not in section and "Failed when this page was rendered" in section
    (failure,) = report["failures"]
    assert f"\n- `memory`: {failure['message']}".replace("|", "\\|") in section
    assert "| `kernel` | Kernel | it is new |" in section
    accepted = preflight_section(plan, report=preflight.evaluate({"host": host}, CHECKS[1:], waivers))
    assert accepted.startswith("No check failed that is not accepted.\n\nFailures that somebody accepted:\n\n| check |")


def test_checks_that_did_not_run_are_not_called_passed(plan: dict[str, Any]) -> None:
    assert preflight_section(plan).startswith("The checks were not run when this page was rendered: `ansible-playbook")
    broken = preflight.refused(preflight.PreflightError("check 'x': found no query, expected one"))
    section = preflight_section(plan, report=broken)
    assert (
        section
        == "**The checks could not be made when this page was rendered**: check 'x': found no query, expected one"
    )


@pytest.mark.parametrize(
    ("state", "words"),
    [("off", "The IOMMU is off"), ("passthrough", "DMA is not confined"), ("translated", "DMA is confined"), (None, "could not be seen")],
)  # fmt: skip
def test_dma_isolation_is_said(plan: dict[str, Any], state: str | None, words: str) -> None:
    host = {**cases.host(), "iommu": {"state": state}, "acs": {"readable": True, "bridges": ["a"], "redirecting": []}}
    text = rendered(plan, host=host).split("Security notes")[1]
    assert words in text
    assert "ACS does not redirect peer traffic" in text


def test_a_wide_address_is_a_warning(plan: dict[str, Any]) -> None:
    wide = {**plan, "endpoint": {**plan["endpoint"], "host": "0.0.0.0"}}
    assert "everybody who reaches that address can use it" in rendered(wide)
    assert "only this host reaches it" in rendered(plan)


def test_the_filter_is_thin(plan: dict[str, Any]) -> None:
    made = handbook_filter.FilterModule().filters()["handbook"](plan, host=cases.host(), name="x")
    assert made == handbook.view(plan, cases.host(), "x")
    with pytest.raises(AnsibleFilterError, match="expected a plan"):
        handbook_filter.FilterModule().filters()["handbook"]({})


def test_the_example_in_docs_is_what_the_tool_renders() -> None:
    assert subprocess.run([sys.executable, TOOL, "--check"], check=False).returncode == 0
    page = handbook_docs.PAGE.read_text()
    assert "| **topk 1, spec v2 (production)** | record | 86.8 | 759.3 | 775.0 | 754.4 |" in page
    assert "Nothing was measured on this host yet" in page


# --------------------------------------------------------------------------------------------------- history


def deploy(state: Path, plan: dict[str, Any], seconds: float | None = None) -> None:
    Records(state).keep("unit", plan)
    if seconds is not None:
        (state / "last-start.json").write_text(
            json.dumps({"seconds_to_ready": str(seconds), "plan_hash": plan["hash"]})
        )


def test_history_grows_by_one_entry_a_deployment(tmp_path: Path, plan: dict[str, Any]) -> None:
    other = launch_plan(cases.wanted(overrides={"max_running_requests": 64}), cases.host(), cases.models())
    deploy(tmp_path, plan, 12.34)
    first = history.updated("", plan, tmp_path, "2026-11-30 05:00 UTC", "590.48.01")
    assert first.startswith(history.HEAD.rstrip("\n"))
    assert "## 2026-11-30 05:00 UTC: plan `" in first and "Ready after 12.3 s." in first and "590.48.01" in first
    assert "The first deployment on record here." in first
    assert history.updated(first, plan, tmp_path, "later") == first

    deploy(tmp_path, other, 9)
    second = history.updated(first, other, tmp_path, "2026-12-01 05:00 UTC")
    assert second.startswith(first)
    added = second.removeprefix(first)
    assert "```diff\n- --max-running-requests 48\n+ --max-running-requests 64\n" in added
    assert second.count("<!-- deployment: ") == 2

    deploy(tmp_path, plan)
    third = history.updated(second, plan, tmp_path, "2026-12-02 05:00 UTC")
    assert third.count("<!-- deployment: ") == 3
    assert "Ready after" not in third.removeprefix(second), "the last start was another plan's"


def test_only_the_first_entry_is_called_the_first(tmp_path: Path, plan: dict[str, Any]) -> None:
    """A change of the unit alone leaves one record, which is that of the new plan; another record can be lost."""
    deploy(tmp_path, plan)
    first = history.updated("", plan, tmp_path, "day 1")
    unit = {**plan, "hash": "a" * 64, "unit": {**plan["unit"], "timeout_stop_sec": 1234}}
    deploy(tmp_path, unit)
    added = history.updated(first, unit, tmp_path, "day 2").removeprefix(first)
    assert added.count("## day 2: plan `aaaaaaaaaaaa`") == 1
    words = f"Command and environment are those of plan `{plan['hash'][:12]}` above: only settings of the unit changed."
    assert words in added and "first" not in added

    other = {**plan, "hash": "b" * 64, "process_hash": "c" * 64}
    for text in (first, first.replace('{"plan"', "{plan").replace('{"process"', "{process")):
        shutil.rmtree(tmp_path / "deployments")
        deploy(tmp_path, other)
        added = history.updated(text, other, tmp_path, "day 3").removeprefix(text)
        assert "The deployment before is not on record, so what changed is not known." in added
        assert "first" not in added


def test_a_change_of_the_unit_alone_is_not_held_against_an_older_deployment(
    tmp_path: Path, plan: dict[str, Any]
) -> None:
    other = launch_plan(cases.wanted(overrides={"max_running_requests": 64}), cases.host(), cases.models())
    unit = {**other, "hash": "a" * 64, "unit": {**other["unit"], "timeout_stop_sec": 1234}}
    text = ""
    for number, each in enumerate((plan, other, unit)):
        deploy(tmp_path, each)
        before, text = text, history.updated(text, each, tmp_path, f"day {number}")
    added = text.removeprefix(before)
    assert f"those of plan `{other['hash'][:12]}` above: only settings of the unit changed." in added
    assert "```diff" not in added


def test_history_takes_in_a_measurement_and_keeps_what_people_wrote(tmp_path: Path, plan: dict[str, Any]) -> None:
    deploy(tmp_path, plan)
    text = history.updated("", plan, tmp_path, "now") + "\nA remark by hand.\n"
    (tmp_path / "benchmarks").mkdir()
    latest = tmp_path / "benchmarks" / "latest.json"
    latest.write_text(json.dumps({**MEASURED, "plan_hash": "f" * 64}))
    assert history.updated(text, plan, tmp_path, "now") == text
    latest.write_text(json.dumps({**MEASURED, "plan_hash": plan["hash"]}))
    measured = history.updated(text, plan, tmp_path, "now")
    assert f"Measured 2026-11-30T05:00:00Z ({benchmark.how(MEASURED)}):" in measured
    assert "| 1 | 87.2 | 2.35 |" in measured or "| 1 | 87.2 | 2.34 |" in measured
    assert "| 100 | 770.0 | - |" in measured
    assert measured.endswith("\nA remark by hand.\n")
    assert history.updated(measured, plan, tmp_path, "now") == measured


def test_a_rollback_has_an_entry_of_its_own(tmp_path: Path, plan: dict[str, Any]) -> None:
    other = launch_plan(cases.wanted(overrides={"max_running_requests": 64}), cases.host(), cases.models())
    deploy(tmp_path, plan)
    text = history.updated("", plan, tmp_path, "day 1", "590.48.01")
    deploy(tmp_path, other)
    text = history.updated(text, other, tmp_path, "day 2", "590.48.01")

    def went_back(to: dict[str, Any], start: str) -> None:
        deploy(tmp_path, to)
        record = {"seconds_to_ready": 9, "plan_hash": to["hash"], "invocation_id": start}
        (tmp_path / "last-start.json").write_text(json.dumps(record))

    rollback = {"left": other, "found": [], "reason": "slower at\n30 <!-- deployment: {} --> requests, api_key=hunter2"}
    went_back(plan, "i1")
    back = history.updated(text, plan, tmp_path, "day 3", rollback=rollback)
    assert back.startswith(text)
    added = back.removeprefix(text)
    assert f"\n## day 3: back to plan `{plan['hash'][:12]}`, profile `eagle3-topk1-v2`\n" in added
    assert (
        f"from `{other['hash'][:12]}` (profile `eagle3-topk1-v2`) to `{plan['hash'][:12]}` (profile `eagle3-topk1-v2`). "
        "Why: slower at 30 <! -- deployment: {} -- > requests, api_key=***.\n"
    ) in added
    assert "```diff\n- --max-running-requests 64\n+ --max-running-requests 48\n" in added
    assert "Ready after 9.0 s." in added and "driver" not in added
    assert added.count("<!-- deployment: ") == 1

    # Neither the same call nor site.yml after it adds anything; a measurement goes to this entry.
    assert history.updated(back, plan, tmp_path, "later", rollback=rollback) == back
    assert history.updated(back, plan, tmp_path, "later", "590.48.01") == back
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "latest.json").write_text(json.dumps({**MEASURED, "plan_hash": plan["hash"]}))
    assert "| 100 | 770.0 | - |" in history.updated(back, plan, tmp_path, "later").removeprefix(text)

    # And back again: one entry each time, by whatever name the start has.
    went_back(other, "i2")
    again = history.updated(back, other, tmp_path, "day 4", rollback={"left": plan, "found": None, "reason": ""})
    assert again.count("<!-- deployment: ") == 4
    assert "Why: not said (`sglang_service_rollback_reason`)." in again.removeprefix(back)


def test_a_rollback_from_what_never_served_says_what_was_found(tmp_path: Path, plan: dict[str, Any]) -> None:
    deploy(tmp_path, plan)
    text = history.updated("", plan, tmp_path, "day 1")
    rollback = {"left": {}, "found": ["the unit is failed"], "reason": "it hung"}
    added = history.updated(text, plan, tmp_path, "day 2", rollback=rollback).removeprefix(text)
    assert "from what ran, which was not on record as good (the unit is failed) to `" in added
    assert "Against the deployment" not in added and "The first deployment" not in added


def test_a_rollback_begins_no_history_and_enters_nothing_that_does_not_serve(
    tmp_path: Path, plan: dict[str, Any]
) -> None:
    deploy(tmp_path, plan)
    assert history.updated("", plan, tmp_path, "now", rollback={"left": {}}) == ""
    text = history.updated("", plan, tmp_path, "now")
    assert history.updated(text, {**plan, "hash": "e" * 64}, tmp_path, "now", rollback={"left": plan}) == text


def test_a_plan_that_does_not_serve_is_not_entered(tmp_path: Path, plan: dict[str, Any]) -> None:
    assert history.updated("", plan, tmp_path, "now") == history.HEAD
    deploy(tmp_path, {**plan, "hash": "e" * 64})
    assert history.updated("", plan, tmp_path, "now") == history.HEAD


def test_the_record_s_history_holds_the_record_s_numbers() -> None:
    for number in ("54.1", "82", "63", "89", "96.1", "-12.7 %", "-54.5 %", "-6.4 %", "+10.1 %"):
        assert number in history.HEAD
