"""A whole draft of an EAGLE-3 head as one compiled call: fuse, feed, then a chain of tokens, each fed back.

    feed:   states of the target -> fc -> g; keys and values of committed rows that draft nothing themselves
    chain:  [embedding, state] -> attention -> MLP -> LM head -> best token and its probability; again behind it

Every thread of the pool runs it, as in step.py. Keys and values of a sequence are one fp32 buffer of its own
[KV heads, room, head_pad]; drafted rows stand behind the committed ones until the next call overwrites them.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
from numba import njit, typeof, types

from outrider.kernels.cpu import maths, vectors
from outrider.kernels.cpu.attention import attend_chunk, clear, finish, merge
from outrider.kernels.cpu.layout import BLOCK, CHUNK, MATRIX, MODEL, PRIVATE, STEP
from outrider.kernels.cpu.machine import SOURCES, compiled, f32, i64, meet, share
from outrider.kernels.cpu.rows import quantise_row, rms_norm
from outrider.kernels.cpu.step import ADD, STORE, prepare, project, project_gated
from outrider.kernels.cpu.unpack import expand_channel
from outrider.kernels.cpu.vectors import MAX_QUERIES

FC, Q, K, V, OUT, GATE, UP, DOWN, LM, EMBED = range(10)  # places in the table of matrices

#: Beside MODEL and STEP. Of the head: addresses of its norms and of `ids` (target id of every draft id). Of the call:
#: rows in all, those that are only fed (they come first), sequences that draft; per row the token one ahead, position,
#: slot and sequence; per sequence keys, values, room and depth. `ahead` tokens and confidences are [depth, chains].
_HEAD = (
    *("input_norm", "hidden_norm", "post_norm", "final_norm", "residual_normed", "ids", "iota"),
    *("rows", "feeds", "chains", "features", "features_stride", "tokens", "positions", "slots", "owners"),
    *("keys", "values", "room", "depths", "joined", "joined_stride", "logits", "logits_stride"),
    *("next", "alive", "found", "drafted", "confidence"),
)
HEAD = np.dtype([(name, np.int64) for name in _HEAD] + [("floor", np.float32), ("unused", np.float32)])
FOUND = 16  # bytes of one (member, row): best index, its value, sum of exponentials

#: Spelt out where it is used: LLVM would optimise every function below again for each of these above it.
spelt_out: Any = njit(nogil=True, error_model="numpy", inline="always")

_LOWEST = np.float32(-np.inf)
Pool = namedtuple("Pool", ("keys", "values", "key_scales", "value_scales"))


@compiled
def join(m, s, h, embed, states, tokens, rows, groups, member, members):
    """joined = [norm of the token's embedding, norm of the state], quantised; gives the first prepared row."""
    private = rows <= PRIVATE
    base = member * PRIVATE if private else 0
    first, last = (0, rows) if private else share(rows, member, members)
    for r in range(first, last):
        out = h.joined + (base + r) * h.joined_stride
        expand_channel(embed, i64(tokens)[r], out)
        rms_norm(out, m.hidden, h.input_norm, m.eps, out)
        rms_norm(states + r * s.x_stride, m.hidden, h.hidden_norm, m.eps, out + m.hidden * 4)
        if m.integers:
            meta = s.meta + (base + r) * s.meta_stride
            quantise_row(out, groups, s.q + (base + r) * s.q_stride, meta, s.meta_plane)
    if not private:
        meet(s.sync, members)
    return base


@compiled
def turn(m, s, position, source, scale, target):
    """Rotate one head to its position, times `scale`."""
    half = m.head_dim // 2
    x, y = f32(source), f32(target)
    cos, sin = f32(s.cos + position * half * 4), f32(s.sin + position * half * 4)
    for i in range(half):
        a, b = x[i], x[half + i]
        y[i] = (a * cos[i] - b * sin[i]) * scale
        y[half + i] = (b * cos[i] + a * sin[i]) * scale


@compiled
def place_entry(m, s, h, projected, row, ahead, head):
    """Key and value of one KV head into the sequence's buffer, `ahead` slots behind the row's own."""
    owner = i64(h.owners)[row]
    at = (head * i64(h.room)[owner] + i64(h.slots)[row] + ahead) * m.head_pad * 4
    raw = s.qkv + projected * s.qkv_stride + (m.q_width + head * m.head_dim) * 4
    turn(m, s, i64(h.positions)[row] + ahead, raw, np.float32(1), i64(h.keys)[owner] + at)
    x, y = f32(raw + m.kv_width * 4), f32(i64(h.values)[owner] + at)
    for i in range(m.head_dim):
        y[i] = x[i]


@spelt_out
def feed(m, s, h, w, member, members):
    """Fused states of all rows into x; keys and values of the rows that draft nothing."""
    base = prepare(m, s, 0, 0, h.features, h.features_stride, 0, h.rows, w[FC].groups, member, members)
    project(w[FC], s, base, h.features, h.features_stride, h.rows, s.x, s.x_stride, STORE, member, members)
    meet(s.sync, members)
    if h.feeds == 0:
        return
    base = join(m, s, h, w[EMBED], s.x, h.tokens, h.feeds, w[K].groups, member, members)
    joined, target = h.joined + base * h.joined_stride, s.qkv + m.q_width * 4
    project(w[K], s, base, joined, h.joined_stride, h.feeds, target, s.qkv_stride, STORE, member, members)
    target += m.kv_width * 4
    project(w[V], s, base, joined, h.joined_stride, h.feeds, target, s.qkv_stride, STORE, member, members)
    meet(s.sync, members)
    first, last = share(h.feeds * m.kv_heads, member, members)
    for unit in range(first, last):
        row, head = unit // m.kv_heads, unit % m.kv_heads
        place_entry(m, s, h, row, row, 0, head)
    meet(s.sync, members)


@compiled
def attend(m, s, h, row, ahead, head, member):
    """All query heads of one KV head of a drafting row over its sequence's entries, its own included."""
    place, shared = h.feeds + row, m.heads // m.kv_heads
    owner, position = i64(h.owners)[place], i64(h.positions)[place] + ahead
    place_entry(m, s, h, row, place, ahead, head)
    query = s.query + row * s.query_stride + head * shared * m.head_pad * 4
    for j in range(shared):
        raw = s.qkv + row * s.qkv_stride + (head * shared + j) * m.head_dim * 4
        turn(m, s, position, raw, m.scale, query + j * m.head_pad * 4)
    stride = s.state_stride
    states = s.state + member * (BLOCK + 1) * shared * stride
    pieces, weights = states + shared * stride, s.chunk + member * MAX_QUERIES * CHUNK * 4
    at = head * i64(h.room)[owner] * m.head_pad * 4
    pool = Pool(i64(h.keys)[owner] + at, i64(h.values)[owner] + at, np.int64(0), np.int64(0))
    count = i64(h.slots)[place] + ahead + 1
    for j in range(shared):
        clear(states + j * stride, m.head_pad)
    for start in range(0, count, CHUNK):
        n, entries = min(CHUNK, count - start), h.iota + start * 8
        for j in range(0, shared, MAX_QUERIES):
            q, queries = query + j * m.head_pad * 4, min(MAX_QUERIES, shared - j)
            attend_chunk(m, s, pool, q, queries, entries, n, weights, pieces + j * stride, stride)
        for j in range(shared):
            merge(states + j * stride, pieces + j * stride, m.head_pad)
    for j in range(shared):
        finish(m, s, states + j * stride, row, head * shared + j)


@spelt_out
def mix(m, s, h, base, states, rows, ahead, member, members):
    """Attention of the drafting rows; where the head says so, the residual becomes the normed state."""
    first, last = share(rows * m.kv_heads, member, members)
    for unit in range(first, last):
        attend(m, s, h, unit // m.kv_heads, ahead, unit % m.kv_heads, member)
    if h.residual_normed:
        first, last = share(rows, member, members)
        for r in range(first, last):
            x, y = f32(states + r * s.x_stride), f32(h.joined + (base + r) * h.joined_stride + m.hidden * 4)
            for i in range(m.hidden):
                x[i] = y[i]


@spelt_out
def draft_token(m, s, h, w, ahead, rows, member, members):
    """One more token for the first `rows` drafting sequences."""
    x = s.x + h.feeds * s.x_stride
    tokens = h.tokens + h.feeds * 8 if ahead == 0 else h.next + member * h.chains * 8
    base = join(m, s, h, w[EMBED], x, tokens, rows, w[Q].groups, member, members)
    joined = h.joined + base * h.joined_stride
    for c in range(3):
        column = 0 if c == 0 else m.q_width + (0 if c == 1 else m.kv_width)
        target = s.qkv + column * 4
        project(w[Q + c], s, base, joined, h.joined_stride, rows, target, s.qkv_stride, STORE, member, members)
    meet(s.sync, members)
    mix(m, s, h, base, x, rows, ahead, member, members)
    meet(s.sync, members)
    base = prepare(m, s, 0, 0, s.mixed, s.mixed_stride, 0, rows, w[OUT].groups, member, members)
    project(w[OUT], s, base, s.mixed, s.mixed_stride, rows, x, s.x_stride, ADD, member, members)
    meet(s.sync, members)
    base = prepare(m, s, h.post_norm, 0, x, s.x_stride, 0, rows, w[UP].groups, member, members)
    normed = s.normed + base * s.x_stride
    project_gated(w[GATE], w[UP], m, s, base, normed, s.x_stride, rows, member, members)
    meet(s.sync, members)
    base = prepare(m, s, 0, 0, s.hidden, s.hidden_stride, 0, rows, w[DOWN].groups, member, members)
    project(w[DOWN], s, base, s.hidden, s.hidden_stride, rows, x, s.x_stride, ADD, member, members)
    meet(s.sync, members)
    read_out(m, s, h, w[LM], x, ahead, rows, member, members)


@spelt_out
def read_out(m, s, h, lm, x, ahead, rows, member, members):
    """Logits over the reduced vocabulary, then the best of every row."""
    base = prepare(m, s, h.final_norm, 0, x, s.x_stride, 0, rows, lm.groups, member, members)
    normed = s.normed + base * s.x_stride
    project(lm, s, base, normed, s.x_stride, rows, h.logits, h.logits_stride, STORE, member, members)
    first, last = share(lm.tiles, member, members)
    for r in range(rows):
        row = h.logits + r * h.logits_stride
        if last == lm.tiles:
            for c in range(lm.n, lm.tiles * 16):
                f32(row)[c] = _LOWEST  # what fills up the last tile is no token
        found = h.found + (member * h.chains + r) * FOUND
        survey(s, row, first * 16, last * 16, found, member)
    meet(s.sync, members)
    settle(h, ahead, rows, member, members)


@compiled
def survey(s, row, first, last, found, member):
    """The best of channels first .. last - 1 of one row, and the sum of all exponentials below it."""
    values, spare = f32(row), s.chunk + member * MAX_QUERIES * CHUNK * 4
    top, best, total = vectors.highest(row + first * 4, last - first), first, np.float32(0)
    while best + 1 < last and values[best] != top:
        best += 1
    p = f32(spare)
    for start in range(first, last, CHUNK):
        n = min(CHUNK, last - start)
        for i in range(n):
            p[i] = maths.exp32(values[start + i] - top)
        total += vectors.total(spare, n)
    i64(found)[0] = best
    f32(found)[2], f32(found)[3] = top, total


@compiled
def settle(h, ahead, rows, member, members):
    """The best token of every row and its probability; every thread for itself, the first one tells."""
    for r in range(rows):
        top, winner, total = _LOWEST, np.int64(0), np.float32(0)
        for t in range(members):
            found = h.found + (t * h.chains + r) * FOUND
            if f32(found)[2] > top:
                top, winner = f32(found)[2], i64(found)[0]
        for t in range(members):
            found = h.found + (t * h.chains + r) * FOUND
            total += f32(found)[3] * maths.exp32(f32(found)[2] - top)
        confidence = np.float32(1) / total
        i64(h.next)[member * h.chains + r] = i64(h.ids)[winner]
        if not confidence >= h.floor:  # NaN stops too
            i64(h.alive)[member * h.chains + r] = 0
        if member == 0:
            i64(h.drafted)[ahead * h.chains + r] = i64(h.ids)[winner]
            f32(h.confidence)[ahead * h.chains + r] = confidence


@compiled
def going(h, ahead, member):
    """How many sequences, the deepest first, still want a token; 0 where all of them have stopped."""
    rows, alive = 0, False
    while rows < h.chains and i64(h.depths)[rows] > ahead:
        alive = alive or i64(h.alive)[member * h.chains + rows] != 0
        rows += 1
    return rows if alive else 0


@spelt_out
def run_draft(m, s, h, w, first, last, member, members):
    """One thread's part of drafting tokens first .. last - 1; the first call reads what the head has not seen yet."""
    if first == 0:
        feed(m, s, h, w, member, members)
    for ahead in range(first, last):
        rows = going(h, ahead, member)
        if rows == 0:
            break
        draft_token(m, s, h, w, ahead, rows, member, members)
    meet(s.sync, members)


def _cached_head(sources: int) -> Any:
    """The entry point, cached on disk under the digest of all kernel sources."""

    @njit(nogil=True, error_model="numpy", cache=True)
    def run_head(model, head, matrices, step, first, last, member, members):
        if sources != 0:
            run_draft(model[0], step[0], head[0], matrices, first, last, member, members)

    return run_head


#: run_head(model, head, matrices, step, first, last, member, members), called by every member at once: before token 0
#: the committed rows are fed, then tokens first .. last - 1 of every chain are drafted.
run_head = _cached_head(SOURCES)


def prepare_head() -> None:
    """Compile the head's step, or load it from Numba's cache, without running it."""
    records = [typeof(np.zeros(1, kind)) for kind in (MODEL, HEAD, MATRIX, STEP)]
    run_head.compile((*records, *[types.int64] * 4))
