"""Vector kernels of norms and attention: sums, maxima, scores q . k and weighted sums of v, in one fixed order.

K and V rows are read in place: `entries` holds int64 row indices into a pool of rows of `dim` (a multiple of 16)
values, of kind 0 (fp32), 1 (bf16) or 2 (int8 with a fp32 scale per row).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from outrider.kernels.cpu.emit import (
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    LANES_F32,
    LANES_I32,
    ZEROS,
    constant,
    define,
    fold,
    load,
    loop,
    number,
    splat,
    store,
    vector,
)
from outrider.kernels.cpu.machine import compiled, intrinsic

FLOAT32, BFLOAT16, INT8 = range(3)
ITEM_BYTES = (4, 2, 1)
WHOLE = (64, 128)  # row sizes with kernels of their own
MAX_QUERIES = 4  # queries that share a pass over values
#: Vectors of 16 values that a pass over values sums: as many as the registers hold for 3 queries (32 of 512 bits, else
#: 16 of 256).
SPAN = 4 if llvm.get_host_cpu_features().get("avx512f") else 2


def _load_lanes(b: Any, kind: int, row: Any, index: Any) -> Any:
    """16 values of a K or V row from value `index` on, as floats (int8: not yet scaled)."""
    at = b.add(row, b.mul(index, number(ITEM_BYTES[kind])))
    if kind == FLOAT32:
        return load(b, at, LANES_F32)
    if kind == BFLOAT16:
        wide = b.zext(load(b, at, vector(I16, 16)), LANES_I32)
        return b.bitcast(b.shl(wide, constant(LANES_I32, 16)), LANES_F32)
    return b.sitofp(b.sext(load(b, at, vector(I8, 16)), LANES_I32), LANES_F32)


def row_at(b: Any, kind: int, base: Any, entry: Any, dim: Any) -> Any:
    """The address of an entry's row of `dim` elements."""
    return b.add(base, b.mul(b.mul(entry, dim), number(ITEM_BYTES[kind])))


def row_scale(b: Any, scales: Any, entry: Any) -> Any:
    """An entry's float32 scale."""
    return load(b, b.add(scales, b.mul(entry, number(4))), FLOAT)


def _add(b: Any) -> Any:
    return lambda x, y: b.fadd(x, y)


def _emit_dot(b: Any, args: Any) -> None:
    x, y, count = args

    def body(i: Any, state: list[Any]) -> list[Any]:
        at = b.mul(i, number(4))
        product = b.fmul(load(b, b.add(x, at), LANES_F32), load(b, b.add(y, at), LANES_F32))
        return [b.fadd(state[0], product)]

    b.ret(fold(b, loop(b, count, [ZEROS], body, 16)[0], _add(b)))


def _emit_total(b: Any, args: Any) -> None:
    x, count = args

    def body(i: Any, state: list[Any]) -> list[Any]:
        return [b.fadd(state[0], load(b, b.add(x, b.mul(i, number(4))), LANES_F32))]

    b.ret(fold(b, loop(b, count, [ZEROS], body, 16)[0], _add(b)))


def _emit_highest(b: Any, args: Any) -> None:
    x, count = args

    def larger(x: Any, y: Any) -> Any:
        return b.select(b.fcmp_ordered(">", y, x), y, x)

    def body(i: Any, state: list[Any]) -> list[Any]:
        return [larger(state[0], load(b, b.add(x, b.mul(i, number(4))), LANES_F32))]

    lowest = constant(LANES_F32, float("-inf"))
    b.ret(fold(b, loop(b, count, [lowest], body, 16)[0], larger))


def load_row(b: Any, kind: int, row: Any, start: Any, width: int) -> list[Any]:
    """`width` vectors of a row. bf16 rows of a WHOLE size come as even and odd values of every 32: two cheap steps."""
    if kind != BFLOAT16 or width == 1:
        return [_load_lanes(b, kind, row, b.add(start, number(16 * w))) for w in range(width)]
    values = []
    for w in range(0, width, 2):
        pairs = load(b, b.add(row, b.mul(b.add(start, number(16 * w)), number(2))), LANES_I32)
        values.append(b.bitcast(b.shl(pairs, constant(LANES_I32, 16)), LANES_F32))
        values.append(b.bitcast(b.and_(pairs, constant(LANES_I32, 0xFFFF0000)), LANES_F32))
    return values


def fold_rows(b: Any, rows: list[Any]) -> Any:
    """The sums of 16 vectors as one vector; each sum in the order of `fold`: halves, quarters, eighths, pairs."""
    width = 8
    while len(rows) > 1:
        rows = [_fold_pair(b, x, y, width) for x, y in zip(rows[0::2], rows[1::2], strict=True)]
        width //= 2
    return rows[0]


