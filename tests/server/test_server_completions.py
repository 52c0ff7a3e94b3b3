"""The official client against the stub engine: /v1/completions, /tokenize, /detokenize and /v1/models."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from live import Live, live
from stub import BOS, StubBackend


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(StubBackend(), served_model_name=["stub", "alias"]) as running:
        yield running


def test_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="stub", prompt="say:" + "x" * 40)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("x" * 16, "length")


def test_every_kind_of_prompt(client: openai.OpenAI, server: Live) -> None:
    for prompt, texts in [
        ("say:a", ["a"]),
        (["say:a", "say:bc"], ["a", "bc"]),
        (list(b"say:a"), ["a"]),
        ([list(b"say:a"), list(b"say:d")], ["a", "d"]),
    ]:
        answer = client.completions.create(model="alias", prompt=prompt)
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert server.backend.seen[0][0] == [BOS, *b"say:a"]
    assert server.backend.seen[3][0] == [*b"say:a"]  # token ids are taken as they are


def test_bos_can_be_left_out(client: openai.OpenAI, server: Live) -> None:
    client.completions.create(model="stub", prompt="say:a", extra_body={"add_special_tokens": False})
    assert server.backend.seen[0][0] == [*b"say:a"]


def test_prompts_and_samples_are_numbered(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    usage = None
    for chunk in client.completions.create(
        model="stub", prompt=["say:abcdef", "say:xyz"], n=2, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {0: "abcdef", 1: "abcdef", 2: "xyz", 3: "xyz"}
    assert usage.completion_tokens == 18
    assert usage.prompt_tokens == len("say:abcdef") + len("say:xyz") + 2
    assert usage.prompt_tokens_details.cached_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client: openai.OpenAI, stream: bool) -> None:
    answer = client.completions.create(
        model="stub",
        prompt="say:ab",
        echo=True,
        logprobs=2,
        max_tokens=1,
        stream=stream,
        extra_body={"add_special_tokens": False},
    )
    choice = (list(answer) if stream else [answer])[0].choices[0]
    assert choice.text == "say:aba"
    told = choice.logprobs
    assert told.tokens == list("say:aba")
    assert told.text_offset == list(range(7))
    assert told.token_logprobs == [None] + [-0.25] * 6
    assert told.top_logprobs[0] is None
    assert told.top_logprobs[1] == {"a": -0.25, "b": -1.25}


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="stub", prompt="ab", max_tokens=1, extra_body={"prompt_logprobs": 1, "add_special_tokens": False}
    )
    assert answer.choices[0].prompt_logprobs == [
        None,
        {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}},
    ]


def test_one_failing_prompt_fails_the_request_and_frees_the_others() -> None:
    with live(StubBackend(capacity=1)) as server:
        with pytest.raises(openai.InternalServerError, match="full"):
            server.openai().completions.create(model="stub", prompt=["say:a", "say:b"])
        assert server.backend.open == 0


def test_tokens_back_and_forth(server: Live) -> None:
    http = server.http()
    told = http.post("/tokenize", json={"prompt": "né", "return_token_strs": True}).json()
    assert told["tokens"] == [BOS, 0x6E, 0xC3, 0xA9]
    assert told["count"] == 4
    assert told["token_strs"][1] == "n"
    assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "né"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["count"] == len(chat["tokens"]) > 1


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["stub", "alias"]
    assert client.models.retrieve("alias").max_model_len == 4096
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="x")


def test_versions(server: Live) -> None:
    from outrider import __version__

    assert server.http().get("/version").json() == {"version": __version__}
