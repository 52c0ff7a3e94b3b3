"""One row of a packed matrix (formats.py) as floats: how the embedding reads its table."""

from __future__ import annotations

import numpy as np

from outrider.kernels.cpu import formats
from outrider.kernels.cpu.machine import compiled, f32, i8, u8


@compiled
def half_at(address, lane):
    """The fp16 number `lane` at an address."""
    return half_value(np.int32(u8(address)[2 * lane]) | (np.int32(u8(address)[2 * lane + 1]) << np.int32(8)))


@compiled
def half_value(bits):
    """A float32 from the bits of an fp16; NaN and infinity as NaN."""
    exponent, fraction = (bits >> 10) & 31, bits & 1023
    if exponent == 31:
        return np.float32(np.nan)
    if exponent == 0:
        size = np.float32(fraction) * np.float32(2.0**-24)
    else:
        size = np.float32(1024 + fraction) * np.float32(2.0 ** np.float64(exponent - 25))
    return -size if bits & 0x8000 else size


@compiled
def channel_scale(kind, block, head, lane):
    """Scale and minimum of one channel in one group."""
    zero = np.float32(0)
    if kind == formats.Q4_F16:
        return half_at(block + 256, lane), half_at(block + 288, lane)
    if kind == formats.Q4_F32:
        return f32(block + 256)[lane], f32(block + 320)[lane]
    if kind == formats.Q8_F16:
        return half_at(block + 512, lane), zero
    if kind == formats.Q8_F32:
        return f32(block + 512)[lane], zero
    scale = half_at(head, lane) * np.float32(u8(block + 256)[lane])
    return scale, half_at(head + 32, lane) * np.float32(u8(block + 272)[lane])


@compiled
def nibble(block, lane, i):
    """Input i of a channel, as its 4 low bits."""
    pair = np.int32(u8(block)[i // 8 * 64 + lane * 4 + i % 4])
    return (pair >> np.int32(4 * (i // 4 % 2))) & np.int32(15)


@compiled
def expand_floats(block, lane, target, start):
    """A group of 32 float32 values: target[start + i]."""
    for i in range(32):
        target[start + i] = f32(block)[i * 16 + lane]


@compiled
def expand_sixes(block, head, lane, target, start):
    """A group of Q6_K: (factor * count) * (stored - 32)."""
    factor = half_at(head, lane)
    for i in range(32):
        scale = factor * np.float32(i8(block + 384 + i // 16 * 16)[lane])
        quad = np.int32(u8(block + 256)[i // 16 * 64 + lane * 4 + i % 4])
        high = (quad >> np.int32(2 * (i // 4 % 4))) & np.int32(3)
        target[start + i] = scale * np.float32((nibble(block, lane, i) | (high << np.int32(4))) - np.int32(32))


@compiled
def expand_integers(kind, block, head, lane, target, start):
    """A group of 4 or 8 bits: scale * q + minimum."""
    scale, minimum = channel_scale(kind, block, head, lane)
    for i in range(32):
        if formats.BITS[kind] == 8:
            value = np.int32(u8(block)[i // 4 * 64 + lane * 4 + i % 4]) - np.int32(128)
        else:
            value = nibble(block, lane, i)
        target[start + i] = scale * np.float32(value) + minimum


@compiled
def expand_channel(matrix, channel, out):
    """One row of a packed matrix as fp32 [groups * 32]."""
    kind, lane, target = matrix.kind, channel % 16, f32(out)
    size, head_size = formats.GROUP_BYTES[kind], formats.HEADS[kind]
    tile = matrix.data + channel // 16 * matrix.tile_bytes
    for g in range(matrix.groups):
        head = tile + g // formats.SUPER * (head_size + formats.SUPER * size)
        block = tile + g * size + (g // formats.SUPER + 1) * head_size
        if kind == formats.F32:
            expand_floats(block, lane, target, g * 32)
        elif kind == formats.Q6_K:
            expand_sixes(block, head, lane, target, g * 32)
        else:
            expand_integers(kind, block, head, lane, target, g * 32)
