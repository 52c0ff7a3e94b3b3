"""Imports point one way (docs/architecture.md): a module may import its own layer and the layers below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "outrider"
LAYERS = [
    {"types", "errors", "__init__"},
    {"config", "sampling", "verify"},
    {"kernels", "models", "drafters", "sequence"},
    {"memory", "speculation"},
    {"runner"},
    {"engine"},
    {"api"},
    {"server", "cli", "bench", "distill", "__main__"},
]
PUBLIC = {"LLM": "api", "Service": "api", "SamplingParams": "types"}  # what `from outrider import ...` stands for
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
MODULES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The part of the layout that a file belongs to."""
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def is_type_checking(node: ast.AST) -> bool:
    """Whether a node is an `if TYPE_CHECKING:` block."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported_parts(path: Path) -> set[str]:
    """The parts of outrider that a file imports when it is loaded or run; those for the type checker are free."""
    names: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {id(n) for block in ast.walk(tree) if is_type_checking(block) for n in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} if node.module != "outrider" else {f"outrider.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    parts = {name.split(".")[1] for name in names if name.startswith("outrider.")}
    return {PUBLIC.get(part, part) for part in parts} - {"__version__"}


def forbidden(part: str, imported: set[str]) -> set[str]:
    """Imports of `part` that point upwards; the server and the benchmarks see only the API and the values."""
    up = {name for name in imported if LEVEL.get(name, 99) > LEVEL[part]}
    if part == "server":
        up |= imported - {"api", "config", "types", "errors", "server"}
    return up


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    assert part in LEVEL, f"{part} has no layer; give it one in this test and in docs/architecture.md"
    assert not forbidden(part, imported_parts(path))


def test_the_rule_can_fail() -> None:
    assert forbidden("engine", {"api", "types"}) == {"api"}
    assert forbidden("server", {"engine", "api"}) == {"engine"}
    assert len(MODULES) > 30


def test_nothing_is_unpickled() -> None:
    """Models and caches are read as safetensors, GGUF, JSON or raw bytes, never as pickles."""
    for path in MODULES:
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not names & {"pickle", "dill", "cloudpickle", "joblib"}, path


def test_torch_cuda_stays_behind_the_kernels() -> None:
    allowed = {"kernels", "models", "memory"}
    for path in MODULES:
        if "torch.cuda" in path.read_text():
            assert part_of(path) in allowed, path
