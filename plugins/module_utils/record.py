"""Deployments that passed their gate, kept so that the last one can be put back.

``<state>/deployments/<id>/`` holds the unit file, the plan and the settings files of a deployment that served; the links ``last-good`` and
``previous-good`` beside them name the two last ones. The id is the start of the plan's process hash. Nothing is downloaded
or built for a rollback: the release that the unit names stands beside the others.

A unit may change while its process goes on, and then serves without having been started once. So the files that are in place are on
record, and, only while they differ, those of the last start that passed beside them in ``proven``: these are what is put back.

The state directory belongs to the service's user, who can put another ``deployments`` there. What is read here becomes a unit
that systemd runs as root: so nothing is read from, or written to, what root (or whoever reads) does not own alone, and each
folder is held open from the look at it on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LAST, PREVIOUS = "last-good", "previous-good"
#: Folder of an entry: the files of the last start that passed, while others are in place.
PROVEN = "proven"
KEPT = 5
ID_LENGTH = 12


class RecordError(Exception):
    """Says what was found, what was expected and what to do."""


class UntrustedError(RecordError):
    """Others than root can change the record: nothing is recorded there either."""


ADVICE = (
    "Whoever can write there chooses what root puts in place. Look who changed it; then move it away (`mv`, as root) and run "
    "site.yml, which makes a new record."
)


def is_inside(name: str) -> bool:
    """Whether a link's text names something beside the link."""
    return bool(name) and "/" not in name and name not in (".", "..")


def check_owned(descriptor: int, path: Path) -> None:
    """Raise RecordError unless what is open belongs to root or to who reads, who alone can write to it."""
    found = os.fstat(descriptor)
    if found.st_uid not in (0, os.geteuid()):
        raise UntrustedError(f"{path} belongs to uid {found.st_uid}, expected root (uid 0). {ADVICE}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise UntrustedError(
            f"{path} has mode {mode:04o}, expected one without write permission for group and others. {ADVICE}"
        )


@contextlib.contextmanager
def owned_folder(path: Path, name: str = "", at: int | None = None) -> Iterator[int]:
    """A folder, held open; ``name`` below the open folder ``at``.

    RecordError when it is none or not ours, FileNotFoundError without it.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(name or path, flags, dir_fd=at)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise UntrustedError(f"{path} is a link or no folder, expected a folder of root's. {ADVICE}") from error
        raise RecordError(
            f"{path} cannot be read ({error.strerror}), expected a folder of root's. Run this as root."
        ) from error
    try:
        check_owned(descriptor, path)
        yield descriptor
    finally:
        os.close(descriptor)


def _opened(name: str, at: int) -> int:
    # Without waiting: somebody may have put a pipe there.
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)


def _regular(descriptor: int, name: str) -> str:
    """The text of an open file, which is closed."""
    with os.fdopen(descriptor, encoding="utf-8") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", name)
        return stream.read()


def _owned_text(folder: Path, name: str, at: int) -> str:
    descriptor = _opened(name, at)
    try:
        check_owned(descriptor, folder / name)
    except RecordError:
        os.close(descriptor)
        raise
    return _regular(descriptor, name)


def document(path: Path) -> tuple[dict[str, Any], str]:
    """A JSON document that the service's user may have replaced, to be shown: empty without one; then why it cannot be read.

    No link leads out of its folder, so that root shows nobody's other files: only a name beside it may stand in one.
    """
    why = ""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            name = path.name
            with contextlib.suppress(OSError):
                name = os.readlink(name, dir_fd=folder)
            if is_inside(name):
                found = json.loads(_regular(_opened(name, folder), name))
                if isinstance(found, dict):
                    return found, ""
                why = f"it holds {type(found).__name__}"
            else:
                why = f"it is a link to {name}"
        finally:
            os.close(folder)
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, RecursionError) as error:
        why = str(error) or type(error).__name__
    return {}, f"{path} cannot be read ({why}), expected a JSON document; it counts as none on record. Remove it."


def read_text(path: Path) -> str:
    """A text file that the service's user may have replaced: empty without one. Follows no link, to show nobody's other files."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return _regular(_opened(path.name, folder), path.name)
        finally:
            os.close(folder)
    except FileNotFoundError:
        return ""


