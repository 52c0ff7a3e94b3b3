"""`outrider chat [MODEL]`: a conversation in the terminal. What a drafter had guessed is shown in a subtle colour.

Ctrl-C stops an answer and keeps what was said; at the prompt, Ctrl-C or Ctrl-D leaves. The conversation's KV pages are
reused, so a long chat does not read its history again.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options as opt
from outrider.cli.footer import Record

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.api.outputs import Piece
    from outrider.types import SamplingParams

HELP = "/clear forgets the conversation, /stats shows all answers so far, /exit leaves"
ACCEPTED, PLAIN = "\x1b[38;5;73m", "\x1b[0m"


class Chat:
    """One conversation: messages, how to answer, and what was counted."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, colour: bool) -> None:
        self._llm, self._params, self._colour = llm, params, colour
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._system)
        self.answers: list[Record] = []

    def say(self, text: str) -> None:
        """Answer one message, streaming it to stdout; an interrupted answer stays in the conversation."""
        self.messages.append({"role": "user", "content": text})
        record, said = Record(self._llm.context_mode), ""
        try:
            with interruptible() as interrupted, closing(self._llm.stream_chat(self.messages, self._room())) as pieces:
                for piece in pieces:
                    record.add(piece)
                    said += piece.text
                    print(painted(piece, self._colour), end="", flush=True)
                    if interrupted:
                        break
        except Exception:
            self.messages.pop()
            raise
        print()
        print(f"[{record.line()}{' · stopped' if interrupted else ''}]", file=sys.stderr)
        self.messages.append({"role": "assistant", "content": said})
        self.answers.append(record)

    def clear(self) -> None:
        """Forget the conversation."""
        self.messages = list(self._system)

    def stats(self) -> str:
        """All answers so far in one line."""
        tokens = sum(record.tokens for record in self.answers)
        drafts = sum(record.speculative.num_drafts for record in self.answers)
        accepted = sum(record.speculative.num_accepted_tokens for record in self.answers)
        return f"{len(self.answers)} answers, {tokens} tokens, acceptance length {1 + accepted / max(1, drafts):.2f}"

    def _room(self) -> SamplingParams:
        """A fresh seed per answer, so that the same question twice is not the same noise twice."""
        if self._params.seed is None:
            return self._params
        return replace(self._params, seed=self._params.seed + len(self.answers))


def painted(piece: Piece, colour: bool) -> str:
    """A piece's text; what a drafter had guessed is tinted."""
    if not colour or not piece.accepted:
        return piece.text
    guessed, own = "".join(piece.texts[: piece.accepted]), "".join(piece.texts[piece.accepted :])
    return f"{ACCEPTED}{guessed}{PLAIN}{own}" if guessed else own


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C fills the list that this gives instead of tearing a step apart."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def converse(chat: Chat) -> None:
    """Read messages until the end of input."""
    while True:
        try:
            text = input("\n> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/clear":
            chat.clear()
        elif text == "/stats":
            print(chat.stats())
        elif text.startswith("/"):
            print(HELP)
        elif text:
            attempt(chat, text)


def attempt(chat: Chat, text: str) -> None:
    """Answer a message; one that cannot be answered (too long, say) costs a line, not the conversation."""
    from outrider.errors import RequestError

    try:
        chat.say(text)
    except RequestError as error:
        print(f"outrider: {error}; /clear forgets the conversation", file=sys.stderr)


@opt.takes_options
def chat(
    model: Annotated[str, typer.Argument(help="Alias, folder, .gguf file or hub id.")] = "smollm2-135m",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus: smallest set of tokens with this probability.")] = 1.0,
    plain_output: Annotated[bool, typer.Option("--plain-output", help="No colours.")] = False,
    *,
    shared: opt.Shared,
) -> None:
    """Talk to a model; every answer ends with its speed and acceptance.

    Example: outrider chat smollm2-135m --temperature 0.7
    """
    from outrider.errors import ConfigError
    from outrider.types import SamplingParams

    with shared.open(model, max_num_seqs=1) as llm:
        if not llm.tokenizer.has_chat_template:
            raise ConfigError(f"{model} has no chat template; use `outrider generate {model} -p TEXT --raw`")
        params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=shared.seed)
        colour = not plain_output and sys.stdout.isatty()
        if sys.stdin.isatty():
            print(f"{model}; {HELP}", file=sys.stderr)
        converse(Chat(llm, params, system, colour))
