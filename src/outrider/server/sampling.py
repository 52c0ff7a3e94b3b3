"""From a request body to SamplingParams; limits that only a server needs are checked here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.errors import PromptTooLongError, UnsupportedError
from outrider.server.requests import ChatRequest, CompletionRequest, ResponseFormat, SampledRequest, StructuredOutputs
from outrider.server.settings import Settings
from outrider.types import SamplingParams

# Fields that have the same name and meaning in SamplingParams.
SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "allowed_token_ids",
    "banned_token_ids",
    "prompt_logprobs",
)


def sampling_params(
    body: SampledRequest, settings: Settings, vocab_size: int, grammar: Mapping[str, Any] | None = None
) -> SamplingParams:
    """The parameters a body asks for. `grammar` constrains the text beside what the body says (forced tool calls).

    Raises UnsupportedError that names the field.
    """
    _check_limits(body, settings, vocab_size)
    values: dict[str, Any] = {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    values["max_tokens"] = max_tokens(body)
    if body.logit_bias:
        values["logit_bias"] = _logit_bias(body.logit_bias, vocab_size)
    if body.seed is not None:
        values["seed"] = body.seed & ((1 << 63) - 1)
    if (logprobs := _logprobs(body)) is not None:
        values["logprobs"] = logprobs
    if structure := _structure(body, settings, grammar):
        values["structured_outputs"] = structure
    values["extra_args"] = _extra_args(body)
    return _build(values)


def max_tokens(body: SampledRequest) -> int | None:
    """The token limit a body names: completions default to 16 as OpenAI's do, chats to the context's end."""
    if isinstance(body, ChatRequest):
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise UnsupportedError("max_tokens and max_completion_tokens differ; give one", field="max_tokens")
        return body.max_completion_tokens or body.max_tokens
    return body.max_tokens or 16


def check_length(prompt: int, limit: int | None, max_model_len: int) -> None:
    """Refuse what cannot fit the context; nothing is ever cut silently."""
    wanted = prompt + (limit or 1)
    if prompt == 0:
        raise UnsupportedError("the prompt is empty; give at least one token", field="prompt")
    if wanted > max_model_len:
        asked = f"{prompt} prompt tokens" + (f" and {limit} to generate" if limit else "")
        raise PromptTooLongError(f"{asked} do not fit the context of {max_model_len} tokens; shorten one of them")


def _build(values: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**values)
    except OverflowError:
        raise UnsupportedError("a number is out of range", field=None) from None


def _check_limits(body: SampledRequest, settings: Settings, vocab_size: int) -> None:
    """The server's own bounds on counts, and token ids that exist."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    sizes = [("n", body.n or 1, settings.max_n), ("stop", len(stops), settings.max_stop)]
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        sizes.append((name, len(getattr(body, name) or ()), settings.max_logit_bias))
    for name, size, limit in sizes:
        if size > limit:
            raise UnsupportedError(f"{name}: {size} is more than this server's limit of {limit}", field=name)
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        if any(token >= vocab_size for token in getattr(body, name) or ()):
            raise UnsupportedError(f"{name} holds an id outside the vocabulary of {vocab_size}", field=name)
    if body.stream_options is not None and not body.stream:
        raise UnsupportedError("stream_options needs stream = true", field="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise UnsupportedError("prompt_logprobs is not available in a stream", field="prompt_logprobs")


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    """Token ids as numbers, values within OpenAI's bounds."""
    result = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise UnsupportedError(f"logit_bias: {key[:20]!r} is no token id below {vocab_size}", field="logit_bias")
        if not -100 <= value <= 100:
            raise UnsupportedError(f"logit_bias[{key}] = {value} is refused; use -100 to 100", field="logit_bias")
        result[int(key)] = float(value)
    return result


def _logprobs(body: SampledRequest) -> int | None:
    """How many alternatives per token; chat says it in two fields, completions in one."""
    if isinstance(body, ChatRequest):
        if body.top_logprobs is not None and not body.logprobs:
            raise UnsupportedError("top_logprobs needs logprobs = true", field="top_logprobs")
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionRequest) else None


def _extra_args(body: SampledRequest) -> dict[str, Any]:
    named = {"speculative": body.speculative, "context_budget": body.context_budget}
    return {name: value for name, value in named.items() if value is not None}


def _structure(body: SampledRequest, settings: Settings, grammar: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The one constraint on the text, whichever field named it."""
    asked = [
        ("tool_choice", dict(grammar) if grammar else None),
        ("response_format", _response_format(body.response_format)),
        ("structured_outputs", _structured_outputs(body.structured_outputs)),
    ]
    given = [(field, value) for field, value in asked if value]
    if len(given) > 1:
        raise UnsupportedError(f"{given[0][0]} and {given[1][0]} both constrain the text; give one", field=given[1][0])
    if not given:
        return None
    field, value = given[0]
    if len(json.dumps(value)) > settings.max_grammar_bytes:
        raise UnsupportedError(
            f"{field} is longer than this server's limit of {settings.max_grammar_bytes} bytes", field=field
        )
    return value


def _response_format(given: ResponseFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"json_object": True}
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise UnsupportedError("response_format of type json_schema needs json_schema.schema", field="response_format")
    return {"json": given.json_schema.schema_}


def _structured_outputs(given: StructuredOutputs | None) -> dict[str, Any] | None:
    if given is None:
        return None
    values = {name: value for name, value in given.model_dump(by_alias=True).items() if value not in (None, False)}
    if len(values) != 1:
        raise UnsupportedError(
            "structured_outputs needs exactly one of json, json_object, regex, choice, grammar",
            field="structured_outputs",
        )
    if values.get("choice") == []:
        raise UnsupportedError("structured_outputs.choice is empty", field="structured_outputs")
    return values
