"""The README's commands and code run, and it stays short."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVERS = ("outrider serve", "make ")  # run by tests of their own; make calls this very test


def blocks(language: str) -> list[str]:
    """The README's code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands() -> list[str]:
    """Shell lines that can run inside a test."""
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("outrider") and not line.startswith(SERVERS)]


def run(arguments: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, input=text, capture_output=True, text=True, timeout=300, cwd=ROOT)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 100


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), target


@pytest.mark.model
@pytest.mark.parametrize("command", commands())
def test_commands_run(command: str) -> None:
    arguments = shlex.split(command)
    program = [sys.executable, "-m", "outrider.cli.main", *arguments[1:]]
    done = run(program, text="What is 2 + 2?\n/exit\n" if arguments[1] == "chat" else "")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.model
@pytest.mark.parametrize("code", blocks("python"))
def test_code_runs(code: str) -> None:
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


@pytest.mark.model
@pytest.mark.parametrize("example", sorted(p.name for p in (ROOT / "examples").glob("*.py")))
def test_examples_run(example: str) -> None:
    done = run([sys.executable, str(ROOT / "examples" / example)])
    assert done.returncode == 0, done.stderr
    assert "acceptance length" in done.stdout