def _fold_pair(b: Any, x: Any, y: Any, width: int) -> Any:
    """Add the lower and upper half of every block of 2 * width lanes; x's blocks, then y's."""
    starts = range(0, 16, 2 * width)
    low = [offset + s + i for offset in (0, 16) for s in starts for i in range(width)]
    indices = [ir.Constant(vector(I32, 16), [lane + half for lane in low]) for half in (0, width)]
    return b.fadd(b.shuffle_vector(x, y, indices[0]), b.shuffle_vector(x, y, indices[1]))


def _emit_scores(kind: int, dim: int, b: Any, args: Any) -> None:
    """16 entries at a time; `dim` values per row."""
    q, base, scales, entries, count, out = args
    width = dim // 16
    query = [load(b, q, LANES_F32, 64 * w) for w in range(width)]

    def body(i: Any, state: list[Any]) -> list[Any]:
        sums, factors = [], constant(LANES_F32, 0.0)
        for e in range(16):
            entry = load(b, b.add(entries, b.mul(i, number(8))), I64, 8 * e)
            row = row_at(b, kind, base, entry, number(dim))
            values = load_row(b, kind, row, number(0), width)
            total = b.fmul(query[0], values[0])
            for x, y in zip(query[1:], values[1:], strict=True):
                total = b.fadd(total, b.fmul(x, y))
            sums.append(total)
            if kind == INT8:
                factors = b.insert_element(factors, row_scale(b, scales, entry), ir.Constant(I32, e))
        result = fold_rows(b, sums)
        if kind == INT8:
            result = b.fmul(result, factors)
        store(b, result, b.add(out, b.mul(i, number(4))))
        return []

    loop(b, count, [], body, 16)
    b.ret_void()


def _emit_scores_any(kind: int, b: Any, args: Any) -> None:
    """Rows of any multiple of 16 values, one entry at a time."""
    q, base, scales, entries, count, dim, out = args

    def body(i: Any, state: list[Any]) -> list[Any]:
        entry = load(b, b.add(entries, b.mul(i, number(8))), I64)
        row = row_at(b, kind, base, entry, dim)

        def lanes(d: Any, state: list[Any]) -> list[Any]:
            query = load(b, b.add(q, b.mul(d, number(4))), LANES_F32)
            return [b.fadd(state[0], b.fmul(query, _load_lanes(b, kind, row, d)))]

        score = fold(b, loop(b, dim, [ZEROS], lanes, 16)[0], _add(b))
        if kind == INT8:
            score = b.fmul(score, row_scale(b, scales, entry))
        store(b, score, b.add(out, b.mul(i, number(4))))
        return []

    loop(b, count, [], body)
    b.ret_void()


def emit_mix(kind: int, width: int, queries: int, b: Any, args: Any, meanwhile: Callable[[Any], None]) -> None:
    """`width` vectors of values for `queries` rows of weights, from value `start` on; meanwhile(i) at every entry."""
    p, p_stride, base, scales, entries, count, dim, start, out, out_stride = args

    def body(i: Any, state: list[Any]) -> list[Any]:
        meanwhile(i)
        entry = load(b, b.add(entries, b.mul(i, number(8))), I64)
        values = load_row(b, kind, row_at(b, kind, base, entry, dim), start, width)
        scale = row_scale(b, scales, entry) if kind == INT8 else None
        sums = []
        for j in range(queries):
            weight = load(b, b.add(b.add(p, b.mul(p_stride, number(j))), b.mul(i, number(4))), FLOAT)
            lanes = splat(b, weight if scale is None else b.fmul(weight, scale))
            sums += [b.fadd(state[j * width + w], b.fmul(lanes, values[w])) for w in range(width)]
        return sums

    totals = loop(b, count, [ZEROS] * (width * queries), body)
    for j in range(queries):
        target = b.add(b.add(out, b.mul(out_stride, number(j))), b.mul(start, number(4)))
        for w in range(width):
            store(b, totals[j * width + w], target, 64 * w)
    b.ret_void()


def _emit_mix(kind: int, width: int, queries: int, b: Any, args: Any) -> None:
    emit_mix(kind, width, queries, b, args, lambda i: None)


