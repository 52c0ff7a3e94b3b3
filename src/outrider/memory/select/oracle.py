"""The best that any selector could do, from the exact attention of the step itself: for evaluation only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outrider.memory.select.base import Share, View, group_count
from outrider.memory.select.reference import attention_weights
from outrider.types import Float32, Int32

#: The step's own queries [L, heads, D] and the keys [L, n, KV heads, D] of its committed entries, all rotated.
Look = Callable[[View], tuple[Float32, Float32]]


class OracleSelector:
    """Scores every entry by the target's own attention mass, averaged over the layers and query heads that share it."""

    name = "oracle"
    weighs = True
    unit = 1
    taps: tuple[int, ...] = ()

    def __init__(self, look: Look, groups: Int32) -> None:
        self._look = look
        self.groups = groups

    def score(self, view: View, share: Share = map) -> Float32:
        queries, keys = self._look(view)
        kv_heads = keys.shape[2]
        mass = np.zeros((group_count(self.groups), kv_heads, view.length), np.float32)
        for layer, group in enumerate(self.groups):
            weights = attention_weights(queries[layer], keys[layer])
            mass[group] += weights.reshape(kv_heads, -1, view.length).sum(1)
        return np.log(mass + np.float32(1e-30))


def captured_mass(queries: Float32, keys: Float32, entries: Int32) -> Float32:
    """Share of one layer's attention that a selection reads, per query head [heads].

    queries [heads, D] and keys [n, KV heads, D], where keys end with the row's own; entries [KV heads, count].
    The row's own key always counts as read.
    """
    weights = attention_weights(queries, keys)
    alpha = len(weights) // len(entries)
    shares = [weights[head, entries[head // alpha]].sum() + weights[head, -1] for head in range(len(weights))]
    return np.asarray(shares, np.float32)
