"""The rendered unit against what systemd has loaded: every directive of it is compared, or left out for a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import plan_cases as cases
import pytest
from ansible_collections.gpuserve.sglang.plugins.module_utils.plan import launch_plan
from ansible_collections.gpuserve.sglang.plugins.module_utils.systemd_text import environment_lines, exec_line
from ansible_collections.gpuserve.sglang.plugins.module_utils.verify_unit import (
    NOT_COMPARED,
    STATE,
    UnitSeen,
    check_unit,
    directives,
    properties,
    property_of,
    same,
)

ROOT = Path(__file__).resolve().parents[2]
NAME = "sglang-kimi.service"
PATH = f"/etc/systemd/system/{NAME}"
DROPIN = f"{PATH}.d/50-hand.conf"
GATE = "/usr/bin/python3 -I -S /usr/local/lib/gpuserve-sglang gate --settings /etc/gpuserve-sglang/sglang-kimi.json"


def unit_text(plan: dict[str, Any]) -> str:
    """The unit as the role renders it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "roles/sglang_service/templates"),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["gpuserve.sglang.systemd_exec"] = exec_line
    environment.filters["gpuserve.sglang.systemd_environment"] = environment_lines
    program, __, arguments = GATE.partition(" gate --settings ")
    return environment.get_template("sglang.service.j2").render(
        deployment_plan=plan,
        __sglang_service_unit=NAME,
        __sglang_service_program=program,
        __sglang_service_settings_file=arguments,
        __sglang_service_incident_unit="sglang-kimi-incident@failed.service",
    )


def wanted(**more: Any) -> dict[str, Any]:
    return cases.wanted(
        listen_host="192.0.2.10", extra_env={"ODD": 'a b "c" 50% \\ $x'}, extra_args={"json_model_override_args": {"a": 1}},
        **more,
    )  # fmt: skip


PLAN = launch_plan(wanted(), cases.host(), cases.models())
TEXT = unit_text(PLAN)
WRITTEN = list(dict.fromkeys(entry.name for entry in directives(TEXT, PATH)))


def _exec(words: str) -> str:
    return f"{{ path={words.split()[0]} ; argv[]={words} ; ignore_errors=no ; start_time=[n/a] ; stop_time=[n/a] ; pid=0 ; code=(null) ; status=0/0 }}"


def _quoted(word: str) -> str:
    """As systemctl quotes a word of a list."""
    if not set(word) & set(" \"\\$`'*?[]{}()<>|&;!#~"):
        return word
    for character in '\\"$`':
        word = word.replace(character, f"\\{character}")
    return f'"{word}"'


#: What `systemctl show` of systemd 255 prints for this unit; systemd adds what the plan does not hold.
SHOWN = {
    "FragmentPath": PATH,
    "DropInPaths": "",
    "NeedDaemonReload": "no",
    "UnitFileState": "enabled",
    "Description": "SGLang serving kimi-k2.5",
    "RequiresMountsFor": f"/data/eagle3/output_100k_sglang/4 /data/kimi-k2.5 {PLAN['unit']['working_directory']} /var/tmp",
    "OnFailure": "sglang-kimi-incident@failed.service",
    "StartLimitIntervalUSec": "1h 11min",
    "StartLimitBurst": "3",
    "Type": "exec",
    "User": "sglang",
    "Group": "sglang",
    "WorkingDirectory": PLAN["unit"]["working_directory"],
    "ExecStart": _exec(" ".join(PLAN["command"])),
    "ExecStartPost": _exec(GATE),
    "Environment": " ".join(
        _quoted(f"{name}={value}") for name, value in [*PLAN["env"].items(), ("GPUSERVE_PLAN", PLAN["process_hash"])]
    ),
    "Restart": "always",
    "RestartUSec": "30s",
    "TimeoutStartUSec": "15min",
    "TimeoutStopUSec": "2min 15s",
    "KillMode": "mixed",
    "KillSignal": "2",
    "MemoryMax": str(int(PLAN["unit"]["memory_max"].removesuffix("G")) << 30),
    "MemoryHigh": "infinity",
    "TasksMax": str(PLAN["unit"]["tasks_max"]),
    "OOMPolicy": "kill",
    "OOMScoreAdjust": "-500",
    "LimitMEMLOCK": "infinity",
    "LimitNOFILE": "1048576",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "ReadWritePaths": "-/var/lib/sglang-kimi -/var/cache/sglang-kimi",
    "PrivateTmp": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelLogs": "yes",
    "ProtectControlGroups": "yes",
    "ProtectHostname": "yes",
    "ProtectProc": "invisible",
    "RestrictSUIDSGID": "yes",
    "RestrictNamespaces": "yes",
    "RestrictRealtime": "yes",
    "RestrictAddressFamilies": "AF_INET AF_INET6 AF_NETLINK AF_UNIX",
    "LockPersonality": "yes",
    "SystemCallArchitectures": "native",
    "SystemCallFilter": "_llseek _newselect accept accept4 access add_key alarm",
    "SystemCallErrorNumber": "1",
    "UMask": "0077",
    "KeyringMode": "private",
}
#: Another value of each, as systemctl would show it.
OTHER = {
    "RequiresMountsFor": "/var/tmp", "StartLimitIntervalUSec": "10s", "ExecStart": _exec(" ".join(PLAN["command"][:-1])),
    "ExecStartPost": _exec("/bin/true"), "Environment": "A=1", "RestartUSec": "100ms", "TimeoutStartUSec": "infinity",
    "TimeoutStopUSec": "1min 30s", "KillSignal": "15", "MemoryHigh": "1073741824", "MemoryMax": "infinity",
    "LimitMEMLOCK": "8388608", "CapabilityBoundingSet": "cap_chown cap_sys_admin", "ProtectHome": "read-only",
    "RestrictNamespaces": "cgroup net", "RestrictAddressFamilies": "~", "SystemCallFilter": "~", "SystemCallErrorNumber": "0",
    "UMask": "0022", "ReadWritePaths": "", "OnFailure": "", "SystemCallArchitectures": "",
}  # fmt: skip


