"""The compiled sampling loops again, in plain numpy: slow, short, and what the tests hold the fast ones to."""

from __future__ import annotations

import numpy as np

from outrider.sampling.race import uniform
from outrider.types import Float32, Float64


def probabilities(
    logits: Float32, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> Float64:
    """p [V]: temperature, min-p, top-k, top-p, normalised (see `race.probabilities`)."""
    x = logits.astype(np.float64)
    x[vocab_size:] = -np.inf
    with np.errstate(invalid="ignore"):
        weights = np.exp((x - x.max()) / temperature)
    weights[weights < min_p] = 0.0
    if 0 < top_k < vocab_size:
        weights[x < np.sort(x)[-top_k]] = 0.0
    above = np.array([weights[x > value].sum() for value in x])
    if top_p < 1.0:
        weights[above >= top_p * weights.sum()] = 0.0
    return weights / weights.sum()


def race(p: Float64, key: np.uint64) -> int:
    """The first arrival of an exponential race over the support of p."""
    support = np.flatnonzero(p > 0)
    arrivals = [-np.log(uniform(key, int(token))) / p[token] for token in support]
    return int(support[np.argmin(arrivals)])
