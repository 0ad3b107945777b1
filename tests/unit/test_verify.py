"""verify on a host made of files: what was deployed passes, and each drift is named by exactly one check."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from venv import EnvBuilder

import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils import verify_report, verify_serve, verify_unit
from ansible_collections.gpuserve.sglang.plugins.module_utils.health import CommandResult, HttpAnswer
from ansible_collections.gpuserve.sglang.plugins.module_utils.host_verify import Look
from ansible_collections.gpuserve.sglang.plugins.module_utils.verify import Expected
from ansible_collections.gpuserve.sglang.plugins.module_utils.verify_serve import scan_log, scan_xids
from ansible_collections.gpuserve.sglang.plugins.module_utils.verify_unit import directives, same, seconds

UNIT = "sglang-kimi.service"
PATH = f"/etc/systemd/system/{UNIT}"
PYTHON = "/opt/sglang/releases/abc123/venv/bin/python"
COMMAND = [PYTHON, "-m", "sglang.launch_server", "--model-path", "/data/m", "--port", "30000"]
TEXT = f"""[Unit]
Description=SGLang
StartLimitBurst=3

[Service]
ExecStart={" ".join(COMMAND[:4])} \\
  {" ".join(COMMAND[4:])}
Environment="NCCL_ALGO=Ring" "A=50%% of it"
Environment=GPUSERVE_PLAN=p1
Restart=always
RestartSec=30
MemoryMax=2G
"""
PLAN: dict[str, Any] = {
    "hash": "d" * 64,
    "process_hash": "p1",
    "profile": "eagle3-topk1-v2",
    "command": COMMAND,
    "args": {"--model-path": "/data/m", "--port": 30000, "--speculative-algorithm": "EAGLE3"},
    "env": {"NCCL_ALGO": "Ring", "A": "50% of it"},
    "unit": {"name": "sglang-kimi", "restart_sec": 30},
    "budget": {"kv_tokens": 1000},
    "endpoint": {"host": "127.0.0.1", "port": 30000, "url": "http://127.0.0.1:30000", "served_model_name": "m"},
    "paths": {"state": "/var/lib/sglang-kimi", "cache": "/var/cache/sglang-kimi"},
}
PID = 4711


def sealed(page: str) -> str:
    """As the role runbook writes it."""
    return f"{page}\n\n<!-- sha256 of the page above: {sha256(page.encode()).hexdigest()} -->\n"


HANDBOOK = sealed(f"""Rendered from the plan `{"d" * 12}`.
## 6. Exact launch command

