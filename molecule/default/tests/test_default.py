"""What the host must look like after site.yml, and again after a reboot: asked of the host, not of the play."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "collections"))

from ansible_collections.gpuserve.sglang.plugins.module_utils.service import PLAN_VARIABLE
from ansible_collections.gpuserve.sglang.plugins.module_utils.verify_host import HANDBOOK_PLAN, launch_words
from ansible_collections.gpuserve.sglang.plugins.module_utils.verify_unit import UnitSeen, directives, property_of

UNIT = "sglang-kimi.service"
STATE = "/var/lib/sglang-kimi"
PORT = 30000
ANSWER = "Hello from the sandbox: this tiny model runs on a real SGLang engine, and its answer is known."

testinfra_hosts = ["podman://gpuserve-molecule-default"]


@pytest.fixture(scope="module")
def unit(host):
    """Effective properties of the unit, as systemd has loaded them."""
    return dict(line.split("=", 1) for line in host.check_output(f"systemctl show {UNIT}").splitlines() if "=" in line)


@pytest.fixture(scope="module")
def process(host, unit):
    """Command line and environment of the process that serves."""
    pid = unit["MainPID"]
    environ = host.check_output(f"tr '\\0' '\\n' </proc/{pid}/environ").splitlines()
    return {
        "command": host.check_output(f"tr '\\0' '\\n' </proc/{pid}/cmdline").splitlines(),
        "environ": dict(line.split("=", 1) for line in environ),
    }


@pytest.mark.parametrize(
    ("path", "mode", "owner"),
    [
        (f"/etc/systemd/system/{UNIT}", 0o644, "root"),
        (STATE, 0o750, "sglang"),
        ("/var/cache/sglang-kimi", 0o750, "sglang"),
        (f"{STATE}/production.md", 0o644, "root"),
        (f"{STATE}/last-start.json", 0o644, "root"),
        ("/etc/gpuserve-sglang/sglang-kimi.json", 0o644, "root"),
        ("/usr/local/lib/gpuserve-sglang/__main__.py", 0o644, "root"),
    ],
)
def test_file(host, path, mode, owner):
    file = host.file(path)
    assert file.exists
    assert file.mode == mode
    assert file.user == owner


def test_user_is_a_system_user(host):
    user = host.user("sglang")
    assert user.uid < 1000
    assert user.shell == "/usr/sbin/nologin"


def test_service_runs_and_is_enabled(host):
    service = host.service(UNIT)
    assert service.is_running
    assert service.is_enabled


def test_unit_properties(unit):
    assert unit["Restart"] == "always"
    assert unit["RestartUSec"] == "30s"
    assert unit["KillMode"] == "mixed"
    assert unit["KillSignal"] == "2"
    assert unit["TimeoutStopUSec"] == "2min 15s"
    assert unit["User"] == "sglang"
    assert unit["WorkingDirectory"] == STATE
    assert unit["NRestarts"] == "0"
    assert unit["FragmentPath"] == f"/etc/systemd/system/{UNIT}"
    assert unit["NeedDaemonReload"] == "no"
    # Three starts that each use up their whole budget must fall into the window, or a loop of slow failures never trips.
    cycle = _seconds(unit["TimeoutStartUSec"]) + _seconds(unit["TimeoutStopUSec"]) + 30
    assert unit["StartLimitBurst"] == "3"
    assert _seconds(unit["StartLimitIntervalUSec"]) >= 3 * cycle * 1.2


def test_limits_are_in_force(host, unit):
    """What systemd has loaded, and what the process really got: a container cannot raise everything."""
    assert unit["OOMPolicy"] == "kill"
    assert unit["OOMScoreAdjust"] == "-500"
    assert int(unit["TasksMax"]) % 1024 == 0
    (threads,) = host.check_output(f"grep ^Threads: /proc/{unit['MainPID']}/status").splitlines()
    assert int(threads.split()[1]) < int(unit["TasksMax"]) / 4
    assert int(unit["MemoryMax"]) % 1024**3 == 0
    assert unit["MemoryHigh"] == "infinity"
    assert unit["LimitNOFILE"] == "1048576"
    assert unit["LimitMEMLOCK"] == "infinity"
    limits = host.check_output(f"cat /proc/{unit['MainPID']}/limits")
    (files,) = [line.split() for line in limits.splitlines() if line.startswith("Max open files")]
    assert int(files[3]) >= 20000


def test_the_environment_is_explicit(process):
    """Caches and working directory are folders of the service's own, and nothing comes from a login."""
    environ = process["environ"]
    assert environ["XDG_CACHE_HOME"].startswith("/var/cache/sglang-kimi")
    assert environ["PATH"].startswith("/opt/sglang/releases/")
    assert set(environ) - {"LANG", "USER", "LOGNAME", "HOME", "SHELL", "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID"} <= {
        "PATH", "XDG_CACHE_HOME", "GPUSERVE_PLAN", "SGLANG_USE_CPU_ENGINE", "HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE",
    } | {name for name in environ if name.startswith(("SGLANG_", "MEMORY_PRESSURE_", "PYTHON"))}  # fmt: skip


def test_started_means_served(host, unit):
    """The gate is part of the start, and it is the same program that the module runs."""
    assert (
        "/usr/local/lib/gpuserve-sglang gate --settings /etc/gpuserve-sglang/sglang-kimi.json" in unit["ExecStartPost"]
    )
    gate = "/usr/bin/python3 -I -S /usr/local/lib/gpuserve-sglang gate --settings /etc/gpuserve-sglang/sglang-kimi.json"
    said = host.run(f"{gate} --timeout 60")
    assert (said.rc, said.stderr) == (0, "")
    assert "sglang-kimi.service serves after" in said.stdout
    assert "KV pool 4 096 tokens, 4 096 planned" in said.stdout


