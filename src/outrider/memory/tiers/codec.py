"""How a block is stored in the slow tier: as it is, or in a smaller KV type.

A raw block of fp32 or bf16 KV is [2 (K, V), page size, head_dim]. The smaller forms round once, when a page leaves for
the slow tier; int8 has one fp32 scale per token, K and V apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError
from outrider.memory.tiers.base import Bytes
from outrider.types import Float32

#: Blocks that are turned together: as floats they fit the second-level cache.
BLOCKS_AT_ONCE = 32


class Codec(Protocol):
    """Between raw blocks [n, raw_bytes] and stored ones [n, stored_bytes]."""

    raw_bytes: int
    stored_bytes: int

    def encode(self, raw: Bytes) -> Bytes: ...

    def decode(self, stored: Bytes) -> Bytes: ...


class AsIs:
    """Whatever the fast tier's type is, scales included: bitwise."""

    def __init__(self, raw_bytes: int) -> None:
        self.raw_bytes = self.stored_bytes = raw_bytes

    def encode(self, raw: Bytes) -> Bytes:
        return raw

    def decode(self, stored: Bytes) -> Bytes:
        return stored


class Bfloat16:
    """fp32 rounded to bfloat16, to nearest and ties to even."""

    def __init__(self, page_size: int, head_dim: int) -> None:
        self.stored_bytes = 2 * page_size * head_dim * 2
        self.raw_bytes = 2 * self.stored_bytes

    def encode(self, raw: Bytes) -> Bytes:
        return _in_parts(lambda part: to_bfloat16(part.view(np.float32)), raw, self.stored_bytes)

    def decode(self, stored: Bytes) -> Bytes:
        return _in_parts(lambda part: from_bfloat16(part.view(np.uint16)), stored, self.raw_bytes)


class Int8:
    """fp32 or bf16 as int8, the scales in the same block."""

    def __init__(self, page_size: int, head_dim: int, fast_type: str) -> None:
        self._rows, self._dim, self._half = 2 * page_size, head_dim, fast_type == "bfloat16"
        self.raw_bytes = self._rows * head_dim * (2 if self._half else 4)
        self.stored_bytes = self._rows * (head_dim + 4)

    def encode(self, raw: Bytes) -> Bytes:
        return _in_parts(self._encode, raw, self.stored_bytes)

    def decode(self, stored: Bytes) -> Bytes:
        return _in_parts(self._decode, stored, self.raw_bytes)

    def _encode(self, raw: Bytes) -> Bytes:
        floats = from_bfloat16(raw.view(np.uint16)) if self._half else raw.view(np.float32)
        values = floats.reshape(len(raw), self._rows, self._dim)
        scales = np.abs(values).max(-1) / np.float32(127)
        safe = np.where(scales > 0, scales, np.float32(1))
        whole = np.rint(values / safe[..., None]).clip(-127, 127).astype(np.int8)
        packed = np.empty((len(raw), self.stored_bytes), np.uint8)
        packed[:, : self._rows * self._dim] = whole.reshape(len(raw), -1).view(np.uint8)
        packed[:, self._rows * self._dim :] = scales.astype(np.float32).view(np.uint8)
        return packed

    def _decode(self, stored: Bytes) -> Bytes:
        cut = self._rows * self._dim
        whole = np.ascontiguousarray(stored[:, :cut]).view(np.int8).reshape(len(stored), self._rows, self._dim)
        scales = np.ascontiguousarray(stored[:, cut:]).view(np.float32)
        floats = (whole * scales[..., None]).astype(np.float32).reshape(len(stored), -1)
        return (to_bfloat16(floats) if self._half else floats).view(np.uint8)


def _in_parts(turn: Callable[[Bytes], NDArray], blocks: Bytes, size: int) -> Bytes:
    """`turn` on contiguous blocks, a few at a time, so that what it holds on the way stays small; [n, size] bytes."""
    out = np.empty((len(blocks), size), np.uint8)
    for start in range(0, len(blocks), BLOCKS_AT_ONCE):
        part = slice(start, start + BLOCKS_AT_ONCE)
        out[part] = turn(np.ascontiguousarray(blocks[part])).view(np.uint8)
    return out


def to_bfloat16(values: Float32) -> NDArray[np.uint16]:
    """The upper halves of fp32, rounded to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def from_bfloat16(halves: NDArray[np.uint16]) -> Float32:
    """Exactly."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def make_codec(fast_type: str, slow_type: str, raw_bytes: int, page_size: int, head_dim: int) -> Codec:
    """The codec from the fast tier's KV type to an equal ("auto") or smaller one in the slow tier."""
    if slow_type in ("auto", fast_type):
        return AsIs(raw_bytes)
    if slow_type == "int8" and fast_type in ("float32", "bfloat16"):
        return Int8(page_size, head_dim, fast_type)
    if slow_type == "bfloat16" and fast_type == "float32":
        return Bfloat16(page_size, head_dim)
    raise ConfigError(
        f"{fast_type} KV cannot be kept as {slow_type} in the slow tier; use {fast_type} or a smaller type "
        "(float32 > bfloat16 > int8)",
        "slow_kv_dtype",
    )
