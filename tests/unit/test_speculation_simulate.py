"""The simulator: its machines behave as told, nothing is lost, and the steps of the system gain where they should."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.bench.simulate import LLAMA2_70B, PUBLISHED, TASKS, Mode, Simulation, ablation, modes, specialists, table
from outrider.bench.simulated import GivenWorld, Machine, SimulatedTarget, Traffic
from outrider.bench.world import Clock, seconds
from outrider.types import Draft
from scripted import context

SMALL = Traffic(TASKS, requests=16, tokens=32)
NAMES = tuple(f"ssm-{number}" for number in range(4))


def test_cost_curves_are_piecewise_linear():
    curve = ((1, 1.0), (3, 2.0))
    assert [seconds(curve, size) for size in (0, 1, 2, 3, 5)] == [1.0, 1.0, 1.5, 2.0, 3.0]


@pytest.mark.parametrize("task", TASKS)
def test_drafters_have_the_skill_they_were_given(task):
    right = []
    drafter = GivenWorld(LLAMA2_70B, Traffic(TASKS)).drafter("ssm-1", Clock())
    for request in range(TASKS.index(task), 4 * 150, 4):
        for known in range(0, 20, 2):
            draft = drafter.propose([context([0] * known, request, 0)], [1])[0]
            right.append(draft.tokens[0] == SimulatedTarget.token(request, known))
    assert np.mean(right) == pytest.approx(LLAMA2_70B.skills[1][task], abs=0.04)


def test_drafters_agree_more_than_by_chance():
    """Half of the luck is common: a token that one knows is known by the other more often."""
    world = GivenWorld(LLAMA2_70B, Traffic(TASKS))
    first, second = (world.drafter(name, Clock()) for name in NAMES[2:])
    both = []
    for request in range(0, 1200, 4):  # a task that is neither's own
        guesses = [d.propose([context([0], request, 0)], [1])[0].tokens[0] for d in (first, second)]
        both.append([guess == SimulatedTarget.token(request, 1) for guess in guesses])
    both = np.array(both)
    assert both.all(axis=1).mean() > 1.15 * both[:, 0].mean() * both[:, 1].mean()


def test_a_drafted_token_costs_what_the_machine_says():
    clock = Clock()
    drafter = GivenWorld(LLAMA2_70B, SMALL).drafter("ssm-0", clock)
    drafter.propose([context([0], i) for i in range(2)], [3, 1])
    assert clock.now == pytest.approx(seconds(LLAMA2_70B.draft, 2) + 2 * seconds(LLAMA2_70B.draft, 1))


def test_the_target_verifies_and_ends_at_the_length():
    target = SimulatedTarget(Traffic(TASKS, tokens=5))
    truth = [target.token(7, i) for i in range(5)]
    verdict = target.judge(7, 1, Draft((truth[1], truth[2], 0)))
    assert verdict.tokens == tuple(truth[1:4])
    assert verdict.accepted == (0, 1)
    assert target.judge(7, 3, Draft((truth[3], truth[4], 0))).finish is not None


@pytest.mark.parametrize("mode", modes(NAMES), ids=lambda mode: f"{mode.step}-{mode.rules}")
def test_every_request_ends_with_its_own_tokens(mode):
    simulation = Simulation(GivenWorld(LLAMA2_70B, SMALL), mode, batch=4, in_flight=8).run()
    for request, tokens in simulation._tokens.items():
        assert tokens == [SimulatedTarget.token(request, i) for i in range(SMALL.tokens)]
    assert not getattr(simulation._speculator, "_open", None)


def test_plain_speed_is_what_the_costs_say():
    row = Simulation(GivenWorld(LLAMA2_70B, SMALL), Mode("plain", "none"), batch=8, in_flight=8).run().row(None, None)
    assert row.tokens_per_second == pytest.approx(8 / (seconds(LLAMA2_70B.verify, 8) + LLAMA2_70B.overhead_s))


MIXED = GivenWorld(LLAMA2_70B, Traffic(TASKS, requests=48, tokens=96))


@pytest.fixture(scope="module")
def rows():
    return {(row.step, row.rules): row for row in ablation(MIXED, batch=8)}


def test_the_vote_gains_and_hedge_gains_more(rows):
    one, majority, hedge = rows["+ one drafter", "none"], rows["+ vote", "published"], rows["+ vote", "ours"]
    assert majority.tokens_per_second > 1.1 * one.tokens_per_second
    assert hedge.acceptance_length > 1.05 * majority.acceptance_length


def test_the_pipeline_hides_drafting(rows):
    for rules in ("published", "ours"):
        before, after = rows["+ length", rules], rows["+ pipeline", rules]
        assert before.exposed_ms == pytest.approx(before.draft_ms)
        assert after.exposed_ms < 0.2 * after.draft_ms
        assert after.tokens_per_second > 1.25 * before.tokens_per_second


def test_the_whole_chain_gains_well_over_one_drafter(rows):
    assert rows["+ pipeline", "published"].total > 1.5
    assert rows["+ pipeline", "ours"].total > 1.1 * rows["+ pipeline", "published"].total


@pytest.mark.parametrize(("tokens", "pipeline"), [(2, False), (8, False), (2, True), (10, True)])
def test_goodput_finds_a_length_that_beats_bad_fixed_ones(rows, tokens, pipeline):
    fixed = Mode("fixed", "ours", NAMES, "hedge", "fixed", tokens, pipeline)
    row = Simulation(MIXED, fixed, batch=8, in_flight=16).run().row(None, None)
    assert rows["+ pipeline" if pipeline else "+ length", "ours"].tokens_per_second > row.tokens_per_second


def test_the_pipeline_costs_nothing_at_one_request():
    world = GivenWorld(LLAMA2_70B, Traffic(("chat",), requests=1, tokens=200))
    speeds = [
        Simulation(world, Mode("x", "ours", NAMES[:1], length="goodput", pipeline=pipeline), 1, 1)
        .run()
        .row(None, None)
        .tokens_per_second
        for pipeline in (False, True)
    ]
    assert speeds[1] == pytest.approx(speeds[0], rel=0.01)


def test_speculation_gets_out_of_the_way_on_a_machine_where_rows_are_dear():
    dear = Machine("dear", ((1, 0.01), (2, 0.02)), ((1, 0.004),), specialists(0.4, 0.4))
    speeds = {}
    for mode in (Mode("plain", "none"), Mode("on", "ours", NAMES, "hedge", "goodput", 8)):
        simulation = Simulation(GivenWorld(dear, Traffic(TASKS, requests=8, tokens=400)), mode, batch=4, in_flight=8)
        speeds[mode.step] = simulation.run().row(None, None).tokens_per_second
    assert speeds["on"] >= 0.97 * speeds["plain"]


def test_the_table_shows_the_papers_figures(rows):
    text = table(list(rows.values()))
    assert text.count("\n") == len(rows) + 1
    assert "+59.8 % +9.6 %" in text
    assert set(PUBLISHED) == {"+ vote", "+ length", "+ pipeline"}
