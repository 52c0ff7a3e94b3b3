"""How often a match of a given length was right: the confidence of drafters that look things up.

Two running rates per match length: was the first token right, and was a later token right given that all before it
were. Both start from a weak prior that grows with the length, and old evidence fades.
"""

from __future__ import annotations

from collections.abc import Sequence

_PRIOR_WEIGHT = 4.0  # prior counts as this many observations
_MEMORY = 0.995  # share of old evidence kept per observation
_LONGEST = 16  # longer matches share one rate


class HitRates:
    """Decayed success rates by match length; `confidence` states them for a draft of any depth."""

    def __init__(self) -> None:
        self._first = [_prior(0.1 + 0.12 * n) for n in range(_LONGEST + 1)]
        self._later = [_prior(0.55 + 0.06 * n) for n in range(_LONGEST + 1)]

    def learn(self, length: int, guess: Sequence[int], truth: Sequence[int]) -> None:
        """Count a guess that came from a match of `length` tokens, verified or not, against what was said instead."""
        slot, seen = min(length, _LONGEST), min(len(guess), len(truth))
        if seen == 0:
            return
        right = next((i for i in range(seen) if guess[i] != truth[i]), seen)
        _count(self._first[slot], float(right > 0), 1.0)
        tried = min(right + 1, seen) - 1
        if tried > 0:
            _count(self._later[slot], float(right - 1), float(tried))

    def confidence(self, length: int, depth: int) -> tuple[float, ...]:
        """Probability of each of `depth` tokens given that all before it are right."""
        slot = min(length, _LONGEST)
        first, later = self._first[slot], self._later[slot]
        return (first[0] / first[1], *[later[0] / later[1]] * (depth - 1))


def _prior(rate: float) -> list[float]:
    return [min(rate, 0.95) * _PRIOR_WEIGHT, _PRIOR_WEIGHT]


def _count(rate: list[float], hits: float, tries: float) -> None:
    rate[0] = rate[0] * _MEMORY + hits
    rate[1] = rate[1] * _MEMORY + tries
