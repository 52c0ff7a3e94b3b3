"""Counts what selections read, for reports."""

from __future__ import annotations

import numpy as np

from outrider.memory.report import ContextReport
from outrider.types import Int32, Reads


class Tally:
    """Sums over the steps of all sequences."""

    def __init__(self) -> None:
        self._sparse = self._full = self._read = self._known = 0
        self._shares: dict[str, tuple[float, int]] = {"captured": (0.0, 0), "overlap": (0.0, 0)}

    def add(self, reads: Reads) -> None:
        """Count one step of one sequence."""
        full = reads.entries == reads.length
        self._full += full
        self._sparse += not full
        self._read += reads.entries
        self._known += reads.length
        for name, (total, count) in self._shares.items():
            share = getattr(reads, name)
            if share is not None:
                self._shares[name] = (total + share, count + 1)

    def report(self, mode: str, selector: str, budget: int, select_s: float, selector_bytes: int) -> ContextReport:
        """The record so far."""
        means = {name: total / count if count else None for name, (total, count) in self._shares.items()}
        return ContextReport(
            mode=mode,
            selector=selector,
            budget=budget,
            sparse_steps=self._sparse,
            full_steps=self._full,
            read_entries=self._read,
            known_entries=self._known,
            select_s=select_s,
            selector_bytes=selector_bytes,
            captured=means["captured"],
            overlap=means["overlap"],
        )


def share_kept(last: Int32, now: Int32, length: int) -> float:
    """Share of `now` that is in `last` too; both [G, KV heads, n] entries below `length`."""
    held = np.zeros((*now.shape[:2], length), np.bool_)
    np.put_along_axis(held, last, True, axis=2)
    return float(np.take_along_axis(held, now, axis=2).mean())
