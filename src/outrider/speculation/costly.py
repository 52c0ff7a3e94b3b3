"""Whether and how deep costly drafters are asked: what they are expected to add, against what they cost.

Their depths are chosen before anybody drafts, for all of them and all sequences together, and paid for from an account
(account.py), so that trying a drafter costs little whatever it is like. One that rests altogether is asked for a short
draft now and then, more and more seldom, where it could pay at its best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from outrider.speculation.acceptance import Estimates, survival
from outrider.speculation.account import Account
from outrider.speculation.depths import LonePrice, Market, plan_alone, plan_depths
from outrider.speculation.goodput_rules import GoodputRules
from outrider.speculation.length import Unread
from outrider.speculation.pace import Lives
from outrider.speculation.probe import Probe
from outrider.speculation.worth import Worth
from outrider.types import Draft

_LIFE = 128.0  # tokens a sequence is expected to gain, before any has ended
_ROUND = 2.0  # tokens a sequence gains per round, where what it costs to begin with it is spread over its life

#: Depths by drafter and sequence.
Plan = Mapping[str, list[int]]


class CostlyDrafters:
    """The depths of drafters that are not simply asked as deep as allowed."""

    def __init__(self, estimates: Estimates, worth: Worth, deepest: int, rules: GoodputRules) -> None:
        self.account = Account(rules.allowance, rules.credit)
        self.lives = Lives(_LIFE)
        self._estimates, self._worth = estimates, worth
        self._deepest, self._rules = deepest, rules
        self._plan: Plan | None = None  # of this round
        self._probes: dict[str, Probe] = {}  # of those that rest

    def begin(self) -> None:
        """A new round."""
        self._plan = None

    def depths(
        self,
        name: str,
        ids: Sequence[int],
        most: Sequence[int],
        standing: Sequence[Mapping[str, Draft]],
        unread: Unread,
        low: int,
    ) -> list[int]:
        """How deep this drafter drafts for every sequence: `low` to most[i]; 0: not at all."""
        if self._rules.crowd is not None and len(ids) > self._rules.crowd:
            return [0] * len(most)
        if not self._worth.is_known(name):
            return self._introduction(most)
        if self._plan is None:
            self._plan = self._affordable(self._planned(ids, most, standing, unread), unread)
        chosen = [max(depth, min(low, limit)) for depth, limit in zip(self._plan[name], most, strict=True)]
        if any(chosen):
            self._probes.pop(name, None)
            return chosen
        return self._probed(name, most, unread)

    def _introduction(self, most: Sequence[int]) -> list[int]:
        """A drafter of unknown price: a short draft for one sequence, as long as the account is not empty."""
        self._worth.review()  # its price may be known after this call
        if not self._covers(0.0):
            return [0] * len(most)
        return _only(most, max(range(len(most)), key=most.__getitem__), self._rules.probe_depth)

    def _planned(
        self, ids: Sequence[int], most: Sequence[int], standing: Sequence[Mapping[str, Draft]], unread: Unread
    ) -> Plan:
        """Depths of all costly drafters for all sequences, chosen together."""
        worth, n = self._worth, len(ids)
        names = [name for name in worth.names if worth.is_known(name) and not worth.is_cheap(name, n)]
        rate = worth.per_second(n)
        row = rate * worth.slope(n)
        beside = [standing_confidence(drafts.values(), row, self._deepest) for drafts in standing]
        expected = [[self._estimates.expected(i, name, self._deepest) for i in ids] for name in names]
        prices = [[rate * part for part in worth.price(name)] for name in names]
        spread = min(1.0, _ROUND / self.lives.mean)  # over its life, of what it costs to begin with a sequence
        entry = [
            [price[2] * spread * unread(name, i) for i in range(n)] for name, price in zip(names, prices, strict=True)
        ]
        if len(names) == 1:
            alone, gain = plan_alone(expected[0], most, beside, LonePrice(row, *prices[0][:2]), entry[0])
            depths = [alone]
        else:
            costs = np.array(prices)
            market = Market(row, costs[:, 0], costs[:, 1], worth.serial, np.array(entry))
            planned, gain = plan_depths(np.array(expected), most, np.array(beside), market)
            depths = planned.tolist()
        enough = gain > self._rules.margin(True, n) * n
        return dict(zip(names, depths if enough else [[0] * n] * len(names), strict=True))

    def _affordable(self, plan: Plan, unread: Unread) -> Plan:
        """The plan as far as the account covers it: less deep, else one drafter for one sequence, else nothing."""
        for deepest in range(max(map(max, plan.values()), default=0), 0, -1):
            capped = {name: [min(depth, deepest) for depth in depths] for name, depths in plan.items()}
            prices = [self._price(name, depths, unread) for name, depths in capped.items() if any(depths)]
            if self._covers(self._worth.together(prices)):
                return capped
        nothing = {name: [0] * len(depths) for name, depths in plan.items()}
        takers = [(unread(name, i), name, i) for name, depths in plan.items() for i, deep in enumerate(depths) if deep]
        if takers:
            _, name, first = min(takers)
            one = _only(plan[name], first, 1)
            if self._covers(self._price(name, one, unread)):
                return {**nothing, name: one}
        return nothing

    def _probed(self, name: str, most: Sequence[int], unread: Unread) -> list[int]:
        """A drafter that rests altogether is asked for a short draft now and then, if it could pay at its best."""
        able = [i for i, depth in enumerate(most) if depth]
        lucky = min(able, key=lambda i: unread(name, i))
        probe = _only(most, lucky, self._rules.probe_depth)
        affordable = self._covers(self._price(name, probe, unread))
        if affordable and self._could_pay(name, len(able)) and self._is_due(name):
            return probe
        return [0] * len(most)

    def _is_due(self, name: str) -> bool:
        return self._probes.setdefault(name, Probe(self._rules.first_probe)).due(self._rules.last_probe)

    def _could_pay(self, name: str, n: int) -> bool:
        """Whether one more token of everybody would be worth its price if it were always right."""
        return self._worth.per_second(n) * (self._worth.price(name).of(1, n, 0) + n * self._worth.slope(n)) < n

    def _price(self, name: str, depths: Sequence[int], unread: Unread) -> float:
        """Seconds that the target waits for such a draft, reading what the drafter has not read yet included."""
        backlog = sum(unread(name, i) for i, depth in enumerate(depths) if depth)
        return self._worth.price(name).of(max(depths), sum(depths), backlog)

    def _covers(self, seconds: float) -> bool:
        """Whether the account covers a draft of this price."""
        return self.account.covers(seconds / self._worth.one)


def standing_confidence(drafts: Iterable[Draft], row: float, depth: int) -> list[float]:
    """Confidence by position, 0 behind its end, of the draft that gains most where verifying a row costs so much."""
    best: tuple[float, tuple[float, ...]] = (0.0, ())
    for draft in drafts:
        if draft.is_chain and draft.confidence:
            best = max(best, (max(accumulate(p - row for p in survival(draft))), draft.confidence))
    return [*best[1][:depth], *[0.0] * (depth - len(best[1]))]


def _only(values: Sequence[int], index: int, depth: int) -> list[int]:
    """Nobody but one, at most so deep."""
    chosen = [0] * len(values)
    chosen[index] = min(depth, values[index])
    return chosen
