# Copyright (c) The gpuserve.sglang authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""One repository of a vendor: exactly one entry for it, no key of it trusted for anything else, holds as wanted.

The work of the module C(apt_guard): reads the host's files below a root, says what is to change, and changes it.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuserve.sglang.plugins.module_utils import apt_sources
from ansible_collections.gpuserve.sglang.plugins.module_utils.cuda import matches

#: Folders of keys, and whether APT trusts what is in them for every repository.
KEY_FOLDERS = {"/etc/apt/trusted.gpg.d": True, "/etc/apt/keyrings": False, "/usr/share/keyrings": False}


class GuardError(Exception):
    """What was found, what was expected and what to do."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for. C(pattern) fits every address under which the vendor's packages are known."""

    uri: str = ""
    keyring: str = ""
    pattern: str = ""
    retired_keys: tuple[str, ...] = ()
    hold: tuple[str, ...] = ()
    unhold: tuple[str, ...] = ()
    report: tuple[str, ...] = ("*",)
    root: str = "/"


def _at(root: str, path: str) -> str:
    return os.path.join(root, path.lstrip("/"))


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as handle:
            return handle.read()
    except OSError:
        return None


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")


def dpkg_status(root: str) -> dict[str, dict[str, Any]]:
    """Packages from dpkg's own file: name to C(version), C(hold) and whether it is C(installed) or only its
    configuration is left. Of several architectures the last."""
    text = _text(_read(_at(root, "/var/lib/dpkg/status")))
    found: dict[str, dict[str, Any]] = {}
    for paragraph in text.split("\n\n"):
        name = re.search(r"^Package: (\S+)", paragraph, re.MULTILINE)
        status = re.search(r"^Status: (\S+) (\S+) (\S+)$", paragraph, re.MULTILINE)
        version = re.search(r"^Version: (\S+)$", paragraph, re.MULTILINE)
        if name and status and version and status.group(3) in ("installed", "config-files"):
            found[name.group(1)] = {
                "version": version.group(1),
                "hold": status.group(1) == "hold",
                "installed": status.group(3) == "installed",
            }
    return found


def owned_files(root: str) -> set[str]:
    """Every path that a package put on disk, as far as APT's folders are concerned."""
    owned: set[str] = set()
    for listing in glob.glob(_at(root, "/var/lib/dpkg/info/*.list")):
        text = _text(_read(listing))
        owned.update(line for line in text.splitlines() if line.startswith(("/etc/apt/", "/usr/share/keyrings/")))
    return owned


def source_files(root: str) -> list[str]:
    """APT's source files, as paths of the host."""
    names = ["/etc/apt/sources.list"]
    folder = "/etc/apt/sources.list.d"
    for style in ("list", "sources"):
        names += sorted(f"{folder}/{os.path.basename(path)}" for path in glob.glob(_at(root, f"{folder}/*.{style}")))
    return [name for name in names if os.path.isfile(_at(root, name))]


def changed_sources(wanted: Wanted, owned: Iterable[str]) -> tuple[dict[str, str | None], list[str], bool]:
    """(path to its new text, None for a file that goes; entries that go, in words; whether the one entry exists)."""
    pattern = re.compile(wanted.pattern)
    uri = apt_sources.normal_uri(wanted.uri)
    texts = {path: _text(_read(_at(wanted.root, path))) for path in source_files(wanted.root)}
    every = [entry for path, text in texts.items() for entry in apt_sources.entries(path, text)]
    good = [
        entry
        for entry in every
        if apt_sources.normal_uri(entry.uri) == uri and (not wanted.keyring or entry.signed_by == wanted.keyring)
    ]
    # The entry that a package brought comes back with that package: that is the one to keep.
    good.sort(key=lambda entry: (entry.path not in set(owned), entry.path, entry.line))
    kept = good[0] if good else None
    changes: dict[str, str | None] = {}
    gone: list[str] = []
    for path, text in texts.items():
        new, removed = apt_sources.without(
            path,
            text,
            lambda entry: entry != kept and bool(pattern.search(entry.uri) or apt_sources.normal_uri(entry.uri) == uri),
        )
        if removed:
            drop = apt_sources.is_empty(path, new) and path not in owned and path != "/etc/apt/sources.list"
            changes[path] = None if drop else new
            gone += [f"{it.path}:{it.line} {it.uri} ({it.signed_by or 'no Signed-By'})" for it in removed]
    return changes, gone, kept is not None


