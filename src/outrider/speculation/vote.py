"""How several drafters agree on one draft, and who is asked at all.

* `NoVote`: the first drafter in the list that has something to say.
* `MajorityVote`: the published weighted majority (SC '25, doi 10.1145/3712285.3759834; after Littlestone & Warmuth):
  only the winner is rewarded or punished, weights are global.
* `HedgeVote` (hedge.py): every drafter is scored by the verified tokens, per request.

Voted tokens carry no q: once a choice has looked at tokens, they are judged as point masses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.errors import ConfigError
from outrider.speculation.prefix_tree import PrefixTree
from outrider.speculation.trial import Trial
from outrider.types import NO_DRAFT, Draft

ANY_DEPTH = 1 << 20  # "as deep as the length policy allows"


class VotePolicy(Protocol):
    """Whom to ask and whom to believe."""

    def reach(self, sequence_id: int, name: str, earlier: bool) -> int:
        """How deep a drafter may draft for a sequence this round; 0: it is not asked.

        `earlier` says whether a drafter before it in the list has proposed something already.
        """
        ...

    def merge(self, sequence_id: int, proposals: Mapping[str, Draft]) -> Draft:
        """One draft out of all proposals; its `drafter` is the winner."""
        ...

    def observe(self, trials: Sequence[Trial]) -> None:
        """Learn whom to believe."""
        ...

    def weights(self) -> Mapping[str, float]:
        """Every drafter's share of the vote, adding up to 1."""
        ...

    def forget(self, sequence_id: int) -> None: ...


class NoVote:
    """First come, first served: a later drafter is asked only where the earlier ones had no idea."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def reach(self, sequence_id: int, name: str, earlier: bool) -> int:
        return 0 if earlier else ANY_DEPTH

    def merge(self, sequence_id: int, proposals: Mapping[str, Draft]) -> Draft:
        return next((draft for draft in proposals.values() if draft.tokens), NO_DRAFT)

    def observe(self, trials: Sequence[Trial]) -> None:
        """Nothing to learn."""

    def weights(self) -> Mapping[str, float]:
        return {name: 1.0 / len(self._names) for name in self._names}

    def forget(self, sequence_id: int) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class MajorityRules:
    """Settings of the published vote; the paper leaves their values open."""

    reward: float = 1.05  # factor of a winner's weight when its mean acceptance reaches the threshold
    penalty: float = 0.9  # factor otherwise
    threshold: float = 0.5  # mean share of the winner's draft that must be accepted
    floor: float = 0.02  # weights never fall below this, so that a punished drafter can return

    def __post_init__(self) -> None:
        if not (self.reward >= 1 and 0 < self.penalty <= 1 and 0 <= self.threshold <= 1 and 0 < self.floor < 1):
            raise ConfigError(
                "majority: use reward >= 1, penalty in (0, 1], threshold in [0, 1] and floor in (0, 1)", "vote_options"
            )


class MajorityVote:
    """Weighted majority over the prefix tree of all drafts; the winner alone learns."""

    def __init__(self, names: Sequence[str], rules: MajorityRules | None = None) -> None:
        self._rules = rules or MajorityRules()
        self._weights = dict.fromkeys(names, 1.0)

    def reach(self, sequence_id: int, name: str, earlier: bool) -> int:
        return ANY_DEPTH

    def merge(self, sequence_id: int, proposals: Mapping[str, Draft]) -> Draft:
        awake = {name: draft for name, draft in proposals.items() if draft.tokens}
        if len(awake) < 2:
            return next(iter(awake.values()), NO_DRAFT)
        tree = PrefixTree()
        for name, draft in awake.items():
            tree.insert(draft, self._weights[name])
        return tree.heaviest_chain()

    def observe(self, trials: Sequence[Trial]) -> None:
        """Reward or punish each winner by its mean acceptance over the requests it won in this step."""
        shares: dict[str, list[float]] = {}
        for trial in trials:
            if trial.verdict.drafted:
                share = len(trial.verdict.accepted) / trial.verdict.drafted
                shares.setdefault(trial.submitted.drafter, []).append(share)
        for name, won in shares.items():
            good = sum(won) / len(won) >= self._rules.threshold
            self._weights[name] *= self._rules.reward if good else self._rules.penalty
        self._rescale()

    def weights(self) -> Mapping[str, float]:
        total = sum(self._weights.values())
        return {name: weight / total for name, weight in self._weights.items()}

    def forget(self, sequence_id: int) -> None:
        """Weights are global."""

    def _rescale(self) -> None:
        """Only ratios matter: the heaviest weighs 1, nobody falls below the floor."""
        heaviest = max(self._weights.values())
        for name, weight in self._weights.items():
            self._weights[name] = max(weight / heaviest, self._rules.floor)
