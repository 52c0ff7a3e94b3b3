"""Draining, signals, logs, metrics and health: what keeps a server up."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from live import live, wait_for
from stub import CHAT, LONG, SHORT, StubBackend, slow

from outrider.server.logs import JsonFormatter


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


def test_the_openapi_page_names_every_field() -> None:
    with live(StubBackend()) as server:
        page = server.http().get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/health", "/metrics"} <= set(page["paths"])
    fields = page["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "speculative", "context_budget", "response_format"} <= set(fields)
