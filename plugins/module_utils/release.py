"""Engine releases: one folder for each set of pinned packages, built whole or not at all.

A release is ``<root>/releases/<id>/`` with a virtual environment and, written last, ``manifest.json``. The id is the
hash of everything that determines the release, so a changed pin makes a new folder beside the one that serves, and
nothing that runs is touched. A folder without a manifest is the rest of an interrupted build.

Patches are part of a release: their texts are in its id, they are applied after the installation (in the tree of a step
that installs from git, before it) and the checksums of the files that they touch are in the manifest.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import errno
import fcntl
import hashlib
import inspect
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from . import bytecode
from .patch_series import PatchError, Series, Tree, load_series, sha256_of
from .record import Records

MANIFEST = "manifest.json"
ID_LENGTH = 12
STEP_KEYS = {"name", "requirements", "index_url", "extra_index_urls", "no_deps", "overrides", "git"}
GIT_KEYS = {"package", "url", "ref", "commit", "subdirectory", "version"}
# Links beside releases/, set by whoever switches the service; their targets are never pruned.
LINKS = ("current", "last-good")
# Variables of pip and uv that say how to reach an index; all others could change what is installed.
_TRANSPORT = re.compile(
    r"(PIP|UV)_(CERT|CLIENT_CERT|PROXY|TRUSTED_HOST|DEFAULT_TIMEOUT|TIMEOUT|RETRIES|CACHE_DIR|NO_CACHE_DIR|NO_CACHE"
    r"|CONFIG_FILE|INDEX_URL|DEFAULT_INDEX|HTTP_TIMEOUT|HTTP_RETRIES|NATIVE_TLS|SYSTEM_CERTS|INSECURE_HOST|LINK_MODE"
    r"|CONCURRENT_\w+)|GIT_(SSL_CAINFO|SSL_CAPATH|SSH|SSH_COMMAND|ASKPASS|PROXY_COMMAND)"
)

# What is asked of the finished environment, by its own interpreter: imports, the CUDA that torch was built for.
_CHECK = """
import importlib, json, sys
found = {"python_version": "%d.%d.%d" % sys.version_info[:3], "imports": {}, "torch_cuda": None}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
        found["imports"][name] = None
    except BaseException as error:
        found["imports"][name] = "%s: %s" % (type(error).__name__, str(error)[:300])
if "torch" in sys.modules:
    found["torch_cuda"] = sys.modules["torch"].version.cuda
print("\\nCHECK" + json.dumps(found))
"""


# Causes that pip, uv and git report in many words, and what to do about each.
_CAUSES = (
    ("space", r"No space left on device|os error 28|Errno 28|Disk quota exceeded"),
    (
        "unhashed",
        r"(?i)hash-checking is required|hashes are required|must have a hash|must have their versions pinned|In .?--require-hashes.? mode",
    ),
    ("hash", r"(?i)hash(?:es)? mismatch|DO NOT MATCH THE HASHES|expected hash"),
    (
        "network",
        r"(?i)dns error|name resolution|could not resolve|connection (?:refused|reset|closed|broken|aborted)|connect error"
        r"|could not connect|failed to connect|error sending request|timed out|unreachable|max retries|NewConnectionError"
        r"|IncompleteRead|incomplete message|unexpected (?:eof|disconnect)|RemoteDisconnected|request or response body",
    ),
)
_REMEDIES = {
    "unhashed": "A package that is needed has no hash in the step, expected one for each when all its lines have one: run "
    "tools/lock_requirements.py again. ",
    "hash": "What the source holds has another checksum than the requirement, expected the same bytes: either the source "
    "changed or the pin is wrong. Find out which, then correct the source or run tools/lock_requirements.py. ",
    "network": "A package source did not answer, expected it to. Look at the network, the proxy and the addresses in "
    "sglang_steps and sglang_index_url, or install from a folder (sglang_find_links); then run again. ",
}


class ReleaseError(Exception):
    """Says what was found, what was expected and what to do. ``cause`` names what _CAUSES knows."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class Patching(NamedTuple):
    """A series and those of its patches that a release carries, in their order."""

    series: Series
    ids: list[str]

    @property
    def package(self) -> str:
        return _normal(self.series.distribution)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def load_patches(entries: Any) -> list[Patching]:
    """The patches of a description: ``[{series, patches, definition, texts}]``, as the filter release_patches gives them.

    ``definition`` is the content of series.yml, ``texts`` the patch files by name, ``patches`` ids or ``all``. Raises
    ReleaseError for a patch file that is not the one that its series knows.
    """
    if not isinstance(entries or [], Sequence) or isinstance(entries, str):
        raise ReleaseError(f"sglang_patches is a {type(entries).__name__}, expected a list of series")
    found: list[Patching] = []
    for number, entry in enumerate(entries or []):
        where = f"sglang_patches[{number}]"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("definition"), Mapping):
            raise ReleaseError(f"{where} has no definition, expected what the filter release_patches makes of a series")
        where += f" ({entry.get('series')})"
        try:
            series = load_series(entry["definition"], entry.get("texts") or {})
        except PatchError as error:
            raise ReleaseError(f"{where}: {error}") from error
        wanted = entry.get("patches")
        named = list(series.ids) if wanted in (None, "all") else _list(f"{where}.patches", wanted)
        unknown = [name for name in named if name not in series.ids]
        if unknown:
            raise ReleaseError(
                f"{where} names the patches {', '.join(unknown)}, expected all or some of {', '.join(series.ids)}"
            )
        ids = [name for name in series.ids if name in named]
        for patch in series.patches:
            missing = [name for name in patch.requires if name not in ids]
            if patch.id in ids and missing:
                raise ReleaseError(
                    f"{where} has {patch.id} without {', '.join(missing)}, expected both: alone it does harm. Add the "
                    "missing ones, or leave it out too."
                )
        patching = Patching(series, ids)
        if patching.package in (earlier.package for earlier in found):
            raise ReleaseError(f"{where} is a second series for {series.distribution}, expected one. Remove one.")
        if ids:
            found.append(patching)
    return found


def _canonical_patches(entries: Any) -> list[dict[str, Any]]:
    """What of the patches determines a release: the texts, not the words about them."""
    return [
        {
            "package": item.package,
            "version": item.series.version,
            "patches": [
                [patch.id, sha256_of(patch.text.encode())] for patch in item.series.patches if patch.id in item.ids
            ],
        }
        for item in load_patches(entries)
    ]


