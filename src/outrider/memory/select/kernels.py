"""Compiled loops of selection. Their plain counterparts, which say what they compute, are in reference.py."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from outrider.kernels.cpu.machine import bits_of
from outrider.types import Float32

LOWEST = np.int32(-(2**31))
FAST = {"reassoc", "contract", "arcp", "nsz"}


@njit(cache=True, nogil=True)
def rank(scores, keys):
    """keys[u] = an int32 that orders as scores[u] does; NaN and minus infinity are the lowest."""
    for u in range(scores.shape[0]):
        bits = bits_of(scores[u] + np.float32(0))  # no negative zero
        value = bits if bits >= 0 else bits ^ np.int32(0x7FFFFFFF)
        keys[u] = LOWEST if scores[u] != scores[u] or scores[u] == -np.inf else value


@njit(cache=True, nogil=True)
def kth_largest(keys, k):
    """The k-th largest of int32 keys (k from 1). Counting vectors 32 times is faster than partitioning them."""
    best = np.int64(LOWEST)
    for bit in range(31, -1, -1):
        candidate = best + (np.int64(1) << bit)
        if candidate > np.int64(0x7FFFFFFF):
            continue
        limit, count = np.int32(candidate), np.int32(0)
        for u in range(keys.shape[0]):
            count += np.int32(keys[u] >= limit)
        if count >= k:
            best = candidate
    return np.int32(best)


@njit(cache=True, nogil=True)
def mark_units(scores, k, skip, keys):
    """Set skip[u] = 0 for the k best units, -1 for others; returns the worst unit taken. Ties go to later units."""
    keys = keys[: scores.shape[0]]
    rank(scores, keys)
    threshold = kth_largest(keys, k)
    count, worst = 0, -1
    for u in range(scores.shape[0]):
        above = keys[u] > threshold
        skip[u] = 0 if above else -1
        count += above
    for u in range(scores.shape[0] - 1, -1, -1):
        if count == k:
            break
        if keys[u] == threshold:
            skip[u] = 0
            count += 1
            worst = u
    return worst


@njit(cache=True, nogil=True)
def choose_row(scores, unit, length, keep, sinks, window, skip, scratch, out):
    """Write exactly `keep` ascending entries to `out`: sinks, window and the best-scored units between them."""
    low = min(sinks, length)
    high = max(low, length - window)
    want = keep - low - (length - high)
    for entry in range(low):
        out[entry] = entry
    at = low
    if want > 0:
        first = low // unit
        units = (high - 1) // unit - first + 1
        middle = scores[first : first + units]
        worst = mark_units(middle, min(units, (want + unit - 1) // unit), skip, scratch)
        got = 0
        for u in range(units):
            if skip[u] == 0:
                got += min(high, (first + u + 1) * unit) - max(low, (first + u) * unit)
        if got > want:
            skip[worst] = got - want
        for u in range(units - 1, -1, -1):
            if got >= want:
                break
            if skip[u] < 0:
                size = min(high, (first + u + 1) * unit) - max(low, (first + u) * unit)
                skip[u] = size - min(size, want - got)
                got += size - skip[u]
        for u in range(units):
            if skip[u] >= 0:
                for entry in range(max(low, (first + u) * unit) + skip[u], min(high, (first + u + 1) * unit)):
                    out[at] = entry
                    at += 1
    for entry in range(high, length):
        out[at] = entry
        at += 1


@njit(cache=True, nogil=True)
def choose_rows(scores, unit, length, keep, sinks, window, out):
    """choose_row for every group and KV head. scores [G, H, U], out [G, H, >= keep] int32."""
    units = scores.shape[2]
    skip = np.empty(units, np.int32)
    scratch = np.empty(units, np.int32)
    for g in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            choose_row(scores[g, h], unit, length, keep, sinks, window, skip, scratch, out[g, h])


@njit(cache=True, nogil=True, fastmath=FAST)
def exponentiate(row, bits, best):
    """row = exp(row - best) to four digits, never below 1e-18; returns the sum. `bits` is `row` seen as int32.

    A polynomial that vectorises, and no subnormal numbers, which cost a hundred times an ordinary one.
    """
    total = np.float32(0)
    for i in range(row.shape[0]):
        x = max((row[i] - best) * np.float32(1.4426950408889634), np.float32(-60))
        whole = np.floor(x)
        f = x - whole
        high = np.float32(0.05550411) + f * (np.float32(0.00961813) + f * np.float32(0.00133336))
        row[i] = np.float32(1) + f * (np.float32(0.69314718) + f * (np.float32(0.24022651) + f * high))
        bits[i] += np.int32(whole) << 23
    for i in range(row.shape[0]):
        total += row[i]
    return total


@njit(cache=True, nogil=True)
def share_mass(scores, unit, length, entries):
    """Share [G, H] of exp(score) that lies in `entries`, a unit's mass being spread evenly over its entries."""
    shares = np.empty(scores.shape[:2], np.float32)
    for g in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            row = scores[g, h]
            best = row[0]
            for u in range(row.shape[0]):
                best = max(best, row[u])
            total = 0.0
            for u in range(row.shape[0]):
                total += math.exp(row[u] - best)
            taken = 0.0
            for i in range(entries.shape[2]):
                u = entries[g, h, i] // unit
                taken += math.exp(row[u] - best) / min(unit, length - u * unit)
            shares[g, h] = taken / total
    return shares


@njit(cache=True, nogil=True)
def mark_held(entries, unit, held):
    """held [G, H, U] becomes True for every unit of which something was chosen; entries [G, H, n], ascending."""
    held[:] = False
    for g in range(entries.shape[0]):
        for h in range(entries.shape[1]):
            end = 0  # of the unit that was marked last
            for i in range(entries.shape[2]):
                if entries[g, h, i] >= end:
                    u = entries[g, h, i] // unit
                    held[g, h, u] = True
                    end = (u + 1) * unit


def part_rows(x: Float32) -> Float32:
    """Every 32 values as 16 even, then 16 odd ones: the order in which rows of bfloat16 are read."""
    pairs = x.reshape(len(x), -1, 16, 2)
    return np.ascontiguousarray(pairs.swapaxes(-1, -2)).reshape(x.shape)
