"""What chats and completions have in common on their way out: choices as events of a stream, and their folding."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from outrider.server.backend import Piece
from outrider.server.generate import Job, generate
from outrider.server.requests import ChatRequest, CompletionRequest
from outrider.server.responses import ChatChunk, TextChunk
from outrider.server.state import ServerState
from outrider.server.stream import DONE, Chunks
from outrider.server.usage import Meter, Usage


class Choice(Protocol):
    """One sample of a response."""

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """The piece as a streamed choice; None where there is nothing to tell yet."""
        ...


class Reply:
    """One request: its choices as a stream of events. Its kinds fold them into one response."""

    def __init__(
        self,
        state: ServerState,
        body: ChatRequest | CompletionRequest,
        job: Job,
        record: dict[str, Any],
        head: ChatChunk | TextChunk,
        choices: Sequence[Choice],
    ) -> None:
        """head: a chunk without a choice. record: what the access log will say of the request."""
        self._state, self._job, self._record = state, job, record
        self._head, self._choices, self._options = head, choices, body.stream_options
        self._usage = Usage(job.prompts)

    @property
    def front(self) -> dict[str, Any]:
        """What a whole response says first."""
        return self._head.model_dump(include={"id", "created", "model"})

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        written, options = Chunks(self._head), self._options
        counted = options is not None and options.continuous_usage_stats
        async with aclosing(self.chunks()) as chunks:
            async for choice, _ in chunks:
                yield written.of(choice, self._usage.to_dict() if counted else None)
        if options and options.include_usage:
            yield written.usage(self._usage.to_dict())
        yield DONE

    async def chunks(self) -> AsyncGenerator[tuple[dict[str, Any], Piece], None]:
        """Streamed choices as they come, and the pieces that they were made of."""
        meter = Meter(self._state.metrics, self._record, self._usage)
        async with aclosing(generate(self._state.backend, self._job, meter)) as stream:
            async for news in stream:
                choice = self._choices[news.choice].chunk(news.piece)
                if choice is not None:
                    yield choice, news.piece


def fold_rest(choice: dict[str, Any], chunk: dict[str, Any]) -> None:
    """Add to a whole choice what streamed ones of both kinds have: token ids, spans, and how it ended."""
    for name in ("token_ids", "spans"):
        if name in chunk:
            choice[name] = choice.get(name, []) + chunk[name]
    if chunk["finish_reason"]:
        choice |= {"finish_reason": chunk["finish_reason"], "stop_reason": chunk["stop_reason"]}
