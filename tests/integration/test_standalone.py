"""Single parts of the collection, used the way people use them from a checkout or from an installed collection."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import ROOT, Box, ansible, as_json


def test_health_gate_ad_hoc() -> None:
    done = ansible("ansible", "localhost", "-m", "gpuserve.sglang.health_gate", "-a", "unit= port=1 timeout=2")
    assert done.returncode != 0
    assert '"state": "timeout"' in done.stdout or "state: timeout" in done.stdout, done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_playbook_with_one_role(box: Box, tmp_path) -> None:
    play = tmp_path / "nccl.yml"
    play.write_text("- hosts: gpu_servers\n  gather_facts: false\n  roles: [gpuserve.sglang.nccl]\n")
    path = box.sh("python3 -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"))'") + "/sitecustomize.py"
    first = box.play(str(play))
    assert first.rc == 0, first.failure
    assert "NCCL_PROTO" in box.sh(f"cat {path}")
    assert box.play(str(play)).changed == []


def test_plan_against_what_runs(serving_box: Box) -> None:
    """--diff shows the one flag that differs, and that a restart would follow; nothing is touched."""
    pid = serving_box.main_pid
    same = serving_box.play("playbooks/plan.yml", "--diff")
    assert same.rc == 0, same.failure
    assert "Restart: no, the running process follows this plan." in same.stdout
    other = serving_box.play("playbooks/plan.yml", "--diff", deployment_overrides={"max_running_requests": 4})
    assert "Restart: yes, the running process follows another plan" in other.stdout
    assert "What runs is what is planned." in same.stdout
    assert "- --max-running-requests 8" in other.stdout
    assert "+ --max-running-requests 4" in other.stdout
    assert other.changed == []
    assert serving_box.main_pid == pid > 0


def test_production_inventory() -> None:
    done = ansible("ansible-playbook", "-i", "inventories/production", "site.yml", "--syntax-check")
    assert done.returncode == 0, done.stderr
    listed = as_json(ansible("ansible-inventory", "-i", "inventories/production", "--list").stdout)
    (host,) = listed["gpu_servers"]["hosts"]
    values = listed["_meta"]["hostvars"][host]
    assert values["ansible_host"].startswith("192.0.2.")
    assert values["deployment_profile"] == "eagle3-topk1-v2"
    assert values["deployment_draft_model_path"] == "/data/eagle3/output_100k_sglang/4"


DOCUMENTED = {
    "--tp-size": "8",
    "--attention-backend": "flashinfer",
    "--speculative-algorithm": "EAGLE3",
    "--speculative-draft-model-path": "/data/eagle3/output_100k_sglang/4",
    "--speculative-eagle-topk": "1",
    "--speculative-num-steps": "2",
    "--speculative-num-draft-tokens": "3",
    "--enable-flashinfer-allreduce-fusion": None,
    "--cuda-graph-max-bs": "128",
    "--mem-fraction-static": "0.88",
    "--model-path": "/data/kimi-k2.5",
    "--host": "127.0.0.1",
    "--port": "30000",
}
# What the record leaves implicit; each is a listed deviation.
ADDED = {"--served-model-name", "--trust-remote-code", "--enable-metrics", "--max-running-requests"}


def test_plan_of_the_documented_box_from_stored_facts(tmp_path) -> None:
    """Exactly the documented flags, what was added, and the reason of each; no host is connected to."""
    plan_file = tmp_path / "plan.json"
    done = ansible(
        "ansible-playbook", "-i", "inventories/production", "playbooks/plan.yml",
        "-e", "@tests/fixtures/documented-box.json", "-e", f"plan_file={plan_file}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    plan = json.loads(plan_file.read_text())
    words, flags = plan["argv"], {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            following = words[place + 1] if place + 1 < len(words) else "--"
            flags[word] = None if following.startswith("--") else following
    assert {name: value for name, value in flags.items() if name not in ADDED} == DOCUMENTED
    assert set(flags) == set(DOCUMENTED) | ADDED
    deviations = {d["setting"]: d for d in plan["deviations"]}
    assert set(deviations) >= ADDED
    assert all(d["reason"] and d["take_back"] for d in deviations.values())
    assert plan["env"]["SGLANG_ENABLE_SPEC_V2"] == "True"
    for text in ("--mem-fraction-static 0.88", "kv_bytes_per_token", "70272", "Deviations from the documented box"):
        assert text in done.stdout
    assert "Restart: not compared" in done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory):
    """The built collection, installed into a folder that knows nothing of the checkout."""
    folder = tmp_path_factory.mktemp("galaxy")
    built = ansible("ansible-galaxy", "collection", "build", "--output-path", str(folder))
    assert built.returncode == 0, built.stderr
    (tarball,) = folder.glob("gpuserve-sglang-*.tar.gz")
    env = {
        "ANSIBLE_CONFIG": str(folder / "none.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(folder / "collections"),
        "ANSIBLE_CONNECTION_PLUGINS": str(ROOT / "sandbox" / "connection"),
    }
    (folder / "none.cfg").write_text("")
    done = ansible(
        "ansible-galaxy", "collection", "install", str(tarball), "-p", str(folder / "collections"), cwd=folder, env=env
    )
    assert done.returncode == 0, done.stderr
    return folder, tarball, env


def test_the_tarball_is_clean(installed) -> None:
    _, tarball, _ = installed
    names = subprocess.run(["tar", "tzf", tarball], capture_output=True, text=True, check=True).stdout.splitlines()
    top = {name.partition("/")[0] for name in names}
    assert {"roles", "plugins", "playbooks", "meta", "MANIFEST.json", "README.md"} <= top
    assert not top & {".git", ".venv", ".cache", "collections", "sandbox", "molecule", "inventories", ".ci"}
    assert not [name for name in names if name.endswith((".pyc", ".tar.gz"))]


def test_the_installed_playbook_runs(installed, serving_box: Box) -> None:
    """`gpuserve.sglang.site` by its name, far from the checkout, on a box that is already right: nothing changes."""
    folder, _, env = installed
    values = subprocess.run(
        [sys.executable, "-c", "import sys, yaml, json; json.dump(yaml.safe_load(sys.stdin), sys.stdout)"],
        input=(ROOT / "inventories/sandbox/group_vars/gpu_servers.yml").read_text(),
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    variables = json.loads(values)
    lines = (ROOT / "sandbox/engine/requirements.txt").read_text().split("\n")
    variables["sglang_steps"][0]["requirements"] = lines
    (folder / "vars.json").write_text(json.dumps(variables))
    done = ansible(
        "ansible-playbook", "-i", f"{serving_box.name},", "-e", f"@{folder / 'vars.json'}", "-e", "gpuserve_hosts=all",
        "-e", "ansible_connection=box", "gpuserve.sglang.site", cwd=folder, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "changed=0" in done.stdout


def test_one_number_of_a_profile_changes_unit_handbook_and_plan_together(tmp_path) -> None:
    """The same site profile with two values: each rendered file holds its own value and not the other one."""
    rendered = {}
    for value in (0.8, 0.81):
        plan_file = tmp_path / f"plan-{value}.json"
        profile = {"site": {"base": "eagle3-topk1-v2", "flags": {"mem_fraction_static": value}}}
        done = ansible(
            "ansible-playbook", "-i", "inventories/production", "playbooks/plan.yml",
            "-e", "@tests/fixtures/documented-box.json", "-e", f"plan_file={plan_file}",
            "-e", json.dumps({"deployment_profile": "site", "deployment_profiles": profile}),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:]
        facts = json.loads((ROOT / "tests/fixtures/documented-box.json").read_text())
        values = {
            **facts, "deployment_plan": json.loads(plan_file.read_text()), "deployment_model_path": "/data/kimi-k2.5",
            "deployment_draft_model_path": "/data/draft", "deployment_state_dir": "/var/lib/sglang-kimi",
            "deployment_cache_dir": "/var/cache/sglang-kimi", "__sglang_service_program": "/usr/bin/python3 /x",
            "__sglang_service_settings_file": "/etc/x.json", "__sglang_service_incident_unit": "x@why.service", "runbook_path": "/tmp/x", "sglang_release": {},
            "runbook_history_path": "/tmp/y", "__runbook_release": {},
            "__runbook_view": "{{ deployment_plan | gpuserve.sglang.handbook(host=deployment_host, report=gpu_preflight_report) }}",
            "gpu_preflight_report": {"waived": [], "warnings": []}, "ansible_connection": "local", "ansible_become": False,
            "ansible_python_interpreter": sys.executable,
        }  # fmt: skip
        values["deployment_host"].setdefault("os", {"pretty_name": "Ubuntu 24.04"})
        (tmp_path / "values.json").write_text(json.dumps(values))
        for name, source in {
            "unit": "roles/sglang_service/templates/sglang.service.j2",
            "handbook": "roles/runbook/templates/production.md.j2",
        }.items():
            target = tmp_path / f"{name}-{value}"
            done = ansible(
                "ansible", "localhost", "-m", "ansible.builtin.template", "-e", f"@{tmp_path / 'values.json'}",
                "-a", f"src={ROOT / source} dest={target}",
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            rendered[name, value] = target.read_text()
    for name in ("unit", "handbook"):
        assert "--mem-fraction-static 0.8 \\" in rendered[name, 0.8]
        assert "0.81" not in rendered[name, 0.8]
        assert "--mem-fraction-static 0.81 \\" in rendered[name, 0.81]
