"""Scores of many queries over the same rows of K: several rows of a sequence, and the query heads of a group."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from outrider.kernels.cpu.emit import I32, I64, LANES_F32, constant, load, loop, number, prefetch, store
from outrider.kernels.cpu.machine import compiled, intrinsic
from outrider.kernels.cpu.vectors import (
    INT8,
    ITEM_BYTES,
    WHOLE,
    case_of,
    fold_rows,
    load_row,
    row_at,
    row_scale,
    switch_cases,
)


def _emit_scores_many(kind: int, dim: int, b: Any, args: Any) -> None:
    """Scores of several queries that read the same entries: 16 rows become floats once, then every query meets them.

    The arithmetic of each score is that of vectors.scores, value for value. `flat` is scratch for 16 rows of floats.
    Rows of `later` at these entries, and of `base` at those of the `following` list, are asked for meanwhile.
    """
    q, queries, base, scales, later, entries, following, count, flat, out, out_stride = args
    width = dim // 16

    def block(i: Any, state: list[Any]) -> list[Any]:
        factors = constant(LANES_F32, 0.0)
        for e in range(16):
            entry = load(b, b.add(entries, b.mul(i, number(8))), I64, 8 * e)
            values = load_row(b, kind, row_at(b, kind, base, entry, number(dim)), number(0), width)
            for w, lanes in enumerate(values):
                store(b, lanes, flat, (e * width + w) * 64)
            ahead = row_at(b, kind, later, entry, number(dim))
            coming = load(b, b.add(following, b.mul(i, number(8))), I64, 8 * e)
            further = row_at(b, kind, base, coming, number(dim))
            for line in range(0, dim * ITEM_BYTES[kind], 64):
                prefetch(b, ahead, line, 2)
                prefetch(b, further, line, 2)
            if kind == INT8:
                factors = b.insert_element(factors, row_scale(b, scales, entry), ir.Constant(I32, e))

        def score(j: Any, state: list[Any]) -> list[Any]:
            mine = b.add(q, b.mul(j, number(dim * 4)))
            query = [load(b, mine, LANES_F32, 64 * w) for w in range(width)]
            sums = []
            for e in range(16):
                rows = [load(b, flat, LANES_F32, (e * width + w) * 64) for w in range(width)]
                total = b.fmul(query[0], rows[0])
                for x, y in zip(query[1:], rows[1:], strict=True):
                    total = b.fadd(total, b.fmul(x, y))
                sums.append(total)
            result = fold_rows(b, sums)
            if kind == INT8:
                result = b.fmul(result, factors)
            store(b, result, b.add(b.add(out, b.mul(j, out_stride)), b.mul(i, number(4))))
            return []

        loop(b, queries, [], score)
        return []

    loop(b, count, [], block, 16)
    b.ret_void()


@intrinsic
def _scores_many(typingctx, case, q, queries, base, scales, later, entries, following, count, flat, out, out_stride):
    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kinds = [(kind, dim) for kind in range(3) for dim in WHOLE]
        cases = {4 * d + k: case_of(b, "outrider_scores_many", 11, _emit_scores_many, k, d) for k, d in kinds}
        return switch_cases(b, context, args[0], cases, args[1:])

    return types.void(*[types.int64] * 12), codegen


@compiled
def scores_many(kind, q, queries, keys, scales, values, entries, following, count, dim, flat, out, out_stride):
    """out[j, i] = q[j] . row(entries[i]) as `scores` gives it, for rows of a WHOLE size; flat holds 16 * dim floats.

    Queries lie one behind the other. Brought near meanwhile: rows of `values` here, of `keys` at `following` entries.
    """
    _scores_many(4 * dim + kind, q, queries, keys, scales, values, entries, following, count, flat, out, out_stride)
