"""Measures of an evaluation that compare runs: agreement, captured attention, overlap of selections."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.memory.select.oracle import captured_mass
from outrider.types import Float32, Int32


def agreement(reference: Sequence[int], tokens: Sequence[int]) -> dict[str, float]:
    """How far an output follows its reference: share of equal positions, and of the prefix before the first change."""
    size = max(len(reference), len(tokens))
    if size == 0:
        return {"equal": 1.0, "prefix": 1.0}
    pairs = list(zip(reference, tokens, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return {"equal": sum(a == b for a, b in pairs) / size, "prefix": first / size}


def overlap(last: Int32, now: Int32) -> float:
    """Share of `now` [G, KV heads, n] that `last` [G, KV heads, m] held: 1 means that nothing had to move."""
    shares = [
        np.isin(now[g, h], last[g, h], assume_unique=True).mean() for g in range(len(now)) for h in range(now.shape[1])
    ]
    return float(np.mean(shares))


def captured_by_layer(queries: Float32, keys: Float32, entries: Int32, groups: Int32) -> Float32:
    """Captured attention mass [L], mean over query heads.

    queries [L, heads, D] of one row; keys [L, n, KV heads, D] up to and with that row; entries [G, KV heads, count].
    """
    layers = range(len(groups))
    means = [captured_mass(queries[layer], keys[layer], entries[groups[layer]]).mean() for layer in layers]
    return np.asarray(means, np.float32)
