"""`outrider serve` with the default model: the official client, company, killing and starting again."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
from live import command

from outrider import LLM, SamplingParams

pytestmark = pytest.mark.model
MODEL = "smollm2-135m"
QUESTIONS = [
    "List the first ten even numbers.",
    "Write a function that adds two numbers.",
    "Repeat: the river runs past the mill and the river runs past the house.",
    "Name three colours.",
]


def messages(question: str) -> list[dict]:
    return [{"role": "user", "content": question}]


LOOKUPS = '{"drafters": ["ngram", "suffix"], "num_speculative_tokens": 4}'
"""Drafts whatever the clock says: "auto" rests wherever drafting is slow on the machine of the moment."""


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command with the default model, and its address."""
    usual = ["--max-num-seqs", "8", "--set", "drain_timeout=2", "--kv-memory", "256MiB"]
    with command(MODEL, *usual, *options) as running:
        yield running


def answer(url: str, question: str, **options: object) -> openai.types.chat.ChatCompletion:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    fields = {"temperature": 0, "max_tokens": 40, "extra_body": {"return_token_ids": True}} | options
    return client.chat.completions.create(model=MODEL, messages=messages(question), **fields)


def test_the_server_says_what_the_python_interface_says() -> None:
    with LLM(MODEL, speculative_config=None) as llm:
        outputs = llm.chat([messages(q) for q in QUESTIONS], SamplingParams(temperature=0, max_tokens=40))
        expected = [output.outputs[0] for output in outputs]
    with served("--speculative-config", LOOKUPS) as (process, url):
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda question: answer(url, question), QUESTIONS * 2))
        assert [list(a.choices[0].token_ids) for a in answers] == [list(e.token_ids) for e in expected] * 2
        assert [a.choices[0].message.content for a in answers] == [e.text for e in expected] * 2
        assert sum(a.usage.completion_tokens_details.accepted_prediction_tokens for a in answers) > 0
        assert sum(a.usage.completion_tokens_details.rejected_prediction_tokens for a in answers) > 0

        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        schema |= {"additionalProperties": False}
        named = {"name": "number", "schema": schema}
        shaped = answer(
            url, "Give a number.", max_tokens=120, response_format={"type": "json_schema", "json_schema": named}
        )
        if shaped.choices[0].finish_reason == "stop":
            assert set(json.loads(shaped.choices[0].message.content)) == {"n"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_an_editing_and_a_chatting_neighbour_each_get_the_better_source() -> None:
    """Lookups where a text repeats itself, the head where it does not; metrics tell their acceptance apart."""
    text = "The river runs past the mill. A lamp burns over the quiet house, and seven engines count stones.\n"
    edit = ("/v1/completions", {"prompt": text * 3 + "The river"})
    chat = ("/v1/chat/completions", {"messages": messages(QUESTIONS[1])})
    drafters = ["ngram", {"name": "head", "path": "generalist"}]
    sources = {"drafters": drafters, "vote": "hedge", "length": "fixed", "num_speculative_tokens": 4}
    with served("--speculative-config", json.dumps(sources)) as (_, url):
        with ThreadPoolExecutor(2) as pool:
            editing, chatting = pool.map(lambda asked: drafted_characters(url + asked[0], asked[1]), (edit, chat))
        metrics = httpx.get(url + "/metrics").text
    assert editing["ngram"] > 2 * editing["generalist"]
    assert chatting["generalist"] > 2 * chatting["ngram"]
    accepted = re.findall(r'num_accepted_tokens_total\{drafter="(\w+)"\} ([\d.]+)', metrics)
    assert {name for name, count in accepted if float(count) > 0} == {"ngram", "generalist"}
    lengths = dict(re.findall(r'acceptance_length\{drafter="(\w+)"\} ([\d.]+)', metrics))
    assert all(1 < float(lengths[name]) <= 5 for name in ("ngram", "generalist"))


def drafted_characters(url: str, body: dict) -> Counter[str]:
    """How many characters of an answer came from each drafter."""
    asked = {"temperature": 0, "max_tokens": 64, "stream": True, "return_spans": True} | body
    won: Counter[str] = Counter()
    with httpx.stream("POST", url, json=asked, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for span in json.loads(line.removeprefix("data: "))["choices"][0]["spans"]:
                    won[span["drafter"]] += len(span["text"])
    return won


def test_killed_under_load_it_starts_again() -> None:
    with served() as (process, url):
        first = answer(url, QUESTIONS[2]).choices[0].message.content
        with ThreadPoolExecutor(4) as pool:
            tasks = [pool.submit(answer, url, question, max_tokens=400) for question in QUESTIONS]
            while not httpx.get(url + "/stats").json()["engine"]["running"]:
                pass
            process.kill()
            assert all(isinstance(task.exception(30), openai.APIConnectionError) for task in tasks)
    with served() as (_, url):
        assert answer(url, QUESTIONS[2]).choices[0].message.content == first
