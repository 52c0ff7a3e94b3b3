"""The pipelined loop gives the tokens of the plain one under random delays, overlaps, and leaks nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from harness import GREEDY, Harness
from outrider.drafters.base import Context, Observation
from outrider.speculation.pools import LittleFlow, Place, PublishedFlow
from outrider.types import Draft
from scripted import plain, whole_prefix
from scripted_drafters import HalfOracleDrafter, JunkDrafter, OracleDrafter, ScriptedDrafter, TreeDrafter

SCRIPT = whole_prefix()
PROMPTS = [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [4, 4], [5, 6]]
EXPECTED = [plain(SCRIPT, prompt, 24) for prompt in PROMPTS]


@dataclass
class Delayed(ScriptedDrafter):
    """Another drafter that takes a random while, on one thread at a time."""

    inner: ScriptedDrafter = field(default_factory=lambda: HalfOracleDrafter(SCRIPT))
    random: random.Random = field(default_factory=lambda: random.Random(0))
    threads: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)  # threads that brought news
    busy: threading.Lock = field(default_factory=threading.Lock)

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        with self.alone():
            time.sleep(self.random.random() * 0.004)
            self.threads.add(threading.current_thread().name)
            self.held |= {c.sequence_id for c in contexts}
            return self.inner.propose(contexts, depths)

    def observe(self, observations: Sequence[Observation]) -> None:
        with self.alone():
            self.told.add(threading.current_thread().name)
            super().observe(observations)

    def forget(self, sequence_id: int) -> None:
        with self.alone():
            super().forget(sequence_id)

    def alone(self) -> threading.Lock:
        assert not self.busy.locked(), "the speculator is used by two threads at once"
        return self.busy


@pytest.mark.parametrize("flow", [PublishedFlow, LittleFlow])
@pytest.mark.parametrize("kind", [OracleDrafter, HalfOracleDrafter, JunkDrafter, TreeDrafter])
def test_the_tokens_are_those_of_the_plain_loop(kind, flow) -> None:
    for seed in range(3):
        drafter = Delayed(SCRIPT, inner=kind(SCRIPT), random=random.Random(seed))
        harness = Harness(SCRIPT, drafter, flow=flow())
        assert harness.run(PROMPTS) == EXPECTED
        assert harness.engine.overlapped > 0
        assert any(name.startswith("outrider-drafts") for name in drafter.threads)
        assert harness.drafted > 0
        assert not drafter.held
        harness.engine.close()


def test_preemption_and_small_steps_change_nothing() -> None:
    for seed in range(3):
        drafter = Delayed(SCRIPT, random=random.Random(seed))
        harness = Harness(SCRIPT, drafter, flow=PublishedFlow(), pages=16, max_num_batched_tokens=7, max_num_seqs=4)
        assert harness.run(PROMPTS) == EXPECTED
        assert harness.engine.scheduler.preemptions > 0
        assert not drafter.held
        harness.engine.close()


def test_aborts_with_drafts_in_flight_leak_nothing() -> None:
    for steps in range(0, 20, 2):
        drafter = Delayed(SCRIPT)
        harness = Harness(SCRIPT, drafter, flow=PublishedFlow())
        ids = [harness.submit(prompt) for prompt in PROMPTS]
        for _ in range(steps):
            harness.step()
        for request in ids[::2]:
            harness.abort(request)
        harness.drain()
        assert [harness.tokens(i) for i in ids[1::2]] == EXPECTED[1::2]
        assert all(len(harness.finishes(i)) == 1 for i in ids)
        assert not drafter.held
        assert len(harness.engine.pools) == 0
        harness.engine.close()


def test_one_request_is_served_without_the_other_thread() -> None:
    drafter = Delayed(SCRIPT)
    harness = Harness(SCRIPT, drafter, flow=PublishedFlow())
    assert harness.run(PROMPTS[:1]) == EXPECTED[:1]
    assert harness.engine.overlapped == 0
    assert drafter.threads == drafter.told == {"MainThread"}
    harness.engine.close()


def test_flow_control_bounds_the_pool() -> None:
    harness = Harness(SCRIPT, Delayed(SCRIPT), flow=PublishedFlow(), max_num_seqs=6)
    for prompt in PROMPTS:
        harness.submit(prompt)
    engine, unverified = harness.engine, []
    while engine.scheduler.busy:
        harness.step()
        unverified.append(sum(engine.pools.place(i) in (Place.DRAFTING, Place.DRAFTED) for i in engine._sequences))
    assert 0 < max(unverified) <= 3  # half of the six: one batch of drafts is under way, or waits
    harness.engine.close()


def test_a_drafting_thread_that_fails_costs_speed_only() -> None:
    class Failing(Delayed):
        def propose(self, contexts, depths):
            raise RuntimeError("scripted failure")

    harness = Harness(SCRIPT, Failing(SCRIPT), flow=PublishedFlow())
    ids = [harness.submit(prompt, GREEDY) for prompt in PROMPTS[:4]]
    while len(harness.engine.scheduler.running) != 1 and harness.engine.scheduler.busy:
        harness.step()
    assert [harness.tokens(i)[:8] for i in ids] == [e[:8] for e in EXPECTED[:4]]
    harness.engine.close()
