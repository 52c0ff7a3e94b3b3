"""Weights from their stored form into packed tiles (formats.py), and dense weights into groups of integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from outrider.kernels.cpu import formats
from outrider.kernels.cpu.formats import GROUP, GROUP_BYTES, HEADS, SUPER, TILE
from outrider.models.spec import GroupedInts, SlicedWeight, Weight
from outrider.types import Float32

_ROWS = 4096  # rows of a dense matrix that are rounded at a time
_PART = 1 << 22  # stored weights that are unpacked at a time
_TINY = 4e-3  # below this largest value fp16 scales would be off by more than a thousandth of it

Mode = Literal["auto", "float32", "int8", "int4"]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Packed:
    """One matrix [n, k] as tiles; `data` is uint8 [tiles, bytes of a tile]."""

    data: Bytes
    kind: int
    n: int
    k: int
    groups: int


def pack(weight: Weight, mode: Mode = "auto") -> Packed:
    """Pack a matrix [N, K]. auto: stored integers as they are, anything else as int8 groups.

    int8 and int4 take stored integers of at most that width as they are and quantise the rest.
    """
    if mode == "float32":
        return pack_dense(weight.dense())
    return _pack_stored(weight, mode) or pack_groups(quantise_dense(weight.dense(), 4 if mode == "int4" else 8))


def _pack_stored(weight: Weight, mode: Mode) -> Packed | None:
    """Stored integers a range of rows at a time; None where there are none of a width that the mode takes as it is."""
    n, k = weight.shape
    step = max(1, _PART // max(1, k * TILE)) * TILE
    if not isinstance(weight, SlicedWeight):
        step, read = max(1, n), lambda first: weight.groups()
    else:

        def read(first: int) -> GroupedInts | None:
            stored = weight.part(first, min(first + step, n)).groups()
            weight.release()
            return stored

    opening = read(0)
    if opening is None or (mode == "int4" and opening.bits != 4):
        return None

    def parts() -> Iterator[GroupedInts | None]:
        yield opening
        yield from (read(first) for first in range(step, n, step))

    return _pack_parts(n, k, KINDS[opening.bits], parts)


def quantise_dense(values: Float32, bits: Literal[4, 8]) -> GroupedInts:
    """Round fp32 [N, K] to groups of 32 with a scale (and minimum for 4 bits), in fp16 unless all values are tiny."""
    n, k = values.shape
    groups = -(-k // GROUP)
    held = np.float16 if n == 0 or max(values.max(), -values.min()) >= _TINY else np.float32
    q: NDArray = np.zeros((n, k), np.int8 if bits == 8 else np.uint8)
    scale, minimum = np.zeros((n, groups), np.float32), np.zeros((n, groups), np.float32)
    for start in range(0, n, _ROWS):  # by parts: a vocabulary's matrix would need its size again
        rows = values[start : start + _ROWS]
        padded = np.zeros((len(rows), groups, GROUP), np.float32)
        padded.reshape(len(rows), -1)[:, :k] = rows
        at = slice(start, start + len(rows))
        if bits == 8:
            scale[at] = _rounded(np.abs(padded).max(-1) / 127, held)
        else:
            minimum[at] = _rounded(np.minimum(padded.min(-1), 0), held)
            scale[at] = _rounded((padded.max(-1) - minimum[at]) / 15, held)
            padded -= minimum[at][..., None]
        padded /= np.where(scale[at] > 0, scale[at], 1)[..., None]
        np.clip(np.rint(padded, out=padded), -127 if bits == 8 else 0, 127 if bits == 8 else 15, out=padded)
        q[at] = _integers(padded, q.dtype).reshape(len(rows), -1)[:, :k]
    return GroupedInts(bits, q, scale, None if bits == 8 else minimum)


def _rounded(values: Float32, dtype: type) -> Float32:
    return values.astype(dtype).astype(np.float32)


def _integers(values: Float32, dtype: np.dtype) -> NDArray:
    """As integers; NaN becomes 0, its group's scale shows it."""
    return np.nan_to_num(values, copy=False).astype(dtype)


