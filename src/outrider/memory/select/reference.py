"""Selection in plain numpy: the meaning of kernels.py, its oracle in tests, and a fallback to read first."""

from __future__ import annotations

import numpy as np

from outrider.types import Float32, Int32


def choose_entries(scores: Float32, unit: int, length: int, keep: int, sinks: int, window: int) -> Int32:
    """Exactly min(keep, length) ascending entries of one row of scores [ceil(length / unit)].

    Sinks and window always; then whole units between them, best first and later ones first among equals. The last unit
    gives only its latest entries where it would pass the budget; where partial units leave room, the entries nearest
    to the window fill it.
    """
    low = min(sinks, length)
    high = max(low, length - window)
    want = keep - low - (length - high)
    chosen = np.zeros(length, bool)
    chosen[:low] = chosen[high:] = True
    if want > 0:
        spans = [(max(low, u * unit), min(high, (u + 1) * unit)) for u in range(low // unit, (high - 1) // unit + 1)]
        values = [-np.inf if np.isnan(scores[start // unit]) else scores[start // unit] for start, _ in spans]
        order = sorted(range(len(spans)), key=lambda u: (-values[u], -u))
        taken = order[: -(-want // unit)]
        for u in taken:
            chosen[slice(*spans[u])] = True
        surplus = sum(spans[u][1] - spans[u][0] for u in taken) - want
        worst = spans[min(u for u in taken if values[u] == values[taken[-1]])]
        if surplus > 0:
            chosen[worst[0] : worst[0] + surplus] = False
        rest = [e for e in range(high - 1, low - 1, -1) if not chosen[e]]
        chosen[rest[: max(0, -surplus)]] = True
    return np.flatnonzero(chosen).astype(np.int32)


def softmax(logits: Float32) -> Float32:
    """Softmax over the last axis."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def page_bounds(keys: Float32, page_size: int) -> tuple[Float32, Float32]:
    """Minima and maxima [pages, H, D] of contiguous keys [n, H, D]."""
    cuts = range(0, len(keys), page_size)
    low = np.stack([keys[at : at + page_size].min(0) for at in cuts])
    return low, np.stack([keys[at : at + page_size].max(0) for at in cuts])


def page_mass(queries: Float32, low: Float32, high: Float32, tightness: float = 1.0) -> Float32:
    """Estimated mass [H, pages] for scaled queries [heads, D] of one layer and bounds [pages, H, D]."""
    grouped = queries.reshape(low.shape[1], -1, queries.shape[-1])
    middle = np.einsum("had,phd->hap", grouped, (low + high) / 2)
    spread = np.einsum("had,phd->hap", np.abs(grouped), (high - low) / 2)
    return softmax(middle + tightness * spread).sum(1)


def attention_weights(queries: Float32, keys: Float32) -> Float32:
    """softmax(q K^T / sqrt(d)) [heads, n] for queries [heads, D] and keys [n, H, D] of the KV heads."""
    heads, dim = queries.shape
    grouped = queries.reshape(keys.shape[1], -1, dim) / np.sqrt(dim)
    return softmax(np.einsum("had,nhd->han", grouped, keys)).reshape(heads, -1)