```
{" ".join(COMMAND[:4])} \\
  {" ".join(COMMAND[4:])}
```
| output tok/s | 775.0 |
""")

WATCHERS = {
    "sglang-kimi-liveness.service": "[Service]\nType=oneshot\nExecStart=/usr/bin/python3 /x liveness\nTimeoutStartSec=90\n",
    "sglang-kimi-liveness.timer": "[Timer]\nOnActiveSec=30\nOnUnitInactiveSec=30\n",
    "sglang-kimi-incident@.service": "[Service]\nType=oneshot\nExecStart=/usr/bin/python3 /x incident --reason %i\n",
}


def shown_command(words: list[str]) -> str:
    """As systemctl shows it: words without quotes."""
    return f"{{ path={words[0]} ; argv[]={' '.join(words)} ; ignore_errors=no ; start_time=[n/a] }}"


def answer(status: int, body: Any = "") -> HttpAnswer:
    return HttpAnswer(status, "", body if isinstance(body, str) else json.dumps(body), 0.1)


class Pending:
    def __init__(self, said: HttpAnswer) -> None:
        self.said = said

    def wait(self, seconds: float) -> HttpAnswer:
        return self.said

    def abort(self) -> None:
        raise AssertionError("nothing to give up")


class Host:
    """A served host as files below a folder, and what its tools say."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shown = {
            "LoadState": "loaded", "ActiveState": "active", "SubState": "running", "MainPID": str(PID), "NRestarts": "0",
            "InvocationID": "i1", "FragmentPath": PATH, "DropInPaths": "", "NeedDaemonReload": "no",
            "UnitFileState": "enabled", "Restart": "always", "RestartUSec": "30s", "MemoryMax": str(2 << 30),
            "StartLimitBurst": "3",
            "ExecStart": shown_command(COMMAND),
        }  # fmt: skip
        self.timer = {"LoadState": "loaded", "ActiveState": "active", "UnitFileState": "enabled"}
        self.log: list[str] = ["The server is fired up and ready to roll!"]
        #: What the kernel said since the start, and at the boot.
        self.kernel: list[str] = []
        self.booted = ["Linux version 6.8.0"]
        #: What a command answers in place of what it would.
        self.said: dict[str, CommandResult] = {"dmesg": CommandResult(1, "", "dmesg: read kernel buffer failed")}
        self.answers = {
            "/health": answer(200),
            "/server_info": self.info(2.2, 1010),
            "/metrics": answer(200, ""),
            "/v1/chat/completions": answer(200, {"choices": [{"message": {"content": "Hello."}}]}),
        }
        ours = {"port": 30000, "address": "127.0.0.1", "pid": PID, "command": "python", "unit": UNIT}
        self.facts: dict[str, Any] = {
            "driver": {"loaded": "590.48.01", "installed": "590.48.01"},
            "nvidia_smi": {"mismatch": False, "error": None},
            "ports": [ours],
            "servers": [{"pid": PID, "engine": "sglang", "unit": UNIT, "user": "sglang", "orphan": False}],
            "disks": [{"path": "/opt", "free_bytes": 50e9, "mount": "/"}],
            "unattended_upgrades": {"blacklist": ["nvidia-", "cuda-"]},
        }
        self.write(f"var/lib/sglang-kimi/deployments/{'p' * 12}/unit", TEXT)
        self.write(f"var/lib/sglang-kimi/deployments/{'p' * 12}/plan.json", json.dumps(PLAN))
        (root / "var/lib/sglang-kimi/deployments/last-good").symlink_to("p" * 12)
        self.write(PATH, TEXT)
        site = "opt/sglang/releases/abc123/venv/lib/python3.12/site-packages"
        digest = urlsafe_b64encode(sha256(b"plain\n").digest()).decode().rstrip("=")
        record = f"sglang/__init__.py,sha256={digest},6\nsglang/worker.py,sha256={digest},6\nsglang-0.5.9.dist-info/RECORD,,\n"
        self.write(f"{site}/sglang-0.5.9.dist-info/RECORD", record)
        self.patched = self.write(f"{site}/sglang/worker.py", "patched\n")
        self.plain = self.write(f"{site}/sglang/__init__.py", "plain\n")
        python = self.write(PYTHON, "#!/bin/sh\n")
        python.chmod(0o755)
        manifest = {
            "id": "abc123",
            "packages": {"sglang": "0.5.9"},
            "files": {
                "sglang/worker.py": {"package": "sglang", "sha256": sha256(b"patched\n").hexdigest(), "patches": []}
            },
        }
        self.manifest = self.write("opt/sglang/releases/abc123/manifest.json", json.dumps(manifest))
        (root / "opt/sglang/current").symlink_to("releases/abc123")
        os.utime(self.manifest, (1000, 1000))
        self.settings = {"unit": UNIT, "endpoint": PLAN["endpoint"], "state_dir": "/var/lib/sglang-kimi",
                         "plan_hash": PLAN["hash"], "gate": {"timeout": 900}}  # fmt: skip
        self.write("etc/gpuserve-sglang/sglang-kimi.json", json.dumps(self.settings))
        self.write("etc/gpuserve-sglang/sglang-kimi.plan.json", json.dumps(PLAN))
        self.write("usr/local/lib/gpuserve-sglang/__main__.py", "program\n")
        for name, text in WATCHERS.items():
            self.write(f"etc/systemd/system/{name}", text)
        self.handbook = self.write("var/lib/sglang-kimi/production.md", HANDBOOK)
        self.write("etc/apt/preferences.d/00-gpuserve-cuda", "pins\n")
        self.write(
            "var/lib/dpkg/status",
            "Package: cuda-nvcc-13-0\nStatus: hold ok installed\nVersion: 13.0.88-1\n\n"
            "Package: less\nStatus: install ok installed\nVersion: 1\n",
        )
        self.write("proc/stat", "btime 5000\n")
        self.process(COMMAND, {**PLAN["env"], "GPUSERVE_PLAN": "p1", "PATH": "/bin", "HOME": "/x"})
        self.expected = Expected(
            plan=PLAN,
            settings={"gate": {"timeout": 900}},
            programs={"__main__.py": sha256(b"program\n").hexdigest()},
            drivers=("590",),
            holds=("cuda-*",),
            apt_files={"/etc/apt/preferences.d/00-gpuserve-cuda": "pins\n"},
            blacklist=("nvidia-",),
            disk_paths=("/opt",),
            handbook="/var/lib/sglang-kimi/production.md",
            timer="sglang-kimi-liveness.timer",
            collector="sglang-kimi-incident@failed.service",
            watchers=WATCHERS,
        )

    @staticmethod
    def info(accepted: float, tokens: int) -> HttpAnswer:
        state = {"avg_spec_accept_length": accepted, "memory_usage": {"token_capacity": tokens}}
        return answer(200, {"api_key": "hunter2", "internal_states": [state]})

    def write(self, path: str, text: str) -> Path:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def process(self, command: list[str], environment: dict[str, str], ticks: int = 100) -> None:
        self.write(f"proc/{PID}/cmdline", "\0".join(command) + "\0")
        self.write(f"proc/{PID}/environ", "\0".join(f"{k}={v}" for k, v in environment.items()) + "\0")
        self.write(f"proc/{PID}/stat", f"{PID} (python) S " + " ".join(["0"] * 18 + [str(ticks)]) + " 0\n")

    def beside(self, unit: str, text: str) -> None:
        """A drop-in of one of the units that watch over the service."""
        self.write(f"etc/systemd/system/{unit}.d/50-hand.conf", text)

    def dropin(self, text: str, loaded: bool = True) -> str:
        path = f"{PATH}.d/50-hand.conf"
        self.write(path, text)
        if loaded:
            self.shown["DropInPaths"] = path
        return path

    def run(self, argv: list[str], timeout: float) -> CommandResult:
        if argv[0] in self.said:
            return self.said[argv[0]]
        if argv[:2] == ["systemctl", "show"]:
            shown = {UNIT: self.shown, "sglang-kimi-liveness.timer": self.timer}.get(argv[-1], {"LoadState": "loaded"})
            return CommandResult(0, "".join(f"{name}={value}\n" for name, value in shown.items()))
        assert argv[0] == "journalctl"
        lines = self.log if "-t" not in argv else [*self.booted, *self.kernel] if "-b" in argv else self.kernel
        return CommandResult(0, "\n".join(lines))

    def verify(self, **changed: Any) -> dict[str, Any]:
        look = Look(
            replace(self.expected, **changed),
            run=self.run,
            request=lambda host, port, method, path, body, limit: Pending(self.answers[path]),
            collect=lambda wanted: self.facts,
            root=self.root,
            proc=self.root / "proc",
            cgroups=self.root / "cgroups",
        )
        return look.all()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def named(found: dict[str, Any]) -> list[str]:
    return [check["id"] for check in found["checks"] if check["ok"] is False]


def text_of(found: dict[str, Any], id_: str) -> str:
    (check,) = [check for check in found["checks"] if check["id"] == id_]
    return f"{check['found']} | {check['expected']} | {check['action']}"


def test_what_was_deployed_passes(host: Host) -> None:
    found = host.verify()
    assert named(found) == []
    assert found["ok"]
    assert found["unknown"] == []
    assert len({check["id"] for check in found["checks"]}) == len(found["checks"]) >= 30
    assert "hunter2" not in json.dumps(found)


def _edit(path: str, text: str) -> Callable[[Host], Any]:
    return lambda host: host.write(path, text)


def _unlink(path: str) -> Callable[[Host], Any]:
    return lambda host: (host.root / path.lstrip("/")).unlink()


