"""Preferences: none, or for what the last step chose, which cuts traffic."""

from __future__ import annotations

import numpy as np

from outrider.errors import ConfigError
from outrider.memory.select.base import View
from outrider.memory.select.kernels import mark_held
from outrider.types import Float32, Int32


class Fresh:
    """Every step anew."""

    def favour(self, view: View, unit: int, scores: Float32) -> Float32:
        return scores

    def settle(self, view: View, unit: int, entries: Int32) -> None:
        """Nothing is remembered."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is held."""


class Sticky:
    """An entry stays unless a newcomer's estimated mass is exp(margin) times its own.

    Beside cutting traffic it averages over steps: on the calibration texts it captures slightly more at margin 1 than
    a fresh choice does.
    """

    def __init__(self, margin: float = 1.0) -> None:
        if margin < 0:
            raise ConfigError(f"sticky = {margin} is refused; use 0 (not sticky) or more nats", "sticky")
        self._margin = np.float32(margin)
        self._held: dict[int, np.ndarray] = {}

    def favour(self, view: View, unit: int, scores: Float32) -> Float32:
        held = self._held.get(view.sequence_id)
        if held is None:
            return scores
        favoured = np.array(scores)
        units = min(held.shape[2], scores.shape[2])
        favoured[:, :, :units] += self._margin * held[:, :, :units]
        return favoured

    def settle(self, view: View, unit: int, entries: Int32) -> None:
        held = np.empty((*entries.shape[:2], -(-view.length // unit)), np.bool_)
        mark_held(entries, unit, held)
        self._held[view.sequence_id] = held

    def forget(self, sequence_id: int) -> None:
        self._held.pop(sequence_id, None)
