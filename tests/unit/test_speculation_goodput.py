"""Goodput: drafts are cut where they stop paying, and switched off and on."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from outrider.speculation.acceptance import Acceptance, survival
from outrider.speculation.costs import CostTable
from outrider.speculation.goodput import GoodputLength
from outrider.speculation.goodput_rules import GoodputRules
from outrider.speculation.prices import Calls, DraftCosts
from outrider.speculation.timing import StepTiming
from outrider.types import Draft
from trials import believed, chain, trial

FLAT = CostTable([1, 64], [1.0, 1.0])
STEEP = CostTable([1, 64], [1.0, 64.0])


RICH = {"allowance": 100.0, "credit": 100.0}  # as good as no account


def goodput(costs=None, low=0, high=8, names=("a", "b"), estimates=None, **rules):
    costs, estimates = costs or CostTable([1, 64], [1.0, 1.0]), estimates or Acceptance(names)
    return GoodputLength(low, high, estimates, costs, DraftCosts(names), GoodputRules(**rules))


def test_flat_costs_take_everything_and_steep_costs_nothing():
    drafts = [believed(0.9, 0.8, 0.3, 0.2)]
    assert len(goodput(FLAT).trim([0], drafts, [8])[0]) == 4
    assert len(goodput(STEEP).trim([0], drafts, [8])[0]) == 0


def test_a_draft_stops_early_where_confidence_falls():
    half = CostTable([1, 64], [1.0, 1.0 + 63 * 0.3])
    assert len(goodput(half).trim([0], [believed(0.99, 0.95, 0.1, 0.99)], [8])[0]) == 2


def test_a_batch_gives_rows_to_those_who_use_them():
    costs = CostTable([1, 64], [1.0, 1.0 + 63 * 0.2])
    kept = goodput(costs).trim([0, 1], [believed(0.95, 0.95, 0.95), believed(0.15, 0.9, 0.9)], [8, 8])
    assert [len(draft) for draft in kept] == [3, 0]


def test_the_choice_is_the_best_of_all_prefixes():
    """Against brute force over every pair of lengths."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        slope = rng.uniform(0.05, 0.6)
        costs = CostTable([1, 64], [1.0, 1.0 + 63 * slope])
        policy = goodput(costs, margin_on=0.0, margin_off=0.0, margin_crowd=0.0, **RICH)
        drafts = [believed(*rng.uniform(0.1, 1.0, 4)) for _ in range(2)]
        paths = [np.concatenate(([0.0], np.cumsum(survival(draft)))) for draft in drafts]
        time = [1.0 + slope * (1 + m) for m in range(9)]
        value = {(i, j): (2 + paths[0][i] + paths[1][j]) / time[i + j] for i in range(5) for j in range(5)}
        kept = policy.trim([0, 1], drafts, [8, 8])
        assert value[len(kept[0]), len(kept[1])] == pytest.approx(max(value.values()))


def test_a_flat_table_verifies_the_second_branch_and_a_steep_one_the_chain():
    tree = Draft((1, 2, 3), (-1, 0, -1), drafter="a", confidence=(0.7, 0.9, 0.25))
    assert goodput(FLAT).trim([0], [tree], [8])[0].tokens == (1, 2, 3)
    chain_only = goodput(CostTable([1, 64], [1.0, 1.0 + 63 * 0.3])).trim([0], [tree], [8])[0]
    assert chain_only.tokens == (1, 2)


def test_hysteresis_needs_a_larger_gain_to_switch_on_than_to_stay_on():
    costs = CostTable([1, 64], [1.0, 1.0 + 63 * 0.3])
    policy = goodput(costs, margin_on=0.01, margin_off=0.1)
    slight = [believed(0.36)]  # a gain of 4.6 %
    assert len(policy.trim([0], slight, [8])[0]) == 1
    assert len(policy.trim([0], [believed(0.1)], [8])[0]) == 0
    assert len(policy.trim([0], slight, [8])[0]) == 0
    assert len(policy.trim([0], [believed(0.9)], [8])[0]) == 1
    assert len(policy.trim([0], slight, [8])[0]) == 1


@pytest.mark.parametrize(("margin", "drafted"), [(0.0, 12), (0.01, 0)])
def test_a_crowd_must_gain_more(margin, drafted):
    """12 sequences gain 1.4 % here: enough for one of them, too little for all where every row has its price."""
    costs = CostTable([1, 64], [1.0, 1.0 + 63 * 0.5])
    policy = goodput(costs, margin_off=0.01, margin_crowd=margin, **RICH)
    assert sum(map(len, policy.trim(list(range(12)), [believed(0.95)] * 12, [1] * 12))) == drafted


