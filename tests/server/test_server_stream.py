"""Streams as bytes: events are what the models of chunks would write, and each answer of a connection is whole."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import Live, live
from stub import StubBackend

from outrider.server.protocol import Connection
from outrider.server.responses import ChatChunk, TextChunk
from outrider.server.stream import Chunks, json_bytes

HOSTILE = (
    '"quoted" \\ back \\\\ / slash',
    "\x00\x01\x1f\x7f\x85 \u2028\u2029 \ufeff\ufffd",
    "data: [DONE]\n\ndata: {}\r\n\r\n0\r\n\r\n",
    '","logprobs":null}]}',
    "größer 🚀 als 日本 🏽 </script><!--",
    "",
)
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"return_token_ids": True, "return_spans": True},
    {"logprobs": 2, "stream_options": {"include_usage": True}},
    {"n": 2, "max_tokens": 5, "stream_options": {"continuous_usage_stats": True}},
)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(StubBackend(step=3)) as running:
        yield running


def events(server: Live, path: str, body: dict[str, Any]) -> list[bytes]:
    """The events of a stream, as they came."""
    with server.http() as http:
        answer = http.post(path, json={"max_tokens": 500, "stream": True} | body)
    assert answer.status_code == 200, answer.text
    assert answer.content.endswith(b"data: [DONE]\n\n")
    return answer.content.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("text", HOSTILE)
def test_a_completion_streams_what_its_model_writes(server: Live, text: str, asked: dict[str, Any]) -> None:
    lines = events(server, "/v1/completions", {"prompt": "say:" + text, **asked})
    chunks = [TextChunk.model_validate_json(line.removeprefix(b"data: "), strict=True) for line in lines]
    assert [b"data: " + chunk.model_dump_json(exclude_unset=True).encode() for chunk in chunks] == lines
    said = "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == 0)
    assert said == text or "max_tokens" in asked


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("text", HOSTILE)
def test_a_chat_streams_what_its_model_writes(server: Live, text: str, asked: dict[str, Any]) -> None:
    asked = asked | ({"logprobs": True, "top_logprobs": 2} if "logprobs" in asked else {})
    lines = events(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "say:" + text}], **asked})
    chunks = [ChatChunk.model_validate_json(line.removeprefix(b"data: "), strict=True) for line in lines]
    assert [b"data: " + chunk.model_dump_json(exclude_unset=True).encode() for chunk in chunks] == lines


def test_tool_calls_and_reasoning_stream_what_their_model_writes(server: Live) -> None:
    text = '<think>why "not"</think>so<tool_call>{"name": "look", "arguments": {"at": "\\u00e9\\n"}}</tool_call>'
    tool = {"type": "function", "function": {"name": "look"}}
    body = {"messages": [{"role": "user", "content": "say:" + text}], "tools": [tool]}
    lines = events(server, "/v1/chat/completions", body)
    chunks = [ChatChunk.model_validate_json(line.removeprefix(b"data: "), strict=True) for line in lines]
    assert [b"data: " + chunk.model_dump_json(exclude_unset=True).encode() for chunk in chunks] == lines
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.reasoning_content or "" for delta in deltas) == 'why "not"'
    assert [call.function.name for delta in deltas for call in delta.tool_calls or ()] == ["look"]


@given(st.text())
def test_any_text_is_written_as_its_model_writes_it(text: str) -> None:
    """Half a surrogate pair is no UTF-8 and becomes a question mark instead of an error."""
    head = TextChunk(id="cmpl-\u2028", created=1, model='a "model"')
    choice = {"index": 3, "text": text, "logprobs": None, "finish_reason": None}
    whole = TextChunk.model_validate(head.model_dump(exclude={"usage"}) | {"choices": [choice]})
    assert Chunks(head).of(choice) == b"data: " + whole.model_dump_json(exclude_unset=True).encode() + b"\n\n"
    assert json.loads(json_bytes(text + "\ud800")) == text + "?"


def test_a_connection_carries_streams_and_whole_answers_in_turn(server: Live) -> None:
    """Chunks and lengths do not mix: each answer is framed in its own way."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    for stream in (True, False, True, True, False):
        body = json.dumps({"prompt": "say:one two three", "max_tokens": 99, "stream": stream})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert (answer.getheader("transfer-encoding") == "chunked") is stream
        data = answer.read()
        lines = data.split(b"\n\n")[:-2] if stream else [data]
        parts = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        assert "".join(part["choices"][0]["text"] for part in parts) == "one two three"
    connection.close()


def test_an_old_client_gets_a_stream_without_chunks(server: Live) -> None:
    body = json.dumps({"prompt": "say:one two", "max_tokens": 99, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, told = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert all(line.startswith(b"data: ") for line in told.split(b"\n\n")[:-1])
    assert told.endswith(b"data: [DONE]\n\n")


def test_a_header_value_does_not_make_a_body_chunked() -> None:
    connection = Connection(h11.SERVER)
    connection.receive_data(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
    connection.next_event()
    headers = [("content-length", "5"), ("x-note", "transfer-encoding: chunked")]
    connection.send(h11.Response(status_code=200, headers=headers))
    assert connection.send(h11.Data(data=b"hello")) == b"hello"
