"""What trying costs is bounded: rehearsed prices, accounts, probes, rests, and the record of how it went."""

from __future__ import annotations

import numpy as np
import pytest

from greedy_loop import Loop, Priced
from outrider.bench.world import Clock
from outrider.config import SpeculativeConfig
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.speculation.account import Account
from outrider.speculation.build import assemble
from outrider.speculation.guard import GuardedDrafter
from outrider.speculation.history import CAPACITY, History
from outrider.speculation.prices import Calls, DraftCosts
from outrider.speculation.probe import Probe, Rest
from outrider.speculation.rehearsal import rehearse
from outrider.speculation.timing import StepTiming
from outrider.types import NO_DRAFT, Draft
from scripted import context, walk
from scripted_drafters import DeadDrafter, HalfOracleDrafter, JunkDrafter, OracleDrafter, RaisingDrafter

SCRIPT = walk(50)
PLAIN = 1e-3  # seconds of a step


def test_an_account_spends_earns_and_saves_up_within_bounds():
    account = Account(allowance=1.0, most=3.0)
    assert account.covers(0.5)
    assert not account.covers(0.6)  # half of it is kept for another try
    account.book(-0.8)
    assert not account.covers(0.15)
    account.book(10.0)
    assert account.balance == 3.0


def test_probes_come_in_pairs_at_growing_intervals():
    probe = Probe(4)
    due = [i for i in range(60) if probe.due(16)]
    assert due == [3, 4, 12, 13, 29, 30, 46, 47]


def test_rests_double_and_end_with_the_first_useful_round():
    rest, drafted = Rest(patience=3, longest=4), []
    for turn in range(30):
        if not rest.resting():
            drafted.append(turn)
            rest.count()
    assert drafted[:7] == [0, 1, 2, 4, 7, 12, 17]
    rest.end()
    assert not any(rest.resting() for _ in range(3))


class Reading:
    """Costs a fixed time per drafted token, and less per token it has not read."""

    name, needs = "reading", frozenset()

    def __init__(self, clock: Clock, token: float, unread: float) -> None:
        self._clock, self._token, self._unread, self._read = clock, token, unread, {}

    def propose(self, contexts, depths):
        for one, depth in zip(contexts, depths, strict=True):
            new = max(0, len(one.tokens) - 1 - self._read.get(one.sequence_id, 0))
            self._clock.now += self._token * depth + self._unread * new
            self._read[one.sequence_id] = len(one.tokens) + depth - 1
        return [Draft((1,) * depth, drafter=self.name) for depth in depths]

    def observe(self, observations):
        """Nothing to learn."""

    def forget(self, sequence_id):
        self._read.pop(sequence_id, None)


def test_a_rehearsal_tells_the_price_of_a_token_and_of_reading():
    clock, costs = Clock(), DraftCosts(["reading"])
    drafter = Reading(clock, token=0.02, unread=0.001)
    for calls in rehearse(drafter, clock):
        costs.update({"reading": calls})
    assert costs.known("reading")
    assert costs.of("reading").of(4, 4, 0) == pytest.approx(0.08, rel=0.1)
    assert costs.of("reading").unread == pytest.approx(0.001, rel=0.1)
    assert not drafter._read


def test_a_rehearsal_in_company_tells_passes_from_tokens():
    """An accelerator's pass costs the same for one sequence and for four."""

    class Accelerator(Reading):
        def propose(self, contexts, depths):
            self._clock.now += 4e-3 * max(depths)
            return [Draft((1,) * depth, drafter=self.name) for depth in depths]

    clock, costs = Clock(), DraftCosts(["reading"])
    for calls in rehearse(Accelerator(clock, 0.0, 0.0), clock):
        costs.update({"reading": calls})
    assert costs.of("reading").of(1, 16, 0) < 2 * 4e-3


@pytest.mark.parametrize("lookup", [NgramDrafter, SuffixDrafter])
def test_lookups_are_rehearsed_and_forget_it(lookup):
    drafter = lookup()
    assert len(rehearse(drafter, Clock())) == 5
    assert not getattr(drafter, "_indices", None)
    assert not getattr(drafter, "_tracked", None)


def test_who_cannot_be_rehearsed_stays_unmeasured_and_unharmed(caplog):
    raising, dead = RaisingDrafter(SCRIPT), DeadDrafter(SCRIPT)
    assert rehearse(raising, Clock()) == rehearse(dead, Clock()) == []
    assert raising.raised == 5  # asked once, told to forget all of the company
    assert not dead.held
    assert not caplog.records


