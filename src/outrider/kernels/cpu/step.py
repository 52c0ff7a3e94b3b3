"""A whole forward pass, or a range of its layers, as one compiled function that every thread of the pool runs.

Each thread takes its share of channels, heads or rows of every phase; between phases the threads meet. Who computes
what changes no bit: every output is one chain of operations in one order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, typeof, types

from outrider.kernels.cpu import formats, vectors
from outrider.kernels.cpu.attention import attend_split, attend_whole, place_head, place_heads
from outrider.kernels.cpu.layout import (
    CACHE,
    DOWN,
    EMBED,
    GATE,
    HEAD,
    LAYER,
    MATRIX,
    MODEL,
    PRIVATE,
    SPLIT,
    STEP,
    UP,
    WO,
    WQ,
)
from outrider.kernels.cpu.machine import (
    SOURCES,
    compiled,
    f32,
    i32,
    i64,
    meet,
    share,
)
from outrider.kernels.cpu.product import MAX_ROWS, multiply
from outrider.kernels.cpu.rows import activate, layer_norm, quantise_row, rms_norm
from outrider.kernels.cpu.unpack import expand_channel

_SPAN = 128  # rows that pass through a tile before the next tile: their integers stay in the cache
STORE, ADD = 0, 1


@compiled
def normalise(m, source, weight, bias, out):
    """One row [hidden] through the model's kind of norm."""
    if m.layer_norm:
        layer_norm(source, m.hidden, weight, bias, m.eps, out)
    else:
        rms_norm(source, m.hidden, weight, m.eps, out)


@compiled
def prepare(m, s, weight, bias, source, stride, index, rows, groups, member, members):
    """Norm (where `weight` is given) and quantise `rows` rows for the next product; gives the first prepared row.

    Few rows: each thread its own copy. Many: each thread its share, then they meet.
    """
    private = rows <= PRIVATE
    base = member * PRIVATE if private else 0
    first, last = (0, rows) if private else share(rows, member, members)
    for r in range(first, last):
        at = source + (r if index == 0 else np.int64(i32(index)[r])) * stride
        if weight != 0:
            target = s.normed + (base + r) * s.x_stride
            normalise(m, at, weight, bias, target)
            at = target
        if m.integers:
            meta = s.meta + (base + r) * s.meta_stride
            quantise_row(at, groups, s.q + (base + r) * s.q_stride, meta, s.meta_plane)
    if not private:
        meet(s.sync, members)
    return base


@compiled
def multiply_tile(matrix, tile, s, base, floats, stride, rows, out, out_stride, add):
    """out = or += tile number `tile` times `rows` <= 8 prepared rows from `base` on, and the bias."""
    w = matrix.data + tile * matrix.tile_bytes
    bias = matrix.bias + tile * 64 if matrix.bias != 0 else 0
    meta, meta_stride, plane = s.meta + base * s.meta_stride, s.meta_stride, s.meta_plane
    x, x_stride = s.q + base * s.q_stride, s.q_stride
    if matrix.kind == formats.F32:
        x, x_stride = floats, stride
    multiply(
        *(s.product, matrix.kind, rows, w, bias, matrix.groups, x, x_stride),
        *(meta, meta_stride, plane, out, out_stride, add),
    )


@compiled
def project(matrix, s, base, floats, stride, rows, target, target_stride, add, member, members):
    """target[r] = (or +=) matrix times prepared row r, for this thread's tiles."""
    first, last = share(matrix.tiles, member, members)
    for span in range(0, rows, _SPAN):
        for tile in range(first, last):
            for r in range(span, min(span + _SPAN, rows), MAX_ROWS):
                n, out = min(MAX_ROWS, rows - r), target + r * target_stride + tile * 64
                multiply_tile(matrix, tile, s, base + r, floats + r * stride, stride, n, out, target_stride, add)


