"""What rows, drafts and seconds are worth at the moment: the prices by which lengths are chosen, learnt from steps.

A plain step of so many sequences, one more row of it, a draft of so many tokens that the target waits for, and the
tokens that the engine gains in a second. A step in which nobody drafted only tells the price of plain steps, and of
those some are enough: where drafting rests, deciding should cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.speculation.costs import CostTable, RunningMean
from outrider.speculation.pace import Throughput
from outrider.speculation.prices import Calls, DraftCosts, Price
from outrider.speculation.timing import StepTiming
from outrider.speculation.trial import Trial

_HIDDEN = 0.9  # drafting below this share of a verification is hidden by a pipeline
_REVIEW = 16  # steps after which it is looked up anew which drafters are cheap
_SAMPLED = 4  # of so many idle steps one is learnt from,
_SETTLED = 64  # once so many steps have been


class Worth:
    """Prices of one engine. `n` is the number of sequences of a step throughout."""

    def __init__(self, costs: CostTable, drafts: DraftCosts, deepest: int, cheap: float, parallel: bool) -> None:
        """`cheap`: share of a plain step up to which a drafter is cheap; `parallel`: drafters run side by side."""
        self._costs, self._drafts = costs, drafts
        self._deepest, self._cheap_share = deepest, cheap
        self.serial = 0.0 if parallel else 1.0  # share of the time of all but the longest drafter that comes on top
        self._exposed = RunningMean(1.0)  # share of a drafting step that the target waits for
        self._overhead_s = RunningMean(0.0)  # seconds of a step, running means: scheduling and sampling
        self._waited_s = RunningMean(0.0)  # waiting for drafts
        self._rate = Throughput()
        self._spare_rows = 0  # rows of the last step that belonged to nobody who drafts
        self._steps = 0
        self._cheap: dict[tuple[str, int], bool] = {}  # by drafter and sequences, until the next review
        self._slopes: dict[int, float] = {}  # by sequences, until the next step

    @property
    def one(self) -> float:
        """Seconds of a pass of one row, the unit of accounts."""
        return self._costs.time(1, 1)

    @property
    def names(self) -> Sequence[str]:
        """All drafters."""
        return self._drafts.names

    def plain_s(self, n: int) -> float:
        """Seconds of a step without drafts."""
        return self._costs.time(n, n + self._spare_rows) + self._overhead_s.value

    def slope(self, n: int) -> float:
        """Seconds that one more row costs, around here."""
        slope = self._slopes.get(n)
        if slope is None:
            rows, extra = n + self._spare_rows, max(1, n * self._deepest // 2)
            slope = self._slopes[n] = (self._costs.time(n, rows + extra) - self._costs.time(n, rows)) / extra
        return slope

    def steps_s(self, n: int, most: int) -> list[float]:
        """Seconds of steps with 0, 1, ... `most` drafted rows, all that a step takes included."""
        besides = self._overhead_s.value + self._waited_s.value
        return [seconds + besides for seconds in self._costs.times(n, n + self._spare_rows, most + 1)]

    def per_second(self, n: int) -> float:
        """Tokens that the engine gains per second."""
        return self._rate.per_second(n, self.plain_s(n))

    def is_known(self, name: str) -> bool:
        """Whether the price of a drafter can be trusted."""
        return self._drafts.known(name)

    def is_cheap(self, name: str, n: int) -> bool:
        """Whether a step of this drafter costs next to nothing of a verification."""
        cheap = self._cheap.get((name, n))
        if cheap is None:
            each = max(self._drafts.turn(name, self._deepest), self._drafts.of(name).unread)
            limit = self._cheap_share * self.plain_s(n)
            cheap = self._drafts.known(name) and self._exposed.value * n * each <= limit
            self._cheap[name, n] = cheap
        return cheap

    def review(self) -> None:
        """Look up anew who is cheap."""
        self._cheap.clear()

    def price(self, name: str) -> Price:
        """What the target waits for, in seconds of a pass, of a token, and of a token to be read first."""
        return Price(*(self._exposed.value * part for part in self._drafts.of(name)))

    def together(self, seconds: Sequence[float]) -> float:
        """Seconds of several drafters' calls: side by side, or one after another."""
        longest = max(seconds, default=0.0)
        return longest + self.serial * (sum(seconds) - longest)

    def learn(self, trials: Sequence[Trial], timing: StepTiming, calls: Mapping[str, Calls]) -> dict[str, float]:
        """Learn from a step; the seconds that the target waited for every costly drafter."""
        self._rate.count(sum(len(trial.truth) for trial in trials), timing.total_s)
        self._steps += 1
        drafted = sum(trial.verdict.drafted for trial in trials)
        idle = not drafted and not any(done.turns for done in calls.values())
        if idle and self._steps > _SETTLED and self._steps % _SAMPLED:
            return {}
        self._spare_rows = max(0, timing.rows - drafted - len(trials))
        self._costs.update(timing)
        self._slopes.clear()
        costly = [name for name in calls if not self.is_cheap(name, max(1, len(trials)))]
        review = self._steps % _REVIEW == 1  # what is cheap is looked at now and then, the others always
        self._drafts.update(calls if review else {name: calls[name] for name in costly})
        self._overhead_s.learn(timing.overhead_s)
        self._waited_s.learn(timing.draft_s)
        drafting_s = self.together([done.seconds for done in calls.values()])
        if drafting_s > 0:
            self._exposed.learn(exposure(timing.draft_s, drafting_s, timing.verify_s))
        if self._steps % _REVIEW == 0:
            self.review()
        return {name: self._exposed.value * calls[name].seconds for name in costly}


def exposure(waited_s: float, drafted_s: float, verify_s: float) -> float:
    """What share of its time one more drafting step would cost the target.

    All of it where the target waits for drafts. Where drafting is hidden behind verifying nothing, until it takes about
    as long as verifying: beyond that every step is waited for.
    """
    if waited_s > 0.5 * drafted_s or verify_s <= 0:
        return 1.0
    beyond = (drafted_s / verify_s - _HIDDEN) / (1.1 - _HIDDEN)
    return min(1.0, max(waited_s / drafted_s, beyond))
