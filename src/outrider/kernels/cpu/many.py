"""Attention of many queries to the same entries: several rows of a sequence, and the query heads of a group.

16 rows of K are turned into floats and transposed once, so that a lane is an entry; then every query meets them. A
score's arithmetic is that of vectors.scores, value for value: 16 partial sums, folded by halves, quarters, eighths and
pairs. Here those are 16 vectors of 16 entries each, so folding them takes additions alone and no shuffles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from outrider.kernels.cpu.emit import (
    FLOAT,
    I32,
    I64,
    LANES_F32,
    LANES_I32,
    constant,
    load,
    loop,
    number,
    prefetch,
    splat,
    store,
    vector,
)
from outrider.kernels.cpu.machine import compiled, intrinsic
from outrider.kernels.cpu.vectors import (
    BFLOAT16,
    FLOAT32,
    INT8,
    ITEM_BYTES,
    MAX_QUERIES,
    SPAN,
    WHOLE,
    case_of,
    emit_mix,
    mix,
    row_at,
    row_scale,
    switch_cases,
)

#: Partial sums in the order in which a depth-first fold needs them: i and i + 8, then their sum and that of i + 4, ...
_FOLDED = (0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15)
_TOGETHER = 3  # queries that share a read of the transposed rows; their sums must fit the registers
_NEAR = 2  # into the second-level cache: a chunk of K and V does not fit the first


def _pick(b: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    """Lanes of x (0 .. 15) and y (16 .. 31) as one vector."""
    return b.shuffle_vector(x, y, ir.Constant(vector(I32, 16), lanes))


def _interleave(b: Any, x: Any, y: Any, unit: int, half: int) -> Any:
    """In every quarter of 4 lanes: `unit` lanes of x, then of y, and so on, of the quarter's lower or upper half."""
    lanes = [quarter + 2 * half + i for quarter in range(0, 16, 4) for i in range(2)]
    pairs = [lanes[i : i + unit] for i in range(0, 8, unit)]
    return _pick(b, x, y, [lane + side for pair in pairs for side in (0, 16) for lane in pair])


def _quarters(b: Any, x: Any, y: Any, first: int, step: int) -> Any:
    """Quarters first and first + step of x, then of y."""
    chosen = [side + 4 * quarter for side in (0, 16) for quarter in (first, first + step)]
    return _pick(b, x, y, [start + i for start in chosen for i in range(4)])


