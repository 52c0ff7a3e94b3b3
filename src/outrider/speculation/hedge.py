"""Hedge: every drafter is scored by the verified tokens, per request, with a global prior.

All drafters draft anyway, so one verified trajectory scores all of them, not only the winner, at no cost to the target
(full information; Freund & Schapire 1997; HedgeSpec). Drafters that had no idea sleep: their weight stays where it is
(specialists; Freund et al. 1997). A drafter's vote at a token is its weight times its calibrated confidence there.
One whose weight has collapsed for a request stops drafting for it, and is re-probed with short drafts; but where no
drafter before it has an idea, being outvoted elsewhere is no reason to be silent, unless it is hardly ever right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp

from outrider.errors import ConfigError
from outrider.speculation.prefix_tree import PrefixTree
from outrider.speculation.trial import Trial
from outrider.speculation.vote import ANY_DEPTH
from outrider.types import NO_DRAFT, Draft

_NEW = 0.1  # weight of the latest draft in the running mean of what a drafter has right


@dataclass(frozen=True)
class HedgeRules:
    """Settings of the hedged vote."""

    rate: float = 0.3  # log-weight per token by which a drafter beats the mean, per request
    memory: float = 0.95  # share of a request's log-weights kept per round
    prior_rate: float = 0.03  # the same as `rate`, for the global prior
    prior_memory: float = 0.998
    floor: float = 0.03  # share of the vote below which a drafter stops drafting for a request beside others
    useless: float = 0.2  # tokens that it has right on average, below which it then stops drafting alone too
    first_probe: int = 8  # rounds it then sits out before it is probed
    last_probe: int = 64
    probe_depth: int = 2  # tokens of a probe
    branches: int = 1  # 2: the runner-up is verified too, as a tree

    def __post_init__(self) -> None:
        if not self.rate > 0 or not self.prior_rate >= 0 or not 0 < self.memory <= 1 or not 0 < self.prior_memory <= 1:
            raise ConfigError("hedge: use rate above 0, prior_rate from 0 and memories in (0, 1]", "vote_options")
        if not 1 <= self.first_probe <= self.last_probe or self.probe_depth < 1 or not 0 <= self.floor < 0.5:
            raise ConfigError(
                "hedge: use 1 <= first_probe <= last_probe, probe_depth from 1 and floor below 0.5", "vote_options"
            )
        if not self.useless >= 0:  # not a number is refused, too
            raise ConfigError(f"hedge: useless = {self.useless} is refused; use 0 or more", "vote_options")
        if self.branches not in (1, 2):
            raise ConfigError(f"hedge: branches = {self.branches} is refused; use 1 or 2", "vote_options")


@dataclass
class _Standing:
    """One drafter on one request: its log-weight, what it has right, and since when it sits out."""

    score: float = 0.0
    right: float = 1.0  # running mean of the tokens that its drafts have right, with an optimistic start
    idle: int = 0
    interval: int = 0  # rounds between probes; 0: it drafts


class HedgeVote:
    """Multiplicative weights over all drafters, learnt from every verified token."""

    def __init__(self, names: Sequence[str], rules: HedgeRules | None = None) -> None:
        self._rules = rules or HedgeRules()
        self._prior = dict.fromkeys(names, 0.0)
        self._requests: dict[int, dict[str, _Standing]] = {}
        self._shares: dict[int, dict[str, float]] = {}  # as they are until the next verdicts

    def reach(self, sequence_id: int, name: str, earlier: bool) -> int:
        standing = self._request(sequence_id)[name]
        alone = not earlier and standing.right >= self._rules.useless
        if alone or self.shares(sequence_id)[name] >= self._rules.floor:
            standing.idle = standing.interval = 0
            return ANY_DEPTH
        standing.interval = standing.interval or self._rules.first_probe
        standing.idle += 1
        if standing.idle < standing.interval:
            return 0
        standing.idle, standing.interval = 0, min(2 * standing.interval, self._rules.last_probe)
        return self._rules.probe_depth

    def merge(self, sequence_id: int, proposals: Mapping[str, Draft]) -> Draft:
        awake = {name: draft for name, draft in proposals.items() if draft.tokens}
        if len(awake) < 2:
            return next(iter(awake.values()), NO_DRAFT)
        shares = self.shares(sequence_id)
        if all_agree(awake.values()):
            return max(awake.values(), key=lambda draft: shares[draft.drafter] * sum(draft.confidence or ()))
        tree = PrefixTree()
        for name, draft in awake.items():
            tree.insert(draft, shares[name], trust=True)
        return tree.heaviest_chain() if self._rules.branches == 1 else tree.runner_up()

    def observe(self, trials: Sequence[Trial]) -> None:
        self._shares.clear()
        for trial in trials:
            awake = {name: trial.agreed[name] for name, draft in trial.proposals.items() if draft.tokens}
            for name, right in awake.items():
                standing = self._request(trial.sequence_id)[name]
                standing.right += _NEW * (right - standing.right)
            if len(awake) > 1:
                self._learn(trial.sequence_id, awake)

    def weights(self) -> Mapping[str, float]:
        return _softmax(self._prior)

    def shares(self, sequence_id: int) -> dict[str, float]:
        """Every drafter's share of the vote on one request."""
        shares = self._shares.get(sequence_id)
        if shares is None:
            standings = self._request(sequence_id)
            scores = {name: prior + standings[name].score for name, prior in self._prior.items()}
            shares = self._shares[sequence_id] = _softmax(scores)
        return shares

    def forget(self, sequence_id: int) -> None:
        self._requests.pop(sequence_id, None)
        self._shares.pop(sequence_id, None)

    def _learn(self, sequence_id: int, awake: Mapping[str, int]) -> None:
        """Move the awake drafters apart by how many tokens each had right; the sleeping ones stay."""
        standings, rules = self._request(sequence_id), self._rules
        mean = sum(awake.values()) / len(awake)
        for name, right in awake.items():
            standing, ahead = standings[name], right - mean
            standing.score = rules.memory * standing.score + rules.rate * ahead
            self._prior[name] = rules.prior_memory * self._prior[name] + rules.prior_rate * ahead

    def _request(self, sequence_id: int) -> dict[str, _Standing]:
        standings = self._requests.get(sequence_id)
        if standings is None:
            standings = self._requests[sequence_id] = {name: _Standing() for name in self._prior}
        return standings


def all_agree(drafts: Iterable[Draft]) -> bool:
    """Whether all drafts are the same chain."""
    first, *others = drafts
    return first.is_chain and all(draft.is_chain and draft.tokens == first.tokens for draft in others)


def _softmax(scores: Mapping[str, float]) -> dict[str, float]:
    highest = max(scores.values())
    raised = {name: exp(score - highest) for name, score in scores.items()}
    total = sum(raised.values())
    return {name: value / total for name, value in raised.items()}
