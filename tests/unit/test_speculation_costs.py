"""What rows cost the target, and what drafters cost."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.speculation.costs import CostTable
from outrider.speculation.prices import Calls, DraftCosts
from outrider.speculation.timing import StepTiming


def test_costs_are_interpolated_and_go_on_behind_the_last_knot():
    table = CostTable([1, 5, 9], [1.0, 2.0, 6.0])
    assert table.times(1, 1, 11) == pytest.approx([1, 1.25, 1.5, 1.75, 2, 3, 4, 5, 6, 7, 8])


def test_costs_never_fall_with_rows():
    assert CostTable([1, 2, 4], [3.0, 2.0, 5.0]).times(1, 1, 4) == pytest.approx([3, 3, 4, 5])


def test_costs_are_measured_where_asked_and_interpolated():
    asked = []
    table = CostTable.measured(lambda rows: asked.append(rows) or float(rows), (1, 4, 8))
    assert asked == [1, 4, 8]
    assert table.time(1, 6) == pytest.approx(6)


def test_costs_follow_the_machine():
    """Start from an assumption; the truth is 5 ms + 2 ms per row and 3 ms more for each doubling of sequences."""
    table, rng = CostTable.assumed(), np.random.default_rng(0)

    def real(sequences, rows):
        return 5e-3 + 2e-3 * rows + 3e-3 * (sequences.bit_length() - 1)

    for _ in range(2000):
        sequences = int(rng.choice([1, 4]))
        rows = sequences * int(rng.integers(1, 9))
        noise = rng.uniform(0.9, 1.1) * (20 if rng.random() < 0.01 else 1)
        table.update(StepTiming(0, real(sequences, rows) * noise, 0, sequences, rows))
    for sequences, rows in [(1, 1), (1, 4), (1, 8), (4, 4), (4, 16), (4, 28)]:
        assert table.time(sequences, rows) == pytest.approx(real(sequences, rows), rel=0.2)


def test_a_drafters_price_is_told_apart_by_steps_and_tokens():
    costs, rng = DraftCosts(["accelerator", "cpu", "never"]), np.random.default_rng(0)
    for _ in range(100):
        steps, sequences = int(rng.integers(1, 9)), int(rng.integers(1, 17))
        tokens = steps * sequences
        calls = {
            "accelerator": Calls(steps, tokens, 4e-3 * steps),
            "cpu": Calls(steps, tokens, 1e-4 * steps + 1e-3 * tokens),
        }
        costs.update(calls)
    assert costs.of("accelerator")[:2] == pytest.approx((4e-3, 0.0), abs=4e-4)
    assert costs.of("cpu")[1] == pytest.approx(1e-3, rel=0.1)
    assert costs.of("never") == (0.0, 0.0, 0.0)


def price(costs):
    return costs.of("a").of(1, 1, 0)


def test_catching_up_is_not_taken_for_the_price():
    """The prompt comes first; later the drafter rests now and then and has to catch up."""
    costs = DraftCosts(["a"])
    costs.update({"a": Calls(4, 4, 4.0)})
    costs.update({"a": Calls(4, 4, 4e-3)})
    assert price(costs) == pytest.approx(1e-3, rel=0.01)
    for _ in range(10):
        costs.update({"a": Calls(2, 2, 0.1)})
        costs.update({"a": Calls(2, 2, 2e-3)})
    assert price(costs) == pytest.approx(1e-3, rel=0.01)


def test_a_price_that_stays_higher_is_believed():
    costs = DraftCosts(["a"])
    for _ in range(20):
        costs.update({"a": Calls(4, 4, 4e-3)})
    for _ in range(5):
        costs.update({"a": Calls(4, 4, 40e-3)})
    assert price(costs) == pytest.approx(10e-3, rel=0.01)