def _follow_dropin(host: Host) -> None:
    """A drop-in that the running process already follows: the drop-in is the finding, the process is not."""
    words = [*COMMAND[:-1], "30000", "--tp-size", "2"]
    host.dropin(f"[Service]\nExecStart=\nExecStart={' '.join(words)}\n")
    host.shown["ExecStart"] = shown_command(words)
    host.process(words, {**PLAN["env"], "GPUSERVE_PLAN": "p1"})


def _follow_environment(host: Host) -> None:
    host.dropin("[Service]\nEnvironment=NCCL_ALGO=Tree NCCL_DEBUG=INFO\n")
    environment = {**PLAN["env"], "GPUSERVE_PLAN": "p1", "NCCL_ALGO": "Tree", "NCCL_DEBUG": "INFO"}
    host.process(COMMAND, environment)


def _follow_unit(host: Host) -> None:
    """A unit that was edited, loaded and started: the edit is the finding."""
    host.write(PATH, TEXT.replace("--port 30000", "--port 30000 --tp-size 2").replace("RestartSec=30", "RestartSec=5"))
    words = [*COMMAND, "--tp-size", "2"]
    host.shown["ExecStart"] = shown_command(words)
    host.shown["RestartUSec"] = "5s"
    host.process(words, {**PLAN["env"], "GPUSERVE_PLAN": "p1"})


def _upgrade(host: Host) -> None:
    site = host.plain.parents[1]
    new = (site / "sglang-0.5.9.dist-info").rename(site / "sglang-0.5.10.dist-info")
    (new / "RECORD").write_text((new / "RECORD").read_text().replace("0.5.9", "0.5.10"))


def _other(kind: str, **values: Any) -> Callable[[Host], Any]:
    return lambda host: host.facts[kind].update(values)


