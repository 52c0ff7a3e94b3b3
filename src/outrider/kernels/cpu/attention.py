"""Paged attention: rows of K and V are read in place; grouped heads share a pass; chains, trees, windows, selections.

A row attends to a list of entries: the committed ones of its sequence (all, or those selected), then those of its own
pass that it may see. The list is cut every CHUNK entries; a chunk gives (maximum, sum, weighted values), and chunks are
merged in ascending order. That order is the definition of the result: it depends on nothing but the row's own list.
"""

from __future__ import annotations

import math

import numpy as np

from outrider.kernels.cpu import maths, vectors
from outrider.kernels.cpu.entries import committed, count_bits, fill_entries, first_entry, pool_row, visible
from outrider.kernels.cpu.layout import BLOCK, CHUNK
from outrider.kernels.cpu.machine import (
    bits_of,
    compiled,
    f32,
    float_of,
    i8,
    i32,
    meet,
    share,
    u16,
)
from outrider.kernels.cpu.many import mix_many, scores_many
from outrider.kernels.cpu.rows import largest_bits, rms_norm
from outrider.kernels.cpu.vectors import MAX_QUERIES

_LOWEST = np.float32(-np.inf)
_MOST = np.float32(127)
_MAGIC, _MAGIC_BITS = np.float32(12582912.0), np.int32(0x4B400000)
_STATE = 64  # bytes before the weighted values: maximum and sum


@compiled
def store_row(kind, source, dim, base, scales, row):
    """Write `dim` floats as one K or V row in the cache's type; NaN stays NaN."""
    x = f32(source)
    if kind == vectors.FLOAT32:
        whole = f32(base + row * dim * 4)
        for i in range(dim):
            whole[i] = x[i]
    elif kind == vectors.BFLOAT16:
        half = u16(base + row * dim * 2)
        for i in range(dim):
            bits = np.int64(bits_of(x[i])) & np.int64(0xFFFFFFFF)
            rounded = (bits + np.int64(0x7FFF) + ((bits >> np.int64(16)) & np.int64(1))) >> np.int64(16)
            half[i] = np.uint16(0x7FC0) if math.isnan(x[i]) else np.uint16(rounded)
    else:
        size = float_of(np.int32(largest_bits(source, 0, dim)))
        usable = size >= np.float32(1e-30) and size < np.float32(np.inf)
        inverse = _MOST / size if usable else np.float32(0)
        f32(scales)[row] = np.float32(0) if size < np.float32(1e-30) else size / _MOST
        byte = i8(base + row * dim)
        for i in range(dim):
            n = np.int32(bits_of(x[i] * inverse + _MAGIC) - _MAGIC_BITS)
            byte[i] = np.int8(n) if usable else np.int8(0)


@compiled
def place_head(m, s, row, source, norm, rotate, scale, target):
    """Copy one head, with its norm and rotation where the model has them, times `scale`; the pad stays zero."""
    x, y, dim = f32(source), f32(target), m.head_dim
    for i in range(dim):
        y[i] = x[i]
    if norm != 0:
        rms_norm(target, dim, norm, m.eps, target)
    if rotate:
        half = dim // 2
        at = np.int64(i32(s.positions)[row]) * half * 4
        cos, sin = f32(s.cos + at), f32(s.sin + at)
        for i in range(half):
            a, b = y[i], y[half + i]
            y[i] = (a * cos[i] - b * sin[i]) * scale
            y[half + i] = (b * cos[i] + a * sin[i]) * scale
    elif scale != np.float32(1):
        for i in range(dim):
            y[i] *= scale


@compiled
def part_row(values, spare, dim):
    """Reorder every 32 values: 16 even ones, then 16 odd ones."""
    x, y = f32(values), f32(spare)
    for i in range(dim):
        y[i] = x[i]
    for block in range(0, dim, 32):
        for i in range(16):
            x[block + i] = y[block + 2 * i]
            x[block + 16 + i] = y[block + 2 * i + 1]


