"""Whatever the drafters, the vote, the length and the limits: the output is that of plain decoding, nothing leaks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import Harness
from outrider.config import SpeculativeConfig
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.speculation.build import assemble
from outrider.speculation.guard import GuardRules
from outrider.speculation.store import DraftStore
from outrider.types import SamplingParams
from scripted import ScriptedDecoder, plain, random_logits, walk, whole_prefix
from scripted_drafters import (
    DeadDrafter,
    ForeignDrafter,
    HalfOracleDrafter,
    JunkDrafter,
    OracleDrafter,
    RaisingDrafter,
    TooLongDrafter,
    TreeDrafter,
)

VOTES, LENGTHS = ("none", "majority", "hedge"), ("fixed", "trend", "goodput")
KINDS = (
    OracleDrafter,
    HalfOracleDrafter,
    JunkDrafter,
    DeadDrafter,
    TreeDrafter,
    RaisingDrafter,
    TooLongDrafter,
    ForeignDrafter,
)
NEVER = GuardRules(max_failures=10**9, max_slow=10**9)  # bad drafters stay on, so that every step meets them


def speculator(script, kinds, vote, length, depth, vocab_size=50, **options):
    drafters = [kind(script, vocab_size, name=f"{kind.__name__}-{i}") for i, kind in enumerate(kinds)]
    config = SpeculativeConfig(num_speculative_tokens=depth, vote=vote, length=length, **options)
    return drafters, assemble([*drafters, NgramDrafter()], config, vocab_size, NEVER)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), max_size=3),
    vote=st.sampled_from(VOTES),
    length=st.sampled_from(LENGTHS),
    depth=st.sampled_from((1, 2, 5, 8)),
    prompts=st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=6), min_size=1, max_size=5),
    pages=st.sampled_from((12, 24, 80)),
)
def test_greedy_output_is_that_of_plain_decoding(kinds, vote, length, depth, prompts, pages):
    script = walk(50, memory=2)
    drafters, spec = speculator(script, kinds, vote, length, depth)
    harness = Harness(script, speculator=spec, pages=pages)
    assert harness.run(prompts) == [plain(script, prompt, 24) for prompt in prompts]
    assert all(drafter.held == set() for drafter in drafters if not isinstance(drafter, RaisingDrafter))
    assert not spec._open


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_combination_drafts_accepts_and_rejects(vote, length):
    """The equality above cannot be had by never drafting."""
    script = walk(50)
    _, spec = speculator(script, [HalfOracleDrafter, JunkDrafter], vote, length, 5)
    harness = Harness(script, speculator=spec)
    harness.run([[1, 2], [3, 4], [5]], SamplingParams(temperature=0.0, max_tokens=40))
    assert harness.drafted > harness.accepted > 0


@settings(max_examples=25, deadline=None)
@given(
    vote=st.sampled_from(VOTES), length=st.sampled_from(LENGTHS), seed=st.integers(0, 1000), branches=st.integers(1, 2)
)
def test_seeded_samples_do_not_depend_on_votes_that_see_the_tokens(vote, length, seed, branches):
    script, params = random_logits(6), SamplingParams(temperature=0.9, max_tokens=20, seed=seed)
    options = {"vote_options": {"branches": branches}} if vote == "hedge" else {}
    _, spec = speculator(script, [OracleDrafter, JunkDrafter, TreeDrafter], vote, length, 4, vocab_size=6, **options)
    off = Harness(script, vocab_size=6).run([[1, 2], [3]], params)
    on = Harness(script, vocab_size=6, speculator=spec)
    assert on.run([[1, 2], [3]], params) == off
    assert on.drafted > 0


def own_drafter(script, vocab_size, pages=200):
    """The target as its own drafter, with KV of its own."""
    decoder = ScriptedDecoder(script, vocab_size=vocab_size)
    return ModelDrafter(decoder, DraftStore(decoder.new_cache(pages, 4)), vocab_size)


@settings(max_examples=25, deadline=None)
@given(vote=st.sampled_from(VOTES), length=st.sampled_from(LENGTHS), pages=st.sampled_from((16, 24, 80)))
def test_a_model_drafter_lives_through_preemption_and_leaks_nothing(vote, length, pages):
    """Its vote is often lost to a half-oracle, its own pages are scarce, and so are the target's."""
    script = whole_prefix(50)
    model, rival = own_drafter(script, 50, pages), HalfOracleDrafter(script, right=1)
    config = SpeculativeConfig(num_speculative_tokens=5, vote=vote, length=length)
    harness = Harness(script, speculator=assemble([rival, model], config, 50, NEVER), pages=pages)
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8]]
    assert harness.run(prompts) == [plain(script, prompt, 24) for prompt in prompts]
    assert harness.accepted > 0
    assert model._store.held == 0


def test_a_model_drafter_with_the_targets_noise_guesses_samples_too():
    """The target as its own drafter is always right, at temperature 1.2, because both use the sequence's noise."""
    script, params = random_logits(6), SamplingParams(temperature=1.2, top_k=5, max_tokens=40, seed=3)
    harness = Harness(
        script,
        vocab_size=6,
        speculator=assemble([own_drafter(script, 6)], SpeculativeConfig(num_speculative_tokens=4), 6, NEVER),
    )
    sampled = harness.run([[1, 2], [3]], params)
    assert sampled == Harness(script, vocab_size=6).run([[1, 2], [3]], params)
    assert sampled != [plain(script, prompt, 40) for prompt in ([1, 2], [3])]
    assert harness.accepted == harness.drafted > 0


def test_a_request_may_switch_speculation_off_for_itself():
    script = walk(50)
    _, spec = speculator(script, [OracleDrafter], "hedge", "goodput", 4)
    harness = Harness(script, speculator=spec)
    off = harness.submit([1, 2], SamplingParams(temperature=0.0, extra_args={"speculative": False}))
    on = harness.submit([3, 4], SamplingParams(temperature=0.0))
    harness.drain()
    drafted = {request: sum(d.drafted for d in harness.deltas if d.request_id == request) for request in (off, on)}
    assert drafted[off] == 0 < drafted[on]
    assert harness.tokens(off) == plain(script, [1, 2], 16)


def test_thousands_of_switches_leave_memory_flat():
    script = walk(50)
    drafters, spec = speculator(script, [HalfOracleDrafter, JunkDrafter], "hedge", "goodput", 4)
    harness = Harness(script, speculator=spec)
    for turn in range(150):
        params = SamplingParams(temperature=0.0, max_tokens=6, extra_args={"speculative": turn % 2 == 0})
        harness.submit([turn % 50, 1], params)
        harness.drain()
        harness.deltas.clear()
    assert not spec._open
    assert not spec._vote._requests
    assert not spec._estimates._skills
    assert all(not drafter.held for drafter in drafters)