DRIFTS: dict[str, tuple[Callable[[Host], Any], str, list[str]]] = {
    "an upgraded package": (
        _upgrade, "packages", ["sglang: 0.5.10", "0.5.9"]),
    "an edited file": (lambda h: h.plain.write_text("mine\n"), "files", ["sglang/__init__.py", "sha256"]),
    "a file of nobody": (lambda h: h.plain.with_name("stray.py").write_text("x\n"), "files", ["stray.py", "Remove it"]),
    "an edited patched file": (lambda h: h.patched.write_text("mine\n"), "patches", ["worker.py", "site.yml"]),
    "a lost patched file": (lambda h: h.patched.unlink(), "patches", ["worker.py of sglang: absent"]),
    "another current": (
        lambda h: ((h.root / "opt/sglang/current").unlink(), (h.root / "opt/sglang/current").symlink_to("releases/other")),
        "release", ["other"]),
    "no manifest": (lambda h: h.manifest.unlink(), "release", ["manifest.json"]),
    "python is gone": (_unlink(PYTHON), "release", ["python"]),
    "another driver": (_other("driver", loaded="595.20", installed="595.20"), "driver", ["595.20", "590"]),
    "driver mismatch": (_other("driver", installed="590.55"), "driver", ["590.48.01", "590.55", "reboot"]),
    "a driver that is not loaded": (
        lambda h: (h.facts["driver"].update(loaded=None), h.facts["nvidia_smi"].update(error="couldn't communicate")),
        "driver", ["no driver is loaded, 590.48.01 is installed (nvidia-smi: couldn't communicate)", "modprobe nvidia"]),
    "an edited unit": (
        lambda h: (h.write(PATH, TEXT.replace("RestartSec=30", "RestartSec=5")), h.shown.update(NeedDaemonReload="yes")),
        "unit_file", ["+RestartSec=5", "-RestartSec=30"]),
    "an edited unit that runs": (_follow_unit, "unit_file", ["--tp-size 2"]),
    "a unit in place of ours": (
        lambda h: h.shown.update(FragmentPath="/etc/systemd/system.control/sglang-kimi.service"), "unit_file",
        ["it is not read: /etc/systemd/system.control/sglang-kimi.service is in its place"]),
    "a drop-in in another encoding": (
        lambda h: (h.root / h.dropin("").lstrip("/")).write_bytes(b"[Service]\n# \xe9t\xe9\nMemoryMax=1G\n"),
        "unit_properties", ["MemoryMax=1G"]),
    "no unit file": (_unlink(PATH), "unit_file", ["no file"]),
    "a flag in a drop-in": (
        lambda h: h.dropin("[Service]\nExecStart=\nExecStart=/x --api-key hunter2 --tp-size 2\n"),
        "unit_command", ["50-hand.conf", "--tp-size 2", "daemon-reload"]),
    "a flag in a drop-in that runs": (_follow_dropin, "unit_command", ["50-hand.conf"]),
    "a drop-in that was not loaded": (
        lambda h: (h.dropin("[Service]\nEnvironment=NCCL_ALGO=Tree\n", loaded=False), h.shown.update(NeedDaemonReload="yes")),
        "unit_environment", ["50-hand.conf", "NCCL_ALGO=Tree"]),
    "a variable in a drop-in that runs": (_follow_environment, "unit_environment", ["NCCL_ALGO=Tree NCCL_DEBUG=***"]),
    "an environment file": (
        lambda h: h.dropin("[Service]\nEnvironmentFile=-/etc/default/sglang\n"), "unit_environment", ["/etc/default/sglang"]),
    "memory limit in a drop-in": (
        lambda h: (h.dropin("[Service]\nMemoryMax=1G\n"), h.shown.update(MemoryMax=str(1 << 30))),
        "unit_properties", ["MemoryMax=1G", "50-hand.conf"]),
    "a property set at run time": (
        lambda h: h.shown.update(RestartUSec="1min 30s"), "unit_properties", ["RestartUSec is 1min 30s", "RestartSec=30"]),
    "not enabled": (lambda h: h.shown.update(UnitFileState="disabled"), "unit_enabled", ["disabled", "systemctl enable"]),
    "not loaded again": (lambda h: h.shown.update(NeedDaemonReload="yes"), "unit_loaded", ["daemon-reload"]),
    "stopped": (
        lambda h: (h.shown.update(ActiveState="failed", SubState="failed", MainPID="0", ExecMainCode="2", ExecMainStatus="9"),
                   h.facts.update(ports=[], servers=[])),
        "process", ["failed/failed", "status=9/KILL", "journalctl"]),
    "stopped by hand": (
        lambda h: (h.shown.update(ActiveState="inactive", SubState="dead", MainPID="0"), h.facts.update(ports=[], servers=[])),
        "process", ["inactive/dead |", "was stopped and did not fail", "playbooks/start.yml", f"systemctl start {UNIT}"]),
    "another command": (
        lambda h: h.process([*COMMAND[:-1], "30001", "--api-key", "hunter2"], {**PLAN["env"], "GPUSERVE_PLAN": "p1"}),
        "process_command", ["has --port 30001", "lacks --port 30000"]),
    "a lost variable": (lambda h: h.process(COMMAND, {"A": "50% of it", "GPUSERVE_PLAN": "p1"}), "process_environment",
                        ["no NCCL_ALGO"]),
    "a foreign variable": (
        lambda h: h.process(COMMAND, {**PLAN["env"], "GPUSERVE_PLAN": "p1", "SGLANG_X": "1"}), "process_environment",
        ["SGLANG_X=***, which the plan does not have"]),
    "an older plan": (
        lambda h: h.process(COMMAND, {**PLAN["env"], "GPUSERVE_PLAN": "p0"}), "process_environment", ["GPUSERVE_PLAN=p0"]),
    "a repaired release": (lambda h: os.utime(h.manifest, (90000, 90000)), "process_release", ["manifest.json", "site.yml"]),
    "a second listener": (
        lambda h: h.facts["ports"].append({"port": 30000, "address": "0.0.0.0", "pid": 9, "command": "nc -l", "unit": None}),
        "port", ["0.0.0.0", "nc -l", "pid 9"]),
    "a wide listener": (lambda h: h.facts["ports"][0].update(address="0.0.0.0"), "port", ["listens on 0.0.0.0", "127.0.0.1"]),
    "nobody listens": (lambda h: h.facts.update(ports=[]), "port", ["does not listen"]),
    "a second server": (
        lambda h: h.facts["servers"].append(
            {"pid": 9, "engine": "vllm", "unit": None, "user": "bob", "orphan": False}), "servers", ["vllm", "pid 9", "bob"]),
    "an orphan": (
        lambda h: h.facts["servers"].append(
            {"pid": 9, "engine": "sglang", "unit": None, "user": "root", "orphan": True}), "servers", ["orphaned worker"]),
    "unhealthy": (lambda h: h.answers.update({"/health": answer(503)}), "health", ["503", "200"]),
    "cannot generate": (
        lambda h: h.answers.update({"/v1/chat/completions": answer(500, "api_key=hunter2 boom")}), "generation", ["HTTP 500"]),
    "no draft is right": (
        lambda h: h.answers.update({"/server_info": h.info(1.0, 1000)}),
        "accept_length", ["1.00", "eagle3-aux-capture"]),
    "memory that others hold": (
        lambda h: h.answers.update({"/server_info": h.info(2.2, 400)}), "kv_pool", ["40%", "nvidia-smi"]),
    "a dead scheduler": (
        lambda h: h.log.extend(["[x] Scheduler hit an exception: Traceback (most recent call last):", "  File", "KeyError: 12"]),
        "log_engine", ["KeyError: 12"]),
    "a GPU fault": (
        lambda h: h.kernel.append("NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus."), "log_xid", ["Xid 79", "41:00"]),
    "a lost hold": (
        lambda h: h.write("var/lib/dpkg/status", "Package: cuda-nvcc-13-0\nStatus: install ok installed\nVersion: 1\n"),
        "apt_holds", ["cuda-nvcc-13-0", "apt-mark hold"]),
    "a lost pin": (_unlink("etc/apt/preferences.d/00-gpuserve-cuda"), "apt_pins", ["00-gpuserve-cuda is gone"]),
    "a shorter blacklist": (lambda h: h.facts.update(unattended_upgrades={"blacklist": ["cuda-"]}), "apt_blacklist", ["nvidia-"]),
    "a full disk": (lambda h: h.facts["disks"][0].update(free_bytes=1e9), "disk", ["/opt 1.0 GB", "5 GB"]),
    "changed settings": (
        lambda h: h.write("etc/gpuserve-sglang/sglang-kimi.json", json.dumps({**h.settings, "gate": {"timeout": 1}})),
        "settings", ["gate.timeout is 1, expected 900"]),
    "a changed plan file": (
        lambda h: h.write("etc/gpuserve-sglang/sglang-kimi.plan.json", json.dumps({**PLAN, "hash": "e" * 64})),
        "settings", ["plan.json holds another plan"]),
    "lost settings": (_unlink("etc/gpuserve-sglang/sglang-kimi.json"), "settings", ["no readable file"]),
    "an edited program": (_edit("usr/local/lib/gpuserve-sglang/__main__.py", "mine\n"), "programs", ["__main__.py"]),
    "a program for all": (
        lambda h: (h.root / "usr/local/lib/gpuserve-sglang/__main__.py").chmod(0o666), "programs",
        ["/usr/local/lib/gpuserve-sglang/__main__.py can be written by others than root (mode 0666)", "Run site.yml"]),
    "a folder of programs for all": (
        lambda h: (h.root / "usr/local/lib/gpuserve-sglang").chmod(0o777), "programs",
        ["/usr/local/lib/gpuserve-sglang can be written by others than root (mode 0777)"]),
    "a compiled program for the group": (
        lambda h: h.write("usr/local/lib/gpuserve-sglang/a/__pycache__/b.pyc", "").chmod(0o664), "programs",
        ["/a/__pycache__/b.pyc can be written by others"]),
    "a program that is a link": (
        lambda h: [(h.root / "usr/local/lib/gpuserve-sglang/__main__.py").rename(h.root / "mine"),
                   (h.root / "usr/local/lib/gpuserve-sglang/__main__.py").symlink_to(h.root / "mine")],
        "programs", ["/usr/local/lib/gpuserve-sglang/__main__.py is a link"]),
    "settings for the group": (
        lambda h: (h.root / "etc/gpuserve-sglang/sglang-kimi.json").chmod(0o664), "settings",
        ["/etc/gpuserve-sglang/sglang-kimi.json can be written by others than root (mode 0664)", "Run site.yml"]),
    "a folder of settings for all": (
        lambda h: (h.root / "etc/gpuserve-sglang").chmod(0o777), "settings", ["/etc/gpuserve-sglang can be written by others"]),
    "a record for all": (
        lambda h: (h.root / "var/lib/sglang-kimi/deployments").chmod(0o777), "deployed", ["has mode 0777"]),
    "a stopped timer": (lambda h: h.timer.update(ActiveState="inactive"), "liveness", ["inactive", "enable --now"]),
    "a liveness probe that does nothing": (
        lambda h: h.write(
            "etc/systemd/system/sglang-kimi-liveness.service",
            WATCHERS["sglang-kimi-liveness.service"].replace("/usr/bin/python3 /x liveness", "/bin/true")),
        "liveness", ["/etc/systemd/system/sglang-kimi-liveness.service was edited", "+ExecStart=/bin/true", "Run site.yml"]),
    "a drop-in of the liveness probe": (
        lambda h: h.beside("sglang-kimi-liveness.service", "[Service]\nExecStart=\nExecStart=/bin/true\n"),
        "liveness", ["sglang-kimi-liveness.service.d/50-hand.conf sets ExecStart=/bin/true"]),
    "a liveness timer that is slower": (
        lambda h: h.beside("sglang-kimi-liveness.timer", "[Timer]\nOnUnitInactiveSec=\nOnUnitInactiveSec=1d\n"),
        "liveness", ["sglang-kimi-liveness.timer.d/50-hand.conf sets OnUnitInactiveSec=1d"]),
    "a liveness timer that was not read again": (
        lambda h: h.timer.update(NeedDaemonReload="yes"), "liveness", ["daemon-reload"]),
    "a timer in place of ours": (
        lambda h: h.timer.update(FragmentPath="/run/systemd/transient/sglang-kimi-liveness.timer"), "liveness",
        ["/run/systemd/transient/sglang-kimi-liveness.timer is in its place"]),
    "a lost probe": (_unlink("etc/systemd/system/sglang-kimi-liveness.service"), "liveness", ["liveness.service is gone"]),
    "an edited collector": (
        lambda h: h.write("etc/systemd/system/sglang-kimi-incident@.service", "[Service]\nExecStart=/bin/true\n"), "incidents",
        ["/etc/systemd/system/sglang-kimi-incident@.service was edited", "+ExecStart=/bin/true"]),
    "a drop-in of the collector": (
        lambda h: h.beside("sglang-kimi-incident@.service", "[Service]\nExecStart=\nExecStart=/bin/true\n"), "incidents",
        ["incident@.service.d/50-hand.conf sets ExecStart=/bin/true"]),
    "a drop-in of the collector's instance": (
        lambda h: h.beside("sglang-kimi-incident@failed.service", "[Service]\nTimeoutStartSec=1\n"), "incidents",
        ["incident@failed.service.d/50-hand.conf sets TimeoutStartSec=1"]),
    "a stale handbook": (lambda h: h.handbook.write_text(sealed(f"plan `{'e' * 12}`")), "handbook", ["eeee", "dddd"]),
    "an edited command in the handbook": (
        lambda h: h.handbook.write_text(HANDBOOK.replace("30000", "30001")), "handbook", ["it was edited"]),
    "an edited number in the handbook": (
        lambda h: h.handbook.write_text(HANDBOOK.replace("775.0", "1775.0")), "handbook", ["it was edited"]),
    "a line after the handbook": (
        lambda h: h.handbook.write_text(HANDBOOK + "mine\n"), "handbook", ["its last line is no checksum"]),
    "other ends of lines in the handbook": (
        lambda h: h.handbook.write_bytes(HANDBOOK.replace("\n", "\r\n", 3).encode()), "handbook", ["it was edited"]),
    "a handbook of another command": (
        lambda h: h.handbook.write_text(sealed(HANDBOOK.replace("30000", "30001").partition("\n\n<!--")[0])), "handbook",
        ["launch command is another one"]),
    "no handbook": (lambda h: h.handbook.unlink(), "handbook", ["no file"]),
}  # fmt: skip


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_drift_is_named_by_one_check_and_nothing_else(host: Host, drift: str) -> None:
    change, id_, words = DRIFTS[drift]
    change(host)
    found = host.verify()
    assert named(found) == [id_], found["failures"]
    assert found["failures"] == [id_]
    assert not found["ok"]
    assert found["unknown"] == []
    for word in words:
        assert word in text_of(found, id_)
    assert "hunter2" not in json.dumps(found)


