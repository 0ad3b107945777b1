"""The filters launch_plan and launch_args: thin, and their errors are Ansible's."""

from __future__ import annotations

import plan_cases as cases
import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.gpuserve.sglang.plugins.filter import launch_args as args_filter
from ansible_collections.gpuserve.sglang.plugins.filter import launch_plan as plan_filter
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import DEFAULTS, launch_plan

PLAN = plan_filter.FilterModule().filters()["launch_plan"]
ARGS = args_filter.FilterModule().filters()["launch_args"]


def test_plan_filter_is_thin() -> None:
    made = PLAN(cases.wanted(), host=cases.host(), models=cases.models())
    assert made == {**launch_plan(cases.wanted(), cases.host(), cases.models()), "error": ""}


def test_plan_filter_can_report_instead_of_failing() -> None:
    made = PLAN(cases.wanted(port=99999), host=cases.host(), models=cases.models(), report_errors=True)
    assert list(made) == ["error"] and "deployment_port: found 99999" in made["error"]


def test_plan_filter_reports_all_problems_one_a_line() -> None:
    with pytest.raises(AnsibleFilterError) as caught:
        PLAN(cases.wanted(port=99999, model_path="x"), host=cases.host(), models=cases.models())
    lines = str(caught.value).splitlines()
    assert len([line for line in lines if line.startswith("deployment_")]) == 2


def test_args_of_a_plan_and_of_a_mapping() -> None:
    plan = launch_plan(cases.wanted(), cases.host(), cases.models())
    assert ARGS(plan) == plan["argv"]
    lines = ARGS(plan, lines=True)
    assert "--tp-size 8" in lines and "--enable-metrics" in lines
    assert ARGS({"tp_size": 8, "extra_metric_labels": {"a": "b c"}}, lines=True) == [
        "--tp-size 8",
        """--extra-metric-labels '{"a":"b c"}'""",
    ]
    with pytest.raises(AnsibleFilterError, match="tp_size"):
        ARGS({"tp_siz": 8})


@pytest.mark.parametrize("module", [plan_filter, args_filter])
def test_documentation(module: object) -> None:
    document = yaml.safe_load(module.DOCUMENTATION)  # type: ignore[attr-defined]
    assert document["name"] in module.FilterModule().filters()  # type: ignore[attr-defined]
    assert yaml.safe_load(module.EXAMPLES) and yaml.safe_load(module.RETURN)  # type: ignore[attr-defined]


def test_documented_keys_and_defaults_are_the_code_s() -> None:
    options = yaml.safe_load(plan_filter.DOCUMENTATION)["options"]["_input"]["suboptions"]
    assert {
        key: option.get("default", "" if option.get("required") else None) for key, option in options.items()
    } == DEFAULTS
    plan = PLAN(cases.wanted(), host=cases.host(), models=cases.models())
    assert set(yaml.safe_load(plan_filter.RETURN)["_value"]["contains"]) == set(plan)
