"""What the simulator needs to know of a world: who may guess, what is true, and what everything costs.

simulated.py makes a world of numbers, recorded.py one of real answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from outrider.drafters.base import Context, Drafter, Need, Observation
from outrider.types import Draft, Verdict

#: (size, seconds) points; between them a cost is linear, beyond the last the last slope goes on.
Curve = tuple[tuple[float, float], ...]


def seconds(curve: Curve, size: float) -> float:
    """A cost curve at a size."""
    sizes, costs = zip(*curve, strict=True)
    if size > sizes[-1] and len(curve) > 1:
        return costs[-1] + (size - sizes[-1]) * (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2])
    return float(np.interp(size, sizes, costs))


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedDrafter(Drafter, Protocol):
    """A drafter whose time is simulated."""

    spent_s: float  # simulated seconds since somebody set it to 0


class World(Protocol):
    """What is true, who may guess it, and what everything costs. Requests are numbers from 0."""

    @property
    def requests(self) -> int:
        """How many there are."""
        ...

    @property
    def overhead_s(self) -> float:
        """Seconds of every step that are neither drafting nor verifying."""
        ...

    @property
    def parallel(self) -> bool:
        """Whether drafters run side by side."""
        ...

    def prompt(self, request: int) -> Sequence[int]:
        """The tokens a request begins with."""
        ...

    def length(self, request: int) -> int:
        """Tokens of its answer."""
        ...

    def judge(self, request: int, known: int, draft: Draft) -> Verdict:
        """The verdict on a chain drafted behind `known` tokens of the answer."""
        ...

    def verify_s(self, rows: int) -> float:
        """Seconds of a verification."""
        ...

    def names(self) -> Sequence[str]:
        """All drafters there are."""
        ...

    def drafter(self, name: str, clock: Clock) -> TimedDrafter:
        """A new drafter that moves the clock when it drafts."""
        ...


@dataclass
class Work:
    """The time that a drafter with KV of its own takes: a pass per drafted token, and reading what it has not seen."""

    draft_s: Curve
    catch_up_s: float
    clock: Clock
    _read: dict[int, int] = field(default_factory=dict)  # sequence -> tokens it has read

    def draft(self, contexts: Sequence[Context], drafts: Sequence[Draft]) -> float:
        """Move the clock by what these drafts take; the seconds."""
        depths = [len(draft) for draft in drafts]
        spent = sum(
            seconds(self.draft_s, sum(deep > step for deep in depths)) for step in range(max(depths, default=0))
        )
        for context, deep in zip(contexts, depths, strict=True):
            if deep:  # the last known token is read by the first pass anyway
                spent += self.catch_up_s * max(0, len(context.tokens) - 1 - self._read.get(context.sequence_id, 0))
                self._read[context.sequence_id] = len(context.tokens) + deep - 1
        self.clock.now += spent
        return spent

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self._read.pop(sequence_id, None)


class WorkingDrafter:
    """A drafter whose words are given and whose time is work; what kinds of it say is `guess`."""

    needs: frozenset[Need] = frozenset()

    def __init__(self, name: str, work: Work) -> None:
        self.name = name
        self.spent_s = 0.0
        self._work = work

    def guess(self, context: Context, depth: int) -> Draft:
        """At most `depth` tokens behind a context, or NO_DRAFT."""
        raise NotImplementedError

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        """Guess for every context; the clock moves by the work."""
        drafts = [self.guess(context, depth) for context, depth in zip(contexts, depths, strict=True)]
        self.spent_s += self._work.draft(contexts, drafts)
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing is learnt: what it says is given."""

    def forget(self, sequence_id: int) -> None:
        """Its KV of the sequence is gone."""
        self._work.forget(sequence_id)
