"""From stored blocks to scale * q + minimum per 32 inputs, vectorised over rows.

Exact, bit for bit what the file says: Q4_0, Q4_1, Q4_K (4 bits), Q6_K (6 bits, a scale per 16), Q8_0 and Q5_0 (8 bits).
Requantised to int8 with one scale per 32 inputs (the largest of their magnitudes / 127, rounded up to an fp16 number
where that is fine enough), each value within half a step of that scale: Q5_1 and Q5_K (their minimum does not fit the
8-bit form).
Other types have no such form: `grouped` returns None and the dense values are used.
Block layouts: ggml's block_q4_0 ... block_q6_K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from outrider.models.spec import GroupedInts
from outrider.types import Float32

Bytes = NDArray[np.uint8]
GROUP, SUPER = 32, 256
_FINE, _LARGE = 2.0**-20, 2.0**15  # steps between which fp16 is within a sixteenth
CHUNK = 1 << 18  # weights unpacked at a time: temporaries stay in the cache

#: Integers, scales, and minima or, for 6 bits, factors.
Part = tuple[NDArray[np.uint8] | NDArray[np.int8], Float32, Float32 | None]


def grouped(rows: Bytes, kind: GGMLQuantizationType) -> GroupedInts | None:
    """The integers, scales and minima of a matrix stored as `rows` [N, bytes per row]; None where there is no form."""
    if kind not in UNPACK:
        return None
    unpack, bits = UNPACK[kind]
    block, size = GGML_QUANT_SIZES[kind]
    count, width = rows.shape[0], rows.shape[1] // size * block
    q = np.empty((count, width), np.uint8 if bits == 4 else np.int8)
    scale = np.empty((count, width // (16 if bits == 6 else GROUP)), np.float32)
    extra = {4: np.empty_like(scale), 6: np.empty((count, width // SUPER), np.float32), 8: None}[bits]
    step = max(1, CHUNK // max(1, width))
    for first in range(0, count, step):
        part = slice(first, first + step)
        blocks = np.ascontiguousarray(rows[part]).reshape(-1, size)
        ints, scales, extras = unpack(blocks)
        q[part] = ints.reshape(-1, width)
        scale[part] = scales.reshape(-1, scale.shape[1])
        if extra is not None and extras is not None:
            extra[part] = extras.reshape(-1, extra.shape[1])
    if bits == 8 and (q == -128).any():
        return None
    return GroupedInts(bits, q, scale, factor=extra) if bits == 6 else GroupedInts(bits, q, scale, extra)


def _half(blocks: Bytes, at: int) -> Float32:
    """The fp16 number at byte `at` of each block, as fp32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes -> [..., 2 n]: all low halves, then all high halves."""
    half = packed.shape[-1]
    out = np.empty((*packed.shape[:-1], 2 * half), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., :half])
    np.right_shift(packed, 4, out=out[..., half:])
    return out


def _q4_0(blocks: Bytes) -> Part:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, -8 * scale


def _q4_1(blocks: Bytes) -> Part:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Part:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _fifth_bits(packed: Bytes) -> Bytes:
    """[blocks, 4] bytes -> [blocks, 32]: 16 where the bit is set."""
    return np.left_shift(np.unpackbits(packed, axis=-1, bitorder="little"), 4, dtype=np.uint8)


def _q5_0(blocks: Bytes) -> Part:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return q.view(np.int8) - np.int8(16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Part:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _requantise(q, _half(blocks, 0), _half(blocks, 2))


def _k_scales(packed: Bytes) -> tuple[Float32, Float32]:
    """12 bytes -> 8 six-bit scales and 8 six-bit minima, [blocks, 8] each."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minimum = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _k_factors(blocks: Bytes) -> tuple[Float32, Float32]:
    """Scales and minima of a Q4_K or Q5_K super-block, [blocks, 8]: products that fp32 holds exactly."""
    scale, minimum = _k_scales(blocks[:, 4:16])
    return _half(blocks, 0) * scale, -(_half(blocks, 2) * minimum)


def _q4_k(blocks: Bytes) -> Part:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), *_k_factors(blocks)


def _q5_k(blocks: Bytes) -> Part:
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (fifth << 4)
    scale, minimum = _k_factors(blocks)
    return _requantise(q.reshape(-1, GROUP), scale.reshape(-1, 1), minimum.reshape(-1, 1))


def _q6_k(blocks: Bytes) -> Part:
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    q = _nibbles(low).reshape(-1, 2, 4, 32)
    for quarter in range(4):
        q[:, :, quarter] |= ((high >> (2 * quarter)) & 3) << 4
    factor = _half(blocks, 208)
    return q.view(np.int8) - np.int8(32), blocks[:, 192:208].view(np.int8) * factor, factor


def _requantise(q: Bytes | NDArray[np.int8], scale: Float32, minimum: Float32 | None) -> Part:
    """Values scale * q + minimum, 32 per first index of `scale` -> int8 with their own scale."""
    values = q * scale
    if minimum is not None:
        values += minimum
    values = values.reshape(-1, GROUP)
    step = _rounded_up(np.maximum(values.max(axis=1), -values.min(axis=1))[:, None] / np.float32(127))
    values *= np.where(step > 0, 1 / np.where(step > 0, step, 1), 0).astype(np.float32)
    return np.rint(values, out=values).astype(np.int8), step, None


def _rounded_up(step: Float32) -> Float32:
    """As fp16 numbers no smaller, which take half the room; as they are where one is too large or too small."""
    small = np.where(step > 0, step, 1).min(initial=1)
    if not small >= _FINE or step.max(initial=0) > _LARGE:
        return step
    half = step.astype(np.float16)
    return np.where(half < step, np.nextafter(half, np.float16(np.inf)), half).astype(np.float32)


def values_of(groups: GroupedInts) -> Float32:
    """scale * q + minimum, fp32 [N, K]: what dequantising the stored blocks gives, for the exact types."""
    scale = groups.scale[..., None]
    values = np.multiply(groups.q.reshape(*groups.scale.shape, -1), scale, dtype=np.float32)
    if groups.minimum is not None:
        values += groups.minimum[..., None]
    return values.reshape(groups.q.shape)


UNPACK: dict[GGMLQuantizationType, tuple[Callable[[Bytes], Part], Literal[4, 6, 8]]] = {
    GGMLQuantizationType.Q4_0: (_q4_0, 4),
    GGMLQuantizationType.Q4_1: (_q4_1, 4),
    GGMLQuantizationType.Q4_K: (_q4_k, 4),
    GGMLQuantizationType.Q8_0: (_q8_0, 8),
    GGMLQuantizationType.Q5_0: (_q5_0, 8),
    GGMLQuantizationType.Q5_1: (_q5_1, 8),
    GGMLQuantizationType.Q5_K: (_q5_k, 8),
    GGMLQuantizationType.Q6_K: (_q6_k, 6),
}

EXACT = frozenset(
    {
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q6_K,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q5_0,
    }
)
