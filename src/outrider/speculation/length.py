"""How far drafts reach: the protocol, and the two global policies `fixed` and `trend`.

`goodput` (goodput.py) chooses per request from measured costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.errors import ConfigError
from outrider.speculation.prices import Calls
from outrider.speculation.timing import StepTiming
from outrider.speculation.trial import Trial
from outrider.types import Draft

#: (drafter, index of the sequence) -> tokens of it that the drafter has not read yet.
Unread = Callable[[str, int], int]


def nothing_unread(name: str, index: int) -> int:
    """Every drafter has read everything."""
    return 0


class LengthPolicy(Protocol):
    """How many tokens to draft, before and after the drafters were asked."""

    max_depth: int

    def awake(self) -> bool:
        """Whether anybody is to be asked this round; called once per round, before anything else."""
        ...

    def depths(
        self,
        name: str,
        ids: Sequence[int],
        limits: Sequence[int],
        standing: Sequence[Mapping[str, Draft]],
        unread: Unread = nothing_unread,
    ) -> list[int]:
        """How deep drafter `name` should draft for every sequence; 0: not at all, and it is not called.

        `standing[i]` holds what other drafters already proposed for sequence i in this round, by name.
        """
        ...

    def trim(self, ids: Sequence[int], drafts: Sequence[Draft], limits: Sequence[int]) -> list[Draft]:
        """What is worth verifying of the merged drafts: a beginning of each, possibly nothing."""
        ...

    def observe(self, trials: Sequence[Trial], timing: StepTiming, calls: Mapping[str, Calls]) -> None:
        """Learn from a step; `calls` is what every drafter did since the one before."""
        ...

    def forget(self, sequence_id: int) -> None: ...


class FixedLength:
    """Always the same length, as far as the limits allow."""

    def __init__(self, length: int) -> None:
        self.max_depth = length

    def awake(self) -> bool:
        return True

    def depths(
        self,
        name: str,
        ids: Sequence[int],
        limits: Sequence[int],
        standing: Sequence[Mapping[str, Draft]],
        unread: Unread = nothing_unread,
    ) -> list[int]:
        return [min(self.max_depth, limit) for limit in limits]

    def trim(self, ids: Sequence[int], drafts: Sequence[Draft], limits: Sequence[int]) -> list[Draft]:
        return list(drafts)

    def observe(self, trials: Sequence[Trial], timing: StepTiming, calls: Mapping[str, Calls]) -> None:
        """Nothing to learn."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class TrendRules:
    """Settings of the published length rule; the paper leaves their values open."""

    window: int = 24  # observations the linear trend is fitted to
    settle: int = 6  # observations of a new length before the next decision
    step: int = 1  # tokens longer while the ratio improves
    penalty: int = 2  # tokens shorter when it worsens
    tolerance: float = 0.005  # relative change of the ratio per token of length below which nothing changes
    drafting: bool = False  # whether waiting for drafts counts as well; the published rule sees the target's time alone

    def __post_init__(self) -> None:
        if min(self.window - 1, self.settle, self.step, self.penalty) < 1 or self.tolerance < 0:
            raise ConfigError("trend: window from 2; settle, step, penalty from 1; tolerance from 0", "length_options")


class TrendLength:
    """The published rule: one length for all, moved along the trend of verification time per accepted token.

    Minimises t(b, s) / vl(s): t is the time of one verification, vl the mean number of tokens it gains per request.
    Drafting is not in t, so where no pipeline hides it the rule settles too long; the option `drafting` puts it in.
    A line is fitted to the ratio over the lengths tried lately: where it falls with the length, lengthen; where it
    rises, shorten by a penalty step. Where only one length was tried lately, try a neighbour. After a change nothing
    is decided before every draft of an old length is verified and gone.
    """

    def __init__(self, low: int, high: int, rules: TrendRules | None = None) -> None:
        self.max_depth = high
        self.length = (low + high) // 2
        self._low = low
        self._rules = rules or TrendRules()
        self._ratios: deque[tuple[int, float]] = deque(maxlen=self._rules.window)
        self._in_flight: dict[int, int] = {}  # sequence -> length its open draft was asked with
        self._settled = 0

    def awake(self) -> bool:
        return True

    def depths(
        self,
        name: str,
        ids: Sequence[int],
        limits: Sequence[int],
        standing: Sequence[Mapping[str, Draft]],
        unread: Unread = nothing_unread,
    ) -> list[int]:
        self._in_flight.update(dict.fromkeys(ids, self.length))
        return [min(self.length, limit) for limit in limits]

    def trim(self, ids: Sequence[int], drafts: Sequence[Draft], limits: Sequence[int]) -> list[Draft]:
        return list(drafts)

    def observe(self, trials: Sequence[Trial], timing: StepTiming, calls: Mapping[str, Calls]) -> None:
        for trial in trials:
            self._in_flight.pop(trial.sequence_id, None)
        gained = [len(trial.truth) for trial in trials if trial.truth]
        if not gained or timing.verify_s <= 0:
            return
        if any(length != self.length for length in self._in_flight.values()):
            return
        seconds = timing.verify_s + (timing.draft_s if self._rules.drafting else 0.0)
        self._ratios.append((self.length, seconds * len(gained) / sum(gained)))
        self._settled += 1
        if self._settled >= self._rules.settle:
            self._decide()

    def forget(self, sequence_id: int) -> None:
        self._in_flight.pop(sequence_id, None)

    def _decide(self) -> None:
        if len({length for length, _ in self._ratios}) == 1:
            change = self._rules.step if self.length < self.max_depth else -self._rules.step
        else:
            slope = relative_slope(self._ratios)
            if abs(slope) <= self._rules.tolerance:
                return
            change = self._rules.step if slope < 0 else -self._rules.penalty
        self.length = min(self.max_depth, max(self._low, self.length + change))
        self._settled = 0


def relative_slope(points: Iterable[tuple[float, float]]) -> float:
    """Least-squares slope of y over x, relative to the mean y; 0 where all x are equal."""
    points = list(points)
    x_mean = sum(x for x, _ in points) / len(points)
    y_mean = sum(y for _, y in points) / len(points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / spread / y_mean if spread else 0.0
