"""The pages are true where a machine can tell: commands parse, links lead somewhere, named files and tests exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(ROOT.glob("docs/*.md"))]
MODULES = [*sorted((ROOT / "src" / "outrider").rglob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.S | re.M)
SCRATCH = ("runs/", "heads/NAME", "pictures")  # written by the commands of the pages


def lines_of(text: str) -> Iterator[str]:
    """Commands on lines of their own, in code blocks and docstrings, without what stands behind them for people."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        words = re.split(r"\s{2,}", line.strip().removeprefix("Example: "))[0]
        yield re.sub(r"^(?:[A-Z_]+=\S+ )+", "", words)


def mentions_of(text: str) -> Iterator[str]:
    """Code between backticks."""
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        yield " ".join(code.split())


def documented(pattern: str, found_in: Callable[[str], Iterator[str]]) -> list[str]:
    """Commands of all pages and modules, each once. Names that only a program fills in are left out."""
    texts = [path.read_text(encoding="utf-8") for path in [*PAGES, *MODULES]]
    found = dict.fromkeys(code for text in texts for code in found_in(text) if re.match(pattern, code))
    return [code for code in found if not re.search(r"\.\.\.$|\{\w", code)]


def parse(command: str) -> None:
    """Read a command line as `outrider` would, without running it."""
    _, name, *words = shlex.split(command, comments=True)
    target = main.load(name)
    while hasattr(target, "commands"):
        name, *words = words
        target = target.commands[name]
    target.make_context(name, words)


@pytest.mark.parametrize("command", documented("outrider [a-z]+( |$)", lines_of))
def test_commands_can_be_given(command: str) -> None:
    parse(command)


@pytest.mark.parametrize("command", documented("outrider (bench )?[a-z]+( |$)", mentions_of))
def test_mentioned_options_exist(command: str) -> None:
    """What must be given may be left out in a sentence."""
    try:
        parse(command)
    except Exception as error:
        if type(error).__name__ != "MissingParameter":
            raise


@pytest.mark.parametrize(
    "command", [*documented("python scripts/", lines_of), *documented("python scripts/", mentions_of)]
)
def test_options_of_scripts_exist(command: str) -> None:
    _, script, *words = shlex.split(command, comments=True)
    text = (ROOT / script).read_text(encoding="utf-8")
    for word in words:
        option = word.split("=")[0]
        assert not option.startswith("--") or f'"{option}"' in text, option


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        path, _, anchor = link.partition("#")
        if not re.match(r"\w+:", link):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def anchors(text: str) -> set[str]:
    """What a page's headings are called in links."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    roots = (ROOT, ROOT / "src" / "outrider", ROOT / "tests", ROOT / "tests" / "server")
    named = re.findall(r"`([\w.-]+(?:/[\w.-]+)*\.(?:py|toml|json|service|md|yaml))`", page.read_text(encoding="utf-8"))
    for name in named:
        if "/" in name and "yours" not in name and not name.startswith(SCRATCH):
            assert any((root / name).exists() for root in roots), name


def test_named_tests_exist() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")):
            assert f"def {name}(" in tests, (page.name, name)


def test_the_rules_can_fail() -> None:
    assert len(documented("outrider [a-z]+( |$)", lines_of)) > 20
    with pytest.raises(Exception, match="--no-such"):
        parse("outrider bench speed smollm2-135m --no-such 1")
    with pytest.raises(KeyError):
        parse("outrider bench nothing")
    assert anchors("## Worst cases: `all`\n") == {"worst-cases-all"}
