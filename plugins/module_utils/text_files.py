# Copyright: The gpuserve.sglang authors
# SPDX-License-Identifier: Apache-2.0
"""A folder of small text files, brought to what is wanted in one go; see the module text_files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class TextFilesError(Exception):
    """Says what was found, what was expected and what to do."""


@dataclass
class Difference:
    """What has to happen: `write` by relative path, `remove`, `chmod`; folders to `repair`, and those that are not there yet."""

    write: list[str] = field(default_factory=list)
    remove: list[str] = field(default_factory=list)
    chmod: list[str] = field(default_factory=list)
    repair: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    before: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.write or self.remove or self.chmod or self.repair or self.folders)


def check_names(names: Mapping[str, str]) -> None:
    """Raise TextFilesError unless every name stays below the folder."""
    for name in names:
        parts = name.split("/")
        if not name or name.startswith("/") or any(part in ("", ".", "..") for part in parts):
            raise TextFilesError(
                f"files holds the name {name!r}, expected a path below the folder without ., .. or empty parts. Correct it."
            )


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def _is_foreign(path: Path, mode: int) -> bool:
    """Whether somebody else owns a path, or can write to it against `mode`."""
    seen = path.lstat()
    return seen.st_uid != os.geteuid() or bool(seen.st_mode & 0o022 & ~mode)


def compare(
    folder: Path,
    files: Mapping[str, str],
    mode: int,
    exclusive: bool,
    folder_mode: int = 0o755,
    own: bool | None = None,
) -> Difference:
    """What differs from `files` (relative path: text); with `exclusive` every other file is in the way.

    Python's compiled copies are not: they follow their source by themselves. With `own` (as `exclusive`) owner and permissions of
    folders that are there count as well.
    """
    check_names(files)
    found, own = Difference(), exclusive if own is None else own
    if folder.exists() and not folder.is_dir():
        raise TextFilesError(f"{folder} is no directory, expected one or nothing. Remove it.")
    parts = {folder, *(folder / parent for name in files for parent in Path(name).parents)}
    for part in sorted(parts - {folder}) if own else ():
        if part.is_symlink():
            raise TextFilesError(f"{part} is a link, expected a directory or nothing. Remove it.")
    for part in sorted({folder, *((folder / name).parent for name in files)}):
        if not part.is_dir():
            found.folders.append(str(part))
    for name, text in files.items():
        path = folder / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise TextFilesError(f"{path} is no regular file, expected one or nothing. Remove it.")
        if not path.is_file():
            found.write.append(name)
            continue
        before = path.read_bytes()
        if before != text.encode():
            found.write.append(name)
            found.before[name] = before.decode("utf-8", "replace")
        elif _is_foreign(path, mode):
            # Written anew: who could write to it may have it open still.
            found.write.append(name)
            found.before[name] = text
        elif _mode(path) != mode:
            found.chmod.append(name)
    below = sorted(folder.rglob("*")) if exclusive and folder.is_dir() else []
    for path in below:
        name = str(path.relative_to(folder))
        compiled = path.parent.name == "__pycache__" and not _is_foreign(path, mode)
        if name not in files and not compiled and (path.is_symlink() or not path.is_dir()):
            found.remove.append(name)
    if own:
        parts |= {path for path in below if not path.is_symlink()}
        for part in sorted(path for path in parts if path.is_dir()):
            # Python makes its own with the umask of who runs: narrower is right as well.
            narrow = part.name == "__pycache__" and not _mode(part) & 0o022
            if part.stat().st_uid != os.geteuid() or (_mode(part) != folder_mode and not narrow):
                found.repair.append(str(part))
    return found


def apply(folder: Path, files: Mapping[str, str], mode: int, folder_mode: int, difference: Difference) -> None:
    """Make it so. Each file is replaced in one step: a reader sees the old text or the new one."""
    for name in difference.repair:
        # First, so that nobody else changes what is written then.
        if Path(name).stat().st_uid != os.geteuid():
            os.chown(name, os.geteuid(), -1)
        Path(name).chmod(folder_mode)
    for name in difference.folders:
        path = Path(name)
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(folder_mode)
    for name in difference.write:
        path = folder / name
        # Beside it and with a name of its own, so that an interrupted run leaves nothing that the next one cannot replace.
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)
        new.write_bytes(files[name].encode())
        new.chmod(mode)
        os.replace(new, path)
    for name in difference.chmod:
        (folder / name).chmod(mode)
    for name in difference.remove:
        (folder / name).unlink(missing_ok=True)
    for path in sorted(folder.rglob("*"), reverse=True) if difference.remove else ():
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