def test_settings_of_the_programs(host):
    """They name the unit and the endpoint that are in place; the plan lies beside them; neither holds a secret."""
    settings = json.loads(host.file("/etc/gpuserve-sglang/sglang-kimi.json").content_string)
    plan = json.loads(host.file("/etc/gpuserve-sglang/sglang-kimi.plan.json").content_string)
    assert settings["unit"] == UNIT
    assert settings["endpoint"] == plan["endpoint"]
    assert settings["state_dir"] == STATE
    assert settings["plan_hash"] == plan["hash"]
    assert settings["gate"]["port"] == PORT


def test_exposure(host):
    verdict = host.check_output(f"systemd-analyze security --no-pager {UNIT} | tail -1")
    assert float(verdict.split(":")[1].split()[0]) <= 4.0


def _seconds(text):
    units = {"h": 3600, "min": 60, "s": 1, "ms": 0.001}
    total = 0.0
    for word in text.split():
        digits = word.rstrip("hmins")
        total += float(digits) * units[word[len(digits) :]]
    return total


@pytest.fixture(scope="module")
def deployed(host):
    """What verify expects of this host: the record of its last good deployment."""
    folder = f"{STATE}/deployments/last-good"
    return {
        "unit": host.file(f"{folder}/unit").content_string,
        "plan": json.loads(host.file(f"{folder}/plan.json").content_string),
    }


def test_unit_is_what_was_recorded(host, unit, deployed):
    """The expectations of playbooks/verify.yml, held against the host by other means."""
    path = f"/etc/systemd/system/{UNIT}"
    on_disk = host.file(path).content_string
    assert on_disk.rstrip() == deployed["unit"].rstrip()
    assert unit.get("DropInPaths", "") == ""
    written = {property_of(entry.name) for entry in directives(deployed["unit"], path)}
    assert len(written & set(unit)) > 30
    assert UnitSeen(UNIT, path, deployed["unit"], on_disk, {}, unit).not_loaded() == []


def test_process_is_what_plan_and_handbook_say(host, process, deployed):
    """The command line in the handbook, in the plan and of the process are the same words; so are the variables."""
    handbook = host.file(f"{STATE}/production.md").content_string
    plan = deployed["plan"]
    assert launch_words(handbook) == process["command"] == plan["command"]
    assert process["command"][0].startswith("/opt/sglang/releases/")
    assert process["command"][1:3] == ["-m", "sglang.launch_server"]
    shown = handbook.split("## 6. Exact launch command")[1].split("```")[3]
    variables = dict(line.split("=", 1) for line in shown.splitlines() if line)
    assert variables == plan["env"]
    assert {name: process["environ"].get(name) for name in variables} == variables
    assert process["environ"][PLAN_VARIABLE] == plan["process_hash"]
    assert plan["hash"].startswith(HANDBOOK_PLAN.search(handbook).group(1))


def test_history_has_the_record_and_this_deployment(host, deployed):
    history = host.file(f"{STATE}/eagle-fast-verify.md").content_string
    assert "EAGLE-3 first ran at 54.1" in history
    assert history.count("<!-- deployment: ") == 1
    assert deployed["plan"]["hash"] in history


def test_release_is_complete(host, process):
    release = process["command"][0].partition("/venv/")[0]
    manifest = json.loads(host.file(f"{release}/manifest.json").content_string)
    assert manifest["packages"]["sglang"] == "0.5.9"
    assert manifest["installer"] == "uv"
    assert manifest["torch_cuda"] is None


def test_port_is_bound_to_the_loopback_only(host):
    listening = [line.split() for line in host.check_output("ss -H -l -t -n").splitlines()]
    assert [line[3] for line in listening if line[3].endswith(f":{PORT}")] == [f"127.0.0.1:{PORT}"]


def test_health(host):
    assert host.check_output(f"curl -s -o /dev/null -w '%{{http_code}}' http://127.0.0.1:{PORT}/health") == "200"


def test_completion(host):
    """A real generation, with sampling: only weights that were loaded right give this sentence."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What do you say?"}],
        "max_tokens": 64,
        "temperature": 0.8,
        "top_p": 0.9,
    }
    answer = json.loads(
        host.check_output(
            "curl -s --fail -H 'Content-Type: application/json' -d %s http://127.0.0.1:%s/v1/chat/completions",
            json.dumps(body),
            str(PORT),
        )
    )
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_sitecustomize_keeps_what_was_there(host):
    text = host.file(f"/usr/lib/python{_python(host)}/sitecustomize.py").content_string
    assert "apport_python_hook.install()" in text.split("# BEGIN gpuserve.sglang")[0]
    code = "import os; print(os.environ['NCCL_PROTO'], os.environ['NCCL_P2P_LEVEL'])"
    assert host.check_output("/usr/bin/python3 -c %s", code) == "LL SYS"


def _python(host):
    return host.check_output("/usr/bin/python3 -c %s", "import sys; print('%d.%d' % sys.version_info[:2])")


def test_gpus_of_the_box(host):
    assert host.check_output("ls /dev/nvidia[0-9]* | wc -l") == "8"
    query = "nvidia-smi --query-gpu=name,memory.total,compute_cap --format=csv,noheader"
    rows = host.check_output(query).splitlines()
    assert len(rows) == 8
    assert rows[0] == "NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887 MiB, 12.0"