@compiled
def project_gated(gate, up, m, s, base, floats, stride, rows, member, members):
    """hidden[r] = act(gate) * up, or act(up) where the model has no gate."""
    out, other = s.tile + member * 2048, s.tile + member * 2048 + 512
    y, u = f32(out), f32(other)
    first, last = share(up.tiles, member, members)
    for span in range(0, rows, _SPAN):
        for tile in range(first, last):
            for r in range(span, min(span + _SPAN, rows), MAX_ROWS):
                n = min(MAX_ROWS, rows - r)
                x = floats + r * stride
                multiply_tile(gate if m.gated else up, tile, s, base + r, x, stride, n, out, 64, 0)
                activate(m.activation, out, n * 16)
                if m.gated:
                    multiply_tile(up, tile, s, base + r, x, stride, n, other, 64, 0)
                    for i in range(n * 16):
                        y[i] *= u[i]
                for i in range(n):
                    vectors.copy(out + i * 64, s.hidden + (r + i) * s.hidden_stride + tile * 64)


@compiled
def embed_rows(m, s, matrix, member, members):
    """x = the tokens' embeddings, plus learned positions where the model has them."""
    first, last = share(s.rows, member, members)
    for r in range(first, last):
        target = s.x + r * s.x_stride
        expand_channel(matrix, np.int64(i32(s.tokens)[r]), target)
        if m.pos_embed != 0:
            at = np.int64(i32(s.positions)[r]) + m.position_offset
            x, learned = f32(target), f32(m.pos_embed + at * m.hidden * 4)
            for i in range(m.hidden):
                x[i] += learned[i]
    meet(s.sync, members)


@compiled
def run_layer(m, s, layer, matrices, cache, number, member, members):
    """One thread's part of a layer for all rows: attention, then the MLP, each added to the residual stream."""
    rows = s.rows
    base = prepare(
        m, s, layer.attn_norm, layer.attn_norm_bias, s.x, s.x_stride, 0, rows, matrices[WQ].groups, member, members
    )
    normed = s.normed + base * s.x_stride
    for c in range(3):
        column = 0 if c == 0 else m.q_width + (0 if c == 1 else m.kv_width)
        target = s.qkv + column * 4
        project(matrices[c], s, base, normed, s.x_stride, rows, target, s.qkv_stride, STORE, member, members)
    meet(s.sync, members)
    place_heads(m, s, layer, cache, member, members)
    if layer.query_tap >= 0 and s.queries != 0:
        copy_queries(m, s, layer, member, members)
    meet(s.sync, members)
    if rows <= SPLIT:
        attend_split(m, s, layer, cache, number, member, members)
    else:
        attend_whole(m, s, layer, cache, number, member, members)
    meet(s.sync, members)
    base = prepare(m, s, 0, 0, s.mixed, s.mixed_stride, 0, rows, matrices[WO].groups, member, members)
    project(matrices[WO], s, base, s.mixed, s.mixed_stride, rows, s.x, s.x_stride, ADD, member, members)
    meet(s.sync, members)
    base = prepare(
        m, s, layer.mlp_norm, layer.mlp_norm_bias, s.x, s.x_stride, 0, rows, matrices[UP].groups, member, members
    )
    normed = s.normed + base * s.x_stride
    project_gated(matrices[GATE], matrices[UP], m, s, base, normed, s.x_stride, rows, member, members)
    meet(s.sync, members)
    base = prepare(m, s, 0, 0, s.hidden, s.hidden_stride, 0, rows, matrices[DOWN].groups, member, members)
    project(matrices[DOWN], s, base, s.hidden, s.hidden_stride, rows, s.x, s.x_stride, ADD, member, members)
    meet(s.sync, members)
    if layer.tap >= 0:
        copy_features(m, s, layer.tap, member, members)


@compiled
def copy_features(m, s, tap, member, members):
    """features[tap] = x."""
    first, last = share(s.rows, member, members)
    for r in range(first, last):
        x, y = f32(s.x + r * s.x_stride), f32(s.features + (tap * s.rows + r) * m.hidden * 4)
        for i in range(m.hidden):
            y[i] = x[i]