def seen(dropins: dict[str, str] | None = None, shown: dict[str, str] | None = None, **more: Any) -> UnitSeen:
    return UnitSeen(NAME, PATH, TEXT, TEXT, dropins or {}, {**SHOWN, **(shown or {})}, **more)


def findings(unit: UnitSeen, known: tuple[str, ...] = ()) -> dict[str, str]:
    return {check.id: check.found for check in check_unit(unit, known) if not check.ok}


def other(name: str) -> str:
    """Another value than the one that systemd shows."""
    has = SHOWN[name]
    if name in OTHER:
        return OTHER[name]
    return {"yes": "no"}.get(has, str(int(has) + 1) if has.lstrip("-").isdigit() else "something-else")


def test_what_systemd_shows_of_the_rendered_unit_is_as_written() -> None:
    assert findings(seen()) == {}
    assert {"KillSignal", "RestartSec", "SystemCallFilter", "Wants", "ReadWritePaths"} <= set(WRITTEN)


def test_every_directive_is_compared_or_left_out_for_a_reason() -> None:
    asked = properties(TEXT).split(",")
    compared = [name for name in WRITTEN if name not in NOT_COMPARED]
    assert asked == list(dict.fromkeys([*STATE, *(property_of(name) for name in compared)]))
    assert set(SHOWN) == set(asked), "a directive that the unit gained: say here how systemctl shows it"
    for name in compared:
        found = findings(seen(shown={property_of(name): other(property_of(name))}))
        assert len(found) == 1, name
        (text,) = found.values()
        assert text.startswith((f"{property_of(name)} is ", f"{name}: ")), text
    assert set(NOT_COMPARED) <= set(WRITTEN), "an exception that the unit does not need"
    assert all(NOT_COMPARED.values())


@pytest.mark.parametrize("name", WRITTEN)
def test_a_drop_in_that_changes_a_directive_is_named_and_nothing_else(name: str) -> None:
    value = "EVIL=1" if name == "Environment" else "/bin/evil"
    shown = {} if name in NOT_COMPARED else {property_of(name): other(property_of(name))}
    found = findings(seen({DROPIN: f"[Service]\n{name}=\n{name}={value}\n"}, shown))
    id_ = {"ExecStart": "unit_command", "Environment": "unit_environment"}.get(name, "unit_properties")
    assert found == {id_: f"{DROPIN} sets {name}={value.replace('EVIL=1', 'EVIL=***')}"}


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "Environment"])
def test_a_drop_in_that_says_the_same_is_no_finding(name: str) -> None:
    (value,) = [entry.value for entry in directives(TEXT, PATH) if entry.name == name]
    assert findings(seen({DROPIN: f"[Service]\n{name}={value}\n"})) == {}
    assert findings(seen({DROPIN: f"[Service]\n{name}=\n{name}={value}\n"})) == {}
    taken = findings(seen({DROPIN: f"[Service]\n{name}=\n"}))
    # An empty list of capabilities is what the unit says itself.
    assert bool(taken) == bool(value)
    assert all(text == f"{DROPIN} sets {name}=" for text in taken.values())


