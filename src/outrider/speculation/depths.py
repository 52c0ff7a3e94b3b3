"""Who of the costly drafters drafts for which sequence, and how deep: what drafts add against what they cost.

All values are in tokens: so many seconds are worth the tokens that the engine gains in that time. Three kinds of teams
are compared: all drafters together (a crowd pays where they run side by side), every sequence with its likeliest one
(routing), and each drafter alone. The best team wins if it beats drafting nothing. One costly drafter, the usual case,
is planned in plain numbers: a few sequences are too little for arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.types import Float64


@dataclass(frozen=True)
class Market:
    """Prices of one round, in tokens. J drafters."""

    row: float  # of verifying one more token
    step: Float64  # [J] of one more pass of a drafter
    token: Float64  # [J] of one more token of a drafter
    serial: float  # share of the time of all but the longest drafter that comes on top of it
    entry: Float64 | None = None  # [J, n] of beginning with a sequence: reading what was not read yet, per round


class LonePrice(NamedTuple):
    """Prices of one round with one drafter, in tokens, as in Market."""

    row: float
    step: float
    token: float


def plan_depths(
    expected: Float64, limits: Sequence[int], standing: Float64, market: Market
) -> tuple[NDArray[np.int64], float]:
    """(depths [J, n], what they are worth together, in tokens).

    expected [J, n, K]: conditional acceptance by drafter, sequence and position. standing [n, K]: that of the best
    draft which is there already, 0 where there is none.
    """
    chosen, best_worth = np.zeros(expected.shape[:2], int), 0.0
    for team in _teams(expected):
        depths, worth = _depths_of(team, expected, limits, standing, market)
        if worth > best_worth:
            chosen, best_worth = team * depths, worth
    return chosen, best_worth


def plan_alone(
    expected: Sequence[Sequence[float]],
    limits: Sequence[int],
    standing: Sequence[Sequence[float]],
    price: LonePrice,
    entry: Sequence[float],
) -> tuple[list[int], float]:
    """`plan_depths` for a single drafter, whose teams are all the same: (depths [n], worth).

    expected, standing [n][K] as there; entry [n]: of beginning with a sequence.
    """
    values = [_values(*sequence, price) for sequence in zip(expected, limits, standing, entry, strict=True)]
    best, best_worth = 0, 0.0
    highest = [0.0] * len(values)
    for deep in range(1, max(map(len, values))):
        highest = [
            of_depth[deep] if deep < len(of_depth) and of_depth[deep] > before else before
            for of_depth, before in zip(values, highest, strict=True)
        ]
        worth = sum(highest) - price.step * deep
        if worth > best_worth:
            best, best_worth = deep, worth
    return [of_depth.index(max(of_depth[: best + 1])) for of_depth in values], best_worth


def _values(
    expected: Sequence[float], limit: int, standing: Sequence[float], entry: float, price: LonePrice
) -> list[float]:
    """What a depth of 0, 1, ... of one sequence is worth in tokens, passes not counted."""
    values, worth, reached, there, row = [0.0], -entry, 1.0, 1.0, price.row
    both = row + price.token
    for own, other in zip(expected[:limit], standing, strict=False):
        reached *= own if own > other else other
        there *= other
        worth += reached - both - (there - row if there > row else 0.0)
        values.append(worth)
    return values


def best_depths(values: Float64, step_cost: float) -> tuple[NDArray[np.int64], float]:
    """(depths [n], worth): best together, where each step costs once however many sequences take part.

    values [n, K + 1]: what a depth of 0, 1, ... is worth for each sequence.
    """
    deepest = values.shape[1]
    total = np.maximum.accumulate(values, axis=1).sum(axis=0) - step_cost * np.arange(deepest)
    steps = int(total.argmax())
    return values[:, : steps + 1].argmax(axis=1), float(total[steps])


def _teams(expected: Float64) -> Iterator[NDArray[np.bool_]]:
    """Who could draft for whom: masks [J, n]."""
    drafters, sequences, _ = expected.shape
    yield np.ones((drafters, sequences), bool)
    if drafters > 1:
        likeliest = expected.cumprod(axis=2).sum(axis=2).argmax(axis=0)
        yield np.arange(drafters)[:, None] == likeliest[None, :]
        for drafter in range(drafters):
            yield np.repeat(np.arange(drafters)[:, None] == drafter, sequences, axis=1)


def _depths_of(
    team: NDArray[np.bool_], expected: Float64, limits: Sequence[int], standing: Float64, market: Market
) -> tuple[NDArray[np.int64], float]:
    """The best depths of one team and their worth."""
    values = added_values(np.where(team[:, :, None], expected, 0.0), standing, market)
    values -= _side_by_side(team * market.token[:, None], market.serial)[:, None]
    if market.entry is not None:
        values[:, 0] -= _side_by_side(team * market.entry, market.serial)
    values[np.arange(values.shape[1]) >= np.asarray(limits)[:, None]] = -np.inf
    cumulated = np.concatenate((np.zeros((len(values), 1)), values.cumsum(axis=1)), axis=1)
    step_cost = float(_side_by_side(team.any(axis=1) * market.step, market.serial))
    return best_depths(cumulated, step_cost)


def added_values(expected: Float64, standing: Float64, market: Market) -> Float64:
    """Tokens gained at every position by drafting beside the standing draft, its own gain not counted: [n, K].

    A vote is taken to be as good as the likeliest of its drafts at every position.
    """
    reached = np.maximum(expected.max(axis=0), standing).cumprod(axis=1)
    gained_already = np.maximum(standing.cumprod(axis=1) - market.row, 0.0)
    return reached - market.row - gained_already


def _side_by_side(costs: Float64, serial: float) -> Float64:
    """What several costs [J, ...] come to: the largest, and of the others what does not run beside it."""
    largest = costs.max(axis=0)
    return largest + serial * (costs.sum(axis=0) - largest)
