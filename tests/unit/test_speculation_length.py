"""Lengths: the published trend, the cost table, and goodput with its switching off and coming back."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from outrider.speculation.acceptance import Acceptance, survival
from outrider.speculation.costs import CostTable
from outrider.speculation.depths import Market, added_values, best_depths, plan_depths
from outrider.speculation.goodput import GoodputLength, GoodputRules
from outrider.speculation.length import FixedLength, TrendLength, TrendRules, relative_slope
from outrider.speculation.prices import Calls, DraftCosts
from outrider.speculation.timing import StepTiming
from outrider.speculation.trial import Trial, agreement
from outrider.types import Draft, Verdict

FLAT = CostTable([1, 64], [1.0, 1.0])
STEEP = CostTable([1, 64], [1.0, 64.0])


def trial(draft, truth, sequence_id=0):
    right = agreement(draft, truth)
    verdict = Verdict(tuple(truth), tuple(range(right)), len(draft), draft.drafter)
    return Trial(sequence_id, {draft.drafter: draft}, draft, verdict)


def chain(name, *tokens, confidence=None):
    return Draft(tokens, drafter=name, confidence=confidence)


def believed(*confidence, name="a"):
    return Draft(tuple(range(len(confidence))), drafter=name, confidence=confidence)


# --- trend ---------------------------------------------------------------------------------------------------------


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


# --- costs ---------------------------------------------------------------------------------------------------------


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


# --- acceptance ----------------------------------------------------------------------------------------------------


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


# --- goodput -------------------------------------------------------------------------------------------------------


RICH = {"allowance": 100.0, "credit": 100.0}  # as good as no account


def goodput(costs=None, low=0, high=8, names=("a", "b"), **rules):
    costs = costs or CostTable([1, 64], [1.0, 1.0])
    return GoodputLength(low, high, Acceptance(names), costs, DraftCosts(names), GoodputRules(**rules))


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
        policy._draft_costs.update({name: Calls(1, 1, seconds)})
    return policy


def test_a_cheap_drafter_is_asked_as_deep_as_allowed():
    assert priced(goodput(), "a", 1e-4).depths("a", [0, 1], [8, 3], [{}, {}]) == [8, 3]


def test_a_drafter_is_introduced_before_its_price_is_trusted():
    """The first call computes a long prompt; it must not silence the drafter before its real price was seen."""
    policy = goodput()
    asked = []
    for seconds in (50.0, 0.03, 0.03, 0.03):
        asked.append(policy.depths("a", [0], [8], [{}])[0])
        policy.trim([0], [Draft()], [8])
        policy._draft_costs.update({"a": Calls(1, 1, seconds)})
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
    policy = priced(goodput(CostTable([1, 64], [1.0, 1.63]), names=("a",)), "a", 0.3)
    depths, draft = [], chain("a", 1, 2, 3, 4)
    for step in range(600):
        asked = policy.depths("a", [0], [4], [{}])[0]
        policy.trim([0], [Draft()], [4])
        depths.append(asked)
        if asked:
            truth = (99,) if step < 200 else (1, 2, 3, 4, 5)
            seen = trial(Draft(draft.tokens[:asked], drafter="a"), truth[: asked + 1])
            policy._estimates.learn([seen])
            policy.observe(
                [seen], StepTiming(0.3 * asked, 1.0, 0, 1, 1 + asked), {"a": Calls(asked, asked, 0.3 * asked)}
            )
        else:
            policy.observe([trial(Draft(drafter="x"), (1,))], StepTiming(0, 1.0, 0, 1, 1), {})
    assert sum(1 for depth in depths[100:200] if depth) <= 4
    assert np.mean(depths[-50:]) > 2


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
