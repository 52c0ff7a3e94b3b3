"""Mistakes on the command line: one line on stderr that says what to do, and the right exit status."""

from __future__ import annotations

import io
import subprocess
import sys
from importlib.metadata import version

import pytest

from outrider.cli import main as command_line
from outrider.cli.main import FAILED, WRONG_USAGE, main

PLAN = ["plan", "llama3-8b", "--memory", "80GiB"]
GENERATE = ["generate", "no-model", "-p", "hi"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([*GENERATE, "--kv-memory", "inf"], "'inf' is no amount of memory"),
        ([*GENERATE, "--seed", "-1"], "seed = -1 is refused; use 0 or more"),
        ([*PLAN, "--overhead", "nan"], "overhead = nan is refused; use 1 or more"),
        ([*PLAN, "--overhead", "-1"], "overhead = -1.0 is refused"),
        (["bench", "speed", "--concurrency", "a"], "--concurrency = 'a' is refused; give numbers from 1"),
        (["bench", "speed", "--concurrency", "0"], "--concurrency = '0' is refused"),
        (["bench", "speed", "--concurrency", ""], "--concurrency names nothing"),
        (["bench", "speed", "--modes", ","], "--modes names nothing"),
        (["bench", "speed", "no-model", "--out", "/missing/folder/x.json"], "--out /missing/folder/x.json cannot be"),
        (["bench", "context", "no-model", "--out", "/"], "--out / is a folder; name a file"),
        (["eval", "no-model", "--out", "/missing/x.json"], "folder is missing or not writable"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == WRONG_USAGE
    shown = capsys.readouterr()
    assert shown.err.startswith("outrider: ")
    assert shown.err.count("\n") == 1
    assert hint in shown.err
    assert not shown.out


def test_a_plan_without_memory_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3-8b", "--memory", "0"]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command_line, "load", full)
    assert main(["pull", "--list"]) == FAILED
    assert capsys.readouterr().err == (
        "outrider: [Errno 28] No space left on device; check the path, the disk and the permissions\n"
    )


def test_a_terminal_without_unicode_shows_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    main(["--version"])
    print("été")
    assert terminal.buffer.getvalue().splitlines()[-1] == b"?t?"  # type: ignore[attr-defined]


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "outrider", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.strip() == version("outrider")
