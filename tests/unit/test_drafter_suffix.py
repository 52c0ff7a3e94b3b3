"""The suffix automaton against brute force, and the drafter on it: longest match, frequency, shared memory, bounds."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.automaton import ROOT, SuffixAutomaton
from outrider.drafters.suffix import SuffixDrafter, SuffixOptions
from outrider.drafters.suffix_index import SuffixIndex
from outrider.errors import ConfigError, DrafterError
from outrider.kernels.cpu import suffixes
from scripted import context, cycle, judge_greedy, observation


def occurrences(texts, needle):
    """How often a substring occurs in the texts."""
    size = len(needle)
    return sum(text[i : i + size] == needle for text in texts for i in range(len(text) - size + 1))


def state_of(automaton, needle):
    state = ROOT
    for token in needle:
        state = automaton.next[state].get(token, -1)
        if state < 0:
            return None
    return state


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=3))
def test_the_automaton_holds_exactly_the_substrings_and_their_counts(texts):
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.restart()
        for token in text:
            automaton.extend([token])
    for size in range(1, 5):
        for code in range(3**size):
            needle = [code // 3**i % 3 for i in range(size)]
            state, count = state_of(automaton, needle), occurrences(texts, needle)
            assert (state is not None) == (count > 0)
            if state is not None:
                assert automaton.counts[state] == count
    assert len(automaton.links) <= 2 * sum(map(len, texts)) + 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.lists(st.integers(0, 2), max_size=20),
)
def test_a_match_is_the_longest_suffix_that_occurs_even_while_the_automaton_grows(first, read, second):
    """`second` is fed between two reads: clones must not leave matches behind."""
    automaton = SuffixAutomaton()
    automaton.extend(first)
    state, length, seen = ROOT, 0, []
    for half, extra in ((read[: len(read) // 2], second), (read[len(read) // 2 :], [])):
        for token in half:
            state, length = automaton.follow(state, length, token)
            seen.append(token)
        automaton.extend(extra)
    text = first + second
    assert length == 0 or occurrences([text], seen[len(seen) - length :]) > 0
    state = automaton.settle(state, length)
    assert length == 0 or automaton.counts[state] == occurrences([text], seen[len(seen) - length :])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_compiled_index_is_the_automaton_state_by_state(data):
    """Several texts of few and of many different tokens, grown past their first room, read and continued in between."""
    width = data.draw(st.sampled_from([2, 3, 40, 40000]))
    token = st.integers(0, width - 1)
    slow, fast, match = SuffixAutomaton(), SuffixIndex(), (ROOT, 0)
    for _ in range(data.draw(st.integers(1, 6))):
        text = data.draw(st.lists(token, max_size=200))
        slow.extend(text)
        fast.extend(text)
        read = data.draw(st.lists(token, max_size=8)) + text[:6]
        expected = match
        for one in read:
            expected = slow.follow(*expected, one)
        match = fast.follow(*match, read)
        assert match == expected
        assert fast.settle(*match) == slow.settle(*match)
        assert fast.repeated() == (max(slow.links[slow.last], ROOT), slow.lengths[max(slow.links[slow.last], ROOT)])
        for state in (ROOT, match[0], fast.repeated()[0]):
            assert fast.descend(state, 6) == descend(slow, state, 6)
        if data.draw(st.booleans()):
            slow.restart()
            fast.restart()
    states = fast._states[: len(slow.links)]
    assert states[:, suffixes.LINK].tolist() == slow.links
    assert states[:, suffixes.LENGTH].tolist() == slow.lengths
    assert states[:, suffixes.COUNT].tolist() == slow.counts
    assert fast.size == slow.size


def descend(automaton, state, depth):
    """The likeliest continuation by the slow automaton, with shares."""
    tokens, shares = [], []
    while len(tokens) < depth:
        token, state, share = automaton.likeliest(state)
        if token < 0:
            break
        tokens.append(token)
        shares.append(share)
    return tokens, shares


def test_an_index_that_ran_out_of_room_says_so():
    index = SuffixIndex()
    index._edges = index._edges[:4]
    with pytest.raises(DrafterError, match="full"):
        index.extend([1, 2, 3, 4, 5])


def guess(tokens, depth=4, **options):
    return SuffixDrafter(SuffixOptions(**options)).propose([context(tokens)], [depth])[0]


def test_nothing_without_a_match():
    assert guess([1, 2, 3, 4]).tokens == ()
    assert guess([1, 9, 2, 9]).tokens == ()
    assert guess([1, 9, 2, 9], min_match=1).tokens


def test_the_most_frequent_continuation_wins():
    tokens = [1, 2, 50, 11, 1, 2, 60, 12, 1, 2, 50, 13, 1, 2, 61, 14, 1, 2]
    draft = guess(tokens, depth=1)
    assert draft.tokens == (50,)


def test_the_longest_match_decides():
    tokens = [9, 1, 2, 70, 1, 2, 60, 1, 2, 60, 9, 1, 2]
    assert guess(tokens, depth=1).tokens == (70,)


def test_reach_bounds_the_draft_by_the_match():
    tokens = [*range(10, 30), 10, 11]
    assert len(guess(tokens, depth=20, reach=2.0)) == 4
    assert guess(tokens, depth=20, reach=2.0).tokens == (12, 13, 14, 15)


def test_unanimous_continuations_are_believed_more():
    split = guess([1, 2, 50, 11, 1, 2, 60, 12, 1, 2], depth=1)
    sure = guess([1, 2, 50, 11, 1, 2, 50, 12, 1, 2], depth=1)
    assert sure.confidence[0] > split.confidence[0] > 0


def test_it_is_right_on_repetition():
    script, drafter, tokens, accepted = (
        cycle([3, 1, 4, 1, 5, 9, 2, 6]),
        SuffixDrafter(),
        [3, 1, 4, 1, 5, 9, 2, 6, 3, 1],
        0,
    )
    for _ in range(20):
        draft = drafter.propose([context(tokens)], [6])[0]
        verdict, known = judge_greedy(script, tokens, draft), len(tokens)
        tokens += verdict.tokens
        drafter.observe([observation(0, known, verdict, tokens)])
        accepted += len(verdict.accepted)
    assert accepted > 100


def finish(drafter, tokens, prompt_length, sequence_id):
    drafter.propose([context(tokens, sequence_id, prompt_length)], [4])
    drafter.forget(sequence_id)


def test_past_outputs_help_new_requests_but_prompts_are_not_kept():
    drafter = SuffixDrafter()
    finish(drafter, [100, 101, 102, 1, 2, 3, 4, 5, 6], 3, 0)
    assert drafter.propose([context([7, 2, 3], 1)], [4])[0].tokens == (4, 5, 6)
    assert drafter.propose([context([7, 100, 101], 2)], [4])[0].tokens == ()
    assert SuffixDrafter(SuffixOptions(shared_tokens=0)).propose([context([7, 2, 3], 1)], [4])[0].tokens == ()


def shared_count(drafter, needle):
    """How often the shared memory has seen some tokens."""
    for _ in range(20):
        drafter.propose([], [])
    found = [(index, *index.follow(ROOT, 0, needle)) for index in drafter._shared._generations]
    return sum(
        index._states[index.settle(state, length), suffixes.COUNT]
        for index, state, length in found
        if length == len(needle)
    )


def test_a_preempted_output_is_remembered_once():
    drafter, tokens = SuffixDrafter(), [50, 51, 1, 2, 3, 4]
    finish(drafter, tokens, 2, 0)  # preempted: forgotten in the middle of its answer
    drafter.propose([context([*tokens, 5, 6, 7, 8], 0, 2)], [4])  # it came back, and goes on
    drafter.forget(0)
    assert shared_count(drafter, [2, 3]) == 1
    assert shared_count(drafter, [6, 7]) == 1
    finish(drafter, [50, 51, 1, 2, 3, 4], 2, 1)  # another request that says the same
    assert shared_count(drafter, [2, 3]) == 2


def test_sequences_that_may_come_back_are_remembered_within_bounds():
    drafter = SuffixDrafter()
    for sequence_id in range(1000):
        finish(drafter, [1, 2, 3, 4], 1, sequence_id)
    assert len(drafter._given) <= 256
    assert not drafter._tracked


def test_running_matches_follow_the_shared_memory_as_it_grows():
    drafter = SuffixDrafter()
    drafter.propose([context([7, 2], 1)], [4])
    finish(drafter, [1, 2, 3, 4, 5, 6], 0, 0)
    drafter.propose([context([7, 2, 2], 1)], [4])
    assert drafter.propose([context([7, 2, 2, 3], 1)], [4])[0].tokens == (4, 5, 6)


def test_the_shared_memory_is_bounded_and_forgets_the_oldest():
    drafter = SuffixDrafter(SuffixOptions(shared_tokens=200))
    for turn in range(30):
        finish(drafter, [1000 * turn + i for i in range(40)], 0, turn)
    for _ in range(40):
        drafter.propose([], [])
    generations = drafter._shared._generations
    assert sum(generation.size for generation in generations) <= 200
    assert drafter.propose([context([29001, 29002], 99)], [2])[0].tokens == (29003, 29004)
    assert drafter.propose([context([1, 2], 98)], [2])[0].tokens == ()


def test_a_long_sequence_keeps_its_latter_part_only():
    drafter, tokens = SuffixDrafter(SuffixOptions(sequence_tokens=64, shared_tokens=0)), list(range(1000))
    for token in (990, 991):
        tokens.append(token)
        drafter.propose([context(tokens)], [4])
    tracked = drafter._tracked[0]
    assert tracked.own.size <= 64
    assert drafter.propose([context(tokens)], [3])[0].tokens == (992, 993, 994)


def test_forget_releases_the_sequence():
    drafter = SuffixDrafter()
    drafter.propose([context([1, 2, 1, 2], i) for i in range(4)], [4] * 4)
    for i in range(4):
        drafter.forget(i)
        drafter.forget(i)
    assert not drafter._tracked


def test_a_token_costs_microseconds():
    """A loose bound around 10 us per token, on text with many repeats."""
    tokens = np.random.default_rng(0).zipf(1.3, 20000) % 5000
    automaton, start = SuffixAutomaton(), time.perf_counter()
    automaton.extend(tokens.tolist())
    assert (time.perf_counter() - start) / 20000 < 200e-6


def test_a_long_run_of_one_token_stays_linear():
    automaton, start = SuffixAutomaton(), time.perf_counter()
    automaton.extend([7] * 20000)
    assert (time.perf_counter() - start) / 20000 < 200e-6


@pytest.mark.parametrize(
    "options", [{"min_match": 0}, {"reach": 0}, {"reach": float("nan")}, {"sequence_tokens": 1}, {"shared_tokens": -1}]
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError, match="suffix"):
        SuffixOptions(**options)
