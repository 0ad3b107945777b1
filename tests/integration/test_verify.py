"""verify on a served box: it passes, changes nothing, and names each of many drifts made by hand, and nothing else.

The server is started once. Each drift is taken back by itself, so that the next one is alone; those that cannot be taken back
quickly come last.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ROOT, UNIT, Box, Run

NAME = UNIT.removesuffix(".service")
STATE = "/var/lib/sglang-kimi"
SITE = "$(dirname $(dirname $(readlink -f /opt/sglang/current/venv/lib/python3*/site-packages/sglang/__init__.py)))"
DROPIN = f"/etc/systemd/system/{UNIT}.d"
PIN = "/etc/apt/preferences.d/00-gpuserve-cuda"
BLACKLIST = "/etc/apt/apt.conf.d/52gpuserve-cuda"
LOOK = "Hold the host against what was deployed"

#: Name: what is done by hand, how it is taken back, the check that names it, words of what it says.
DRIFTS: dict[str, tuple[str, str, str, list[str]]] = {
    "an upgraded package": (
        f"cd {SITE} && d=$(echo tqdm-*.dist-info) && v=${{d#tqdm-}} && v=${{v%.dist-info}} && echo $v >/root/kept "
        "&& cp -p $d/RECORD /root/record && sed -i \"s/^tqdm-$v/tqdm-99.0/\" $d/RECORD && mv $d tqdm-99.0.dist-info",
        f"cd {SITE} && d=tqdm-$(cat /root/kept).dist-info && mv tqdm-99.0.dist-info $d && cp -p /root/record $d/RECORD",
        "packages", ["tqdm: 99.0"]),
    "a file that no package brought": (
        f"echo 'x = 1' >{SITE}/sglang/stray.py", f"rm {SITE}/sglang/stray.py", "files", ["sglang/stray.py", "Remove it"]),
    "an edited file of a package": (
        f"cd {SITE}/sglang && cp -p version.py /root/kept && echo '# by hand' >>version.py",
        f"cp -p /root/kept {SITE}/sglang/version.py", "files", ["sglang/version.py"]),
    "an edited patched file": (
        f"cd {SITE}/sglang/srt && cp -p server_args.py /root/kept && echo '# by hand' >>server_args.py",
        f"cp -p /root/kept {SITE}/sglang/srt/server_args.py", "patches", ["sglang/srt/server_args.py"]),
    "current names another release": (
        "ln -sfn releases/000000000000 /opt/sglang/current.new && readlink /opt/sglang/current >/root/kept "
        "&& mv -T /opt/sglang/current.new /opt/sglang/current",
        "ln -sfn $(cat /root/kept) /opt/sglang/current", "release", ["000000000000"]),
    "a changed flag in a drop-in": (
        f"mkdir -p {DROPIN} && {{ echo '[Service]'; echo ExecStart=; "
        f"sed -n '/^ExecStart=/,/[^\\\\]$/p' /etc/systemd/system/{UNIT} | sed 's/--max-running-requests [0-9]*/--max-running-requests 3/'; }} "
        f">{DROPIN}/10-flag.conf && systemctl daemon-reload",
        f"rm -r {DROPIN} && systemctl daemon-reload", "unit_command", ["10-flag.conf", "--max-running-requests 3"]),
    "a variable in a drop-in": (
        f"mkdir -p {DROPIN} && printf '[Service]\\nEnvironment=SGLANG_USE_CPU_ENGINE=0\\n' >{DROPIN}/20-env.conf "
        "&& systemctl daemon-reload",
        f"rm -r {DROPIN} && systemctl daemon-reload", "unit_environment", ["20-env.conf", "SGLANG_USE_CPU_ENGINE=0"]),
    "a drop-in that was not loaded": (
        f"mkdir -p {DROPIN} && printf '[Service]\\nEnvironmentFile=-/etc/default/sglang\\n' >{DROPIN}/30-file.conf",
        f"rm -r {DROPIN} && systemctl daemon-reload", "unit_environment", ["30-file.conf", "/etc/default/sglang"]),
    "a limit set at run time": (
        f"systemctl set-property --runtime {UNIT} MemoryMax=3G", f"systemctl revert {UNIT}",
        "unit_properties", ["MemoryMax"]),
    "another stop signal in a drop-in": (
        f"mkdir -p {DROPIN} && printf '[Service]\\nKillSignal=SIGTERM\\n' >{DROPIN}/35-signal.conf && systemctl daemon-reload",
        f"rm -r {DROPIN} && systemctl daemon-reload", "unit_properties", ["35-signal.conf sets KillSignal=SIGTERM"]),
    "a drop-in that is gone and still loaded": (
        f"mkdir -p {DROPIN} && printf '[Service]\\nOOMScoreAdjust=7\\nUMask=0022\\n' >{DROPIN}/36-gone.conf "
        f"&& systemctl daemon-reload && rm -r {DROPIN}",
        "systemctl daemon-reload", "unit_loaded", ["OOMScoreAdjust is 7", "UMask is 0022, written is UMask=0077"]),
    "a unit edited by hand": (
        f"cp -p /etc/systemd/system/{UNIT} /root/kept && sed -i 's/^RestartSec=.*/RestartSec=1/' /etc/systemd/system/{UNIT} "
        "&& systemctl daemon-reload",
        f"cp -p /root/kept /etc/systemd/system/{UNIT} && systemctl daemon-reload", "unit_file", ["+RestartSec=1", "-RestartSec=30"]),
    "a disabled unit": (f"systemctl disable {UNIT}", f"systemctl enable {UNIT}", "unit_enabled", ["disabled"]),
    "a lost sitecustomize block": (
        "f=$(/usr/bin/python3 -c 'import sitecustomize; print(sitecustomize.__file__)'); cp -p $f /root/kept "
        "&& sed -i '/^# BEGIN gpuserve/,/^# END gpuserve/d' $(readlink -f $f)",
        "f=$(/usr/bin/python3 -c 'import sitecustomize; print(sitecustomize.__file__)'); cat /root/kept >$(readlink -f $f)",
        "sitecustomize", ["NCCL_PROTO is not set"]),
    "a variable set in sitecustomize": (
        "f=$(/usr/bin/python3 -c 'import sitecustomize; print(sitecustomize.__file__)'); cp -p $f /root/kept "
        "&& printf 'import os\\nos.environ[\"NCCL_P2P_DISABLE\"] = \"1\"\\n' >>$(readlink -f $f)",
        "f=$(/usr/bin/python3 -c 'import sitecustomize; print(sitecustomize.__file__)'); cat /root/kept >$(readlink -f $f)",
        "sitecustomize", ["NCCL_P2P_DISABLE=*** is set, which nobody asked for"]),
    "a second listener": (
        "setsid python3 -m http.server 30000 --bind 127.0.0.2 >/dev/null 2>&1 & "
        "for i in $(seq 100); do ss -Hltn 'sport = :30000' | grep -q 127.0.0.2 && exit 0; sleep 0.1; done; exit 1",
        "kill $(ss -Hltnp 'src 127.0.0.2' | sed 's/.*pid=//; s/,.*//')", "port", ["127.0.0.2", "http.server"]),
    "a worker whose server is gone": (
        "setsid bash -c 'exec -a sglang::scheduler sleep 1000' >/dev/null 2>&1 & echo $! >/root/kept; sleep 0.5",
        "kill $(cat /root/kept)", "servers", ["orphaned worker"]),
    "a removed hold": ("apt-mark unhold less", "apt-mark hold less", "apt_holds", ["less", "apt-mark hold"]),
    "a removed pin": (f"mv {PIN} /root/kept", f"mv /root/kept {PIN}", "apt_pins", [PIN]),
    "a shorter blacklist": (
        f"sed -i '/libnvidia-/d' {BLACKLIST}", f"sed -i 's|\"nvidia-\";|&\\n\"libnvidia-\";|' {BLACKLIST}",
        "apt_blacklist", ["libnvidia-"]),
    "another driver": (
        "sed 's/\"driver_version\": *\"[^\"]*\"/\"driver_version\": \"595.20\"/; s/^{/{\"driver_version\": \"595.20\", /' "
        "/etc/gpu-standin/state.json >/root/state.json && mount --bind /root/state.json /etc/gpu-standin/state.json",
        "umount /etc/gpu-standin/state.json", "driver", ["595.20", "590"]),
    "a full disk": (
        "mount -t tmpfs -o size=1m tmpfs /var/cache/sglang-kimi", "umount /var/cache/sglang-kimi",
        "disk", ["/var/cache/sglang-kimi"]),
    "changed settings": (
        f"cp -p /etc/gpuserve-sglang/{NAME}.json /root/kept "
        f"&& sed -i 's/\"generation_timeout\": [0-9.]*/\"generation_timeout\": 7/' /etc/gpuserve-sglang/{NAME}.json",
        f"cp -p /root/kept /etc/gpuserve-sglang/{NAME}.json", "settings", ["gate.generation_timeout is 7"]),
    "an edited program": (
        "cp -p /usr/local/lib/gpuserve-sglang/__main__.py /root/kept && echo '# by hand' >>/usr/local/lib/gpuserve-sglang/__main__.py",
        "cp -p /root/kept /usr/local/lib/gpuserve-sglang/__main__.py", "programs", ["__main__.py"]),
    "a stopped liveness timer": (
        f"systemctl stop {NAME}-liveness.timer", f"systemctl start {NAME}-liveness.timer", "liveness", ["inactive"]),
    "a liveness probe that does nothing": (
        f"cp -p /etc/systemd/system/{NAME}-liveness.service /root/kept "
        f"&& sed -i 's|^ExecStart=.*|ExecStart=/bin/true|' /etc/systemd/system/{NAME}-liveness.service && systemctl daemon-reload",
        f"cp -p /root/kept /etc/systemd/system/{NAME}-liveness.service && systemctl daemon-reload",
        "liveness", [f"{NAME}-liveness.service was edited", "+ExecStart=/bin/true"]),
    "a slower liveness timer": (
        f"mkdir -p /etc/systemd/system/{NAME}-liveness.timer.d && printf '[Timer]\\nOnUnitInactiveSec=\\nOnUnitInactiveSec=1d\\n' "
        f">/etc/systemd/system/{NAME}-liveness.timer.d/50-slow.conf && systemctl daemon-reload",
        f"rm -r /etc/systemd/system/{NAME}-liveness.timer.d && systemctl daemon-reload",
        "liveness", ["50-slow.conf sets OnUnitInactiveSec=1d"]),
    "a lost incident collector": (
        f"mv /etc/systemd/system/{NAME}-incident@.service /root/kept && systemctl daemon-reload",
        f"mv /root/kept /etc/systemd/system/{NAME}-incident@.service && systemctl daemon-reload", "incidents", ["not-found"]),
    "a command edited in the handbook": (
        f"cp -p {STATE}/production.md /root/kept && sed -i '/^## 6/,/^## 7/s/--port 30000/--port 30001/' {STATE}/production.md",
        f"cp -p /root/kept {STATE}/production.md", "handbook", ["edited"]),
    "a number edited in the handbook": (
        f"cp -p {STATE}/production.md /root/kept && sed -i '/^## 3/,/^## 4/s/759\\.3/1759.3/' {STATE}/production.md "
        f"&& ! cmp -s /root/kept {STATE}/production.md",
        f"cp -p /root/kept {STATE}/production.md", "handbook", ["it was edited"]),
    "a stale handbook": (
        f"cp -p {STATE}/production.md /root/kept && sed -i 's/from the plan `[0-9a-f]*`/from the plan `0123456789ab`/' "
        f"{STATE}/production.md",
        f"cp -p /root/kept {STATE}/production.md", "handbook", ["0123456789ab"]),
}  # fmt: skip


def found_by(run: Run) -> dict[str, Any]:
    return run.result(LOOK)


def text_of(found: dict[str, Any], id_: str) -> str:
    (check,) = [check for check in found["checks"] if check["id"] == id_]
    return f"{check['found']} | {check['expected']} | {check['action']}"


def not_well(found: dict[str, Any]) -> list[str]:
    return [check["id"] for check in found["checks"] if check["ok"] is False or check["severity"] == "unknown"]


@pytest.fixture(scope="module")
def guarded(serving_box: Box) -> Box:
    """The box with what the role cuda would keep there: the sandbox does not use that role."""
    serving_box.sh("apt-mark hold less")
    serving_box.write(PIN, "Package: nvidia-*\nPin: version 590.*\nPin-Priority: 1001\n")
    serving_box.write(BLACKLIST, 'Unattended-Upgrade::Package-Blacklist {\n"nvidia-";\n"libnvidia-";\n};\n')
    return serving_box


@pytest.fixture(scope="module")
def known(guarded: Box) -> dict[str, Any]:
    """Variables with which a play looks at the host at once: the plan and what it was made of, read by the first play."""
    run = guarded.play("playbooks/verify.yml")
    assert run.rc == 0, run.report
    facts = [e["event_data"]["res"].get("ansible_facts") or {} for e in run.of("runner_on_ok")]
    kept = {key: value for fact in facts for key, value in fact.items() if key.startswith("deployment_")}
    assert {"deployment_plan", "deployment_host", "deployment_models"} <= set(kept)
    return {
        **kept,
        "verify_holds": ["less"],
        "verify_apt_files": {PIN: guarded.sh(f"cat {PIN}") + "\n"},
        "verify_blacklist": ["nvidia-", "libnvidia-"],
    }


@pytest.fixture
def drift(guarded: Box, request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    do, undo, id_, words = DRIFTS[request.param]
    guarded.sh(do)
    yield id_, words
    guarded.sh(undo)


def test_verify_passes_twice_and_changes_nothing(guarded: Box, known: dict[str, Any]) -> None:
    pid, before = guarded.main_pid, guarded.fingerprint()
    plain, quick = guarded.play("playbooks/verify.yml"), guarded.play("playbooks/verify.yml", "--check", **known)
    for run in (plain, quick):
        assert run.rc == 0, run.report
        assert run.stats["changed"] == 0
        found = found_by(run)
        assert found["ok"]
        assert not_well(found) == []
        assert "is what was deployed (" in run.stdout
    for id_ in ("apt_holds", "apt_pins", "apt_blacklist"):
        assert "not applicable: the role cuda is not used" in text_of(found_by(plain), id_)
    assert guarded.main_pid == pid > 0
    assert guarded.fingerprint() == before


@pytest.mark.parametrize("drift", DRIFTS, indirect=True)
def test_a_drift_is_named_and_nothing_else(guarded: Box, known: dict[str, Any], drift: tuple[str, list[str]]) -> None:
    id_, words = drift
    # Every file is read where files are the matter; elsewhere the guarded ones are enough.
    everything = id_ in ("packages", "files", "patches")
    run = guarded.play("playbooks/verify.yml", **known, verify_all_files=everything, sglang_guard_packages=["sglang"])
    found = found_by(run)
    assert not_well(found) == [id_]
    assert found["failures"] == [id_]
    for word in words:
        assert word in text_of(found, id_)
    assert run.rc == 2
    assert run.failed[-1]["task"] == "The host is what was deployed"
    assert "NOT what was deployed" in run.failure
    assert text_of(found, id_).split(" | ")[0] in run.failure
    assert run.stats["changed"] == 0


def test_all_of_them_were_taken_back(guarded: Box, known: dict[str, Any]) -> None:
    run = guarded.play("playbooks/verify.yml", **known)
    assert run.rc == 0, run.report
    assert found_by(run)["ok"]


def test_an_inventory_that_was_not_deployed(guarded: Box) -> None:
    run = guarded.play("playbooks/verify.yml", deployment_overrides={"max_running_requests": 5})
    assert run.rc == 2
    assert not_well(found_by(run)) == ["deployed"]
    assert "+ --max-running-requests 5" in text_of(found_by(run), "deployed")


def verify_py(box: Box, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "tools" / "verify.py"), "-i", str(box.inventory), *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


def test_the_tool_says_it_to_machines(guarded: Box, tmp_path) -> None:
    well = verify_py(
        guarded, "--json", str(tmp_path / "v.json"), "--junit", str(tmp_path / "v.xml"),
        "-e", "verify_textfile=/root/verify.prom",
    )  # fmt: skip
    assert well.returncode == 0, well.stdout + well.stderr
    document = json.loads((tmp_path / "v.json").read_text())
    assert document["ok"] is True
    assert document["failures"] == []
    checks = document["hosts"][guarded.name]["checks"]
    assert {tuple(check) for check in checks} == {("id", "subject", "ok", "found", "expected", "action", "severity")}
    (suite,) = ET.fromstring((tmp_path / "v.xml").read_text())
    assert suite.get("failures") == "0"
    assert len(suite) == len(checks) > 30
    assert f'gpuserve_verify_ok{{unit="{UNIT}"}} 1' in guarded.sh("cat /root/verify.prom")

    guarded.sh(f"systemctl disable {UNIT}")
    try:
        drifted = verify_py(guarded, "--json", "-", "-e", "verify_all_files=false")
    finally:
        guarded.sh(f"systemctl enable {UNIT}")
    assert drifted.returncode == 1
    assert json.loads(drifted.stdout)["failures"] == [f"{guarded.name}: unit_enabled"]


def test_the_tool_says_what_it_could_not_check(guarded: Box, tmp_path) -> None:
    gone = Box("gpuserve-nowhere", tmp_path)
    done = verify_py(gone, "--json", str(tmp_path / "v.json"), "--junit", str(tmp_path / "v.xml"))
    assert done.returncode == 2
    assert "gpuserve-nowhere could not be checked" in done.stdout
    assert json.loads((tmp_path / "v.json").read_text())["ok"] is False
    (suite,) = ET.fromstring((tmp_path / "v.xml").read_text())
    assert suite.get("errors") == "1"


def test_a_gpu_fault_since_the_start(guarded: Box, known: dict[str, Any]) -> None:
    guarded.sh("echo 'NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus.' | systemd-cat -t kernel")
    guarded.wait_for(lambda: "Xid" in guarded.sh("journalctl -t kernel -o cat", check=False))
    found = found_by(guarded.play("playbooks/verify.yml", **known))
    assert not_well(found) == ["log_xid"]
    assert "Xid 79 (PCI:0000:41:00)" in text_of(found, "log_xid")


def test_a_process_that_was_started_from_another_unit(guarded: Box, known: dict[str, Any]) -> None:
    """The start is later than the fault of the test before: that one is no finding any more."""
    guarded.sh(
        f"mkdir -p {DROPIN} && printf '[Service]\\nEnvironment=NCCL_DEBUG=WARN\\n' >{DROPIN}/40.conf && systemctl daemon-reload "
        f"&& systemctl stop {UNIT} && systemctl reset-failed {UNIT}; sleep 2; systemctl start {UNIT}"
    )
    running = found_by(guarded.play("playbooks/verify.yml", **known))
    assert not_well(running) == ["unit_environment"]
    guarded.sh(f"rm -r {DROPIN} && systemctl daemon-reload")
    left = found_by(guarded.play("playbooks/verify.yml", **known))
    assert not_well(left) == ["process_environment"]
    assert "NCCL_DEBUG=***" in text_of(left, "process_environment")


def test_a_stopped_server(guarded: Box, known: dict[str, Any]) -> None:
    guarded.sh(f"systemctl stop {UNIT}", check=False)
    found = found_by(guarded.play("playbooks/verify.yml", **known))
    assert not_well(found) == ["process"]
    assert shlex.quote(UNIT) in text_of(found, "process")