def test_a_lookup_takes_no_longer_for_a_deep_draft_and_a_model_does():
    costs = DraftCosts(["lookup", "model"])
    for depth in (1, 1, 3, 8, 2):
        costs.update({"lookup": Calls(depth, depth, 1e-5), "model": Calls(depth, depth, 1e-5 * depth)})
    assert costs.turn("lookup", 8) == pytest.approx(1e-5, rel=0.01)
    assert costs.turn("model", 8) == pytest.approx(8e-5, rel=0.01)


def test_a_guard_knows_what_its_drafter_has_not_read():
    guard = GuardedDrafter(OracleDrafter(SCRIPT), 50)
    first = context([1, 2, 3], 7)
    assert guard.unread(first) == 3
    guard.propose([first], [2])
    assert guard.unread(context([1, 2, 3, 4, 5, 6], 7)) == 1
    assert guard.drain().unread == 3
    guard.forget(7)
    assert guard.unread(first) == 3


def loop_of(drafter, seconds, clock, measured=True, **options):
    """One sequence on a machine where a row costs a tenth of a pass; `seconds` per drafted token."""
    cost = lambda sequences, rows: PLAIN * (0.9 + 0.1 * rows)  # noqa: E731
    config = SpeculativeConfig(num_speculative_tokens=8, vote="hedge", length="goodput", length_options=options or None)
    priced = Priced(drafter, clock, seconds)
    measure = (lambda rows: cost(1, rows)) if measured else None
    return Loop(assemble([priced], config, 50, measure=measure, clock=clock), cost=cost, clock=clock), priced


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("seconds", [0.02 * PLAIN, 0.1 * PLAIN, 0.7 * PLAIN])
@pytest.mark.parametrize("right", [0, 1, 2, 8])
def test_over_128_tokens_no_drafter_costs_more_than_three_percent(right, seconds, measured):
    clock = Clock()
    loop, _ = loop_of(HalfOracleDrafter(SCRIPT, right=right), seconds, clock, measured)
    started = clock.now
    while len(loop.tokens[0]) < 3 + 128:
        loop.step()
    gained = len(loop.tokens[0]) - 3
    assert (clock.now - started) <= 1.03 * gained * PLAIN


@pytest.mark.parametrize("seconds", [1.2 * PLAIN, 30 * PLAIN])
def test_who_could_not_pay_if_always_right_is_never_asked(seconds):
    clock = Clock()
    loop, priced = loop_of(OracleDrafter(SCRIPT), seconds, clock)
    rehearsed = priced.asked
    loop.run(300)
    assert priced.asked == rehearsed > 0
    assert loop.accepted == 0


def test_a_good_drafter_is_adopted_from_the_first_rounds():
    clock = Clock()
    loop, _ = loop_of(OracleDrafter(SCRIPT), 0.05 * PLAIN, clock)
    loop.run(10)
    assert loop.accepted > 40


def test_a_drafter_that_turns_bad_is_dropped_and_one_that_turns_good_is_found():
    clock = Clock()
    drafter = HalfOracleDrafter(SCRIPT, right=0)
    loop, _ = loop_of(drafter, 0.1 * PLAIN, clock, first_probe=4, last_probe=8)
    loop.run(300)
    assert loop.speed(100) > 0.98 / PLAIN
    drafter.right = 8
    loop.run(300)
    assert loop.speed(50) > 2 / PLAIN
    drafter.right = 0
    loop.run(60)
    assert loop.speed(100) > 0.97 / PLAIN


def test_nobody_is_asked_while_drafts_are_not_worth_verifying():
    clock = Clock()
    loop, priced = loop_of(JunkDrafter(SCRIPT), 0.0, clock)
    loop.run(100)
    before = priced.asked
    loop.run(100)
    assert priced.asked - before < 8 * 20  # whole rounds are left out
    assert loop.spec.report().num_draft_tokens < 20


def test_history_is_bounded_and_loses_nothing():
    history, rng = History(), np.random.default_rng(0)
    drafted = 0
    for step in range(1, 5001):
        drafted += (tokens := int(rng.integers(0, 9)))
        if history.add(1, tokens, tokens // 2, StepTiming(1e-4, 1e-3, 1e-5, 1, 1, pool=2)):
            history.note(step, {"a": step / 5000})
    moments = history.moments()
    assert CAPACITY // 2 <= len(moments) < CAPACITY
    complete = moments[-1].until
    assert sum(moment.steps for moment in moments) == complete > 4900
    assert sum(moment.drafted for moment in moments) <= drafted
    assert [m.until for m in moments] == sorted(m.until for m in moments)
    assert moments[-1].weights["a"] == complete / 5000
    assert moments[0].pool == 2 * moments[0].steps


def test_a_silent_round_hands_out_nothing():
    clock = Clock()
    loop, _ = loop_of(DeadDrafter(SCRIPT), 0.0, clock)
    assert loop.step() == [NO_DRAFT]
