# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""What the tools that generate documents share: text between two markers, and a page that is compared or written."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path


class DocsError(Exception):
    """What was found, what was expected and what to do."""


def between(text: str, name: str, content: str, where: str) -> str:
    """``text`` with ``content`` (whole lines) between the markers of ``name``; ``where`` is the page, for people."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise DocsError(
            f"{where} has {text.count(begin)} '{begin}' and {text.count(end)} '{end}', expected one of each in this "
            "order. Add them where the generated text belongs."
        )
    head, __, rest = text.partition(begin)
    return f"{head}{begin}\n{content}{end}{rest.partition(end)[2]}"


def settle(page: Path, wanted: str, check: bool, command: str) -> int:
    """Write ``page`` when it is not as ``wanted``, or, to ``check``, only show that. The exit status: 1 it differs, else 0."""
    found = page.read_text(encoding="utf-8") if page.is_file() else ""
    if found == wanted:
        return 0
    if check:
        sys.stdout.writelines(
            difflib.unified_diff(found.splitlines(True), wanted.splitlines(True), str(page), "generated")
        )
        print(f"{page} is not as generated. Run `{command}`.", file=sys.stderr)
        return 1
    page.write_text(wanted, encoding="utf-8")
    print(f"{page}: updated")
    return 0
