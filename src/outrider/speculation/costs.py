"""What a verification of so many rows costs on this machine, measured at start and kept current by every step.

t(sequences, rows) = curve(rows) * scale(sequences): the curve is piecewise linear and never falls; the scale holds what
the number of sequences and their contexts add. Only ratios decide, so a machine that slows down as a whole changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from outrider.speculation.timing import StepTiming
from outrider.speculation.trial import Trial
from outrider.types import Float64

KNOTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_ASSUMED_SLOPE = 0.08  # share of a one-row pass that each further row costs, where nothing was measured
_SLOWEST_LEARNING = 0.05
_OUTLIER = 2.0  # one step moves an estimate by at most this factor


class CostTable:
    """Seconds of one forward pass by sequences and rows."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        self._rows = np.asarray(rows, float)
        self._seconds = np.maximum.accumulate(np.asarray(seconds, float))
        self._scales: dict[int, float] = {}
        self._updates = 0

    @classmethod
    def measured(cls, measure: Callable[[int], float], most: int) -> CostTable:
        """Measure every knot up to `most` rows; `measure(rows)` gives seconds."""
        rows = [knot for knot in KNOTS if knot <= most]
        return cls(rows, [measure(count) for count in rows])

    @classmethod
    def assumed(cls, one_row_s: float = 1e-3) -> CostTable:
        """A mildly rising curve, to start from where nothing was measured; steps correct it."""
        return cls(KNOTS, [one_row_s * (1 + _ASSUMED_SLOPE * (rows - 1)) for rows in KNOTS])

    def time(self, sequences: int, rows: int) -> float:
        """Seconds of a pass of `rows` rows over `sequences` sequences."""
        return float(self.times(sequences, rows, 1)[0])

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


class DraftCosts:
    """Seconds that one drafted token of each drafter costs, running mean."""

    def __init__(self, names: Sequence[str]) -> None:
        self._per_token: dict[str, float | None] = dict.fromkeys(names)

    def per_token(self, name: str) -> float:
        """Seconds per token; 0 before the first measurement."""
        return self._per_token[name] or 0.0

    def update(self, trials: Sequence[Trial], draft_s: Mapping[str, float]) -> None:
        """Share what a drafter took in a step among the tokens it proposed; a draft without tokens counts as one."""
        for name, seconds in draft_s.items():
            tokens = sum(max(1, len(trial.proposals[name])) for trial in trials if name in trial.proposals)
            if tokens:
                self._learn(name, seconds / tokens)

    def _learn(self, name: str, seconds: float) -> None:
        past = self._per_token[name]
        if past is None:
            self._per_token[name] = seconds
        else:  # a call that caught up with a long prompt must not count as the usual price
            self._per_token[name] = 0.9 * past + 0.1 * min(seconds, _OUTLIER * past + 1e-6)


def _bucket(sequences: int) -> int:
    return max(sequences, 1).bit_length()
