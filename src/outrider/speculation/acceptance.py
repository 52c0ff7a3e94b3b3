"""How likely the next drafted token is to be accepted: estimates from everything the target has said so far.

Per drafter two global tables of the conditional acceptance (given that all tokens before it were right): by position,
and by the confidence that the drafter stated (which calibrates it). Per request and drafter one factor: how often it
was right there, over how often the tables said it would be. The factor starts at 1, so new requests start from the
global prior, and every proposal teaches, whether or not it was submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Protocol

from outrider.speculation.trial import Trial
from outrider.types import Draft

POSITIONS = 16  # deeper positions share the last rate
BUCKETS = 10  # of stated confidence
_FULL_BUCKETS = BUCKETS - 1e-9  # so that confidence 1 falls into the last one
_GLOBAL_MEMORY = 0.998  # share of old evidence kept per observation, tables
_REQUEST_MEMORY = 0.92  # the same, factor of a request, per round
_PRIOR = 4.0  # weight of the priors, in observations
_SKILL_PRIOR = 2.0  # a request's own evidence outweighs the tables after about so many tokens
_OPTIMISM = 0.2  # hits granted to a drafter that is not tried yet on a request
_HOPE = 4.0  # hits granted at every position, fading as it is tried, to a new one; what trying costs is bounded
_LOWEST, _HIGHEST = 0.005, 0.995


class Estimates(Protocol):
    """What policies may ask before the target has spoken."""

    def calibrated(self, sequence_id: int, name: str, draft: Draft) -> Draft:
        """The draft with `confidence` set to the estimated conditional acceptance of each token."""
        ...

    def expected(self, sequence_id: int, name: str, depth: int) -> list[float]:
        """Conditional acceptance of each of `depth` positions of a draft that is not made yet.

        Optimistic where a drafter has hardly been tried on the request: whom nobody asks, nobody knows.
        """
        ...

    def learn(self, trials: Sequence[Trial]) -> None:
        """One round of every sequence."""
        ...

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        ...


class NoEstimates:
    """For policies that do not ask."""

    def calibrated(self, sequence_id: int, name: str, draft: Draft) -> Draft:
        return draft

    def expected(self, sequence_id: int, name: str, depth: int) -> list[float]:
        return [0.5] * depth

    def learn(self, trials: Sequence[Trial]) -> None:
        """Nothing to learn."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is held."""


class Rate:
    """A success rate whose old evidence fades."""

    __slots__ = ("_hits", "_tries", "value")

    def __init__(self, prior: float) -> None:
        self._hits, self._tries, self.value = prior * _PRIOR, _PRIOR, prior

    def count(self, hit: bool) -> None:
        """One more try; earlier ones count for a little less."""
        self._hits = self._hits * _GLOBAL_MEMORY + hit
        self._tries = self._tries * _GLOBAL_MEMORY + 1.0
        self.value = self._hits / self._tries

    def hoped(self, hits: float) -> float:
        """The rate with so many more hits granted."""
        return (self._hits + hits) / (self._tries + hits)

    @property
    def tries(self) -> float:
        """Evidence, old one faded, the prior included."""
        return self._tries


@dataclass
class Tables:
    """The global knowledge about one drafter. `proposes`: how often it has an idea when asked."""

    proposes: Rate = field(default_factory=lambda: Rate(1.0))
    by_position: list[Rate] = field(default_factory=lambda: [Rate(0.5) for _ in range(POSITIONS)])
    by_confidence: list[Rate] = field(default_factory=lambda: [Rate((b + 0.5) / BUCKETS) for b in range(BUCKETS)])

    def rates(self, count: int, stated: Sequence[float] | None) -> list[Rate]:
        """The rates that speak for `count` tokens: of their stated confidence where there is one, else of position."""
        if stated is not None:
            return [self.by_confidence[int(c * _FULL_BUCKETS)] for c in stated[:count]]
        return self.by_position[:count] + self.by_position[-1:] * (count - POSITIONS)


