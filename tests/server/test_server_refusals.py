"""What cannot be honoured is refused by name, in OpenAI's error shape; hostile bodies are bounded."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live import Live, live
from stub import CHAT, StubBackend, StubTokenizer

MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}
COMPLETION = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(StubBackend(max_model_len=1000)) as running:
        yield running


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal, whose shape is checked."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert error["code"]
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("n", 0),
        ("n", 17),
        ("n", 10**30),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("seed", 1 << 63),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("min_p", 2),
        ("top_k", -2),
        ("min_tokens", -1),
        ("stop", ["a"] * 17),
        ("stop", ""),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [100000]),
        ("allowed_token_ids", [259]),
        ("banned_token_ids", list(range(1025))),
        ("logit_bias", {"300": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"١": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {str(i): 0 for i in range(100_000)}),
        ("context_budget", 0),
        ("speculative", "yes"),
        ("prompt_logprobs", 21),
        ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "yaml"}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"regex": "(a+)+$" * 20_000}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_values_out_of_range(http: httpx.Client, path: str, field: str, value: Any) -> None:
    body: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    error = refused(http.post(path, json=body | {field: value}))
    assert field in (error["param"] or error["message"])


@pytest.mark.parametrize(
    ("path", "extra", "param", "code"),
    [
        (CHAT, {"topk": 5}, "topk", "unknown_parameter"),
        (COMPLETION, {"best_off": 5}, "best_off", "unknown_parameter"),
        (COMPLETION, {"suffix": "end"}, "suffix", "unsupported_parameter"),
        (COMPLETION, {"best_of": 3}, "best_of", "unsupported_parameter"),
        (COMPLETION, {"logprobs": 21}, "logprobs", "invalid_value"),
        (COMPLETION, {"logprobs": True}, "logprobs", "invalid_value"),
        (CHAT, {"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
        (CHAT, {"store": True}, "store", "unsupported_parameter"),
        (CHAT, {"metadata": {"a": "b"}}, "metadata", "unsupported_parameter"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction", "unsupported_parameter"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        (CHAT, {"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        (CHAT, {"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "unsupported_value"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "unsupported_value"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "unsupported_value"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", None),
        (CHAT, {"tools": [{"type": "retrieval"}]}, "tools.0.type", "invalid_value"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "unsupported_value"),
        (
            CHAT,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "unsupported_value",
        ),
        (CHAT, {"model": "gpt-4"}, "model", "model_not_found"),
    ],
)
def test_fields_that_cannot_be_honoured(http: httpx.Client, path: str, extra: Any, param: str, code: str) -> None:
    body = ({"messages": MESSAGES} if path == CHAT else {"prompt": "x"}) | extra
    error = refused(http.post(path, json=body), 404 if code == "model_not_found" else 400)
    assert error["param"] == param
    assert error["code"] == code or code is None


def test_harmless_values_of_such_fields_pass(http: httpx.Client) -> None:
    extra = {"store": False, "metadata": None, "modalities": ["text"], "service_tier": "auto", "audio": None}
    assert http.post(CHAT, json={"messages": MESSAGES} | extra).status_code == 200
    assert http.post(COMPLETION, json={"prompt": "x", "suffix": None, "best_of": 1}).status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "x",
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "x", "colour": "red"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}],
    ],
)
def test_malformed_messages(http: httpx.Client, messages: Any) -> None:
    assert refused(http.post(CHAT, json={"messages": messages}))["param"].startswith("messages")


@pytest.mark.parametrize("prompt", [[], "", [[]], [99999], [-1], [1.5], [["a"]], {"a": 1}, None, ["a", 1]])
def test_malformed_prompts(http: httpx.Client, prompt: Any) -> None:
    body = {"prompt": prompt, "add_special_tokens": False}
    assert "prompt" in (refused(http.post(COMPLETION, json=body))["param"] or "")


def test_the_nearest_field_is_suggested(http: httpx.Client) -> None:
    error = refused(http.post(CHAT, json={"messages": MESSAGES, "temprature": 1}))
    assert "did you mean 'temperature'?" in error["message"]


def test_missing_fields(http: httpx.Client) -> None:
    assert refused(http.post(CHAT, json={}))["code"] == "missing_required_parameter"
    assert refused(http.post(COMPLETION, json={}))["param"] == "prompt"


def test_a_context_is_never_cut(http: httpx.Client) -> None:
    long = http.post(COMPLETION, json={"prompt": "x" * 2000})
    assert refused(long)["code"] == "context_length_exceeded"
    wide = http.post(COMPLETION, json={"prompt": "x", "max_tokens": 1000})
    assert refused(wide)["code"] == "context_length_exceeded"
    fits = http.post(COMPLETION, json={"prompt": "x" * 983, "max_tokens": 16})
    assert fits.status_code == 200


def test_a_model_without_a_template_has_no_chat() -> None:
    with live(StubBackend(tokenizer=StubTokenizer(has_chat_template=False))) as server:
        assert "chat template" in refused(server.http().post(CHAT, json={"messages": MESSAGES}))["message"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "too_deep"),
        (b"not json", 400, "invalid_json"),
        (b'{"prompt": "\xff\xfe"}', 400, "invalid_unicode"),
        (b'{"prompt": "\\ud800"}', 400, "invalid_unicode"),
        (b'{"prompt": "x", "stop": ["\\udc00"]}', 400, "invalid_unicode"),
        (b"[" * 100_000 + b"]" * 100_000, 400, "too_deep"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, 400, "too_deep"),
        (b'{"prompt": "x", "temperature": NaN}', 400, None),
        (b'{"prompt": "x", "temperature": 1e999}', 400, None),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", 400, None),
        (b'"text"', 400, None),
        (b"[1, 2]", 400, None),
        (b"null", 400, None),
        (b'{"prompt": "x", "prompt": 5}', 400, None),
    ],
)
def test_hostile_bodies(http: httpx.Client, body: bytes, status: int, code: str | None) -> None:
    response = http.post(COMPLETION, content=body, headers={"content-type": "application/json"})
    assert refused(response, status)["code"] == (code or response.json()["error"]["code"])


def test_deep_text_is_no_deep_json(http: httpx.Client) -> None:
    text = '[[{"' * 60 + '\\" \\\\'
    assert http.post(COMPLETION, json={"prompt": text}).status_code == 200
    assert http.post(COMPLETION, json={"prompt": "🚀 \U0001f3fd"}, headers={}).status_code == 200
    escaped = json.dumps({"prompt": "🚀"}).encode()
    assert b"\\ud83d" in escaped
    sent = http.post(COMPLETION, content=escaped, headers={"content-type": "application/json"})
    assert sent.status_code == 200


def test_large_bodies_are_refused_with_and_without_a_length(http: httpx.Client) -> None:
    large = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    headers = {"content-type": "application/json"}
    assert refused(http.post(COMPLETION, content=large, headers=headers), 413)["code"] == "body_too_large"
    chunks = (large[at : at + 65536] for at in range(0, len(large), 65536))
    try:
        response = http.post(COMPLETION, content=chunks, headers=headers)
        assert response.status_code == 413
    except httpx.WriteError:
        pass  # the server closed the connection before everything was sent


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "' + b'\\"' * 2_000_000 + b'"}',
        b'"' * 4_000_000,
        b"\\" * 4_000_000,
        b"[]," * 1_300_000,
        b"{" * 4_000_000,
        b'{"stop": [' + b'"a",' * 1_000_000 + b'"a"], "prompt": "x"}',
    ],
    ids=["escaped quotes", "quotes", "backslashes", "flat brackets", "open braces", "many stops"],
)
def test_bodies_made_to_be_slow_are_not(http: httpx.Client, body: bytes) -> None:
    start = time.perf_counter()
    response = http.post(COMPLETION, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert time.perf_counter() - start < 5


def test_other_media_types_are_refused(http: httpx.Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        response = http.post(COMPLETION, content=b'{"prompt": "x"}', headers={"content-type": kind})
        assert refused(response, 415)["code"] == "unsupported_media_type"


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    assert refused(http.get("/v1/embeddings"), 404)["code"] == "not_found"
    assert refused(http.get(CHAT), 405)["code"] == "method_not_allowed"
    assert refused(http.post("/detokenize", json={"tokens": [10**8]}))["param"] == "tokens"
    assert refused(http.post("/tokenize", json={}))["param"] == "prompt"


def test_nothing_is_left_behind(server: Live, http: httpx.Client) -> None:
    assert server.backend.open == 0
    assert http.get("/stats").json()["in_flight"] == 0
    assert http.get("/health").json()["status"] == "ready"
