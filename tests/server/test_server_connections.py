"""Clients that leave, do not read, send slowly or want too much time; and many of them at once."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any

import openai
import pytest
from live import live, wait_for
from stub import CHAT, LONG, SHORT, StubBackend, slow

from outrider.server import Settings, create_app


def _send(connection: socket.socket, body: Any) -> None:
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_everything_at_once(stream: bool) -> None:
    with live(slow()) as server:
        connection = socket.create_connection(("127.0.0.1", server.port))
        _send(connection, LONG | {"stream": stream})
        wait_for(lambda: server.backend.open == 1)
        if stream:
            assert b"200 OK" in connection.recv(4096)
        connection.close()
        wait_for(lambda: server.backend.open == 0, 1.0)
        assert server.backend.aborted == 1
        wait_for(lambda: server.http().get("/stats").json()["in_flight"] == 0, 1.0)
        assert "outrider:request_cancelled_total 1.0" in server.http().get("/metrics").text


def test_a_client_that_leaves_before_the_first_token() -> None:
    with live(StubBackend(first_delay=60)) as server:
        connection = socket.create_connection(("127.0.0.1", server.port))
        _send(connection, LONG | {"stream": True})
        wait_for(lambda: server.backend.open == 1)
        connection.close()
        wait_for(lambda: server.backend.open == 0, 1.0)


def test_a_client_that_does_not_read_is_dropped() -> None:
    backend = StubBackend(script=lambda *_: "x" * 4_000_000, step=4000, max_model_len=10**8)
    with live(backend, write_timeout=0.3) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        _send(connection, SHORT | {"stream": True, "return_token_ids": True})
        wait_for(lambda: backend.aborted == 1, 10.0)
        assert backend.open == 0
        wait_for(lambda: not server.server.server_state.connections, 5.0)  # closing alone would wait for it to read
        connection.close()


def test_a_client_that_does_not_even_read_comments_is_dropped() -> None:
    """Plain ASGI, with a transport that takes the headers and then nothing more."""
    backend = StubBackend(first_delay=60)
    app = create_app(backend, Settings(write_timeout=0.1, heartbeat=0.05, allowed_hosts=["here"]))
    sent: list[str] = []
    body = json.dumps(SHORT | {"stream": True}).encode()
    requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if requests:
            return requests.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    headers = [(b"host", b"here"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "headers": headers}
    scope |= {"query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http", "asgi": {"version": "3.0"}}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 10))
    assert sent == ["http.response.start", "http.response.body"]
    assert (backend.open, backend.aborted) == (0, 1)
    assert app.state.server.gate.in_flight == 0


def test_a_silent_stream_sends_comments_and_a_late_refusal_as_event() -> None:
    with live(StubBackend(first_delay=0.5), heartbeat=0.1) as server, server.http() as http:
        text = http.post(CHAT, json=SHORT | {"stream": True}).text
        assert text.startswith(": waiting\n\n")
        assert text.endswith("data: [DONE]\n\n")
        answer = server.openai().chat.completions.create(model="stub", stream=True, **SHORT)
        assert "".join(c.choices[0].delta.content or "" for c in answer) == "hi"


def test_a_request_has_its_time() -> None:
    with live(slow(), request_timeout=0.3) as server:
        with pytest.raises(openai.APIStatusError) as caught:
            server.openai().chat.completions.create(model="stub", **LONG)
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        with pytest.raises(openai.APIError, match="not finished within"):
            list(server.openai().chat.completions.create(model="stub", stream=True, **LONG))
        assert server.backend.open == 0


def test_slow_headers_and_bodies_are_cut_off_while_others_are_served() -> None:
    with live(StubBackend(), read_timeout=0.5) as server:
        head, body = (socket.create_connection(("127.0.0.1", server.port)) for _ in range(2))
        silent = socket.create_connection(("127.0.0.1", server.port))
        body.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        body.sendall(b"content-length: 100\r\n\r\n{")
        head.sendall(b"GET /health HTTP/1.1\r\n")
        start = time.monotonic()
        answers = {}
        for byte in b"x-slow: loris":
            try:
                head.sendall(bytes([byte]))
            except OSError:
                break
            assert server.http().get("/health").status_code == 200
            time.sleep(0.06)
        for name, connection in (("head", head), ("body", body), ("silent", silent)):
            connection.settimeout(3)
            try:
                answers[name] = connection.recv(4096)
            except ConnectionResetError:
                answers[name] = b""
        assert time.monotonic() - start < 3
        assert b"408" in answers["body"]
        assert answers["head"] == b"" or b"408" in answers["head"]
        assert b"408" in answers["silent"]
        wait_for(lambda: len(server.server.server_state.connections) <= 14)


def test_a_keep_alive_connection_may_rest_longer_than_headers_may_take() -> None:
    with live(StubBackend(), read_timeout=0.2) as server, server.http() as http:
        assert http.get("/health").status_code == 200
        time.sleep(0.5)
        assert http.get("/health").status_code == 200


def test_many_clients_at_once_get_their_own_text() -> None:
    results: dict[int, str] = {}
    with live(StubBackend(delay=0.001)) as server:

        def ask(number: int) -> None:
            stream = server.openai().chat.completions.create(
                model="stub", messages=[{"role": "user", "content": f"say:{number} " * 10}], stream=True
            )
            results[number] = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert server.backend.open == 0
    assert set(results) == set(range(32))
    assert all(text.startswith(f"{number} ") for number, text in results.items())
