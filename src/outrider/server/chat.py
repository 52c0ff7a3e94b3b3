"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from fastapi import Request
from fastapi.responses import Response

from outrider.errors import UnsupportedError
from outrider.server.backend import Piece, Tokenizer
from outrider.server.generate import Job
from outrider.server.logprobs import chat_logprobs, prompt_logprobs
from outrider.server.parsers import (
    CALL_END,
    THINK,
    Call,
    Content,
    Event,
    ForcedCallParser,
    MarkupParser,
    Parser,
    PlainParser,
    Reasoning,
)
from outrider.server.prompts import encode_chat
from outrider.server.reply import Reply, fold_rest
from outrider.server.requests import ChatRequest, NamedTool, Tool
from outrider.server.responses import ChatChunk
from outrider.server.sampling import check_length, sampling_params
from outrider.server.spans import Spans
from outrider.server.state import ServerState, record_of
from outrider.server.stream import EventStream, answer

TAIL = 8  # last prompt tokens in which an opened <think> is looked for


@dataclass(frozen=True)
class ToolUse:
    """Which tools a request offers and how far the model is forced to use one."""

    offered: Sequence[Tool] = ()
    forced: bool = False
    named: bool = False

    @property
    def names(self) -> list[str]:
        """Names that may be called."""
        return [tool.function.name for tool in self.offered]

    @property
    def grammar(self) -> dict[str, Any] | None:
        """The JSON schema of one call, where a call is forced."""
        if not self.forced:
            return None
        calls = [_call_schema(tool) for tool in self.offered]
        return {"json": calls[0] if len(calls) == 1 else {"anyOf": calls}}


