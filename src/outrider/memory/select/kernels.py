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
def fold_keys(low, high, slots, keys, unit):
    """Extend the minima and maxima of units by new keys. low, high [N, units, H, D]; keys [N, n, H, D]; slots [n].

    The first slot of a unit starts it anew, so a recycled page needs no clearing.
    """
    for t in range(keys.shape[0]):
        for i in range(slots.shape[0]):
            at, fresh = slots[i] // unit, slots[i] % unit == 0
            for h in range(keys.shape[2]):
                for d in range(keys.shape[3]):
                    value = keys[t, i, h, d]
                    low[t, at, h, d] = value if fresh else min(low[t, at, h, d], value)
                    high[t, at, h, d] = value if fresh else max(high[t, at, h, d], value)


@njit(cache=True, nogil=True, fastmath=FAST)
def bound_dot(upper, lower, high, low):
    """upper . high + lower . low"""
    total = np.float32(0)
    for d in range(upper.shape[0]):
        total += upper[d] * high[d] + lower[d] * low[d]
    return total


@njit(cache=True, nogil=True, fastmath=FAST)
def score_pages(queries, low, high, tap_groups, pages, per_page, tightness, mass, logits):
    """Log attention mass per unit: softmax over units per query head, summed over the heads and taps that share it.

    The logit of a unit lies between the smallest and the largest dot product that its bounds allow: `tightness` 1 is
    the largest (Quest's), 0 the middle. queries [N, heads, D], scaled; low, high [N, physical units, H, D];
    per_page units to a page; mass [G, H, units] is overwritten; logits [units] is scratch.
    """
    heads, kv_heads, count = queries.shape[1], mass.shape[1], mass.shape[2]
    alpha = heads // kv_heads
    near, far = np.float32((1 + tightness) / 2), np.float32((1 - tightness) / 2)
    mass[:] = 0
    for t in range(queries.shape[0]):
        for head in range(heads):
            kv = head // alpha
            positive = np.maximum(queries[t, head], np.float32(0))
            negative = np.minimum(queries[t, head], np.float32(0))
            upper, lower = near * positive + far * negative, far * positive + near * negative
            best = np.float32(-np.inf)
            for u in range(count):
                at = pages[u // per_page] * per_page + u % per_page
                logits[u] = bound_dot(upper, lower, high[t, at, kv], low[t, at, kv])
                best = max(best, logits[u])
            total = np.float32(0)
            for u in range(count):
                logits[u] = math.exp(logits[u] - best)
                total += logits[u]
            row = mass[tap_groups[t], kv]
            scale = np.float32(1) / total
            for u in range(count):
                row[u] += logits[u] * scale
    for g in range(mass.shape[0]):
        for h in range(kv_heads):
            for u in range(count):
                mass[g, h, u] = math.log(mass[g, h, u] + np.float32(1e-30))


@njit(cache=True, nogil=True, fastmath=FAST)
def score_keys(query, keys, pages, slots, shift, scores, logits):
    """Log attention weight of each entry under a retrieval head, maximum over the query heads of a group.

    query [heads, D], scaled; keys [physical pages, H, page size, D], of which the first `slots` are in use; slot j
    stands for entry j + shift; scores [H, length] is overwritten; entries that no slot stands for score highest.
    """
    kv_heads, page_size = keys.shape[1], keys.shape[2]
    alpha = query.shape[0] // kv_heads
    for h in range(kv_heads):
        scores[h, :shift] = np.inf
        scores[h, shift:] = -np.inf
        scores[h, min(slots + shift, scores.shape[1]) :] = np.inf
        for head in range(h * alpha, (h + 1) * alpha):
            best = np.float32(-np.inf)
            for j in range(slots):
                key = keys[pages[j // page_size], h, j % page_size]
                total = np.float32(0)
                for d in range(key.shape[0]):
                    total += query[head, d] * key[d]
                logits[j] = total
                best = max(best, total)
            mass = np.float32(0)
            for j in range(slots):
                mass += math.exp(logits[j] - best)
            offset = best + np.float32(math.log(mass))
            for j in range(min(slots, scores.shape[1] - shift)):
                scores[h, j + shift] = max(scores[h, j + shift], logits[j] - offset)


@njit(cache=True, nogil=True)
def mark_held(entries, unit, held):
    """held [G, H, U] becomes True for every unit of which something was chosen; entries [G, H, n]."""
    held[:] = False
    for g in range(entries.shape[0]):
        for h in range(entries.shape[1]):
            for i in range(entries.shape[2]):
                held[g, h, entries[g, h, i] // unit] = True
