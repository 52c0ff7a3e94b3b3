"""Parsers of reasoning and tool calls: the same result for every chunking, and nothing is ever lost."""

from __future__ import annotations

import json
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.server.parsers import Call, Content, ForcedCallParser, MarkupParser, Parser, PlainParser, Reasoning

TOOLS = ["weather", "add"]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TEXTS = [
    "plain",
    "<think>\nhm <b>\n</think>\n\nIt is 5 < 6.",
    f"Let me see.\n{CALL}\n{CALL}",
    f"<think>a</think>b{CALL}c",
    "<tool_call>no json</tool_call> tail",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    "a <tool_",
    "<thi",
    '<think>x</think>\n {"name" : "add", "arguments": {"a": "}"}} {"name": "add"} tail',
    '{"name": "add", broken}',
    '<tool_call>{"name": "add", "arguments": {"a": 1}}',
]


def read(parser: Parser, chunks: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """All content, all reasoning, all calls."""
    events = [event for chunk in chunks for event in parser.feed(chunk)] + parser.close()
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return content, reasoning, [(e.name, e.arguments) for e in events if isinstance(e, Call)]


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ("plain", "", [])),
        ("<think>\nhm <b>\n</think>\n\nIt is 5 < 6.", ("It is 5 < 6.", "hm <b>", [])),
        (f"Let me see.\n{CALL}\n{CALL}", ("Let me see.", "", [("weather", '{"city": "Köln"}')] * 2)),
        (f"<think>a</think>b{CALL}c", ("bc", "a", [("weather", '{"city": "Köln"}')])),
        ("<tool_call>no json</tool_call> tail", ("<tool_call>no json</tool_call> tail", "", [])),
        ("a <tool_", ("a <tool_", "", [])),
        ("<thi", ("<thi", "", [])),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', ("", "", [("add", '{"a": 1}')])),
        ("  \n", ("  \n", "", [])),
        (' {"name": "add", "arguments": {"a": {}}}\n{"name": "add"}', ("", "", [("add", '{"a": {}}'), ("add", "{}")])),
        ('{"name": "unknown", "arguments": {}}', ('{"name": "unknown", "arguments": {}}', "", [])),
        ('{"name": "add", broken}', ('{"name": "add", broken}', "", [])),
        ('{"names": 1}', ('{"names": 1}', "", [])),
        ('see {"name": "add"}', ('see {"name": "add"}', "", [])),
        ("later <think>x</think>", ("later <think>x</think>", "", [])),
    ],
)
def test_texts_are_taken_apart(text: str, expected: object) -> None:
    assert read(MarkupParser(False, TOOLS), [text]) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_every_pair_of_cuts_gives_the_same(text: str) -> None:
    whole = read(MarkupParser(False, TOOLS), [text])
    assert read(MarkupParser(False, TOOLS), list(text)) == whole
    for places in combinations(range(len(text) + 1), 2):
        assert read(MarkupParser(False, TOOLS), cut(text, list(places))) == whole


pieces = st.sampled_from(
    [
        "<think>",
        "</think>",
        '{"name": "add"}',
        "<tool_call>",
        "</tool_call>",
        "<",
        " ",
        "\n",
        "x",
        "é",
        '{"name": "add"',
        "}",
        '"',
        CALL,
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(pieces, max_size=12).map("".join),
    places=st.lists(st.integers(0, 150), max_size=8),
    thinking=st.sampled_from([None, False, True]),
)
def test_chunks_do_not_matter(text: str, places: list[int], thinking: bool | None) -> None:
    chunks = cut(text, [min(place, len(text)) for place in places])
    whole = read(MarkupParser(thinking, TOOLS), [text])
    assert read(MarkupParser(thinking, TOOLS), chunks) == whole
    assert read(MarkupParser(thinking, TOOLS), list(text)) == whole


@settings(max_examples=200, deadline=None)
@given(text=st.lists(pieces, max_size=12).map("".join))
def test_nothing_visible_is_lost(text: str) -> None:
    """Without a valid call every character that is no white space and no think tag comes out."""
    content, reasoning, calls = read(MarkupParser(False, ["other"]), [text])
    assert not calls
    left = "".join((reasoning + content).split())
    kept = "".join(text.split())
    tags = len(kept) - len(left)
    assert tags in (0, len("<think>"), len("<think></think>"))


def test_an_opened_think_needs_no_tag() -> None:
    assert read(MarkupParser(True), ["so\n</think>\n\nyes"]) == ("yes", "so", [])


def test_plain_text_is_left_alone() -> None:
    text = f"<think>a</think>{CALL}"
    assert read(PlainParser(), list(text)) == (text, "", [])
    assert read(MarkupParser(None), list(text)) == (text, "", [])


def test_a_forced_call_is_the_whole_text() -> None:
    body = json.dumps({"name": "add", "arguments": {"a": 1}})
    assert read(ForcedCallParser(TOOLS), list(body)) == ("", "", [("add", '{"a": 1}')])
    assert read(ForcedCallParser(TOOLS), list(body[:-3])) == (body[:-3], "", [])


def test_arguments_may_be_text_of_json() -> None:
    text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>'
    assert read(MarkupParser(None, TOOLS), [text])[2] == [("add", '{"a": 2}')]