@pytest.mark.parametrize("drift", ["an upgraded package", "an edited file", "an edited patched file"])
def test_guarded_packages_alone_are_quick(host: Host, drift: str) -> None:
    quick = {"all_files": False, "guard": ("sglang",)}
    assert named(host.verify(**quick)) == []
    change, id_, words = DRIFTS[drift]
    change(host)
    found = host.verify(**quick)
    assert named(found) == [id_]
    assert words[0] in text_of(found, id_)


def test_an_undeployed_inventory_is_said_once(host: Host) -> None:
    other = {
        **PLAN,
        "hash": "e" * 64,
        "command": [*COMMAND, "--tp-size", "2"],
        "unit": {**PLAN["unit"], "restart_sec": 60},
    }
    found = host.verify(plan=other, settings={"gate": {"timeout": 300}})
    assert named(found) == ["deployed"]
    assert "was not deployed: " in text_of(found, "deployed") and "Run site.yml" in text_of(found, "deployed")
    assert "+ --tp-size 2" in text_of(found, "deployed")
    assert "+unit.restart_sec=60" in text_of(found, "deployed")


@pytest.mark.parametrize("key", ["hash", "process_hash"])
def test_a_plan_that_was_rolled_back_is_not_called_undeployed(host: Host, key: str) -> None:
    """What the inventory holds is on the host as an earlier deployment: site.yml would deploy it again."""
    other = {**PLAN, "hash": "e" * 64, "process_hash": "q" * 64, "command": [*COMMAND, "--tp-size", "2"]}
    host.write(
        f"var/lib/sglang-kimi/deployments/{'q' * 12}/plan.json",
        json.dumps({**other, "hash": "f" * 64, key: other[key]}),
    )
    found = host.verify(plan=other)
    assert named(found) == ["deployed"]
    text = text_of(found, "deployed")
    assert f"{'e' * 12} was deployed before and is not what serves: + --tp-size 2 | " in text
    assert "playbooks/rollback.yml" in text and "or site.yml deploys it again" in text and "Run site.yml" not in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_programs_and_settings_belong_to_root(host: Host) -> None:
    for path in ("usr/local/lib/gpuserve-sglang/__main__.py", "etc/gpuserve-sglang"):
        os.chown(host.root / path, 65534, -1)
    found = host.verify()
    assert sorted(named(found)) == ["programs", "settings"]
    assert "/usr/local/lib/gpuserve-sglang/__main__.py belongs to uid 65534, not to root" in text_of(found, "programs")
    assert "/etc/gpuserve-sglang belongs to uid 65534, not to root" in text_of(found, "settings")


