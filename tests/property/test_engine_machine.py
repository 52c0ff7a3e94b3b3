"""Random lives of an engine: requests come, run, are aborted and preempted in any order; memory stays whole.

Once with everything read, once with selections: there an answer cannot be recomputed, so a preempted sequence takes its
own along, and only prompts are shared. (The scripted target reads everything all the same, so the answers are known.)

After every rule free + held + cached = all pages, no page is owned twice, and every answer is the plain one so far.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness import Harness
from outrider.config import ContextConfig
from outrider.drafters.base import Context
from outrider.types import Draft, SamplingParams
from scripted import ScriptedCache, plain, whole_prefix
from scripted_drafters import ScriptedDrafter

SCRIPT = whole_prefix(vocab_size=5)


class WildDrafter(ScriptedDrafter):
    """Drafts of every shape: right and wrong, chains and trees, now and then nothing."""

    def guess(self, context: Context, depth: int) -> Draft:
        kind = (len(context.tokens) + context.sequence_id) % 4
        right = plain(SCRIPT, context.tokens, depth)
        if kind == 0:
            return Draft()
        if kind == 1:
            return Draft(tuple(right))
        if kind == 2:
            return Draft((*right[: depth // 2], *((t + 1) % 5 for t in right[depth // 2 :])))
        tokens = [token for t in right[: depth // 2] for token in ((t + 1) % 5, t)]
        parents = [p for i in range(depth // 2) for p in (2 * i - 1, 2 * i - 1)]
        return Draft(tuple(tokens), tuple(parents))


HAPPENED = Counter[str]()


class EngineMachine(RuleBasedStateMachine):
    context = ContextConfig()

    def __init__(self) -> None:
        super().__init__()
        self.drafter = WildDrafter(SCRIPT, vocab_size=5)
        self.harness = Harness(
            SCRIPT,
            self.drafter,
            depth=5,
            pages=12,
            page_size=3,
            vocab_size=5,
            max_num_seqs=4,
            max_num_batched_tokens=9,
            context=self.context,
        )
        self.harness.memory.cache.put = self._put  # type: ignore[method-assign]
        self.prompts: dict[str, list[int]] = {}

    def _put(self, slots: np.ndarray, rows: Any) -> None:
        HAPPENED["taken along"] += len(slots)
        ScriptedCache.put(self.harness.memory.cache, slots, rows)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), length=st.integers(1, 12), n=st.integers(1, 3))
    def submit(self, prompt: list[int], length: int, n: int) -> None:
        request = self.harness.submit(prompt, SamplingParams(temperature=0, max_tokens=length, n=n))
        self.prompts[request] = prompt

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.prompts)))
        self.harness.abort(request)
        HAPPENED["aborted"] += 1

    @invariant()
    def memory_is_whole(self) -> None:
        self.harness.memory.check()

    @invariant()
    def every_answer_is_a_beginning_of_the_plain_one(self) -> None:
        for request, prompt in self.prompts.items():
            for index in range(3):
                told = self.harness.tokens(request, index)
                assert told == plain(SCRIPT, prompt, len(told))

    def teardown(self) -> None:
        self.harness.drain()
        assert not self.drafter.held
        assert self.harness.memory.pool.held == 0
        assert not self.harness.memory._kept
        HAPPENED["preempted"] += self.harness.engine.scheduler.preemptions
        HAPPENED["accepted"] += self.harness.accepted
        HAPPENED["rejected"] += self.harness.drafted - self.harness.accepted
        HAPPENED["shared"] += self.harness.memory.prefix_hits
        for request in self.prompts:
            endings = [d.index for d in self.harness.deltas if d.request_id == request and d.finish]
            assert len(endings) == len(set(endings)) > 0


class SelectingMachine(EngineMachine):
    context = ContextConfig(mode="sparse", selector="window", budget=6, sinks=1, window=2)


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = SETTINGS
TestSelectingMachine = SelectingMachine.TestCase
TestSelectingMachine.settings = SETTINGS


def test_the_lives_were_eventful() -> None:
    """Runs after the machines (same file): one that preempts, accepts or shares nothing would prove nothing."""
    assert all(
        HAPPENED[event] > 0 for event in ("preempted", "accepted", "rejected", "shared", "aborted", "taken along")
    )