def without_credentials(url: str) -> str:
    """The address without user and password: they decide nothing about the content and must not reach a file."""
    head, separator, rest = url.partition("://")
    if not separator:
        return url
    host, slash, path = rest.partition("/")
    return f"{head}://{host.rpartition('@')[2]}{slash}{path}"


def _index(what: str, url: Any) -> str:
    address = without_credentials(str(url or ""))
    if "@" in address:
        # The address stays out of the message: what follows the odd character may be the rest of a password.
        raise ReleaseError(
            f"{what} holds an @ behind the host, expected an address such as https://user:password@host/simple. "
            "Write reserved characters of a password as %40 (@), %2F (/), %23 (#)."
        )
    return address


def _list(what: str, value: Any) -> list[str]:
    """The module gets lists, the filter what a playbook says: both must come to the same id."""
    if value is None:
        return []
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise ReleaseError(f"{what} is a {type(value).__name__}, expected a list")
    return [str(item) for item in value]


def _flag(what: str, value: Any) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ReleaseError(f"{what} is {value!r}, expected true or false")
    return value


def _joined(lines: Sequence[str]) -> list[str]:
    """Requirement lines without comments, those that end in a backslash joined with the next."""
    found, open_line = [], ""
    for line in "\n".join(lines).split("\n"):
        text = _requirement(line)
        if text.endswith("\\"):
            open_line += text[:-1].strip() + " "
        elif open_line or text:
            found.append((open_line + text).strip())
            open_line = ""
    return [line for line in [*found, open_line.strip()] if line]


def _requirements(what: str, value: Any) -> list[str]:
    lines = _joined(_list(what, value))
    for line in lines:
        odd = [word for word in line.split()[1:] if word.startswith("--") and not re.match(r"--hash=sha\d+:\w+$", word)]
        if odd and not line.startswith("-"):
            raise ReleaseError(
                f"{what} holds the option {odd[0].partition('=')[0]} behind {line.split()[0]}, expected at most "
                "--hash=sha256:... there. Remove it."
            )
        if line.startswith("-"):
            raise ReleaseError(
                f"{what} holds the option {line.split()[0].partition('=')[0]}, expected requirements only. "
                "Name indexes in index_url and extra_index_urls, and the packages of another file one by one."
            )
        if re.search(r"://(?!git@)[^/\s]*@", line):
            raise ReleaseError(
                f"{what} holds credentials in the address of {_scrub(line)}, expected none: the line is written to the "
                "manifest. Put the wheel behind index_url or into a folder of sglang_find_links."
            )
    return lines