def changed_keys(wanted: Wanted, owned: Iterable[str], notes: list[str]) -> tuple[dict[str, bytes | None], list[str]]:
    """(path to its new bytes, None for a file that goes; the keys that go, in words).

    The vendor's present keys belong in its keyring alone: where APT trusts a key for every repository they go, as the
    retired ones do everywhere.
    """
    present: set[str] = set()
    if wanted.keyring:
        try:
            present = {name for name, _packets in apt_sources.keys(_read(_at(wanted.root, wanted.keyring)) or b"")}
        except ValueError as exc:
            notes.append(f"{wanted.keyring}: {exc}")
    retired = {name.upper().replace(" ", "") for name in wanted.retired_keys}
    changes: dict[str, bytes | None] = {}
    gone: list[str] = []
    everywhere = [("/etc/apt/trusted.gpg", True)]
    for folder, global_trust in KEY_FOLDERS.items():
        everywhere += [
            (f"{folder}/{os.path.basename(path)}", global_trust)
            for path in sorted(glob.glob(_at(wanted.root, f"{folder}/*")))
            if path.endswith((".gpg", ".asc", ".pgp", ".key"))
        ]
    for path, global_trust in everywhere:
        data = _read(_at(wanted.root, path))
        if not data or path == wanted.keyring or path in owned:
            continue
        unwanted = retired | (present if global_trust else set())
        try:
            rest, removed = apt_sources.without_keys(data, unwanted)
        except ValueError as exc:
            notes.append(f"{path}: {exc}; left alone")
            continue
        if removed:
            if rest and path.endswith(".asc"):
                notes.append(f"{path}: holds {', '.join(removed)} beside other keys; left alone, split it by hand")
                continue
            changes[path] = rest or None
            gone += [f"{path} {name}" for name in removed]
    return changes, gone


def write(path: str, content: bytes | None) -> None:
    """Replace a file in one step, mode kept, or remove it."""
    if content is None:
        os.unlink(path)
        return
    mode = os.stat(path).st_mode & 0o777 if os.path.exists(path) else 0o644
    handle, name = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".gpuserve-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def selections(
    packages: Mapping[str, Mapping[str, Any]], hold: Sequence[str], unhold: Sequence[str]
) -> dict[str, bool]:
    """Packages whose hold is to change, and to what. C(hold) is the stronger one."""
    found = {}
    for name, entry in packages.items():
        to_hold = matches(name, hold)
        if to_hold and not entry["hold"]:
            found[name] = True
        elif not to_hold and entry["hold"] and matches(name, unhold):
            found[name] = False
    return dict(sorted(found.items()))


def set_selections(chosen: Mapping[str, bool]) -> None:
    """Tell dpkg."""
    lines = "".join(f"{name} {'hold' if held else 'install'}\n" for name, held in chosen.items())
    done = subprocess.run(["dpkg", "--set-selections"], input=lines, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise GuardError(
            f"`dpkg --set-selections` ended with status {done.returncode}, expected 0: {done.stderr.strip()}. "
            f"Look whether another dpkg is running."
        )


def apply(wanted: Wanted, check: bool) -> dict[str, Any]:
    """Read, compare, and change unless C(check). Always the same keys."""
    notes: list[str] = []
    known = dpkg_status(wanted.root)
    packages = {name: entry for name, entry in known.items() if entry["installed"]}
    files: dict[str, bytes | None] = {}
    entries_gone: list[str] = []
    keys_gone: list[str] = []
    configured = False
    added: list[str] = []
    if wanted.uri:
        owned = owned_files(wanted.root)
        sources, entries_gone, configured = changed_sources(wanted, owned)
        files.update({path: None if text is None else text.encode() for path, text in sources.items()})
        # Before the keyring is there its package has still to come, and may bring the entry.
        if not configured and (not wanted.keyring or os.path.exists(_at(wanted.root, wanted.keyring))):
            option = f"[signed-by={wanted.keyring}] " if wanted.keyring else ""
            path = "/etc/apt/sources.list.d/gpuserve-cuda.list"
            line = f"deb {option}{wanted.uri} /\n"
            files[path] = line.encode()
            added = [line.strip()]
        keys, keys_gone = changed_keys(wanted, owned, notes)
        files.update(keys)
    chosen = selections(packages, wanted.hold, wanted.unhold)
    diffs = []
    for path, content in files.items():
        old = _read(_at(wanted.root, path))
        text = path.startswith("/etc/apt/sources")
        diffs.append(
            {
                "before_header": path,
                "after_header": path if content is not None else "(removed)",
                "before": _text(old) if text else f"{len(old or b'')} bytes of keys\n",
                "after": _text(content) if text else f"{len(content or b'')} bytes of keys\n",
            }
        )
    if not check:
        for path, content in files.items():
            write(_at(wanted.root, path), content)
        if chosen:
            set_selections(chosen)
    return {
        "changed": bool(files or chosen),
        "sources_changed": any(path.startswith("/etc/apt/sources") for path in files),
        "configured": configured,
        "added": added,
        "entries_removed": entries_gone,
        "keys_removed": keys_gone,
        "held": [name for name, held in chosen.items() if held],
        "released": [name for name, held in chosen.items() if not held],
        "packages": {
            name: entry["version"] for name, entry in sorted(packages.items()) if matches(name, wanted.report)
        },
        "residual": [name for name in sorted(set(known) - set(packages)) if matches(name, wanted.report)],
        "diff": diffs,
        "notes": notes,
    }