@compiled
def copy_queries(m, s, layer, member, members):
    """queries[tap] = the logit rows' queries, normed and rotated but not scaled. Units are (row, head)."""
    first, last = share(s.wanted * m.heads, member, members)
    for unit in range(first, last):
        row, head = np.int64(i32(s.logit_rows)[unit // m.heads]), unit % m.heads
        source = s.qkv + row * s.qkv_stride + head * m.head_dim * 4
        target = s.queries + (layer.query_tap * s.wanted * m.heads + unit) * m.head_pad * 4
        place_head(m, s, row, source, layer.q_norm, m.rope, np.float32(1), target)


@compiled
def read_out(m, s, matrix, member, members):
    """Best token (lowest id of the best; NaN counts as best) of every logit row, and the logits where wanted."""
    rows, out = s.wanted, s.tile + member * 2048
    base = prepare(
        m, s, m.final_norm, m.final_norm_bias, s.x, s.x_stride, s.logit_rows, rows, matrix.groups, member, members
    )
    lead, found = f32(s.lead + member * rows * 4), i64(s.best + member * rows * 8)
    for r in range(rows):
        lead[r] = np.float32(-np.inf)
        found[r] = matrix.n
    first, last = share(matrix.tiles, member, members)
    for span in range(0, rows, _SPAN):
        for tile in range(first, last):
            for r in range(span, min(span + _SPAN, rows), MAX_ROWS):
                n, x = min(MAX_ROWS, rows - r), s.normed + (base + r) * s.x_stride
                multiply_tile(matrix, tile, s, base + r, x, s.x_stride, n, out, 64, 0)
                channels = min(16, matrix.n - tile * 16)
                for i in range(n):
                    if s.logits != 0:
                        y, z = f32(out + i * 64), f32(s.logits + ((r + i) * matrix.n + tile * 16) * 4)
                        for c in range(channels):
                            z[c] = y[c]
                    update_best(out + i * 64, channels, tile * 16, lead, found, r + i)
    meet(s.sync, members)
    if member == 0:
        settle(s, rows, matrix.n, members)


@compiled
def update_best(values, channels, first, lead, found, row):
    """Keep the better of a row's best so far and 16 new values (fewer at the vocabulary's end)."""
    top = vectors.highest(values, 16)
    if channels == 16 and top <= lead[row] and not vectors.odd(values):
        return
    y = f32(values)
    for c in range(channels):
        if y[c] > lead[row] or (math.isnan(y[c]) and not math.isnan(lead[row])):
            lead[row] = y[c]
            found[row] = first + c


@compiled
def settle(s, rows, vocabulary, members):
    """Choose among the threads' best tokens; threads hold ascending ranges of the vocabulary."""
    for r in range(rows):
        top, winner = f32(s.lead)[r], i64(s.best)[r]
        for t in range(1, members):
            value = f32(s.lead)[t * rows + r]
            if value > top or (math.isnan(value) and not math.isnan(top)):
                top, winner = value, i64(s.best)[t * rows + r]
        i64(s.best)[r] = winner if winner < vocabulary else 0


def _cached_step(sources: int) -> Any:
    """The entry point, cached on disk under the digest of all kernel sources."""

    @njit(nogil=True, error_model="numpy", cache=True)
    def run_step(model, layers, matrices, caches, step, first, last, member, members):
        if sources != 0:
            run_layers(model[0], layers, matrices, caches, step[0], first, last, member, members)

    return run_step


@compiled
def run_layers(m, layers, matrices, caches, s, first, last, member, members):
    """One thread's part of layers first .. last - 1; embeds before the first one and reads out behind the last."""
    if first == 0:
        embed_rows(m, s, matrices[m.num_layers, EMBED], member, members)
    for number in range(first, last):
        run_layer(m, s, layers[number], matrices[number], caches[number], number, member, members)
    if last == m.num_layers and s.wanted > 0:
        read_out(m, s, matrices[m.num_layers, HEAD], member, members)
    meet(s.sync, members)


#: run_step(model, layers, matrices, caches, step, first, last, member, members), called by every member at once:
#: layers first .. last - 1; before layer 0 the embedding, after the last layer the LM head.
run_step = _cached_step(SOURCES)


def prepare_step() -> None:
    """Compile the step, or load it from Numba's cache, without running it."""
    tables = [typeof(np.zeros(1, kind)) for kind in (MODEL, LAYER)]
    matrices = typeof(np.zeros((1, 1), MATRIX))
    rest = [typeof(np.zeros(1, kind)) for kind in (CACHE, STEP)]
    run_step.compile((*tables, matrices, *rest, *[types.int64] * 4))
