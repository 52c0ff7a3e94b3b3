"""From scores to a Selection: what is always read, the budget, and when not to select at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.memory.select.base import Selector, View, group_count
from outrider.memory.select.kernels import choose_rows
from outrider.types import Int32, Selection


class Chooser:
    """Turns one selector's scores into the Selection of a step.

    A sequence that fits its budget, or about which the selector cannot tell yet, reads everything (counts -1).
    """

    def __init__(self, selector: Selector, kv_heads: int, sinks: int, window: int) -> None:
        self.selector = selector
        self.kv_heads = kv_heads
        self.sinks = sinks
        self.window = window

    def select(self, views: Sequence[View]) -> Selection | None:
        """The entries each sequence reads, or None where all of them read everything: exactly full attention."""
        chosen = [self._choose(view) for view in views]
        if all(entries is None for entries in chosen):
            return None
        groups = group_count(self.selector.groups)
        width = max(entries.shape[2] for entries in chosen if entries is not None)
        entries = np.zeros((groups, len(views), self.kv_heads, width), np.int32)
        counts = np.full((groups, len(views), self.kv_heads), -1, np.int32)
        for s, rows in enumerate(chosen):
            if rows is not None:
                entries[:, s, :, : rows.shape[2]] = rows
                counts[:, s] = rows.shape[2]
        return Selection(entries, counts, self.selector.groups)

    def keep(self, view: View) -> int:
        """Committed entries that the budget leaves room for. Sinks and window are never given up."""
        return max(view.budget - view.block, self.sinks + self.window)

    def forget(self, sequence_id: int) -> None:
        """The sequence ended."""
        self.selector.forget(sequence_id)

    def _choose(self, view: View) -> Int32 | None:
        """Entries [G, H, keep] of one sequence, or None for everything."""
        keep = self.keep(view)
        if view.length <= keep:
            return None
        scores = self.selector.score(view)
        if scores is None:
            return None
        rows = np.empty((*scores.shape[:2], keep), np.int32)
        choose_rows(scores, self.selector.unit, view.length, keep, self.sinks, self.window, rows)
        self.selector.settle(view, rows)
        return rows
