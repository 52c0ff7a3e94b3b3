"""How often drafters are expected to be right."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.speculation.acceptance import Acceptance, survival
from outrider.speculation.trial import Trial
from outrider.types import Draft, Verdict
from trials import chain, trial


def test_acceptance_learns_conditional_rates_by_position():
    estimates, rng = Acceptance(["a"]), np.random.default_rng(0)
    law = (0.3, 0.7, 0.9, 0.9)
    for sequence_id in range(3000):
        right = next((i for i, p in enumerate(law) if rng.random() > p), 4)
        truth = (*range(right), 99)
        estimates.learn([trial(chain("a", 0, 1, 2, 3), truth, sequence_id)])
        estimates.forget(sequence_id)
    unseen = estimates.calibrated(-1, "a", chain("a", 0, 1, 2, 3)).confidence
    assert unseen == pytest.approx(law, abs=0.08)
    assert all(hoped > known for hoped, known in zip(estimates.expected(-1, "a", 2), unseen, strict=False))
    assert not estimates._skills


def test_acceptance_calibrates_stated_confidence():
    """A drafter that says 0.95 and is right half of the time is believed half."""
    estimates, rng = Acceptance(["a"]), np.random.default_rng(0)
    boast = chain("a", 1, confidence=(0.95,))
    for sequence_id in range(1000):
        estimates.learn([trial(boast, (1, 2) if rng.random() < 0.5 else (9,), sequence_id)])
    assert estimates.calibrated(-1, "a", boast).confidence[0] == pytest.approx(0.5, abs=0.08)


def test_acceptance_differs_between_requests():
    estimates = Acceptance(["a"])
    for _ in range(30):
        estimates.learn([trial(chain("a", 1, 2), (1, 2, 3), 0), trial(chain("a", 1, 2), (9,), 1)])
    assert estimates.expected(0, "a", 1)[0] > 0.8
    assert estimates.expected(1, "a", 1)[0] < 0.2
    assert 0.3 < estimates.calibrated(2, "a", chain("a", 1)).confidence[0] < 0.7


def test_a_drafter_without_ideas_is_expected_to_have_none():
    estimates, silent = Acceptance(["a"]), Trial(0, {"a": Draft()}, Draft(), Verdict((1,)))
    before = estimates.expected(0, "a", 2)
    estimates.learn([silent] * 50)
    assert estimates.expected(0, "a", 2)[0] < 0.1 * before[0]
    assert estimates.calibrated(0, "a", chain("a", 1)).confidence[0] == pytest.approx(0.5)


def test_survival_multiplies_along_paths():
    tree = Draft((1, 2, 3), (-1, 0, -1), confidence=(0.5, 0.5, 0.2))
    assert survival(tree) == pytest.approx([0.5, 0.25, 0.2])