def write_document(path: Path, text: str) -> None:
    """Write such a document, readable by all: whole or not at all, and through no link that the service's user has put there."""
    new, folder = f".{path.name}.new", os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o600, dir_fd=folder), "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
        os.replace(new, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


class Tuning:
    """What a tuning keeps on the host: ``session.json`` (a token, the plan that served) and ``deployments``, the records of before.

    Every profile that it tries is recorded as good. Whoever else deploys ends it, while it still runs or after it was killed, and
    it looks before each step of its own whether it still is there: so it never puts anything back over another deployment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> dict[str, Any]:
        """The session; empty when no tuning has anything to put back."""
        try:
            found = json.loads((self.folder / "session.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def of(self, state_dir: Path) -> dict[str, Any]:
        """The session, when it is that of the service with this state directory."""
        found = self.read()
        return found if found.get("state_dir") == str(state_dir) else {}

    def end(self, state_dir: Path) -> None:
        """Nothing is put back any more. The records are those of before, without the profiles that were only tried."""
        root, kept = Records(state_dir).root, self.folder / "deployments"
        for path in (root, kept):
            # What cannot be trusted is neither put back nor thrown away.
            with contextlib.suppress(FileNotFoundError), owned_folder(path):
                pass
        # First: whoever is killed from here on has deployed.
        (self.folder / "session.json").unlink(missing_ok=True)
        if kept.is_dir():
            new = root.with_name(f".{root.name}.new")
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(mode=0o755)
            with owned_folder(new) as at:
                shutil.copytree(kept, f"/proc/self/fd/{at}", symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root, ignore_errors=True)
            new.rename(root)
        shutil.rmtree(self.folder, ignore_errors=True)


def settings_files(unit: str, folder: Path) -> list[Path]:
    """The files in ``folder`` that belong to a unit: ``sglang-kimi.json`` and its like."""
    return sorted(folder.glob(f"{unit.removesuffix('.service')}.*json"))


def _files(unit: str, plan: Mapping[str, Any], settings: Mapping[str, str] | None) -> dict[str, Any]:
    return {"unit": unit, "plan": plan, "settings": dict(settings or {})}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two deployments have the same files. A plan is known by its hash: modules give its numbers as text at times."""
    plans = [entry["plan"].get("hash") for entry in (one, other)]
    return plans[0] == plans[1] and all(one[key] == other[key] for key in ("unit", "settings"))


def files_of(entry: Mapping[str, Any], unit_path: str, recorded: bool = False) -> dict[str, str]:
    """Texts by path of a deployment on record: those of its last start that passed, or with ``recorded`` those that were in place."""
    chosen = entry if recorded else entry.get("proven") or entry
    return {unit_path: chosen["unit"], **chosen["settings"]}


def _write(path: Path, text: str) -> None:
    """Whatever the umask is, nobody else can write to it: it would not be read again."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


class Records:
    """The records below a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.root = state_dir / "deployments"

    def linked(self, link: str) -> str:
        """Id that a link names; empty when there is none, or when it leads elsewhere."""
        try:
            name = os.readlink(self.root / link)
        except OSError:
            return ""
        return name if is_inside(name) else ""

    def read(self, link: str) -> dict[str, Any] | None:
        """``{id, unit, plan, settings, proven}`` of the deployment that a link names; None without one. Raises RecordError.

        ``settings`` are the texts of the settings files by their path, ``proven`` is ``{unit, plan, settings}`` of the last start that
        passed, None while these are the same.
        """
        try:
            with owned_folder(self.root) as root:
                try:
                    name = os.readlink(link, dir_fd=root)
                except OSError:
                    return None
                if not is_inside(name):
                    raise RecordError(
                        f"{self.root / link} names {name}, expected the name of a folder beside it. "
                        "Remove the link, or deploy again to make a new record."
                    )
                return self._entry(link, name, root)
        except FileNotFoundError:
            return None

    def _entry(self, link: str, name: str, root: int) -> dict[str, Any]:
        folder = self.root / name
        try:
            with owned_folder(folder, name, root) as at:
                return {"id": name, **self._files(folder, at), "proven": self._proven(folder, at)}
        except (OSError, ValueError, AttributeError) as error:
            raise RecordError(
                f"{self.root / link} names {name}, which cannot be read ({error}); expected a unit and a plan. "
                "Remove the link, or deploy again to make a new record."
            ) from error

    def _files(self, folder: Path, at: int) -> dict[str, Any]:
        return {
            "unit": _owned_text(folder, "unit", at),
            "plan": json.loads(_owned_text(folder, "plan.json", at)),
            "settings": self._settings(folder, at),
        }

    def _proven(self, folder: Path, at: int) -> dict[str, Any] | None:
        try:
            with owned_folder(folder / PROVEN, PROVEN, at) as inside:
                return self._files(folder / PROVEN, inside)
        except FileNotFoundError:
            if PROVEN in os.listdir(at):
                raise
            return None

    @staticmethod
    def _settings(folder: Path, at: int) -> dict[str, str]:
        try:
            text = _owned_text(folder, "settings.json", at)
        except FileNotFoundError:
            # Recorded by an earlier release of the collection.
            return {}
        return {str(path): str(content) for path, content in json.loads(text).items()}

    def plans(self) -> dict[str, dict[str, Any]]:
        """The plans of all deployments on record that can be read and trusted, by their ids."""
        found = {}
        with contextlib.suppress(FileNotFoundError, RecordError), owned_folder(self.root) as root:
            for name in sorted(name for name in os.listdir(root) if not name.startswith(".")):
                folder = self.root / name
                # A link among them, or a damaged one, is none of them.
                with contextlib.suppress(RecordError, OSError, ValueError), owned_folder(folder, name, root) as at:
                    found[name] = json.loads(_owned_text(folder, "plan.json", at))
        return {name: plan for name, plan in found.items() if isinstance(plan, dict)}

    def is_recorded(
        self, unit: str, plan: Mapping[str, Any], settings: Mapping[str, str] | None = None, proven: bool = True
    ) -> bool:
        """Whether exactly this deployment is the last good one, and nothing is to be told about its start."""
        try:
            found = self.read(LAST)
        except RecordError:
            return False
        return found is not None and _same(found, _files(unit, plan, settings)) and not (proven and found["proven"])

    def keep(
        self, unit: str, plan: Mapping[str, Any], settings: Mapping[str, str] | None = None, proven: bool = True
    ) -> None:
        """Record a deployment that serves, and make it the last good one.

        :param proven: whether a start with these very files has passed. Without that those of the last one that did stay on record.
        """
        with contextlib.suppress(FileExistsError):
            self.root.mkdir(mode=0o755, parents=True)
        with owned_folder(self.root) as at:
            # The very folder that was looked at, whatever its name leads to by now.
            held = Records(self.root.parent)
            held.root = Path(f"/proc/self/fd/{at}")
            name, files = str(plan["process_hash"])[:ID_LENGTH], _files(unit, plan, settings)
            try:
                held._keep(name, files, None if proven else self._last_start(name, at))
            except OSError as error:
                if error.filename is not None:
                    error.filename = str(error.filename).replace(str(held.root), str(self.root), 1)
                raise

    def _keep(self, name: str, files: Mapping[str, Any], proven: Mapping[str, Any] | None) -> None:
        new, old = self.root / f".{name}.new", self.root / f".{name}.old"
        for rest in (new, old):
            shutil.rmtree(rest, ignore_errors=True)
        self._write_files(new, files)
        if proven is not None and not _same(proven, files):
            self._write_files(new / PROVEN, proven)
        with contextlib.suppress(FileNotFoundError):
            (self.root / name).rename(old)
        new.rename(self.root / name)
        shutil.rmtree(old, ignore_errors=True)
        last = self.linked(LAST)
        if last != name:
            if last:
                self._link(PREVIOUS, last)
            self._link(LAST, name)
        self._prune()

    def _last_start(self, name: str, root: int) -> dict[str, Any] | None:
        """The files of the last start that passed, of an entry; None where there are none, or none that can be trusted."""
        try:
            found = self._entry(name, name, root)
        except RecordError:
            return None
        return found["proven"] or _files(found["unit"], found["plan"], found["settings"])

    @staticmethod
    def _write_files(folder: Path, files: Mapping[str, Any]) -> None:
        folder.mkdir(mode=0o755)
        _write(folder / "unit", files["unit"])
        # In its own order, since units and handbooks are rendered from it again.
        _write(folder / "plan.json", json.dumps(files["plan"], indent=1) + "\n")
        _write(folder / "settings.json", json.dumps(files["settings"], indent=1, sort_keys=True) + "\n")

    def _link(self, link: str, name: str) -> None:
        new = self.root / f".{link}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(name)
        new.replace(self.root / link)

    def _prune(self) -> None:
        linked = {self.linked(LAST), self.linked(PREVIOUS)}
        folders = [path for path in self.root.iterdir() if path.is_dir() and not path.is_symlink()]
        for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
            if folder.name not in linked:
                shutil.rmtree(folder)
