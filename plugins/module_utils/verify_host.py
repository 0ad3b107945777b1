# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""What the server stands on: the deployment on record, the release, the driver, APT's guards, disks, and the files and
timers of this collection beside the unit."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from .health import scrub
from .history import changes
from .verify import Check, Expected, failed, listed, passed, skipped, unknown
from .verify_serve import ENGINE_VARIABLES
from .verify_unit import variable_text

COMMAND_HEADING = "## 6. Exact launch command"
#: The last line of the page: the checksum of all that is before it.
HANDBOOK_SEAL = re.compile(r"\n\n<!-- sha256 of the page above: ([0-9a-f]{64}) -->\n?\Z")
HANDBOOK_PLAN = re.compile(r"plan[: ]+`?([0-9a-f]{12,64})`?")


def check_deployed(plan: Mapping[str, Any] | None, record: Mapping[str, Any], earlier: bool = False) -> Check:
    """Whether the inventory's plan is the one that was deployed. ``earlier``: it is on record as a deployment before this one."""
    id_, subject = "deployed", "deployment on record"
    has = f"plan {str(record['plan']['hash'])[:12]} (profile {record['plan']['profile']})"
    if plan is None:
        return skipped(id_, subject, f"no inventory was asked; on record is {has}")
    if plan["hash"] == record["plan"]["hash"]:
        return passed(id_, subject, has, "the inventory's plan")
    lines = changes(record["plan"], plan)
    if earlier:
        return failed(
            id_,
            subject,
            f"{has}; the inventory's plan {str(plan['hash'])[:12]} was deployed before and is not what serves: {listed(lines, 8)}",
            "the inventory's plan",
            "Somebody went back, with playbooks/rollback.yml for example (the history on the host says why): take the change out of "
            "the inventory, or site.yml deploys it again.",
        )
    return failed(
        id_,
        subject,
        f"{has}; the inventory's plan {str(plan['hash'])[:12]} was not deployed: {listed(lines, 8)}",
        "the inventory's plan",
        "Run site.yml (playbooks/plan.yml says whether it restarts the server), or take the change back.",
    )


def check_release(path: str, manifest: Mapping[str, Any] | None, current: str, python: bool) -> Check:
    """The release that the plan starts: complete, and the one that `current` names."""
    id_, subject = "release", f"release {path}"
    if manifest is None:
        return failed(
            id_, subject, "no readable manifest.json", "a finished release", "Run site.yml: it builds it anew."
        )
    name = path.rstrip("/").rpartition("/")[2]
    if manifest.get("id") != name:
        found = f"the manifest of {manifest.get('id')}"
        return failed(id_, subject, found, f"the manifest of {name}", "Run site.yml: it builds it anew.")
    if not python:
        return failed(id_, subject, "its python is gone", "venv/bin/python", "Run site.yml: it repairs it.")
    if current != name:
        return failed(
            id_,
            subject,
            f"the link current names {current or 'nothing'}",
            f"it names {name}",
            "Run site.yml: it sets the link.",
        )
    count = len(manifest.get("packages") or {})
    return passed(id_, subject, f"complete, {count} packages", "complete, and what current names")


def check_packages(found: Sequence[Mapping[str, str]], patched: Sequence[str], count: int, every: bool) -> list[Check]:
    """packages, files, patches out of what ``release.check_installed`` found: ``[{subject, found, expected, action}]``."""
    carried = tuple(patched)
    versions = [entry for entry in found if entry["subject"].startswith("package ")]
    files = [entry for entry in found if entry not in versions]
    edited = [entry for entry in files if carried and entry["subject"].partition(" of ")[0].endswith(carried)]
    others = [entry for entry in files if entry not in edited]
    whose = "as their packages brought them" if every else "those of the guarded packages as they brought them"
    checks = []
    for id_, subject, entries, expected, well in (
        ("packages", "package versions", versions, "the manifest's", f"{count} as in the manifest"),
        ("files", "installed files", others, whose, whose),
        ("patches", "patched files", edited, "the checksums of the patch series", f"{len(carried)} as patched"),
    ):
        if entries:
            words = [
                f"{entry['subject'].removeprefix('package ')}: {_short(entry['found'])}, expected {_short(entry['expected'])}"
                for entry in entries
            ]
            actions = list(dict.fromkeys(entry["action"] for entry in entries))
            checks.append(failed(id_, subject, listed(words), expected, listed(actions, 2)))
        elif id_ == "patches" and not carried:
            checks.append(skipped(id_, subject, "the release carries no patch"))
        else:
            checks.append(passed(id_, subject, well, expected))
    return checks


