"""Log-probabilities of tokens under the target, before any sampling parameter: for outputs and for prompts."""

from __future__ import annotations

import numpy as np

from outrider.types import Float32, Logprob


def logprob(logits: Float32, token: int, top: int, vocab_size: int | None = None) -> Logprob:
    """log softmax(logits)[token] with its rank (1 is best) and the `top` best tokens.

    logits: the target's raw row [V]. Equal logits rank by token id. The softmax runs over the whole row; ids from
    `vocab_size` on (padding of the LM head) are never listed, as no text can stand for them.
    """
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    real = row[:vocab_size]
    rank = 1 + int((real > row[token]).sum()) + int((real[:token] == row[token]).sum())
    best = _best(real, top)
    return Logprob(token, float(row[token]), rank, tuple((int(i), float(real[i])) for i in best))


def _best(row: np.ndarray, count: int) -> np.ndarray:
    """The `count` greatest entries, greatest first, ties by index."""
    count = min(count, len(row))
    if not count:
        return np.empty(0, np.int64)
    smallest = np.partition(row, -count)[-count]
    candidates = np.flatnonzero(row >= smallest)
    return candidates[np.argsort(-row[candidates], kind="stable")][:count]