def transpose(b: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 lanes: result i holds lane i of every row."""
    pairs = [_interleave(b, rows[i], rows[i + 1], 1, half) for i in range(0, 16, 2) for half in (0, 1)]
    fours = [
        [_interleave(b, pairs[i + high], pairs[i + 2 + high], 2, half) for high in (0, 1) for half in (0, 1)]
        for i in range(0, 16, 4)
    ]  # fours[k][c]: quarter q holds lane 4 q + c of rows 4 k .. 4 k + 3
    result: list[Any] = [None] * 16
    for c in range(4):
        one, two, three, four = (group[c] for group in fours)
        for half in (0, 1):
            low, high = _quarters(b, one, two, 2 * half, 1), _quarters(b, three, four, 2 * half, 1)
            for odd in (0, 1):
                result[4 * (2 * half + odd) + c] = _quarters(b, low, high, odd, 2)
    return result


def _spread(b: Any, kind: int, word: int, lane: int, packed: Any) -> list[tuple[int, Any]]:
    """What the words of 16 rows hold, as floats (int8: not yet scaled), each with its place in a query."""
    if kind == FLOAT32:
        return [(16 * word + lane, b.bitcast(packed, LANES_F32))]
    if kind == BFLOAT16:  # queries keep the even values of every 32 ahead of the odd ones
        even, odd = b.shl(packed, constant(LANES_I32, 16)), b.and_(packed, constant(LANES_I32, 0xFFFF0000))
        return [(32 * word + 16 * i + lane, b.bitcast(half, LANES_F32)) for i, half in enumerate((even, odd))]
    parts = [b.shl(packed, constant(LANES_I32, 24 - 8 * i)) for i in range(3)] + [packed]
    floats = [b.sitofp(b.ashr(part, constant(LANES_I32, 24)), LANES_F32) for part in parts]
    return [(64 * word + 4 * lane + i, value) for i, value in enumerate(floats)]


def _score(b: Any, dim: int, queries: list[Any], flat: Any, meanwhile: Callable[[int], None]) -> list[Any]:
    """16 scores of each query, unscaled, from the transposed rows at `flat`. meanwhile(n) is emitted at every n-th of
    `dim` steps."""
    waiting: list[list[Any]] = [[] for _ in queries]  # sums that wait for their other half
    for place, lane in enumerate(_FOLDED):
        totals: list[Any] = [None] * len(queries)
        for value in range(lane, dim, 16):
            meanwhile(place * dim // 16 + value // 16)
            keys = load(b, flat, LANES_F32, value * 64)
            for j, query in enumerate(queries):
                product = b.fmul(splat(b, load(b, query, FLOAT, value * 4)), keys)
                totals[j] = product if value == lane else b.fadd(totals[j], product)
        for total, stack in zip(totals, waiting, strict=True):
            level, folded = place + 1, total
            while level % 2 == 0:
                level, folded = level // 2, b.fadd(stack.pop(), folded)
            stack.append(folded)
    return [stack[0] for stack in waiting]


def _turn(b: Any, kind: int, dim: int, base: Any, scales: Any, entries: Any, flat: Any) -> Any:
    """Transpose the rows of 16 entries into `flat`; gives their scales."""
    factors, rows = constant(LANES_F32, 1.0), []
    for e in range(16):
        entry = load(b, entries, I64, 8 * e)
        rows.append(row_at(b, kind, base, entry, number(dim)))
        if kind == INT8:
            factors = b.insert_element(factors, row_scale(b, scales, entry), ir.Constant(I32, e))
    for word in range(dim * ITEM_BYTES[kind] // 64):
        packed = transpose(b, [load(b, row, LANES_I32, 64 * word) for row in rows])
        for lane, words in enumerate(packed):
            for place, values in _spread(b, kind, word, lane, words):
                store(b, values, flat, place * 64)
    return factors


def _ask(b: Any, kind: int, dim: int, base: Any, entries: Any) -> Callable[[int], None]:
    """Asks for the rows of 16 entries in `dim` steps."""
    size = dim * ITEM_BYTES[kind]
    lines = 16 * size // 64

    def one(step: int) -> None:
        for line in range(step * lines // dim, (step + 1) * lines // dim):
            row = row_at(b, kind, base, load(b, entries, I64, line * 64 // size * 8), number(dim))
            prefetch(b, row, line * 64 % size, _NEAR)

    return one


def _emit_scores_many(kind: int, dim: int, b: Any, args: Any) -> None:
    """16 entries at a time. `flat` is scratch for 16 rows of floats. The first queries ask for the rows of `later` at
    these entries, a line at a time between their sums: in a burst they would hold up the loads behind them."""
    q, queries, base, scales, later, entries, count, flat, out, out_stride = args

    def score(i: Any, factors: Any, first: Any, together: int, meanwhile: Callable[[int], None]) -> list[Any]:
        numbers = [b.add(first, number(n)) for n in range(together)]
        sums = _score(b, dim, [b.add(q, b.mul(n, number(dim * 4))) for n in numbers], flat, meanwhile)
        for n, scores in zip(numbers, sums, strict=True):
            whole = b.fmul(scores, factors) if kind == INT8 else scores
            store(b, whole, b.add(b.add(out, b.mul(n, out_stride)), b.mul(i, number(4))))
        return []

    def block(i: Any, state: list[Any]) -> list[Any]:
        mine = b.add(entries, b.mul(i, number(8)))
        factors, ask = _turn(b, kind, dim, base, scales, mine, flat), _ask(b, kind, dim, later, mine)
        rest = b.srem(queries, number(_TOGETHER))
        most = b.sub(queries, rest)
        first = b.select(b.icmp_signed(">", most, number(0)), number(_TOGETHER), number(0))
        loop(b, first, [], lambda j, _: score(i, factors, j, _TOGETHER, ask), _TOGETHER)
        others = b.sub(most, first)
        loop(b, others, [], lambda j, _: score(i, factors, b.add(first, j), _TOGETHER, lambda step: None), _TOGETHER)
        loop(b, rest, [], lambda j, _: score(i, factors, b.add(most, j), 1, ask))
        return []

    loop(b, count, [], block, 16)
    b.ret_void()


def _emit_mix_ahead(kind: int, queries: int, b: Any, args: Any) -> None:
    """vectors.mix that asks for the rows of `keys` at the `following` entries."""
    *rest, keys, following = args
    dim, start = rest[6], rest[7]

    def ask(i: Any) -> None:
        coming = load(b, b.add(following, b.mul(i, number(8))), I64)
        row = b.add(row_at(b, kind, keys, coming, dim), b.mul(start, number(ITEM_BYTES[kind])))
        for line in range(0, ITEM_BYTES[kind] * 16 * SPAN, 64):
            prefetch(b, row, line, _NEAR)

    emit_mix(kind, SPAN, queries, b, rest, ask)


@intrinsic
def _scores_many(typingctx, case, q, queries, base, scales, later, entries, count, flat, out, out_stride):
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kinds = [(kind, dim) for kind in range(3) for dim in WHOLE]
        cases = {4 * d + k: case_of(b, "outrider_scores_many", 10, _emit_scores_many, k, d) for k, d in kinds}
        return switch_cases(b, context, args[0], cases, args[1:])

    return types.void(*[types.int64] * 11), codegen


@intrinsic
def _mix_ahead(
    typingctx, case, p, p_stride, base, scales, entries, count, dim, start, out, out_stride, keys, following
):
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kinds = [(kind, queries) for kind in range(3) for queries in range(1, MAX_QUERIES + 1)]
        cases = {8 * k + n: case_of(b, "outrider_mix_ahead", 12, _emit_mix_ahead, k, n) for k, n in kinds}
        return switch_cases(b, context, args[0], cases, args[1:])

    return types.void(*[types.int64] * 13), codegen


@compiled
def scores_many(kind, q, queries, keys, scales, values, entries, count, dim, flat, out, out_stride):
    """out[j, i] = q[j] . row(entries[i]) as `scores` gives it, for rows of a WHOLE size; flat holds 16 * dim floats.

    Queries lie one behind the other. The rows of `values` are brought near meanwhile.
    """
    _scores_many(4 * dim + kind, q, queries, keys, scales, values, entries, count, flat, out, out_stride)


@compiled
def mix_many(kind, queries, p, p_stride, values, scales, entries, count, dim, keys, following, out, out_stride):
    """`mix` of any number of queries, for rows of a WHOLE size, bringing rows of `keys` at `following` entries near."""
    first = min(MAX_QUERIES, queries)
    for start in range(0, dim, 16 * SPAN):
        case = 8 * kind + first
        _mix_ahead(case, p, p_stride, values, scales, entries, count, dim, start, out, out_stride, keys, following)
    for j in range(first, queries, MAX_QUERIES):
        n, row, target = min(MAX_QUERIES, queries - j), p + j * p_stride, out + j * out_stride
        mix(kind, n, row, p_stride, values, scales, entries, count, dim, target, out_stride)
