"""What a verification of so many rows costs on this machine, measured at start and kept current by every step.

t(sequences, rows) = curve(rows) * scale(sequences): the curve is piecewise linear and never falls; the scale holds what
the number of sequences and their contexts add. Only ratios decide, so a machine that slows down as a whole changes
nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from outrider.speculation.timing import StepTiming
from outrider.types import Float64

KNOTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_ASSUMED_SLOPE = 0.08  # share of a one-row pass that each further row costs, where nothing was measured
_SLOWEST_LEARNING = 0.05
_DRAFT_MEMORY = 0.95  # share of old calls' evidence kept per step
_DAMPING = 1.001  # on the diagonal of the least squares
_INTRODUCTIONS = 3  # calls before a price is trusted
_FAR = 2.5  # factor by which a call is far above or below the usual price
_INSISTENT = 4  # so many calls in a row far above the price are the new price
_OUTLIER = 2.0  # one step moves an estimate by at most this factor


class CostTable:
    """Seconds of one forward pass by sequences and rows."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        assert len(rows) > 1, "a line needs two points"
        self._knots = list(rows)
        self._rows = np.asarray(rows, float)
        self._seconds = np.maximum.accumulate(np.asarray(seconds, float))
        self._scales: dict[int, float] = {}
        self._updates = 0

    @classmethod
    def measured(cls, measure: Callable[[int], float], rows: Sequence[int]) -> CostTable:
        """Measure passes of so many rows; `measure(rows)` gives seconds."""
        return cls(rows, [measure(count) for count in rows])

    @classmethod
    def assumed(cls, one_row_s: float = 1e-3) -> CostTable:
        """A mildly rising curve, to start from where nothing was measured; steps correct it."""
        return cls(KNOTS, [one_row_s * (1 + _ASSUMED_SLOPE * (rows - 1)) for rows in KNOTS])

    def time(self, sequences: int, rows: int) -> float:
        """Seconds of a pass of `rows` rows over `sequences` sequences."""
        right = min(max(bisect_left(self._knots, rows), 1), len(self._knots) - 1)
        low, high = self._knots[right - 1], self._knots[right]
        start, end = float(self._seconds[right - 1]), float(self._seconds[right])
        return (start + (end - start) * (rows - low) / (high - low)) * self._scales.get(_bucket(sequences), 1.0)

    def times(self, sequences: int, rows: int, count: int) -> Float64:
        """Seconds [count] of passes of rows, rows + 1, ... rows; beyond the last knot the last slope goes on."""
        wanted = np.arange(rows, rows + count, dtype=float)
        seconds = np.interp(wanted, self._rows, self._seconds)
        if wanted[-1] > self._rows[-1] and len(self._rows) > 1:
            slope = (self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2])
            seconds += slope * np.maximum(wanted - self._rows[-1], 0.0)
        return seconds * self._scales.get(_bucket(sequences), 1.0)

    def update(self, timing: StepTiming) -> None:
        """Learn from a step. A single outlier moves little."""
        if timing.verify_s <= 0 or timing.rows <= 0:
            return
        ratio = timing.verify_s / self.time(timing.sequences, timing.rows)
        if self._updates == 0:  # the first step sets the level
            self._seconds *= ratio
            ratio = 1.0
        self._updates += 1
        ratio = min(max(ratio, 1 / _OUTLIER), _OUTLIER)
        rate = max(_SLOWEST_LEARNING, 1 / (1 + self._updates))
        bucket = _bucket(timing.sequences)
        self._scales[bucket] = self._scales.get(bucket, 1.0) * ratio ** (rate / 2)
        self._bend(timing.rows, ratio ** (rate / 2))

    def _bend(self, rows: int, factor: float) -> None:
        """Move the knots around `rows`, nearer ones more."""
        right = int(np.searchsorted(self._rows, rows))
        if right >= len(self._rows) or self._rows[right] == rows:
            self._seconds[min(right, len(self._rows) - 1)] *= factor
        elif right > 0:
            share = (rows - self._rows[right - 1]) / (self._rows[right] - self._rows[right - 1])
            self._seconds[right - 1] *= factor ** (1 - share)
            self._seconds[right] *= factor**share
        np.maximum.accumulate(self._seconds, out=self._seconds)