class Skill:
    """How one drafter does on one request, compared with what the tables say: first tokens and later ones apart.

    Apart, because they differ: a lookup is rarely right at first, then right for long.
    """

    __slots__ = ("_foreseen", "_hits")

    def __init__(self) -> None:
        self._hits, self._foreseen = [_SKILL_PRIOR, _SKILL_PRIOR], [_SKILL_PRIOR, _SKILL_PRIOR]

    def factor(self, position: int, optimism: float = 0.0) -> float:
        """What to multiply the tables' rate with; `optimism` counts as so many more hits."""
        part = position > 0
        return (self._hits[part] + optimism) / self._foreseen[part]

    def fade(self) -> None:
        """One more round: old evidence counts less, the prior stays."""
        for side in (self._hits, self._foreseen):
            side[0] = _SKILL_PRIOR + (side[0] - _SKILL_PRIOR) * _REQUEST_MEMORY
            side[1] = _SKILL_PRIOR + (side[1] - _SKILL_PRIOR) * _REQUEST_MEMORY

    def count(self, position: int, hit: bool, foreseen: float) -> None:
        """One verified token of which the tables had said that it is right with probability `foreseen`."""
        part = position > 0
        self._hits[part] += hit
        self._foreseen[part] += foreseen


_AVERAGE = Skill()


class Acceptance:
    """Estimates of all drafters for all requests. Chains teach; of trees only the accepted path's depth does."""

    def __init__(self, names: Sequence[str]) -> None:
        self._tables = {name: Tables() for name in names}
        self._skills: dict[int, dict[str, Skill]] = {}

    def calibrated(self, sequence_id: int, name: str, draft: Draft) -> Draft:
        if not draft.tokens or not draft.is_chain:
            return draft
        rates = self._tables[name].rates(len(draft), draft.confidence)
        believed = _scaled([rate.value for rate in rates], self._skill(sequence_id, name), 0.0)
        return Draft(draft.tokens, None, draft.probs, draft.drafter, tuple(believed))

    def expected(self, sequence_id: int, name: str, depth: int) -> list[float]:
        tables = self._tables[name]
        hope = _HOPE * _PRIOR / tables.by_position[0].tries  # of all positions: deep ones are seldom seen
        rates = [rate.hoped(hope) for rate in tables.rates(depth, None)]
        expected = _scaled(rates, self._skill(sequence_id, name), _OPTIMISM)
        return [expected[0] * tables.proposes.value, *expected[1:]] if expected else expected

    def learn(self, trials: Sequence[Trial]) -> None:
        """Count who proposed, and how far each proposal was right."""
        for trial in trials:
            for name, draft in trial.proposals.items():
                self._tables[name].proposes.count(bool(draft.tokens))
                if draft.tokens:
                    self._learn(trial, name, draft)

    def forget(self, sequence_id: int) -> None:
        self._skills.pop(sequence_id, None)

    def _learn(self, trial: Trial, name: str, draft: Draft) -> None:
        tables, right = self._tables[name], trial.agreed[name]
        skill = self._skills.setdefault(trial.sequence_id, {}).setdefault(name, Skill())
        skill.fade()
        stated = draft.confidence if draft.is_chain else None
        tried = min(right + 1, len(trial.truth), len(draft))
        for position, rate in enumerate(tables.rates(tried, None)):
            hit = position < right
            if stated:
                believed = tables.by_confidence[int(stated[position] * _FULL_BUCKETS)]
                skill.count(position, hit, believed.value)
                believed.count(hit)
            else:
                skill.count(position, hit, rate.value)
            rate.count(hit)

    def _skill(self, sequence_id: int, name: str) -> Skill:
        return self._skills.get(sequence_id, {}).get(name, _AVERAGE)


def survival(draft: Draft) -> list[float]:
    """Probability that each node is reached and accepted: the product of confidences along its path."""
    assert draft.confidence is not None, "only calibrated drafts have a survival"
    if draft.is_chain:
        return list(accumulate(draft.confidence, mul))
    reached: list[float] = []
    for node, confidence in enumerate(draft.confidence):
        parent = draft.parent(node)
        reached.append(confidence * (reached[parent] if parent >= 0 else 1.0))
    return reached


def _scaled(rates: Sequence[float], skill: Skill, optimism: float) -> list[float]:
    """The rates times the request's factors, kept away from 0 and 1."""
    later = skill.factor(1, optimism)
    scaled = [rate * later for rate in rates]
    if rates:
        scaled[0] = rates[0] * skill.factor(0, optimism)
    return [p if _LOWEST <= p <= _HIGHEST else min(max(p, _LOWEST), _HIGHEST) for p in scaled]
