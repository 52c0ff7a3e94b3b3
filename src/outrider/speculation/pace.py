"""How fast tokens come lately, and how many a sequence gains until it ends: what a second and a start are worth."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.costs import RunningMean
from outrider.speculation.trial import Trial


class Throughput:
    """Tokens per second lately: what a second is worth."""

    def __init__(self) -> None:
        self._tokens, self._seconds = 0.0, 0.0

    def count(self, tokens: int, seconds: float) -> None:
        """One step gained so many tokens."""
        self._tokens = 0.95 * self._tokens + tokens
        self._seconds = 0.95 * self._seconds + seconds

    def per_second(self, sequences: int, plain_s: float) -> float:
        """Tokens per second, at least what plain decoding would give."""
        plain = sequences / plain_s
        return max(plain, self._tokens / self._seconds) if self._seconds > 0 else plain


class Lives:
    """How many tokens sequences gain until they end, on average."""

    def __init__(self, guess: float) -> None:
        self._gained: dict[int, int] = {}
        self._mean = RunningMean(guess)

    @property
    def mean(self) -> float:
        """Tokens gained per life."""
        return self._mean.value

    def count(self, trials: Sequence[Trial]) -> None:
        """Sequences gained tokens."""
        for trial in trials:
            self._gained[trial.sequence_id] = self._gained.get(trial.sequence_id, 0) + len(trial.truth)

    def end(self, sequence_id: int) -> None:
        """One ended."""
        gained = self._gained.pop(sequence_id, 0)
        if gained:
            self._mean.learn(float(gained))
