"""A greedy loop around a speculator, without engine or memory, on a simulated clock.

Every sequence decodes against a script; verification costs what `cost(sequences, rows)` says, and drafters may advance
the clock by what they cost. Speeds are therefore exact and the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.bench.world import Clock
from outrider.config import SpeculativeConfig
from outrider.drafters.base import Context, Drafter, Observation
from outrider.speculation.build import assemble
from outrider.speculation.speculator import Speculator
from outrider.speculation.timing import StepTiming
from outrider.types import Draft
from scripted import Script, context, judge_greedy, observation, plain, walk


class Priced:
    """A drafter whose tokens cost simulated seconds."""

    def __init__(self, drafter: Drafter, clock: Clock, seconds: float) -> None:
        self.name, self.needs = drafter.name, drafter.needs
        self.drafter, self.clock, self.seconds = drafter, clock, seconds
        self.asked = 0

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        self.asked += sum(depths)
        self.clock.now += self.seconds * sum(depths)
        return self.drafter.propose(contexts, depths)

    def observe(self, observations: Sequence[Observation]) -> None:
        self.drafter.observe(observations)

    def forget(self, sequence_id: int) -> None:
        self.drafter.forget(sequence_id)


def speculator(*drafters: Drafter, clock: Clock | None = None, **config: object) -> Speculator:
    """A speculator of scripted drafters over a vocabulary of 50, on a simulated clock if one is given."""
    options = {"clock": clock} if clock else {}
    return assemble(drafters, SpeculativeConfig(**config), vocab_size=50, **options)


class Loop:
    """Decodes `count` sequences greedily and checks that they are what plain decoding gives."""

    def __init__(
        self,
        spec: Speculator,
        count: int = 1,
        scripts: Sequence[Script] = (walk(50),),
        cost: Callable[[int, int], float] = lambda sequences, rows: 1e-3,
        clock: Clock | None = None,
    ) -> None:
        self.spec, self.cost, self.clock = spec, cost, clock or Clock()
        self.scripts = {i: scripts[i % len(scripts)] for i in range(count)}
        self.tokens = {i: [i + 1, 2, 3] for i in range(count)}
        self.drafts: list[Draft] = []
        self.accepted = 0

    def step(self, limit: int = 8, limits: Sequence[int] | None = None) -> list[Draft]:
        """One step of the loop; the drafts it verified."""
        ids, started = list(self.tokens), self.clock.now
        contexts = [context(self.tokens[i], i, 3) for i in ids]
        drafts = self.spec.draft(contexts, limits or [limit] * len(ids))
        drafted = self.clock.now
        seen = [self._verify(i, draft) for i, draft in zip(ids, drafts, strict=True)]
        rows = len(ids) + sum(map(len, drafts))
        self.clock.now += self.cost(len(ids), rows)
        self.spec.observe(seen, StepTiming(drafted - started, self.clock.now - drafted, 0.0, len(ids), rows))
        self.drafts += drafts
        return drafts

    def run(self, steps: int, **options: object) -> Loop:
        """Several steps; the output is checked at the end."""
        for _ in range(steps):
            self.step(**options)
        for i, tokens in self.tokens.items():
            assert tokens[3:] == plain(self.scripts[i], [i + 1, 2, 3], len(tokens) - 3)
        return self

    def speed(self, steps: int, **options: object) -> float:
        """Tokens per simulated second over the next steps."""
        tokens, started = self._count(), self.clock.now
        self.run(steps, **options)
        return (self._count() - tokens) / (self.clock.now - started)

    def _count(self) -> int:
        return sum(map(len, self.tokens.values()))

    def _verify(self, sequence_id: int, draft: Draft) -> Observation:
        tokens = self.tokens[sequence_id]
        known, verdict = len(tokens), judge_greedy(self.scripts[sequence_id], tokens, draft)
        tokens += verdict.tokens
        self.accepted += len(verdict.accepted)
        return observation(sequence_id, known, verdict, tokens)
