"""The lookup drafter: longest and latest match, nothing without one, bounded work, nothing left behind."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.ngram import NgramDrafter, NgramOptions, _Index, unroll
from outrider.errors import ConfigError
from outrider.types import Verdict
from scripted import context, cycle, judge_greedy, observation, plain


def guess(tokens, depth=4, **options):
    return NgramDrafter(NgramOptions(**options)).propose([context(tokens)], [depth])[0].tokens


def test_nothing_without_a_match():
    assert guess([1, 2, 3, 4, 5]) == ()
    assert guess([7]) == ()
    assert guess([1, 9, 2, 9], min_n=2) == ()


def test_the_longest_match_wins_over_a_later_shorter_one():
    tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 1, 2, 3, 4]
    assert guess(tokens, depth=1) == (50,)


def test_the_latest_of_equal_matches_wins():
    assert guess([1, 2, 50, 7, 1, 2, 60, 8, 1, 2], depth=2) == (60, 8)


def test_a_unigram_matches_only_when_asked_for():
    assert guess([5, 6, 7, 5], depth=2, min_n=1) == (6, 7)
    assert guess([5, 6, 7, 5], depth=2) == ()


def test_a_match_near_the_end_repeats_its_period():
    assert guess([1, 2, 1, 2, 1, 2], depth=5) == (1, 2, 1, 2, 1)
    assert unroll([4, 5, 6], 1, 5) == (5, 6, 5, 6, 5)


def test_depth_zero_gives_nothing():
    assert guess([1, 2, 1, 2], depth=0) == ()


def test_index_grows_with_the_sequence_and_equals_a_fresh_one():
    drafter, tokens = NgramDrafter(), [1, 2, 3]
    for token in plain(cycle([1, 2, 3, 4, 9, 2, 3]), tokens, 60):
        tokens.append(token)
        grown = drafter.propose([context(tokens)], [6])[0].tokens
        assert grown == NgramDrafter().propose([context(tokens)], [6])[0].tokens
    assert len(grown) == 6


def longest_known_end(tokens, low, high):
    """(n, index of the continuation) by search: the latest earlier place of the longest n-gram that ends the text."""
    best = (0, 0)
    for n in range(low, min(high, len(tokens)) + 1):
        places = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[len(tokens) - n :]]
        if not places:
            break
        best = (n, places[-1])
    return best


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=150), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_the_compiled_index_finds_what_a_search_finds(parts, low, more):
    """However the text comes in, and however often its room is enlarged."""
    index, tokens = _Index(low, low + more), []
    for part in parts:
        tokens += part
        assert index.read(tokens) == longest_known_end(tokens, low, low + more)


def test_it_is_right_on_repetition_and_gets_sure_of_it():
    script, drafter, tokens = cycle([3, 1, 4, 1, 5, 9, 2, 6]), NgramDrafter(), [3, 1, 4, 1, 5, 9, 2, 6, 3, 1]
    before = drafter.propose([context(tokens)], [4])[0].confidence[0]
    for _ in range(30):
        draft = drafter.propose([context(tokens)], [4])[0]
        verdict = judge_greedy(script, tokens, draft)
        known = len(tokens)
        tokens += verdict.tokens
        drafter.observe([observation(0, known, verdict, tokens)])
        assert len(verdict.accepted) == 4
    assert draft.confidence[0] > before
    assert draft.confidence[0] > 0.9


def test_forget_releases_everything():
    drafter = NgramDrafter()
    drafter.propose([context([1, 2, 1, 2], i) for i in range(5)], [4] * 5)
    for i in range(5):
        drafter.forget(i)
        drafter.forget(i)
    assert not drafter._indices


def test_a_token_costs_microseconds():
    drafter, tokens = NgramDrafter(), list(range(1000)) * 2
    drafter.propose([context(tokens)], [4])
    start = time.perf_counter()
    for token in range(2000):
        tokens.append(token % 1000)
        drafter.propose([context(tokens)], [4])
    assert (time.perf_counter() - start) / 2000 < 200e-6


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="min_n"):
        NgramOptions(max_n=2, min_n=3)


def test_it_learns_from_guesses_that_were_not_verified():
    """Another drafter won every vote; that the lookup was wrong shows all the same."""
    drafter, tokens = NgramDrafter(), [1, 2, 3, 1, 2]
    before = drafter.propose([context(tokens)], [2])[0].confidence
    for _ in range(30):
        assert drafter.propose([context(tokens)], [2])[0].tokens == (3, 1)
        drafter.observe([observation(0, len(tokens), Verdict((9, 9), (0,), 1, "another"), [*tokens, 9, 9])])
    after = drafter.propose([context(tokens)], [2])[0].confidence
    assert after[0] < 0.2 * before[0]
