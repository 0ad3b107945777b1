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
    """What has to happen: `write` by relative path, `remove`, `chmod`, and folders that are not there yet."""

    write: list[str] = field(default_factory=list)
    remove: list[str] = field(default_factory=list)
    chmod: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    before: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.write or self.remove or self.chmod or self.folders)


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


def compare(folder: Path, files: Mapping[str, str], mode: int, exclusive: bool) -> Difference:
    """What differs from `files` (relative path: text); with `exclusive` every other file is in the way.

    Python's compiled copies are not: they follow their source by themselves.
    """
    check_names(files)
    found = Difference()
    if folder.exists() and not folder.is_dir():
        raise TextFilesError(f"{folder} is no directory, expected one or nothing. Remove it.")
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
        elif _mode(path) != mode:
            found.chmod.append(name)
    if exclusive and folder.is_dir():
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            if name not in files and not path.is_dir() and path.parent.name != "__pycache__":
                found.remove.append(name)
    return found


def apply(folder: Path, files: Mapping[str, str], mode: int, folder_mode: int, difference: Difference) -> None:
    """Make it so. Each file is replaced in one step: a reader sees the old text or the new one."""
    for name in difference.folders:
        path = Path(name)
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(folder_mode)
    for name in difference.write:
        path = folder / name
        # Beside it and with a name of its own, so that an interrupted run leaves nothing that the next one cannot replace.
        new = path.with_name(f".{path.name}.new")
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
