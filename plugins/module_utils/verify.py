# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""What one check of a served host says, and what is expected of the host: the words that all parts of verify share.

A check never says more than one thing, and one thing is said by one check: what follows from something that another check
has named (a changed drop-in from a changed process, a stopped service from a port without a listener) is left to that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: The host is not what it should be.
ERROR = "error"
#: Worth a look; the host is all the same what it should be.
WARNING = "warning"
#: Not applicable here: nothing was expected.
SKIPPED = "skipped"
#: Could not be checked: nobody knows.
UNKNOWN = "unknown"
SEVERITIES = (ERROR, WARNING, SKIPPED, UNKNOWN)

#: Findings of one check that are shown one by one; of more only the number.
SHOWN = 5


@dataclass(frozen=True)
class Check:
    """The outcome of one check. ``ok`` is None when there is no outcome; ``severity`` then says why."""

    id: str
    subject: str
    ok: bool | None
    found: str
    expected: str
    action: str = ""
    severity: str = ERROR

    @property
    def failed(self) -> bool:
        """Whether this makes the host not what it should be."""
        return self.ok is False and self.severity == ERROR

    def as_dict(self) -> dict[str, Any]:
        """The shape in which the module returns it."""
        return asdict(self)


def passed(id_: str, subject: str, found: str, expected: str = "") -> Check:
    """All is well."""
    return Check(id_, subject, True, found, expected or found)


def failed(id_: str, subject: str, found: str, expected: str, action: str, severity: str = ERROR) -> Check:
    """Something is not as expected."""
    return Check(id_, subject, False, found, expected, action, severity)


def skipped(id_: str, subject: str, why: str) -> Check:
    """Not applicable on this host."""
    return Check(id_, subject, None, f"not applicable: {why}", "nothing", "", SKIPPED)


def unknown(id_: str, subject: str, why: str, action: str) -> Check:
    """Could not be checked."""
    return Check(id_, subject, None, f"could not be checked: {why}", "an answer", action, UNKNOWN)


def listed(items: Iterable[str], shown: int = SHOWN) -> str:
    """``a; b; and 3 more``."""
    every = list(items)
    rest = len(every) - shown
    return "; ".join([*every[:shown], *([f"and {rest} more"] if rest > 0 else [])])


@dataclass(frozen=True)
class Expected:
    """What is expected of the host, as far as the host's own record does not say it."""

    unit: str = "sglang-kimi.service"
    state_dir: Path = Path("/var/lib/sglang-kimi")
    settings_dir: Path = Path("/etc/gpuserve-sglang")
    #: The plan of the inventory; None when nobody has one, and only the host's record is known.
    plan: Mapping[str, Any] | None = None
    #: Name to SHA-256 of the programs in ``programs_dir``.
    programs: Mapping[str, str] = field(default_factory=dict)
    programs_dir: Path = Path("/usr/local/lib/gpuserve-sglang")
    #: Values that the settings file must hold, nested as it is.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Variables that sitecustomize gives the interpreter; None when the role nccl is not used.
    variables: Mapping[str, str] | None = None
    interpreter: str = ""
    #: Versions or branches of the driver, any of them; none when the driver is nobody's business.
    drivers: Sequence[str] = ()
    #: Patterns of packages that are held, files of APT with their content, patterns of the upgrade blacklist.
    holds: Sequence[str] = ()
    apt_files: Mapping[str, str] = field(default_factory=dict)
    blacklist: Sequence[str] = ()
    #: Drop-ins of the unit that are known of.
    dropins: Sequence[str] = ()
    disk_paths: Sequence[str] = ()
    min_free_gb: float = 5.0
    handbook: str = ""
    timer: str = ""
    collector: str = ""
    #: Text of each unit that watches over the service, by name.
    watchers: Mapping[str, str] = field(default_factory=dict)
    #: Whether every file of the release is read, or only those of the guarded packages.
    all_files: bool = True
    guard: Sequence[str] = ()
    kv_tolerance: float = 0.10
    generate: bool = True
    request_timeout: float = 25.0
    generation_timeout: float = 180.0
    #: Regular expressions of log lines that are known of.
    log_ignore: Sequence[str] = ()
    ignored_xids: Sequence[int] = (45,)
    journal_lines: int = 200_000


def result(checks: Sequence[Check]) -> dict[str, Any]:
    """``{ok, failures, warnings, unknown, checks}``; ok means nothing failed and nothing is unknown."""
    failures = [check.id for check in checks if check.failed]
    not_known = [check.id for check in checks if check.ok is None and check.severity == UNKNOWN]
    return {
        "ok": not failures and not not_known,
        "failures": failures,
        "warnings": [check.id for check in checks if check.ok is False and check.severity == WARNING],
        "unknown": not_known,
        "checks": [check.as_dict() for check in checks],
    }
