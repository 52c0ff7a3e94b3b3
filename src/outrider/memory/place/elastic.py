"""Elastic loading: of a step's selection, only what the last step did not have is loaded.

SpeContext, section on elastic loading: load = S_now - S_last goes into the slots that evict = S_last - S_now frees, in
place. The difference is taken once per step; every slow layer of the group uses it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from outrider.errors import CapacityError
from outrider.types import Int32


class Change(NamedTuple):
    """How one step's selection is laid out: where every entry is, and which ones must be loaded to be there."""

    rows: Int32  # [KV heads, n] row of entries[h, i]
    heads: Int32  # [m] what to load ...
    entries: Int32  # [m]
    new_rows: Int32  # [m] ... and into which row


class Elastic:
    """What one sequence has in the buffer rows of one layer group. Rows 0 .. capacity - 1, per KV head."""

    def __init__(self, kv_heads: int, capacity: int) -> None:
        self.capacity = capacity
        self.entries = np.empty((kv_heads, 0), np.int32)  # ascending
        self.rows = np.empty((kv_heads, 0), np.int32)

    def update(self, entries: Int32) -> Change:
        """Make the buffer hold `entries` [KV heads, n], ascending per head. CapacityError beyond the capacity."""
        heads, count = entries.shape
        if count > self.capacity:
            raise CapacityError(f"{count} selected entries for a buffer of {self.capacity}; lower the budget")
        rows = np.empty((heads, count), np.int32)
        fresh = np.empty((3, heads * count), np.int32)
        loads = take_difference(self.entries, self.rows, np.ascontiguousarray(entries), self.capacity, rows, fresh)
        self.entries, self.rows = entries, rows
        return Change(rows, *fresh[:, :loads])

    def append(self, entries: Int32) -> Int32:
        """Make room for `entries` [n] that follow all others and are at hand; returns their rows [KV heads, n].

        Where that is too much, the earliest of the others go.
        """
        heads, held = self.entries.shape
        if held + len(entries) <= self.capacity:
            self.entries, self.rows = put_behind(self.entries, self.rows, entries, self.capacity)
            return self.rows[:, held:]
        whole = np.concatenate([self.entries, np.broadcast_to(entries, (heads, len(entries)))], axis=1)
        change = self.update(whole[:, -self.capacity :])
        return change.rows[:, -len(entries) :] if len(entries) else change.rows[:, :0]

    def find(self, entries: Int32) -> Int32:
        """Rows [KV heads, n] of entries that are held by every head. KeyError where one is not."""
        rows = np.empty((len(self.entries), len(entries)), np.int32)
        for head, (held, places) in enumerate(zip(self.entries, self.rows, strict=True)):
            at = np.searchsorted(held, entries)
            if len(entries) and (at[-1] >= len(held) or (held[at] != entries).any()):
                raise KeyError(f"entries {entries[0]} .. {entries[-1]} are not all in the buffer")
            rows[head] = places[at]
        return rows


class Resident:
    """One sequence's share of the buffers: a region, and per layer group which entry is in which row."""

    def __init__(self, region: int, length: int, groups: int, kv_heads: int, capacity: int) -> None:
        self.region, self.length = region, length
        self.first = 0  # of its rows in the pass
        self.peak = 0  # rows that were ever in use
        self.loaded_bytes = self.stored_bytes = 0
        self.groups = [Elastic(kv_heads, capacity) for _ in range(groups)]


@njit(cache=True, nogil=True)
def put_behind(entries, rows, new, capacity):
    """Entries and rows [KV heads, n] with `new` entries behind them, in free rows in ascending order."""
    heads, held = entries.shape
    all_entries = np.empty((heads, held + new.shape[0]), np.int32)
    all_rows = np.empty_like(all_entries)
    used = np.empty(capacity, np.bool_)
    for h in range(heads):
        used[:] = False
        for i in range(held):
            all_entries[h, i], all_rows[h, i] = entries[h, i], rows[h, i]
            used[rows[h, i]] = True
        free = 0
        for i in range(new.shape[0]):
            while used[free]:
                free += 1
            used[free] = True
            all_entries[h, held + i], all_rows[h, held + i] = new[i], free
    return all_entries, all_rows


@njit(cache=True, nogil=True)
def take_difference(last, last_rows, now, capacity, rows, fresh):
    """Rows of `now`: those of `last` where an entry is in both, else free rows in ascending order.

    Writes (head, entry, row) of every newcomer to `fresh` [3, ...]; returns how many there are.
    """
    loads = 0
    used = np.empty(capacity, np.bool_)
    for h in range(now.shape[0]):
        used[:] = False
        at = 0
        for i in range(now.shape[1]):
            while at < last.shape[1] and last[h, at] < now[h, i]:
                at += 1
            if at < last.shape[1] and last[h, at] == now[h, i]:
                rows[h, i] = last_rows[h, at]
                used[rows[h, i]] = True
            else:
                rows[h, i] = -1
        free = 0
        for i in range(now.shape[1]):
            if rows[h, i] < 0:
                while used[free]:
                    free += 1
                used[free] = True
                rows[h, i] = free
                fresh[0, loads], fresh[1, loads], fresh[2, loads] = h, now[h, i], free
                loads += 1
    return loads
