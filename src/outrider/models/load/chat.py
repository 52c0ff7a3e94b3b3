"""Chat templates: messages to one string, in a sandbox, with what users wrote kept from acting as control tokens.

Control tokens within user strings are broken by a private-use character before rendering; Tokenizer.chat encodes
those pieces as plain text. What Hugging Face templates expect is there: raise_exception, strftime_now, tojson,
break and continue, {% generation %}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import ModelError, UnsupportedError

PRIVATE_USE = range(0xE000, 0xF900)


class Fence:
    """Breaks control tokens inside user strings with a mark: a character that occurs in none of them."""

    def __init__(self, controls: Iterable[str]) -> None:
        longest_first = sorted(filter(None, controls), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = frozenset(text[:size] for text in longest_first for size in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def apply(self, value: Any, mark: str) -> Any:
        """The same structure with every string in it fenced."""
        if isinstance(value, str):
            return self._fenced(value, mark)
        if isinstance(value, Mapping):
            return {self.apply(key, mark): self.apply(item, mark) for key, item in value.items()}
        return [self.apply(item, mark) for item in value] if isinstance(value, (list, tuple)) else value

    def _fenced(self, text: str, mark: str) -> str:
        broken = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        # Two harmless strings side by side in the template must not join into a control token either.
        could_begin = any(text[-size:] in self._beginnings for size in range(1, min(self._longest, len(text)) + 1))
        return broken + mark if could_begin else broken

    def split(self, text: str, mark: str) -> list[str]:
        """Rendered text as plain, control, plain, control, ..., plain; the marks are gone from the plain pieces."""
        plain = [piece.replace(mark, "") for piece in self._pattern.split(text)]
        controls = self._pattern.findall(text)
        return [piece for pair in zip(plain, [*controls, ""], strict=True) for piece in pair][:-1]


def unused_mark(text: str) -> str:
    """A private-use character that the text does not contain. UnsupportedError where it contains them all."""
    used = set(text)
    free = next((mark for mark in map(chr, PRIVATE_USE) if mark not in used), None)
    if free is None:
        raise UnsupportedError("the messages use every private-use character; leave one out", field="messages")
    return free


def strings_of(value: Any) -> str:
    """All characters of all strings in a structure, to find one that is not used."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "".join(strings_of(key) + strings_of(item) for key, item in value.items())
    return "".join(map(strings_of, value)) if isinstance(value, (list, tuple)) else ""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """The prompt text. UnsupportedError where the template refuses the messages, ModelError where it is no template."""
    compiled = _compile(template)
    try:
        return compiled.render(messages=messages, tools=tools, **variables)
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedError(
            f"the model's chat template refuses these messages: {reason}; change the messages", field="messages"
        ) from None


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except TemplateError as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the model's chat template cannot be read: {reason}; give a prompt instead") from None


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As in Hugging Face templates: plain JSON, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body: Sequence[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(list(body)).set_lineno(line)
