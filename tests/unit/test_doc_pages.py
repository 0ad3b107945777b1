"""What the document generators share: text between markers, and a page that is compared or written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from doc_pages import DocsError, between, settle

TEXT = "head\n<!-- a: begin -->\nold\n<!-- a: end -->\nmiddle\n<!-- b: begin -->\n<!-- b: end -->\ntail\n"


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    once = between(TEXT, "a", "new\n", "page")
    assert once == TEXT.replace("old", "new")
    assert between(once, "a", "new\n", "page") == once
    assert between(TEXT, "b", "1\n2\n", "page") == TEXT.replace("b: begin -->\n", "b: begin -->\n1\n2\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "page has 0 '<!-- a: begin -->' and 0 '<!-- a: end -->'"),
        (TEXT + TEXT, "has 2 '<!-- a: begin -->' and 2 "),
        ("<!-- a: end -->\n<!-- a: begin -->\n", "expected one of each in this order. Add them"),
    ],
)
def test_markers_that_are_not_there_once_are_named(text: str, words: str) -> None:
    with pytest.raises(DocsError) as error:
        between(text, "a", "x\n", "page")
    assert words in str(error.value)


def test_a_page_is_written_once_and_only_without_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    assert settle(page, "one\n", True, "make docs") == 1
    assert not page.exists()
    assert settle(page, "one\n", False, "make docs") == 0
    assert page.read_text() == "one\n"
    assert f"{page}: updated" in capsys.readouterr().out

    stamp = page.stat().st_mtime_ns
    assert (settle(page, "one\n", False, "make docs"), settle(page, "one\n", True, "make docs")) == (0, 0)
    assert page.stat().st_mtime_ns == stamp
    assert capsys.readouterr().out == ""

    assert settle(page, "two\n", True, "make docs") == 1
    shown = capsys.readouterr()
    assert "-one\n+two\n" in shown.out
    assert "Run `make docs`." in shown.err
    assert page.read_text() == "one\n"
