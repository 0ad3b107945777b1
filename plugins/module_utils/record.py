"""Deployments that passed their gate, kept so that the last one can be put back.

``<state>/deployments/<id>/`` holds the unit file, the plan and the settings files of a deployment that served; the links ``last-good`` and
``previous-good`` beside them name the two last ones. The id is the start of the plan's process hash. Nothing is downloaded
or built for a rollback: the release that the unit names stands beside the others.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAST, PREVIOUS = "last-good", "previous-good"
KEPT = 5
ID_LENGTH = 12


class RecordError(Exception):
    """Says what was found, what was expected and what to do."""


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
        # First: whoever is killed from here on has deployed.
        (self.folder / "session.json").unlink(missing_ok=True)
        if kept.is_dir():
            new = root.with_name(f".{root.name}.new")
            shutil.rmtree(new, ignore_errors=True)
            shutil.copytree(kept, new, symlinks=True)
            shutil.rmtree(root, ignore_errors=True)
            new.rename(root)
        shutil.rmtree(self.folder, ignore_errors=True)


def settings_files(unit: str, folder: Path) -> list[Path]:
    """The files in ``folder`` that belong to a unit: ``sglang-kimi.json`` and its like."""
    return sorted(folder.glob(f"{unit.removesuffix('.service')}.*json"))


class Records:
    """The records below a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.root = state_dir / "deployments"

    def linked(self, link: str) -> str:
        """Id that a link names; empty when there is none."""
        try:
            return Path(os.readlink(self.root / link)).name
        except OSError:
            return ""

    def read(self, link: str) -> dict[str, Any] | None:
        """``{id, unit, plan, settings}`` of the deployment that a link names; None without one. Raises RecordError.

        ``settings`` are the texts of the settings files by their path.
        """
        name = self.linked(link)
        if not name:
            return None
        folder = self.root / name
        try:
            return {
                "id": name,
                "unit": (folder / "unit").read_text(),
                "plan": json.loads((folder / "plan.json").read_text()),
                "settings": self._settings(folder),
            }
        except (OSError, ValueError) as error:
            raise RecordError(
                f"{self.root / link} names {name}, which cannot be read ({error}); expected a unit and a plan. "
                "Remove the link, or deploy again to make a new record."
            ) from error

    @staticmethod
    def _settings(folder: Path) -> dict[str, str]:
        file = folder / "settings.json"
        if not file.exists():
            # Recorded by an earlier release of the collection.
            return {}
        return {str(path): str(text) for path, text in json.loads(file.read_text()).items()}

    def is_recorded(self, unit: str, plan: Mapping[str, Any], settings: Mapping[str, str] | None = None) -> bool:
        """Whether exactly this deployment is the last good one."""
        try:
            found = self.read(LAST)
        except RecordError:
            return False
        return (
            found is not None
            and found["unit"] == unit
            and found["plan"].get("hash") == plan.get("hash")
            and found["settings"] == (settings or {})
        )

    def keep(self, unit: str, plan: Mapping[str, Any], settings: Mapping[str, str] | None = None) -> None:
        """Record a deployment that serves, and make it the last good one."""
        name = str(plan["process_hash"])[:ID_LENGTH]
        self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
        new = self.root / f".{name}.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        (new / "unit").write_text(unit)
        # In its own order, since units and handbooks are rendered from it again.
        (new / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")
        (new / "settings.json").write_text(json.dumps(settings or {}, indent=1, sort_keys=True) + "\n")
        shutil.rmtree(self.root / name, ignore_errors=True)
        new.rename(self.root / name)
        last = self.linked(LAST)
        if last != name:
            if last:
                self._link(PREVIOUS, last)
            self._link(LAST, name)
        self._prune()

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
