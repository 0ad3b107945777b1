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


def test_production_inventory() -> None:
    done = ansible("ansible-playbook", "-i", "inventories/production", "site.yml", "--syntax-check")
    assert done.returncode == 0, done.stderr
    listed = as_json(ansible("ansible-inventory", "-i", "inventories/production", "--list").stdout)
    (host,) = listed["gpu_servers"]["hosts"]
    values = listed["_meta"]["hostvars"][host]
    assert values["ansible_host"].startswith("192.0.2.")
    assert values["deployment_profile"] == "eagle3-topk1-v2"
    assert values["deployment_draft_model_path"] == "/data/eagle3/output_100k_sglang/4"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory):
    """The built collection, installed into a folder that knows nothing of the checkout."""
    folder = tmp_path_factory.mktemp("galaxy")
    built = ansible("ansible-galaxy", "collection", "build", "--output-path", str(folder))
    assert built.returncode == 0, built.stderr
    (tarball,) = folder.glob("gpuserve-sglang-*.tar.gz")
    env = {"ANSIBLE_CONFIG": str(folder / "none.cfg"), "ANSIBLE_COLLECTIONS_PATH": str(folder / "collections")}
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


def test_the_installed_playbook_runs(installed, box: Box) -> None:
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
        "ansible-playbook", "-i", f"{box.name},", "-e", f"@{folder / 'vars.json'}", "-e", "gpuserve_hosts=all",
        "-e", "ansible_connection=containers.podman.podman", "gpuserve.sglang.site", cwd=folder, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "changed=0" in done.stdout
