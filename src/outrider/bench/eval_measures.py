"""Measures of an evaluation that compare runs: perplexity, agreement, captured attention, overlap of selections."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.memory.select.oracle import captured_mass
from outrider.types import Float32, Int32


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean negative log probability (natural logarithms)."""
    if not logprobs:
        raise ValueError("perplexity of no tokens")
    return math.exp(-sum(logprobs) / len(logprobs))


def prose_windows(tokens: Sequence[int], length: int, scored: int, windows: int) -> list[tuple[list[int], list[int]]]:
    """(context, continuation) pairs spread evenly over a long text: `scored` tokens after `length` others."""
    need = length + scored
    if len(tokens) < need:
        raise ValueError(f"{len(tokens)} tokens for windows of {need}")
    step = (len(tokens) - need) // max(1, windows - 1) if windows > 1 else 0
    starts = [i * step for i in range(windows)]
    return [(list(tokens[s : s + length]), list(tokens[s + length : s + need])) for s in starts]


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
