"""Variables against what the roles know: names, types, choices; and the action plugin that asks on the controller."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleActionFail, AnsibleUndefinedVariable
from ansible_collections.gpuserve.sglang.plugins.action import check_variables as action
from ansible_collections.gpuserve.sglang.plugins.module_utils import role_variables as rv

ROOT = Path(__file__).resolve().parents[2]
REAL = action.known_variables(ROOT / "roles")


def findings(values: dict[str, Any]) -> list[str]:
    lines = rv.unknown_names(values, REAL)
    for name, value in values.items():
        lines += rv.wrong_value(name, value, REAL)
    return lines


# --- names -------------------------------------------------------------------------------------------------------------
def test_a_misspelt_name_is_told_its_nearest() -> None:
    assert findings({"deployment_prot": 1}) == [
        "deployment_prot is set but is no variable of the role deployment, expected deployment_port perhaps. "
        "Correct the name; a name of your own goes into gpuserve_other_variables."
    ]
    assert (
        "role sglang_service, expected sglang_service_health_timeout perhaps"
        in findings({"sglang_service_helth_timeout": 1})[0]
    )
    assert "the playbooks, expected gpuserve_cuda perhaps" in findings({"gpuserve_cud": False})[0]


def test_a_name_like_no_other_is_sent_to_the_list() -> None:
    assert "expected one of roles/model/README.md" in findings({"model_registry_of_ours": 1})[0]


@pytest.mark.parametrize(
    "name", ["__deployment_x", "ansible_host", "models", "deploymentport", "my_deployment_port", "sglang", "cudax"]
)
def test_other_names_are_nobodys_business(name: str) -> None:
    assert findings({name: object()}) == []


def test_facts_and_results_of_roles_are_known() -> None:
    names = ["deployment_host", "deployment_models", "deployment_plan", "sglang_release", "gpu_preflight_report"]
    assert rv.unknown_names(names, REAL) == []


def test_names_of_the_site_can_be_excepted() -> None:
    assert rv.unknown_names(["model_registry"], REAL, ["model_registry"]) == []


def test_every_variable_of_the_playbooks_is_known() -> None:
    texts = [path.read_text() for path in (ROOT / "playbooks").rglob("*.yml")]
    used = {name for text in texts for name in re.findall(r"(?<![\w.])gpuserve_\w+", text)}
    assert used
    assert used <= set(rv.PLAYBOOK_VARIABLES), "add it to role_variables.PLAYBOOK_VARIABLES"


def test_every_playbook_checks_first() -> None:
    """Before anything is connected to: the first task of the first play, whatever tags are asked for."""
    for path in sorted((ROOT / "playbooks").glob("*.yml")):
        play = yaml.safe_load(path.read_text())[0]
        if "ansible.builtin.import_playbook" in play:
            continue
        first = (play.get("pre_tasks") or play.get("tasks") or [{}])[0]
        assert "gpuserve.sglang.check_variables" in first, f"{path.name}: begin it like playbooks/site.yml"
        assert first["tags"] == ["always"], f"{path.name}: tags: [always], so that it runs whatever tags are asked for"
        assert play["gather_facts"] is False, path.name


# --- values ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "deployment_port", "http",
            'deployment_port is "http", expected a whole number. '
            "Correct it, or remove deployment_port for its default 30000.",
        ),
        ("deployment_port", True, "deployment_port is true, expected a whole number"),
        ("deployment_port", 1.5, "deployment_port is 1.5, expected a whole number"),
        ("sglang_offline", "perhaps", 'sglang_offline is "perhaps", expected true or false'),
        ("sglang_find_links", "/srv/wheels", 'sglang_find_links is "/srv/wheels", expected a list of texts'),
        ("deployment_overrides", ["a"], "deployment_overrides is a list of 1, expected a dictionary"),
        ("deployment_model_path", {"a": 1}, "deployment_model_path is a dictionary of 1, expected an absolute path (absolute path of"),
        ("sglang_min_free_gb", "much", 'sglang_min_free_gb is "much", expected a number. Correct it, or remove'),
        ("sglang_installer", "pipp", 'sglang_installer is "pipp", expected one of auto, uv, pip (did you mean pip?). Correct'),
        ("sglang_find_links", [{}], "sglang_find_links[0] is a dictionary of 0, expected text"),
        ("sglang_steps", ["torch"], 'sglang_steps[0] is "torch", expected a dictionary'),
        ("sglang_steps", [{"requirements": ["a==1"]}], "sglang_steps[0] has no name, expected text. Correct it"),
        (
            "sglang_steps", [{"name": "a", "requirement": []}],
            "sglang_steps[0] has the key requirement, expected only name, requirements, index_url",
        ),
        ("sglang_steps", [{"name": "a", "requirements": "b==1"}], 'sglang_steps[0].requirements is "b==1", expected a list of texts'),
        ("sglang_steps", [{"name": "a", "git": {"package": "x"}}], "sglang_steps[0].git has no url, expected text"),
    ],
)  # fmt: skip
def test_one_line_says_found_expected_and_what_to_do(name: str, value: Any, line: str) -> None:
    found = findings({name: value})
    assert any(one.startswith(line) for one in found), found
    assert all("\n" not in one and "Correct it" in one and ", expected " in one for one in found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("deployment_port", "30001"), ("deployment_port", 30001.0), ("sglang_offline", "yes"), ("sglang_offline", 0),
        ("sglang_min_free_gb", "0.5"), ("sglang_min_free_gb", 3), ("sglang_torch_cuda", 13.0), ("deployment_nccl_env", None),
        ("sglang_steps", [{"name": "a", "requirements": ["b==1"], "no_deps": True}]), ("deployment_plan", "not looked at"),
    ],
)  # fmt: skip
def test_what_ansible_takes_is_taken(name: str, value: Any) -> None:
    assert findings({name: value}) == []


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "deployment_model_path", "data/tiny",
            'deployment_model_path is "data/tiny", expected an absolute path that begins with / '
            "(absolute path of the target model's directory on the host). Correct it.",
        ),
        ("deployment_draft_model_path", "~/draft", 'deployment_draft_model_path is "~/draft", expected an absolute path that begins'),
        (
            "deployment_state_dir", "state",
            'deployment_state_dir is "state", expected an absolute path that begins with / (folder for what the service keeps). '
            "Correct it, or remove deployment_state_dir for its default \"/var/lib/sglang-kimi\".",
        ),
        ("sglang_root", "./sglang", 'sglang_root is "./sglang", expected an absolute path'),
        ("verify_dropins", ["/a", "b"], 'verify_dropins[1] is "b", expected an absolute path that begins with /'),
    ],
)  # fmt: skip
def test_a_path_of_the_host_is_absolute(name: str, value: Any, line: str) -> None:
    (found,) = findings({name: value})
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("deployment_draft_model_path", ""), ("deployment_draft_model_path", None), ("deployment_model_path", "/data/tiny"),
        ("benchmark_prompts_file", "prompts.jsonl"), ("benchmark_controller_dir", "results"), ("tune_result_file", "best.yml"),
        ("verify_json", "verify.json"), ("deployment_python", ""), ("nccl_interpreter", "python3"),
    ],
)  # fmt: skip
def test_empty_paths_and_files_on_the_controller_are_taken(name: str, value: Any) -> None:
    assert findings({name: value}) == []


def test_every_option_that_wants_an_absolute_path_is_of_that_type() -> None:
    for options in REAL.roles.values():
        for name, option in options.items():
            says = str(option.get("description")).lower()
            if says.startswith("absolute path of") or "an absolute path" in says:
                assert option["type"] == "path", name


def test_every_default_is_of_its_own_type() -> None:
    for options in REAL.roles.values():
        for name, option in options.items():
            # A template is checked when it has been rendered.
            if "{{" not in str(option.get("default")):
                assert rv.wrong_value(name, option.get("default"), REAL) == []


def test_secrets_and_long_values_are_not_shown() -> None:
    for value in ("https://me:hunter2@example.org/simple", "token=hunter2"):
        (line,) = rv.wrong_value("sglang_find_links", value, REAL)
        assert "hunter2" not in line
    (line,) = rv.wrong_value("sglang_find_links", "x" * 500, REAL)
    assert "x" * 81 not in line


def test_what_a_role_needs_is_missed() -> None:
    assert rv.missing_names(["deployment_port"], ["deployment", "nccl"], REAL) == [
        "deployment_model_path is not set, expected an absolute path (absolute path of the target model's directory on the host). "
        "Set it in the inventory."
    ]


# --- the action plugin -------------------------------------------------------------------------------------------------
class Templar:
    """What is written {{ fact }} is not known yet."""

    def template(self, value: Any) -> Any:
        if value == "{{ fact }}":
            raise AnsibleUndefinedVariable("'fact' is undefined")
        return value


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(action.ActionBase, "run", lambda *_args, **_kwargs: {})

    def run(variables: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        plugin = action.ActionModule.__new__(action.ActionModule)
        plugin._task = SimpleNamespace(args=arguments)
        plugin._templar = Templar()
        return plugin.run(task_vars=variables)

    return run


def test_all_findings_are_in_one_message(check) -> None:
    result = check({"deployment_prot": 1, "deployment_port": "x", "other": 1}, roles=["deployment"])
    assert result["failed"]
    assert [line.split()[0] for line in result["msg"].splitlines()] == [
        "deployment_prot", "deployment_model_path", "deployment_port",
    ]  # fmt: skip


def test_right_variables_are_counted(check) -> None:
    result = check({"deployment_model_path": "/m", "deployment_port": "{{ fact }}"}, roles=["deployment"])
    assert result == {"changed": False, "checked": 2}


def test_the_list_of_exceptions_is_read(check) -> None:
    assert "failed" not in check({"model_registry": 1, "gpuserve_other_variables": ["model_registry"]})


@pytest.mark.parametrize("arguments", [{"roles": "deployment"}, {"rolls": []}, {"roles": ["nothing"]}])
def test_its_own_arguments_are_checked(check, arguments: dict[str, Any]) -> None:
    with pytest.raises(AnsibleActionFail, match="expected roles"):
        check({}, **arguments)