def test_known_dropins_are_no_finding(host: Host) -> None:
    path = host.dropin("[Service]\nEnvironment=NCCL_DEBUG=INFO\n")
    assert named(host.verify()) == ["unit_environment"]
    assert named(host.verify(dropins=(path,))) == []


def test_a_dropin_that_says_the_same_is_no_finding(host: Host) -> None:
    host.dropin("# nothing\n[Service]\nRestart=always\n")
    assert named(host.verify()) == []


def test_without_expectations_nothing_is_claimed(host: Host) -> None:
    found = host.verify(plan=None, drivers=(), holds=(), apt_files={}, blacklist=(), programs={}, timer="", collector="",
                        handbook="", disk_paths=())  # fmt: skip
    host.facts["disks"] = []
    assert found["ok"]
    skipped = {check["id"] for check in found["checks"] if check["severity"] == "skipped"}
    assert {"deployed", "driver", "apt_holds", "apt_pins", "apt_blacklist", "programs", "liveness", "incidents",
            "handbook", "sitecustomize"} <= skipped  # fmt: skip


def test_no_record_is_one_finding(host: Host) -> None:
    (host.root / "var/lib/sglang-kimi/deployments/last-good").unlink()
    found = host.verify()
    assert named(found) == ["deployed"]
    assert "site.yml" in text_of(found, "deployed")


def test_what_cannot_be_checked_is_said_and_not_passed(host: Host) -> None:
    host.facts.pop("servers")
    host.answers["/server_info"] = answer(200, "no JSON")
    (host.root / f"proc/{PID}/environ").unlink()
    found = host.verify()
    assert not found["ok"]
    assert found["failures"] == []
    assert sorted(found["unknown"]) == ["accept_length", "kv_pool", "process_environment", "servers"]


#: What cannot be read: what is done, the checks that must say so, words of what they say.
BLIND: dict[str, tuple[Callable[[Host], Any], list[str], str]] = {
    "the journal in time": (
        lambda h: h.said.update(journalctl=CommandResult(124, err="journalctl: no answer within 60 s")),
        ["log_engine", "log_nccl", "log_requests", "log_xid"], "journalctl ended with status 124: journalctl: no answer within 60 s"),
    "a journal without this start": (
        lambda h: h.log.clear(), ["log_engine", "log_nccl", "log_requests"], "the journal holds no line of this start"),
    "the kernel's log": (
        lambda h: h.booted.clear(), ["log_xid"],
        "the journal holds no line of the kernel since the boot, and dmesg ended with status 1: dmesg: read kernel buffer failed"),
    "the start of the process": (
        _unlink(f"proc/{PID}/stat"), ["log_xid", "process_release"], "the start of the process cannot be read"),
    "the listeners": (lambda h: h.facts.update(ports=[], notes=["ports: /proc/net/tcp cannot be read"]), ["port"], "/proc/net/tcp"),
    "the processes": (lambda h: h.facts.update(servers=[], notes=["servers: OSError: x"]), ["servers"], "servers: OSError: x"),
}  # fmt: skip


@pytest.mark.parametrize("what", BLIND)
def test_what_cannot_be_read_is_not_well(host: Host, what: str) -> None:
    change, ids, words = BLIND[what]
    change(host)
    found = host.verify()
    assert not found["ok"]
    assert found["failures"] == []
    assert sorted(found["unknown"]) == ids
    for id_ in ids:
        assert words in text_of(found, id_)


def test_a_systemd_that_does_not_answer(host: Host) -> None:
    host.said["systemctl"] = CommandResult(1, "", "Failed to connect to bus: No such file")
    found = host.verify()
    assert found["failures"] == []
    assert sorted(found["unknown"]) == ["incidents", "liveness", "process", "unit_command", "unit_enabled", "unit_environment",
                                        "unit_loaded", "unit_properties"]  # fmt: skip
    assert "systemctl show ended with status 1: Failed to connect to bus" in text_of(found, "unit_enabled")
    # What the files say is known all the same.
    host.dropin("[Service]\nMemoryMax=1G\n", loaded=False)
    assert named(host.verify()) == ["unit_properties"]


def test_a_container_that_does_not_see_the_kernel(host: Host) -> None:
    host.facts["container"] = "podman"
    host.said["journalctl"] = CommandResult(124, err="journalctl: no answer within 60 s")
    assert "log_xid" in host.verify()["unknown"]
    del host.said["journalctl"]
    host.booted.clear()
    found = host.verify()
    assert found["ok"]
    assert "not visible in this container (the journal holds no line of the kernel" in text_of(found, "log_xid")
    host.kernel.append("NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.")
    assert named(host.verify()) == ["log_xid"]


