"""On the real default model: speculation, company, chunks, preemption and prefix reuse change no token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.lossless import check
from outrider.bench.workloads import load_prompts

pytestmark = pytest.mark.model
GREEDY = SamplingParams(temperature=0, max_tokens=64)
PROMPTS = load_prompts(None, None, 7)[:16]
LOOKUPS = {"drafters": ["ngram", "suffix"], "num_speculative_tokens": 4}
"""Drafts whatever the clock says, so that who meets whom in memory is the same on every machine."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Room for the KV of all prompts, so that each is read once and found again by every later run."""
    with LLM("smollm2-135m", max_num_seqs=8, kv_memory=2 << 30) as llm:
        yield llm


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=32)])
def test_no_token_differs(llm: LLM, params: SamplingParams) -> None:
    rows = check(llm, PROMPTS, (1, 2, 5, 8), (1, 8), params)
    assert [row["different"] for row in rows] == [0] * len(rows)
    assert all(row["drafted"] > row["accepted"] > 0 for row in rows if row["num_speculative_tokens"])


def test_chunks_preemption_and_threads_change_nothing(llm: LLM) -> None:
    messages = [[{"role": "user", "content": prompt.text}] for prompt in PROMPTS[:12]]
    llm.set_speculative_config(LOOKUPS)
    expected = [output.outputs[0].token_ids for output in llm.chat(messages, GREEDY)]
    per_page = llm.core.decoder.kv_bytes_per_token() * 16
    longest = max(len(llm.tokenizer.chat(message)) for message in messages) + 64
    kv_memory = per_page * (longest // 16 + 6)
    options = {"max_num_seqs": 8, "kv_memory": kv_memory, "max_num_batched_tokens": 48, "threads": 1}
    with LLM("smollm2-135m", speculative_config=LOOKUPS, **options) as small:
        assert [output.outputs[0].token_ids for output in small.chat(messages, GREEDY)] == expected
        assert small.core.engine.scheduler.preemptions > 0
        assert small.speculation_report().num_accepted_tokens > 0


def test_a_second_turn_reuses_the_first_to_the_same_answer(llm: LLM) -> None:
    llm.set_speculative_config("auto")
    first = [{"role": "user", "content": "Tell me a long story about a fox and a crow."}]
    answer = llm.chat(first, GREEDY)[0].outputs[0].text
    turn = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    warm = llm.chat(turn, GREEDY)[0]
    assert warm.metrics.cached_tokens > len(llm.tokenizer.chat(first))
    llm.core.memory.pool.drop_cached()
    cold = llm.chat(turn, GREEDY)[0]
    assert cold.metrics.cached_tokens == 0
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_text_is_what_the_tokens_say(llm: LLM) -> None:
    output = llm.generate("The capital of France is", replace(GREEDY, max_tokens=16))[0].outputs[0]
    assert "Paris" in output.text
    assert llm.tokenizer.decode(output.token_ids) == output.text