def test_costly_drafters_are_not_asked_in_a_crowd():
    asked = {}
    for crowd in (None, 2):
        policy = goodput(FLAT, names=("a",), crowd=crowd, **RICH)
        for _ in range(3):
            calls = {"a": Calls(4, 4, 0.4)}
            policy.observe([trial(chain("a", 1, 2), (1, 2, 3))], StepTiming(0.4, 1.0, 0, 1, 3), calls)
        asked[crowd] = []
        for n in (1, 2, 3):
            policy.awake()  # a new round
            asked[crowd].append(any(policy.depths("a", list(range(n)), [4] * n, [{}] * n)))
    assert asked[None] == [True, True, True]
    assert asked[2] == [True, True, False]


def test_low_is_always_drafted():
    assert len(goodput(STEEP, low=2).trim([0], [believed(0.1, 0.1, 0.1)], [8])[0]) == 2


def test_an_idle_batch_is_probed_ever_more_seldom():
    policy = goodput(STEEP, first_probe=4, last_probe=16)
    sizes = [len(policy.trim([0], [believed(0.2, 0.2, 0.2)], [8])[0]) for _ in range(100)]
    probes = [i for i, size in enumerate(sizes) if size]
    assert set(sizes) == {0, 2}
    assert [b - a for a, b in pairwise(probes)][:7] == [1, 8, 1, 16, 1, 16, 1]


def priced(policy, name, seconds):
    for _ in range(3):
        policy.observe([], StepTiming(), {name: Calls(1, 1, seconds)})
    return policy


def test_a_cheap_drafter_is_asked_as_deep_as_allowed():
    assert priced(goodput(), "a", 1e-4).depths("a", [0, 1], [8, 3], [{}, {}]) == [8, 3]


def test_a_drafter_is_introduced_before_its_price_is_trusted():
    """The first call computes a long prompt; it must not silence the drafter before its real price was seen."""
    policy = goodput(**RICH)
    asked = []
    for seconds in (50.0, 0.03, 0.03, 0.03):
        asked.append(policy.depths("a", [0], [8], [{}])[0])
        policy.trim([0], [Draft()], [8])
        policy.observe([], StepTiming(), {"a": Calls(1, 1, seconds)})
    assert asked[:2] == [2, 2]  # short drafts for one sequence
    assert asked[3] > 2


def test_a_costly_drafter_is_asked_only_as_deep_as_it_pays():
    free, dear = priced(goodput(), "a", 0.03), priced(goodput(), "a", 2.0)
    assert free.depths("a", [0], [8], [{}])[0] > 2
    assert dear.depths("a", [0], [8], [{}]) == [0]


def test_a_costly_drafter_rests_where_a_sure_draft_stands():
    policy = priced(goodput(), "a", 0.1)
    assert policy.depths("a", [0], [8], [{"b": believed(*[0.99] * 8, name="b")}]) == [0]
    policy.trim([0], [Draft()], [8])  # the round ends
    assert policy.depths("a", [0], [8], [{"b": believed(0.05, name="b")}])[0] > 0


def test_a_resting_drafter_is_probed_and_recovers():
    """Too expensive for what it gives, it falls silent; once it is always right, a probe brings it back."""
    estimates = Acceptance(("a",))
    policy = priced(goodput(CostTable([1, 64], [1.0, 1.63]), names=("a",), estimates=estimates), "a", 0.3)
    depths, draft = [], chain("a", 1, 2, 3, 4)
    for step in range(600):
        asked = policy.depths("a", [0], [4], [{}])[0]
        policy.trim([0], [Draft()], [4])
        depths.append(asked)
        if asked:
            truth = (99,) if step < 200 else (1, 2, 3, 4, 5)
            seen = trial(Draft(draft.tokens[:asked], drafter="a"), truth[: asked + 1])
            estimates.learn([seen])
            policy.observe(
                [seen], StepTiming(0.3 * asked, 1.0, 0, 1, 1 + asked), {"a": Calls(asked, asked, 0.3 * asked)}
            )
        else:
            policy.observe([trial(Draft(drafter="x"), (1,))], StepTiming(0, 1.0, 0, 1, 1), {})
    assert sum(1 for depth in depths[100:200] if depth) <= 4
    assert np.mean(depths[-50:]) > 2