def _short(text: str) -> str:
    """A checksum by its beginning."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1...", text)


def check_driver(driver: Mapping[str, Any], smi: Mapping[str, Any], wanted: Sequence[str]) -> Check:
    """Loaded == installed == wanted."""
    id_, subject = "driver", "NVIDIA driver"
    if not wanted:
        return skipped(id_, subject, "no driver is wanted (verify_drivers)")
    loaded, installed = driver.get("loaded"), driver.get("installed")
    expected = f"{' or '.join(wanted)}, the same in the kernel and on disk"
    if smi.get("mismatch") or (loaded and installed and loaded != installed):
        return failed(
            id_,
            subject,
            f"{loaded or 'another version'} is loaded, {installed or 'another one'} is installed",
            expected,
            "Packages were upgraded under the loaded module: reboot in a maintenance window, then hold them (role cuda).",
        )
    if not loaded:
        why = f"no driver is loaded, {installed} is installed" if installed else "nothing on the host names a driver"
        error = f" (nvidia-smi: {smi['error']})" if smi.get("error") else ""
        do = "`modprobe nvidia` and `dmesg | grep -i nvrm` say why: often a module that was not built for this kernel."
        return failed(id_, subject, why + error, expected, do)
    version = str(loaded)
    if not any(version == name or version.startswith(f"{name}.") for name in wanted):
        return failed(
            id_,
            subject,
            f"{version} is loaded",
            expected,
            "Install the wanted branch (role cuda), or say in the inventory that this one is wanted.",
        )
    also = "" if installed else " (what is on disk is not known: no driver package here)"
    return passed(id_, subject, f"{version}{also}", expected)


# --------------------------------------------------------------------------------------------------- APT


def check_holds(packages: Mapping[str, Mapping[str, Any]], patterns: Sequence[str], matches: Any) -> Check:
    """Installed packages that must not move are on hold."""
    id_, subject = "apt_holds", "packages on hold"
    if not patterns:
        return skipped(id_, subject, "the role cuda is not used")
    wanted = [name for name in sorted(packages) if matches(name, patterns)]
    if not wanted:
        return failed(
            id_,
            subject,
            f"no package fits {', '.join(patterns)}",
            "an installed one, on hold",
            "Run playbooks/cuda.yml.",
        )
    loose = [name for name in wanted if not packages[name].get("hold")]
    if not loose:
        return passed(id_, subject, f"{len(wanted)} on hold", f"every installed one of {', '.join(patterns)}")
    return failed(
        id_,
        subject,
        f"{listed(loose)} can be upgraded",
        f"every installed one of {', '.join(patterns)} on hold",
        f"`apt-mark hold {loose[0]}`, or playbooks/cuda.yml: an upgrade would swap it under the running server.",
    )


def check_apt_files(contents: Mapping[str, str | None], wanted: Mapping[str, str]) -> Check:
    """Pins and other files of APT as the role cuda writes them."""
    id_, subject = "apt_pins", "pins of APT"
    if not wanted:
        return skipped(id_, subject, "the role cuda is not used")
    wrong = [
        f"{path} {'is gone' if contents.get(path) is None else 'was edited'}"
        for path, text in wanted.items()
        if contents.get(path) != text
    ]
    if not wrong:
        return passed(id_, subject, f"{', '.join(wanted)} as written", "as the role cuda writes them")
    return failed(id_, subject, listed(wrong), "as the role cuda writes them", "Run playbooks/cuda.yml.")


def check_blacklist(seen: Mapping[str, Any], wanted: Sequence[str]) -> Check:
    """unattended-upgrades leaves driver and toolkit alone."""
    id_, subject = "apt_blacklist", "blacklist of unattended-upgrades"
    if not wanted:
        return skipped(id_, subject, "the role cuda is not used")
    missing = [pattern for pattern in wanted if pattern not in (seen.get("blacklist") or [])]
    if not missing:
        return passed(id_, subject, f"{len(wanted)} patterns", "every pattern of cuda_unattended_blacklist")
    return failed(
        id_,
        subject,
        f"{listed(missing)} missing",
        "every pattern of cuda_unattended_blacklist",
        "Run playbooks/cuda.yml: an unattended upgrade would swap the driver under the running server.",
    )


# --------------------------------------------------------------------------------------------------- disks, files, timers


def check_disks(disks: Sequence[Mapping[str, Any]], min_free_gb: float) -> Check:
    """Room on every file system that the server writes to."""
    id_, subject = "disk", "free disk space"
    if not disks:
        return skipped(id_, subject, "no path is named (verify_disk_paths)")
    low, seen = [], []
    for disk in disks:
        free = disk.get("free_bytes")
        text = f"{disk['path']} {'not known' if free is None else f'{free / 1e9:.1f} GB'}"
        seen.append(text)
        if free is None or free < min_free_gb * 1e9:
            low.append(text + (f" (on {disk['mount']})" if disk.get("mount") else ""))
    expected = f"{min_free_gb:g} GB on each"
    if low:
        return failed(
            id_,
            subject,
            listed(low),
            expected,
            "Remove old logs, incidents or releases; a full disk ends the next start in its kernel compilation.",
        )
    return passed(id_, subject, listed(seen), expected)


def mismatches(wanted: Any, found: Any, where: str = "") -> list[str]:
    """Where a document lacks what is wanted of it: every leaf of ``wanted`` is compared, more is allowed."""
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            return [f"{where or 'the document'} is {found!r}, expected a mapping"]
        lines = []
        for key, value in wanted.items():
            place = f"{where}.{key}" if where else str(key)
            lines += (
                mismatches(value, found[key], place) if key in found else [f"{place} is missing, expected {value!r}"]
            )
        return lines
    same_number = isinstance(wanted, (int, float)) and isinstance(found, (int, float)) and float(wanted) == float(found)
    return [] if wanted == found or same_number else [f"{where} is {found!r}, expected {wanted!r}"]


def loose(path: str, owner: int, mode: int, reader: int) -> list[str]:
    """What is wrong with owner and permissions of a file that root runs or believes; ``reader`` is who looks."""
    wrong = []
    if owner not in (0, reader):
        wrong.append(f"{path} belongs to uid {owner}, not to root")
    if mode & 0o022:
        wrong.append(f"{path} can be written by others than root (mode {mode & 0o7777:04o})")
    return wrong


def check_settings(
    path: str,
    found: Any,
    plan_path: str,
    found_plan: Any,
    wanted: Mapping[str, Any],
    plan: Mapping[str, Any],
    open_to: Sequence[str] = (),
) -> Check:
    """The files that the gate, the liveness timer and the incident collector read. ``open_to``: who else can write to them."""
    id_, subject = "settings", f"settings {path}"
    if found is None:
        return failed(id_, subject, "no readable file", "the settings of the deployment", "Run site.yml.")
    wrong = [*open_to, *mismatches(wanted, found)]
    if found_plan is None:
        wrong.append(f"{plan_path} cannot be read")
    elif found_plan.get("hash") != plan["hash"] or found_plan.get("command") != plan["command"]:
        wrong.append(f"{plan_path} holds another plan ({str(found_plan.get('hash'))[:12]})")
    if wrong:
        return failed(
            id_,
            subject,
            listed(wrong),
            "those of the deployment",
            "Run site.yml: it writes them anew, without a restart.",
        )
    return passed(id_, subject, "those of the deployment")


def check_programs(
    folder: str, found: Mapping[str, str | None], wanted: Mapping[str, str], open_to: Sequence[str] = ()
) -> Check:
    """The programs on the host are this collection's. ``open_to``: who else can write to them."""
    id_, subject = "programs", f"programs in {folder}"
    if not wanted:
        return skipped(id_, subject, "their checksums are not known here")
    wrong = [
        f"{name} {'is missing' if found.get(name) is None else 'is another one'}"
        for name, digest in wanted.items()
        if found.get(name) != digest
    ]
    wrong += open_to
    if wrong:
        return failed(
            id_,
            subject,
            listed(wrong),
            "those of this collection",
            "Run site.yml: it copies them, without a restart.",
        )
    return passed(id_, subject, f"{len(wanted)} files", "those of this collection")


