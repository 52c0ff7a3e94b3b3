"""A world of recorded answers for the simulator: the target's real words, real lookup drafters, given costs.

`ngram` and `suffix` run for real on the recorded tokens. Drafters with a model say what they said when the traces were
recorded. A `WhatIf` is a drafter that does not exist yet: so often right, at such a price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.bench.simulated import SimulatedDrafter
from outrider.bench.traces import Trace
from outrider.bench.world import Clock, Curve, TimedDrafter, Work, WorkingDrafter, seconds
from outrider.drafters.base import Context, Drafter, Need, Observation
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.types import NO_DRAFT, Draft, Finish, Verdict

_LOOKUPS = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


@dataclass(frozen=True)
class WhatIf:
    """A drafter of given acceptance per token and price, in target passes of one row per drafted token."""

    acceptance: float
    cost: float
    catch_up: float = 0.0  # passes per token of a text it has not read yet


@dataclass(frozen=True)
class Prices:
    """What things cost; the default is SmolLM2-135M on two cores, in seconds."""

    verify: Curve = ((1, 3.4e-3), (2, 3.7e-3), (5, 5.05e-3), (8, 6.8e-3), (16, 11e-3), (32, 18e-3))  # rows of a pass
    lookup_s: float = 0.02e-3  # of one lookup
    model: float = 0.67  # one token of a recorded drafter with a model, in passes of one row
    catch_up: float = 0.06  # a token that such a drafter has not read yet, in passes of one row
    overhead_s: float = 0.2e-3  # of every verification: scheduling, sampling


@dataclass
class RecordedWorld:
    """Traces, prices, and drafters that do not exist."""

    traces: Sequence[Trace]
    prices: Prices = field(default_factory=Prices)
    what_if: Mapping[str, WhatIf] = field(default_factory=dict)
    parallel: bool = False

    @property
    def requests(self) -> int:
        return len(self.traces)

    @property
    def overhead_s(self) -> float:
        return self.prices.overhead_s

    def prompt(self, request: int) -> Sequence[int]:
        return self.traces[request].prompt

    def length(self, request: int) -> int:
        return len(self.traces[request].output)

    def judge(self, request: int, known: int, draft: Draft) -> Verdict:
        """The text ends where the recorded one does."""
        truth, right = self.traces[request].output, 0
        while right < len(draft) and truth[known + right : known + right + 1] == draft.tokens[right : right + 1]:
            right += 1
        tokens = truth[known : known + right + 1]
        finish = Finish("length") if known + len(tokens) == len(truth) else None
        return Verdict(tokens, tuple(range(right)), len(draft), draft.drafter, finish)

    def verify_s(self, rows: int) -> float:
        return seconds(self.prices.verify, rows)

    def names(self) -> Sequence[str]:
        return [*_LOOKUPS, *(self.traces[0].guesses if self.traces else ()), *self.what_if]

    def drafter(self, name: str, clock: Clock) -> TimedDrafter:
        if name in _LOOKUPS:
            return Clocked(_LOOKUPS[name](), self.prices.lookup_s, clock)
        if name not in self.what_if:
            return RecordedDrafter(name, self.traces, self._work(self.prices.model, self.prices.catch_up, clock))
        given = self.what_if[name]
        return SimulatedDrafter(
            name,
            self.names().index(name),
            skill=lambda request: given.acceptance,
            truth=self._truth,
            work=self._work(given.cost, given.catch_up, clock),
        )

    def _truth(self, request: int, position: int) -> int:
        output = self.traces[request].output
        return output[position] if position < len(output) else 0

    def _work(self, cost: float, catch_up: float, clock: Clock) -> Work:
        """A drafter priced in passes; on a CPU every sequence adds its own share."""
        one = self.verify_s(1)
        return Work(((1, cost * one), (32, cost * one * self.verify_s(32) / one)), catch_up * one, clock)


class Clocked:
    """A real drafter whose time is simulated."""

    def __init__(self, drafter: Drafter, lookup_s: float, clock: Clock) -> None:
        self.name: str = drafter.name
        self.needs: frozenset[Need] = drafter.needs
        self.spent_s = 0.0
        self._drafter, self._lookup_s, self._clock = drafter, lookup_s, clock

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        spent = self._lookup_s * len(contexts)
        self.spent_s += spent
        self._clock.now += spent
        return self._drafter.propose(contexts, depths)

    def observe(self, observations: Sequence[Observation]) -> None:
        self._drafter.observe(observations)

    def forget(self, sequence_id: int) -> None:
        self._drafter.forget(sequence_id)


class RecordedDrafter(WorkingDrafter):
    """Says what it said when the traces were recorded; behind its first mistake, nothing that could be right."""

    def __init__(self, name: str, traces: Sequence[Trace], work: Work) -> None:
        super().__init__(name, work)
        self._traces = traces

    def guess(self, context: Context, depth: int) -> Draft:
        """What it said at this place of the recorded answer."""
        trace, known = self._traces[context.sequence_id], len(context.tokens) - context.prompt_length
        told = trace.guesses[self.name][known : known + depth]
        if not told:
            return NO_DRAFT
        tokens, confidence = zip(*told, strict=True)
        return Draft(tokens, drafter=self.name, confidence=confidence)
