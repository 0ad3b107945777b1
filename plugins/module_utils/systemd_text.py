"""Text for systemd unit files: quoting of command lines and environment, from ``systemd.service(5)`` and
``systemd.syntax(7)``: a value is put into double quotes, ``\\``, ``"`` and ``%`` are escaped, and in command lines
``$`` as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# systemd drops a line that is no text to it, with no more than a warning: lone surrogates, and Unicode's non-characters.
_NO_TEXT = re.compile(
    f"[\ud800-\udfff\ufdd0-\ufdef{''.join(chr(p << 16 | 0xFFFE) + chr(p << 16 | 0xFFFF) for p in range(17))}]"
)


class UnitTextError(ValueError):
    """Says which value cannot stand in a unit file."""


def _quote(value: str, *, dollar: bool) -> str:
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise UnitTextError(f"{value!r} holds a control character, which a unit file cannot carry")
    if _NO_TEXT.search(value):
        raise UnitTextError(f"{value!r} holds what is no character, and systemd would ignore the whole line")
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if dollar:
        escaped = escaped.replace("$", "$$")
    return f'"{escaped}"'


def exec_line(command: Sequence[str]) -> str:
    """A command as the value of ``ExecStart=``: one option with its values a line, for readers and for diffs."""
    words = [str(word) for word in command]
    # Quoting does not help the program: systemd reads @ - : + ! before it as flags, keeps every $ in it, and refuses the
    # path if it holds quotes or backslashes.
    if not words or not re.fullmatch(r"/[^$'\"\\]*", words[0]):
        raise UnitTextError(
            f"{words[0] if words else ''!r} is no program, expected an absolute path without $, quotes and backslashes"
        )
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(_quote(word, dollar=True))
    return " \\\n  ".join(" ".join(line) for line in lines)


def environment_lines(environment: Mapping[str, str]) -> str:
    """``Environment=`` lines, one variable each, in the order given."""
    for name in environment:
        if not _NAME.fullmatch(str(name)):
            raise UnitTextError(
                f"{name!r} is no name of a variable, expected letters, digits and '_': systemd would ignore the line"
            )
    return "\n".join(f"Environment={_quote(f'{name}={value}', dollar=False)}" for name, value in environment.items())
