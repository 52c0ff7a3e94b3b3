"""Drafters, a target and a machine that exist only as numbers: acceptance models and cost tables for simulate.py.

Whether a drafter guesses the next token right depends on its skill at the request's task and on how hard that token is
for everybody (a Gaussian copula: `shared` of the variance is common to all drafters). Every draw is a hash of
(request, position, drafter), so two policies are compared on the very same luck.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from outrider.bench.world import Clock, Curve, TimedDrafter, Work, WorkingDrafter, seconds
from outrider.drafters.base import Context
from outrider.types import NO_DRAFT, Draft, Finish, Verdict

VOCABULARY = 32000
_NORMAL = NormalDist()
_EVERYBODY = 997  # the "drafter" whose draws are a token's own difficulty
_CONFIDENCE = 499  # added to a drafter's number for the noise in what it says of itself


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
        """The task of a request."""
        return self.tasks[request % len(self.tasks)]


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


class SimulatedDrafter(WorkingDrafter):
    """Guesses right with the probability its skill at a request gives; `truth` tells it the token at a position."""

    def __init__(
        self,
        name: str,
        number: int,
        skill: Callable[[int], float],
        truth: Callable[[int, int], int],
        work: Work,
        shared: float = 0.5,
    ) -> None:
        super().__init__(name, work)
        self._number, self._skill, self._truth, self._shared = number, skill, truth, shared

    def guess(self, context: Context, depth: int) -> Draft:
        """Right up to the first token it does not know; behind that, never."""
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