def test_a_drop_in_that_takes_variables_away_is_found() -> None:
    keeps = f"GPUSERVE_PLAN={PLAN['process_hash']}"
    found = findings(seen({DROPIN: f"[Service]\nEnvironment=\nEnvironment={keeps}\n"}, {"Environment": keeps}))
    assert found == {"unit_environment": f"{DROPIN} sets Environment="}
    assert findings(seen({DROPIN: f"[Service]\nEnvironment={keeps}\n"})) == {}


def test_what_is_expected_of_drop_ins_is_no_finding() -> None:
    text = "[Service]\nMemoryMax=1G\nIPAddressDeny=any\n"
    unit = seen({DROPIN: text}, {"MemoryMax": str(1 << 30), "RestartUSec": "1s"})
    assert findings(unit, (DROPIN,)) == {"unit_properties": "RestartUSec is 1s, written is RestartSec=30"}
    assert list(findings(unit)) == ["unit_properties"]


def test_a_unit_that_was_not_read_again_is_said_once() -> None:
    found = findings(seen(shown={"NeedDaemonReload": "yes", "RestartUSec": "5s", "Environment": "A=1"}))
    assert list(found) == ["unit_loaded"]
    assert "RestartUSec is 5s, written is RestartSec=30" in found["unit_loaded"]


def test_properties_that_this_systemd_does_not_have_are_not_compared() -> None:
    old = {name: value for name, value in SHOWN.items() if name in STATE}
    assert findings(replace(seen(), shown=old)) == {}
    assert findings(seen(shown={"Environment": "A=1 [unprintable]", "ReadWritePaths": "[unprintable]"})) == {}


def test_directives_of_the_operator_are_not_compared_with_systemd_s_words() -> None:
    plan = launch_plan(
        wanted(unit={"hardening": {"IPAddressAllow": "localhost", "ProtectHostname": None}}),
        cases.host(),
        cases.models(),
    )
    text = unit_text(plan)
    assert "IPAddressAllow=localhost" in text and "ProtectHostname" not in text
    own = [entry["directive"] for entry in plan["hardening"] if entry["source"] != "collection"]
    assert own == ["IPAddressAllow"]
    shown = {**SHOWN, "IPAddressAllow": "127.0.0.0/8 ::1/128", "Environment": SHOWN["Environment"].replace(
        PLAN["process_hash"], plan["process_hash"])}  # fmt: skip
    unit = UnitSeen(NAME, PATH, text, text, {}, shown, own)
    assert findings(unit) == {}
    found = findings(replace(unit, dropins={DROPIN: "[Service]\nIPAddressAllow=192.0.2.0/24\n"}))
    assert found == {"unit_properties": f"{DROPIN} sets IPAddressAllow=192.0.2.0/24"}


def test_a_changed_command_and_environment_are_said_without_secrets() -> None:
    words = [*PLAN["command"], "--api-key", "hunter2"]
    found = findings(
        seen(shown={"ExecStart": _exec(" ".join(words)), "Environment": f"{SHOWN['Environment']} API_KEY=hunter2"})
    )
    assert found["unit_command"].startswith("ExecStart: --api-key ")
    assert found["unit_environment"].startswith("Environment: API_KEY=")
    assert "hunter2" not in str(found)


FOREIGN = 'DB=postgres://u:pa55@h/db "MYSETTING=plainSecret and more" ODD=now HF_HUB_OFFLINE="0"'


