"""Keys, limits, cancellation, draining, logs, metrics: what keeps a server up."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live import live, wait_for
from stub import StubBackend

from outrider.server import Settings, create_app
from outrider.server.errors import HttpError
from outrider.server.gate import RateLimit
from outrider.server.logs import JsonFormatter

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "say:" + "x" * 4000}]}
SHORT = {"messages": [{"role": "user", "content": "say:hi"}]}


def slow(**options: Any) -> StubBackend:
    """An engine that would take minutes for LONG."""
    return StubBackend(delay=0.1, max_model_len=10**6, **options)


def test_keys_of_list_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team\nsecond # of Bo\n\nthird\n")
    with live(StubBackend(), api_key=["first"], api_key_file=file) as server, server.http() as http:
        for key in ("first", "second", "third"):
            assert http.post(CHAT, json=SHORT, headers={"authorization": f"Bearer {key}"}).status_code == 200
        for header in ("Bearer wrong", "Basic first", "first", "Bearer firs", "Bearer sécond", ""):
            response = http.post(CHAT, json=SHORT, headers={"authorization": header.encode()})
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for path, status in {"/health": 200, "/": 200, "/metrics": 401, "/stats": 401, "/v1/models": 401}.items():
            assert http.get(path).status_code == status
        assert http.get("/openapi.json").status_code == 401
        assert server.openai(api_key="third").models.list().data


def test_a_refused_key_is_not_read_further() -> None:
    with live(StubBackend(), api_key=["k"]) as server, server.http() as http:
        assert http.post(CHAT, content=b"x" * 10_000_000).status_code == 401


def test_the_queue_is_limited() -> None:
    with live(slow(), max_queue=2) as server:
        first = server.openai().chat.completions.create(model="stub", stream=True, n=2, **LONG)
        next(iter(first))
        with pytest.raises(openai.RateLimitError) as caught:
            server.openai().chat.completions.create(model="stub", **SHORT)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        first.close()
        wait_for(lambda: server.backend.open == 0)
        server.backend.delay = 0
        assert server.openai(max_retries=2).chat.completions.create(model="stub", **SHORT)


def test_the_rate_is_limited_per_key() -> None:
    with live(StubBackend(), rate_limit=2, api_key=["a", "b"]) as server:
        ask = lambda key: server.openai(api_key=key).chat.completions.create(model="stub", **SHORT)  # noqa: E731
        ask("a"), ask("a"), ask("b")
        with pytest.raises(openai.RateLimitError) as caught:
            ask("a")
        assert caught.value.code == "rate_limit_exceeded"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 30
        ask("b")


def test_rates_recover_with_time() -> None:
    now = [0.0]
    rate = RateLimit(60, clock=lambda: now[0])
    for _ in range(60):
        rate.check("a")
    with pytest.raises(HttpError):
        rate.check("a")
    now[0] += 1.0
    rate.check("a")
    with pytest.raises(HttpError):
        rate.check("a")


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
        connection.close()


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


def test_sigterm_lets_requests_finish() -> None:
    backend = StubBackend(delay=0.02)
    with live(backend, drain_timeout=10) as server:
        request = {"messages": [{"role": "user", "content": "say:" + "0123456789" * 10}]}
        stream = server.openai().chat.completions.create(model="stub", stream=True, **request)
        text = next(iter(stream)).choices[0].delta.content
        server.server.stop()
        time.sleep(0.1)
        with pytest.raises(openai.APIConnectionError):
            server.openai().models.list()
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == "0123456789" * 10
        server.thread.join(5)
        assert backend.closed


def test_a_drain_ends_in_time_and_says_so() -> None:
    with live(slow(), drain_timeout=0.3) as server:
        stream = server.openai().chat.completions.create(model="stub", stream=True, **LONG)
        next(iter(stream))
        server.server.stop()
        start = time.monotonic()
        with pytest.raises(openai.APIError, match="shut down"):
            list(stream)
        assert time.monotonic() - start < 2
        assert server.backend.open == 0


def test_a_signal_to_the_process_drains_and_exits_with_0(tmp_path: Path) -> None:
    program = tmp_path / "run.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from stub import StubBackend\nfrom outrider.server import Settings, serve\n"
        "serve(StubBackend, Settings(port=0, drain_timeout=1))\nprint('left in order')\n"
    )
    process = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        assert json.loads(line)["message"]
        if "running on" in line.lower():
            break
    process.terminate()
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "left in order\n")


def test_logs_are_json_and_hold_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    with live(StubBackend(), log_level="info") as server, caplog.at_level(logging.INFO, "outrider.server.access"):
        body = {"messages": [{"role": "user", "content": "say:secret"}], "user": "bo"}
        response = server.http().post(CHAT, json=body, headers={"x-request-id": "abc-1"})
        wait_for(lambda: caplog.records)
    assert response.headers["x-request-id"] == "abc-1"
    line = json.loads(JsonFormatter().format(caplog.records[0]))
    assert (line["request_id"], line["status"], line["user"]) == ("abc-1", 200, "bo")
    assert (line["completion_tokens"], line["accepted_tokens"]) == (6, 4)
    assert line["ttft_ms"] <= line["duration_ms"]
    assert "secret" not in json.dumps(line)


def test_prompts_are_logged_where_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with live(StubBackend(), log_prompts=True) as server, caplog.at_level(logging.INFO, "outrider.server.access"):
        server.http().post(CHAT, json=SHORT)
        wait_for(lambda: caplog.records)
    line = json.loads(JsonFormatter().format(caplog.records[0]))
    assert (line["prompt"][0]["content"], line["answer"]) == ("say:hi", ["hi"])


def test_strange_request_ids_are_replaced() -> None:
    with live(StubBackend()) as server:
        given = 'x" onload="'
        assert server.http().get("/health", headers={"x-request-id": given}).headers["x-request-id"] != given


def test_browsers_elsewhere_are_kept_out_by_default() -> None:
    origin = {"origin": "https://elsewhere.example"}
    with live(StubBackend()) as server, server.http() as http:
        assert "access-control-allow-origin" not in http.get("/v1/models", headers=origin).headers
        asked = http.options(CHAT, headers=origin | {"access-control-request-method": "POST"})
        assert asked.status_code == 405
        assert http.get("/health", headers={"host": "evil.example"}).status_code == 403
        assert http.get("/health", headers={"host": "localhost:1"}).status_code == 200
    with live(StubBackend(), cors_origins=[origin["origin"]]) as server, server.http() as http:
        assert http.get("/v1/models", headers=origin).headers["access-control-allow-origin"] == origin["origin"]


def test_metrics_have_the_names_that_dashboards_use() -> None:
    with live(StubBackend()) as server, server.http() as http:
        server.openai().chat.completions.create(model="stub", **SHORT)
        http.post(CHAT, json={"messages": 5})
        text = http.get("/metrics").text
    for line in (
        "outrider:num_requests_running 0.0",
        "outrider:num_requests_waiting 0.0",
        "outrider:kv_cache_usage_perc 0.0",
        "outrider:prefix_cache_queries_total 10.0",
        "outrider:prefix_cache_hits_total 4.0",
        'outrider:spec_decode_num_drafts_total{drafter="ngram"} 1.0',
        'outrider:spec_decode_num_draft_tokens_total{drafter="ngram"} 4.0',
        'outrider:spec_decode_num_accepted_tokens_total{drafter="ngram"} 3.0',
        'outrider:spec_decode_num_accepted_tokens_per_pos_total{drafter="ngram",position="2"} 1.0',
        'outrider:spec_decode_vote_weight{drafter="ngram"} 0.75',
        'outrider:kv_tier_loaded_bytes_total{tier="host"} 1024.0',
        'outrider:kv_tier_stored_bytes_total{tier="host"} 2048.0',
        'outrider:kv_tier_exposed_wait_seconds_total{tier="host"} 0.25',
        'outrider:spec_decode_held_sequences{drafter="ngram"} 0.0',
        "outrider:kv_cache_touched_bytes 4096.0",
        "outrider:context_read_entries_total 30.0",
        "outrider:context_known_entries_total 120.0",
        "outrider:selection_overlap 0.9",
        "outrider:selection_captured 0.8",
        "outrider:time_to_first_token_seconds_count 1.0",
        "outrider:e2e_request_latency_seconds_count 1.0",
        "outrider:generation_tokens_total 2.0",
        'outrider:request_success_total{finished_reason="stop"} 1.0',
        'outrider:request_refused_total{code="invalid_value"} 1.0',
    ):
        assert line + "\n" in text, line
    assert "outrider:inter_token_latency_seconds_bucket" in text


def test_latency_is_counted_per_token() -> None:
    with live(StubBackend()) as server:
        request = {"messages": [{"role": "user", "content": "say:0123456789"}]}
        server.openai().chat.completions.create(model="stub", **request)
        text = server.http().get("/metrics").text
    assert "outrider:inter_token_latency_seconds_count 6.0" in text  # 10 tokens, 4 of them in the first piece


def test_metrics_on_a_port_of_their_own(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = tmp_path / "run.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from stub import StubBackend\nfrom outrider.server import Settings, serve\n"
        f"serve(StubBackend, Settings(port=0, metrics_port={port}, api_key=['k']))\n"
    )
    process = subprocess.Popen([sys.executable, program], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        running = (line for line in process.stderr if "running on" in line)
        next(running), next(running)
        assert "outrider:num_requests_running" in httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 404
    finally:
        process.terminate()
        process.wait(10)


def test_health_follows_the_engine() -> None:
    backend = StubBackend()
    with live(backend) as server, server.http() as http:
        assert http.get("/health").json() == {"status": "ready", "model": "stub"}
        backend.healthy = False
        assert http.get("/health").status_code == 503


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


def test_the_openapi_page_names_every_field() -> None:
    with live(StubBackend()) as server:
        page = server.http().get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/health", "/metrics"} <= set(page["paths"])
    fields = page["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "speculative", "context_budget", "response_format"} <= set(fields)


def _send(connection: socket.socket, body: Any) -> None:
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)


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
