"""Sinks and the most recent entries: the selector that looks at nothing (StreamingLLM's pattern, true positions)."""

from __future__ import annotations

import numpy as np

from outrider.memory.select.base import Share, View, group_count
from outrider.types import Float32, Int32


class WindowSelector:
    """Later entries score higher, so the whole budget behind the sinks becomes the window."""

    name = "window"
    weighs = False
    unit = 1
    taps: tuple[int, ...] = ()

    def __init__(self, groups: Int32, kv_heads: int) -> None:
        self.groups = groups
        self._kv_heads = kv_heads

    def score(self, view: View, share: Share = map) -> Float32:
        recency = np.arange(view.length, dtype=np.float32)
        return np.broadcast_to(recency, (group_count(self.groups), self._kv_heads, view.length))
