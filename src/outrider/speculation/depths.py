"""Who of the costly drafters drafts for which sequence, and how deep: what drafts add against what they cost.

All values are in tokens: so many seconds are worth the tokens that the engine gains in that time. Three kinds of teams
are compared: all drafters together (a crowd pays where they run side by side), every sequence with its likeliest one
(routing), and each drafter alone. The best team wins if it beats drafting nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