def pack_dense(values: Float32) -> Packed:
    """fp32 [N, K] as tiles of fp32."""
    n, k = values.shape
    tiles, groups = -(-n // TILE), -(-k // GROUP)
    padded = np.zeros((tiles * TILE, groups * GROUP), np.float32)
    padded[:n, :k] = values
    data = np.ascontiguousarray(padded.reshape(tiles, TILE, -1).transpose(0, 2, 1))
    return Packed(data.reshape(tiles, -1).view(np.uint8), formats.F32, n, k, groups)


def pack_groups(stored: GroupedInts) -> Packed:
    """Stored integers as tiles, bit for bit; the smallest scale format that holds the scales exactly."""
    n, k = stored.q.shape
    packed = _pack_parts(n, k, KINDS[stored.bits], lambda: iter([stored]))
    assert packed is not None  # the last format of each width holds any scales
    return packed


def _pack_parts(
    n: int, k: int, kinds: tuple[int, ...], parts: Callable[[], Iterator[GroupedInts | None]]
) -> Packed | None:
    """A matrix from whole tiles of rows, in the first of `kinds` that holds all scales; None where a part is None."""
    kind, *wider = kinds
    groups, done = -(-k // GROUP), 0
    data = np.zeros((-(-n // TILE), formats.tile_bytes(kind, groups)), np.uint8)
    for stored in parts():
        if stored is None:
            return None
        tiles = -(-len(stored.q) // TILE)
        coded = _encode(kind, stored, tiles)
        if coded is None:
            return _pack_parts(n, k, tuple(wider), parts)
        _put(stored, *coded, _places(kind, groups), data[done : done + tiles])
        done += tiles
    return Packed(data, kind, n, k, groups)


def _put(stored: GroupedInts, heads: Bytes | None, scales: Bytes, place: NDArray[np.int64], data: Bytes) -> None:
    """Write integers, scales and heads into their tiles; `place`: where each group begins."""
    _pack_integers(stored.q.view(np.uint8), stored.bits, place, data)
    _scatter(scales, place + 64 * stored.bits, data)
    if heads is not None:
        _scatter(heads, place[::SUPER] - heads[0, 0].size * TILE, data)


def _minimum(stored: GroupedInts) -> Float32:
    return np.zeros_like(stored.scale) if stored.minimum is None else stored.minimum


def _rows_padded(values: Float32, tiles: int) -> Float32:
    padded = np.zeros((tiles * TILE, values.shape[1]), np.float32)
    padded[: len(values)] = values
    return padded


def _places(kind: int, groups: int) -> NDArray[np.int64]:
    """Byte at which every group of a tile begins."""
    index = np.arange(groups)
    return index * GROUP_BYTES[kind] + (index // SUPER + 1) * HEADS[kind]


#: The formats that hold integers of a width, smallest first.
KINDS: dict[int, tuple[int, ...]] = {
    4: (formats.Q4_F16, formats.Q4_K, formats.Q4_F32),
    6: (formats.Q6_K,),
    8: (formats.Q8_F16, formats.Q8_F32),
}


def _encode(kind: int, stored: GroupedInts, tiles: int) -> tuple[Bytes | None, Bytes] | None:
    """Bytes of heads [tiles * 16, groups / 8, arrays, item] and scales [tiles * 16, groups, arrays, item] in a format.

    None where it does not hold them exactly.
    """
    both = [_rows_padded(stored.scale, tiles)]
    if stored.factor is not None:
        return _encode_counts(both[0], _rows_padded(stored.factor, tiles))
    if stored.bits == 4:
        both.append(_rows_padded(_minimum(stored), tiles))
    if kind == formats.Q4_K:
        return _encode_factors(both)
    if kind in (formats.Q4_F16, formats.Q8_F16):
        return (None, _bytes(both, np.float16)) if all(_fits_half(v) for v in both) else None
    return None, _bytes(both, np.float32)


def _encode_counts(scale: Float32, factor: Float32) -> tuple[Bytes, Bytes]:
    """Q6_K: factors [N, K / 256], and scales [N, K / 16] as whole multiples of them."""
    by_factor = scale.reshape(*factor.shape, -1)
    with np.errstate(invalid="ignore"):  # a bad factor shows itself
        counts = np.nan_to_num(by_factor / np.where(factor == 0, 1, factor)[..., None], posinf=0, neginf=0)
    whole = counts.astype(np.int8).view(np.uint8).reshape(len(scale), -1, 2, 1)
    return _bytes([factor], np.float16), whole


def _encode_factors(both: list[Float32]) -> tuple[Bytes, Bytes] | None:
    """Q4_K: scales and minima [N, K / 32] as whole multiples of a factor per 8."""
    if both[0].shape[1] % SUPER:
        return None
    found = [_factorise(v) for v in both]
    if any(f is None for f in found):
        return None
    return _bytes([f[0] for f in found if f], np.float16), _bytes([f[1] for f in found if f], np.uint8)


def _fits_half(values: Float32) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


def _bytes(values: list, dtype: type) -> Bytes:
    """[N, G] arrays as bytes [N, G, arrays, itemsize]."""
    stacked = np.stack([v.astype(dtype) for v in values], axis=2)
    return stacked.view(np.uint8).reshape(*stacked.shape, -1)


def _scatter(scales: Bytes, place: NDArray[np.int64], data: Bytes) -> None:
    """Write bytes [N, G, arrays, item] so that the 16 channels of a tile stand together per group and array."""
    _, groups, arrays, item = scales.shape
    ordered = scales.reshape(-1, TILE, groups, arrays, item).transpose(0, 2, 3, 1, 4)
    flat = np.ascontiguousarray(ordered).reshape(len(data), groups, -1)
    for g, at in enumerate(place):
        data[:, at : at + flat.shape[2]] = flat[:, g]


def _factorise(values: Float32) -> tuple[Float32, Float32] | None:
    """Write [N, G] as (fp16 factor per 8 groups) * (integer 0..63 per group), exactly; None where that fails."""
    factor = np.zeros((len(values), values.shape[1] // SUPER), np.float32)
    whole = np.zeros_like(values)
    halves = np.abs(values).astype(np.float16)  # only to size the search below
    return (factor, whole) if halves.size == 0 or _find_factors(values, factor, whole) else None


@njit(cache=True, nogil=True)
def _find_factors(values, factor, whole):
    """Try largest / 63, / 62, ... as the factor of every 8 scales; False where none fits."""
    for n in range(values.shape[0]):
        for s in range(values.shape[1] // 8):
            top = np.float32(0)
            for g in range(s * 8, s * 8 + 8):
                if abs(values[n, g]) > abs(top):
                    top = values[n, g]
            if top == np.float32(0):
                continue
            found = False
            for count in range(63, 0, -1):
                d = np.float32(top / np.float32(count))
                if not _is_half(d) or d * np.float32(count) != top:
                    continue
                found = True
                for g in range(s * 8, s * 8 + 8):
                    m = np.float32(np.rint(values[n, g] / d))
                    if m < 0 or m * d != values[n, g]:
                        found = False
                        break
                    whole[n, g] = m
                if found:
                    factor[n, s] = d
                    break
            if not found:
                return False
    return True


@njit(nogil=True)
def _is_half(value):
    """Whether fp16 holds a float32 exactly."""
    size = abs(value)
    if size >= np.float32(65520):
        return False
    unit = np.float32(2.0**-24)
    while unit * np.float32(2048) <= size:
        unit *= np.float32(2)
    steps = size / unit
    return steps == np.rint(steps)


@njit(cache=True, nogil=True)
def _pack_integers(q, bits, place, data):
    """Lay q [N, K] (bytes) out in tiles: nibble pairs, with two high bits + 32 apart, or bytes + 128."""
    n, k = q.shape
    for tile in range(data.shape[0]):
        for c in range(16):
            row = tile * 16 + c
            for i in range(place.shape[0] * 32):
                g, step, byte = i // 32, i % 32 // 4, i % 4
                value = q[row, i] if row < n and i < k else np.uint8(0)
                if bits == 8:
                    data[tile, place[g] + step * 64 + c * 4 + byte] = value ^ np.uint8(128)
                    continue
                if bits == 6:
                    value = (value + np.uint8(32)) & np.uint8(63)
                    at = place[g] + 256 + step // 4 * 64 + c * 4 + byte
                    data[tile, at] |= (value >> np.uint8(4)) << np.uint8(2 * (step % 4))
                at = place[g] + step // 2 * 64 + c * 4 + byte
                data[tile, at] |= (value & np.uint8(15)) << np.uint8(4 * (step % 2))
