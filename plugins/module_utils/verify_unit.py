# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""The unit as it was written, as it lies on disk, and as systemd has loaded it.

What systemd shows is its own rendering (`30s`, a command without quotes), so the written text is not compared with that.
The text on disk is compared with the recorded one, and every drop-in is read; what both leave open (a property that was
set at run time, a unit that was not read again) shows in the properties that can be compared.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .health import scrub
from .service import without_secrets
from .verify import Check, failed, listed, passed

#: Properties that systemctl is asked for.
PROPERTIES = (
    "LoadState,ActiveState,SubState,MainPID,NRestarts,InvocationID,FragmentPath,DropInPaths,NeedDaemonReload,"
    "UnitFileState,ExecStart,Restart,RestartUSec,TimeoutStartUSec,TimeoutStopUSec,KillMode,User,Group,"
    "WorkingDirectory,MemoryMax,LimitMEMLOCK,StartLimitBurst,StartLimitIntervalUSec,ExecMainStartTimestamp"
)
#: Directive to the property that shows it, where both can be brought to one form.
COMPARED = {
    "Restart": "Restart",
    "RestartSec": "RestartUSec",
    "TimeoutStartSec": "TimeoutStartUSec",
    "TimeoutStopSec": "TimeoutStopUSec",
    "KillMode": "KillMode",
    "User": "User",
    "Group": "Group",
    "WorkingDirectory": "WorkingDirectory",
    "MemoryMax": "MemoryMax",
    "LimitMEMLOCK": "LimitMEMLOCK",
    "StartLimitBurst": "StartLimitBurst",
    "StartLimitIntervalSec": "StartLimitIntervalUSec",
}
#: Directives that decide about the environment.
ENVIRONMENT = ("Environment", "EnvironmentFile", "PassEnvironment", "UnsetEnvironment")
_SPANS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "hr": 3600.0, "d": 86400.0,
    "day": 86400.0, "w": 604800.0, "week": 604800.0, "month": 2629800.0, "y": 31557600.0, "year": 31557600.0,
}  # fmt: skip
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
#: Where drop-ins of a unit lie, those first that win over the others.
FOLDERS = (
    "/etc/systemd/system.control", "/run/systemd/system.control", "/run/systemd/transient", "/etc/systemd/system",
    "/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system",
)  # fmt: skip


@dataclass(frozen=True)
class Directive:
    """One assignment of a unit file; an empty value resets what was assigned before."""

    name: str
    value: str
    path: str

    def text(self) -> str:
        """For people, without secrets."""
        return f"{self.name}={scrub(self.value)}"


def directives(text: str, path: str) -> list[Directive]:
    """The assignments of a unit file in their order, continued lines joined."""
    found: list[Directive] = []
    open_line = ""
    for line in text.splitlines():
        stripped = line.strip()
        if not open_line and (not stripped or stripped[0] in "#;["):
            continue
        if open_line and stripped[:1] in ("#", ";"):
            continue
        open_line += stripped
        if open_line.endswith("\\"):
            open_line = open_line[:-1] + " "
            continue
        name, equals, value = open_line.partition("=")
        if equals:
            found.append(Directive(name.strip(), value.strip(), path))
        open_line = ""
    return found