def _float_call(name: str, arguments: int, emit: Any) -> Any:
    """Codegen of an intrinsic that calls one machine function and returns its float."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.call(define(b.module, name, FLOAT, arguments, emit), args)

    return types.float32(*[types.int64] * arguments), codegen


def switch_cases(b: Any, context: Any, selector: Any, cases: dict[int, Any], args: Any) -> Any:
    """Call the machine function of `selector`."""
    end = b.append_basic_block()
    switch = b.switch(selector, end)
    for value, function in cases.items():
        block = b.append_basic_block()
        switch.add_case(number(value), block)
        b.position_at_end(block)
        b.call(function, args)
        b.branch(end)
    b.position_at_end(end)
    return context.get_dummy_value()


@intrinsic
def _dot(typingctx: Any, x: Any, y: Any, count: Any) -> Any:
    return _float_call("outrider_dot", 3, _emit_dot)


@intrinsic
def _total(typingctx: Any, x: Any, count: Any) -> Any:
    return _float_call("outrider_total", 2, _emit_total)


@intrinsic
def _highest(typingctx: Any, x: Any, count: Any) -> Any:
    return _float_call("outrider_highest", 2, _emit_highest)


@intrinsic
def _odd(typingctx: Any, x: Any) -> Any:
    """Whether one of 16 floats is NaN."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        values = load(b, args[0], LANES_F32)
        mask = b.bitcast(b.fcmp_unordered("uno", values, values), I16)
        return b.icmp_unsigned("!=", mask, ir.Constant(I16, 0))

    return types.boolean(types.int64), codegen


@intrinsic
def _copy(typingctx: Any, source: Any, target: Any) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        store(b, load(b, args[0], LANES_F32), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def case_of(b: Any, name: str, arguments: int, emit: Any, *fixed: int) -> Any:
    """The machine function of one case of a kernel."""
    full = "_".join([name, *map(str, fixed)])
    return define(b.module, full, ir.VoidType(), arguments, lambda inner, args: emit(*fixed, inner, args))


@intrinsic
def _scores(typingctx, case, q, base, scales, entries, count, out):
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kinds = [(kind, dim) for kind in range(3) for dim in WHOLE]
        cases = {4 * d + k: case_of(b, "outrider_scores", 6, _emit_scores, k, d) for k, d in kinds}
        return switch_cases(b, context, args[0], cases, args[1:])

    return types.void(*[types.int64] * 7), codegen


@intrinsic
def _scores_any(typingctx, kind, q, base, scales, entries, count, dim, out):
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        cases = {k: case_of(b, "outrider_scores_any", 7, _emit_scores_any, k) for k in range(3)}
        return switch_cases(b, context, args[0], cases, args[1:])

    return types.void(*[types.int64] * 8), codegen


@intrinsic
def _mix(typingctx, case, p, p_stride, base, scales, entries, count, dim, start, out, out_stride):
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kinds = [(k, w, j) for k in range(3) for w in (1, SPAN) for j in range(1, MAX_QUERIES + 1 if w > 1 else 2)]
        cases = {64 * k + 8 * w + j: case_of(b, "outrider_mix", 10, _emit_mix, k, w, j) for k, w, j in kinds}
        return switch_cases(b, context, args[0], cases, args[1:])

    return types.void(*[types.int64] * 11), codegen


@compiled
def dot(x, y, count):
    """Sum of x[i] * y[i]; `count` is rounded up to 16, so what follows the vectors must be zero."""
    return _dot(x, y, count)


@compiled
def total(x, count):
    """Sum of x, rounded up to 16 values like dot."""
    return _total(x, count)


@compiled
def highest(x, count):
    """Largest of x, rounded up to 16 values; NaN is passed over."""
    return _highest(x, count)


@compiled
def odd(x):
    """Whether one of 16 values is NaN."""
    return _odd(x)


@compiled
def copy(source, target):
    """Copy 16 floats."""
    _copy(source, target)


@compiled
def is_whole(dim):
    """Whether rows of this size have kernels of their own."""
    return dim == WHOLE[0] or dim == WHOLE[1]


@compiled
def is_parted(kind, dim):
    """Whether queries and results keep every 32 values as 16 even, then 16 odd ones."""
    return kind == BFLOAT16 and is_whole(dim)


@compiled
def scores(kind, q, base, scales, entries, count, dim, out):
    """out[i] = q . row(entries[i]) for i < count rounded up to 16 (so many entries must be readable)."""
    if is_whole(dim):
        _scores(4 * dim + kind, q, base, scales, entries, count, out)
    else:
        scores_any(kind, q, base, scales, entries, count, dim, out)


@compiled
def scores_any(kind, q, base, scales, entries, count, dim, out):
    """out[i] = q . row(entries[i]) for i < count, rows of any multiple of 16 values; a matrix times a vector, too."""
    _scores_any(kind, q, base, scales, entries, count, dim, out)


@compiled
def mix(kind, queries, p, p_stride, base, scales, entries, count, dim, out, out_stride):
    """out[j, d] = sum over i < count, ascending, of p[j, i] * row(entries[i])[d] for j < queries <= MAX_QUERIES."""
    if is_whole(dim):
        for start in range(0, dim, 16 * SPAN):
            case = 64 * kind + 8 * SPAN + queries
            _mix(case, p, p_stride, base, scales, entries, count, dim, start, out, out_stride)
        return
    for j in range(queries):
        for start in range(0, dim, 16):
            pj, oj = p + j * p_stride, out + j * out_stride
            _mix(64 * kind + 9, pj, p_stride, base, scales, entries, count, dim, start, oj, out_stride)
