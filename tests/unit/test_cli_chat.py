"""`outrider chat` and `generate` on a tiny model: the conversation, the tint, Ctrl-C, and one JSON object."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from loading import repeating_folder
from outrider import LLM, Piece, SamplingParams
from outrider.cli.chat import ACCEPTED, PLAIN, Chat, converse, interruptible, painted
from outrider.cli.main import DONE, main

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return repeating_folder(tmp_path_factory.mktemp("chat") / "model", positions=128)


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, backend="reference") as llm:
        yield llm


def test_what_was_guessed_is_tinted_and_nothing_else() -> None:
    piece = Piece("r", 0, "abc", ("a", "b", "c"), (1, 2, 3), accepted=2)
    assert painted(piece, colour=True) == f"{ACCEPTED}ab{PLAIN}c"
    assert painted(piece, colour=False) == "abc"


def test_the_conversation_is_kept_and_its_pages_reused(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(llm, PARAMS, "Be", colour=False)
    chat.say("1 2 3")
    first = chat.messages[-1]["content"]
    shown = capsys.readouterr()
    assert shown.out == f"{first}\n"
    assert "tokens/s" in shown.err
    chat.say("2")
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert "prompt tokens reused" in capsys.readouterr().err
    chat.clear()
    assert [m["role"] for m in chat.messages] == ["system"]


def test_a_message_that_is_too_long_costs_a_line_only(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'word ' * 200}\n1\n/stats\n/exit\n2\n"))
    chat = Chat(llm, PARAMS, None, colour=False)
    converse(chat)
    shown = capsys.readouterr()
    assert "the context holds 128" in shown.err
    assert "1 answers, 12 tokens" in shown.out
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, usual = Chat(llm, PARAMS, None, colour=False), signal.getsignal(signal.SIGINT)
    step = llm.core.engine.step

    def interrupted() -> list:
        os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.core.engine, "step", interrupted)
    chat.say("1 2 3")
    assert "stopped" in capsys.readouterr().err
    assert chat.answers[0].tokens < 12
    assert chat.messages[-1]["role"] == "assistant"
    assert not llm.core.engine.scheduler.busy
    assert signal.getsignal(signal.SIGINT) is usual


def test_ctrl_c_is_told_by_a_list() -> None:
    with interruptible() as seen:
        os.kill(os.getpid(), signal.SIGINT)
        assert seen == [signal.SIGINT]


def test_generate_prints_one_json_object(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", folder, "-p", "1 2 3 1 2 3", "--max-tokens", "20", "--json"]) == DONE
    answer = json.loads(capsys.readouterr().out)
    assert answer["outputs"][0]["finish_reason"] in ("stop", "length")
    assert answer["speculative"]["num_draft_tokens"] >= answer["speculative"]["num_accepted_tokens"]


def test_generate_reads_stdin_and_streams(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["generate", folder, "--max-tokens", "12", "--raw"]
    assert main([*words, "-p", "1 2 3"]) == DONE
    expected = capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("1 2 3"))
    assert main([*words, "-p", "-"]) == DONE
    assert capsys.readouterr().out == expected.out
    assert "tokens/s" in expected.err
