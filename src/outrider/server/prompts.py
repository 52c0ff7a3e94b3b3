"""From messages and prompts to token ids. Text of users is encoded as text: it never becomes a control token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio.to_thread
from jinja2.exceptions import TemplateError

from outrider.errors import RequestError, UnsupportedError
from outrider.server.backend import Tokenizer
from outrider.server.requests import Message, Tool

LONG_TEXT = 20_000  # characters; longer texts are encoded beside the event loop
PROBE = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}}


async def encode(tokenizer: Tokenizer, text: str, add_special: bool = True) -> list[int]:
    """Token ids of a text; `add_special` adds what the model wants in front of every text."""
    run = partial(tokenizer.encode, text, add_special=add_special)
    return run() if len(text) < LONG_TEXT else await anyio.to_thread.run_sync(run)


async def encode_prompts(
    tokenizer: Tokenizer, prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], add_special: bool
) -> list[list[int]]:
    """Every prompt of a completion request as token ids."""
    if isinstance(prompt, str):
        return [await encode(tokenizer, prompt, add_special)]
    if not prompt:
        raise UnsupportedError("prompt is an empty list; give a text or token ids", field="prompt")
    if isinstance(prompt[0], int):
        return [_checked(tokenizer, list(prompt))]  # type: ignore[arg-type]
    return [
        await encode(tokenizer, one, add_special) if isinstance(one, str) else _checked(tokenizer, list(one))  # type: ignore[arg-type]
        for one in prompt
    ]


async def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    add_generation_prompt: bool = True,
    variables: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation through the model's chat template."""
    if not tokenizer.has_chat_template:
        raise UnsupportedError("this model has no chat template; use /v1/completions", field="messages")
    plain = [plain_message(message) for message in messages]
    listed = [tool.model_dump(exclude_none=True) for tool in tools] or None
    render = partial(
        tokenizer.chat, plain, tools=listed, add_generation_prompt=add_generation_prompt, **(variables or {})
    )
    try:
        if sum(len(str(message.get("content"))) for message in plain) < LONG_TEXT:
            return render()
        return await anyio.to_thread.run_sync(render)
    except TemplateError as error:
        raise RequestError(f"the chat template refuses these messages: {error}", field="messages") from None


def plain_message(message: Message) -> dict[str, Any]:
    """A message as chat templates read it: content is text, arguments of tool calls are objects."""
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if isinstance(message.content, list):
        plain["content"] = "\n".join(part.text for part in message.content)
    else:
        plain["content"] = message.content or ""
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def has_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template shows tools to the model: a prompt with a tool differs from one without."""
    if not tokenizer.has_chat_template:
        return False
    messages = [{"role": "user", "content": "?"}]
    try:
        return tokenizer.chat(messages, tools=[PROBE]) != tokenizer.chat(messages)
    except (TemplateError, RequestError):
        return False


def _plain_call(call: Any) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError("arguments of an earlier tool call are no JSON object", field="messages")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _checked(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    if any(not 0 <= token < tokenizer.vocab_size for token in ids):
        raise UnsupportedError(
            f"prompt holds a token id outside the vocabulary of {tokenizer.vocab_size}", field="prompt"
        )
    return ids
