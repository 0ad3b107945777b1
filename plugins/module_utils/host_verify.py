# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Hold a served host against its own record: everything is read here, nothing is written, nothing is restarted.

What is expected comes from the record of the last good deployment (unit and plan), from the release's manifest, and from
what the caller says (``verify.Expected``). The judgements are pure functions in the modules verify_unit, verify_serve and
verify_host.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from . import health, host_info, release, sitecustomize
from . import verify_host as hosts
from . import verify_serve as serve
from . import verify_unit as units
from .apt_guard import dpkg_status
from .cuda import matches
from .record import LAST, RecordError, Records, document
from .service import boot_time, process_started, process_words
from .verify import Check, Expected, failed, result, skipped, unknown

#: Seconds for the journal of a server that has run for weeks.
JOURNAL_TIMEOUT = 60.0
#: A line of ``dmesg``: seconds since the boot, and the text.
_DMESG = re.compile(r"\[ *(\d+\.\d+)\] (.*)")
Collector = Callable[[host_info.Wanted], dict[str, Any]]


def _text(path: Path) -> str | None:
    try:
        # Not as text: the end of a line counts as well.
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _why(command: str, answer: health.CommandResult) -> str:
    """Why a command said nothing, in one line."""
    said = (answer.err or answer.out).strip().splitlines()
    return f"{command} ended with status {answer.rc}{': ' + health.scrub(said[-1]) if said else ''}"


def _document(path: Path) -> Any:
    text = _text(path)
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return None


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


