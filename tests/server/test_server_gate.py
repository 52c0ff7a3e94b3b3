"""Who gets in: keys, a full queue, rates, names of requests, and pages of other hosts."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from live import live, wait_for
from stub import CHAT, LONG, SHORT, StubBackend, slow

from outrider.server.errors import HttpError
from outrider.server.gate import RateLimit


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
