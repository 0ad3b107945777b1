"""Text for systemd unit files: quoting of command lines and environment, from ``systemd.service(5)`` and
``systemd.syntax(7)``: a value is put into double quotes, ``\\``, ``"`` and ``%`` are escaped, and in command lines
``$`` as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


class UnitTextError(ValueError):
    """Says which value cannot stand in a unit file."""


def _quote(value: str, *, dollar: bool) -> str:
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise UnitTextError(f"{value!r} holds a control character, which a unit file cannot carry")
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if dollar:
        escaped = escaped.replace("$", "$$")
    return f'"{escaped}"'


def exec_line(command: Sequence[str]) -> str:
    """A command as the value of ``ExecStart=``: one option with its values a line, for readers and for diffs."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(_quote(str(word), dollar=True))
    return " \\\n  ".join(" ".join(line) for line in lines)


def environment_lines(environment: Mapping[str, str]) -> str:
    """``Environment=`` lines, one variable each, in the order given."""
    return "\n".join(f"Environment={_quote(f'{name}={value}', dollar=False)}" for name, value in environment.items())
