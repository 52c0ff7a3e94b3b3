"""`outrider bench` and `outrider eval` on a tiny model: options arrive, and the last line on stdout is the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loading import repeating_folder
from outrider.cli.main import DONE, WRONG_USAGE, main

Captured = pytest.CaptureFixture[str]
SMALL = ["--threads", "1", "--repeats", "1", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return repeating_folder(tmp_path_factory.mktemp("commands") / "model", positions=2048)


@pytest.fixture(autouse=True)
def without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)


def measured(words: list[str], capsys: Captured) -> dict[str, Any]:
    """The record of a command."""
    assert main(["bench", *words]) == DONE
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_speed(folder: str, capsys: Captured, tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    some = ["--modes", "plain,ngram", "--concurrency", "1,2", "--tasks", "qa", "--requests", "1"]
    record = measured(["speed", folder, *SMALL, *some, "--out", str(out)], capsys)
    assert record == json.loads(out.read_text())
    cells = [(row["mode"], row["concurrency"], row["identical_to_plain"]) for row in record["rows"]]
    assert cells == [(mode, level, True) for level in (1, 2) for mode in ("plain", "ngram")]
    assert "ablation" not in record


def test_types_of_numbers_reach_the_engine(folder: str, capsys: Captured) -> None:
    words = ["speed", folder, *SMALL, "--modes", "plain", "--tasks", "qa", "--requests", "1", "--dtype"]
    small, large = (measured([*words, dtype], capsys)["config"]["weight_bytes"] for dtype in ("int8", "float32"))
    assert large > 3 * small


def test_an_ablation_has_rows_of_its_own(folder: str, capsys: Captured) -> None:
    some = ["--ablation", "ngram", "--tasks", "qa", "--requests", "1"]
    record = measured(["speed", folder, *SMALL, *some], capsys)
    assert [row["mode"] for row in record["ablation"]] == [row["mode"] for row in record["rows"]]
    assert record["rows"][1]["mode"] == "one: ngram"


def test_context_with_and_without_a_slow_tier(folder: str, capsys: Captured, tmp_path: Path) -> None:
    words = ["context", folder, *SMALL, "--context", "120", "--budgets", "80"]
    rows = measured([*words, "--modes", "full,sparse"], capsys)["rows"]
    assert [(row["mode"], row["budget"], row["context_tokens"]) for row in rows] == [
        ("full", None, 120),
        ("sparse", 80, 120),
    ]
    slow = ["--modes", "resident,offloaded", "--kv-memory", "90%", "--kv-path", str(tmp_path)]
    assert [row["slow_layers"] for row in measured([*words, *slow], capsys)["rows"]] == [0, 2]


def test_peers_without_peers(folder: str, capsys: Captured) -> None:
    record = measured(["peers", folder, *SMALL, "--peers", "outrider", "--streams", "1", "--prefill", "0"], capsys)
    assert [(row["shape"], row["peer"], row["outrider_over_it"]) for row in record["rows"]] == [
        ("decode", "outrider", 1.0)
    ]


def test_eval_scores_and_captures(folder: str, capsys: Captured) -> None:
    words = ["eval", folder, "--threads", "1", "--suite", "captured,key_value", "--lengths", "300", "--cases", "1"]
    assert main([*words, "--budgets", "80,90", "--selectors", "pages,window"]) == DONE
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["reads"] for row in record["rows"] if "reads" in row] == [
        "full", "pages 80", "pages 90", "window 80", "window 90",
    ]  # fmt: skip
    shares = [(row["budget"], row["selector"]) for row in record["rows"] if "captured" in row]
    assert shares == [(budget, selector) for budget in (80, 90) for selector in ("pages", "window")]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--kv-memory", "25%"], "--kv-memory and --kv-path go together"),
        (["--budgets", "many"], "--budgets = 'many' is refused; give numbers from 1"),
        (["--modes", ","], "--modes names nothing"),
    ],
)
def test_what_context_refuses(folder: str, words: list[str], hint: str, capsys: Captured) -> None:
    assert main(["bench", "context", folder, *words]) == WRONG_USAGE
    assert hint in capsys.readouterr().err
