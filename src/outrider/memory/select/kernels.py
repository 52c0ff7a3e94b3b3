"""Compiled loops of selection. Their plain counterparts, which say what they compute, are in reference.py."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

FAST = {"reassoc", "contract", "arcp", "nsz"}


@njit(cache=True, nogil=True)
def kth_largest(values, k):
    """The k-th largest value (k from 1) by quickselect; reorders `values`."""
    low, high, target = 0, values.shape[0] - 1, k - 1
    while low < high:
        middle = (low + high) >> 1
        a, b, c = values[low], values[middle], values[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if target <= j:
            high = j
        elif target >= i:
            low = i
        else:
            return values[target]
    return values[target]


@njit(cache=True, nogil=True)
def mark_units(scores, k, skip, scratch):
    """Set skip[u] = 0 for the k best units, -1 for others; returns the worst unit taken. Ties go to later units."""
    count = 0
    for u in range(scores.shape[0]):
        value = scores[u]
        scratch[u] = value if value == value else -np.inf
        skip[u] = -1
    threshold = kth_largest(scratch[: scores.shape[0]], k)
    worst = -1
    for u in range(scores.shape[0]):
        if scores[u] > threshold:
            skip[u] = 0
            count += 1
    for u in range(scores.shape[0] - 1, -1, -1):
        if count == k:
            break
        if skip[u] < 0 and (scores[u] == threshold or threshold == -np.inf):
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
    scratch = np.empty(units, np.float32)
    for g in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            choose_row(scores[g, h], unit, length, keep, sinks, window, skip, scratch, out[g, h])


@njit(cache=True, nogil=True)
def fold_keys(bounds, slots, keys, unit):
    """Extend the bounds of units by new keys. bounds [N, units, H, 2 (low, high), D]; keys [N, n, H, D]; slots [n].

    The first slot of a unit starts it anew, so a recycled page needs no clearing.
    """
    for t in range(keys.shape[0]):
        for i in range(slots.shape[0]):
            at, fresh = slots[i] // unit, slots[i] % unit == 0
            for h in range(keys.shape[2]):
                low, high = bounds[t, at, h, 0], bounds[t, at, h, 1]
                for d in range(keys.shape[3]):
                    value = keys[t, i, h, d]
                    low[d] = value if fresh else min(low[d], value)
                    high[d] = value if fresh else max(high[d], value)


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


@njit(cache=True, nogil=True, fastmath=FAST)
def judge_units(lower, upper, bounds, pages, per_page, logits):
    """logits[head, u] = lower[head] . low[u] + upper[head] . high[u], under the bounds of the head's KV head."""
    kv_heads, dim = bounds.shape[1], bounds.shape[3]
    alpha = logits.shape[0] // kv_heads
    for u in range(logits.shape[1]):
        at = pages[u // per_page] * per_page + u % per_page
        for head in range(logits.shape[0]):
            kv = head // alpha
            total = np.float32(0)
            for d in range(dim):
                total += lower[head, d] * bounds[at, kv, 0, d] + upper[head, d] * bounds[at, kv, 1, d]
            logits[head, u] = total


@njit(cache=True, nogil=True, fastmath=FAST)
def score_pages(queries, bounds, tap_groups, pages, per_page, tightness, mass, logits):
    """Log attention mass per unit: softmax over units per query head, summed over the heads and taps that share it.

    The logit of a unit lies between the smallest and the largest dot product that its bounds allow: `tightness` 1 is
    the largest (Quest's), 0 the middle. queries [N, heads, D], scaled; bounds [N, physical units, H, 2, D];
    per_page units to a page; mass [G, H, units] is overwritten; logits [heads, units] is scratch.
    """
    alpha = logits.shape[0] // mass.shape[1]
    near, far = np.float32((1 + tightness) / 2), np.float32((1 - tightness) / 2)
    bits = logits.view(np.int32)
    mass[:] = 0
    for t in range(queries.shape[0]):
        positive, negative = np.maximum(queries[t], np.float32(0)), np.minimum(queries[t], np.float32(0))
        lower, upper = far * positive + near * negative, near * positive + far * negative
        judge_units(lower, upper, bounds[t], pages, per_page, logits)
        for head in range(logits.shape[0]):
            best = np.float32(-np.inf)
            for u in range(logits.shape[1]):
                best = max(best, logits[head, u])
            scale = np.float32(1) / exponentiate(logits[head], bits[head], best)
            row = mass[tap_groups[t], head // alpha]
            for u in range(logits.shape[1]):
                row[u] += logits[head, u] * scale
    for g in range(mass.shape[0]):
        for h in range(mass.shape[1]):
            for u in range(mass.shape[2]):
                mass[g, h, u] = math.log(mass[g, h, u])


@njit(cache=True, nogil=True)
def mark_held(entries, unit, held):
    """held [G, H, U] becomes True for every unit of which something was chosen; entries [G, H, n]."""
    held[:] = False
    for g in range(entries.shape[0]):
        for h in range(entries.shape[1]):
            for i in range(entries.shape[2]):
                held[g, h, entries[g, h, i] // unit] = True


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
