"""The one product of the CPU path: a tile of 16 output channels times 1 to 8 rows.

    out[r, c] = sum over groups g, ascending, of
                dot(q[r, g], w[c, g]) * (scale[c, g] * s[r, g])  +  minimum[c, g] * t[r, g]

With two counts per group (Q6_K) the dot is count[0] * dot of inputs 0..15 + count[1] * dot of inputs 16..31: at most
2 * 16 * 32 * 127 * 128 < 2^24, which int32 and fp32 hold exactly; the scale is the factor alone.

The integer dot of a group is exact on every path; the float part is one multiply-add chain per output in this order
(no fused operations), so a result depends neither on the path nor on how many rows share the pass over the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import cfunc, types

from outrider.kernels.cpu import formats
from outrider.kernels.cpu.emit import (
    FLOAT,
    HALF,
    I8,
    I16,
    I32,
    I64,
    LANES_F32,
    LANES_I32,
    ZEROS,
    constant,
    declare,
    define,
    join,
    load,
    loop,
    number,
    part,
    prefetch,
    splat,
    store,
    vector,
)
from outrider.kernels.cpu.isa import AVX2, AVX512, GENERIC, NAMES
from outrider.kernels.cpu.machine import SOURCES, intrinsic

#: Weights are asked for so many bytes ahead of their use: a thread's share of the bandwidth times the time that memory
#: takes to answer. A quarter of it comes too late and disturbs the processor's own looking ahead (docs/kernels.md).
_AHEAD = 8192
MAX_ROWS = 8  # rows that share one pass over a tile
_VNNI_BYTES = llvm.llvm_version_info[0] >= 22  # since then the byte operands are byte vectors


def half_to_float(b: Any, value: Any, isa: int) -> Any:
    """fp16 bits [16 x i16] as floats, exact; without F16C through integer steps."""
    if isa != GENERIC:
        return b.fpext(b.bitcast(value, vector(HALF, 16)), LANES_F32)
    wide = b.zext(value, LANES_I32)
    magnitude = b.shl(b.and_(wide, constant(LANES_I32, 0x7FFF)), constant(LANES_I32, 13))
    scaled = b.fmul(b.bitcast(magnitude, LANES_F32), constant(LANES_F32, 2.0**112))
    finite = b.icmp_unsigned("<", magnitude, constant(LANES_I32, 0x7C00 << 13))
    top = b.select(finite, constant(LANES_I32, 0), constant(LANES_I32, 0x7F800000))  # NaN and infinity
    sign = b.shl(b.and_(wide, constant(LANES_I32, 0x8000)), constant(LANES_I32, 16))
    return b.bitcast(b.or_(b.or_(b.bitcast(scaled, LANES_I32), top), sign), LANES_F32)


# ---- the integer dot of one group, by path -----------------------------------------------------------------------
# Each takes the weight vectors of `steps` lazily (a function of the step), a function giving the 4 input bytes of (row,
# step) as i32, and returns per row the 16 sums. Nibbles are 0..15; six bits are weight + 32 and bytes weight + 128,
# whose excess `excess[r]` removes.


def _bytes(b: Any, value: Any, lanes: int) -> Any:
    return b.bitcast(value, vector(I8, lanes * 4))


def _dots_vnni(b: Any, width: int, weights: Callable, inputs: Callable, excess: list[Any], steps: range) -> list[Any]:
    """vpdpbusd: 4 unsigned x signed bytes added to each of `width` int32 lanes."""
    name = f"llvm.x86.avx512.vpdpbusd.{width * 32}"
    wide, byte = vector(I32, width), vector(I8, width * 4)
    operand = byte if _VNNI_BYTES else wide
    call = declare(b, name, wide, [wide, operand, operand])
    pieces = 16 // width
    sums = [[part(b, e, 0, width) for _ in range(pieces)] for e in excess]
    for step in steps:
        whole = weights(step)
        halves = [part(b, whole, 4 * width * p, 4 * width) for p in range(pieces)] if pieces > 1 else [whole]
        for r, row in enumerate(sums):
            x = b.bitcast(splat(b, inputs(r, step), width), operand)
            for p in range(pieces):
                row[p] = b.call(call, [row[p], b.bitcast(halves[p], operand), x])
    return [row[0] if pieces == 1 else join(b, *row) for row in sums]


def _dots_avx2(b: Any, bits: int, weights: Callable, inputs: Callable, excess: list[Any], steps: range) -> list[Any]:
    """vpmaddubsw + vpmaddwd on two halves, as many steps in int16 as cannot saturate.

    Nibbles: 8 steps, 8 * 2 * 15 * 127 = 30480. Six bits: 2 steps, 2 * 2 * 63 * 127 = 32004. Bytes: one step of |w|
    times x with w's sign, at most 2 * 127 * 127 = 32258.
    """
    ymm, words, wide = vector(I8, 32), vector(I16, 16), vector(I32, 8)
    pairs = declare(b, "llvm.x86.avx2.pmadd.ub.sw", words, [ymm, ymm])
    quads = declare(b, "llvm.x86.avx2.pmadd.wd", wide, [words, words])
    sign = declare(b, "llvm.x86.avx2.psign.b", ymm, [ymm, ymm])
    fit = {4: 8, 6: 2, 8: 1}[bits]
    short: list[list[Any]] = [[None, None] for _ in excess]
    sums = [[part(b, e, 8 * p, 8) for p in range(2)] for e in excess]
    for place, step in enumerate(steps):
        whole = weights(step)
        if bits == 8:
            whole = b.xor(whole, constant(whole.type, 128))
        for p in range(2):
            half = part(b, whole, 32 * p, 32)
            size = b.call(sign, [half, half]) if bits == 8 else half
            for r, row in enumerate(short):
                x = b.bitcast(splat(b, inputs(r, step), 8), ymm)
                two = b.call(pairs, [size, b.call(sign, [x, half]) if bits == 8 else x])
                row[p] = two if place % fit == 0 else b.add(row[p], two)
                if place % fit == fit - 1:
                    sums[r][p] = b.add(sums[r][p], b.call(quads, [row[p], constant(words, 1)]))
    return [join(b, *row) for row in sums]


def _dots_generic(b: Any, weights: Callable, inputs: Callable, excess: list[Any], steps: range) -> list[Any]:
    """Plain vector code: byte by byte in int32 lanes."""
    sums = list(excess)
    for step in steps:
        whole = b.bitcast(weights(step), LANES_I32)
        for byte in range(4):
            shifted = b.lshr(whole, constant(LANES_I32, 8 * byte))
            w = b.and_(shifted, constant(LANES_I32, 255))
            for r in range(len(sums)):
                x = inputs(r, step)
                x = b.ashr(b.shl(x, ir.Constant(I32, 24 - 8 * byte)), ir.Constant(I32, 24))
                sums[r] = b.add(sums[r], b.mul(w, splat(b, x, 16)))
    return sums


def _dots(
    b: Any, isa: int, bits: int, weights: Callable, inputs: Callable, excess: list[Any], steps: range
) -> list[Any]:
    if isa == GENERIC:
        return _dots_generic(b, weights, inputs, excess, steps)
    if isa == AVX2:
        return _dots_avx2(b, bits, weights, inputs, excess, steps)
    return _dots_vnni(b, 16 if isa == AVX512 else 8, weights, inputs, excess, steps)


# ---- one tile ----------------------------------------------------------------------------------------------------


class _Tile:
    """Emits the loop over groups of one (path, format, row count)."""

    def __init__(self, b: Any, isa: int, kind: int, rows: int, args: Any) -> None:
        self.b, self.isa, self.kind, self.rows = b, isa, kind, rows
        self.w, self.bias, self.groups, self.x, self.x_stride, *rest = args
        self.meta, self.meta_stride, self.meta_plane, self.out, self.out_stride, self.add = rest

    def emit(self) -> None:
        """sums = 0; for g in groups: sums = group(g, sums); out = sums + bias, or out += sums + bias; return."""
        b = self.b
        body = self._floats if self.kind == formats.F32 else self._group
        sums = loop(b, self.groups, [ZEROS] * self.rows, body)
        nothing = b.ptrtoint(_zero_vector(b.module), I64)
        bias = load(b, b.select(b.icmp_signed("!=", self.bias, number(0)), self.bias, nothing), LANES_F32)
        adds = b.icmp_signed("!=", self.add, number(0))
        for r, total in enumerate(sums):
            target = b.add(self.out, b.mul(self.out_stride, number(r)))
            old = load(b, b.select(adds, target, nothing), LANES_F32)
            store(b, b.fadd(old, b.fadd(total, bias)), target)
        b.ret_void()

    def _floats(self, index: Any, sums: list[Any]) -> list[Any]:
        """Dense fp32: inputs one after the other."""
        b = self.b
        block = b.add(self.w, b.mul(index, number(2048)))
        rows = [self._row(self.x, self.x_stride, r, index, 128) for r in range(self.rows)]
        for k in range(32):
            w = load(b, block, LANES_F32, 64 * k)
            for r in range(self.rows):
                x = splat(b, load(b, rows[r], FLOAT, 4 * k), 16)
                sums[r] = b.fadd(sums[r], b.fmul(x, w))
        return sums

    def _group(self, index: Any, sums: list[Any]) -> list[Any]:
        """One group of 32 inputs in integers, then its scale and minimum."""
        b = self.b
        block, head = self._block(index)
        for line in range(0, formats.GROUP_BYTES[self.kind], 64):
            prefetch(b, block, _AHEAD + line)
        meta = [self._row(self.meta, self.meta_stride, r, index, 4) for r in range(self.rows)]
        dots = self._integers(index, block, meta)
        scale, minimum = self._scales(block, head)
        for r in range(self.rows):
            both = b.fmul(scale, splat(b, load(b, meta[r], FLOAT), 16))
            sums[r] = b.fadd(sums[r], b.fmul(b.sitofp(dots[r], LANES_F32), both))
            if minimum is not None:
                total = splat(b, load(b, self._plane(meta[r], 2), FLOAT), 16)
                sums[r] = b.fadd(sums[r], b.fmul(minimum, total))
        return sums

    def _integers(self, index: Any, block: Any, meta: list[Any]) -> list[Any]:
        """The exact integer sums of a group, 16 channels per row."""
        b, bits = self.b, formats.BITS[self.kind]
        rows = [self._row(self.x, self.x_stride, r, index, 32) for r in range(self.rows)]
        weights = _weights(b, bits, block)

        def inputs(r: int, step: int) -> Any:
            return load(b, rows[r], I32, 4 * step)

        def dots(steps: range, plane: int) -> list[Any]:
            biased = bits == 6 or (bits == 8 and self.isa != AVX2)
            zero = constant(LANES_I32, 0)
            excess = [splat(b, load(b, self._plane(m, plane), I32), 16) if biased else zero for m in meta]
            return _dots(b, self.isa, bits, weights, inputs, excess, steps)

        if bits != 6:
            return dots(range(8), 1)
        halves = [dots(range(4), 3), dots(range(4, 8), 4)]
        counts = [b.sext(load(b, block, vector(I8, 16), 384 + 16 * i), LANES_I32) for i in range(2)]
        return [b.add(b.mul(low, counts[0]), b.mul(high, counts[1])) for low, high in zip(*halves, strict=True)]

    def _plane(self, at: Any, number_of: int) -> Any:
        """The address of a row's number in another plane of `meta`."""
        return self.b.add(at, self.b.mul(self.meta_plane, number(number_of)))

    def _row(self, base: Any, stride: Any, r: int, index: Any, size: int) -> Any:
        at = self.b.add(base, self.b.mul(stride, number(r)))
        return self.b.add(at, self.b.mul(index, number(size)))

    def _block(self, index: Any) -> tuple[Any, Any]:
        """Addresses of the group's integers and of its super-group's head."""
        b, size, head = self.b, formats.GROUP_BYTES[self.kind], formats.HEADS[self.kind]
        at = b.add(self.w, b.mul(index, number(size)))
        if head == 0:
            return at, at
        place = b.lshr(index, number(3))
        heads = b.mul(place, number(head))
        whole = number(formats.SUPER * size + head)
        return b.add(b.add(at, heads), number(head)), b.add(self.w, b.mul(place, whole))

    def _scales(self, block: Any, head: Any) -> tuple[Any, Any]:
        """The 16 scales and minima (None but for 4 bits) of a group."""
        b, bits = self.b, formats.BITS[self.kind]
        base, has_minimum = 64 * bits, bits == 4
        if self.kind in (formats.Q4_F32, formats.Q8_F32):
            return load(b, block, LANES_F32, base), load(b, block, LANES_F32, base + 64) if has_minimum else None
        halves = head if formats.HEADS[self.kind] else b.add(block, number(base))
        found = [half_to_float(b, load(b, halves, vector(I16, 16), 32 * i), self.isa) for i in range(1 + has_minimum)]
        if self.kind == formats.Q4_K:
            factors = [b.zext(load(b, block, vector(I8, 16), base + 16 * i), LANES_I32) for i in range(2)]
            found = [b.fmul(f, b.sitofp(n, LANES_F32)) for f, n in zip(found, factors, strict=True)]
        return found[0], found[1] if has_minimum else None


