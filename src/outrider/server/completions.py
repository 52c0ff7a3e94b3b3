"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fastapi import Request
from fastapi.responses import Response

from outrider.errors import UnsupportedError
from outrider.server.backend import Piece, Tokenizer
from outrider.server.generate import Job
from outrider.server.logprobs import completion_logprobs, prompt_logprobs
from outrider.server.prompts import encode_prompts
from outrider.server.reply import Reply, fold_rest
from outrider.server.requests import CompletionRequest
from outrider.server.responses import TextChunk
from outrider.server.sampling import check_length, sampling_params
from outrider.server.spans import Spans
from outrider.server.state import ServerState, record_of
from outrider.server.stream import EventStream, answer
from outrider.types import Logprob


async def complete(state: ServerState, body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts, streamed or whole."""
    model = state.check_model(body.model)
    tokenizer = state.backend.tokenizer
    params = sampling_params(body, state.settings, tokenizer.vocab_size)
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, params.prompt_logprobs or 0))
    _check_count(body, state.settings.max_prompts)
    prompts = await encode_prompts(tokenizer, body.prompt, body.add_special_tokens is not False)
    for prompt in prompts:
        check_length(len(prompt), params.max_tokens, state.backend.max_model_len)
    job = Job(uuid4().hex, prompts, params)
    record = record_of(request.scope)
    record["user"] = body.user
    if state.settings.log_prompts:
        record["prompt"] = body.prompt
    completion = Completion(state, body, job, model, record)
    if body.stream:
        return EventStream(state, job.samples, completion.events())
    return await answer(state, request, job.samples, completion.whole)


class Choice:
    """One continuation on its way out."""

    def __init__(
        self, index: int, prompt: Sequence[int], prompt_text: str, tokenizer: Tokenizer, body: CompletionRequest
    ) -> None:
        self.index = index
        self._prompt, self._prompt_text, self._tokenizer, self._body = prompt, prompt_text, tokenizer, body
        self._spans = Spans(tokenizer)
        self._offset = 0
        self._begun = False

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """The piece as a streamed choice; None where there is nothing to tell yet."""
        echoed = bool(self._body.echo) and not self._begun
        self._begun = True
        text = self._prompt_text + piece.text if echoed else piece.text
        choice: dict[str, Any] = {"index": self.index, "text": text, "logprobs": None, "finish_reason": None}
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece, echoed)
        if self._body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        if self._body.return_spans:
            choice["spans"] = self._spans.cut(piece)
        if piece.finish is not None:
            choice |= {"finish_reason": str(piece.finish.reason), "stop_reason": piece.finish.detail}
        kept = piece.token_ids and (choice["logprobs"] or self._body.return_token_ids)
        return choice if text or piece.finish or kept else None

    def _logprobs(self, piece: Piece, echoed: bool) -> dict[str, Any]:
        entries: list[Logprob | None] = list(piece.logprobs)
        tokens = list(piece.token_ids)
        if echoed and piece.prompt_logprobs is not None:
            entries = [*piece.prompt_logprobs, *entries]
            tokens = [*self._prompt, *tokens]
        top = self._body.logprobs or 0
        told, self._offset = completion_logprobs(self._tokenizer, entries, tokens, top, self._offset)
        return told


class Completion(Reply):
    """One completion request."""

    def __init__(
        self, state: ServerState, body: CompletionRequest, job: Job, model: str, record: dict[str, Any]
    ) -> None:
        self._body = body
        tokenizer = state.backend.tokenizer
        texts = [_prompt_text(body, number, prompt, tokenizer) for number, prompt in enumerate(job.prompts)]
        n = job.params.n
        choices = [
            Choice(index, job.prompts[index // n], texts[index // n], tokenizer, body) for index in range(job.samples)
        ]
        head = TextChunk(id=f"cmpl-{job.id}", created=int(time.time()), model=model)
        super().__init__(state, body, job, record, head, choices)

    async def whole(self) -> dict[str, Any]:
        """The complete response: the stream, folded."""
        folded: list[dict[str, Any]] = [
            {"index": index, "text": "", "logprobs": None, "finish_reason": None} for index in range(self._job.samples)
        ]
        async with aclosing(self.chunks()) as chunks:
            async for choice, piece in chunks:
                _fold(folded[choice["index"]], choice)
                if self._body.prompt_logprobs is not None and piece.prompt_logprobs is not None:
                    told = prompt_logprobs(self._state.backend.tokenizer, piece.prompt_logprobs)
                    folded[choice["index"]]["prompt_logprobs"] = told
        if self._state.settings.log_prompts:
            self._record["answer"] = [choice["text"] for choice in folded]
        return self.front | {"object": "text_completion", "choices": folded, "usage": self._usage.to_dict()}


def _fold(choice: dict[str, Any], chunk: dict[str, Any]) -> None:
    """Add a streamed choice to a whole one."""
    choice["text"] += chunk["text"]
    if chunk["logprobs"]:
        choice["logprobs"] = choice["logprobs"] or {name: [] for name in chunk["logprobs"]}
        for name, values in chunk["logprobs"].items():
            choice["logprobs"][name] += values
    fold_rest(choice, chunk)


def _prompt_text(body: CompletionRequest, number: int, prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """What echo gives back: the client's own text, or the text of its token ids."""
    if not body.echo:
        return ""
    if isinstance(body.prompt, str):
        return body.prompt
    given = body.prompt[number] if len(body.prompt) > number else None
    return given if isinstance(given, str) else tokenizer.decode(prompt)


def _check_count(body: CompletionRequest, limit: int) -> None:
    prompts = body.prompt
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) and len(prompts) > limit:
        raise UnsupportedError(f"{len(prompts)} prompts are more than this server's limit of {limit}", field="prompt")
