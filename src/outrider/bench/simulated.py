"""Drafters, a target and a machine that exist only as numbers: acceptance models and cost tables for simulate.py.

`World` is what the simulator needs to know; `GivenWorld` makes one of numbers, recorded.py makes one of real answers.

Whether a drafter guesses the next token right depends on its skill at the request's task and on how hard that token is
for everybody (a Gaussian copula: `shared` of the variance is common to all drafters). Every draw is a hash of
(request, position, drafter), so two policies are compared on the very same luck.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

import numpy as np

from outrider.drafters.base import Context, Drafter, Need, Observation
from outrider.types import NO_DRAFT, Draft, Finish, Verdict

VOCABULARY = 32000
_NORMAL = NormalDist()
_EVERYBODY = 997  # the "drafter" whose draws are a token's own difficulty
_CONFIDENCE = 499  # added to a drafter's number for the noise in what it says of itself

#: (size, seconds) points; between them a cost is linear, beyond the last the last slope goes on.
Curve = tuple[tuple[float, float], ...]


def seconds(curve: Curve, size: float) -> float:
    """A cost curve at a size."""
    sizes, costs = zip(*curve, strict=True)
    if size > sizes[-1] and len(curve) > 1:
        return costs[-1] + (size - sizes[-1]) * (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2])
    return float(np.interp(size, sizes, costs))


@dataclass(frozen=True)
class Machine:
    """What things cost and how skilled the drafters are: of each, task -> acceptance per token."""

    name: str
    verify: Curve  # rows of one pass -> seconds
    draft: Curve  # sequences of one pass -> seconds per drafted token
    skills: tuple[Mapping[str, float], ...]
    overhead_s: float = 0.0  # of every verification: scheduling, sampling
    catch_up_s: float = 0.0  # seconds per token that a drafter reads of a text it has not seen yet
    parallel: bool = True  # every drafter has a device of its own
    shared: float = 0.5  # share of the luck that all drafters have in common


@dataclass(frozen=True)
class Traffic:
    """The requests: tasks take turns, each asks for `tokens` tokens."""

    tasks: tuple[str, ...]
    requests: int = 128
    tokens: int = 128
    prompt: int = 0  # tokens

    def task(self, request: int) -> str:
        return self.tasks[request % len(self.tasks)]


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


class GivenWorld:
    """A machine and traffic given as numbers."""

    def __init__(self, machine: Machine, traffic: Traffic) -> None:
        self.requests: int = traffic.requests
        self.overhead_s, self.parallel = machine.overhead_s, machine.parallel
        self._machine, self._traffic = machine, traffic
        self._target = SimulatedTarget(traffic)

    def prompt(self, request: int) -> Sequence[int]:
        return [VOCABULARY - 1] * self._traffic.prompt

    def length(self, request: int) -> int:
        return self._traffic.tokens

    def judge(self, request: int, known: int, draft: Draft) -> Verdict:
        return self._target.judge(request, known, draft)

    def verify_s(self, rows: int) -> float:
        return seconds(self._machine.verify, rows)

    def names(self) -> Sequence[str]:
        return [f"ssm-{number}" for number in range(len(self._machine.skills))]

    def drafter(self, name: str, clock: Clock) -> TimedDrafter:
        number, machine = self.names().index(name), self._machine
        return SimulatedDrafter(
            name,
            number,
            skill=lambda request: machine.skills[number][self._traffic.task(request)],
            truth=SimulatedTarget.token,
            work=Work(machine.draft, machine.catch_up_s, clock),
            shared=machine.shared,
        )


class SimulatedTarget:
    """Knows every true token; verifies greedily."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    @staticmethod
    def token(request: int, position: int) -> int:
        """The true token at a position of a request."""
        return _hash(request, position, 0) % VOCABULARY

    def judge(self, request: int, known: int, draft: Draft) -> Verdict:
        """The verdict on a chain drafted behind `known` tokens; the text ends at its full length."""
        right = 0
        while right < len(draft) and draft.tokens[right] == self.token(request, known + right):
            right += 1
        gained = min(right + 1, self._traffic.tokens - known)
        tokens = tuple(self.token(request, known + i) for i in range(gained))
        finish = Finish("length") if known + gained >= self._traffic.tokens else None
        return Verdict(tokens, tuple(range(min(right, gained))), len(draft), draft.drafter, finish)


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


class SimulatedDrafter:
    """Guesses right with the probability its skill at a request gives; `truth` tells it the token at a position."""

    needs: frozenset[Need] = frozenset()

    def __init__(
        self,
        name: str,
        number: int,
        skill: Callable[[int], float],
        truth: Callable[[int, int], int],
        work: Work,
        shared: float = 0.5,
    ) -> None:
        self.name = name
        self.spent_s = 0.0
        self._number, self._skill, self._truth, self._work, self._shared = number, skill, truth, work, shared

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        drafts = [self._guess(context, depth) for context, depth in zip(contexts, depths, strict=True)]
        self.spent_s += self._work.draft(contexts, drafts)
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        """Its skill is given."""

    def forget(self, sequence_id: int) -> None:
        self._work.forget(sequence_id)

    def _guess(self, context: Context, depth: int) -> Draft:
        request, known = context.sequence_id, len(context.tokens) - context.prompt_length
        tokens: list[int] = []
        confidence: list[float] = []
        on_path = True
        for position in range(known, known + depth):
            margin = self._margin(request, position)
            on_path = on_path and margin > 0
            true = self._truth(request, position)
            tokens.append(true if on_path else (true + 1 + self._number) % VOCABULARY)
            confidence.append(_NORMAL.cdf(0.7 * margin + 0.7 * _luck(request, position, self._number + _CONFIDENCE)))
        return Draft(tuple(tokens), drafter=self.name, confidence=tuple(confidence)) if tokens else NO_DRAFT

    def _margin(self, request: int, position: int) -> float:
        """Above 0 where the drafter knows the token; normal, so that P(margin > 0) is its skill."""
        common, own = _luck(request, position, _EVERYBODY), _luck(request, position, self._number)
        return _quantile(self._skill(request)) + self._shared**0.5 * common + (1 - self._shared) ** 0.5 * own


def _quantile(skill: float) -> float:
    """The standard normal's quantile; a skill of 0 or 1 is never or always right."""
    if 0 < skill < 1:
        return _NORMAL.inv_cdf(skill)
    return 99.0 if skill >= 1 else -99.0


@lru_cache(1 << 16)
def _luck(request: int, position: int, drafter: int) -> float:
    """A standard normal draw that depends on nothing else."""
    return _NORMAL.inv_cdf((_hash(request, position, drafter + 1) + 0.5) / 2**32)


def _hash(request: int, position: int, salt: int) -> int:
    """32 well-mixed bits (the finaliser of MurmurHash3)."""
    value = (request * 0x9E3779B1 + position * 0x85EBCA77 + salt * 0xC2B2AE3D) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        value = ((value ^ value >> shift) * factor) & 0xFFFFFFFF
    return value ^ value >> 16
