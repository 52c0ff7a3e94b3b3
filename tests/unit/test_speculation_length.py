"""Fixed lengths, and the published trend rule."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.speculation.length import FixedLength, TrendLength, TrendRules, relative_slope
from outrider.speculation.timing import StepTiming
from trials import chain, trial


def test_fixed_obeys_the_limits():
    assert FixedLength(4).depths("a", [0, 1, 2], [9, 4, 1], [{}] * 3) == [4, 4, 1]


def test_slope():
    assert relative_slope([(3, 1.0), (3, 2.0)]) == 0.0
    assert relative_slope([(0, 1.0), (1, 2.0), (2, 3.0)]) == pytest.approx(0.5)
    assert relative_slope([(2, 3.0), (4, 2.0)]) == pytest.approx(-0.2)


def drive(length, curve, rounds=400):
    """Run the rule against a machine where length s gives the ratio curve(s); returns the lengths it chose."""
    chosen = []
    for _ in range(rounds):
        s = length.depths("a", [0], [99], [{}])[0]
        gained = 10.0 / curve(s)  # tokens per verification of one second
        tokens = tuple(range(int(gained)))
        length.observe([trial(chain("a", *range(s)), tokens)], StepTiming(0, int(gained) * curve(s) / 10, 0, 1, 1), {})
        chosen.append(s)
    return chosen


def test_trend_lengthens_while_the_ratio_improves():
    rng = np.random.default_rng(0)
    chosen = drive(TrendLength(1, 12), lambda s: (13 - s) * rng.uniform(0.97, 1.03))
    assert np.mean(chosen[-100:]) > 8


def test_trend_shortens_when_it_worsens():
    rng = np.random.default_rng(0)
    chosen = drive(TrendLength(1, 12), lambda s: (1 + s) * rng.uniform(0.97, 1.03))
    assert np.mean(chosen[-100:]) < 4


@pytest.mark.parametrize("drafting", [False, True])
def test_trend_sees_drafting_time_only_where_asked(drafting):
    """Verifying is flat and every token is accepted, but each token takes as long to draft as a verification."""
    length = TrendLength(1, 12, TrendRules(drafting=drafting))
    for _ in range(400):
        s = length.depths("a", [0], [99], [{}])[0]
        gained = tuple(range(1 + min(s, 3)))  # the fourth token is always wrong
        length.observe([trial(chain("a", *range(s)), gained)], StepTiming(1.0 * s, 1.0, 0, 1, 1 + s), {})
    assert length.length < 4 if drafting else length.length > 4


def test_trend_stays_within_its_bounds():
    rng = np.random.default_rng(1)
    chosen = drive(TrendLength(2, 6), lambda s: rng.uniform(1, 9))
    assert set(chosen) == {2, 3, 4, 5, 6}


def test_trend_waits_until_drafts_of_the_old_length_are_gone():
    """Sequence 7 stays in the pool with a draft of length 5 while the rule moves on to 6."""
    length = TrendLength(1, 9, TrendRules(window=4, settle=1))
    length.depths("a", [7], [9], [{}])

    def step():
        length.depths("a", [0], [9], [{}])
        length.observe([trial(chain("a", 1), (1, 2))], StepTiming(0, float(length.length), 0, 1, 2), {})
        return length.length

    assert step() == 6
    assert [step() for _ in range(5)] == [6] * 5
    length.forget(7)
    assert step() == 4
