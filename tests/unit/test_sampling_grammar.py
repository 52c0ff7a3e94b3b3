"""Structured output: valid text whatever is drafted, ended where the grammar ends; hostile grammars do no harm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from judging import Spoken, speculate
from outrider.errors import UnsupportedError
from outrider.sampling import Sampler, Stopper
from outrider.sampling.grammar import MAX_PARTS, MAX_TEXT, Grammar, grammar_processors
from outrider.types import Draft, Finish, SamplingParams

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Bytes:
    """A tokenizer of single bytes, a few longer pieces, a control token and an end token."""

    pieces = (*(bytes([i]) for i in range(256)), b'{"a"', b'": ', b"true", b'"}', b"<|tool|>", b"<|end|>")
    vocab_size = len(pieces)
    eos_token_ids = (vocab_size - 1,)

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def is_special(self, token: int) -> bool:
        return token >= self.vocab_size - 2

    def decode(self, tokens) -> str:
        return b"".join(self.pieces[t] for t in tokens if not self.is_special(t)).decode("utf-8", "replace")


BYTES = Bytes()
EOS = BYTES.eos_token_ids[0]
V = BYTES.vocab_size + 3  # with padding


def noise(seed: int):
    """A target that would rather say anything than JSON."""

    def script(prefix):
        key = [seed, len(prefix), *prefix[-2:]]
        return np.random.default_rng(key).normal(0, 2, V).astype(np.float32)

    return script


def speak(structure: dict, guess, seed: int = 0, **params: object) -> Spoken:
    given = SamplingParams(**{"max_tokens": 80, "structured_outputs": structure, **params})  # type: ignore[arg-type]
    grammar = grammar_processors(given, BYTES)
    sampler = Sampler(given, [1], BYTES.vocab_size, BYTES.eos_token_ids, seed, 0, grammar)
    stopper = Stopper(given, BYTES.eos_token_ids, 500, BYTES.decode)
    return speculate(noise(seed), [1], sampler, stopper, guess, V)


def undrafted(known: list[int]) -> Draft:
    return Draft()


def oracle_past_the_end(wanted: list[int]):
    """The right tokens, then on behind the closing brace."""
    return lambda known: Draft(tuple([*wanted[:-1], *b' }, "c": 1'][len(known) - 1 :]))


def illegal(known: list[int]) -> Draft:
    return Draft((*b"}}", EOS, 9))


def wild_tree(known: list[int]) -> Draft:
    return Draft((*b'{"', 256, 120, EOS, 34), parents=(-1, 0, -1, 2, -1, 1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_by_schema_is_valid_and_ends_for_every_draft(seed: int, temperature: float) -> None:
    # Whitespace is free in JSON; penalising it keeps the texts of a random target short.
    params = {"temperature": temperature, "logit_bias": dict.fromkeys(b" \t\r\n", -100.0)}
    wanted = speak({"json": SCHEMA}, undrafted, seed, **params)
    value = json.loads(BYTES.decode(wanted.tokens))
    assert set(value) == {"a", "b"}
    assert value["b"] in ("x", "y")
    assert (wanted.tokens[-1], wanted.finish) == (EOS, Finish("stop"))
    for guess in (oracle_past_the_end(wanted.tokens), illegal, wild_tree):
        spoken = speak({"json": SCHEMA}, guess, seed, **params)
        assert (spoken.tokens, spoken.finish) == (wanted.tokens, wanted.finish)
        assert spoken.drafted > spoken.accepted
    assert speak({"json": SCHEMA}, oracle_past_the_end(wanted.tokens), seed, **params).accepted >= 8


def test_json_may_come_as_text_too() -> None:
    spoken = speak({"json": json.dumps({"type": "boolean"})}, undrafted)
    assert BYTES.decode(spoken.tokens).strip() in ("true", "false")


@pytest.mark.parametrize("seed", range(5))
def test_regex_choice_and_lark(seed: int) -> None:
    assert re.fullmatch("[0-9]{3}-[a-c]+", BYTES.decode(speak({"regex": "[0-9]{3}-[a-c]{1,4}"}, illegal, seed).tokens))
    options = ["yes", "no (really)", "é\n|x"]
    assert BYTES.decode(speak({"choice": options}, illegal, seed).tokens) in options
    lark = 'start: "<" word ">"\nword: /[xy]{1,3}/'
    assert re.fullmatch("<[xy]{1,3}>", BYTES.decode(speak({"grammar": lark}, illegal, seed).tokens))


def test_a_json_object_begins_with_a_brace() -> None:
    spoken = speak({"json_object": True}, undrafted, logit_bias={ord("}"): 50.0, 257: 50.0, 259: 50.0})
    assert isinstance(json.loads(BYTES.decode(spoken.tokens)), dict)


def test_control_tokens_are_no_text() -> None:
    """`<|tool|>` as characters is fine, as a control token it is not."""
    (grammar,) = grammar_processors(SamplingParams(structured_outputs={"regex": r"<\|tool\|>"}), BYTES)
    logits = np.zeros(V, np.float32)
    grammar.apply(logits, [])
    assert np.flatnonzero(logits == 0).tolist() == [ord("<")]


def test_behind_the_end_only_an_end_token_is_allowed_whatever_was_said() -> None:
    (grammar,) = grammar_processors(SamplingParams(structured_outputs={"regex": "ab"}), BYTES)
    for output in ([*b"ab"], [*b"ab", EOS], [*b"ab", EOS, EOS], [*b"abc"], [*b"x"], [*b"ab"]):
        logits = np.zeros(V, np.float32)
        grammar.apply(logits, output)
        assert np.flatnonzero(logits == 0).tolist() == [EOS]
    assert speak({"regex": "ab"}, illegal, min_tokens=20).tokens == [*b"ab", EOS]


def test_a_grammar_remembers_nothing_that_shows() -> None:
    (used,) = grammar_processors(SamplingParams(structured_outputs={"json": SCHEMA}), BYTES)
    assert isinstance(used, Grammar)
    for text in (b'{"a":true', b"{", b'{"a":fal', b"", b"}", b'{"a":true,"b":"x"}', b'{"a":true,"b":"y"'):
        (fresh,) = grammar_processors(SamplingParams(structured_outputs={"json": SCHEMA}), BYTES)
        rows = np.zeros((2, V), np.float32)
        for grammar, logits in zip((used, fresh), rows, strict=True):
            grammar.apply(logits, [*text])
        assert np.array_equal(rows[0], rows[1])


def nested(depth: int) -> dict:
    return {} if not depth else {"items": nested(depth - 1)}


CIRCULAR: dict = {}
CIRCULAR["items"] = CIRCULAR


@pytest.mark.parametrize(
    "structure",
    [
        {"json": {"type": "nope"}},
        {"json": "{not json"},
        {"json": {"$ref": "http://example.com/schema"}},
        {"json": {"$ref": "#"}},
        {"json": nested(300)},
        {"json": CIRCULAR},
        {"json": {"enum": ["x" * MAX_TEXT]}},
        {"json": {"anyOf": [{}] * (MAX_PARTS + 1)}},
        {"json": 7},
        {"json_object": False},
        {"regex": "(a"},
        {"regex": r"(a)\1"},
        {"regex": ""},
        {"regex": "(" * (MAX_PARTS + 1)},
        {"regex": "a" * (MAX_TEXT + 1)},
        {"choice": []},
        {"choice": "yes"},
        {"choice": [1]},
        {"grammar": "start: missing"},
        {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(MAX_PARTS)) + '\na4000: "x"'},
    ],
    ids=lambda structure: repr(structure)[:40],
)
def test_grammars_that_are_wrong_or_too_large_are_refused_in_one_line(structure: dict) -> None:
    with pytest.raises(UnsupportedError) as refused:
        grammar_processors(SamplingParams(structured_outputs=structure), BYTES)
    assert refused.value.field == "structured_outputs"
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("structure", [{}, {"json": {}, "regex": "a"}, {"jsno": {}}, {"structural_tag": "x"}])
def test_exactly_one_known_kind(structure: dict) -> None:
    with pytest.raises(UnsupportedError, match="exactly one of json"):
        SamplingParams(structured_outputs=structure)


def test_the_longest_chains_that_are_let_in_do_not_exhaust_the_stack() -> None:
    """In a process of its own: llguidance recurses along chains, and an exhausted stack ends the process."""
    code = """
        import json, sys
        sys.path[:0] = ["tests", "tests/unit"]
        from test_sampling_grammar import *
        half = MAX_PARTS // 2 - 4
        rules = [f"a{i}: a{i + 1}" for i in range(MAX_PARTS - 4)]
        items = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(half)}
        for structure in (
            {"grammar": "\\n".join(["start: a0", *rules, f'a{len(rules)}: "x"'])},
            {"grammar": "\\n".join(["start: A0", *(rule.upper() for rule in rules), f'A{len(rules)}: "x"'])},
            {"json": {"$defs": {**items, f"a{half}": {"type": "null"}}, "$ref": "#/$defs/a0"}},
        ):
            (grammar,) = grammar_processors(SamplingParams(structured_outputs=structure), BYTES)
            grammar.apply(np.zeros(V, np.float32), [])
        print("alive")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "alive\n", done.stderr[-500:]