#: What site.yml does and does not do about units that were changed.
_WATCHERS_ANEW = (
    "Run site.yml: it writes the units anew, without a restart of the server. A drop-in has to be removed by hand."
)


def check_timer(timer: str, shown: Mapping[str, str] | str, changed: Sequence[str] = ()) -> Check:
    """The timer that looks after the server, and what it starts. ``shown``: a text is why nobody knows its state;
    ``changed``: what was changed of their files."""
    id_, subject = "liveness", f"timer {timer}"
    if not timer:
        return skipped(id_, "liveness timer", "none is wanted")
    if isinstance(shown, str) and not changed:
        return unknown(id_, subject, shown, f"Look at `systemctl status {timer}` on the host.")
    state = ("active", "enabled")
    if not isinstance(shown, str):
        state = (shown.get("ActiveState") or "unknown", shown.get("UnitFileState") or "not installed")
    well = state == ("active", "enabled")
    if well and not changed:
        return passed(id_, subject, "active, enabled")
    if well:
        return failed(id_, subject, listed(changed), "the units of the deployment", _WATCHERS_ANEW)
    return failed(
        id_,
        subject,
        listed([", ".join(state), *changed]),
        "active, enabled",
        f"`systemctl enable --now {timer}`, or site.yml: without it nobody notices a server that hangs.",
    )


