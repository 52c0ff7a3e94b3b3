"""How speculation went over time: a bounded number of moments, each the mean of so many steps, for reports and charts.

When the record is full, neighbouring moments are merged into one, so a long run is told as coarsely as it is long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.speculation.timing import StepTiming

CAPACITY = 128  # moments
_FIRST_SPAN = 4  # steps of a moment to begin with


@dataclass(frozen=True)
class Moment:
    """Sums over `steps` steps that end with step `until`; `weights` are shares of the vote at their end."""

    until: int
    steps: int
    sequences: int  # verified, all steps together
    drafted: int  # tokens
    accepted: int  # tokens
    draft_s: float
    verify_s: float
    overhead_s: float
    pool: int  # drafts that waited for the target, all steps together
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def length(self) -> float:
        """Mean tokens of a draft, sequences without one included."""
        return self.drafted / self.sequences if self.sequences else 0.0

    def joined(self, later: Moment) -> Moment:
        """This moment and the next one as one."""
        return Moment(
            later.until,
            self.steps + later.steps,
            self.sequences + later.sequences,
            self.drafted + later.drafted,
            self.accepted + later.accepted,
            self.draft_s + later.draft_s,
            self.verify_s + later.verify_s,
            self.overhead_s + later.overhead_s,
            self.pool + later.pool,
            later.weights,
        )


class History:
    """The moments so far, and the one that is not complete yet."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []
        self._span = _FIRST_SPAN
        self._clear()

    def add(self, sequences: int, drafted: int, accepted: int, timing: StepTiming) -> bool:
        """One more step; True where it completes a moment, which is then to be noted."""
        self._steps += 1
        self._sequences += sequences
        self._drafted += drafted
        self._accepted += accepted
        self._draft_s += timing.draft_s
        self._verify_s += timing.verify_s
        self._overhead_s += timing.overhead_s
        self._pool += timing.pool
        return self._steps >= self._span

    def note(self, step: int, weights: Mapping[str, float]) -> None:
        """Complete the moment."""
        self._moments.append(self._moment(step, weights))
        self._clear()
        if len(self._moments) >= CAPACITY:
            pairs = zip(self._moments[::2], self._moments[1::2], strict=True)
            self._moments = [first.joined(second) for first, second in pairs]
            self._span *= 2

    def moments(self) -> tuple[Moment, ...]:
        """What is complete, oldest first."""
        return tuple(self._moments)

    def _moment(self, step: int, weights: Mapping[str, float]) -> Moment:
        return Moment(
            step,
            self._steps,
            self._sequences,
            self._drafted,
            self._accepted,
            self._draft_s,
            self._verify_s,
            self._overhead_s,
            self._pool,
            weights,
        )

    def _clear(self) -> None:
        self._steps = self._sequences = self._drafted = self._accepted = self._pool = 0
        self._draft_s = self._verify_s = self._overhead_s = 0.0
