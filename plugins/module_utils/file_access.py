# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""What another user may read, by owner, group and mode, so that root can tell before that user exists.

Standard library only; nothing here writes.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Where one of these is, the mode is not the whole truth, and what the list says is believed to let the user in.
ACL_ATTRIBUTES = ("system.posix_acl_access", "system.nfs4_acl")
#: As many symbolic links as the kernel follows in one path.
MAX_LINKS = 40


@dataclass(frozen=True)
class Refusal:
    """A file or folder that the user may not use: `wanted` is r, x or rx, `who` the class (u, g, o) that lacks it."""

    path: str
    folder: bool
    wanted: str
    who: str
    found: str


def _owner(info: os.stat_result) -> str:
    user, group = str(info.st_uid), str(info.st_gid)
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(info.st_uid).pw_name
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(info.st_gid).gr_name
    return f"{user}:{group}"


def _has_acl(path: str) -> bool:
    try:
        return any(name in ACL_ATTRIBUTES for name in os.listxattr(path))
    except (OSError, AttributeError):
        return False


@dataclass
class Access:
    """One user, and what is known of paths so far. `uid` is None as long as there is no such user."""

    user: str
    uid: int | None
    gids: frozenset[int]
    _seen: dict[str, os.stat_result | None] = field(default_factory=dict)
    _verdicts: dict[tuple[str, str], Refusal | None] = field(default_factory=dict)

    def _lstat(self, path: str) -> os.stat_result | None:
        if path not in self._seen:
            try:
                self._seen[path] = os.lstat(path)
            except OSError:
                self._seen[path] = None
        return self._seen[path]

    def _judge(self, path: str, wanted: str) -> Refusal | None:
        key = (path, wanted)
        if key not in self._verdicts:
            self._verdicts[key] = self._refusal(path, wanted)
        return self._verdicts[key]

    def _refusal(self, path: str, wanted: str) -> Refusal | None:
        info = self._lstat(path)
        if info is None:
            return None
        # The first class that fits decides alone, as in the kernel.
        if self.uid is not None and info.st_uid == self.uid:
            who, shift = "u", 6
        elif info.st_gid in self.gids:
            who, shift = "g", 3
        else:
            who, shift = "o", 0
        needed = sum({"r": 4, "x": 1}[letter] for letter in wanted) << shift
        if info.st_mode & needed == needed or _has_acl(path):
            return None
        found = f"mode {stat.S_IMODE(info.st_mode):04o}, owner {_owner(info)}"
        return Refusal(path, stat.S_ISDIR(info.st_mode), wanted, who, found)

    def refusals(self, path: str) -> Iterator[Refusal]:
        """Each folder on the way that cannot be searched, those that symbolic links lead through included, and the end
        of the way when it cannot be read. Something that is not there is nobody's refusal."""
        parts = deque(part for part in path.split("/") if part not in ("", "."))
        current, links = "/", 0
        searched: dict[str, None] = {}
        while parts:
            part = parts.popleft()
            searched[current] = None
            # Links are resolved on the way, so the parent of the text is the real one.
            following = os.path.dirname(current) if part == ".." else os.path.join(current, part)
            info = self._lstat(following)
            if info is None:
                break
            if not stat.S_ISLNK(info.st_mode):
                current = following
                continue
            links += 1
            if links > MAX_LINKS:
                return
            target = os.readlink(following)
            parts.extendleft(reversed([name for name in target.split("/") if name not in ("", ".")]))
            current = "/" if target.startswith("/") else current
        else:
            end = self._lstat(current)
            if end is not None:
                searched.pop(current, None)
                refusal = self._judge(current, "rx" if stat.S_ISDIR(end.st_mode) else "r")
                if refusal:
                    yield refusal
        for folder in searched:
            refusal = self._judge(folder, "x")
            if refusal:
                yield refusal

    def advice(self, refusal: Refusal, path: str, recursive: bool) -> str:
        """What opens `path`; of several files that lack the same, their folder, `recursive`."""
        what = "rX" if recursive else refusal.wanted
        option = "-R " if recursive else ""
        ways = [f"Run `chmod {option}{refusal.who}+{what} {path}`"]
        # A list cannot name a user that does not exist, and the owner's own bits come before it.
        if self.uid is not None and refusal.who != "u":
            ways.append(f"run `setfacl {option}-m u:{self.user}:{what} {path}`")
        ways.append("set deployment_unit (user, group) to those that may")
        return ", or ".join(ways) + "."


def reader(user: str, group: str = "") -> Access | None:
    """The user as systemd starts a service: `group` in place of the user's own, and the supplementary ones.

    None when there is nothing to judge: no user, or root.
    """
    if not user:
        return None
    entry = None
    with contextlib.suppress(KeyError):
        entry = pwd.getpwnam(user)
    if entry is None and user.isdigit():
        with contextlib.suppress(KeyError):
            entry = pwd.getpwuid(int(user))
    uid = entry.pw_uid if entry else int(user) if user.isdigit() else None
    if uid == 0:
        return None
    gid = entry.pw_gid if entry else None
    if group:
        try:
            gid = grp.getgrnam(group).gr_gid
        except KeyError:
            gid = int(group) if group.isdigit() else None
    gids = set() if gid is None else {gid}
    if entry:
        gids |= set(os.getgrouplist(entry.pw_name, entry.pw_gid if gid is None else gid))
    return Access(user, uid, frozenset(gids))
