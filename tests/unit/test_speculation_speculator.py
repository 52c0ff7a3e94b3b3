"""The speculator: bad drafters are contained, limits hold, per-request switches work, reports tell the truth."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

from greedy_loop import Loop, speculator
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.speculation.build import build_speculator
from outrider.speculation.none import NoSpeculator
from outrider.speculation.timing import StepTiming
from outrider.types import Draft, Verdict
from scripted import context, observation, walk
from scripted_drafters import (
    DeadDrafter,
    ForeignDrafter,
    HalfOracleDrafter,
    JunkDrafter,
    OracleDrafter,
    RaisingDrafter,
    SlowDrafter,
    TooLongDrafter,
    TreeDrafter,
)

SCRIPT = walk(50)


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_fixed_length_with_an_oracle_accepts_everything():
    loop = Loop(speculator(OracleDrafter(SCRIPT)), count=3).run(10)
    report = loop.spec.report()
    assert report.num_drafts == 30
    assert report.num_draft_tokens == report.num_accepted_tokens == 120
    assert report.drafters[0].per_position == (30, 30, 30, 30)
    assert report.acceptance_length == 5.0
    assert report.lengths == {4: 30}
    assert report.steps == 10
    assert report.verify_s == pytest.approx(0.01)


def test_half_oracle_is_accepted_and_rejected():
    report = Loop(speculator(HalfOracleDrafter(SCRIPT, right=2))).run(10).spec.report()
    assert (report.num_draft_tokens, report.num_accepted_tokens) == (40, 20)
    assert report.drafters[0].per_position == (10, 10)


def test_limits_hold_per_request_and_zero_means_not_asked():
    drafter = OracleDrafter(SCRIPT)
    loop = Loop(speculator(drafter), count=3)
    drafts = loop.step(limits=[0, 1, 9])
    assert list(map(len, drafts)) == [0, 1, 4]
    assert drafter.held == {1, 2}
    for _ in range(5):
        loop.step(limits=[0, 1, 9])
    assert len(loop.tokens[0]) == 3 + 6


def test_first_drafter_with_an_idea_wins_without_a_vote():
    dead, oracle, never = DeadDrafter(SCRIPT), OracleDrafter(SCRIPT), JunkDrafter(SCRIPT)
    loop = Loop(speculator(dead, oracle, never)).run(5)
    assert loop.accepted == 20
    assert never.proposed == 0
    assert {draft.drafter for draft in loop.drafts} == {"oracle"}


def test_a_single_drafter_keeps_its_tree():
    draft = Loop(speculator(TreeDrafter(SCRIPT), num_speculative_tokens=6)).step()[0]
    assert draft.parents is not None
    assert Loop(speculator(TreeDrafter(SCRIPT), num_speculative_tokens=6)).run(4).accepted == 12


def test_a_tree_is_cut_to_the_limit():
    loop = Loop(speculator(TreeDrafter(SCRIPT), num_speculative_tokens=6))
    draft = loop.step(limit=3)[0]
    assert len(draft) <= 3


@pytest.mark.parametrize("where", [("propose",), ("observe",), ("forget",), ("propose", "observe", "forget")])
def test_a_raising_drafter_is_contained_told_once_and_switched_off(caplog, where):
    bad, good = RaisingDrafter(SCRIPT, where=where), OracleDrafter(SCRIPT)
    loop = Loop(speculator(bad, good)).run(30)
    for sequence_id in range(30):
        loop.spec.forget(sequence_id)
    assert loop.accepted > 0
    assert bad.raised >= 1
    assert sum("failed in" in text for text in warnings(caplog)) == 1
    assert sum("switched off" in text for text in warnings(caplog)) == 1
    assert loop.spec.report().drafters[0].off
    assert good.held == set()


def test_occasional_failures_do_not_switch_a_drafter_off():
    drafter = OracleDrafter(SCRIPT)
    loop, original = Loop(speculator(drafter)), drafter.propose
    for step in range(40):
        drafter.propose = (lambda *_: 1 / 0) if step % 3 == 0 else original
        loop.step()
    assert loop.spec.report().drafters[0].off is None
    assert loop.spec.report().drafters[0].failures == 14
    assert loop.accepted == 26 * 4


@pytest.mark.parametrize(
    "bad", [ForeignDrafter(SCRIPT), TooLongDrafter(SCRIPT), TooLongDrafter(SCRIPT, extra_drafts=1)]
)
def test_invalid_drafts_never_reach_the_target(caplog, bad):
    loop = Loop(speculator(bad)).run(10)
    assert all(len(draft) <= 4 and all(token < 50 for token in draft.tokens) for draft in loop.drafts)
    assert loop.spec.report().drafters[0].off
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize(
    "draft",
    [
        Draft((1, 2), parents=(1, -1)),
        Draft((1, 2), parents=(-1,)),
        Draft((1, -2)),
        Draft((1, 2), confidence=(0.5,)),
        Draft((1, 2), confidence=(0.5, float("nan"))),
        Draft((1, 2), confidence=(0.5, 1.5)),
        Draft((1, 2), probs=np.ones((1, 50)) / 50),
    ],
)
def test_a_malformed_draft_is_refused(draft):
    drafter = OracleDrafter(SCRIPT)
    drafter.guess = lambda context, depth: draft
    loop = Loop(speculator(drafter)).run(6)
    assert not any(loop.drafts)
    assert loop.spec.report().drafters[0].off


def test_a_slow_drafter_is_switched_off(caplog):
    loop = Loop(speculator(SlowDrafter(SCRIPT, seconds=0.006)), cost=lambda *_: 1e-4).run(12)
    assert "verification" in loop.spec.report().drafters[0].off
    assert not loop.drafts[-1].tokens
    assert loop.accepted > 0


def test_a_drafter_that_helps_nobody_is_told_about_once(caplog):
    for drafter in (DeadDrafter(SCRIPT), JunkDrafter(SCRIPT)):
        caplog.clear()
        loop = Loop(speculator(drafter)).run(300)
        assert len(warnings(caplog)) == 1
        assert "does not speed anything up" in warnings(caplog)[0]
        assert loop.spec.report().acceptance_length == 1.0


def test_forget_leaves_nothing():
    drafter = OracleDrafter(SCRIPT)
    spec = speculator(drafter)
    spec.draft([context([1, 2], i) for i in range(4)], [4] * 4)
    for i in range(4):
        spec.forget(i)
    assert drafter.held == set()
    assert not spec._open


def test_a_draft_that_was_dropped_is_not_counted():
    spec = speculator(OracleDrafter(SCRIPT))
    spec.draft([context([1, 2, 3])], [4])
    spec.observe([observation(0, 3, Verdict(tokens=(5,)), [1, 2, 3, 5])], StepTiming(0, 1e-3, 0, 1, 1))
    assert spec.report().num_draft_tokens == 0


def test_prompt_chunks_are_observations_without_a_round():
    drafter = OracleDrafter(SCRIPT)
    spec = speculator(drafter)
    spec.observe([observation(0, 1, Verdict(), [1, 2, 3])], StepTiming(0, 1e-3, 0, 1, 3))
    assert len(drafter.observed) == 1
    assert spec.report().drafters[0].rounds == 0


def test_needs_are_the_union():
    spec = speculator(OracleDrafter(SCRIPT, needs=frozenset({"features"})), JunkDrafter(SCRIPT))
    assert spec.needs == {"features"}


def test_control_costs_tens_of_microseconds_per_sequence():
    """A loose bound: the measured figure is in docs/speculation.md."""
    spec = speculator(OracleDrafter(lambda prefix: 1), JunkDrafter(lambda prefix: 1), vote="majority")
    loop = Loop(spec, count=16, scripts=[lambda prefix: 1])
    loop.step()
    start = time.perf_counter()
    for _ in range(20):
        loop.step()
    assert time.perf_counter() - start < 20
    assert spec.report().control_s / (20 * 16) < 400e-6


def test_none_is_plain_decoding():
    for spec in (build_speculator(None, vocab_size=50), build_speculator(SpeculativeConfig([]), vocab_size=50)):
        assert isinstance(spec, NoSpeculator)
        assert not any(Loop(spec).run(5).drafts)
        assert spec.report().steps == 5
        spec.forget(0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"drafters": ["ngrm"]}, "did you mean 'ngram'"),
        ({"drafters": [{"name": "ngram", "max_m": 3}]}, "did you mean 'max_n'"),
        ({"drafters": [{"max_n": 3}]}, "name"),
        ({"drafters": [7]}, "refused"),
        ({"num_speculative_tokens": 0}, "1 to 63"),
        ({"num_speculative_tokens": [5, 2]}, "low at most high"),
        ({"num_speculative_tokens": [1, 2]}, "one number"),
        ({"vote": "majority", "vote_options": {"rewrd": 2}}, "did you mean 'reward'"),
        ({"vote": "majority", "vote_options": {"reward": 0.5}}, "reward >= 1"),
        ({"vote_options": {"reward": 2.0}}, "unknown option 'reward'"),
        ({"vote_options": 3}, "expected a table"),
        ({"length": "trend", "length_options": {"window": 0}}, "window"),
    ],
)
def test_wrong_options_are_refused_by_name(config, words):
    with pytest.raises(ConfigError, match=words):
        build_speculator(SpeculativeConfig(**config), vocab_size=50)


def test_names_are_distinct():
    spec = build_speculator(SpeculativeConfig(["ngram", {"name": "ngram", "min_n": 1}]), vocab_size=50)
    assert [drafter.name for drafter in spec.report().drafters] == ["ngram", "ngram-2"]
