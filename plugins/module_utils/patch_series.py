"""Patches as data: what a series of patches makes of a package, and how to get there and back.

A series belongs to one version of one package. Every touched file is known by its checksum in each combination of the
patches that touch it, so that a file's checksum says which patches it carries; anything else is drift and is refused
before anything is written. ``git apply`` does the work on copies in an empty folder, far from any repository (inside
one it would silently skip files that the repository does not know). Only when every copy has the checksum that the
series promises are the files replaced, each by a rename, so that a package manager's hard-linked cache keeps its own.

Standard library and git only: it runs on the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

APPLIED, PRISTINE, PARTLY, DRIFTED, SUPERSEDED = "applied", "pristine", "partly_applied", "drifted", "superseded"
LAYOUTS = ("git", "source", "site-packages")
ID = re.compile(r"[a-z0-9][a-z0-9-]*\Z")
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@(.*)$")


class PatchError(Exception):
    """Says what was found, what was expected and what to do."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What a patch makes of a file that carries ``after``, the earlier patches that touch it too."""

    after: frozenset[str]
    expected: str
    resulting: str


@dataclasses.dataclass(frozen=True)
class Patch:
    """One patch: its text, where it comes from and what it does to which file."""

    id: str
    file: str
    title: str
    text: str
    requires: tuple[str, ...]
    upstream: str
    fixed_in: str | None
    files: Mapping[str, tuple[Step, ...]]