def check_collector(name: str, shown: Mapping[str, str] | str, changed: Sequence[str] = ()) -> Check:
    """The unit that collects an incident when the service fails; the arguments are those of ``check_timer``."""
    id_, subject = "incidents", f"incident collector {name}"
    if not name:
        return skipped(id_, "incident collector", "none is wanted")
    if isinstance(shown, str) and not changed:
        return unknown(id_, subject, shown, f"Look at `systemctl status {name}` on the host.")
    state = "loaded" if isinstance(shown, str) else shown.get("LoadState") or "not installed"
    if changed and state == "loaded":
        return failed(id_, subject, listed(changed), "the unit of the deployment", _WATCHERS_ANEW)
    if state == "loaded":
        return passed(id_, subject, "installed")
    return failed(
        id_,
        subject,
        state,
        "installed",
        "Run site.yml: without it nothing is kept of a crash.",
    )


def launch_words(handbook: str) -> list[str]:
    """The launch command of a handbook, as the words that a process gets; empty without one."""
    after = handbook.partition(COMMAND_HEADING)[2].split("```")
    if len(after) < 2:
        return []
    try:
        found = shlex.split(after[1].replace("\\\n", " "))
    except ValueError:
        return []
    # systemd's own escapes: the text is that of ExecStart=.
    return [word.replace("%%", "%").replace("$$", "$") for word in found]


def check_handbook(path: str, text: str | None, plan: Mapping[str, Any]) -> Check:
    """The handbook speaks of what was deployed."""
    id_, subject = "handbook", f"handbook {path}"
    if not path:
        return skipped(id_, "handbook", "none is wanted")
    if text is None:
        return failed(id_, subject, "no file", "one rendered from the deployed plan", "Run site.yml.")
    match = HANDBOOK_PLAN.search(text)
    named = match.group(1) if match else ""
    do = "Run site.yml (`--tags runbook_render` for the handbook alone)."
    if not named or not str(plan["hash"]).startswith(named):
        found = f"rendered from {'plan ' + named[:12] if named else 'no plan that it names'}"
        return failed(id_, subject, found, f"plan {str(plan['hash'])[:12]}", do)
    seal = HANDBOOK_SEAL.search(text)
    if seal is None:
        found = "its last line is no checksum: it was edited, or an older version of this collection wrote it"
        return failed(id_, subject, found, "the page as it was rendered", do)
    if hashlib.sha256(text[: seal.start()].encode()).hexdigest() != seal.group(1):
        return failed(id_, subject, "it was edited", "the page as it was rendered", do)
    if launch_words(text) != plan["command"]:
        return failed(id_, subject, "its launch command is another one", "the deployed one", do)
    return passed(id_, subject, f"rendered from plan {named[:12]}")


def _set_at_start(
    given: Mapping[str, str], started: Mapping[str, str], wanted: Mapping[str, str], planned: Mapping[str, str]
) -> dict[str, str]:
    """What the start of the interpreter makes of the environment that the unit gives, beyond the wanted variables, by name:
    /proc shows the environment before that."""
    found = {}
    for name in dict.fromkeys([*given, *started]):
        was, now = given.get(name), started.get(name)
        matters = name in planned or ENGINE_VARIABLES.match(name)
        if was == now or not matters or (name not in planned and wanted.get(name) == now):
            continue
        if now is None:
            found[name] = f"{name} is taken away" + (", which the plan has" if name in planned else "")
        else:
            plan = f", the plan says {scrub(planned[name])}" if name in planned else ", which nobody asked for"
            found[name] = f"{variable_text(name, now, planned)} is set{plan}"
    return found


def check_sitecustomize(
    expected: Expected, answer: Mapping[str, Any] | str, planned: Mapping[str, str] | None = None
) -> Check:
    """What the interpreter has in its environment after it imported sitecustomize; a text is why nobody knows. ``planned``: the
    plan's variables."""
    id_, subject = "sitecustomize", f"sitecustomize of {expected.interpreter or 'the interpreter'}"
    if expected.variables is None or not expected.interpreter:
        return skipped(id_, subject, "the role nccl is not used")
    if isinstance(answer, str):
        return unknown(id_, subject, answer, "Start the interpreter by hand.")
    has = answer["environment"]
    file = answer["file"] or "no file"
    wrong = {
        name: f"{name} is {has[name]!r}, expected {value!r}" if name in has else f"{name} is not set"
        for name, value in expected.variables.items()
        if has.get(name) != value
    }
    wrong = {**_set_at_start(answer["given"], answer["started"], expected.variables, planned or {}), **wrong}
    if not wrong:
        return passed(
            id_, subject, f"{len(expected.variables)} variables, from {file}", "the variables of the role nccl"
        )
    return failed(
        id_,
        subject,
        f"{listed(wrong.values())} (imports {file})",
        "the variables of the role nccl, and no other of the engine",
        "Run site.yml: it puts the block back. What is set by hand elsewhere in the file has to go.",
    )
