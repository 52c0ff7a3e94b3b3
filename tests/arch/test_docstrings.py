"""Every public method says what it does: itself, or where a protocol or a base class of the project declares it.

Modules, classes and functions are checked by ruff (D100, D101, D103, D104 in pyproject.toml).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "outrider"


def classes(texts: Sequence[str]) -> list[ast.ClassDef]:
    """All classes of some sources."""
    return [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]


def base_names(kind: ast.ClassDef) -> set[str]:
    """Names of what a class derives from, without modules and parameters."""
    return {ast.unparse(base).split("[")[0].split(".")[-1] for base in kind.bases}


def methods(kind: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Its public methods; a setter is documented by its getter."""
    for node in kind.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            yield from [] if f"{node.name}.setter" in decorators else [node]


def undocumented(texts: Sequence[str]) -> list[str]:
    """Public methods of public classes that neither they nor an interface describe."""
    found = classes(texts)
    derived_from = set().union(*map(base_names, found))
    interfaces = [kind for kind in found if kind.name in derived_from or "Protocol" in base_names(kind)]
    declared = {method.name for kind in interfaces for method in methods(kind) if ast.get_docstring(method)}
    return [
        f"{kind.name}.{method.name}"
        for kind in found
        if not kind.name.startswith("_")
        for method in methods(kind)
        if not ast.get_docstring(method) and method.name not in declared
    ]


def test_public_methods_are_documented() -> None:
    assert undocumented([path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))]) == []


def test_the_rule_can_fail() -> None:
    protocol = 'class P(Protocol):\n    def known(self):\n        """Said here."""\n'
    kind = "class A:\n    def known(self): pass\n    def new(self): pass\n    def _own(self): pass\n"
    assert undocumented([protocol, kind]) == ["A.new"]