@compiled
def place_heads(m, s, layer, cache, member, members):
    """Queries into their buffer; keys and values into the cache. Units are (row, head)."""
    heads = m.heads + 2 * m.kv_heads
    first, last = share(s.rows * heads, member, members)
    spare = s.state + member * (BLOCK + 1) * (m.heads // m.kv_heads) * s.state_stride
    for unit in range(first, last):
        row, head = unit // heads, unit % heads
        raw = s.qkv + row * s.qkv_stride
        if head < m.heads:
            target = s.query + row * s.query_stride + head * m.head_pad * 4
            place_head(m, s, row, raw + head * m.head_dim * 4, layer.q_norm, m.rope, m.scale, target)
            if vectors.is_parted(s.kv_kind, m.head_pad):
                part_row(target, spare, m.head_pad)
            continue
        for i in range(m.head_dim, m.head_pad):
            f32(spare)[i] = np.float32(0)
        is_key = head < m.heads + m.kv_heads
        kv = head - m.heads if is_key else head - m.heads - m.kv_heads
        source = raw + (m.q_width + (0 if is_key else m.kv_width) + kv * m.head_dim) * 4
        place_head(m, s, row, source, layer.k_norm if is_key else 0, m.rope if is_key else 0, np.float32(1), spare)
        index = pool_row(s, np.int64(i32(s.slots)[row]), kv, m.kv_heads)
        if is_key:
            store_row(s.kv_kind, spare, m.head_pad, cache.keys, cache.key_scales, index)
        else:
            store_row(s.kv_kind, spare, m.head_pad, cache.values, cache.value_scales, index)


@compiled
def attend_chunk(m, s, cache, query, heads, entries, count, weights, out, out_stride):
    """(maximum, sum, weighted values) of `heads` queries over `count` entries, written to `out`."""
    padded = (count + 15) // 16 * 16
    for j in range(heads):
        q, row = query + j * m.head_pad * 4, weights + j * CHUNK * 4
        vectors.scores(s.kv_kind, q, cache.keys, cache.key_scales, entries, count, m.head_pad, row)
        p = f32(row)
        for i in range(count, padded):
            p[i] = _LOWEST
        top = vectors.highest(row, padded)
        for i in range(padded):
            p[i] = maths.exp32(p[i] - top)
        result = f32(out + j * out_stride)
        result[0], result[1] = top, vectors.total(row, padded)
    values, scales = cache.values, cache.value_scales
    vectors.mix(
        *(s.kv_kind, heads, weights, CHUNK * 4, values, scales, entries, count, m.head_pad),
        *(out + _STATE, out_stride),
    )


@compiled
def clear(state, dim):
    """The state of no entries yet: largest score, sum of weights, weighted values [dim]."""
    f32(state)[0] = _LOWEST
    f32(state)[1] = np.float32(0)
    total = f32(state + _STATE)
    for i in range(dim):
        total[i] = np.float32(0)


@compiled
def merge(state, piece, dim):
    """Fold a chunk's result into the running one."""
    a, b = f32(state), f32(piece)
    top = max(a[0], b[0])
    old, new = maths.exp32(a[0] - top), maths.exp32(b[0] - top)
    a[0] = top
    a[1] = a[1] * old + b[1] * new
    x, y = f32(state + _STATE), f32(piece + _STATE)
    for i in range(dim):
        x[i] = x[i] * old + y[i] * new


@compiled
def finish(m, s, state, row, head):
    """Divide by the sum and write the head's output."""
    factor = np.float32(1) / f32(state)[1]
    x = f32(state + _STATE)
    y = f32(s.mixed + row * s.mixed_stride + head * m.head_dim * 4)
    if vectors.is_parted(s.kv_kind, m.head_pad):
        for block in range(0, m.head_dim, 32):
            for i in range(16):
                y[block + 2 * i] = x[block + i] * factor
                y[block + 2 * i + 1] = x[block + 16 + i] * factor
    else:
        for i in range(m.head_dim):
            y[i] = x[i] * factor


@compiled
def attend_row(m, s, layer, cache, sequence, row, head, count, chosen, chunk, states, stride, member):
    """One chunk of one row for the query heads of a KV head, left in `states`; False where it holds nothing."""
    start, shared = np.int64(i32(s.row_starts)[sequence]), m.heads // m.kv_heads
    entries, weights = s.entries + member * 2 * (CHUNK + 16) * 8, s.chunk + member * MAX_QUERIES * CHUNK * 4
    mask = visible(s, start, row)
    length = count + (row - start + 1 if mask == np.uint64(0) else count_bits(mask))
    oldest = first_entry(s, start, row, mask, count, chosen, length, layer.window)
    low, high = max(chunk * CHUNK, oldest), min((chunk + 1) * CHUNK, length)
    if low >= high:
        return False
    fill_entries(s, sequence, start, mask, head, m.kv_heads, count, chosen, low, high, entries)
    for g in range(0, shared, MAX_QUERIES):
        query = s.query + row * s.query_stride + (head * shared + g) * m.head_pad * 4
        n = min(MAX_QUERIES, shared - g)
        attend_chunk(m, s, cache, query, n, entries, high - low, weights, states + g * stride, stride)
    return True


@compiled
def is_common(m, layer, chunk, count):
    """Whether all rows of a block read all of a chunk: it lies among the committed entries, uncut by a window."""
    return (chunk + 1) * CHUNK <= count and layer.window == 0 and vectors.is_whole(m.head_pad)


@compiled
def gather_queries(m, s, first, last, head, member):
    """The queries of rows first .. last - 1 for one KV head, one behind the other, for attend_common."""
    shared, size = m.heads // m.kv_heads, m.head_pad
    target = s.common + member * s.common_stride + 16 * size * 4
    for row in range(first, last):
        query = s.query + row * s.query_stride + head * shared * size * 4
        y, x = f32(target + (row - first) * shared * size * 4), f32(query)
        for i in range(shared * size):
            y[i] = x[i]


@compiled
def attend_common(m, s, cache, sequence, start, queries, head, count, chosen, chunk, step, member):
    """One chunk that all rows of a block read, for `queries` gathered queries; gives the address of their results.

    Entries are found and read once. Every query's arithmetic is that of attend_chunk. While scores are computed, the
    chunk's values are on their way; while values are summed, the keys of the head's chunk `step` further on, which is
    this thread's.
    """
    size, entries = m.head_pad, s.entries + member * 2 * (CHUNK + 16) * 8
    flat = s.common + member * s.common_stride
    query = flat + 16 * size * 4
    weights = query + BLOCK * (m.heads // m.kv_heads) * size * 4
    out = weights + BLOCK * (m.heads // m.kv_heads) * CHUNK * 4
    low = chunk * CHUNK
    fill_entries(s, sequence, start, np.uint64(0), head, m.kv_heads, count, chosen, low, low + CHUNK, entries)
    following, low = entries, low + step * CHUNK
    if low + CHUNK <= count:
        following = entries + (CHUNK + 16) * 8
        fill_entries(s, sequence, start, np.uint64(0), head, m.kv_heads, count, chosen, low, low + CHUNK, following)
    keys, scales = cache.keys, cache.key_scales
    scores_many(
        *(s.kv_kind, query, queries, keys, scales, cache.values, entries, CHUNK, size),
        *(flat, weights, CHUNK * 4),
    )
    for j in range(queries):
        row = weights + j * CHUNK * 4
        p = f32(row)
        top = vectors.highest(row, CHUNK)
        for i in range(CHUNK):
            p[i] = maths.exp32(p[i] - top)
        result = f32(out + j * s.state_stride)
        result[0], result[1] = top, vectors.total(row, CHUNK)
    mix_many(
        *(s.kv_kind, queries, weights, CHUNK * 4, cache.values, cache.value_scales, entries, CHUNK, size),
        *(keys, following, out + _STATE, s.state_stride),
    )
    return out


@compiled
def copy_state(source, target, dim):
    """A chunk's result."""
    x, y = f32(source), f32(target)
    y[0], y[1] = x[0], x[1]
    a, b = f32(source + _STATE), f32(target + _STATE)
    for i in range(dim):
        b[i] = a[i]


@compiled
def attend_block(m, s, layer, cache, number, sequence, first, last, head, member):
    """Rows first .. last - 1 of a sequence, all query heads of one KV head, all chunks."""
    start, shared = np.int64(i32(s.row_starts)[sequence]), m.heads // m.kv_heads
    count, chosen = committed(s, sequence, head, number)
    states = s.state + member * (BLOCK + 1) * shared * s.state_stride
    pieces = states + BLOCK * shared * s.state_stride
    for i in range((last - first) * shared):
        clear(states + i * s.state_stride, m.head_pad)
    gather_queries(m, s, first, last, head, member)
    for chunk in range((count + last - start + CHUNK - 1) // CHUNK):
        if is_common(m, layer, chunk, count):
            queries = (last - first) * shared
            found = attend_common(m, s, cache, sequence, start, queries, head, count, chosen, chunk, 1, member)
            for j in range(queries):
                merge(states + j * s.state_stride, found + j * s.state_stride, m.head_pad)
            continue
        for row in range(first, last):
            stride = s.state_stride
            if attend_row(m, s, layer, cache, sequence, row, head, count, chosen, chunk, pieces, stride, member):
                for g in range(shared):
                    merge(states + ((row - first) * shared + g) * stride, pieces + g * stride, m.head_pad)
    for i in range((last - first) * shared):
        finish(m, s, states + i * s.state_stride, first + i // shared, head * shared + i % shared)


@compiled
def attend_piece(m, s, layer, cache, number, sequence, first, last, head, chunk, member, members):
    """One chunk of rows first .. last - 1, left in the table of partial results."""
    shared = m.heads // m.kv_heads
    count, chosen = committed(s, sequence, head, number)
    stride = s.chunks * s.state_stride
    if is_common(m, layer, chunk, count):
        start, queries = np.int64(i32(s.row_starts)[sequence]), (last - first) * shared
        gather_queries(m, s, first, last, head, member)
        found = attend_common(m, s, cache, sequence, start, queries, head, count, chosen, chunk, members, member)
        for j in range(queries):
            row, h = first + j // shared, head * shared + j % shared
            place = s.partial + ((row * m.heads + h) * s.chunks + chunk) * s.state_stride
            copy_state(found + j * s.state_stride, place, m.head_pad)
        return
    for row in range(first, last):
        place = s.partial + ((row * m.heads + head * shared) * s.chunks + chunk) * s.state_stride
        if not attend_row(m, s, layer, cache, sequence, row, head, count, chosen, chunk, place, stride, member):
            for g in range(shared):
                f32(place + g * stride)[1] = np.float32(-1)  # nothing here


@compiled
def attend_whole(m, s, layer, cache, number, member, members):
    """Many rows: a unit is (block of rows, KV head) with all its chunks."""
    unit = 0
    for sequence in range(s.sequences):
        start, end = np.int64(i32(s.row_starts)[sequence]), np.int64(i32(s.row_starts)[sequence + 1])
        for first in range(start, end, BLOCK):
            for head in range(m.kv_heads):
                if unit % members == member:
                    last = min(first + BLOCK, end)
                    attend_block(m, s, layer, cache, number, sequence, first, last, head, member)
                unit += 1


@compiled
def most_committed(m, s, sequence, number):
    """The longest list of committed entries that a KV head of a sequence reads."""
    most = 0
    for head in range(m.kv_heads):
        count, _ = committed(s, sequence, head, number)
        if count > most:
            most = count
    return most


@compiled
def attend_split(m, s, layer, cache, number, member, members):
    """Few rows: a unit is (block of rows, chunk, KV head); then the chunks of every (row, head) are merged.

    Pages hold all KV heads, so units in this order read memory from end to end.
    """
    unit = 0
    for sequence in range(s.sequences):
        start, end = np.int64(i32(s.row_starts)[sequence]), np.int64(i32(s.row_starts)[sequence + 1])
        for first in range(start, end, BLOCK):
            last = min(first + BLOCK, end)
            most = most_committed(m, s, sequence, number)
            for chunk in range((most + last - start + CHUNK - 1) // CHUNK):
                for head in range(m.kv_heads):
                    if unit % members == member:
                        attend_piece(m, s, layer, cache, number, sequence, first, last, head, chunk, member, members)
                    unit += 1
    meet(s.sync, members)
    begin, finish_ = share(s.rows * m.heads, member, members)
    state = s.state + member * (BLOCK + 1) * (m.heads // m.kv_heads) * s.state_stride
    sequence = 0
    for unit in range(begin, finish_):
        row, h = unit // m.heads, unit % m.heads
        while np.int64(i32(s.row_starts)[sequence + 1]) <= row:
            sequence += 1
        start, end = np.int64(i32(s.row_starts)[sequence]), np.int64(i32(s.row_starts)[sequence + 1])
        last = min(start + (row - start) // BLOCK * BLOCK + BLOCK, end)
        count, _ = committed(s, sequence, h // (m.heads // m.kv_heads), number)
        clear(state, m.head_pad)
        for chunk in range((count + last - start + CHUNK - 1) // CHUNK):
            piece = s.partial + ((row * m.heads + h) * s.chunks + chunk) * s.state_stride
            if f32(piece)[1] != np.float32(-1):
                merge(state, piece, m.head_pad)
        finish(m, s, state, row, h)