def test_the_kernel_itself_is_asked_where_the_journal_has_nothing(host: Host) -> None:
    """The process was started a second after the boot; what the kernel said before is no finding."""
    host.booted.clear()
    host.process(COMMAND, {**PLAN["env"], "GPUSERVE_PLAN": "p1"}, ticks=100_000)
    hertz = os.sysconf("SC_CLK_TCK")
    before = f"[{100_000 / hertz - 50:.6f}] NVRM: Xid (PCI:0000:41:00): 31, pid=1"
    host.said["dmesg"] = CommandResult(0, f"[    0.000000] Linux version 6.8.0\n{before}\n")
    found = host.verify()
    assert found["ok"]
    assert text_of(found, "log_xid").startswith("none since this start")
    after = f"[{100_000 / hertz + 50:.6f}] NVRM: Xid (PCI:0000:41:00): 79, pid=1"
    host.said["dmesg"] = CommandResult(0, f"{before}\n{after}\n")
    found = host.verify()
    assert named(found) == ["log_xid"]
    assert "Xid 79" in text_of(found, "log_xid") and "Xid 31" not in text_of(found, "log_xid")


def test_the_units_beside_an_undeployed_inventory(host: Host) -> None:
    """Their texts are not judged then, by-hand drop-ins are; those that are known of never."""
    other = {**PLAN, "hash": "e" * 64}
    longer = {name: text.replace("30", "60") for name, text in WATCHERS.items()}
    assert named(host.verify(watchers=longer)) == ["liveness"]
    assert named(host.verify(plan=other, watchers=longer)) == ["deployed"]
    host.beside("sglang-kimi-liveness.timer", "[Timer]\nOnUnitInactiveSec=1d\n")
    assert named(host.verify(plan=other, watchers=longer)) == ["deployed", "liveness"]
    assert named(host.verify(dropins=("/etc/systemd/system/sglang-kimi-liveness.timer.d/50-hand.conf",))) == []


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venv")
    EnvBuilder(symlinks=True).create(folder)
    return folder


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        ("os.environ.setdefault('NCCL_ALGO', 'Tree')", []),
        ("os.environ['MINE'] = '1'", []),
        ("os.environ['NCCL_P2P_DISABLE'] = 'hunter2'", ["NCCL_P2P_DISABLE=*** is set, which nobody asked for"]),
        ("os.environ['SGLANG_ENABLE_SPEC_V2'] = 'False'", ["SGLANG_ENABLE_SPEC_V2=*** is set, which nobody asked for"]),
        ("os.environ['NCCL_ALGO'] = 'Tree'", ["NCCL_ALGO=Tree is set, the plan says Ring"]),
        ("os.environ['A'] = 'mine'", ["A=mine is set, the plan says 50% of it"]),
        ("os.environ.pop('NCCL_ALGO', None)", ["NCCL_ALGO is taken away, which the plan has"]),
        ("os.environ['NCCL_PROTO'] = 'Simple'", ["NCCL_PROTO is 'Simple', expected 'LL'"]),
    ],
)
def test_what_the_start_of_the_interpreter_sets(
    host: Host, venv: Path, line: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The module's own interpreter may import the same file.
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "False")
    (site,) = venv.glob("lib/python3*/site-packages")
    (site / "sitecustomize.py").write_text(f"import os\n{line}\nos.environ.setdefault('NCCL_PROTO', 'LL')\n")
    found = host.verify(variables={"NCCL_PROTO": "LL"}, interpreter=str(venv / "bin" / "python"))
    assert found["unknown"] == []
    assert found["failures"] == (["sitecustomize"] if words else [])
    for word in words:
        assert text_of(found, "sitecustomize").startswith(f"{word} (imports {site}/sitecustomize.py)")
    assert "hunter2" not in json.dumps(found)


def test_of_an_interpreter_that_is_no_release_nothing_is_claimed(host: Host) -> None:
    plan = {**PLAN, "command": ["/usr/bin/python3", *COMMAND[1:]]}
    host.write(f"var/lib/sglang-kimi/deployments/{'p' * 12}/plan.json", json.dumps(plan))
    found = host.verify(plan=plan)
    skipped = {check["id"] for check in found["checks"] if check["severity"] == "skipped"}
    assert {"release", "packages", "files", "patches", "process_release"} <= skipped


def test_warnings_do_not_fail(host: Host) -> None:
    host.shown["NRestarts"] = "2"
    host.log += ["node1:12:34 [0] NCCL WARN Call to connect failed", "ERROR:    Exception in ASGI application",
                 "Traceback (most recent call last):", "  File x", "AttributeError: path"]  # fmt: skip
    found = host.verify()
    assert found["ok"]
    assert found["warnings"] == ["restarts", "log_requests", "log_nccl"]
    assert "AttributeError: path" in text_of(found, "log_requests")


# --------------------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("30s", 30), ("15min", 900), ("1min 30s", 90), ("2h 5min", 7500), ("1d", 86400), ("900", 900), ("100ms", 0.1),
     ("infinity", float("inf")), ("1month", 2629800), ("soon", None), ("30s later", None)],
)  # fmt: skip
def test_spans_of_time(text: str, wanted: float | None) -> None:
    found = seconds(text)
    assert found == wanted if wanted is None else found == pytest.approx(wanted)


def test_directives_join_lines_and_skip_comments() -> None:
    found = directives("[Service]\n# c\nExecStart=a \\\n# inside\n  b\n; c\nEnvironment=\n", "/u")
    assert [(entry.name, entry.value) for entry in found] == [("ExecStart", "a  b"), ("Environment", "")]


@pytest.mark.parametrize(
    ("directive", "written", "shown", "wanted"),
    [("RestartSec", "30", "30s", True), ("RestartSec", "30", "31s", False), ("MemoryMax", "2G", str(2 << 30), True),
     ("MemoryMax", "2G", str(3 << 30), False), ("MemoryMax", "infinity", "infinity", True),
     ("MemoryMax", "90%", "123", True), ("User", "sglang", "root", False)],
)  # fmt: skip
def test_written_and_shown(directive: str, written: str, shown: str, wanted: bool) -> None:
    assert same(directive, written, shown) is wanted


