"""Draft lengths chosen per request from measured costs: the most tokens per second, 0 included.

After SmartSpec/TurboSpec (goodput-chosen length, arXiv 2406.14066), per request as in AdaSpec and FASER: the drafted
tokens of all requests are ranked by their probability of being reached and accepted, and the batch takes as many of
them as raise (tokens gained) / (seconds of the step). That is also the early stop inside a draft: a token of low
confidence, and all behind it, is not verified.

Drafters that cost next to nothing are asked as deep as allowed and trimmed afterwards. For the others the depth is
chosen beforehand: what they are expected to add to the drafts that stand already, against their own cost.
A costly drafter that rests, and a batch that verifies nothing, are probed now and then, more and more seldom. The
first token of every proposal is scored by plain steps too, so requests recover without probes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from outrider.errors import ConfigError
from outrider.speculation.acceptance import Estimates, survival
from outrider.speculation.costs import Calls, CostTable, DraftCosts, RunningMean
from outrider.speculation.depths import Market, plan_depths
from outrider.speculation.timing import StepTiming
from outrider.speculation.trial import Trial, head, subset
from outrider.types import Draft


@dataclass(frozen=True)
class GoodputRules:
    """Settings of the goodput length."""

    cheap: float = 0.02  # a drafter whose token, of all sequences, costs less of a verification is always asked
    margin_on: float = 0.01  # predicted gain that keeps speculation on
    margin_off: float = 0.04  # predicted gain that switches it on again (hysteresis)
    first_probe: int = 16  # idle rounds before the first probe
    last_probe: int = 128  # probes never come more seldom than this
    probe_depth: int = 2  # tokens of a probe

    def __post_init__(self) -> None:
        if not 0 <= self.margin_on <= self.margin_off or self.cheap < 0:
            raise ConfigError("goodput: use 0 <= margin_on <= margin_off and cheap from 0", "length_options")
        if not 1 <= self.first_probe <= self.last_probe or self.probe_depth < 1:
            raise ConfigError("goodput: use 1 <= first_probe <= last_probe and probe_depth from 1", "length_options")


_HIDDEN = 0.9  # drafting below this share of a verification is hidden by a pipeline
_VERIFICATION = "verification"  # probed when the whole batch verifies nothing


class Probe:
    """Counts idle rounds; due for two rounds at growing intervals.

    Two, because in the first one a drafter may have to catch up with what was decoded while it rested.
    """

    __slots__ = ("_again", "_idle", "_interval")

    def __init__(self, interval: int) -> None:
        self._idle, self._interval, self._again = 0, interval, False

    def due(self, rules: GoodputRules) -> bool:
        """One more idle round: is it one for probing?"""
        if self._again:
            self._again = False
            return True
        self._idle += 1
        if self._idle < self._interval:
            return False
        self._idle, self._interval, self._again = 0, min(2 * self._interval, rules.last_probe), True
        return True


class GoodputLength:
    """Per-request lengths that maximise predicted tokens per second."""

    def __init__(
        self,
        low: int,
        high: int,
        estimates: Estimates,
        costs: CostTable,
        draft_costs: DraftCosts,
        rules: GoodputRules | None = None,
        parallel: bool = False,
    ) -> None:
        """`parallel`: the drafters run side by side, each on a device of its own."""
        self.max_depth = high
        self._low = low
        self._rules = rules or GoodputRules()
        self._estimates = estimates
        self._costs = costs
        self._draft_costs = draft_costs
        self._plan: Mapping[str, list[int]] | None = None  # depths of the costly drafters in this round
        self._exposed = RunningMean(1.0)  # share of a drafting step that the target waits for
        self._serial = 0.0 if parallel else 1.0
        self._on = True
        self._overhead_s = RunningMean(0.0)  # seconds of a step, running means: scheduling and sampling
        self._waited_s = RunningMean(0.0)  # waiting for drafts
        self._rate = _Throughput()
        self._spare_rows = 0  # rows of the last step that belonged to nobody who drafts
        self._probes: dict[str, Probe] = {}  # of idle drafters, and of the batch when nothing is verified

    def depths(
        self, name: str, ids: Sequence[int], limits: Sequence[int], standing: Sequence[Mapping[str, Draft]]
    ) -> list[int]:
        most = [min(limit, self.max_depth) for limit in limits]
        if self._is_cheap(name, len(ids)) or not any(most):
            return most
        if self._plan is None:
            self._plan = self._plan_round(ids, most, standing)
        chosen = [max(depth, min(self._low, limit)) for depth, limit in zip(self._plan[name], most, strict=True)]
        return self._with_probe(name, chosen, most)

    def trim(self, ids: Sequence[int], drafts: Sequence[Draft], limits: Sequence[int]) -> list[Draft]:
        self._plan = None
        kept = [subset(draft, nodes) for draft, nodes in zip(drafts, self._keep(drafts), strict=True)]
        if any(kept):
            self._probes.pop(_VERIFICATION, None)
        elif any(drafts) and self._probe(_VERIFICATION).due(self._rules):
            longest = max(range(len(drafts)), key=lambda i: len(drafts[i]))
            kept[longest] = head(drafts[longest], self._rules.probe_depth)
        return kept

    def observe(self, trials: Sequence[Trial], timing: StepTiming, calls: Mapping[str, Calls]) -> None:
        drafted = sum(trial.verdict.drafted for trial in trials)
        self._spare_rows = max(0, timing.rows - drafted - len(trials))
        self._costs.update(timing)
        self._draft_costs.update(calls)
        self._overhead_s.learn(timing.overhead_s)
        self._waited_s.learn(timing.draft_s)
        spent = [done.seconds for done in calls.values()]
        drafted_s = max(spent, default=0.0) + self._serial * (sum(spent) - max(spent, default=0.0))
        if drafted_s > 0:
            self._exposed.learn(exposure(timing.draft_s, drafted_s, timing.verify_s))
        self._rate.count(sum(len(trial.truth) for trial in trials), timing.total_s)

    def forget(self, sequence_id: int) -> None:
        """Nothing is held per request; the estimates are."""

    def _is_cheap(self, name: str, sequences: int) -> bool:
        """Whether a step of this drafter costs next to nothing of a verification, or is not known yet."""
        if not self._draft_costs.known(name):
            return True
        per_step, per_token = self._draft_costs.of(name)
        return self._exposed.value * (per_step + per_token * sequences) <= self._rules.cheap * self._plain_s(sequences)

    def _plan_round(
        self, ids: Sequence[int], most: Sequence[int], standing: Sequence[Mapping[str, Draft]]
    ) -> Mapping[str, list[int]]:
        """Depths of all costly drafters for all sequences, chosen together."""
        names = [name for name in self._draft_costs.names if not self._is_cheap(name, len(ids))]
        worth = self._rate.per_second(len(ids), self._plain_s(len(ids)))
        costs = self._exposed.value * worth * np.array([self._draft_costs.of(name) for name in names])
        market = Market(worth * self._slope(len(ids)), costs[:, 0], costs[:, 1], self._serial)
        expected = np.array([[self._estimates.expected(i, name, self.max_depth) for i in ids] for name in names])
        beside = np.array([standing_confidence(drafts.values(), market.row, self.max_depth) for drafts in standing])
        depths, gain = plan_depths(expected, most, beside, market)
        enough = gain > self._rules.margin_on * len(ids)
        return {name: row if enough else [0] * len(ids) for name, row in zip(names, depths.tolist(), strict=True)}

    def _plain_s(self, sequences: int) -> float:
        """Seconds of a step without drafts."""
        return self._costs.time(sequences, sequences + self._spare_rows) + self._overhead_s.value

    def _with_probe(self, name: str, chosen: list[int], most: Sequence[int]) -> list[int]:
        """A drafter that rests altogether is asked for a short draft now and then."""
        if any(chosen):
            self._probes.pop(name, None)
        elif self._probe(name).due(self._rules):
            lucky = max(range(len(most)), key=most.__getitem__)
            chosen[lucky] = min(self._rules.probe_depth, most[lucky])
        return chosen

    def _slope(self, sequences: int) -> float:
        """Seconds that one more row costs, around here."""
        rows = sequences + self._spare_rows
        extra = max(1, sequences * self.max_depth // 2)
        return (self._costs.time(sequences, rows + extra) - self._costs.time(sequences, rows)) / extra

    def _keep(self, drafts: Sequence[Draft]) -> list[list[int]]:
        """Which nodes of every draft are worth verifying, all requests weighed together."""
        ranked = sorted(
            ((p, i, node) for i, draft in enumerate(drafts) for node, p in enumerate(_survival(draft))),
            key=lambda entry: (-entry[0], entry[2]),
        )
        count = self._best_count([p for p, _, _ in ranked], len(drafts))
        keep = [set(range(min(self._low, len(draft)))) for draft in drafts]
        for _, i, node in ranked[:count]:
            keep[i].add(node)
        return [sorted(nodes) for nodes in keep]

    def _best_count(self, probabilities: Sequence[float], sequences: int) -> int:
        """How many of the ranked tokens give the most tokens per second; 0 unless the gain beats the margin."""
        if not probabilities:
            return 0
        rows = sequences + self._spare_rows
        seconds = (
            self._overhead_s.value + self._waited_s.value + self._costs.times(sequences, rows, len(probabilities) + 1)
        )
        goodput = (sequences + np.concatenate(([0.0], np.cumsum(probabilities)))) / seconds
        best = int(goodput.argmax())
        margin = self._rules.margin_on if self._on else self._rules.margin_off
        self._on = bool(goodput[best] > goodput[0] * (1 + margin))
        return best if self._on else 0

    def _probe(self, key: str) -> Probe:
        return self._probes.setdefault(key, Probe(self._rules.first_probe))


class _Throughput:
    """Tokens per second lately: what a second is worth."""

    def __init__(self) -> None:
        self._tokens, self._seconds = 0.0, 0.0

    def count(self, tokens: int, seconds: float) -> None:
        self._tokens = 0.95 * self._tokens + tokens
        self._seconds = 0.95 * self._seconds + seconds

    def per_second(self, sequences: int, plain_s: float) -> float:
        """Tokens per second, at least what plain decoding would give."""
        plain = sequences / plain_s
        return max(plain, self._tokens / self._seconds) if self._seconds > 0 else plain


def _survival(draft: Draft) -> list[float]:
    """Survival of a draft; one of unknown confidence is taken as a fair coin per token."""
    if draft.confidence is not None:
        return survival(draft)
    return [0.5 ** len(draft.path(node)) for node in range(len(draft))]


def standing_confidence(drafts: Iterable[Draft], row: float, depth: int) -> list[float]:
    """Confidence by position, 0 behind its end, of the draft that gains most where verifying a row costs so much."""
    best: tuple[float, tuple[float, ...]] = (0.0, ())
    for draft in drafts:
        if draft.is_chain and draft.confidence:
            best = max(best, (max(accumulate(p - row for p in survival(draft))), draft.confidence))
    return [*best[1][:depth], *[0.0] * (depth - len(best[1]))]


def exposure(waited_s: float, drafted_s: float, verify_s: float) -> float:
    """What share of its time one more drafting step would cost the target.

    All of it where the target waits for drafts. Where drafting is hidden behind verifying nothing, until it takes about
    as long as verifying: beyond that every step is waited for.
    """
    if waited_s > 0.5 * drafted_s or verify_s <= 0:
        return 1.0
    beyond = (drafted_s / verify_s - _HIDDEN) / (1.1 - _HIDDEN)
    return min(1.0, max(waited_s / drafted_s, beyond))
