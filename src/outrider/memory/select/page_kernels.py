"""Compiled loops of selection by page. Sums run in one fixed order, so a score depends on nothing but its sequence.

The bounds of a unit are a row of keys: its lowest values, then its highest ones, in bfloat16 (which is exact where keys
are). A query's logit over it is one dot product, by the kernel that attention scores keys with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from outrider.kernels.cpu import vectors
from outrider.kernels.cpu.machine import SOURCES, bits_of, compiled, f32, float_of, i64
from outrider.kernels.cpu.maths import exp32
from outrider.kernels.cpu.workspace import address
from outrider.memory.select.kernels import part_rows
from outrider.types import Float32, Int32

Bits = NDArray[np.uint16]
_SPAN = 128  # units that are judged at a time, so that their bounds stay in the cache for all heads of a KV head
_LEAST = np.float32(-40)  # log of the smallest share of attention that is told apart
_LN2, _SQRT_HALF = np.float32(0.69314718), np.float32(0.70710678)
_L = [np.float32(x) for x in (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1)]
_M = [np.float32(x) for x in (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)]
_L0, _L1, _L2, _L3, _L4 = _L
_M0, _M1, _M2, _M3 = _M


@compiled
def log32(x):
    """ln(x) of a normal positive number, within 2 ulp (Cephes logf)."""
    bits = bits_of(x)
    power = np.float32((bits >> np.int32(23)) - np.int32(126))
    part = float_of((bits & np.int32(0x7FFFFF)) | np.int32(0x3F000000))  # 0.5 .. 1
    small = part < _SQRT_HALF
    power = power - np.float32(1) if small else power
    z = part + part - np.float32(1) if small else part - np.float32(1)
    square = z * z
    y = (((((((_L0 * z + _L1) * z + _L2) * z + _L3) * z + _L4) * z + _M0) * z + _M1) * z + _M2) * z + _M3
    return z + (y * z * square - np.float32(0.5) * square) + power * _LN2


@compiled
def _bfloat(x):
    """The bfloat16 bits nearest to a float."""
    bits = np.uint32(bits_of(x))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@compiled
def _float(half):
    """The float of bfloat16 bits."""
    return float_of(np.int32(np.uint32(half) << np.uint32(16)))


@compiled
def _fold(bounds, slots, keys, unit):
    for t in range(keys.shape[0]):
        for i in range(slots.shape[0]):
            at, fresh = slots[i] // unit, slots[i] % unit == 0
            for h in range(keys.shape[2]):
                low, high = bounds[t, at, h, 0], bounds[t, at, h, 1]
                for d in range(keys.shape[3]):
                    value = keys[t, i, h, d]
                    if fresh or value < _float(low[d]):
                        low[d] = _bfloat(value)
                    if fresh or value > _float(high[d]):
                        high[d] = _bfloat(value)


@compiled
def _place_units(pages, per_page, stride, first, count, rows):
    """First rows of the bounds of units first .. first + count - 1; the last one again up to a multiple of 16."""
    for j in range(count):
        u = first + j
        rows[j] = (np.int64(pages[u // per_page]) * per_page + u % per_page) * stride
    for j in range(count, (count + 15) // 16 * 16):
        rows[j] = rows[count - 1]


@compiled
def _judge(queries, bounds, kv_heads, heads, sides, dim, pages, per_page, rows, units, logits, columns):
    """logits[head, u] of one tap: query . bounds, which are `sides` rows of `dim` values for every unit and KV head."""
    alpha, spare = heads // kv_heads, logits + heads * columns * 4
    for first in range(0, units, _SPAN):
        count = min(_SPAN, units - first)
        padded = (count + 15) // 16 * 16
        _place_units(pages, per_page, kv_heads * sides, first, count, i64(rows))
        for h in range(kv_heads):
            for side in range(sides):
                for head in range(h * alpha, (h + 1) * alpha):
                    query, out = queries + (head * sides + side) * dim * 4, logits + (head * columns + first) * 4
                    target = out if side == 0 else spare
                    vectors.scores(vectors.BFLOAT16, query, bounds, 0, rows, count, dim, target)
                    if side == 1:
                        x, y = f32(out), f32(spare)
                        for j in range(padded):
                            x[j] += y[j]
                for j in range(padded):
                    i64(rows)[j] += 1


@compiled
def _add_shares(logits, units, mass):
    """mass[u] += softmax(logits)[u]; logits are padded to 16 and lost."""
    row = f32(logits)
    padded = (units + 15) // 16 * 16
    for u in range(units, padded):
        row[u] = np.float32(-np.inf)
    best = vectors.highest(logits, units)
    for u in range(units):
        row[u] = exp32(max(row[u] - best, _LEAST))
    for u in range(units, padded):
        row[u] = np.float32(0)
    scale = np.float32(1) / vectors.total(logits, units)
    for u in range(units):
        mass[u] += row[u] * scale


@compiled
def _score(queries, bounds, tap_groups, pages, per_page, heads, sides, dim, rows, mass, logits, columns):
    kv_heads, units = mass.shape[1], mass.shape[2]
    alpha = heads // kv_heads
    mass[:] = 0
    for t in range(tap_groups.shape[0]):
        own, keys = queries + t * heads * sides * dim * 4, bounds[t].ctypes.data
        _judge(own, keys, kv_heads, heads, sides, dim, pages, per_page, rows, units, logits, columns)
        for head in range(heads):
            _add_shares(logits + head * columns * 4, units, mass[tap_groups[t], head // alpha])
    for g in range(mass.shape[0]):
        for h in range(kv_heads):
            row = mass[g, h]
            for u in range(units):
                row[u] = log32(row[u]) if row[u] == row[u] else row[u]  # not a number ranks last


def _entry_points(sources: int) -> tuple[Any, Any]:
    """What Python calls, cached on disk under the digest of the kernels that they are built from."""

    @njit(nogil=True, error_model="numpy", cache=True)
    def fold(bounds, slots, keys, unit):
        if sources != 0:
            _fold(bounds, slots, keys, unit)

    @njit(nogil=True, error_model="numpy", cache=True)
    def score(queries, bounds, tap_groups, pages, per_page, heads, sides, dim, rows, mass, logits, columns):
        if sources != 0:
            _score(queries, bounds, tap_groups, pages, per_page, heads, sides, dim, rows, mass, logits, columns)

    return fold, score


_fold_keys, _score_units = _entry_points(SOURCES)


def fold_keys(bounds: Bits, slots: Int32, keys: Float32, unit: int) -> None:
    """Extend the bounds of units by new keys: bounds [taps, units, H, 2 (low, high), dim], keys [taps, n, H, D <= dim].

    The first slot of a unit starts it anew, so a recycled page needs no clearing.
    """
    _fold_keys(bounds, slots, keys, unit)


def score_pages(
    queries: Float32, bounds: Bits, tap_groups: Int32, pages: Int32, per_page: int, tightness: float, mass: Float32
) -> None:
    """Log attention mass per unit: softmax over units per query head, summed over the heads and taps that share it.

    The logit of a unit lies between the smallest and the largest dot product that its bounds allow: `tightness` 1 is
    the largest (Quest's), 0 the middle. queries [taps, heads, dim], scaled; bounds [taps, physical units, H, 2, dim];
    per_page units to a page; mass [G, H, units] is overwritten.
    """
    heads, dim = queries.shape[1:]
    near, far = np.float32((1 + tightness) / 2), np.float32((1 - tightness) / 2)
    positive, negative = np.maximum(queries, 0), np.minimum(queries, 0)
    sides = 2 if vectors.is_whole(dim) and not vectors.is_whole(2 * dim) else 1  # as the fast kernels take them
    both = np.empty((queries.shape[0], heads, 2, dim), np.float32)
    both[:, :, 0], both[:, :, 1] = far * positive + near * negative, near * positive + far * negative
    width = 2 * dim // sides
    parted = vectors.is_parted(vectors.BFLOAT16, width)
    rows = part_rows(both.reshape(-1, width)) if parted else both
    columns = mass.shape[2] + _SPAN
    logits, places = np.empty((heads + 1, columns), np.float32), np.empty(_SPAN + 16, np.int64)
    _score_units(
        *(address(rows), bounds, tap_groups, np.ascontiguousarray(pages, np.int32), per_page),
        *(heads, sides, width, address(places), mass, address(logits), columns),
    )
