"""Functions to be completed, from a library that is on every machine: Python's own.

Every function there that says what it does becomes a header, its docstring and nothing else. A few dozen functions
written by hand (prompt_templates.py) teach a head those functions; thousands teach it what code looks like.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

LENGTHS = (30, 500)  # characters of a docstring that is worth a prompt
LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data"})
INDENT = "    "


def library_functions(root: Path | None = None) -> list[str]:
    """Headers with docstrings of all functions below `root` (default: the standard library), sorted, each once."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    sources = (path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    return sorted({header for path in sources for header in _headers(path)})


def _headers(path: Path) -> Iterator[str]:
    """The functions of one file; none where it cannot be read as Python of today."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old files
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError, MemoryError, RecursionError):  # the latter two where it nests too deep
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not _is_method(node):
            text = ast.get_docstring(node)
            if text and LENGTHS[0] <= len(text) <= LENGTHS[1] and '"""' not in text:
                yield _header(node, text)


def _is_method(node: ast.FunctionDef) -> bool:
    return bool(node.args.args) and node.args.args[0].arg in ("self", "cls")


def _header(node: ast.FunctionDef, text: str) -> str:
    """A function without its body, as it would be written at the top of a file."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    documented = "\n".join(f"{INDENT}{line}".rstrip() for line in f'"""{text}\n"""'.split("\n"))
    return f"def {node.name}({ast.unparse(node.args)}){returns}:\n{documented}\n"