def test_of_foreign_variables_only_the_names_are_shown() -> None:
    """ODD is the deployment's own; who else sets a variable may keep a secret in it."""
    assert "ODD" in PLAN["env"] and "HF_HUB_OFFLINE" not in PLAN["env"]
    found = findings(seen({DROPIN: f"[Service]\nEnvironment={FOREIGN}\n"}))
    assert found == {"unit_environment": f'{DROPIN} sets Environment=DB=*** "MYSETTING=***" ODD=now HF_HUB_OFFLINE=***'}
    loaded = findings(seen(shown={"Environment": f"{SHOWN['Environment']} MYSETTING=plainSecret"}))
    assert loaded["unit_environment"] == "Environment: MYSETTING=*** is loaded, written is no such variable"
    started = findings(seen(shown={"ExecStart": _exec("/usr/bin/env MYSETTING=plainSecret true")}))
    assert "MYSETTING=***" in started["unit_command"] and "plainSecret" not in started["unit_command"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"Environment={FOREIGN}", '+Environment=DB=*** "MYSETTING=***" ODD=now HF_HUB_OFFLINE=***'),
        ("Environment=ODD=1 \\\n# B=x\n  MYSETTING=plainSecret 'DB=plainSecret x'",
         "+Environment=ODD=1 \\; +# B=***; +  MYSETTING=*** 'DB=***'"),
        ("# Environment=MYSETTING=plainSecret", "+# Environment=MYSETTING=***"),
        ("#MYSETTING=plainSecret", "+#MYSETTING=***"),
        ("Environment=ODD=http://u:plainSecret@h", "+Environment=ODD=***"),
        ("ExecStartPre=/usr/bin/env MYSETTING=plainSecret ODD=2 true", "+ExecStartPre=/usr/bin/env MYSETTING=*** ODD=2 true"),
        ("SetCredential=key:plainSecret", "+SetCredential=key:***"),
        ("RestartSec=1", "+RestartSec=1"),
    ],
)  # fmt: skip
def test_an_edited_unit_shows_no_foreign_values(line: str, shown: str) -> None:
    found = findings(replace(seen(), on_disk=f"{TEXT}{line}\n"))
    assert found == {"unit_file": f"edited: {shown}"}


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("Environment=DB=postgres://u:pa55@h/db", "DB looks like a secret"),
        ("Environment=HF_TOKEN=x API_KEY=y", "HF_TOKEN, API_KEY look like secrets"),
        ("ExecStart=\nExecStart=/x --api-key y", "--api-key looks like a secret"),
        ("Environment=NCCL_DEBUG=INFO", None),
    ],
)
def test_a_secret_is_not_sent_to_the_inventory(line: str, secret: str | None) -> None:
    for unit in (seen({DROPIN: f"[Service]\n{line}\n"}), replace(seen(), on_disk=f"{TEXT}{line}\n")):
        (action,) = [check.action for check in check_unit(unit) if not check.ok]
        assert ("inventory (deployment_" in action) == (secret is None)
        assert secret is None or f"{secret}: the inventory takes none" in action


@pytest.mark.parametrize(
    ("directive", "written", "shown", "wanted_"),
    [
        ("TimeoutStopSec", "125", "2min 5s", True), ("TimeoutStartSec", "infinity", "infinity", True),
        ("TimeoutStartSec", "86400", "1d", True), ("StartLimitIntervalSec", "0", "0", True),
        ("KillSignal", "SIGTERM", "15", True), ("KillSignal", "SIGINT", "15", False),
        ("SystemCallErrorNumber", "EPERM", "1", True), ("SystemCallErrorNumber", "EACCES", "1", False),
        ("UMask", "077", "0077", True), ("UMask", "0027", "0077", False), ("OOMScoreAdjust", "-500", "-500", True),
        ("OOMScoreAdjust", "-500", "0", False), ("TasksMax", "1024", "infinity", False), ("MemoryMax", "64G", "68719476736", True),
        ("PrivateTmp", "true", "yes", True), ("PrivateTmp", "yes", "no", False), ("ProtectHome", "yes", "read-only", False),
        ("ReadWritePaths", "-/a/ -/b", "-/b -/a", True), ("ReadWritePaths", "-/a -/b", "-/a", False),
        ("ReadWritePaths", '"-/a b"', '"-/a b"', True), ("CapabilityBoundingSet", "CAP_SYS_NICE", "cap_sys_nice", True),
        ("CapabilityBoundingSet", "", "cap_chown", False), ("CapabilityBoundingSet", "", "", True),
        ("SystemCallFilter", "@system-service", "read write", True), ("SystemCallFilter", "@system-service", "~", False),
        ("RequiresMountsFor", "/a", "/a /var/tmp", True), ("RequiresMountsFor", "/a", "/var/tmp", False),
        ("Description", "SGLang of %H", "SGLang of box", True), ("Description", "50%% of it", "50% of it", True),
        ("Description", "50%% of it", "51% of it", False),
    ],
)  # fmt: skip
def test_both_sides_are_brought_to_one_form(directive: str, written: str, shown: str, wanted_: bool) -> None:
    assert same(directive, written, shown) is wanted_
