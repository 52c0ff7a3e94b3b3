"""A row's list of entries: the committed ones of its sequence (all, or those selected), then those of its own pass."""

from __future__ import annotations

import numpy as np

from outrider.kernels.cpu.machine import compiled, i32, i64, u64


@compiled
def pool_row(s, slot, head, heads):
    """Index of a (slot, KV head) among the rows of [pages, heads, page_size, dim]."""
    return (slot // s.page_size * heads + head) * s.page_size + slot % s.page_size


@compiled
def committed(s, sequence, head, number):
    """How many committed entries a KV head of a sequence reads in layer `number`, and the list's address (0: all)."""
    if s.selected != 0:
        group = np.int64(i32(s.groups)[number])
        at = (group * s.sequences + sequence) * s.selected_heads + head
        count = np.int64(i32(s.counts)[at])
        if count >= 0:
            return count, s.selected + at * s.selected_columns * 4
    return np.int64(i32(s.contexts)[sequence]), np.int64(0)


@compiled
def visible(s, start, row):
    """Bits of the rows of its own sequence that a tree row reads, itself included; 0: all up to itself (chain)."""
    if s.ancestors == 0:
        return np.uint64(0)
    mask = u64(s.ancestors)[row]
    if mask == np.uint64(0xFFFFFFFFFFFFFFFF):
        return np.uint64(0)
    own = np.uint64(1) << np.uint64(row - start)
    return (mask & (own - np.uint64(1))) | own


@compiled
def count_bits(mask):
    """How many bits of 64 are set."""
    count = 0
    while mask != np.uint64(0):
        mask &= mask - np.uint64(1)
        count += 1
    return count


@compiled
def nth_bit(mask, n):
    """Position of the n-th set bit (from 0)."""
    for _ in range(n):
        mask &= mask - np.uint64(1)
    place = 0
    while (mask >> np.uint64(place)) & np.uint64(1) == np.uint64(0):
        place += 1
    return place


@compiled
def own_row(start, mask, n):
    """The batch row that is the n-th readable one of this pass."""
    return start + (n if mask == np.uint64(0) else nth_bit(mask, n))


@compiled
def first_entry(s, start, row, mask, count, chosen, length, window):
    """Index in a row's list of the first entry inside its window. Committed entry e stands at position e."""
    oldest = np.int64(i32(s.positions)[row]) + 1 - window
    if window == 0 or oldest <= 0:
        return np.int64(0)
    index = np.int64(0)
    if chosen == 0:
        index = min(oldest, count)
    else:
        while index < count and np.int64(i32(chosen)[index]) < oldest:
            index += 1
    if index == count:
        while index < length and np.int64(i32(s.positions)[own_row(start, mask, index - count)]) < oldest:
            index += 1
    return index


@compiled
def fill_entries(s, sequence, start, mask, head, heads, count, chosen, first, last, out):
    """Pool rows of entries first .. last - 1 of a row's list; the last one is repeated up to a multiple of 16."""
    rows, size = i64(out), s.page_size
    pages = i32(s.pages + sequence * s.page_columns * 4)
    i = first
    while i < min(last, count):
        if chosen == 0:
            place, offset = i // size, i % size
            stop = min(last, count, i - offset + size)
            shift = (np.int64(pages[place]) * heads + head) * size + offset - i
            for j in range(i, stop):
                rows[j - first] = shift + j
            i = stop
        else:
            entry = np.int64(i32(chosen)[i])
            rows[i - first] = (np.int64(pages[entry // size]) * heads + head) * size + entry % size
            i += 1
    for j in range(max(first, count), last):
        rows[j - first] = pool_row(s, np.int64(i32(s.slots)[own_row(start, mask, j - count)]), head, heads)
    for j in range(last - first, (last - first + 15) // 16 * 16):
        rows[j] = rows[last - first - 1]
