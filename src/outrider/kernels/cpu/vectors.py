"""Vector kernels of norms and attention: sums, maxima, scores q . k and weighted sums of v, in one fixed order.

K and V rows are read in place: `entries` holds int64 row indices into a pool of rows of `dim` (a multiple of 16)
values, of kind 0 (fp32), 1 (bf16) or 2 (int8 with a fp32 scale per row).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from outrider.kernels.cpu.emit import (
    FLOAT,
    I8,
    I16,
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


def _load_lanes(b: Any, kind: int, row: Any, index: Any) -> Any:
    """16 values of a K or V row from value `index` on, as floats (int8: not yet scaled)."""
    at = b.add(row, b.mul(index, number(ITEM_BYTES[kind])))
    if kind == FLOAT32:
        return load(b, at, LANES_F32)
    if kind == BFLOAT16:
        wide = b.zext(load(b, at, vector(I16, 16)), LANES_I32)
        return b.bitcast(b.shl(wide, constant(LANES_I32, 16)), LANES_F32)
    return b.sitofp(b.sext(load(b, at, vector(I8, 16)), LANES_I32), LANES_F32)


def _row_at(b: Any, kind: int, base: Any, entry: Any, dim: Any) -> Any:
    return b.add(base, b.mul(b.mul(entry, dim), number(ITEM_BYTES[kind])))


def _row_scale(b: Any, scales: Any, entry: Any) -> Any:
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


def _emit_scores(kind: int, b: Any, args: Any) -> None:
    q, base, scales, entries, count, dim, out = args

    def body(i: Any, state: list[Any]) -> list[Any]:
        entry = load(b, b.add(entries, b.mul(i, number(8))), I64)
        row = _row_at(b, kind, base, entry, dim)

        def lanes(d: Any, state: list[Any]) -> list[Any]:
            query = load(b, b.add(q, b.mul(d, number(4))), LANES_F32)
            return [b.fadd(state[0], b.fmul(query, _load_lanes(b, kind, row, d)))]

        score = fold(b, loop(b, dim, [ZEROS], lanes, 16)[0], _add(b))
        if kind == INT8:
            score = b.fmul(score, _row_scale(b, scales, entry))
        store(b, score, b.add(out, b.mul(i, number(4))))
        return []

    loop(b, count, [], body)
    b.ret_void()


def _emit_mix(kind: int, width: int, b: Any, args: Any) -> None:
    p, base, scales, entries, count, dim, start, out = args

    def body(i: Any, state: list[Any]) -> list[Any]:
        entry = load(b, b.add(entries, b.mul(i, number(8))), I64)
        row = _row_at(b, kind, base, entry, dim)
        weight = load(b, b.add(p, b.mul(i, number(4))), FLOAT)
        if kind == INT8:
            weight = b.fmul(weight, _row_scale(b, scales, entry))
        lanes = splat(b, weight)
        values = [_load_lanes(b, kind, row, b.add(start, number(16 * w))) for w in range(width)]
        return [b.fadd(total, b.fmul(lanes, value)) for total, value in zip(state, values, strict=True)]

    target = b.add(out, b.mul(start, number(4)))
    for w, total in enumerate(loop(b, count, [ZEROS] * width, body)):
        store(b, total, target, 64 * w)
    b.ret_void()


def _float_call(name: str, arguments: int, emit: Any) -> Any:
    """Codegen of an intrinsic that calls one machine function and returns its float."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.call(define(b.module, name, FLOAT, arguments, emit), args)

    return types.float32(*[types.int64] * arguments), codegen


def _switch(b: Any, context: Any, selector: Any, cases: dict[int, Any], args: Any) -> Any:
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
def _scores(
    typingctx: Any, kind: Any, q: Any, base: Any, scales: Any, entries: Any, count: Any, dim: Any, out: Any
) -> Any:
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        def function(k: int) -> Any:
            name = f"outrider_scores_{k}"
            return define(b.module, name, ir.VoidType(), 7, lambda inner, a: _emit_scores(k, inner, a))

        return _switch(b, context, args[0], {k: function(k) for k in range(3)}, args[1:])

    return types.void(*[types.int64] * 8), codegen


@intrinsic
def _mix(typingctx, number_, p, base, scales, entries, count, dim, start, out):  # type: ignore[no-untyped-def]
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        def function(k: int, w: int) -> Any:
            name = f"outrider_mix_{k}_{w}"
            return define(b.module, name, ir.VoidType(), 8, lambda inner, a: _emit_mix(k, w, inner, a))

        cases = {8 * k + w: function(k, w) for k in range(3) for w in (1, 4)}
        return _switch(b, context, args[0], cases, args[1:])

    return types.void(*[types.int64] * 9), codegen


@compiled
def dot(x, y, count):  # type: ignore[no-untyped-def]
    """Sum of x[i] * y[i]; `count` is rounded up to 16, so what follows the vectors must be zero."""
    return _dot(x, y, count)


@compiled
def total(x, count):  # type: ignore[no-untyped-def]
    """Sum of x, rounded up to 16 values like dot."""
    return _total(x, count)


@compiled
def highest(x, count):  # type: ignore[no-untyped-def]
    """Largest of x, rounded up to 16 values; NaN is passed over."""
    return _highest(x, count)


@compiled
def scores(kind, q, base, scales, entries, count, dim, out):  # type: ignore[no-untyped-def]
    """out[i] = q . row(entries[i]) for i < count."""
    _scores(kind, q, base, scales, entries, count, dim, out)


@compiled
def mix(kind, p, base, scales, entries, count, dim, out):  # type: ignore[no-untyped-def]
    """out[d] = sum over i < count, ascending, of p[i] * row(entries[i])[d]."""
    start = 0
    while start + 64 <= dim:
        _mix(8 * kind + 4, p, base, scales, entries, count, dim, start, out)
        start += 64
    while start < dim:
        _mix(8 * kind + 1, p, base, scales, entries, count, dim, start, out)
        start += 16
