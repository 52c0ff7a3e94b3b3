"""What a verification of so many rows costs on this machine, measured at start and kept current by every step.

t(sequences, rows) = curve(rows) * scale(sequences): the curve is piecewise linear and never falls; the scale holds what
the number of sequences and their contexts add. Only ratios decide, so a machine that slows down as a whole changes
nothing. What drafting costs is in prices.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from outrider.speculation.timing import StepTiming

KNOTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_ASSUMED_SLOPE = 0.08  # share of a one-row pass that each further row costs, where nothing was measured
_SLOWEST_LEARNING = 0.05
_OUTLIER = 2.0  # one step moves an estimate by at most this factor


class CostTable:
    """Seconds of one forward pass by sequences and rows. Plain lists: NumPy costs more than it saves on a few knots."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        assert len(rows) > 1, "a line needs two points"
        self._knots = list(rows)
        self._seconds = list(accumulate(map(float, seconds), max))
        self._scales: dict[int, float] = {}
        self._updates = 0
        self._told: dict[tuple[int, int], float] = {}  # times since the last update

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
        told = self._told.get((sequences, rows))
        if told is None:
            told = self._told[sequences, rows] = self._interpolated(sequences, rows)
        return told

    def _interpolated(self, sequences: int, rows: int) -> float:
        right = self._right_of(rows)
        low, start = self._knots[right - 1], self._seconds[right - 1]
        slope = (self._seconds[right] - start) / (self._knots[right] - low)
        return (start + slope * (rows - low)) * self._scales.get(_bucket(sequences), 1.0)

    def times(self, sequences: int, rows: int, count: int) -> list[float]:
        """Seconds of passes of rows, rows + 1, ... (`count` of them); beyond the last knot the last slope goes on."""
        scale, right = self._scales.get(_bucket(sequences), 1.0), self._right_of(rows)
        last, wanted, end = len(self._knots) - 1, rows, rows + count
        result: list[float] = []
        while wanted < end:
            low, start = self._knots[right - 1], self._seconds[right - 1]
            slope = (self._seconds[right] - start) / (self._knots[right] - low)
            until = end if right == last else min(end, self._knots[right] + 1)
            result += [(start + slope * (row - low)) * scale for row in range(wanted, until)]
            wanted, right = max(wanted, until), min(right + 1, last)
        return result

    def update(self, timing: StepTiming) -> None:
        """Learn from a step. A single outlier moves little."""
        if timing.verify_s <= 0 or timing.rows <= 0:
            return
        ratio = timing.verify_s / self.time(timing.sequences, timing.rows)
        self._told.clear()
        if self._updates == 0:  # the first step sets the level
            self._seconds = [seconds * ratio for seconds in self._seconds]
            ratio = 1.0
        self._updates += 1
        ratio = min(max(ratio, 1 / _OUTLIER), _OUTLIER)
        rate = max(_SLOWEST_LEARNING, 1 / (1 + self._updates))
        bucket = _bucket(timing.sequences)
        self._scales[bucket] = self._scales.get(bucket, 1.0) * ratio ** (rate / 2)
        self._bend(timing.rows, ratio ** (rate / 2))

    def _right_of(self, rows: int) -> int:
        """The knot at or right of a number of rows, but never the first one."""
        return min(max(bisect_left(self._knots, rows), 1), len(self._knots) - 1)

    def _bend(self, rows: int, factor: float) -> None:
        """Move the knots around `rows`, nearer ones more; the curve never falls."""
        right = self._right_of(rows)
        low, high = self._knots[right - 1], self._knots[right]
        share = min(max((rows - low) / (high - low), 0.0), 1.0)
        self._seconds[right - 1] *= factor ** (1 - share)
        self._seconds[right] *= factor**share
        for knot in range(max(right - 1, 1), len(self._knots)):
            if self._seconds[knot] >= self._seconds[knot - 1]:
                if knot > right:
                    break  # what lies behind has not moved
            else:
                self._seconds[knot] = self._seconds[knot - 1]


class RunningMean:
    """A mean that believes the first values at once and forgets old ones later."""

    __slots__ = ("_count", "value")

    def __init__(self, start: float) -> None:
        self.value, self._count = start, 0

    def learn(self, value: float, weight: float = 0.1) -> None:
        """One more value; `weight` is the least that it has."""
        self._count += 1
        self.value += max(weight, 1 / self._count) * (value - self.value)


def _bucket(sequences: int) -> int:
    return max(sequences, 1).bit_length()
