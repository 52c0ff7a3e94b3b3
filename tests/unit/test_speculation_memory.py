"""Memory stays flat: a long answer, and many requests with speculation switched on and off."""

from __future__ import annotations

import gc
import os

from greedy_loop import Loop, Priced, speculator
from harness import Harness
from outrider.bench.world import Clock
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter, SuffixOptions
from outrider.speculation.history import CAPACITY
from outrider.speculation.speculator import Speculator
from outrider.types import SamplingParams
from scripted import walk
from scripted_drafters import HalfOracleDrafter

SCRIPT = walk(50, memory=2)


class Forgetful(HalfOracleDrafter):
    """A scripted drafter that does not keep what it is told."""

    def observe(self, observations: object) -> None:
        """Nothing is kept."""


def objects() -> int:
    """Containers that are alive."""
    gc.collect()
    return len(gc.get_objects())


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def everybody(clock: Clock | None = None) -> Speculator:
    """Lookups and a model together, by our own rules. The suffix memory is small enough to be full soon."""
    suffix = SuffixDrafter(SuffixOptions(sequence_tokens=512, shared_tokens=256))
    model = Forgetful(SCRIPT, right=3, name="model")
    costly = Priced(model, clock, 1e-5) if clock else model
    return speculator(
        NgramDrafter(), suffix, costly, clock=clock or Clock(), vote="hedge", length="goodput", num_speculative_tokens=8
    )


def per_sequence_state(spec: Speculator) -> int:
    """Entries of all tables that are kept by sequence."""
    guarded = spec._drafters
    drafters = [g._drafter.drafter if isinstance(g._drafter, Priced) else g._drafter for g in guarded]
    tables = [spec._open, spec._vote._requests, spec._vote._shares, spec._estimates._skills]
    tables += [spec._length._costly.lives._gained, *(g._shown for g in guarded)]
    tables += [drafters[0]._indices, drafters[1]._tracked, getattr(drafters[2], "held", ())]
    return sum(map(len, tables))


def test_five_thousand_tokens_cost_no_more_than_their_index() -> None:
    clock = Clock()
    loop = Loop(everybody(clock), scripts=(SCRIPT,), clock=clock)
    counts = []
    for until in (100, 2500, 5000):
        while len(loop.tokens[0]) < until:
            loop.step()
        loop.drafts.clear()
        counts.append((objects(), resident()))
    report = loop.spec.report()
    assert report.num_draft_tokens > report.num_accepted_tokens > 1000
    assert len(report.history) <= CAPACITY
    assert counts[2][0] - counts[1][0] < 1500  # what grows with the text is a table, not objects
    assert counts[2][1] - counts[1][1] < 4 << 20
    loop.spec.forget(0)
    assert per_sequence_state(loop.spec) == 0
    assert objects() - counts[0][0] < 4000  # the shared memory of past answers is what stays


def test_a_thousand_requests_on_and_off_leave_nothing_behind() -> None:
    harness = Harness(SCRIPT, speculator=everybody(), pages=64, max_num_seqs=4)
    drafted = {True: 0, False: 0}

    def answer(count: int) -> tuple[int, int]:
        for group in range(count // 4):
            wants = {}
            for turn in range(4):
                params = SamplingParams(temperature=0.0, max_tokens=8, extra_args={"speculative": turn % 2 == 0})
                wants[harness.submit([group % 7 + turn, 2, 3], params)] = turn % 2 == 0
            harness.drain()
            for delta in harness.deltas:
                drafted[wants[delta.request_id]] += delta.drafted
            harness.deltas.clear()
        return objects(), resident()

    answer(100)
    early, late = answer(200), answer(700)
    assert drafted[True] > 50  # how often it pays is for the clock of the moment to say
    assert drafted[False] == 0
    assert per_sequence_state(harness.speculator) == 0
    assert harness.memory.pool.held == 0
    assert late[0] - early[0] < 1500
    assert late[1] - early[1] < 4 << 20
