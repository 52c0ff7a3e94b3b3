"""`outrider distill`: what is typed becomes a run, and what is wrong becomes one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distilling import OPTIONS, tiny_prompts, tiny_target
from outrider.cli.distill import parse_options
from outrider.cli.main import main
from outrider.distill.data import write_prompts
from outrider.errors import ConfigError


def command(folder: Path, *more: str) -> list[str]:
    """A run as a user types it."""
    settings = [f"--set={name}={json.dumps(value)}" for name, value in OPTIONS.items() if name not in ("epochs",)]
    places = ["--data", str(folder / "prompts.jsonl"), "--out", str(folder / "run")]
    return ["distill", "tiny", *places, *settings, "--epochs", "4", "--backend", "reference", *more]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("outrider.models.load.load_model", lambda name, progress: tiny_target())
    write_prompts(tmp_path / "prompts.jsonl", tiny_prompts(10))
    return tmp_path


def test_a_command_trains_a_head(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, "--json")) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["acceptance"]["all"]["drafts"] > 0
    head = Path(printed["head"])
    assert sorted(path.name for path in head.iterdir()) == [
        "README.md",
        "acceptance.json",
        "config.json",
        "model.safetensors",
    ]
    assert main(command(folder)) == 0
    assert capsys.readouterr().out.strip() == str(head)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--domain", "cooking"], "domain = 'cooking' is refused"),
        (["--set", "lernrate=1"], "unknown option 'lernrate' in distill"),
        (["--set", "lr"], "write name=value"),
        (["--set", "lr=fast"], "lr = 'fast' is refused; expected float"),
    ],
)
def test_wrong_settings_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(command(folder, *more)) != 0
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_settings_are_json_or_plain_words() -> None:
    options = parse_options({"seed": 4}, ["taps=[1, 2, 3]", "domain=maths", "dropout=0.2"])
    assert (options.taps, options.domain, options.dropout, options.seed) == ((1, 2, 3), "maths", 0.2, 4)
    with pytest.raises(ConfigError, match="did you mean 'dropout'"):
        parse_options({}, ["dropuot=0.2"])
