"""From scores to a Selection: what is always read, the budget, and when not to select at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.memory.select.base import Preference, Selector, Share, View, group_count
from outrider.memory.select.kernels import choose_rows, share_mass
from outrider.memory.select.sticky import Fresh
from outrider.types import Float32, Int32, Selection


class Chooser:
    """Turns one selector's scores into the Selection of a step.

    A sequence that fits its budget, or about which the selector cannot tell yet, reads everything (counts -1).
    """

    def __init__(
        self, selector: Selector, kv_heads: int, sinks: int, window: int, preference: Preference | None = None
    ) -> None:
        self.selector = selector
        self.kv_heads = kv_heads
        self.sinks = sinks
        self.window = window
        self._preference = preference or Fresh()

    def select(self, views: Sequence[View]) -> Selection | None:
        """The entries each sequence reads, or None where all of them read everything: exactly full attention."""
        return self.join([self.choose(view) for view in views])

    def join(self, chosen: Sequence[Int32 | None]) -> Selection | None:
        """One Selection of what was chosen for each sequence."""
        if all(entries is None for entries in chosen):
            return None
        groups = group_count(self.selector.groups)
        width = max(entries.shape[2] for entries in chosen if entries is not None)
        entries = np.zeros((groups, len(chosen), self.kv_heads, width), np.int32)
        counts = np.full((groups, len(chosen), self.kv_heads), -1, np.int32)
        for s, rows in enumerate(chosen):
            if rows is not None:
                entries[:, s, :, : rows.shape[2]] = rows
                counts[:, s] = rows.shape[2]
        return Selection(entries, counts, self.selector.groups)

    def choose(self, view: View) -> Int32 | None:
        """Entries [G, KV heads, keep] of one sequence, or None for everything."""
        return self.choose_scored(view)[0]

    def choose_scored(self, view: View, share: Share = map) -> tuple[Int32 | None, Float32 | None]:
        """`choose`, and the scores it went by, for `captured`."""
        keep = self.keep(view)
        scores = self.selector.score(view, share) if view.length > keep else None
        if scores is None:
            return None, None
        unit = self.selector.unit
        rows = np.empty((*scores.shape[:2], keep), np.int32)
        favoured = self._preference.favour(view, unit, scores)
        choose_rows(favoured, unit, view.length, keep, self.sinks, self.window, rows)
        self._preference.settle(view, unit, rows)
        return rows, scores

    def captured(self, view: View, entries: Int32 | None, scores: Float32 | None) -> float:
        """Share of the attention mass that the selector believes `entries` to hold; 1 where it cannot tell.

        The smallest share of any layer group, averaged over KV heads: the number that decides about a full step.
        """
        if entries is None or scores is None or not self.selector.weighs:
            return 1.0
        return float(share_mass(scores, self.selector.unit, view.length, entries).mean(1).min())

    def keep(self, view: View) -> int:
        """Committed entries that the budget leaves room for. Sinks and window are never given up."""
        return max(view.budget - view.block, self.sinks + self.window)

    def forget(self, sequence_id: int) -> None:
        """The sequence ended."""
        self._preference.forget(sequence_id)