@dataclasses.dataclass(frozen=True)
class Series:
    """The patches of one version of one package, in their order."""

    package: str
    distribution: str
    version: str
    strip: int
    layouts: Mapping[str, str]
    patches: tuple[Patch, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of all patches, in their order."""
        return tuple(patch.id for patch in self.patches)

    @property
    def files(self) -> tuple[str, ...]:
        """Every touched file, below the folder that holds the package."""
        return tuple(sorted({path for patch in self.patches for path in patch.files}))

    def touching(self, path: str) -> frozenset[str]:
        """The ids of the patches that touch a file."""
        return frozenset(patch.id for patch in self.patches if path in patch.files)

    def known(self, path: str) -> dict[str, frozenset[str]]:
        """Which patches a file carries, by its checksum."""
        found: dict[str, frozenset[str]] = {}
        for patch in self.patches:
            for step in patch.files.get(path, ()):
                found[step.expected] = step.after
                found[step.resulting] = step.after | {patch.id}
        return found

    def checksum(self, path: str, carried: frozenset[str]) -> str:
        """The checksum of a file that carries these patches."""
        return {patches: sha256 for sha256, patches in self.known(path).items()}[carried]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PatchError(f"{where} is {value!r}, expected a mapping. Correct series.yml.")
    return value


def _text(data: Mapping[str, Any], key: str, where: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise PatchError(f"{where} has {key} {value!r}, expected text in quotes. Correct series.yml.")
    return value


def _inside(path: str, where: str) -> str:
    """A relative path that stays below its folder."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or str(pure) != path:
        raise PatchError(f"{where} names the path {path!r}, expected a plain relative one. Correct series.yml.")
    return path


def patched_files(text: str, strip: int) -> list[str]:
    """The files that a patch names, without the first ``strip`` parts of their names.

    Raises PatchError for renames, creations and deletions.
    """
    files: list[str] = []
    for line in text.splitlines():
        if line.startswith("diff --git "):
            names = line.removeprefix("diff --git ").split(" ")
            paths = [name.split("/", strip)[-1] for name in names]
            if len(names) != 2 or paths[0] != paths[1] or any(name.count("/") < strip for name in names):
                raise PatchError(
                    f"the patch changes {line.removeprefix('diff --git ')!r}, expected one file that keeps its name, "
                    "at least "
                    f"{strip} folders deep. Correct the patch or the strip level."
                )
            files.append(_inside(paths[0], "the patch"))
        elif re.match(r"(new|deleted) file mode |rename |copy |GIT binary patch", line):
            raise PatchError(f"the patch holds {line!r}, expected only changes of existing text files. Rewrite it.")
    return files


def _steps(entries: Any, where: str) -> tuple[Step, ...]:
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise PatchError(f"{where} is {entries!r}, expected a list. Run tools/patch_checksums.py.")
    steps = []
    for entry in entries:
        data = _mapping(entry, where)
        after = data.get("after") or []
        sums = [str(data.get(key) or "") for key in ("expected", "resulting")]
        if not isinstance(after, Sequence) or isinstance(after, str) or not all(SHA256.match(item) for item in sums):
            raise PatchError(
                f"{where} holds {dict(data)!r}, expected after, expected and resulting (sha256). Run "
                "tools/patch_checksums.py."
            )
        steps.append(Step(frozenset(map(str, after)), sums[0], sums[1]))
    return tuple(steps)


def sha256_of(content: bytes) -> str:
    """The checksum of a content, as written in a series."""
    return hashlib.sha256(content).hexdigest()


def _patch(entry: Any, number: int, texts: Mapping[str, str], strip: int, checksums: Mapping[str, Any] | None) -> Patch:
    where = f"patches[{number}]"
    data = _mapping(entry, where)
    id = _text(data, "id", where)
    if not ID.match(id):
        raise PatchError(f"{where} has the id {id!r}, expected small letters, digits and hyphens. Correct series.yml.")
    file = _inside(_text(data, "file", id), id)
    text = texts.get(file)
    if text is None:
        raise PatchError(f"the patch file {file} of {id} is missing, expected it beside series.yml. Restore it.")
    touched = patched_files(text, strip)
    if not touched:
        raise PatchError(f"{file} changes no file, expected a patch in git's format. Restore it.")
    files: dict[str, tuple[Step, ...]] = dict.fromkeys(touched, ())
    if checksums is not None:
        own = _mapping(checksums.get(id), f"checksums.{id}")
        found = sha256_of(text.encode())
        if own.get("patch") != found:
            raise PatchError(
                f"the patch file {file} has sha256 {found}, series.yml expects {own.get('patch')}. Restore the file, "
                "or run "
                "tools/patch_checksums.py when the change is wanted."
            )
        steps = _mapping(own.get("files"), f"checksums.{id}.files")
        if set(steps) != set(touched):
            raise PatchError(
                f"{file} touches {', '.join(sorted(touched))}, series.yml has checksums for "
                f"{', '.join(sorted(steps))}. "
                "Run tools/patch_checksums.py."
            )
        files = {path: _steps(steps[path], f"checksums.{id}.files.{path}") for path in touched}
    upstream = _mapping(data.get("upstream") or {}, f"{id}.upstream")
    fixed_in = upstream.get("fixed_in")
    return Patch(
        id=id,
        file=file,
        title=_text(data, "title", id),
        text=text,
        requires=tuple(map(str, data.get("requires") or [])),
        upstream=str(upstream.get("ref") or ""),
        fixed_in=str(fixed_in) if fixed_in is not None else None,
        files=files,
    )


def load_series(data: Mapping[str, Any], texts: Mapping[str, str], checksums: bool = True) -> Series:
    """A series from the content of ``series.yml`` and the texts of its patch files, by name.

    Without ``checksums`` the steps of every file stay empty: for the tool that computes them, and for porting.
    Raises PatchError.
    """
    strip = data.get("strip")
    if not isinstance(strip, int) or isinstance(strip, bool) or strip < 1:
        raise PatchError(f"series.yml has strip {strip!r}, expected a number from 1. Correct it.")
    layouts = {str(key): str(value) for key, value in _mapping(data.get("layouts"), "layouts").items()}
    if set(layouts) != set(LAYOUTS):
        raise PatchError(
            f"layouts names {', '.join(sorted(layouts))}, expected {', '.join(LAYOUTS)}. Correct series.yml."
        )
    entries = data.get("patches")
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise PatchError(f"patches is {entries!r}, expected a list. Correct series.yml.")
    sums = _mapping(data.get("checksums"), "checksums") if checksums else None
    patches = tuple(_patch(entry, number, texts, strip, sums) for number, entry in enumerate(entries))
    series = Series(
        package=_inside(_text(data, "package", "series.yml"), "package"),
        distribution=_text(data, "distribution", "series.yml"),
        version=_text(data, "version", "series.yml"),
        strip=strip,
        layouts={name: folder if folder == "." else _inside(folder, "layouts") for name, folder in layouts.items()},
        patches=patches,
    )
    _check_order(series)
    if checksums:
        _check_steps(series)
    return series


def _check_order(series: Series) -> None:
    if len(set(series.ids)) != len(series.ids):
        raise PatchError(f"the ids {', '.join(series.ids)} are not unique. Correct series.yml.")
    for number, patch in enumerate(series.patches):
        unknown = [id for id in patch.requires if id not in series.ids[:number]]
        if unknown:
            raise PatchError(f"{patch.id} requires {', '.join(unknown)}, expected earlier patches. Correct series.yml.")


def subsets(items: Sequence[str]) -> Iterator[frozenset[str]]:
    """Every subset, the empty one first."""
    for bits in range(2 ** len(items)):
        yield frozenset(item for number, item in enumerate(items) if bits >> number & 1)


def _check_steps(series: Series) -> None:
    """Every combination of patches must have one checksum, and no two the same."""
    for path in series.files:
        touching = [id for id in series.ids if id in series.touching(path)]
        wanted = set(subsets(touching))
        known = series.known(path)
        if set(known.values()) != wanted or len(known) != len(wanted):
            raise PatchError(
                f"the checksums of {path} do not name each combination of {', '.join(touching)} once. Run "
                "tools/patch_checksums.py."
            )


def version_key(text: str) -> tuple[int, ...]:
    """A version as something to compare: ``0.5.10rc1`` < ``0.5.10+cu130`` = ``0.5.10`` < ``0.5.10.post1``."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    if not match:
        return ()
    release = tuple(map(int, match[0].split(".")))
    suffix = text[match.end() :].split("+")[0]
    numbers = [int(number) for number in re.findall(r"\d+", suffix)]
    kind = 0 if not suffix else 1 if "post" in suffix else -1
    return (*release, *[0] * (6 - len(release)), kind, *numbers)


def is_superseded(patch: Patch, version: str | None) -> bool:
    """Whether this version of the package carries the change already."""
    if version is None or patch.fixed_in is None or not version_key(version):
        return False
    return version_key(version) >= version_key(patch.fixed_in)


# --- the tree ---------------------------------------------------------------------------------------------------------


def find_layout(series: Series, root: Path, layout: str = "auto") -> str:
    """The layout of a folder: its upstream repository, an unpacked source, or site-packages. Raises PatchError."""

    def holds(name: str) -> bool:
        return (root / series.layouts[name] / series.package / "__init__.py").is_file()

    if layout != "auto":
        if not holds(layout):
            folder = root / series.layouts[layout] / series.package
            raise PatchError(
                f"{folder} is no package, expected one in the layout {layout}. Correct root, or use the layout auto."
            )
        return layout
    packaged = holds("site-packages")
    built = any((root / name).is_file() for name in ("pyproject.toml", "setup.py", "PKG-INFO"))
    if holds("git") and (series.layouts["git"] != "." or (root / ".git").exists()):
        return "git"
    if packaged:
        return "source" if built else "site-packages"
    wanted = " or ".join(sorted({str(Path(folder) / series.package) for folder in series.layouts.values()}))
    raise PatchError(f"{root} holds no package {series.package}, expected {wanted} in it. Correct root.")


def find_version(series: Series, root: Path, layout: str) -> str | None:
    """The version of the package in a folder, as its metadata tells; ``None`` when nothing does."""
    base = root / series.layouts[layout]
    name = re.sub(r"[-_.]+", "_", series.distribution).lower()
    for info in sorted(base.glob("*.dist-info")):
        if re.sub(r"[-_.]+", "_", info.name.split("-")[0]).lower() == name:
            return _metadata_version(info / "METADATA")
    if (base / "PKG-INFO").is_file():
        return _metadata_version(base / "PKG-INFO")
    for file in ("_version.py", "version.py", "_build_meta.py"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = (base / series.package / file).read_text(encoding="utf-8")
            if match := re.search(r"^(?:__version__|version)\b[^\n]*[\"'](\d[^\"']*)[\"']\s*$", text, re.MULTILINE):
                return match[1]
    return None


def _metadata_version(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if match := re.search(r"^Version: *(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            return match[1]
    return None


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PatchError(
            f"{path} cannot be read ({error.strerror}), expected a file. Look at its permissions."
        ) from error


# --- git --------------------------------------------------------------------------------------------------------------


class Stage:
    """An empty folder, outside of any repository, in which ``git apply`` works on copies."""

    def __init__(self, strip: int) -> None:
        self.strip = strip
        git = shutil.which("git")
        if git is None:
            raise PatchError("git was not found, expected it in PATH. Install the package git.")
        self._git = git
        self._folder = tempfile.TemporaryDirectory(prefix="patch-series-")
        self.path = Path(self._folder.name).resolve()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def put(self, path: str, content: bytes) -> None:
        """Write a copy."""
        target = self.path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def get(self, path: str) -> bytes:
        """Read a copy."""
        return (self.path / path).read_bytes()

    def apply(
        self, patch: Patch, paths: Iterable[str], reverse: bool = False, options: Sequence[str] = ()
    ) -> tuple[bool, str]:
        """Apply the parts of a patch that touch these files; whether it worked, and what git said."""
        # Another repository's variables or a user's configuration must not decide what happens here, and a temporary
        # folder inside a repository must not be taken for part of it.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment |= {
            "GIT_CEILING_DIRECTORIES": str(self.path.parent),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "LC_ALL": "C",
        }
        command = [self._git, "apply", f"-p{self.strip}", "--whitespace=nowarn", *options]
        command += ["--reverse"] if reverse else []
        command += [f"--include={path}" for path in paths]
        done = subprocess.run(
            [*command, "-"],
            input=patch.text.encode(),
            cwd=self.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return done.returncode == 0, done.stdout.decode(errors="replace")


# --- state and change -------------------------------------------------------------------------------------------------


class Tree:
    """A package in a folder, seen through a series. Reading it changes nothing."""

    def __init__(self, series: Series, root: Path, layout: str = "auto") -> None:
        self.series = series
        self.root = root
        self.layout = find_layout(series, root, layout)
        self.base = root / series.layouts[self.layout]
        self.version = find_version(series, root, self.layout)
        self.content: dict[str, bytes | None] = {path: _read(self.base / path) for path in series.files}
        self.carried: dict[str, frozenset[str] | None] = {}
        for path, content in self.content.items():
            known = series.known(path)
            self.carried[path] = None if content is None else known.get(sha256_of(content))

    def patch_state(self, patch: Patch) -> str:
        """The state of one patch: its files say together."""
        carried = [self.carried[path] for path in patch.files]
        if None in carried:
            return SUPERSEDED if is_superseded(patch, self.version) else DRIFTED
        having = [carries is not None and patch.id in carries for carries in carried]
        return APPLIED if all(having) else PARTLY if any(having) else PRISTINE

    @property
    def states(self) -> dict[str, str]:
        """The state of each patch, in the order of the series."""
        return {patch.id: self.patch_state(patch) for patch in self.series.patches}

    @property
    def state(self) -> str:
        """The state of the package against the whole series."""
        found = set(self.states.values())
        if DRIFTED in found:
            return DRIFTED
        if SUPERSEDED in found:
            found.discard(SUPERSEDED)
            return SUPERSEDED if not found else found.pop() if len(found) == 1 else PARTLY
        return found.pop() if len(found) == 1 else PARTLY

    @property
    def drift(self) -> list[dict[str, Any]]:
        """Every file that no combination of patches explains: ``path``, ``found``, ``expected``, ``patches``."""
        states = self.states
        found = []
        for path, carries in self.carried.items():
            patches = [id for id in self.series.ids if id in self.series.touching(path)]
            if carries is None and any(states[id] == DRIFTED for id in patches):
                content = self.content[path]
                found.append(
                    {
                        "path": str(self.base / path),
                        "found": None if content is None else sha256_of(content),
                        "expected": sorted(self.series.known(path)),
                        "patches": patches,
                    }
                )
        return found

    def explain_drift(self) -> str:
        """The drift as one message; empty when there is none."""
        drift = self.drift
        if not drift:
            return ""
        series = self.series
        files = "; ".join(
            f"{item['path']}: found {item['found'] or 'no file'}, expected one of {', '.join(item['expected'])}"
            for item in drift
        )
        if self.version is not None and version_key(self.version) != version_key(series.version):
            return (
                f"{series.distribution} {self.version} in {self.root}, expected {series.version}: {files}. Nothing "
                "was written. Install "
                f"{series.version}, or port the series (docs/patches.md) to {self.version}."
            )
        return (
            f"{len(drift)} file(s) of {series.distribution} in {self.root} are in no state that the patch series for "
            f"{series.version} knows: {files}. Nothing was written. Somebody changed them, or another version was "
            "installed: install "
            f"{series.distribution}=={series.version} again, then apply the series."
        )

    def wanted(self, state: str, patches: Sequence[str] | None) -> frozenset[str]:
        """The ids of the patches that the package must carry.

        ``applied`` with ``patches`` means exactly these, ``pristine`` with ``patches`` takes only these away.
        """
        series = self.series
        unknown = [id for id in patches or () if id not in series.ids]
        if unknown:
            raise PatchError(
                f"there is no patch {', '.join(unknown)} in the series for {series.distribution} {series.version}, "
                f"expected some of {', '.join(series.ids)}. Correct patches."
            )
        named = frozenset(series.ids if patches is None else patches)
        states = self.states
        if state == PRISTINE:
            named = frozenset(id for id, found in states.items() if found == APPLIED) - named
        named = frozenset(id for id in named if states[id] != SUPERSEDED)
        for patch in series.patches:
            missing = [id for id in patch.requires if id not in named and states[id] != SUPERSEDED]
            if patch.id in named and missing:
                raise PatchError(
                    f"the patch {patch.id} is wanted without {', '.join(missing)}, expected both: alone it does harm "
                    "(see its "
                    "header). Add the missing ones to patches, or leave it out too."
                )
        return named

    def change(self, state: str, patches: Sequence[str] | None = None) -> dict[str, bytes]:
        """The new content of every file that must change to reach a state. Raises PatchError; writes nothing."""
        if drift := self.explain_drift():
            raise PatchError(drift)
        wanted = self.wanted(state, patches)
        target = {
            path: wanted & self.series.touching(path) for path, carries in self.carried.items() if carries is not None
        }
        paths = [path for path, carries in target.items() if self.carried[path] != carries]
        try:
            return self._stage(paths, target) if paths else {}
        except OSError as error:
            raise PatchError(
                f"the copies in {tempfile.gettempdir()} cannot be written or read ({error.strerror}), expected some MB of free "
                "space there. Nothing was written. Make room, or set TMPDIR."
            ) from error

    def _stage(self, paths: Sequence[str], target: Mapping[str, frozenset[str]]) -> dict[str, bytes]:
        with Stage(self.series.strip) as stage:
            for path in paths:
                stage.put(path, self.content[path] or b"")
            for patch in reversed(self.series.patches):
                self._apply(stage, patch, [path for path in paths if patch.id in (self.carried[path] or ())], True)
            for path in paths:
                self._expect(stage, path, frozenset())
            for patch in self.series.patches:
                self._apply(stage, patch, [path for path in paths if patch.id in target[path]], False)
            for path in paths:
                self._expect(stage, path, target[path])
            return {path: stage.get(path) for path in paths}

    def _apply(self, stage: Stage, patch: Patch, paths: Sequence[str], reverse: bool) -> None:
        if not paths:
            return
        done, said = stage.apply(patch, paths, reverse)
        if not done:
            raise PatchError(
                f"git could not {'reverse' if reverse else 'apply'} {patch.file} on a copy of known files, expected "
                "it to work: "
                f"{said.strip()}. Nothing was written. The series does not fit itself: run tools/patch_checksums.py "
                "--check."
            )

    def _expect(self, stage: Stage, path: str, carried: frozenset[str]) -> None:
        found, expected = sha256_of(stage.get(path)), self.series.checksum(path, carried)
        if found != expected:
            names = ", ".join(id for id in self.series.ids if id in carried) or "no patch"
            raise PatchError(
                f"a copy of {path} with {names} has sha256 {found}, expected {expected}. Nothing was written. The "
                "series does not "
                "fit itself: run tools/patch_checksums.py --check."
            )

    def difference(self, changes: Mapping[str, bytes]) -> str:
        """A change as a unified diff."""
        parts: list[str] = []
        for path, after in changes.items():
            before = self.content[path] or b""
            parts += difflib.unified_diff(
                before.decode(errors="replace").splitlines(keepends=True),
                after.decode(errors="replace").splitlines(keepends=True),
                f"a/{path}",
                f"b/{path}",
            )
        return "".join(parts)

    def write(self, changes: Mapping[str, bytes]) -> None:
        """Replace the files, all or none. Raises PatchError."""
        with contextlib.ExitStack() as stack:
            ready: list[tuple[Path, Path]] = []
            try:
                for path, content in changes.items():
                    target = self.base / path
                    ready.append((_beside(target, content, stack), target))
            except OSError as error:
                raise PatchError(
                    f"{error.filename or self.base} cannot be written ({error.strerror}). Nothing was changed. Look "
                    "at free space "
                    "and permissions."
                ) from error
            replaced: list[str] = []
            try:
                for path, (new, target) in zip(changes, ready, strict=True):
                    os.replace(new, target)
                    replaced.append(path)
            except OSError as error:
                self._restore(replaced)
                raise PatchError(
                    f"{error.filename2 or error.filename} cannot be replaced ({error.strerror}). Every file has its "
                    "old content. "
                    "Look at permissions and mounts."
                ) from error
        self.assume(changes)

    def assume(self, changes: Mapping[str, bytes]) -> None:
        """See the tree as it is after a change."""
        for path, content in changes.items():
            self.content[path] = content
            self.carried[path] = self.series.known(path)[sha256_of(content)]

    def _restore(self, paths: Iterable[str]) -> None:
        for path in paths:
            with contextlib.ExitStack() as stack:
                target = self.base / path
                os.replace(_beside(target, self.content[path] or b"", stack), target)


def _beside(target: Path, content: bytes, stack: contextlib.ExitStack) -> Path:
    """A new file beside ``target``, with its mode and owner; it goes away with ``stack`` when nobody moved it."""
    like = target.stat()
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    new = Path(name)
    stack.callback(new.unlink, missing_ok=True)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.chmod(new, stat.S_IMODE(like.st_mode))
    if os.geteuid() == 0:
        os.chown(new, like.st_uid, like.st_gid)
    return new


def report(tree: Tree, before: Mapping[str, str], state: str) -> dict[str, Any]:
    """What a run returns, the same keys in every state: ``before`` and ``state`` are those from before the run."""
    return {
        "state": state,
        "root": str(tree.root),
        "layout": tree.layout,
        "distribution": tree.series.distribution,
        "version": tree.version,
        "expected_version": tree.series.version,
        "patches": [
            {
                "id": patch.id,
                "title": patch.title,
                "state": before[patch.id],
                "applied": tree.patch_state(patch) == APPLIED,
                "upstream": patch.upstream,
                "fixed_in": patch.fixed_in,
            }
            for patch in tree.series.patches
        ],
        "applied": [patch.id for patch in tree.series.patches if tree.patch_state(patch) == APPLIED],
        "files": {
            path: {
                "sha256": None if content is None else sha256_of(content),
                "patches": [id for id in tree.series.ids if id in (tree.carried[path] or ())],
            }
            for path, content in tree.content.items()
        },
        "drift": tree.drift,
    }


# --- porting ----------------------------------------------------------------------------------------------------------


def port(series: Series, root: Path, layout: str = "auto") -> list[dict[str, Any]]:
    """How each patch fares on another version: ``applies``, ``superseded`` or ``conflicts``, with files and hunks.

    Patches that apply are applied to the copies, so that later ones meet what they would meet. The tree is only read.
    """
    found_layout = find_layout(series, root, layout)
    base = root / series.layouts[found_layout]
    version = find_version(series, root, found_layout)
    results = []
    with Stage(series.strip) as stage:
        missing = set()
        for path in series.files:
            content = _read(base / path)
            if content is None:
                missing.add(path)
            else:
                stage.put(path, content)
        for patch in series.patches:
            results.append({"id": patch.id, "title": patch.title, **_fare(stage, patch, missing, version)})
    return results


def _fare(stage: Stage, patch: Patch, missing: set[str], version: str | None) -> dict[str, Any]:
    paths = list(patch.files)
    gone = [path for path in paths if path in missing]
    applies = not gone and stage.apply(patch, paths, options=["--check"])[0]
    if is_superseded(patch, version):
        why = f"upstream has it since {patch.fixed_in} ({patch.upstream or 'no reference'})"
        return {"result": SUPERSEDED, "why": why, "conflicts": []}
    if applies:
        stage.apply(patch, paths)
        return {"result": "applies", "why": "", "conflicts": []}
    if not gone and stage.apply(patch, paths, reverse=True, options=["--check"])[0]:
        return {"result": SUPERSEDED, "why": "the tree holds the very same change", "conflicts": []}
    conflicts = [{"path": path, "hunk": "", "why": "the file does not exist"} for path in gone]
    for path in paths:
        if path not in missing:
            conflicts += _rejected(stage, patch, path)
    return {"result": "conflicts", "why": "", "conflicts": conflicts}


def hunks_of(text: str, strip: int, path: str) -> list[str]:
    """The headers of the hunks of one file of a patch."""
    found: list[str] = []
    current = ""
    for line in text.splitlines():
        if line.startswith("diff --git "):
            current = line.split(" ")[-1].split("/", strip)[-1]
        elif current == path and HUNK.match(line):
            found.append(line)
    return found


def _rejected(stage: Stage, patch: Patch, path: str) -> list[dict[str, str]]:
    before = stage.get(path)
    _applied, said = stage.apply(patch, [path], options=["--reject", "--verbose"])
    stage.put(path, before)
    (stage.path / f"{path}.rej").unlink(missing_ok=True)
    headers = hunks_of(patch.text, stage.strip, path)
    numbers = [int(number) for number in re.findall(r"^Rejected hunk #(\d+)", said, re.MULTILINE)]
    return [{"path": path, "hunk": headers[number - 1], "why": "its context is not there"} for number in numbers]
