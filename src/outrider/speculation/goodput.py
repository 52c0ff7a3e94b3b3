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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from outrider.errors import ConfigError
from outrider.speculation.acceptance import Estimates, survival
from outrider.speculation.costs import CostTable, DraftCosts
from outrider.speculation.timing import StepTiming
from outrider.speculation.trial import Trial, head, subset
from outrider.types import Draft


@dataclass(frozen=True)
class GoodputRules:
    """Settings of the goodput length."""

    cheap: float = 0.02  # a drafter below this share of a verification per token is asked without calculation
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


_VERIFICATION = "verification"  # probed when the whole batch verifies nothing


class Probe:
    """Counts idle rounds; due at growing intervals."""

    __slots__ = ("idle", "interval")

    def __init__(self, interval: int) -> None:
        self.idle, self.interval = 0, interval

    def due(self, rules: GoodputRules) -> bool:
        """One more idle round: is a probe due?"""
        self.idle += 1
        if self.idle < self.interval:
            return False
        self.idle, self.interval = 0, min(2 * self.interval, rules.last_probe)
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
    ) -> None:
        self.max_depth = high
        self._low = low
        self._rules = rules or GoodputRules()
        self._estimates = estimates
        self._costs = costs
        self._draft_costs = draft_costs
        self._on = True
        self._others_s = 0.0  # seconds of a step that are no verification, running mean
        self._rate = _Throughput()
        self._spare_rows = 0  # rows of the last step that belonged to nobody who drafts
        self._probes: dict[str, Probe] = {}  # of idle drafters, and of the batch when nothing is verified

    def depths(
        self, name: str, ids: Sequence[int], limits: Sequence[int], standing: Sequence[Mapping[str, Draft]]
    ) -> list[int]:
        most = [min(limit, self.max_depth) for limit in limits]
        price = self._draft_costs.per_token(name)
        if price <= self._rules.cheap * self._costs.time(len(ids), len(ids) + self._spare_rows):
            return most
        chosen = [
            self._depth(name, i, limit, drafts, price, len(ids))
            for i, limit, drafts in zip(ids, most, standing, strict=True)
        ]
        if any(chosen) or not any(most):
            self._probes.pop(name, None)
        elif self._probe(name).due(self._rules):
            lucky = max(range(len(ids)), key=most.__getitem__)
            chosen[lucky] = min(self._rules.probe_depth, most[lucky])
        return chosen

    def trim(self, ids: Sequence[int], drafts: Sequence[Draft], limits: Sequence[int]) -> list[Draft]:
        kept = [subset(draft, nodes) for draft, nodes in zip(drafts, self._keep(drafts), strict=True)]
        if any(kept):
            self._probes.pop(_VERIFICATION, None)
        elif any(drafts) and self._probe(_VERIFICATION).due(self._rules):
            longest = max(range(len(drafts)), key=lambda i: len(drafts[i]))
            kept[longest] = head(drafts[longest], self._rules.probe_depth)
        return kept

    def observe(self, trials: Sequence[Trial], timing: StepTiming, draft_s: Mapping[str, float]) -> None:
        drafted = sum(trial.verdict.drafted for trial in trials)
        self._spare_rows = max(0, timing.rows - drafted - len(trials))
        self._costs.update(timing)
        self._draft_costs.update(trials, draft_s)
        self._others_s += 0.1 * (timing.draft_s + timing.overhead_s - self._others_s)
        self._rate.count(sum(len(trial.truth) for trial in trials), timing.total_s)

    def forget(self, sequence_id: int) -> None:
        """Nothing is held per request; the estimates are."""

    def _depth(
        self, name: str, sequence_id: int, most: int, standing: Mapping[str, Draft], price: float, sequences: int
    ) -> int:
        """The depth at which a costly drafter adds most, over the best draft that stands already."""
        reached = list(accumulate(self._estimates.expected(sequence_id, name, most), mul))
        rows = sequences + self._spare_rows
        extra_s = self._costs.times(sequences, rows, most + 1) - self._costs.time(sequences, rows)
        worth = self._rate.per_second(sequences, self._costs.time(sequences, rows) + self._others_s)
        best, depth = max(self._standing_value(standing, extra_s, worth), 0.0), 0
        gained = 0.0
        for count, probability in enumerate(reached, 1):
            gained += probability
            value = gained - worth * (extra_s[count] + price * count)
            if value > best * (1 + self._rules.margin_off) + 1e-9:
                best, depth = value, count
        return max(depth, min(self._low, most))

    def _standing_value(self, standing: Mapping[str, Draft], extra_s: np.ndarray, worth: float) -> float:
        """Tokens that the best standing draft gains, less what its verification costs in tokens."""
        best = 0.0
        for draft in standing.values():
            if draft.confidence is not None:
                gained = accumulate(survival(draft))
                values = (g - worth * extra_s[min(n, len(extra_s) - 1)] for n, g in enumerate(gained, 1))
                best = max(best, *values) if draft.tokens else best
        return best

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
        seconds = self._others_s + self._costs.times(sequences, rows, len(probabilities) + 1)
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
