"""Answers taken apart while they stream: <think> text becomes reasoning, <tool_call> JSON becomes tool calls.

What comes out depends on the characters alone, never on how they were chunked; nothing is lost: text that turns out to
be no valid call is given back as content.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
BARE = '{"name":'  # how a call without its markup begins, but for white space


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text the model wrote to itself."""

    text: str


@dataclass(frozen=True)
class Call:
    """A complete tool call; `arguments` is a JSON object as text."""

    name: str
    arguments: str


Event = Content | Reasoning | Call


class Parser(Protocol):
    """Takes text in any chunks; the events' concatenation is the same for all of them."""

    def feed(self, text: str) -> list[Event]:
        """Events that this text completes; what may be the beginning of a marker is held back."""
        ...

    def close(self) -> list[Event]:
        """Events of what was held back, once the answer has ended."""
        ...


class PlainParser:
    """Everything is content."""

    def feed(self, text: str) -> list[Event]:
        """The text as it is."""
        return [Content(text)] if text else []

    def close(self) -> list[Event]:
        """Nothing is held back."""
        return []


class MarkupParser:
    """Reasoning at the beginning, then content with tool calls in it. White space around the markup is dropped.

    Small models forget the markup: an answer that opens with the JSON of a call is a call as well.

    `thinking`: None for models that do not, False for text that may begin with <think>, True where the prompt already
    opened it. `tools` holds the names that may be called; empty leaves <tool_call> alone.
    """

    def __init__(self, thinking: bool | None, tools: Collection[str] = ()) -> None:
        self._tools = tools
        self._held = ""
        self._start = self._opening if tools else self._content
        self._read = {None: self._start, False: self._beginning, True: self._reasoning}[thinking]
        self._skip_space = bool(thinking)

    def feed(self, text: str) -> list[Event]:
        """Events of a chunk; what could be the beginning of markup is held back."""
        self._held += text
        return self._drain(final=False)

    def close(self) -> list[Event]:
        """The text is over: what was held back is decided."""
        return self._drain(final=True)

    def _drain(self, final: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            if self._skip_space:
                self._held = self._held.lstrip()
                self._skip_space = not self._held
            before = (self._held, self._read)
            events += self._read(final)
            if (self._held, self._read) == before or not (self._held or final):
                return events

    def _beginning(self, final: bool) -> list[Event]:
        """Before the first visible character: does the text open with <think>?"""
        seen = self._held.lstrip()
        if seen.startswith(THINK):
            self._held, self._read, self._skip_space = seen[len(THINK) :], self._reasoning, True
        elif final or not THINK.startswith(seen):
            self._read = self._start
        return []

    def _reasoning(self, final: bool) -> list[Event]:
        """Until </think>; white space in front of it is dropped."""
        text, found = self._until(THINK_END, final)
        if found:
            self._read, self._skip_space = self._start, True
        return [Reasoning(text)] if text else []

    def _opening(self, final: bool) -> list[Event]:
        """Before the first visible character of the content: does it open with a bare call?"""
        seen = "".join(self._held.split())
        if seen.startswith(BARE):
            self._read = self._bare
        elif final or not BARE.startswith(seen):
            self._read = self._content
        return []

    def _bare(self, final: bool) -> list[Event]:
        """Until the JSON is whole; where it never is, or is no call, it was content."""
        if "}" not in self._held and not final:
            return []
        text = self._held.lstrip()
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            self._read = self._content if final else self._bare
            return []
        call = parse_call(text[:end], self._tools)
        if call is None:
            self._read = self._content
            return []
        self._held, self._read, self._skip_space = text[end:], self._opening, True
        return [call]

    def _content(self, final: bool) -> list[Event]:
        """Until <tool_call>, where tools are offered."""
        if not self._tools:
            text, self._held = self._held, ""
            return [Content(text)] if text else []
        text, found = self._until(CALL, final)
        if found:
            self._read = self._call
        return [Content(text)] if text else []

    def _call(self, final: bool) -> list[Event]:
        """Until </tool_call>; a text that ends inside a call may still have completed its JSON."""
        body, end, rest = self._held.partition(CALL_END)
        if not end and not final:
            return []
        self._held, self._read = rest, self._content
        call = parse_call(body, self._tools)
        if call is None:
            return [Content(CALL + body + end)]
        self._skip_space = True
        return [call]

    def _until(self, marker: str, final: bool) -> tuple[str, bool]:
        """Take the text before `marker`, or all of it that cannot belong to the marker or to space in front of it."""
        text, found, rest = self._held.partition(marker)
        if found:
            self._held = rest
            return text.rstrip(), True
        if final:
            self._held = ""
            return text, False
        safe = text[: len(text) - _overlap(text, marker)].rstrip()
        self._held = text[len(safe) :]
        return safe, False


class ForcedCallParser:
    """The whole text is the JSON of one call, as a grammar forced it (tool_choice "required" or by name)."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._text = ""

    def feed(self, text: str) -> list[Event]:
        """Nothing is told before the call is whole."""
        self._text += text
        return []

    def close(self) -> list[Event]:
        """The call, or the text itself where a token limit cut it."""
        call = parse_call(self._text, self._tools)
        if call is not None:
            return [call]
        return [Content(self._text)] if self._text else []


def parse_call(body: str, names: Collection[str]) -> Call | None:
    """A call of one of the named tools from its JSON, or None."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