def _weights(b: Any, bits: int, block: Any) -> Callable[[int], Any]:
    """A function that gives the 64 unsigned weights of a step; vectors that steps share are loaded once."""
    whole, words = vector(I8, 64), vector(I16, 32)
    loaded = {}

    def packed(at: int) -> Any:
        if at not in loaded:
            loaded[at] = load(b, block, whole, at)
        return loaded[at]

    def shifted(value: Any, left: int) -> Any:
        moved, by = b.bitcast(value, words), constant(words, abs(left))
        return b.bitcast(b.shl(moved, by) if left > 0 else b.lshr(moved, by), whole)

    def nibbles(step: int) -> Any:
        pair = packed(step // 2 * 64)
        return b.and_(shifted(pair, -4) if step % 2 else pair, constant(whole, 15))

    def sixes(step: int) -> Any:
        high = shifted(packed(256 + step // 4 * 64), 4 - 2 * (step % 4))
        return b.or_(nibbles(step), b.and_(high, constant(whole, 48)))

    def octets(step: int) -> Any:
        return packed(step * 64)

    return {4: nibbles, 6: sixes, 8: octets}[bits]


def _zero_vector(module: Any) -> Any:
    """16 zeros in memory: what stands for a bias or an old value where there is none."""
    name = "outrider_zeros"
    if name not in module.globals:
        zeros = ir.GlobalVariable(module, LANES_F32, name)
        zeros.initializer, zeros.global_constant, zeros.linkage = ZEROS, True, "internal"
    return module.globals[name]


def _tile_function(module: Any, isa: int, kind: int, rows: int) -> Any:
    """The machine function of one combination, made once per module."""
    return define(
        module,
        f"outrider_tile_{isa}_{kind}_{rows}",
        ir.VoidType(),
        11,
        lambda b, args: _Tile(b, isa, kind, rows, args).emit(),
    )


@intrinsic(prefer_literal=True)
def _dispatch(
    typingctx, level, kind, rows, w, bias, groups, x, x_stride, meta, meta_stride, meta_plane, out, out_stride, add
):
    """Call the tile function of (path, kind, rows)."""
    path = level.literal_value

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _, kind, rows, *rest = args
        combination = b.add(b.mul(kind, number(16)), rows)
        end = b.append_basic_block()
        switch = b.switch(combination, end)
        for k in range(len(formats.NAMES)):
            for r in range(1, MAX_ROWS + 1):
                block = b.append_basic_block()
                switch.add_case(number(16 * k + r), block)
                b.position_at_end(block)
                b.call(_tile_function(b.module, path, k, r), rest)
                b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return types.void(level, *[types.int64] * 13), codegen


@lru_cache
def product_address(path: str) -> int:
    """Address of the product compiled for a path (isa.py), to be called through `multiply`.

    It is compiled apart from the step: Numba would optimise all its variants again with every function above it.
    """
    level, sources = NAMES.index(path), SOURCES

    @cfunc(types.void(*[types.int64] * 13), cache=True)
    def product(kind, rows, w, bias, groups, x, x_stride, meta, meta_stride, meta_plane, out, out_stride, add):
        if sources == 0:
            return
        _dispatch(level, kind, rows, w, bias, groups, x, x_stride, meta, meta_stride, meta_plane, out, out_stride, add)

    return int(product.address or 0)


@intrinsic
def multiply(
    typingctx, function, kind, rows, w, bias, groups, x, x_stride, meta, meta_stride, meta_plane, out, out_stride, add
):
    """out [rows, 16] fp32 (`out_stride` bytes apart) = or, with `add`, += tile at `w` times `rows` <= 8 rows + bias.

    `function` is the product's address; `bias` that of 16 floats, or 0.

    x: int8 rows (fp32 for format F32), `x_stride` bytes apart. meta: per row (`meta_stride` bytes apart) and group the
    fp32 scale, and `meta_plane` bytes apart the other numbers of rows.quantise_row.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 13)
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 14), codegen
