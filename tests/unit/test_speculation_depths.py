"""How deep several drafters are asked together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.depths import LonePrice, Market, added_values, best_depths, plan_alone, plan_depths


def market(row=0.1, step=(0.0,), token=(0.05,), serial=1.0):
    return Market(row, np.array(step), np.array(token), serial)


def test_added_value_beside_nothing_and_beside_a_standing_draft():
    own, nothing = np.array([[[0.8, 0.5]]]), np.zeros((1, 2))
    assert added_values(own, nothing, market())[0] == pytest.approx([0.7, 0.3])
    beside = added_values(own, np.array([[0.8, 0.0]]), market())[0]
    assert beside == pytest.approx([0.0, 0.8 * 0.5 - 0.1])


def test_best_depths_against_brute_force():
    """Every choice of depths for three sequences: value of each, less the shared cost of the deepest."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        values = np.concatenate((np.zeros((3, 1)), rng.normal(0.1, 0.4, (3, 4)).cumsum(axis=1)), axis=1)
        cost = rng.uniform(0, 0.6)
        worth = {d: sum(values[i, d[i]] for i in range(3)) - cost * max(d) for d in np.ndindex(5, 5, 5)}
        depths, told = best_depths(values, cost)
        assert worth[tuple(depths.tolist())] == pytest.approx(max(worth.values())) == pytest.approx(told)


def test_a_step_is_taken_when_together_it_pays():
    """One sequence alone would not pay for a step; eight together do."""
    value = np.array([[0.0, 0.4]])
    assert best_depths(value, 1.0)[0].tolist() == [0]
    assert best_depths(np.repeat(value, 8, axis=0), 1.0)[0].tolist() == [1] * 8


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 5))
def test_one_drafter_is_planned_in_plain_numbers_as_in_arrays(seed, sequences, depth):
    rng = np.random.default_rng(seed)
    expected, standing = rng.uniform(0, 1, (2, sequences, depth))
    limits = rng.integers(0, depth + 1, sequences).tolist()
    row, step, token, entry = *rng.uniform(0, 0.3, 3), rng.uniform(0, 0.3, sequences)
    alone, worth = plan_alone(expected.tolist(), limits, standing.tolist(), LonePrice(row, step, token), entry.tolist())
    prices = Market(row, np.array([step]), np.array([token]), 1.0, entry[None])
    depths, told = plan_depths(expected[None], limits, standing, prices)
    assert (alone, worth) == (depths[0].tolist(), pytest.approx(told, abs=1e-12))
    assert worth > 0 or not any(alone)


#: Two specialists, two sequences each.
SPECIALISTS = np.repeat(np.array([[0.9, 0.9, 0.2, 0.2], [0.2, 0.2, 0.9, 0.9]])[:, :, None], 4, axis=2)


def test_side_by_side_the_crowd_drafts():
    prices = market(step=(0.3, 0.3), token=(0.0, 0.0), serial=0.0)
    depths, worth = plan_depths(SPECIALISTS, [4] * 4, np.zeros((4, 4)), prices)
    assert depths.tolist() == [[4] * 4] * 2
    assert worth > 0


def test_one_after_another_every_sequence_goes_to_its_specialist():
    prices = market(step=(0.3, 0.3), token=(0.1, 0.1), serial=1.0)
    depths, _ = plan_depths(SPECIALISTS, [4, 4, 4, 3], np.zeros((4, 4)), prices)
    assert depths.tolist() == [[4, 4, 0, 0], [0, 0, 4, 3]]


def test_where_nothing_pays_nobody_drafts():
    depths, worth = plan_depths(SPECIALISTS, [4] * 4, np.zeros((4, 4)), market(step=(9.0, 9.0), token=(0, 0)))
    assert not depths.any()
    assert worth == 0
