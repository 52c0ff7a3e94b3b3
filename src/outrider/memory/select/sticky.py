"""A wrapper that cuts traffic: an entry stays unless a newcomer beats it by a margin."""

from __future__ import annotations

import numpy as np

from outrider.errors import ConfigError
from outrider.memory.select.base import Selector, View
from outrider.memory.select.kernels import mark_held
from outrider.types import Float32, Int32


class StickySelector:
    """Adds `margin` nats to the score of what the last step chose: a newcomer needs exp(margin) times its mass."""

    def __init__(self, inner: Selector, margin: float = 1.0) -> None:
        if margin < 0:
            raise ConfigError(f"margin = {margin} is refused; use 0 (not sticky) or more nats", "margin")
        self._inner = inner
        self._margin = np.float32(margin)
        self._held: dict[int, np.ndarray] = {}
        self.name = f"sticky {inner.name}"
        self.unit = inner.unit
        self.groups = inner.groups
        self.taps = inner.taps

    def score(self, view: View) -> Float32 | None:
        scores = self._inner.score(view)
        held = self._held.get(view.sequence_id)
        if scores is None or held is None:
            return scores
        favoured = np.array(scores)
        units = min(held.shape[2], scores.shape[2])
        favoured[:, :, :units] += self._margin * held[:, :, :units]
        return favoured

    def settle(self, view: View, entries: Int32) -> None:
        held = np.empty((*entries.shape[:2], -(-view.length // self.unit)), np.bool_)
        mark_held(entries, self.unit, held)
        self._held[view.sequence_id] = held
        self._inner.settle(view, entries)

    def forget(self, sequence_id: int) -> None:
        self._held.pop(sequence_id, None)
        self._inner.forget(sequence_id)