def _git(what: str, value: Any) -> dict[str, str] | None:
    """Where a step's source comes from: ``{package, url, ref, commit, subdirectory, version}``."""
    if not value:
        return None
    if not isinstance(value, Mapping):
        raise ReleaseError(
            f"{what} is a {type(value).__name__}, expected a dictionary with {', '.join(sorted(GIT_KEYS))}"
        )
    unknown = sorted(set(value) - GIT_KEYS)
    if unknown:
        raise ReleaseError(
            f"{what} has the unknown keys {', '.join(unknown)}; expected some of {', '.join(sorted(GIT_KEYS))}"
        )
    found = {key: str(value.get(key) or "") for key in sorted(GIT_KEYS)}
    if re.search(r"://(?!git@)[^/\s]*@", found["url"]):
        raise ReleaseError(
            f"{what}.url holds credentials, expected none: an address can be read in the process list. Use a key with "
            "ssh, or git's credential helper."
        )
    if not found["url"] or found["url"].startswith("-"):
        raise ReleaseError(f"{what}.url is {found['url']!r}, expected the address of a git repository")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/+-]*", found["ref"]):
        raise ReleaseError(f"{what}.ref is {found['ref']!r}, expected a tag or a branch such as v0.5.9")
    if not re.fullmatch(r"[0-9a-f]{7,40}", found["commit"]):
        raise ReleaseError(
            f"{what}.commit is {found['commit']!r}, expected 7 to 40 hexadecimal digits: a tag can be moved, a commit not"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", found["package"]):
        raise ReleaseError(f"{what}.package is {found['package']!r}, expected the name of the package that it installs")
    if found["subdirectory"].startswith("/") or ".." in found["subdirectory"].split("/"):
        raise ReleaseError(
            f"{what}.subdirectory is {found['subdirectory']!r}, expected a folder inside of the repository"
        )
    if not found["version"] and re.match(r"v?\d", found["ref"]):
        # The tree is patched, so what computes a version from git would call it a development version.
        found["version"] = found["ref"].removeprefix("v")
    return found


def canonical_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Validate a release description and reduce it to what determines the release.

    ``spec`` holds ``python`` (absolute path of the base interpreter), ``steps`` (list of ``{name, requirements,
    index_url, extra_index_urls, no_deps, overrides, git}``, installed in this order), the defaults ``index_url``,
    ``extra_index_urls``, ``find_links`` and ``offline``, and ``patches`` (see load_patches). Where packages come from is
    part of the id, since two indexes may hold different builds of one version. Raises ReleaseError.
    """
    python = str(spec.get("python") or "")
    if not python.startswith("/"):
        raise ReleaseError(f"sglang_base_python is {python!r}, expected the absolute path of a Python interpreter")
    steps = spec.get("steps")
    if not isinstance(steps, Sequence) or isinstance(steps, str) or not steps:
        raise ReleaseError(
            f"sglang_steps is {'empty' if not steps else 'a ' + type(steps).__name__}, expected a list with at least one "
            "step of packages to install"
        )
    canonical_steps: list[dict[str, Any]] = []
    for number, step in enumerate(steps):
        where = f"sglang_steps[{number}]"
        if not isinstance(step, Mapping):
            raise ReleaseError(f"{where} is a {type(step).__name__}, expected a dictionary with a name")
        name = str(step.get("name") or "")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise ReleaseError(
                f"{where} has the name {name!r}, expected letters, digits, '_', '.' and '-': it becomes a file name"
            )
        if name in (earlier["name"] for earlier in canonical_steps):
            raise ReleaseError(f"{where} has the name {name!r} of an earlier step, expected one of its own")
        where += f" ({name})"
        unknown = sorted(set(step) - STEP_KEYS)
        if unknown:
            raise ReleaseError(
                f"{where} has the unknown keys {', '.join(unknown)}; expected some of {', '.join(sorted(STEP_KEYS))}"
            )
        requirements = _requirements(f"{where}.requirements", step.get("requirements"))
        git = _git(f"{where}.git", step.get("git"))
        if not requirements and not git:
            raise ReleaseError(f"{where} lists no requirements")
        extra = f"{where}.extra_index_urls"
        canonical_steps.append(
            {
                "name": name,
                "requirements": requirements,
                "index_url": _index(f"{where}.index_url", step.get("index_url")),
                "extra_index_urls": [_index(extra, url) for url in _list(extra, step.get("extra_index_urls"))],
                "no_deps": _flag(f"{where}.no_deps", step.get("no_deps")),
                "overrides": _requirements(f"{where}.overrides", step.get("overrides")),
                # What is not used is not in the id, so that releases built earlier keep theirs.
                **({"git": git} if git else {}),
            }
        )
    extra, find_links = "sglang_extra_index_urls", _list("sglang_find_links", spec.get("find_links"))
    for place in find_links:
        if "://" not in place and not place.startswith("/"):
            raise ReleaseError(f"sglang_find_links names {place!r}, expected an absolute path or an address")
    patches = _canonical_patches(spec.get("patches"))
    return {
        **({"patches": patches} if patches else {}),
        "python": python,
        "steps": canonical_steps,
        "index_url": _index("sglang_index_url", spec.get("index_url")),
        "extra_index_urls": [_index(extra, url) for url in _list(extra, spec.get("extra_index_urls"))],
        "find_links": [_index("sglang_find_links", place) if "://" in place else place for place in find_links],
        "offline": _flag("sglang_offline", spec.get("offline")),
    }


def _requirement(line: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", str(line)).strip()


def release_id(spec: Mapping[str, Any]) -> str:
    """The id of the release that ``spec`` describes: the same on the controller and on the host."""
    text = json.dumps(canonical_spec(spec), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def installed_packages(venv: Path) -> dict[str, str]:
    """Distribution names (normalised) and versions, from the names of the dist-info folders: milliseconds."""
    packages = {}
    for info in venv.glob("lib/python3*/site-packages/*.dist-info"):
        name, __, version = info.name.removesuffix(".dist-info").rpartition("-")
        packages[_normal(name)] = version
    return dict(sorted(packages.items()))


def _sha256(path: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


def changed_files(
    venv: Path, patched: Mapping[str, Mapping[str, Any]], packages: Sequence[str] | None
) -> list[dict[str, str | None]]:
    """Files that are not as they were installed: ``[{package, file, expected, found}]`` with checksums.

    ``patched`` are the manifest's ``files``. Beyond those, every Python file of ``packages`` is held against the
    checksum in the package's own RECORD; every file of every package for None. Where two packages install the same
    file, either content is right.
    """
    found: list[dict[str, str | None]] = []
    wanted = None if packages is None else {_normal(name) for name in packages}
    for site in venv.glob("lib/python3*/site-packages"):
        expected = {path: [(str(entry["package"]), str(entry["sha256"]))] for path, entry in patched.items()}
        for info in site.glob("*.dist-info"):
            name = _normal(info.name.removesuffix(".dist-info").rpartition("-")[0])
            if wanted is None or name in wanted:
                for path, checksum in _recorded(info / "RECORD").items():
                    if path not in patched and (wanted is None or path.endswith(".py")):
                        expected.setdefault(path, []).append((name, checksum))
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 8)) as pool:
            places = sorted(expected)
            sums = pool.map(_sha256, [site / place for place in places])
            for path, now in zip(places, sums, strict=True):
                if now not in [checksum for __, checksum in expected[path]]:
                    name, checksum = expected[path][-1]
                    found.append({"package": name, "file": str(site / path), "expected": checksum, "found": now})
    return found


def _recorded(record: Path) -> dict[str, str]:
    """Path and sha256 of every file that a RECORD names; of generated ones it holds none."""
    try:
        rows = list(csv.reader(record.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error):
        return {}
    found = {}
    for row in rows:
        if len(row) >= 2 and row[1].startswith("sha256="):
            digest = row[1].removeprefix("sha256=")
            with contextlib.suppress(ValueError):
                found[row[0]] = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
    return found


def _recorded_files(venv: Path) -> dict[str, str]:
    """What RECORD says of every file of every package below site-packages."""
    found: dict[str, str] = {}
    for record in sorted(venv.glob("lib/python3*/site-packages/*.dist-info/RECORD")):
        found.update(_recorded(record))
    return found


def _records(venv: Path) -> dict[str, str]:
    """A digest of what each package's RECORD says: another one means that the package was installed anew."""
    found = {}
    for record in venv.glob("lib/python3*/site-packages/*.dist-info/RECORD"):
        name = _normal(record.parent.name.removesuffix(".dist-info").rpartition("-")[0])
        # What installers add about themselves is not what they installed.
        lines = [f"{k} {v}" for k, v in sorted(_recorded(record).items()) if ".dist-info/" not in k and "../" not in k]
        found[name] = sha256_of("\n".join(lines).encode())
    return dict(sorted(found.items()))


# What Python imports, or runs at start, without any package saying so.
_IMPORTABLE = (".py", ".pth", ".so")
# The role nccl writes these, and looks after them.
_NOT_OURS = {"sitecustomize.py", "usercustomize.py"}


def unrecorded_files(venv: Path) -> list[str]:
    """Importable files below site-packages that no package installed, sorted."""
    found = []
    for site in venv.glob("lib/python3*/site-packages"):
        known = set(_recorded_files(venv))
        for folder, folders, names in os.walk(site):
            folders[:] = [name for name in folders if name != "__pycache__"]
            place = os.path.relpath(folder, site)
            for name in names:
                path = os.path.normpath(f"{place}/{name}")
                if name.endswith(_IMPORTABLE) and path not in known and path not in _NOT_OURS:
                    found.append(str(site / path))
    return sorted(found)


def check_installed(path: Path | str) -> list[dict[str, str]]:
    """What in the release at ``path`` is not as it was built: ``[{subject, found, expected, action}]``, all texts.

    Every package's version, every file of every package by its checksum, the patched ones by the manifest's, and what
    no package installed. Reads everything and changes nothing: seconds for each 10 GB.
    """
    release = Path(path).resolve()
    manifest = read_manifest(release)
    if manifest is None:
        there = "no finished release" if release.is_dir() else "absent"
        action = "Run site.yml: the role sglang builds it."
        return [{"subject": str(path), "found": there, "expected": f"a release with its {MANIFEST}", "action": action}]
    venv = release / "venv"
    findings: list[dict[str, str]] = []

    def add(subject: str, found: str | None, expected: str | None, action: str) -> None:
        findings.append(
            {"subject": subject, "found": found or "absent", "expected": expected or "absent", "action": action}
        )

    python = venv / "bin" / "python"
    if not python.exists():
        base = manifest.get("spec", {}).get("python")
        add(str(python), None, f"a link to {base}", "Install that interpreter again, or run site.yml.")
    again = "Run site.yml: the role sglang installs {} as it was. Restart the service if it served meanwhile."
    packages = drift(manifest.get("packages", {}), installed_packages(venv))
    for entry in packages:
        add(f"package {entry['package']}", entry["found"], entry["expected"], again.format(entry["package"]))
    other = {str(entry["package"]) for entry in packages}
    now = _records(venv)
    for name, then in manifest.get("records", {}).items():
        if name not in other and now.get(name) != then:
            other.add(name)
            found = "another build of the same version" if name in now else None
            add(f"package {name}", found, "the build that was installed", _FULL.format(name))
    patched = manifest.get("files", {})
    for entry in changed_files(venv, patched, None):
        name, file = str(entry["package"]), str(entry["file"])
        if name not in other:
            by = next((", ".join(v.get("patches", [])) for k, v in patched.items() if file.endswith("/" + k)), "")
            expected = f"sha256 {entry['expected']}" + (f" (with {by})" if by else "")
            found = f"sha256 {entry['found']}" if entry["found"] else None
            add(f"{file} of {name}", found, expected, _FULL.format(name))
    for extra in unrecorded_files(venv):
        action = "Remove it, or make it part of a package in sglang_steps."
        add(extra, "a file that no package installed", None, action)
    return findings


_FULL = (
    "Run site.yml with sglang_check_all_files=true: the role sglang installs {} as it was. Restart the service if it "
    "served meanwhile."
)


def explain_drift(found: Sequence[Mapping[str, str | None]]) -> str:
    """The drift of a release in words, one line for each package or file; empty when there is none."""
    lines = []
    for entry in found:
        now, then = entry["found"] or "absent", entry["expected"] or "absent"
        what = f"{entry['file']} of {entry['package']}: sha256" if "file" in entry else f"{entry['package']}:"
        lines.append(f"{what} {now}, expected {then}")
    return "\n".join(lines)


def drift(expected: Mapping[str, str], found: Mapping[str, str]) -> list[dict[str, str | None]]:
    """Packages whose version is not the manifest's: ``[{package, expected, found}]``, None for absent."""
    names = sorted(set(expected) | set(found))
    return [
        {"package": name, "expected": expected.get(name), "found": found.get(name)}
        for name in names
        if expected.get(name) != found.get(name)
    ]


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of the release at ``path``; None when the folder is missing or its build did not finish."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


class ReleaseBuilder:
    """Builds the release of ``spec`` below ``root``.

    ``installer`` is ``uv``, ``pip`` or ``auto`` (uv where it can be had from the same source, pip otherwise).
    ``min_free_bytes`` is what the file system must have free before a build starts. ``imports`` are module names that
    must import in the finished environment, ``torch_cuda`` the CUDA version that its torch must report ("" = a build
    without CUDA, None = not asked), ``environment`` extra variables for that check.

    ``guard`` names packages whose Python files are held against their RECORD, besides those that are patched or come from
    git; None every file of every package. ``keep`` is the number of releases that stay after a build (None = all); what runs, what a link or a unit below
    ``units`` names, what a deployment on record in ``state_dirs`` was started from, and this release stay in any case.
    ``caches`` are folders with one subfolder for each release, which goes with it.
    """

    def __init__(
        self,
        root: Path,
        spec: Mapping[str, Any],
        *,
        installer: str = "auto",
        uv_requirement: str = "uv",
        min_free_bytes: int = 0,
        imports: Sequence[str] = (),
        torch_cuda: str | None = None,
        environment: Mapping[str, str] | None = None,
        guard: Sequence[str] | None = (),
        keep: int | None = None,
        caches: Sequence[Path] = (),
        state_dirs: Sequence[Path] = (),
        units: Path = Path("/etc/systemd/system"),
        proc: Path = Path("/proc"),
    ) -> None:
        if keep is not None and keep < 1:
            raise ReleaseError(f"sglang_keep_releases is {keep}, expected 1 or more: the new release is one of them")
        self.spec = spec
        self.canonical = canonical_spec(spec)
        self.id = release_id(spec)
        self.releases = root / "releases"
        self.path = self.releases / self.id
        self.venv = self.path / "venv"
        self.python = self.venv / "bin" / "python"
        self._installer = installer
        self._uv_requirement = uv_requirement
        self._min_free_bytes = min_free_bytes
        self._imports = list(imports)
        self._torch_cuda = torch_cuda
        self._environment = dict(environment or {})
        self._manifest: dict[str, Any] | None = None
        self.root = root
        # Beside the releases, so that entries can be links: see bytecode.py.
        self.bytecode = root / "bytecode"
        self.pruned: list[str] = []
        self._patches = load_patches(spec.get("patches"))
        sources = [step["git"]["package"] for step in self.canonical["steps"] if "git" in step]
        self._guard: list[str] | None = None
        if guard is not None:
            names = [*guard, *sources, *(item.package for item in self._patches)]
            self._guard = sorted({_normal(name) for name in names})
        self._keep = keep
        self._caches = list(caches)
        self._state_dirs = list(state_dirs)
        self._units = units
        self._proc = proc
        self._lock: int | None = None
        self._commits: dict[str, str] = {}
        self._no_uv = ""

    # -- what is there ---------------------------------------------------------------------------------------------

    def state(self) -> tuple[str, list[dict[str, str | None]]]:
        """``absent``, ``incomplete``, ``drifted`` or ``present``, and the drift.

        A release whose interpreter is gone is drifted although its packages are all there.
        """
        manifest = read_manifest(self.path)
        if manifest is None:
            return ("incomplete" if self.path.exists() else "absent"), []
        found = self._found(manifest)
        return ("drifted" if found or not self.python.exists() else "present"), found

    def _found(self, manifest: Mapping[str, Any]) -> list[dict[str, str | None]]:
        """The drift of packages, then of files; those of a package that has another version are its own."""
        found = drift(manifest.get("packages", {}), installed_packages(self.venv))
        other = {entry["package"] for entry in found}
        files = changed_files(self.venv, manifest.get("files", {}), self._guard)
        return [*self._closed(), *found, *(entry for entry in files if entry["package"] not in other)]

    def _closed(self) -> list[dict[str, str | None]]:
        """Folders that the service's user cannot enter: a release that was built under a strict umask."""
        found: list[dict[str, str | None]] = []
        for folder in (self.releases, self.path, self.venv, self.python.parent):
            with contextlib.suppress(FileNotFoundError):
                mode = stat.S_IMODE(folder.stat().st_mode)
                if ~mode & 0o005:
                    found.append(
                        {"package": str(folder), "found": f"mode {mode:04o}", "expected": f"mode {mode | 0o055:04o}"}
                    )
        return found

    def _open(self) -> None:
        """Let everybody read what is closed, as a build does."""
        for folder in (self.root, self.releases):
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o055)
        for place, names, files in os.walk(self.path):
            for path in (Path(place), *(Path(place, name) for name in (*names, *files))):
                if not path.is_symlink():
                    mode = stat.S_IMODE(path.stat().st_mode)
                    path.chmod(mode | (0o055 if mode & stat.S_IXUSR else 0o044))

    # -- building --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One build at a time: a second play is refused instead of writing into the same folder."""
        self.releases.mkdir(parents=True, exist_ok=True)
        with (self.releases / ".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ReleaseError(
                    f"another play builds a release below {self.releases}; expected to be alone. "
                    "Wait for it to end and run this one again."
                ) from None
            # Installers inherit the lock: what a killed play left running goes on writing, and must be waited for.
            self._lock = handle.fileno()
            try:
                yield
            finally:
                self._lock = None

    def ensure(self) -> dict[str, Any]:
        """Build or repair the release and return its manifest. An interrupted or failed build leaves no manifest."""
        self._check_sources()
        # The service's user reads what root builds here, whatever root's own umask is.
        umask = os.umask(0o022)
        try:
            with self.lock():
                return self._ensure()
        except OSError as error:
            cause = "space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise self._failure(f"could not write release {self.id}: {error}", cause) from error
        finally:
            os.umask(umask)

    def _ensure(self) -> dict[str, Any]:
        state, found = self.state()
        # The manifest stays until the repair is done: a release that may be serving is never taken for the rest
        # of an interrupted build.
        self._manifest = read_manifest(self.path) if state == "drifted" else None
        if state == "incomplete":
            shutil.rmtree(self.path)
        self._check_disk()
        try:
            return self._build(found)
        except (ReleaseError, OSError) as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if self._manifest is None and (full or (isinstance(error, ReleaseError) and error.cause == "space")):
                # The file system may be the one that the running server writes to.
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _build(self, found: Sequence[Mapping[str, str | None]]) -> dict[str, Any]:
        if not self.python.exists():
            self._make_venv()
        if self._closed():
            self._open()
        changed = {str(entry["package"]) for entry in found}
        if "pip" in changed:
            self._restore_pip()
        if "uv" in changed:
            self._remove_uv()
        tool = self._bootstrap_installer()
        self._check_overrides(tool[0])
        self._remove_extraneous(tool)
        damaged = self._damaged(found)
        self._uninstall(tool, damaged)
        for step in self.spec["steps"]:
            self._install_step(tool, step, damaged)
        if damaged := self._damaged(changed_files(self.venv, {}, self._guard) if self._manifest is None else []):
            # uv links files from its cache: one that was edited in place in another release is damaged there too.
            self._uninstall(tool, damaged)
            for step in self.spec["steps"]:
                self._install_step(tool, step, damaged)
        self._put_back(tool)
        files = self._patch_installed()
        self._compile(files)
        left = self._found({**self._manifest, "files": files}) if self._manifest else []
        left = left or changed_files(self.venv, files, self._guard)
        if left:
            raise ReleaseError(
                f"after its {'repair' if self._manifest else 'installation'} {self.path} still holds something else than "
                f"it should:\n{explain_drift(left)}\nMake the sources hold what is expected, or stop what serves from it, "
                "delete the folder and run again."
            )
        manifest = self._finish(tool[0], files)
        self._prune()
        return manifest

    def _check_disk(self) -> None:
        if shutil.disk_usage(self.releases).free < self._min_free_bytes:
            self._prune()
        free = shutil.disk_usage(self.releases).free
        if free < self._min_free_bytes:
            raise ReleaseError(
                f"{self.releases} has {free / 1e9:.1f} GB free, expected at least {self._min_free_bytes / 1e9:.1f} GB "
                "for a release (sglang_min_free_gb). Remove old releases or set sglang_root to a larger file system.",
                "space",
            )

    def _check_sources(self) -> None:
        python = Path(self.canonical["python"])
        if not python.is_file() or not os.access(python, os.X_OK):
            raise ReleaseError(
                f"sglang_base_python is {python}, which is not an executable on this host. Install it or correct it."
            )
        for folder in self.canonical["find_links"]:
            if "://" not in folder and not Path(folder).is_dir():
                raise ReleaseError(
                    f"sglang_find_links names {folder}, which is no folder on this host; expected a folder of wheels. "
                    "Copy the wheels there or correct the variable."
                )
        needs = [step["name"] for step in self.canonical["steps"] if "git" in step] or [
            p.package for p in self._patches
        ]
        if needs and shutil.which("git") is None:
            raise ReleaseError(
                f"git was not found, expected it in PATH for {', '.join(needs)}. Install the package git "
                "(sglang_system_packages)."
            )
        if self._torch_cuda:
            self._check_compiler()

    def _check_compiler(self) -> None:
        """Triton compiles its launcher with the first kernel, after the load: without these the engine dies then."""
        ask = "import os, sysconfig; print(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))"
        header = Path(self._run([self.canonical["python"], "-I", "-c", ask], "find the headers of Python", {}).strip())
        compilers = [os.environ.get("CC") or "gcc", "gcc", "clang"]
        missing = [
            *([] if header.is_file() else [f"{header} (the package {Path(self.canonical['python']).name}-dev)"]),
            *([] if any(map(shutil.which, compilers)) else ["C compiler in PATH (the package build-essential)"]),
        ]
        if missing:
            raise ReleaseError(
                f"found no {' and no '.join(missing)}, expected a C compiler and the headers of Python: the engine compiles "
                "kernels when it starts. Nothing was built. Install what is missing (sglang_system_packages)."
            )

    def _make_venv(self) -> None:
        python = self.canonical["python"]
        self.path.mkdir(parents=True, exist_ok=True)
        self._run([python, "-m", "venv", str(self.venv)], "make the virtual environment", {})

    def _source_environment(self, step: Mapping[str, Any], prefix: str) -> dict[str, str]:
        """Indexes travel in the environment: their addresses may hold a password, and argv can be read by anyone."""
        index = str(step.get("index_url") or self.spec.get("index_url") or "")
        extra = [str(u) for u in step.get("extra_index_urls") or self.spec.get("extra_index_urls") or []]
        names = {
            "PIP": ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"),
            "UV": ("UV_DEFAULT_INDEX", "UV_INDEX"),
        }[prefix]
        environment = {names[0]: index} if index else {}
        if extra:
            environment[names[1]] = " ".join(extra)
        pages = [str(place) for place in self.spec.get("find_links") or [] if "://" in str(place)]
        if pages:
            environment[f"{prefix}_FIND_LINKS"] = (" " if prefix == "PIP" else ",").join(pages)
        return environment

    def _source_arguments(self) -> list[str]:
        arguments = [f"--find-links={place}" for place in self.canonical["find_links"] if "://" not in place]
        return [*arguments, "--no-index"] if self.canonical["offline"] else arguments

    def _bootstrap_installer(self) -> tuple[str, list[str]]:
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check"]
        # A repair is done by what built the release, so that no package comes or goes with the installer.
        wanted = (self._manifest or {}).get("installer") or self._installer
        if wanted == "pip":
            return "pip", pip
        uv = self.venv / "bin" / "uv"
        if not uv.exists():
            command = [*pip, "install", "--quiet", *self._source_arguments(), self._uv_requirement]
            try:
                self._run(command, "install uv", self._source_environment({}, "PIP"))
            except ReleaseError as error:
                if self._installer == "uv" or error.cause == "space":
                    raise
                self._no_uv = str(error)
                return "pip", pip
        return "uv", [str(uv), "pip"]

    def _check_overrides(self, tool: str) -> None:
        """Before the first of many gigabytes is installed."""
        for step in self.canonical["steps"]:
            if tool == "pip" and step["overrides"]:
                why = "sglang_installer is pip" if self._installer == "pip" else "uv could not be installed"
                raise ReleaseError(
                    f"step {step['name']} overrides {', '.join(step['overrides'])}, which pip cannot do, and {why}; "
                    "expected uv. Make it available from the same package source and set sglang_installer to auto or uv."
                    + (f"\n{self._no_uv}" if self._no_uv else "")
                )

    def _install_step(self, tool: tuple[str, list[str]], step: Mapping[str, Any], damaged: Sequence[str]) -> None:
        """Install a step; one that comes from git only where its package is missing or another one."""
        (git,) = [entry.get("git") for entry in self.canonical["steps"] if entry["name"] == step["name"]]
        if git is None:
            self._install(tool, step)
            return
        package = _normal(git["package"])
        tree = self._checkout(str(step["name"]), git)
        expected = (self._manifest or {}).get("packages", {}).get(package)
        source = [f"{git['package']} @ {(tree / git['subdirectory']).as_uri()}"]
        if self._manifest and package not in damaged and installed_packages(self.venv).get(package) == expected:
            source = []
        if lines := [*source, *(step.get("requirements") or [])]:
            version = {"SETUPTOOLS_SCM_PRETEND_VERSION": git["version"]} if git["version"] else {}
            self._install(tool, {**step, "requirements": lines}, version, package if source else "")

    def _checkout(self, name: str, git: Mapping[str, str]) -> Path:
        """The patched tree of a step at its commit: fetched, or what an earlier run fetched, without what was changed."""
        folder = self.path / "source" / name
        purpose = f"fetch {git['ref']} from {git['url']} for the step '{name}'"
        run = ["git", "-c", "core.autocrlf=false", "-c", "advice.detachedHead=false", "-C", str(folder)]
        quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        if (folder / ".git" / "HEAD").is_file():
            self._run([*run, "checkout", "--quiet", "--force", "HEAD"], purpose, quiet)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._run([*run, "init", "--quiet"], purpose, quiet)
            fetch = ["fetch", "--quiet", "--depth=1", "--no-tags", "--end-of-options", git["url"], git["ref"]]
            self._run([*run, *fetch], purpose, quiet)
            self._run([*run, "checkout", "--quiet", "--detach", "FETCH_HEAD"], purpose, quiet)
        self._run([*run, "clean", "--quiet", "-ffdx"], purpose, quiet)
        commit = self._run([*run, "rev-parse", "HEAD"], purpose, quiet).strip()
        if not commit.startswith(git["commit"]):
            raise ReleaseError(
                f"{git['ref']} of {git['url']} is commit {commit}, expected {git['commit']} (git.commit of the step "
                f"{name}). Nothing was installed from it. The ref was moved or the variable is wrong: look what changed "
                "upstream before you correct it."
            )
        self._commits[name] = commit
        for item in self._patches:
            base = folder / item.series.layouts["git"]
            if (base / item.series.package / "__init__.py").is_file():
                self._patch(item, folder, "git")
        return folder

    def _patch(self, item: Patching, root: Path, layout: str) -> tuple[Tree, list[str]]:
        """Make a tree carry exactly the wanted patches; the tree, and the files that changed."""
        try:
            tree = Tree(item.series, root, layout)
            changes = tree.change("applied", item.ids)
            tree.write(changes)
        except PatchError as error:
            raise ReleaseError(f"could not patch {item.series.distribution} of release {self.id}: {error}") from error
        return tree, [str(tree.base / path) for path in changes]

    def _patch_installed(self) -> dict[str, dict[str, Any]]:
        """Patch the installed packages; the manifest's ``files``: every touched file with its checksum."""
        files: dict[str, dict[str, Any]] = {}
        changed: list[str] = []
        for item in self._patches:
            (site,) = sorted(self.venv.glob("lib/python3*/site-packages"))[:1]
            tree, written = self._patch(item, site, "site-packages")
            changed += written
            for path in tree.series.files:
                content = tree.content[path]
                if content is not None and tree.series.touching(path) & set(item.ids):
                    carried = [name for name in item.ids if name in (tree.carried[path] or ())]
                    files[path] = {"package": item.package, "sha256": sha256_of(content), "patches": carried}
        for source in map(Path, changed):
            for compiled in source.parent.glob(f"__pycache__/{source.stem}.*.pyc"):
                compiled.unlink()
        return files

    def _install(
        self,
        tool: tuple[str, list[str]],
        step: Mapping[str, Any],
        extra: Mapping[str, str] | None = None,
        rebuilt: str = "",
    ) -> None:
        kind, command = tool
        requirements = self.path / f"requirements-{step['name']}.txt"
        lines = _joined(step["requirements"])
        requirements.write_text("\n".join(lines) + "\n")
        arguments = [*command, "install", "--quiet", *self._source_arguments(), f"--requirement={requirements}"]
        if step.get("no_deps"):
            arguments.append("--no-deps")
        if all("--hash=" in line for line in lines):
            # A lock file: what it does not name must not come.
            arguments.append("--require-hashes")
        overrides = _joined(step.get("overrides") or [])
        environment = {**self._source_environment(step, kind.upper()), **(extra or {})}
        if kind == "uv":
            arguments.append(f"--python={self.python}")
            # Several indexes may hold the same name: take the best version of all, as pip does.
            environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
            # Another tool's configuration must not decide what is in a release.
            environment["UV_NO_CONFIG"] = "1"
            if rebuilt:
                arguments += [f"--refresh-package={rebuilt}", f"--reinstall-package={rebuilt}"]
            if overrides:
                file = self.path / f"overrides-{step['name']}.txt"
                file.write_text("\n".join(overrides) + "\n")
                arguments.append(f"--override={file}")
        self._run(arguments, f"install the step '{step['name']}'", environment)

    def _compile(self, patched: Mapping[str, Mapping[str, Any]]) -> None:
        """Bytecode for every module: the service's user cannot write here, and would compile everything at each start.

        Compiling is most of the time of a build; what any release compiled before is a link into the store.
        """
        # Inside of a module's archive there is no file to name, and the interpreter of the release must run it.
        source = inspect.getsource(bytecode)
        checksums = {**_recorded_files(self.venv), **{path: entry["sha256"] for path, entry in patched.items()}}
        known = self.path / "known.json"
        known.write_text(json.dumps({path: sum for path, sum in checksums.items() if path.endswith(".py")}))
        for site in self.venv.glob("lib/python3*/site-packages"):
            command = [str(self.python), "-I", "-S", "-c", source, str(self.bytecode), str(site), str(known)]
            self._run(command, "compile the modules", {})
        known.unlink()

    # -- repair ----------------------------------------------------------------------------------------------------

    def _drift(self) -> list[dict[str, str | None]]:
        return drift(self._manifest.get("packages", {}), installed_packages(self.venv)) if self._manifest else []

    @staticmethod
    def _damaged(found: Sequence[Mapping[str, str | None]]) -> list[str]:
        """The packages with changed files: they are installed anew. pip and uv cannot do that to themselves."""
        return sorted({str(entry["package"]) for entry in found if "file" in entry} - {"pip", "uv"})

    def _uninstall(self, tool: tuple[str, list[str]], names: Sequence[str]) -> None:
        if not names:
            return
        kind, command = tool
        if kind == "uv":
            # A file that was edited in place is a link to uv's cache, where the next installation would find it again.
            self._run([command[0], "cache", "clean", "--quiet", *names], "clean the cache", {})
        where = [f"--python={self.python}"] if kind == "uv" else ["--yes"]
        self._run([*command, "uninstall", "--quiet", *where, *names], "remove changed packages", {})

    def _restore_pip(self) -> None:
        """pip comes with the interpreter, not from the sources, which may not have it."""
        for site in self.venv.glob("lib/python3*/site-packages"):
            for folder in [site / "pip", *site.glob("pip-*.dist-info")]:
                shutil.rmtree(folder, ignore_errors=True)
        self._run([str(self.python), "-m", "ensurepip", "--default-pip"], "restore pip", {})

    def _remove_uv(self) -> None:
        """What is left of it; the bootstrap installs it again."""
        self._run([str(self.python), "-m", "pip", "uninstall", "--quiet", "--yes", "uv"], "remove uv", {})
        (self.venv / "bin" / "uv").unlink(missing_ok=True)

    def _remove_extraneous(self, tool: tuple[str, list[str]]) -> None:
        kind, command = tool
        extra = [str(entry["package"]) for entry in self._drift() if entry["expected"] is None]
        if extra:
            where = [f"--python={self.python}"] if kind == "uv" else ["--yes"]
            self._run([*command, "uninstall", "--quiet", *where, *extra], "remove added packages", {})

    def _put_back(self, tool: tuple[str, list[str]]) -> None:
        """The steps restore what they pin; what came with that as a dependency is restored from the manifest."""
        lines = [f"{entry['package']}=={entry['expected']}" for entry in self._drift() if entry["expected"]]
        if lines:
            indexes: list[str] = []
            for step in [self.spec, *self.spec["steps"]]:
                indexes += [step.get("index_url") or "", *(step.get("extra_index_urls") or [])]
            extra = [str(url) for url in dict.fromkeys(indexes) if url]
            step = {"name": "repair", "requirements": lines, "no_deps": True, "extra_index_urls": extra}
            self._install(tool, step)
        left = self._drift()
        if left:
            listed = ", ".join(f"{e['package']} {e['found'] or 'absent'} ({e['expected'] or 'absent'})" for e in left)
            raise ReleaseError(
                f"after its repair {self.path} still holds other packages than its manifest (expected in brackets): "
                f"{listed}. Make the sources hold them, or stop what serves from it, delete the folder and run again."
            )

    def _finish(self, tool: str, files: Mapping[str, Any]) -> dict[str, Any]:
        checked = self.check()
        manifest = {
            "id": self.id,
            "spec": self.canonical,
            "installer": tool,
            "built_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "packages": installed_packages(self.venv),
            "records": _records(self.venv),
            "patches": [name for item in self._patches for name in item.ids],
            "files": dict(files),
            "commits": {**(self._manifest or {}).get("commits", {}), **self._commits},
            **checked,
        }
        temporary = self.path / (MANIFEST + ".new")
        temporary.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        temporary.replace(self.path / MANIFEST)
        return manifest

    # -- old releases ----------------------------------------------------------------------------------------------

    def kept(self) -> dict[str, str]:
        """Ids of releases that must stay, each with the reason."""
        folder = re.escape(str(self.releases)) + "|" + re.escape(str(self.releases.resolve()))
        named = re.compile(f"(?:{folder})/([0-9a-f]{{{ID_LENGTH}}})(?![0-9a-f])".encode())
        found: dict[str, str] = {}
        for unit in self._units.glob("*.service"):
            with contextlib.suppress(OSError):
                found.update({name.decode(): f"named in {unit}" for name in named.findall(unit.read_bytes())})
        for process in self._proc.glob("[0-9]*"):
            for part in ("cmdline", "environ", "maps"):
                with contextlib.suppress(OSError):
                    found.update(
                        {
                            name.decode(): f"used by process {process.name}"
                            for name in named.findall((process / part).read_bytes())
                        }
                    )
        for state_dir in self._state_dirs:
            # Whichever of them is put back is started from its own release, and nothing is built then.
            for deployment, plan in Records(state_dir).plans().items():
                names = named.findall(json.dumps(plan.get("command")).encode())
                found.update({name.decode(): f"of deployment {deployment} on record in {state_dir}" for name in names})
        for link in LINKS:
            target = (self.root / link).resolve()
            if target.parent == self.releases.resolve():
                found[target.name] = f"target of {self.root / link}"
        found[self.id] = "wanted"
        return found

    def _prune(self) -> None:
        """Remove all but the newest ``keep`` releases and the rests of interrupted builds."""
        if self._keep is None:
            return
        stay = self.kept()
        folders = [path for path in self.releases.glob("*") if re.fullmatch(f"[0-9a-f]{{{ID_LENGTH}}}", path.name)]
        times: dict[str, str] = {}
        for path in folders:
            if (manifest := read_manifest(path)) is not None:
                times[path.name] = str(manifest.get("built_at") or "")
        others = sorted((name for name in times if name != self.id), key=lambda name: times[name], reverse=True)
        stay.update(dict.fromkeys(others[: self._keep - 1], "recent"))
        for path in folders:
            if path.name not in stay:
                # Without its manifest a folder is the rest of something, also when this is interrupted.
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path)
                for cache in self._caches:
                    shutil.rmtree(cache / path.name, ignore_errors=True)
                self.pruned.append(path.name)
        bytecode.prune(str(self.bytecode))

    def check(self) -> dict[str, Any]:
        """Import what must import and compare torch's CUDA; ``{python_version, torch_cuda}``. Raises ReleaseError."""
        imports = list(dict.fromkeys([*self._imports, *([] if self._torch_cuda is None else ["torch"])]))
        # What an import starts and leaves behind must not hold the lock.
        lock, self._lock = self._lock, None
        command = [str(self.python), "-c", _CHECK, json.dumps(imports)]
        done = self._run(command, "check the imports", self._environment)
        self._lock = lock
        lines = [line for line in done.splitlines() if line.startswith("CHECK")]
        if not lines:
            raise ReleaseError(f"the import check of {self.path} printed no result:\n{_scrub(done)[-1500:]}")
        found: dict[str, Any] = json.loads(lines[-1].removeprefix("CHECK"))
        broken = {name: error for name, error in found.pop("imports").items() if error}
        if broken:
            listed = "; ".join(f"{name}: {error}" for name, error in broken.items())
            raise ReleaseError(
                f"{len(broken)} of {len(imports)} modules do not import in {self.path}: {listed}. "
                f"Expected all to import. {_import_advice(listed)}"
            )
        if self._torch_cuda is not None and (found["torch_cuda"] or "") != self._torch_cuda:
            raise ReleaseError(
                f"torch in {self.path} was built for CUDA {found['torch_cuda'] or 'none'}, expected "
                f"{self._torch_cuda or 'none'} (sglang_torch_cuda). A later step may have replaced it: look at the "
                "order and the index of the steps in sglang_steps."
            )
        return found

    def _failure(self, what: str, cause: str) -> ReleaseError:
        after = (
            "The release keeps its manifest; the next run repairs it again"
            if self._manifest
            else ("The release that serves is untouched; the next run starts over")
        )
        remedy = _REMEDIES.get(cause, "")
        if cause == "space":
            try:
                free = f"{shutil.disk_usage(self.releases).free / 1e9:.1f} GB"
            except OSError:
                free = "nothing"
            remedy = (
                f"The file system of {self.releases} or of a cache is full ({free} free there), expected room for a "
                "release. Remove something, raise sglang_min_free_gb, and run again. "
            )
        head, separator, said = what.partition("\n")
        return ReleaseError(f"{head}. {after}. {remedy}{'What it said:' if said else ''}{separator}{said}", cause)

    def _run(self, command: Sequence[str], purpose: str, environment: Mapping[str, str]) -> str:
        # Neither this process's settings of pip, uv and Python nor its folder may decide what a release holds.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME")
            and (not name.startswith(("PIP_", "UV_", "GIT_")) or _TRANSPORT.fullmatch(name))
        }
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                cwd="/",
                env={**inherited, "LC_ALL": "C.UTF-8", **environment},
                stdin=subprocess.DEVNULL,
                pass_fds=[] if self._lock is None else [self._lock],
            )
        except OSError as error:
            raise ReleaseError(f"could not {purpose} of release {self.id}: {error}") from error
        if done.returncode != 0:
            # First the passwords, then the cut: half an address would not be recognised.
            output = _scrub(done.stderr.strip() or done.stdout.strip())[-2500:]
            cause = next((name for name, words in _CAUSES if re.search(words, done.stderr + done.stdout)), "")
            what = f"could not {purpose} of release {self.id} (status {done.returncode})"
            raise self._failure(f"{what}\n{output}", cause)
        return done.stdout


def _import_advice(errors: str) -> str:
    libraries = re.findall(r"\b(lib[\w.+-]+): cannot open shared object file", errors)
    # Those of CUDA come with torch, as packages of the environment.
    foreign = sorted(
        {name for name in libraries if not name.startswith(("libcu", "libnv", "libnccl", "libtorch", "libc10"))}
    )
    if foreign:
        return f"{', '.join(foreign)} comes from the distribution: add its package to sglang_system_packages."
    return "Look at the pins in sglang_steps, their order and their indexes."


def _scrub(text: str) -> str:
    return re.sub(r"(\w+://)[^/\s]+@", r"\1***@", text)
