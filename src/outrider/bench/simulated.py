"""Drafters, a target and a machine that exist only as numbers: acceptance models and cost tables for simulate.py.

Whether a drafter guesses the next token right depends on its skill at the request's task and on how hard that token is
for everybody (a Gaussian copula: `shared` of the variance is common to all drafters). Every draw is a hash of
(request, position, drafter), so two policies are compared on the very same luck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from outrider.drafters.base import Context, Need, Observation
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
    parallel: bool = True  # every drafter has a device of its own
    shared: float = 0.5  # share of the luck that all drafters have in common


@dataclass(frozen=True)
class Traffic:
    """The requests: tasks take turns, each asks for `tokens` tokens."""

    tasks: tuple[str, ...]
    requests: int = 128
    tokens: int = 128

    def task(self, request: int) -> str:
        return self.tasks[request % len(self.tasks)]


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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


class SimulatedDrafter:
    """Guesses right with the probability its skill gives, at the cost the machine gives."""

    needs: frozenset[Need] = frozenset()

    def __init__(self, number: int, machine: Machine, traffic: Traffic, clock: Clock) -> None:
        self.name = f"ssm-{number}"
        self.spent_s = 0.0  # simulated seconds since somebody set it to 0
        self._number = number
        self._machine = machine
        self._traffic = traffic
        self._clock = clock

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        cost = sum(
            seconds(self._machine.draft, sum(deep > step for deep in depths)) for step in range(max(depths, default=0))
        )
        self.spent_s += cost
        self._clock.now += cost
        return [self._guess(context, depth) for context, depth in zip(contexts, depths, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Its skill is given."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is held."""

    def _guess(self, context: Context, depth: int) -> Draft:
        request, known = context.sequence_id, len(context.tokens)
        tokens: list[int] = []
        confidence: list[float] = []
        on_path = True
        for position in range(known, known + depth):
            margin = self._margin(request, position)
            on_path = on_path and margin > 0
            true = SimulatedTarget.token(request, position)
            tokens.append(true if on_path else (true + 1 + self._number) % VOCABULARY)
            confidence.append(_NORMAL.cdf(0.7 * margin + 0.7 * _luck(request, position, self._number + _CONFIDENCE)))
        return Draft(tuple(tokens), drafter=self.name, confidence=tuple(confidence)) if tokens else NO_DRAFT

    def _margin(self, request: int, position: int) -> float:
        """Above 0 where the drafter knows the token; normal, so that P(margin > 0) is its skill."""
        skill = self._machine.skills[self._number][self._traffic.task(request)]
        shared = self._machine.shared
        common, own = _luck(request, position, _EVERYBODY), _luck(request, position, self._number)
        return _NORMAL.inv_cdf(skill) + shared**0.5 * common + (1 - shared) ** 0.5 * own


def _luck(request: int, position: int, drafter: int) -> float:
    """A standard normal draw that depends on nothing else."""
    return _NORMAL.inv_cdf((_hash(request, position, drafter + 1) + 0.5) / 2**32)


def _hash(request: int, position: int, salt: int) -> int:
    """32 well-mixed bits (the finaliser of MurmurHash3)."""
    value = (request * 0x9E3779B1 + position * 0x85EBCA77 + salt * 0xC2B2AE3D) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        value = ((value ^ value >> shift) * factor) & 0xFFFFFFFF
    return value ^ value >> 16
