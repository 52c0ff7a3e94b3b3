"""A file is one noun and a function one verb: neither grows past what can be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LINES, FUNCTION_LINES = 400, 60
FILES = sorted(path for folder in ("src", "tests", "examples", "scripts") for path in (ROOT / folder).rglob("*.py"))


def long_functions(text: str) -> Iterator[str]:
    """Names and sizes of functions over the limit, whatever they are nested in."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{node.name}: {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_can_be_read_at_once(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= FILE_LINES, "split it along its nouns"
    assert not list(long_functions(text)), "give its parts names"


def test_the_rule_can_fail() -> None:
    body = "    pass\n"
    assert list(long_functions("def long():\n" + FUNCTION_LINES * body)) == ["long: 61 lines"]
    assert not list(long_functions("class A:\n    def short(self):\n" + (FUNCTION_LINES - 1) * ("    " + body)))
    assert len(FILES) > 300