def seconds(text: str) -> float | None:
    """A span of time as a unit file or systemctl writes it; None when it is none."""
    text = text.strip()
    if text == "infinity":
        return float("inf")
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    pieces = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text)
    if not pieces or re.sub(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*", "", text):
        return None
    names = [(number, name if name in _SPANS else name.rstrip("s")) for number, name in pieces]
    if any(name not in _SPANS for _number, name in names):
        return None
    return sum(float(number) * _SPANS[name] for number, name in names)


def same(directive: str, written: str, shown: str) -> bool:
    """Whether a property shows what was written; true also where that cannot be told."""
    if written == shown:
        return True
    if directive.endswith("Sec"):
        return seconds(written) == seconds(shown)
    size = re.fullmatch(r"(\d+)([KMGT]?)", written)
    if size and shown.isdigit():
        return int(size.group(1)) * _SIZES[size.group(2)] == int(shown)
    # A share of the host's memory: systemd shows bytes.
    return written.endswith("%")


def loaded_dropins(shown: str, unit: str, root: Path = Path("/")) -> list[str]:
    """Paths of the drop-ins that systemd has loaded (``DropInPaths``) and of those that lie there for the unit alone."""
    paths = shown.split()
    for folder in FOLDERS:
        for path in sorted((root / folder.lstrip("/") / f"{unit}.d").glob("*.conf")):
            name = f"{folder}/{unit}.d/{path.name}"
            if name not in paths:
                paths.append(name)
    return paths


@dataclass(frozen=True)
class UnitSeen:
    """The unit: recorded text, text on disk (None: no file), drop-ins by path, and what systemctl shows."""

    name: str
    path: str
    recorded: str
    on_disk: str | None
    dropins: Mapping[str, str]
    shown: Mapping[str, str]

    def layers(self) -> list[Directive]:
        """Everything that is assigned, in the order in which systemd reads it."""
        found = directives(self.on_disk or "", self.path)
        for path, text in self.dropins.items():
            found += directives(text, path)
        return found

    def changed_by_dropins(self) -> list[Directive]:
        """Assignments of drop-ins that say something else than the recorded unit.

        An empty assignment only clears the way for the next one, unless nothing of its name follows.
        """
        written = directives(self.recorded, self.path)
        have: dict[str, list[str]] = {}
        for entry in written:
            have.setdefault(entry.name, []).append(entry.value)
        found: list[Directive] = []
        every = [entry for path, text in self.dropins.items() for entry in directives(text, path)]
        for number, entry in enumerate(every):
            follows = any(later.name == entry.name and later.value for later in every[number + 1 :])
            if (entry.value and entry.value not in have.get(entry.name, [])) or (not entry.value and not follows):
                found.append(entry)
        return found

    def environment(self) -> dict[str, str]:
        """The environment that the layers give a process that is started now."""
        found: dict[str, str] = {}
        for entry in self.layers():
            if entry.name == "Environment":
                if not entry.value:
                    found.clear()
                found.update(assignments(entry.value))
            elif entry.name == "UnsetEnvironment":
                for word in entry.value.split():
                    found.pop(word.partition("=")[0], None)
        return found

    def has_foreign_environment(self) -> bool:
        """Whether a layer takes variables from elsewhere, so that no list of them can be made here."""
        return any(entry.name in ("EnvironmentFile", "PassEnvironment") and entry.value for entry in self.layers())

    def start_words(self) -> str:
        """The command that a start would run now, as systemctl shows it: words without quotes."""
        match = re.search(r"argv\[\]=(.*?) ; ignore_errors=", self.shown.get("ExecStart", ""))
        return match.group(1) if match else ""


def assignments(value: str) -> dict[str, str]:
    """``Environment=`` to its variables; what cannot be read is left out. ``%%`` is a per cent sign in a unit."""
    try:
        words = shlex.split(value)
    except ValueError:
        return {}
    return dict(word.replace("%%", "%").split("=", 1) for word in words if "=" in word)


def parse_shown(text: str) -> dict[str, str]:
    """`systemctl show` output to its properties."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _where(entries: Iterable[Directive], unit: str) -> str:
    paths = list(dict.fromkeys(entry.path for entry in entries))
    return f"Remove {' and '.join(paths)}, `systemctl daemon-reload`, and run site.yml; or say it in the inventory ({unit})."


def changed_lines(old: str, new: str) -> list[str]:
    """Lines that came and went, without secrets."""
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm=""))[2:]
    return [scrub(line) for line in lines if not line.startswith("@@")]


def check_unit(seen: UnitSeen, known: Sequence[str] = ()) -> list[Check]:
    """unit_file, unit_command, unit_environment, unit_properties, unit_enabled, unit_loaded. ``known`` drop-ins are expected."""
    seen = UnitSeen(
        seen.name,
        seen.path,
        seen.recorded,
        seen.on_disk,
        {path: text for path, text in seen.dropins.items() if path not in known},
        seen.shown,
    )
    checks = [_check_file(seen)]
    edited = not checks[0].ok
    foreign = seen.changed_by_dropins()
    command = [entry for entry in foreign if entry.name == "ExecStart"]
    environment = [entry for entry in foreign if entry.name in ENVIRONMENT]
    others = [entry for entry in foreign if entry not in command and entry not in environment]
    for id_, subject, entries, action in (
        ("unit_command", "command that the unit starts", command, "deployment_overrides"),
        ("unit_environment", "environment that the unit gives", environment, "deployment_extra_env"),
    ):
        if entries:
            words = [f"{entry.path} sets {_words(entry)}" for entry in entries]
            checks.append(failed(id_, subject, listed(words), "what the unit itself says", _where(entries, action)))
        else:
            checks.append(passed(id_, subject, "what the unit itself says"))
    checks.append(_check_properties(seen, others, edited))
    state = seen.shown.get("UnitFileState", "")
    if state == "enabled":
        checks.append(passed("unit_enabled", "start at boot", "enabled"))
    else:
        checks.append(
            failed(
                "unit_enabled",
                "start at boot",
                state or "unknown to systemd",
                "enabled",
                f"`systemctl enable {seen.name}` (or site.yml): after a reboot nothing would serve.",
            )
        )
    stale = seen.shown.get("NeedDaemonReload") == "yes"
    if stale and not edited and not foreign:
        checks.append(
            failed(
                "unit_loaded",
                "unit as systemd has it in memory",
                "older than the files",
                "the files",
                "`systemctl daemon-reload`; the running server stays.",
            )
        )
    else:
        checks.append(
            passed("unit_loaded", "unit as systemd has it in memory", "the files" if not stale else "see above")
        )
    return checks


def _words(entry: Directive) -> str:
    if entry.name != "ExecStart":
        return entry.text()
    try:
        return "ExecStart=" + " ".join(without_secrets(shlex.split(entry.value)))
    except ValueError:
        return entry.text()


def _check_file(seen: UnitSeen) -> Check:
    subject = f"unit file {seen.path}"
    if seen.on_disk is None:
        return failed("unit_file", subject, "no file", "the text of the deployment", "Run site.yml.")
    if seen.on_disk == seen.recorded:
        return passed("unit_file", subject, "the text of the deployment")
    lines = changed_lines(seen.recorded, seen.on_disk)
    return failed(
        "unit_file",
        subject,
        f"edited: {listed(lines)}",
        "the text of the deployment (deployments/last-good/unit)",
        "Run site.yml: it writes the text anew. What must stay belongs in the inventory (deployment_unit, "
        "deployment_overrides, deployment_extra_env).",
    )


def _check_properties(seen: UnitSeen, foreign: Sequence[Directive], edited: bool) -> Check:
    id_, subject = "unit_properties", "other properties of the unit"
    found = [f"{entry.path} sets {entry.text()}" for entry in foreign]
    explained = {entry.name for entry in foreign}
    last = {entry.name: entry.value for entry in directives(seen.recorded, seen.path)}
    for directive, name in COMPARED.items():
        if edited or directive in explained or directive not in last or name not in seen.shown:
            continue
        if not same(directive, last[directive], seen.shown[name]):
            found.append(f"{name} is {seen.shown[name]}, written is {directive}={last[directive]}")
    if not found:
        return passed(id_, subject, "as written")
    action = (
        _where(foreign, "deployment_unit")
        if foreign
        else "`systemctl daemon-reload`, or `systemctl revert` after a set-property; then run verify again."
    )
    return failed(id_, subject, listed(found), "as the unit file says", action)
