#!/usr/bin/env python3
# Copyright: The gpuserve.sglang authors
# Apache License 2.0 (see https://www.apache.org/licenses/LICENSE-2.0)
"""Render the tables of docs/patches.md from the series files and the headers of their patches.

    tools/patch_docs.py [--check]

What stands between the two markers is replaced. Exit status: 0 done (or nothing to do), 1 the page differs (--check),
2 a series cannot be read or a header lacks a part.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from doc_pages import DocsError, between, settle

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "patches.md"
PARTS = ("Purpose", "Upstream", "Risk", "Tested", "Retire")


def header(path: Path) -> dict[str, str]:
    """The named parts of a patch's header, each on one line."""
    text = path.read_text(encoding="utf-8").split("\n---\n")[0]
    found: dict[str, str] = {}
    for paragraph in text.split("\n\n")[1:]:
        name, colon, rest = paragraph.partition(": ")
        if colon:
            found[name.strip()] = " ".join(rest.split())
    lacking = [part for part in PARTS if not found.get(part)]
    if lacking:
        raise DocsError(
            f"the header of {path} lacks {', '.join(lacking)}, expected all of {', '.join(PARTS)}. Write it."
        )
    return found


def link(reference: str) -> str:
    """``owner/repository#number`` as a link."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", reference)
    return f"[{reference}](https://github.com/{match[1]}/pull/{match[2]})" if match else reference or "none"


def section(folder: Path) -> str:
    """One series: its table and what the headers say."""
    data: dict[str, Any] = yaml.safe_load((folder / "series.yml").read_text(encoding="utf-8"))
    lines = [
        f"## {data['distribution']} {data['version']}",
        "",
        "| order | id | does | requires | upstream | in | risk | files |",
        "|---|---|---|---|---|---|---|---|",
    ]
    details = []
    for number, patch in enumerate(data["patches"], 1):
        said = header(folder / patch["file"])
        upstream = patch.get("upstream") or {}
        requires = ", ".join(f"`{id}`" for id in patch.get("requires") or []) or "-"
        files = len(data["checksums"][patch["id"]]["files"])
        lines.append(
            f"| {number} | [`{patch['id']}`](../{folder.relative_to(ROOT)}/{patch['file']}) | {patch['title']} | "
            f"{requires} "
            f"| {link(upstream.get('ref') or '')} | {upstream.get('fixed_in') or '-'} | {patch['risk']} | {files} |"
        )
        details += ["", f"### {patch['id']}", ""]
        details += [f"- **{name}**: {text}" for name, text in said.items()]
    return "\n".join([*lines, *details]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        folders = sorted((path.parent for path in (ROOT / "patches").glob("*/*/series.yml")), reverse=True)
        tables = "\n".join(section(folder) for folder in folders)
        wanted = between(PAGE.read_text(encoding="utf-8"), "patches", f"\n{tables}\n", str(PAGE))
    except (DocsError, OSError, KeyError, yaml.YAMLError) as error:
        print(error, file=sys.stderr)
        return 2
    return settle(PAGE, wanted, options.check, "tools/patch_docs.py")


if __name__ == "__main__":
    sys.exit(main())
