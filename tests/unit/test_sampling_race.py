"""The compiled sampling loops against their numpy oracle, and the noise against its law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling import oracle, race
from outrider.types import Float32


def some_logits(size: int, seed: int, spread: float = 3.0) -> Float32:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


@settings(max_examples=120, deadline=None)
@given(
    size=st.integers(1, 300),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, -1, 1, 5, 50, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    padding=st.integers(0, 3),
    quantised=st.booleans(),
)
def test_the_compiled_law_is_the_oracles(size, seed, temperature, top_k, top_p, min_p, padding, quantised) -> None:
    logits = some_logits(size + padding, seed)
    logits = np.round(logits) if quantised else logits  # many ties
    args = (logits, size, temperature, top_k, top_p, min_p)
    p, expected = race.probabilities(*args), oracle.probabilities(*args)
    assert p == pytest.approx(expected, abs=1e-14)
    assert np.array_equal(p > 1e-300, expected > 1e-300)
    assert p[size:].sum() == 0
    assert p.sum() == pytest.approx(1.0, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 200), seed=st.integers(0, 1000), key=st.integers(0, 2**64 - 1))
def test_the_compiled_race_is_the_oracles(size, seed, key) -> None:
    p = oracle.probabilities(some_logits(size, seed), size, 1.0, 0, 0.9, 0.0)
    assert race.race(p, np.uint64(key)) == oracle.race(p, np.uint64(key))


def test_blocks_join_without_a_seam() -> None:
    logits = some_logits(3 * 2048 + 7, 5)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    p = race.probabilities(logits, len(logits), 1.0, 0, 1.0, 0.0)
    assert p == pytest.approx(weights / weights.sum(), rel=1e-13)


@pytest.mark.parametrize("top_k", [1, 20, 50, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_large_vocabulary_is_narrowed_to_the_same_tokens(top_k: int, top_p: float) -> None:
    """Here top-k looks at block maxima first; rounded logits make ties at every boundary."""
    for logits in (some_logits(20_011, 8), np.round(some_logits(20_011, 9))):
        p = race.probabilities(logits, 20_000, 0.7, top_k, top_p, 0.0)
        weights = np.exp((logits[:20_000].astype(np.float64) - logits[:20_000].max()) / 0.7)
        weights[logits[:20_000] < np.sort(logits[:20_000])[-top_k]] = 0
        order = np.argsort(-weights, kind="stable")
        enough = int(np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum()))
        weights[weights < weights[order[min(enough, len(order) - 1)]]] = 0
        assert p[:20_000] == pytest.approx(weights / weights.sum(), abs=1e-14)
        assert np.count_nonzero(p) == np.count_nonzero(weights) > 0


def test_top_k_and_top_p_keep_what_ties() -> None:
    logits = np.array([1, 3, 3, 0, 3], np.float32)
    for args in ((1.0, 2, 1.0, 0.0), (1.0, 0, 0.5, 0.0)):
        assert np.flatnonzero(race.probabilities(logits, 5, *args)).tolist() == [1, 2, 4]


@pytest.mark.parametrize("hole", [np.nan, -np.inf])
def test_what_is_not_a_number_or_forbidden_has_no_mass(hole: float) -> None:
    logits = np.array([hole, 1, hole, 2], np.float32)
    p = race.probabilities(logits, 4, 1.0, 0, 1.0, 0.0)
    assert p[[0, 2]].tolist() == [0, 0]
    assert p.sum() == pytest.approx(1)
    assert race.best_token(logits, 4) == 3
    assert race.best_token(np.full(3, hole, np.float32), 3) == -1
    assert not race.probabilities(np.full(3, hole, np.float32), 3, 1.0, 2, 0.5, 0.1).any()


def test_infinite_logits_share_the_mass() -> None:
    logits = np.array([np.inf, 1, np.inf], np.float32)
    assert race.probabilities(logits, 3, 0.5, 0, 1.0, 0.0).tolist() == [0.5, 0, 0.5]


def test_best_is_the_lowest_of_equals_within_the_vocabulary() -> None:
    assert race.best_token(np.array([0.0, 5, -0.0, 5, 9], np.float32), 4) == 1
    assert race.best_token(np.array([-0.0, 0.0], np.float32), 2) == 0


def test_an_empty_race_has_no_winner() -> None:
    assert race.race(np.zeros(4), race.stream(1)) == -1


def test_streams_differ_by_every_word() -> None:
    words = [(0,), (1,), (0, 0), (0, 1), (1, 0), (2**63, 1), (-1, 1)]
    assert len({int(race.stream(*w)) for w in words}) == len(words)


@pytest.mark.parametrize("vary", ["position", "token"])
def test_noise_is_uniform_and_uncorrelated(vary: str) -> None:
    count = 20_000
    if vary == "token":
        u = np.array([race.uniform(race.stream(5), token) for token in range(count)])
    else:
        u = np.array([race.uniform(race.stream(5, position), 17) for position in range(count)])
    assert 0 < u.min() < u.max() < 1
    cells = np.histogram(u, bins=64, range=(0, 1))[0]
    assert ((cells - count / 64) ** 2 / (count / 64)).sum() < 120  # 63 degrees of freedom, p about 2e-5
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.03