@dataclass(frozen=True)
class Calls:
    """What a drafter did since the last step: passes one after another (deepest drafts), tokens in all, seconds."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Calls) -> Calls:
        return Calls(self.steps + other.steps, self.tokens + other.tokens, self.seconds + other.seconds)


class DraftCosts:
    """What drafting costs: seconds = per_step * steps + per_token * tokens, least squares over the latest calls.

    On an accelerator a step costs the same for few or many sequences; on a CPU tokens count.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._fits = {name: _Fit() for name in names}

    def of(self, name: str) -> tuple[float, float]:
        """(seconds per step, seconds per token); zeros before the first call."""
        return self._fits[name].solution

    def known(self, name: str) -> bool:
        """Whether enough calls were seen to trust the price; the first one usually computes a prompt."""
        return self._fits[name].calls >= _INTRODUCTIONS

    def update(self, calls: Mapping[str, Calls]) -> None:
        """Learn from what the drafters did since the last step."""
        for name, done in calls.items():
            if done.tokens:
                self._fits[name].learn(done)


class _Fit:
    """A non-negative least-squares fit of two coefficients, old calls fading.

    A call that caught up with a prompt, or with what was decoded while the drafter rested, is not the usual price:
    calls far above it are skipped unless they keep coming, and one far below shows that the fit was of such a call.
    """

    def __init__(self) -> None:
        self.solution = (0.0, 0.0)
        self.calls = 0
        self._above = 0  # calls in a row that were far above the price
        self._restart()

    def learn(self, done: Calls) -> None:
        self.calls += 1
        price = done.steps * self.solution[0] + done.tokens * self.solution[1]
        self._above = self._above + 1 if price and done.seconds > _FAR * price else 0
        if 0 < self._above < _INSISTENT:
            return
        if self._above or done.seconds < price / _FAR:
            self._restart()
        self._add(done.steps, done.tokens, done.seconds)
        self.solution = self._solve()

    def _restart(self) -> None:
        self._squares = (0.0, 0.0, 0.0)  # of steps, of steps x tokens, of tokens
        self._products = (0.0, 0.0)  # of steps x seconds, of tokens x seconds
        self._above = 0

    def _add(self, steps: int, tokens: int, seconds: float) -> None:
        self._squares = _faded(self._squares, (steps * steps, steps * tokens, tokens * tokens))
        self._products = _faded(self._products, (steps * seconds, tokens * seconds))

    def _solve(self) -> tuple[float, float]:
        """With a little damping, so that calls of one shape split the cost instead of dividing by zero."""
        (ss, st, tt), (sy, ty) = self._squares, self._products
        determinant = ss * tt * _DAMPING**2 - st * st
        step = (sy * tt * _DAMPING - ty * st) / determinant
        token = (ty * ss * _DAMPING - sy * st) / determinant
        if token < 0:
            return sy / ss, 0.0
        return (step, token) if step >= 0 else (0.0, ty / tt)


Numbers = TypeVar("Numbers", bound="tuple[float, ...]")


def _faded(past: Numbers, new: Numbers) -> Numbers:
    """Old evidence counts a little less."""
    return tuple(_DRAFT_MEMORY * a + b for a, b in zip(past, new, strict=True))  # type: ignore[return-value]


class RunningMean:
    """A mean that believes the first values at once and forgets old ones later."""

    __slots__ = ("_count", "value")

    def __init__(self, start: float) -> None:
        self.value, self._count = start, 0

    def learn(self, value: float) -> None:
        self._count += 1
        self.value += max(0.1, 1 / self._count) * (value - self.value)


def _bucket(sequences: int) -> int:
    return max(sequences, 1).bit_length()