async def chat(state: ServerState, body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    model = state.check_model(body.model)
    tokenizer = state.backend.tokenizer
    tools = _tool_use(state, body)
    params = sampling_params(_with_stops(body, tools), state.settings, tokenizer.vocab_size, tools.grammar)
    prompt = await encode_chat(tokenizer, body.messages, tools.offered, variables=body.chat_template_kwargs)
    check_length(len(prompt), params.max_tokens, state.backend.max_model_len)
    job = Job(uuid4().hex, [prompt], params)
    record = record_of(request.scope)
    record["user"] = body.user
    if state.settings.log_prompts:
        record["prompt"] = [message.model_dump(exclude_none=True) for message in body.messages]
    conversation = Conversation(state, body, job, tools, model, record)
    if body.stream:
        return EventStream(state, job.samples, conversation.events())
    return await answer(state, request, job.samples, conversation.whole)


class Choice:
    """One sample of a chat on its way out."""

    def __init__(self, index: int, parser: Parser, tokenizer: Tokenizer, body: ChatRequest, named: bool) -> None:
        self.index = index
        self._parser, self._tokenizer, self._body, self._named = parser, tokenizer, body, named
        self._spans = Spans(tokenizer)
        self._calls = 0
        self._begun = False

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """The piece as a streamed choice; None where there is nothing to tell yet."""
        events = self._parser.feed(piece.text)
        if piece.finish is not None:
            events += self._parser.close()
        delta = self._delta(events)
        choice: dict[str, Any] = {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._body.logprobs:
            content = chat_logprobs(self._tokenizer, piece.logprobs, self._body.top_logprobs or 0)
            choice["logprobs"] = {"content": content, "refusal": None}
        if self._body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        if self._body.return_spans:
            choice["spans"] = self._spans.cut(piece)
        if piece.finish is not None:
            choice |= {"finish_reason": self._reason(piece), "stop_reason": piece.finish.detail}
        told = delta or piece.finish or choice.get("spans")
        kept = piece.token_ids and (self._body.logprobs or self._body.return_token_ids)
        return choice if told or kept else None

    def _delta(self, events: Sequence[Event]) -> dict[str, Any]:
        delta: dict[str, Any] = {} if self._begun else {"role": "assistant", "content": ""}
        self._begun = True
        for item in events:
            if isinstance(item, Content):
                delta["content"] = delta.get("content", "") + item.text
            elif isinstance(item, Reasoning):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + item.text
            else:
                delta.setdefault("tool_calls", []).append(self._call(item))
        return delta

    def _call(self, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        self._calls += 1
        identity = f"call_{uuid4().hex[:24]}"
        return {"index": self._calls - 1, "id": identity, "type": "function", "function": function}

    def _reason(self, piece: Piece) -> str:
        """OpenAI's finish reason; a call that the client forced by name ends with stop."""
        assert piece.finish is not None
        return "tool_calls" if self._calls and not self._named else str(piece.finish.reason)


class Conversation(Reply):
    """One chat request."""

    def __init__(
        self,
        state: ServerState,
        body: ChatRequest,
        job: Job,
        tools: ToolUse,
        model: str,
        record: dict[str, Any],
    ) -> None:
        tokenizer = state.backend.tokenizer
        choices = [
            Choice(index, _parser(state, body, tools, job.prompts[0]), tokenizer, body, tools.named)
            for index in range(job.samples)
        ]
        head = ChatChunk(id=f"chatcmpl-{job.id}", created=int(time.time()), model=model)
        super().__init__(state, body, job, record, head, choices)

    async def whole(self) -> dict[str, Any]:
        """The complete response: the stream, folded."""
        folded = [_empty(index) for index in range(self._job.samples)]
        response = self.front | {"object": "chat.completion"}
        async with aclosing(self.chunks()) as chunks:
            async for choice, piece in chunks:
                _fold(folded[choice["index"]], choice)
                if piece.prompt_logprobs is not None:
                    response["prompt_logprobs"] = prompt_logprobs(self._state.backend.tokenizer, piece.prompt_logprobs)
        if self._state.settings.log_prompts:
            self._record["answer"] = [choice["message"]["content"] for choice in folded]
        return response | {"choices": folded, "usage": self._usage.to_dict()}


def _empty(index: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": None, "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": None}


def _fold(choice: dict[str, Any], chunk: dict[str, Any]) -> None:
    """Add a streamed choice to a whole one."""
    message, delta = choice["message"], chunk["delta"]
    for name in ("content", "reasoning_content"):
        if name in delta and (delta[name] or name in message):
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls", ()):
        message.setdefault("tool_calls", []).append({k: v for k, v in call.items() if k != "index"})
    if chunk["logprobs"]:
        choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
        choice["logprobs"]["content"] += chunk["logprobs"]["content"]
    fold_rest(choice, chunk)
    if chunk["finish_reason"] and message["content"] == "" and "tool_calls" in message:
        message["content"] = None


def _tool_use(state: ServerState, body: ChatRequest) -> ToolUse:
    """Read tools and tool_choice; raises UnsupportedError where they cannot be honoured."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise UnsupportedError("tool_choice needs tools", field="tool_choice")
        return ToolUse()
    if choice == "none":
        return ToolUse()
    if not state.has_tools:
        raise UnsupportedError("this model's chat template knows no tools; leave tools out", field="tools")
    if state.settings.tool_parser == "none" and not isinstance(choice, NamedTool) and choice != "required":
        raise UnsupportedError("tool calls are switched off here (tool_parser = none)", field="tools")
    if not isinstance(choice, NamedTool):
        return ToolUse(tools, forced=choice == "required")
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    if not named:
        raise UnsupportedError(f"tool_choice names {choice.function.name[:64]!r}, no such tool", field="tool_choice")
    return ToolUse(named, forced=True, named=True)


def _with_stops(body: ChatRequest, tools: ToolUse) -> ChatRequest:
    """parallel_tool_calls = false: the text ends with the first call."""
    if not tools.offered or tools.forced or body.parallel_tool_calls is not False:
        return body
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return body.model_copy(update={"stop": [*stops, CALL_END]})


def _parser(state: ServerState, body: ChatRequest, tools: ToolUse, prompt: Sequence[int]) -> Parser:
    """The parser that fits the request and the end of its prompt."""
    if tools.forced:
        return ForcedCallParser(tools.names)
    constrained = body.structured_outputs or (body.response_format and body.response_format.type != "text")
    thinks = state.settings.reasoning_parser == "auto" and not constrained
    if not thinks and not tools.offered:
        return PlainParser()
    tail = b"".join(map(state.backend.tokenizer.token_bytes, prompt[-TAIL:]))
    opened = tail.rstrip().endswith(THINK.encode())
    return MarkupParser(opened if thinks else None, tools.names)


def _call_schema(tool: Tool) -> dict[str, Any]:
    arguments = tool.function.parameters or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
