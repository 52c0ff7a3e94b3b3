"""What engines of this kind got wrong about adaptive speculation, as small cases on a simulated clock.

Costs are those of a small machine: a pass of one row takes 10 ms and every further row 10 % more.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest

from greedy_loop import Clock, Loop, Priced, speculator
from outrider.drafters.ngram import NgramDrafter
from outrider.types import Draft
from scripted import cycle, walk
from scripted_drafters import DeadDrafter, HalfOracleDrafter, JunkDrafter, OracleDrafter, ScriptedDrafter

SCRIPT = walk(50)


def cost(sequences, rows):
    return 0.010 * (0.9 + 0.1 * rows)


def adaptive(*drafters, **config):
    config = {"clock": Clock(), **config}  # lookups take no time, whatever else this machine does
    return speculator(*drafters, length="goodput", num_speculative_tokens=8, **config)


def plain_speed(count=1):
    return Loop(speculator(DeadDrafter(SCRIPT)), count, cost=cost).speed(50)


class FadingDrafter(ScriptedDrafter):
    """Right before `start` tokens and after `stop`, wrong in between: a head far outside its training length."""

    start, stop = 600, 1500

    def guess(self, context, depth):
        kind = JunkDrafter if self.start <= len(context.tokens) < self.stop else OracleDrafter
        return kind(self.script, name=self.name).guess(context, depth)


def test_length_falls_to_zero_where_a_drafter_goes_blind_and_comes_back_after():
    clock = Clock()
    drafter = Priced(FadingDrafter(SCRIPT, name="head"), clock, 0.0005)
    loop = Loop(adaptive(drafter, clock=clock), cost=cost, clock=clock)
    while len(loop.tokens[0]) < 550:
        loop.step()
    assert np.mean([len(draft) for draft in loop.drafts[-20:]]) > 6
    while len(loop.tokens[0]) < 700:
        loop.step()
    blind = loop.speed(500)
    assert sum(map(len, loop.drafts[-400:])) < 30
    assert blind >= 0.97 * plain_speed()
    while len(loop.tokens[0]) < 1800:
        loop.step()
    assert np.mean([len(draft) for draft in loop.drafts[-20:]]) > 6


@pytest.mark.parametrize("count", [1, 2, 8, 16])
@pytest.mark.parametrize("kind", [DeadDrafter, JunkDrafter])
def test_useless_drafters_cost_next_to_nothing_at_any_batch_size(count, kind):
    clock = Clock()
    loop = Loop(adaptive(Priced(kind(SCRIPT), clock, 0.002), clock=clock), count, cost=cost, clock=clock)
    loop.run(100)
    assert loop.speed(500) >= 0.97 * plain_speed(count)


@pytest.mark.parametrize("count", [1, 8, 16])
def test_a_growing_batch_never_collapses_below_plain(count):
    """Half right drafts pay for one sequence; where rows are dear they are given up, not kept on principle."""

    def dear(sequences, rows):
        return 0.010 if rows <= 8 else 0.010 * rows / 8

    clock = Clock()
    loop = Loop(adaptive(HalfOracleDrafter(SCRIPT, right=1), clock=clock), count, cost=dear, clock=clock)
    loop.run(100)
    plain = Loop(speculator(DeadDrafter(SCRIPT)), count, cost=dear).speed(50)
    assert loop.speed(300) >= 0.998 * plain
    if count == 1:
        assert loop.speed(100) > 1.9 * plain


def test_goodput_beats_every_fixed_length_on_changing_traffic():
    """Stretches where the drafter is right for long alternate with stretches where it never is."""

    class Moody(ScriptedDrafter):
        def guess(self, context, depth):
            kind = OracleDrafter if len(context.tokens) // 400 % 2 else JunkDrafter
            return kind(self.script, name=self.name).guess(context, depth)

    def speed(**config):
        clock = Clock()
        spec = speculator(Priced(Moody(SCRIPT), clock, 0.0005), clock=clock, **config)
        return Loop(spec, cost=cost, clock=clock).speed(1200)

    adaptive = speed(length="goodput", num_speculative_tokens=8)
    assert all(adaptive > speed(length="fixed", num_speculative_tokens=length) for length in (1, 2, 4, 8))


def test_a_dead_drafter_is_told_about_and_shows_in_the_metrics(caplog):
    loop = Loop(adaptive(DeadDrafter(SCRIPT))).run(150)
    assert loop.spec.report().acceptance_length == 1.0
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_zero_drafts_are_counted_for_a_request_that_is_switched_off():
    drafter = OracleDrafter(SCRIPT)
    loop = Loop(adaptive(drafter), 3)
    for step in range(20):
        drafts = loop.step(limits=[8, 0, 8])
        assert len(drafts[1]) == 0
        assert step < 3 or len(drafts[0]) > 0 < len(drafts[2])  # its price is not known before
    assert 1 not in drafter.held
    assert len(loop.tokens[1]) == 23


def test_each_request_gets_the_better_source():
    """An editing prompt (lookup is right) and a chat prompt (the model is right) in one batch."""
    edit, chat = cycle([4, 8, 15, 16, 23, 42, 7, 9]), walk(50)
    model = HalfOracleDrafter(chat, right=3, name="model")
    loop = Loop(adaptive(NgramDrafter(), model, vote="hedge"), 2, [edit, chat])
    loop.run(60)
    sources = [[draft.drafter for draft in loop.drafts[-40:][i::2]] for i in (0, 1)]
    assert sources[0].count("ngram") >= 18
    assert sources[1].count("model") >= 18
    report = {drafter.name: drafter for drafter in loop.spec.report().drafters}
    assert report["ngram"].accepted_tokens > 200
    assert report["model"].accepted_tokens > 100


def test_hedge_beats_majority_on_mixed_traffic():
    """Four requests, each with its own expert: one global weight cannot be right for all of them."""
    scripts = [walk(50, seed) for seed in range(4)]

    class Expert(ScriptedDrafter):
        """Right on one request, confidently wrong on the others."""

        def guess(self, context, depth):
            kind = OracleDrafter if context.sequence_id == self.home else JunkDrafter
            return Draft(kind(scripts[context.sequence_id]).guess(context, depth).tokens, drafter=self.name)

    def length(vote):
        experts = [Expert(SCRIPT, name=f"expert-{home}") for home in range(4)]
        for home, expert in enumerate(experts):
            expert.home = home
        return Loop(speculator(*experts, vote=vote), 4, scripts).run(200).spec.report().acceptance_length

    assert length("hedge") > 1.05 * length("majority")
    assert length("hedge") > 4.5


def test_a_costly_drafter_rests_where_a_free_one_is_enough():
    clock = Clock()
    script = cycle([4, 8, 15, 16, 23, 42, 7, 9])
    model = Priced(OracleDrafter(script, name="model"), clock, 0.003)
    loop = Loop(adaptive(NgramDrafter(), model, vote="hedge", clock=clock), 1, [script], cost, clock)
    loop.run(60)
    asked = model.asked
    loop.run(100)
    assert model.asked - asked < 40
    assert np.mean([len(draft) for draft in loop.drafts[-50:]]) > 6


def test_times_are_reported_by_phase():
    clock = Clock()
    drafter = Priced(OracleDrafter(SCRIPT), clock, 0.001)
    report = Loop(speculator(drafter, clock=clock), cost=cost, clock=clock).run(10).spec.report()
    assert report.draft_s == pytest.approx(10 * 4 * 0.001)
    assert report.verify_s == pytest.approx(10 * cost(1, 5))
    assert report.drafters[0].time_s == pytest.approx(report.draft_s)