@dataclass
class Look:
    """One look at a host. Everything that touches it can be replaced in tests."""

    expected: Expected
    run: health.Runner = health.run_command
    request: health.Requester = health.HttpRequest
    collect: Collector = host_info.collect
    root: Path = Path("/")
    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    record: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    # -- reading

    def at(self, path: str | Path) -> Path:
        """A path of the host."""
        return self.root / str(path).lstrip("/")

    def loose(self, folder: Path, pattern: str) -> list[str]:
        """What others than root can write to: a folder, and what is in it. The folder first, since it alone is enough."""
        found: list[str] = []
        for path in (self.at(folder), *sorted(self.at(folder).glob(pattern))):
            name = str(folder / path.relative_to(self.at(folder)))
            if path != self.at(folder) and path.is_symlink():
                found.append(f"{name} is a link")
                continue
            try:
                seen = path.stat()
            except OSError:
                continue  # that it is missing is said by its content's check
            found += hosts.loose(name, seen.st_uid, seen.st_mode, os.geteuid())
        return found

    def shown(self, unit: str, properties: str) -> tuple[dict[str, str], str]:
        """Properties of a unit, and why there are none."""
        answer = self.run(["systemctl", "show", "--no-pager", "-p", properties, "--", unit], 10.0)
        return (units.parse_shown(answer.out), "") if answer.rc == 0 else ({}, _why("systemctl show", answer))

    def journal(self, arguments: Sequence[str]) -> list[str] | str:
        """Lines of the journal; a text is why it cannot be read."""
        lines = str(self.expected.journal_lines)
        base = ["journalctl", "--no-pager", "--quiet", "--all", "-o", "cat", "-n", lines]
        answer = self.run([*base, *arguments], JOURNAL_TIMEOUT)
        return [line for line in answer.out.split("\n") if line] if answer.rc == 0 else _why("journalctl", answer)

    def kernel(self, began: float) -> list[str] | str:
        """What the kernel said since then; a text is why nobody knows. A container's journal may hold no line of it."""
        # `-t` finds them also where the journal got them from syslog.
        lines = self.journal(["-t", "kernel", "--since", f"@{int(began)}"])
        # That there is none since then is an answer only where the journal has those of this boot at all.
        any_line = lines or self.journal(["-t", "kernel", "-b", "-n", "1"])
        if any_line and isinstance(any_line, list):
            return lines
        answer = self.run(["dmesg"], 10.0)
        found = [match for match in map(_DMESG.match, answer.out.splitlines()) if match]
        if answer.rc == 0 and found:
            boot = boot_time(self.proc)
            # A second of grace: the boot is known to a second.
            return [match.group(2) for match in found if boot + float(match.group(1)) >= began - 1]
        here = "the journal holds no line of the kernel since the boot" if isinstance(any_line, list) else any_line
        return f"{here}, and {_why('dmesg', answer) if answer.rc else 'dmesg says nothing'}"

    def unit_seen(self, name: str, path: str, recorded: str | None, own: Sequence[str] = ()) -> units.UnitSeen:
        """A unit in its three forms; of the text on disk nothing is said when ``recorded`` is None."""
        on_disk = _text(self.at(path))
        recorded = on_disk or "" if recorded is None else recorded
        shown, blind = self.shown(name, units.properties(recorded))
        texts: dict[str, str] = {}
        # Of an instance those of its template too.
        loaded = shown.get("DropInPaths", "")
        paths = [
            each for unit in (os.path.basename(path), name) for each in units.loaded_dropins(loaded, unit, self.root)
        ]
        for dropin in dict.fromkeys(paths):
            try:
                # What is no UTF-8 is a directive all the same.
                texts[dropin] = self.at(dropin).read_bytes().decode("utf-8", "replace")
            except (FileNotFoundError, IsADirectoryError):
                texts[dropin] = ""  # what it said is among what systemd has loaded
            except OSError as error:
                blind = blind or f"{dropin} cannot be read ({error.strerror})"
        return units.UnitSeen(name, path, recorded, on_disk, texts, shown, own, blind)

    def ask(self, method: str, path: str, body: Any, timeout: float) -> health.HttpAnswer:
        """One request to the server."""
        url = urlsplit(self.record["plan"]["endpoint"]["url"])
        pending = self.request(url.hostname or "127.0.0.1", int(url.port or 0), method, path, body, timeout)
        answer = pending.wait(timeout + 1)
        if answer is None:
            pending.abort()
            return health.HttpAnswer(error="timeout", seconds=timeout)
        return answer

    # -- checking

    def attempt(self, id_: str, subject: str, function: Callable[[], Check | list[Check]]) -> None:
        """One odd file must not cost all the other checks: what cannot be checked is said."""
        try:
            done = function()
        except Exception as error:  # whatever it is, the rest of the host is still worth checking
            done = unknown(
                id_, subject, f"{type(error).__name__}: {health.scrub(str(error))}", "Report this as a fault."
            )
        self.checks += done if isinstance(done, list) else [done]

    def all(self) -> dict[str, Any]:
        """Every check; see ``verify.result``."""
        expected = self.expected
        try:
            found = Records(self.at(expected.state_dir)).read(LAST)
        except RecordError as error:
            found, why = None, str(error)
        else:
            why = f"{expected.state_dir} holds no record of a deployment that served"
        if found is None:
            return result(
                [failed("deployed", "deployment on record", why, "a deployment that served", "Run site.yml.")]
            )
        self.record = found
        plan = found["plan"]
        earlier = self._deployed_before(found["id"])
        self.attempt("deployed", "deployment on record", lambda: hosts.check_deployed(expected.plan, found, earlier))
        self._release(plan)
        seen = self.collect(host_info.Wanted(paths=tuple(expected.disk_paths)))
        self.attempt(
            "driver",
            "NVIDIA driver",
            lambda: hosts.check_driver(seen["driver"], seen["nvidia_smi"], expected.drivers),
        )
        hardening = plan.get("hardening") or []
        own = [entry["directive"] for entry in hardening if entry.get("source", "collection") != "collection"]
        unit = self.unit_seen(expected.unit, f"/etc/systemd/system/{expected.unit}", found["unit"], own)
        self.attempt("unit_file", "unit file", lambda: units.check_unit(unit, expected.dropins))
        process = self._process(plan)
        self.attempt("process", f"process of {expected.unit}", lambda: serve.check_process(process, unit, plan))
        self._interpreter(plan)
        self._sockets(plan, process, seen)
        self._answers(plan, process)
        self._logs(process, bool(seen.get("container")))
        self._apt(seen)
        self.attempt("disk", "free disk space", lambda: hosts.check_disks(seen["disks"], expected.min_free_gb))
        self._files(plan)
        return result(self.checks)

    def _deployed_before(self, last: str) -> bool:
        """Whether the inventory's plan, or its very process, is on record as a deployment other than the last one."""
        wanted = self.expected.plan or {}
        return any(
            plan.get(key) == wanted.get(key, "")
            for name, plan in Records(self.at(self.expected.state_dir)).plans().items()
            if name != last
            for key in ("hash", "process_hash")
        )

    def _release(self, plan: Mapping[str, Any]) -> None:
        python = plan["command"][0]
        path, marker, __ = python.partition("/venv/bin/")
        if not marker or "/releases/" not in path:
            why = f"{python} is no release of this collection"
            for id_, subject in (
                ("release", "release"),
                ("packages", "package versions"),
                ("files", "installed files"),
                ("patches", "patched files"),
            ):
                self.checks.append(skipped(id_, subject, why))
            return
        folder = self.at(path)
        manifest = release.read_manifest(folder)
        current = self.at(path.partition("/releases/")[0]) / "current"
        target = os.path.basename(os.path.realpath(current)) if current.is_symlink() else ""
        works = os.access(self.at(python), os.X_OK)
        self.attempt("release", "release", lambda: hosts.check_release(path, manifest, target, works))
        if manifest is not None:
            self.attempt("packages", "package versions", lambda: self._packages(folder, manifest))

    def _packages(self, folder: Path, manifest: Mapping[str, Any]) -> list[Check]:
        files = manifest.get("files") or {}
        if self.expected.all_files:
            # A python that is gone is the release's own finding.
            python = str(folder.resolve() / "venv" / "bin" / "python")
            found = [entry for entry in release.check_installed(folder) if entry["subject"] != python]
        else:
            found = self._guarded(folder / "venv", manifest)
        return hosts.check_packages(found, sorted(files), len(manifest.get("packages") or {}), self.expected.all_files)

    def _guarded(self, venv: Path, manifest: Mapping[str, Any]) -> list[dict[str, str]]:
        """Versions, and files of the guarded packages only: a second instead of the time to read the whole release."""
        files = manifest.get("files") or {}
        action = "Run site.yml: it installs what is pinned and restarts the server."
        found = release.drift(manifest.get("packages") or {}, release.installed_packages(venv))
        other = {entry["package"] for entry in found}
        guard = [*self.expected.guard, *sorted({entry["package"] for entry in files.values()})]
        edited = [entry for entry in release.changed_files(venv, files, guard) if entry["package"] not in other]
        return [
            {
                "subject": f"{entry['file']} of {entry['package']}"
                if "file" in entry
                else f"package {entry['package']}",
                "found": str(entry["found"] or "absent"),
                "expected": str(entry["expected"] or "absent"),
                "action": action,
            }
            for entry in [*found, *edited]
        ]

    def _process(self, plan: Mapping[str, Any]) -> serve.ProcessSeen:
        status = health.observe_unit(self.expected.unit, self.run)
        pid = status.main_pid
        if not pid:
            return serve.ProcessSeen(status)
        words = process_words(pid, "environ", self.proc)
        began = process_started(pid, self.proc)
        manifest = plan["command"][0].partition("/venv/bin/")[0] + "/manifest.json"
        newer: list[str] | None = None
        try:
            # A second of grace: the start of a process is known to a hundredth, that of a boot to a second.
            if began is not None:
                newer = [manifest] if self.at(manifest).stat().st_mtime > began + 1 else []
        except OSError:
            newer = []  # the release's own check says so
        environment = dict(word.split("=", 1) for word in words if "=" in word)
        return serve.ProcessSeen(status, process_words(pid, "cmdline", self.proc), environment, newer)

    def _interpreter(self, plan: Mapping[str, Any]) -> None:
        python = self.expected.interpreter or plan["command"][0]
        expected = Expected(variables=self.expected.variables, interpreter=python)
        planned = {str(name): str(value) for name, value in plan["env"].items()}

        def ask() -> Check:
            if expected.variables is None:
                return hosts.check_sitecustomize(expected, "")
            try:
                target = sitecustomize.Target(python, "", "", True, "")
                clean = sitecustomize.clean_environment(list(expected.variables), {})
                environment, file = sitecustomize.ask(target, clean)
                # And with what the unit gives: what is set or taken away then is what the engine gets. This very process may have
                # started with the same sitecustomize: what it has of the engine's variables would hide what the file sets.
                own = [name for name in os.environ if serve.ENGINE_VARIABLES.match(name)]
                unit = {**planned, "PYTHONDONTWRITEBYTECODE": "1"}
                given = sitecustomize.clean_environment([*expected.variables, *own], unit)
                started = sitecustomize.ask(target, given)[0]
            except sitecustomize.SitecustomizeError as error:
                return hosts.check_sitecustomize(expected, str(error))
            answer = {"environment": environment, "file": file, "given": given, "started": started}
            return hosts.check_sitecustomize(expected, answer, planned)

        self.attempt("sitecustomize", "sitecustomize", ask)

    def _sockets(self, plan: Mapping[str, Any], process: serve.ProcessSeen, seen: Mapping[str, Any]) -> None:
        unit, runs = self.expected.unit, process.runs
        pids = health.unit_pids(process.status, self.proc, self.cgroups) if runs else set()

        def unless_blind(fact: str, id_: str, subject: str, check: Callable[[], Check]) -> None:
            # A list that could not be made is empty, and a note says why.
            why = next((note for note in seen.get("notes", ()) if note.startswith(f"{fact}: ")), "")
            blind = unknown(id_, subject, health.scrub(why), "Run verify as root (become).")
            self.attempt(id_, subject, lambda: blind if why else check())

        unless_blind("ports", "port", "port", lambda: serve.check_port(seen["ports"], plan, unit, runs, pids))
        subject = "other inference servers"
        unless_blind("servers", "servers", subject, lambda: serve.check_servers(seen["servers"], unit, pids))

    def _answers(self, plan: Mapping[str, Any], process: serve.ProcessSeen) -> None:
        expected, unit = self.expected, self.expected.unit
        answer = self.ask("GET", "/health", None, expected.request_timeout) if process.runs else None
        self.attempt("health", "/health", lambda: serve.check_health(answer, unit))
        well = answer is not None and answer.status == 200
        generation, why = None, "/health is not 200" if process.runs else "the service does not run"
        if well and expected.generate:
            options = health.Options()
            model = plan["endpoint"]["served_model_name"]
            body = health.generation_body(model, options.prompt, options.max_tokens)
            for __ in range(health.GENERATION_TRIES):
                said = self.ask("POST", "/v1/chat/completions", body, expected.generation_timeout)
                generation = health.judge_generation(said)
                if generation.ok:
                    break
        elif well:
            why = "verify_generate is false"
        self.attempt("generation", "one generation", lambda: serve.check_generation(generation, why, unit))
        info = self.ask("GET", "/server_info", None, expected.request_timeout) if well else None
        self.attempt("kv_pool", "KV pool", lambda: serve.check_pool(plan, info, expected.kv_tolerance))
        speculates = well and plan["args"].get("--speculative-algorithm")
        metrics = self.ask("GET", "/metrics", None, expected.request_timeout) if speculates else None
        benchmark = document(self.at(f"{expected.state_dir}/benchmarks/latest.json"))[0] or None
        self.attempt(
            "accept_length", "acceptance length", lambda: serve.check_speculation(plan, info, metrics, benchmark)
        )

    def _logs(self, process: serve.ProcessSeen, container: bool) -> None:
        expected = self.expected
        log: serve.LogFindings | str | None = None
        faults: list[str] | str | None = None
        if process.runs:
            lines = self.journal([f"_SYSTEMD_INVOCATION_ID={process.status.invocation_id}"])
            if isinstance(lines, str):
                # Nor is it known then whether a container sees the kernel.
                log, container = lines, False
            else:
                # An engine that serves has said something.
                log = serve.scan_log(lines, expected.log_ignore) if lines else "the journal holds no line of this start"
            began = process_started(process.status.main_pid, self.proc)
            kernel = "the start of the process cannot be read" if began is None else self.kernel(began)
            faults = kernel if isinstance(kernel, str) else serve.scan_xids(kernel, expected.ignored_xids)
        self.attempt("log_engine", "failures in the engine's log", lambda: serve.check_log(log, expected.unit))
        self.attempt("log_xid", "GPU faults (Xid)", lambda: serve.check_xids(faults, container))

    def _apt(self, seen: Mapping[str, Any]) -> None:
        expected = self.expected
        packages = {n: e for n, e in dpkg_status(str(self.root)).items() if e["installed"]} if expected.holds else {}
        contents = {path: _text(self.at(path)) for path in expected.apt_files}
        self.attempt("apt_holds", "packages on hold", lambda: hosts.check_holds(packages, expected.holds, matches))
        self.attempt("apt_pins", "pins of APT", lambda: hosts.check_apt_files(contents, expected.apt_files))
        upgrades = seen["unattended_upgrades"]
        self.attempt(
            "apt_blacklist",
            "blacklist of unattended-upgrades",
            lambda: hosts.check_blacklist(upgrades, expected.blacklist),
        )

    def _files(self, plan: Mapping[str, Any]) -> None:
        expected = self.expected
        name = expected.unit.removesuffix(".service")
        path = f"{expected.settings_dir}/{name}.json"
        plan_path = f"{expected.settings_dir}/{name}.plan.json"
        # Settings of an inventory that was not deployed are not those that this host should have.
        deployed = expected.plan is None or expected.plan["hash"] == plan["hash"]
        wanted = {
            **(expected.settings if deployed else {}),
            "unit": expected.unit,
            "endpoint": plan["endpoint"],
            "state_dir": plan["paths"]["state"],
            "plan_hash": plan["hash"],
        }
        found, found_plan = _document(self.at(path)), _document(self.at(plan_path))
        open_to = self.loose(expected.settings_dir, f"{name}.*")
        self.attempt(
            "settings",
            "settings",
            lambda: hosts.check_settings(path, found, plan_path, found_plan, wanted, plan, open_to),
        )
        programs = {entry: _digest(self.at(expected.programs_dir) / entry) for entry in expected.programs}
        self.attempt(
            "programs",
            "programs",
            lambda: hosts.check_programs(
                str(expected.programs_dir), programs, expected.programs, self.loose(expected.programs_dir, "**/*")
            ),
        )
        self._watchers(deployed)
        handbook = _text(self.at(expected.handbook)) if expected.handbook else None
        self.attempt("handbook", "handbook", lambda: hosts.check_handbook(expected.handbook, handbook, plan))

    def _watched(self, unit: str, texts: Mapping[str, str | None]) -> tuple[Mapping[str, str] | str, list[str]]:
        """The state of a unit that watches over the service, or why nobody knows it; and what was changed of its files."""
        shown, blind = self.shown(unit, "LoadState,ActiveState,UnitFileState")
        words: list[str] = []
        for name, text in texts.items():
            seen = self.unit_seen(unit if "@" in name else name, f"/etc/systemd/system/{name}", text)
            words += units.changes(seen, self.expected.dropins)
            blind = blind or seen.blind
        return blind or shown, words

    def _watchers(self, deployed: bool) -> None:
        timer, collector = self.expected.timer, self.expected.collector
        # Texts of an inventory that was not deployed are not those that this host should have.
        texts = {name: text if deployed else None for name, text in self.expected.watchers.items()}
        probing = {name: text for name, text in texts.items() if "@" not in name}
        collecting = {name: text for name, text in texts.items() if "@" in name}
        nothing: tuple[Mapping[str, str], list[str]] = ({}, [])
        self.attempt(
            "liveness",
            "liveness timer",
            lambda: hosts.check_timer(timer, *(self._watched(timer, probing) if timer else nothing)),
        )
        self.attempt(
            "incidents",
            "incident collector",
            lambda: hosts.check_collector(collector, *(self._watched(collector, collecting) if collector else nothing)),
        )


def verify(expected: Expected) -> dict[str, Any]:
    """Look at this host and say what is not as expected; ``{ok, failures, warnings, unknown, checks}``."""
    return Look(expected).all()
