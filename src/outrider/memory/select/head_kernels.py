"""Compiled loops of the retrieval head. A row's result depends on nothing but the row: sums run in one fixed order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from outrider.kernels.cpu import vectors
from outrider.kernels.cpu.machine import SOURCES, compiled, f32, i64
from outrider.kernels.cpu.workspace import address
from outrider.memory.select.head_weights import pad_rows
from outrider.memory.select.kernels import exponentiate, part_rows
from outrider.types import Float32, Int32

Bits = NDArray[np.uint16]
_BLOCK = 64  # rows of a matrix that all rows of a batch meet before the next ones
_SPAN = 128  # entries that are scored at a time


@compiled
def _project(kind, x, rows, weight, out, width, y, places):
    """y = x W^T; a few rows of W at a time, for all rows of x. places: 0 .. out - 1."""
    for first in range(0, out, _BLOCK):
        count, at = min(_BLOCK, out - first), places + first * 8
        for r in range(rows):
            target = y + (r * out + first) * 4
            vectors.scores_any(kind, x + r * width * 4, weight, 0, at, count, width, target)


@compiled
def _normalise(x, rows, width, size, weight, eps):
    """RMS norm in place of rows padded with zeros from `size` to `width`."""
    w = f32(weight)
    for r in range(rows):
        row = f32(x + r * width * 4)
        squares = vectors.dot(x + r * width * 4, x + r * width * 4, width)
        factor = np.float32(1) / np.float32(math.sqrt(squares / np.float32(size) + np.float32(eps)))
        for i in range(size):
            row[i] *= factor * w[i]


@compiled
def _score_span(query, keys, page_size, kv_heads, heads, dim, pages, entries, first, count, logits, columns):
    """Logits of `count` entries from `first` on, for all heads; entries are found once."""
    rows, alpha = i64(entries), heads // kv_heads
    place, offset = first // page_size, first % page_size
    for j in range(count):
        rows[j] = np.int64(pages[place]) * kv_heads * page_size + offset
        offset += 1
        if offset == page_size:
            place, offset = place + 1, 0
    padded = (count + 15) // 16 * 16
    for j in range(count, padded):
        rows[j] = rows[count - 1]
    for h in range(kv_heads):
        for a in range(alpha):
            q, out = query + (h * alpha + a) * dim * 4, logits + ((h * alpha + a) * columns + first) * 4
            vectors.scores(vectors.BFLOAT16, q, keys, 0, entries, count, dim, out)
        for j in range(padded):
            rows[j] += page_size


@compiled
def _score(query, keys, page_size, kv_heads, heads, dim, pages, entries, length, scores, logits, weights):
    """See score_entries."""
    alpha, columns, base = heads // kv_heads, logits.shape[1], logits.ctypes.data
    for first in range(0, length, _SPAN):
        count = min(_SPAN, length - first)
        _score_span(query, keys, page_size, kv_heads, heads, dim, pages, entries, first, count, base, columns)
    for h in range(kv_heads):
        most, mine = np.float32(-np.inf), scores[h]
        for a in range(alpha):
            row = logits[h * alpha + a]
            row[0] = np.float32(-np.inf)
            row[length : (length + 15) // 16 * 16] = np.float32(-np.inf)
            best = vectors.highest(base + (h * alpha + a) * columns * 4, length)
            weights[:] = row[:length]
            offset = best + np.float32(math.log(exponentiate(weights, weights.view(np.int32), best)))
            most = max(most, best - offset)
            for e in range(length):
                value = row[e] - offset
                mine[e] = value if a == 0 or value > mine[e] else mine[e]
        mine[0] = most


def _entry_points(sources: int) -> tuple[Any, Any, Any]:
    """What Python calls, cached on disk under the digest of the kernels that they are built from."""

    @njit(nogil=True, error_model="numpy", cache=True)
    def project_rows(kind, x, rows, weight, out, width, y, places):
        if sources != 0:
            _project(kind, x, rows, weight, out, width, y, places)

    @njit(nogil=True, error_model="numpy", cache=True)
    def normalise_rows(x, rows, width, size, weight, eps):
        if sources != 0:
            _normalise(x, rows, width, size, weight, eps)

    @njit(nogil=True, error_model="numpy", cache=True)
    def score_rows(query, keys, page_size, kv_heads, heads, dim, pages, entries, length, scores, logits, weights):
        if sources != 0:
            _score(query, keys, page_size, kv_heads, heads, dim, pages, entries, length, scores, logits, weights)

    return project_rows, normalise_rows, score_rows


_project_rows, _normalise_rows, _score_rows = _entry_points(SOURCES)


def project(x: Float32, weight: Float32 | Bits, bias: Float32 | None) -> Float32:
    """x W^T + b: rows [n, width] times a matrix [out, width], both contiguous and padded to 16 -> [n, out]."""
    y, places = np.empty((len(x), len(weight)), np.float32), np.arange(len(weight), dtype=np.int64)
    kind = vectors.BFLOAT16 if weight.dtype == np.uint16 else vectors.FLOAT32
    _project_rows(kind, address(x), len(x), address(weight), len(weight), x.shape[1], address(y), address(places))
    return y if bias is None else y + bias


def normalise(x: Float32, weight: Float32, eps: float) -> Float32:
    """RMS norm of rows [n, size], which may be overwritten."""
    size = x.shape[1]
    rows = pad_rows(np.ascontiguousarray(x, np.float32))
    _normalise_rows(address(rows), len(rows), rows.shape[1], size, address(weight), eps)
    return rows[:, :size]


def score_entries(query: Float32, keys: Bits, pages: Int32, length: int) -> Float32:
    """Log attention weight [KV heads, length] of every entry: softmax(q K^T) per query head, the largest of a group.

    query [heads, dim], scaled, dim a multiple of 16; keys bfloat16 [physical pages, KV heads, page size, dim], of which
    row e of a sequence stands for entry e. Entry 0 has no key; it ranks with the best.
    """
    (_, kv_heads, page_size, dim), heads = keys.shape, len(query)
    parted = np.array(query, np.float32)
    if vectors.is_parted(vectors.BFLOAT16, dim):
        parted = part_rows(parted)
    scores = np.empty((kv_heads, length), np.float32)
    logits = np.empty((heads, length + _SPAN), np.float32)
    entries, weights = np.empty(_SPAN + 16, np.int64), np.empty(length, np.float32)
    _score_rows(
        *(address(parted), address(keys), page_size, kv_heads, heads, dim),
        *(np.ascontiguousarray(pages, np.int32), address(entries), length, scores, logits, weights),
    )
    return scores
