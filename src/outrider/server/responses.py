"""The shapes of answers, for the OpenAPI page, and those of what a stream carries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Error(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every refusal."""

    error: Error


class PromptDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Of the drafted tokens: what the target accepted, and what it rejected (never delivered, not in the counts)."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(BaseModel):
    """Tokens of a request, over all prompts and samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class CalledFunction(BaseModel):
    """A function call; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class CalledTool(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(BaseModel):
    """One sample of a chat."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class TextChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class TextCompletion(BaseModel):
    """The continuation of prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody


class Span(BaseModel):
    """Text of one origin; drafter None: the target's own."""

    text: str
    drafter: str | None


class TextChoiceChunk(BaseModel):
    """The next part of a continuation. What has a default is there where it was asked for, or at the end."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None
    spans: list[Span] | None = None
    stop_reason: str | int | None = None


class TextChunk(BaseModel):
    """One event of a streamed completion; the usage, where it was asked for, comes last and without a choice."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoiceChunk] = []
    usage: UsageBody | None = None


class CalledToolDelta(BaseModel):
    """A tool call in a stream: it comes whole."""

    index: int
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerDelta(BaseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledToolDelta] | None = None


class ChatChoiceChunk(BaseModel):
    """The next part of a sample of a chat. What has a default is there where it was asked for, or at the end."""

    index: int
    delta: AnswerDelta
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | None = None
    spans: list[Span] | None = None
    stop_reason: str | int | None = None


class ChatChunk(BaseModel):
    """One event of a streamed chat; the usage, where it was asked for, comes last and without a choice."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChoiceChunk] = []
    usage: UsageBody | None = None


class Model(BaseModel):
    """A name that requests may use."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(BaseModel):
    """All names."""

    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    """A text as token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """The text of token ids."""

    prompt: str


class Health(BaseModel):
    """Whether the server takes requests."""

    status: Literal["ready", "draining", "failed"]
    model: str


class Version(BaseModel):
    """The server's version."""

    version: str
