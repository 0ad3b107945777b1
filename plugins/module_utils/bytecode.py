"""Bytecode of Python files by their content: what any release compiled once is linked into the next one.

A store is a folder that the builder of releases owns, one shelf for each exact interpreter. An entry is named by the
sha256 of the source and by its own sha256, so one that was damaged is noticed and compiled again. The entries are
checked-hash files (PEP 552): Python holds each against its source at import, so an entry can never stand for another
text, and a file that is edited by hand takes effect. Where no release uses an entry any more, its link count says so.

Runs inside of the release's own interpreter (``python -c <this file> STORE SITE KNOWN``): standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import py_compile
import re
import shutil
import stat
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence

_ENTRY = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{64})\.pyc")
# More processes than this wait for the file system.
MAX_PROCESSES = 16


def shelf_name() -> str:
    """The exact interpreter: bytecode of another one is no use, whatever its magic number says."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    return f"{sys.implementation.cache_tag}-{version}-{importlib.util.MAGIC_NUMBER.hex()}"


def own_folder(path: str) -> None:
    """Make ``path`` a folder that nobody else can write; what is there and is none is removed."""
    with contextlib.suppress(FileNotFoundError):
        seen = os.lstat(path)
        if not stat.S_ISDIR(seen.st_mode):
            os.unlink(path)
        elif seen.st_uid != os.geteuid() or seen.st_mode & 0o022:
            shutil.rmtree(path)
    os.makedirs(path, mode=0o755, exist_ok=True)
    os.chmod(path, 0o755)


def entries(shelf: str) -> dict[str, str]:
    """The entry of each source, by the sha256 of the source."""
    return {match[1]: match[0] for match in map(_ENTRY.fullmatch, os.listdir(shelf)) if match}


def without_bytecode(site: str) -> Iterator[str]:
    """Every Python file below ``site`` that has no bytecode of this interpreter, relative."""
    tag = sys.implementation.cache_tag
    for folder, folders, names in os.walk(site):
        compiled: set[str] = set()
        if "__pycache__" in folders:
            folders.remove("__pycache__")
            compiled = set(os.listdir(f"{folder}/__pycache__"))
        place = os.path.relpath(folder, site)
        for name in names:
            if name.endswith(".py") and f"{name[:-3]}.{tag}.pyc" not in compiled:
                yield os.path.normpath(f"{place}/{name}")


def _sound(path: str, digest: str) -> bool:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest() == digest
    except OSError:
        return False


def _put(entry: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        os.link(entry, target)
    except FileExistsError:
        pass
    except OSError:
        # Another file system, or more links than this one allows.
        shutil.copyfile(entry, target + ".new")
        os.chmod(target + ".new", 0o644)
        os.replace(target + ".new", target)


class Shelf:
    """The entries of one interpreter, for one run over one release."""

    def __init__(self, folder: str, known: Mapping[str, str]) -> None:
        self.folder = folder
        self.known = known
        self.entries = entries(folder)
        self.good: set[str] = set()

    def take(self, source: str) -> str | None:
        """The sound entry of a source (its sha256); one that is damaged goes."""
        name = self.entries.get(source)
        if name is None:
            return None
        path = f"{self.folder}/{name}"
        if name not in self.good and not _sound(path, name.split(".")[1]):
            with contextlib.suppress(OSError):
                os.unlink(path)
            del self.entries[source]
            return None
        self.good.add(name)
        return path

    def make(self, site: str, place: str) -> str | None:
        """Compile a file into an entry; None for one that is no valid Python, as templates in packages are."""
        path, made = f"{site}/{place}", f"{self.folder}/{os.getpid()}.new"
        try:
            with open(path, "rb") as file:
                source = hashlib.sha256(file.read()).hexdigest()
            if found := self.take(source):
                return found
            # Python puts the real path in at import; here it would tie the entry to one release.
            mode = py_compile.PycInvalidationMode.CHECKED_HASH
            py_compile.compile(path, made, f"site-packages/{place}", doraise=True, invalidation_mode=mode)
        except (py_compile.PyCompileError, SyntaxError, ValueError, RecursionError, OverflowError):
            return None
        with open(made, "rb") as file:
            name = f"{source}.{hashlib.sha256(file.read()).hexdigest()}.pyc"
        os.chmod(made, 0o644)
        os.replace(made, f"{self.folder}/{name}")
        self.entries[source] = name
        self.good.add(name)
        return f"{self.folder}/{name}"

    def fill(self, site: str, places: Sequence[str]) -> int:
        """Give each file its bytecode; the number of those that were not on the shelf."""
        compiled = 0
        for place in places:
            entry = self.take(self.known.get(place, ""))
            if entry is None:
                entry = self.make(site, place)
                compiled += 1
            if entry:
                _put(entry, importlib.util.cache_from_source(f"{site}/{place}", optimization=""))
        return compiled


def fill(store: str, site: str, known: Mapping[str, str], processes: int) -> dict[str, int]:
    """Bytecode for every file below ``site``: ``{files, compiled}``.

    ``known`` are the sha256 of files as their packages record them, so that nothing needs reading; a wrong one costs a
    compilation at each import and no more.
    """
    shelf_folder = f"{store}/{shelf_name()}"
    own_folder(store)
    own_folder(shelf_folder)
    places = sorted(without_bytecode(site))
    shelf = Shelf(shelf_folder, known)
    children = []
    for number in range(processes):
        part = places[number::processes]
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                os.write(write, str(shelf.fill(site, part)).encode())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(write)
        children.append((pid, read))
    compiled, failed = 0, 0
    for pid, read in children:
        with open(read, "rb") as pipe:
            compiled += int(pipe.read() or b"0")
        failed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    if failed:
        raise SystemExit(f"{failed} of {processes} processes that compile failed")
    return {"files": len(places), "compiled": compiled}


def prune(store: str) -> int:
    """Remove what no release uses; the number of removed entries. Only while nothing is built."""
    removed = 0
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for shelf in os.listdir(store):
            folder = f"{store}/{shelf}"
            for name in os.listdir(folder):
                if os.lstat(f"{folder}/{name}").st_nlink == 1 or not _ENTRY.fullmatch(name):
                    os.unlink(f"{folder}/{name}")
                    removed += 1
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    return removed


def main(argv: Sequence[str] | None = None) -> int:
    """``STORE SITE KNOWN``: fill ``SITE``; ``KNOWN`` is a file with the known checksums."""
    store, site, known = list(sys.argv[1:] if argv is None else argv)
    # Also to be found in old code that is fine: an invalid escape.
    warnings.simplefilter("ignore")
    with open(known, encoding="utf-8") as file:
        checksums = json.load(file)
    processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    sys.stdout.write(json.dumps(fill(store, site, checksums, processes)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