def test_environment_of_layers() -> None:
    seen = verify_unit.UnitSeen(
        "u",
        "/u",
        "",
        'Environment="A=1 2" B=3\nEnvironment=P=100%%\n',
        {"/d": "UnsetEnvironment=B\nEnvironment=C=4\n"},
        {},
    )
    assert seen.environment() == {"A": "1 2", "P": "100%", "C": "4"}


FIXTURES = Path(__file__).parent / "fixtures" / "health"


@pytest.mark.parametrize("name", ["cpu-0.5.9-start.log", "cuda-0.5.11-eagle3-start.log"])
def test_a_good_start_holds_nothing(name: str) -> None:
    found = scan_log((FIXTURES / name).read_text().splitlines())
    assert (found.broken, found.requests, found.nccl) == ([], [], [])


def test_the_log_is_sorted() -> None:
    lines = """
[t] Prefill batch
ERROR:    Exception in ASGI application
Traceback (most recent call last):
  File "a.py", line 1
starlette.requests.ClientDisconnect
ERROR:    Exception in ASGI application
Traceback (most recent call last):
  File "a.py", line 1
    raise X
ConnectionResetError: [Errno 104]

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 1
ValueError: bad prompt
[t] Scheduler hit an exception: Traceback (most recent call last):
  File "c.py", line 1
torch.OutOfMemoryError: CUDA out of memory. --api-key hunter2
[t TP0] NCCL WARN NET/Socket : no interface
[t] CUDA error: an illegal memory access was encountered
asyncio.exceptions.CancelledError
Traceback (most recent call last):
  File "d.py", line 1
asyncio.exceptions.CancelledError
""".splitlines()
    found = scan_log(lines)
    assert [line.split(":")[0] for line in found.broken] == ["torch.OutOfMemoryError", "CUDA error"]
    assert found.requests == ["ValueError: bad prompt"]
    assert found.nccl == ["NCCL WARN NET/Socket : no interface"]
    assert found.aborted == 2  # the client's, and the last one
    assert "hunter2" not in str(found)
    assert scan_log(lines, ["illegal memory access", "OutOfMemory"]).broken == []


def test_faults_of_gpus() -> None:
    lines = ["NVRM: Xid (PCI:0000:41:00): 79, pid=1, off the bus", "NVRM: Xid (PCI:0000:41:00): 45, pid=1", "x",
             "NVRM: Xid (PCI:0000:41:00): 79, pid=1, off the bus"]  # fmt: skip
    assert scan_xids(lines, [45]) == ["Xid 79 (PCI:0000:41:00), pid=1, off the bus"]
    assert len(scan_xids(lines)) == 2


@pytest.mark.parametrize(("body", "wanted"), [
    ('{"internal_states": [{"avg_spec_accept_length": 2.5}]}', 2.5), ('{"internal_states": []}', None), ("[]", None),
    ('{"internal_states": [{"avg_spec_accept_length": true}]}', None), ("", None),
])  # fmt: skip
def test_accept_length(body: str, wanted: float | None) -> None:
    assert verify_serve.accept_length(body) == wanted


# --------------------------------------------------------------------------------------------------- report


@pytest.fixture
def mixed(host: Host) -> dict[str, Any]:
    host.dropin('[Service]\nEnvironment="NCCL_ALGO=<Tree> & \x01"\n')
    host.shown["NRestarts"] = "1"
    host.facts.pop("servers")
    return host.verify(plan=None)


def test_the_table_says_what_to_do(mixed: dict[str, Any]) -> None:
    text = verify_report.table(mixed, "box")
    assert text.splitlines()[0].startswith("box is NOT what was deployed (")
    assert text.splitlines()[0].endswith(": unit_environment, servers")
    assert "FAILED  unit_environment" in text
    assert "warning restarts" in text
    assert "UNKNOWN servers" in text
    assert "do: Remove /etc/systemd/system/sglang-kimi.service.d/50-hand.conf" in text
    assert max(map(len, text.splitlines())) <= 200
    assert [line.split(" ")[0] for line in verify_report.problems(mixed)] == ["unit_environment", "servers"]


def test_the_document_is_stable(mixed: dict[str, Any]) -> None:
    document = json.loads(json.dumps(verify_report.document(mixed, "box")))
    assert list(document) == ["host", "ok", "failures", "warnings", "unknown", "checks"]
    assert {tuple(check) for check in document["checks"]} == {
        ("id", "subject", "ok", "found", "expected", "action", "severity")
    }
    assert (document["failures"], document["warnings"], document["unknown"]) == (
        ["unit_environment"], ["restarts"], ["servers"],
    )  # fmt: skip


def test_junit_is_xml_with_one_case_a_check(mixed: dict[str, Any]) -> None:
    root = ET.fromstring(verify_report.junit(mixed, "box"))
    (suite,) = root
    cases = {case.get("name"): [child.tag for child in case] for case in suite}
    assert len(cases) == int(suite.get("tests", "0")) == len(mixed["checks"])
    assert cases["unit_environment"] == ["failure"]
    assert cases["servers"] == ["error"]
    assert cases["deployed"] == ["skipped"]
    assert cases["restarts"] == ["system-out"]
    assert (suite.get("failures"), suite.get("errors")) == ("1", "1")


def test_metrics_are_prometheus_text(mixed: dict[str, Any]) -> None:
    lines = verify_report.metrics(mixed, UNIT, 1234.5).splitlines()
    assert f'gpuserve_verify_ok{{unit="{UNIT}"}} 0' in lines
    assert f'gpuserve_verify_check{{unit="{UNIT}",check="unit_environment",severity="error"}} 0' in lines
    assert f'gpuserve_verify_check{{unit="{UNIT}",check="servers",severity="error"}} -1' in lines
    assert f'gpuserve_verify_check{{unit="{UNIT}",check="health",severity="error"}} 1' in lines
    assert not any('check="deployed"' in line for line in lines)
    assert f'gpuserve_verify_timestamp_seconds{{unit="{UNIT}"}} 1234' in lines
