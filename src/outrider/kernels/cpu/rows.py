"""Row-wise kernels: norms, quantisation to int8 groups, activations. Each row alone, in one fixed order."""

from __future__ import annotations

import math

import numpy as np

from outrider.kernels.cpu import maths, vectors
from outrider.kernels.cpu.machine import bits_of, compiled, f32, float_of, i8, i32

_MAGIC = np.float32(12582912.0)  # rounds to nearest even, see maths.py
_MAGIC_BITS = np.int32(0x4B400000)
_INFINITE = np.int32(0x7F800000)
_SMALLEST = np.float32(1e-30)  # a group below this is zero: its reciprocal would overflow
_MOST = np.float32(127)
_ONE = np.float32(1)


@compiled
def largest_bits(x: int, start: int, count: int) -> np.int32:
    """Bits of max |x|; as integers NaN is above infinity is above all numbers, so nothing is lost."""
    values, top = i32(x), np.int32(0)
    for i in range(start, start + count):
        top = max(top, np.int32(values[i] & np.int32(0x7FFFFFFF)))
    return top


@compiled
def quantise_row(x: int, groups: int, q: int, meta: int, plane: int) -> None:
    """fp32 [groups * 32] to int8 with one scale per 32, and PLANES numbers per group, `plane` bytes apart.

    They are: scale; -128 * sum(q) (int32); scale * sum(q); -32 * sum(q) of inputs 0..15, and of 16..31 (int32): what
    unsigned weights add too much. A group with NaN or infinity gets that as its scale and zeros as integers: every
    product with it shows NaN.
    """
    values, integers = f32(x), i8(q)
    excess, sums, first, second = meta + plane, meta + 2 * plane, meta + 3 * plane, meta + 4 * plane
    for g in range(groups):
        top = largest_bits(x, g * 32, 32)
        size = float_of(np.int32(top))
        finite = top < _INFINITE
        usable = finite and size >= _SMALLEST
        inverse = _MOST / size if usable else np.float32(0)
        scale = size / _MOST if (usable or not finite) else np.float32(0)
        total = low = np.int32(0)
        if usable:
            for i in range(g * 32, g * 32 + 32):
                n = np.int32(bits_of(values[i] * inverse + _MAGIC) - _MAGIC_BITS)
                integers[i] = np.int8(n)
                total += n
            for i in range(g * 32, g * 32 + 16):
                low += np.int32(integers[i])
        else:
            for i in range(g * 32, g * 32 + 32):
                integers[i] = np.int8(0)
        f32(meta)[g] = scale
        i32(excess)[g] = np.int32(-128 * total)
        f32(sums)[g] = scale * np.float32(total)
        i32(first)[g] = np.int32(-32 * low)
        i32(second)[g] = np.int32(-32 * (total - low))


@compiled
def rms_norm(x: int, count: int, weight: int, eps: np.float32, out: int) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight; x is followed by zeros up to a multiple of 16."""
    factor = _ONE / np.float32(math.sqrt(vectors.dot(x, x, count) / np.float32(count) + eps))
    source, gain, target = f32(x), f32(weight), f32(out)
    for i in range(count):
        target[i] = source[i] * factor * gain[i]


@compiled
def layer_norm(x: int, count: int, weight: int, bias: int, eps: np.float32, out: int) -> None:
    """out = (x - mean) / sqrt(variance + eps) * weight + bias; x and out are followed by zeros up to 16."""
    source, gain, shift, target = f32(x), f32(weight), f32(bias), f32(out)
    mean = vectors.total(x, count) / np.float32(count)
    for i in range(count):
        target[i] = source[i] - mean
    factor = _ONE / np.float32(math.sqrt(vectors.dot(out, out, count) / np.float32(count) + eps))
    for i in range(count):
        target[i] = target[i] * factor * gain[i] + shift[i]


@compiled
def activate(kind: int, values: int, count: int) -> None:
    """Apply silu (0), gelu (1), gelu_tanh (2) or relu (3) in place."""
    x = f32(values)
    if kind == 0:
        for i in range(count):
            x[i] = maths.silu(x[i])
    elif kind == 1:
        for i in range(count):
            x[i] = maths.gelu(x[i])
    elif kind == 2:
        for i in range(count):
            x[i] = maths.gelu_tanh(x[i])
    else:
        for i in range(count):
            x[i] = maths.relu(x[i])
