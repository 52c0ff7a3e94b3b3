"""A backend without a model: it says what the prompt tells it to say, in the chunks a test asks for.

A user message "say:TEXT" is answered by TEXT, anything else by "You said: ...". Tokens are bytes; three more are
control tokens. Every open stream is counted, so a test can prove that leaving frees everything.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.api.outputs import Piece
from outrider.errors import CapacityError
from outrider.types import Finish, Logprob, SamplingParams

START, END, BOS = 256, 257, 258
CONTROL = {START: b"<|start|>", END: b"<|end|>", BOS: b"<|bos|>"}

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "say:" + "x" * 4000}]}
SHORT = {"messages": [{"role": "user", "content": "say:hi"}]}


class StubTokenizer:
    """Bytes and three control tokens."""

    eos_token_ids = (END,)
    vocab_size = 259

    def __init__(self, has_chat_template: bool = True, knows_tools: bool = True) -> None:
        self.has_chat_template, self.knows_tools = has_chat_template, knows_tools

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        return [BOS] * add_special + list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(bytes([i]) for i in ids if i < 256).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return CONTROL.get(token_id) or bytes([token_id])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        ids = [BOS]
        if tools and self.knows_tools:
            ids += [START, *self.encode("tools\n" + json.dumps(tools)), END]
        for message in messages:
            ids += [START, *self.encode(f"{message['role']}\n{message.get('content') or ''}"), END]
        if add_generation_prompt:
            ids += [START, *self.encode("assistant\n" + ("<think>\n" if variables.get("enable_thinking") else ""))]
        return ids


def said(prompt: Sequence[int], params: SamplingParams, index: int) -> str:
    """The default script."""
    text = StubTokenizer().decode(prompt)
    text = text.removesuffix("<think>\n").removesuffix("assistant\n")
    if "say:" in text:
        return text.rpartition("say:")[2]
    return "You said: " + text.rpartition("user\n")[2]


@dataclass
class StubBackend:
    """`step` tokens per piece, all but the last of them drafted and accepted, one more drafted and rejected."""

    script: Callable[[Sequence[int], SamplingParams, int], str] = said
    step: int = 4
    delay: float = 0.0
    first_delay: float = 0.0
    max_model_len: int = 4096
    model_name: str = "stub"
    tokenizer: StubTokenizer = field(default_factory=StubTokenizer)
    refuse: Exception | None = None
    fail_after: int | None = None  # pieces
    capacity: int = 1000

    open: int = 0
    aborted: int = 0
    closed: bool = False
    healthy: bool = True
    seen: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    drafts: int = 0
    delivered: int = 0

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[Piece, None]:
        self.seen.append((list(prompt_ids), params))
        if self.refuse is not None:
            raise self.refuse
        if self.open >= self.capacity:
            raise CapacityError("the stub is full; try again later")
        self.open += 1
        whole = False
        try:
            await asyncio.sleep(self.first_delay)
            samples = [self._sample(prompt_ids, params, request_id, index) for index in range(params.n)]
            for number, pieces in enumerate(zip_longest(samples)):
                for piece in pieces:
                    if self.fail_after == number:
                        yield Piece(request_id, piece.index, "", finish=Finish("error", "it broke"))
                        continue
                    self.delivered += len(piece.token_ids)
                    yield piece
                if self.fail_after == number:
                    break
                await asyncio.sleep(self.delay)
            whole = True
        finally:
            self.open -= 1
            self.aborted += not whole

    def stats(self) -> dict[str, Any]:
        drafter = {"name": "ngram", "drafts": self.drafts, "draft_tokens": self.drafts * self.step}
        drafter |= {"accepted_tokens": self.drafts * (self.step - 1), "per_position": [self.drafts] * (self.step - 1)}
        drafter |= {"votes_won": 2, "weight": 0.75, "rounds": self.drafts, "agreed_tokens": 0, "held": self.open}
        return {
            "running": self.open,
            "waiting": 0,
            "kv_pages_used": self.open,
            "kv_pages_total": 100,
            "prefix_cache_queries": 10,
            "prefix_cache_hits": 4,
            "speculation": {"drafters": [drafter], "lengths": {self.step: self.drafts}, "draft_s": 0.5},
            "tiers": {"host": {"loaded_bytes": 1024, "stored_bytes": 2048, "exposed_wait_seconds": 0.25}},
            "context": {"mode": "sparse", "budget": 64, "read_entries": 30, "known_entries": 120}
            | {"overlap": 0.9, "captured": 0.8, "select_s": 0.125, "sparse_steps": 3},
            "kv_bytes_touched": 4096,
            "kv_bytes_total": 8192,
        }

    def describe(self) -> dict[str, Any]:
        return {"model": self.model_name, "max_model_len": self.max_model_len}

    def close(self) -> None:
        self.closed = True

    def _sample(self, prompt: Sequence[int], params: SamplingParams, request_id: str, index: int) -> list[Piece]:
        text = self.script(prompt, params, index)
        ids, finish = list(text.encode("utf-8", "surrogateescape")), Finish("stop", END)
        for stop in params.stop_strings:
            at = text.find(stop)
            if at >= 0:
                ids, finish = list(text[:at].encode()), Finish("stop", stop)
        if params.max_tokens is not None and len(ids) > params.max_tokens:
            ids, finish = ids[: params.max_tokens], Finish("length")
        return list(self._pieces(ids, finish, prompt, params, request_id, index))

    def _pieces(self, ids: list[int], finish: Finish, prompt: Any, params: Any, request_id: str, index: int) -> Any:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        speculative = params.speculative
        step = self.step if speculative else 1
        for start in range(0, max(len(ids), 1), step):
            tokens = tuple(ids[start : start + step])
            last = start + step >= len(ids)
            self.drafts += speculative
            yield Piece(
                request_id=request_id,
                index=index,
                text=decoder.decode(bytes(tokens), last),
                token_ids=tokens,
                logprobs=tuple(_logprob(t, params.logprobs) for t in tokens) if params.logprobs is not None else (),
                accepted=max(0, len(tokens) - 1) if speculative else 0,
                drafted=step if speculative else 0,
                drafter="ngram" if speculative else "none",
                finish=finish if last else None,
                cached_tokens=8 if start == 0 else 0,
                prompt_logprobs=_prompt(prompt, params) if start == 0 else None,
            )


def zip_longest(samples: list[list[Piece]]) -> Any:
    """Rounds of the pieces that are left."""
    for number in range(max(map(len, samples))):
        yield [pieces[number] for pieces in samples if number < len(pieces)]


def _logprob(token: int, top: int) -> Logprob:
    return Logprob(token, -0.25, 1, tuple(((token + i) % 256, -0.25 - i) for i in range(top)))


def _prompt(prompt: Sequence[int], params: SamplingParams) -> tuple[Logprob | None, ...] | None:
    if params.prompt_logprobs is None:
        return None
    return (None, *(_logprob(token, params.prompt_logprobs) for token in prompt[1:]))


def slow(**options: Any) -> StubBackend:
    """An engine that would take minutes for LONG."""
    return StubBackend(delay=0.1, max_model_len=10**6, **options)
