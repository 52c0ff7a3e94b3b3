"""The paged KV cache of the compiled decoder, in main memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from outrider.errors import CapacityError, ConfigError
from outrider.kernels.cpu.layout import CACHE
from outrider.kernels.cpu.vectors import BFLOAT16, FLOAT32, INT8
from outrider.types import Float32, Int32

NAMES = ("keys", "values", "key_scales", "value_scales")
#: Copies the keys of slots [n] of one layer into rows [n, KV heads, head_dim].
KeyReader = Callable[[Int32, Float32], None]
KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8}
_TYPES = {FLOAT32: np.float32, BFLOAT16: np.uint16, INT8: np.int8}


class PagedKVCache:
    """Keys and values of all layers, [pages, kv_heads, page_size, head_dim] each, read and written in place.

    head_dim is rounded up to 16 (the pad is zero). bfloat16 is held as the upper halves of fp32 in uint16; int8 has one
    fp32 scale per entry and head, [pages, kv_heads, page_size].
    """

    def __init__(
        self, num_layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: str = "float32"
    ) -> None:
        if dtype not in KINDS:
            raise ConfigError.unknown(dtype, KINDS, "kv_cache_dtype")
        self.num_pages, self.page_size, self.dtype, self.kind = num_pages, page_size, dtype, KINDS[dtype]
        self._head_dim = head_dim
        shape = (num_pages, kv_heads, page_size, -(-head_dim // 16) * 16)
        element = _TYPES[self.kind]
        try:
            self.keys = [np.zeros(shape, element) for _ in range(num_layers)]
            self.values = [np.zeros(shape, element) for _ in range(num_layers)]
            scales = shape[:3] if self.kind == INT8 else (0, 0, 0)
            self.key_scales = [np.zeros(scales, np.float32) for _ in range(num_layers)]
            self.value_scales = [np.zeros(scales, np.float32) for _ in range(num_layers)]
        except MemoryError as error:
            raise CapacityError(f"no memory for {num_pages} KV pages; lower max_model_len or kv_memory") from error
        self.nbytes = sum(array.nbytes for array in self._arrays())
        self.away: dict[int, KeyReader] = {}  # layers whose KV is elsewhere, and how to read keys of theirs by slot
        self.table = np.zeros(num_layers, CACHE)
        for name in NAMES:
            self.table[name] = [array.ctypes.data for array in getattr(self, name)]

    def planes(self, layer: int) -> list[NDArray]:
        """K, V and, for int8, their scales of one layer; [pages, KV heads, page size, ...] each."""
        return [array[layer] for array in self._kinds() if array[layer].size]

    def hold(self, layer: int, planes: Sequence[NDArray], keys: KeyReader | None = None) -> None:
        """Passes find the layer's KV in these planes from now on. keys: given where they are not the cache's pages."""
        for array, plane in zip([a for a in self._kinds() if a[layer].size], planes, strict=True):
            array[layer] = plane
        for name, array in zip(NAMES, self._kinds(), strict=True):
            self.table[name][layer] = array[layer].ctypes.data
        if keys is None:
            self.away.pop(layer, None)
        else:
            self.away[layer] = keys

    def move(self, source: int, target: int) -> None:
        """Copy one slot's K and V in every layer."""
        page, offset = divmod(source, self.page_size)
        new_page, new_offset = divmod(target, self.page_size)
        for array in self._filled():
            array[new_page, :, new_offset] = array[page, :, offset]

    def key_rows(self, layers: Sequence[int], slots: Int32) -> Float32:
        """Keys [layers, n, kv_heads, head_dim] as floats."""
        rows = np.empty((len(layers), len(slots), self.keys[0].shape[1], self._head_dim), np.float32)
        for layer, target in zip(layers, rows, strict=True):
            if layer in self.away:
                self.away[layer](slots, target)
            else:
                copy_floats(self.keys[layer], self.key_scales[layer], slots, target)
        return rows

    def take(self, slots: Int32) -> list[NDArray]:
        """Copies of the rows at some slots, array by array."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        return [array[pages, :, offsets] for array in self._filled()]

    def put(self, slots: Int32, rows: list[NDArray]) -> None:
        """Write back what `take` gave."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        for array, kept in zip(self._filled(), rows, strict=True):
            array[pages, :, offsets] = kept

    def _arrays(self) -> list[NDArray]:
        return [*self.keys, *self.values, *self.key_scales, *self.value_scales]

    def _kinds(self) -> list[list[NDArray]]:
        return [self.keys, self.values, self.key_scales, self.value_scales]

    def _filled(self) -> list[NDArray]:
        """The arrays of the layers that are here."""
        here = [layer for layer in range(len(self.keys)) if layer not in self.away]
        return [array[layer] for array in self._kinds() for layer in here if array[layer].size]


def entry_bytes(kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of one token's K and V in one layer."""
    item = np.dtype(_TYPES[KINDS[dtype]]).itemsize
    scale = 4 if dtype == "int8" else 0
    return 2 * kv_heads * (-(-head_dim // 16) * 16 * item + scale)


def float_rows(plane: NDArray, scales: NDArray | None, slots: Int32, head_dim: int) -> Float32:
    """Rows [n, KV heads, head_dim] of a cache plane [pages, KV heads, page size, >= head_dim] as fp32.

    float32 as it is, uint16 as bfloat16, int8 times its scales [pages, KV heads, page size].
    """
    rows = np.empty((len(slots), plane.shape[1], head_dim), np.float32)
    copy_floats(plane, scales, slots, rows)
    return rows


def copy_floats(plane: NDArray, scales: NDArray | None, slots: Int32, rows: Float32) -> None:
    """float_rows into an array that is there."""
    if plane.dtype == np.uint16:
        copy_bfloats(plane, slots, rows.view(np.uint32))
    elif plane.dtype == np.int8:
        assert scales is not None, "int8 KV has scales"
        copy_scaled(plane, scales, slots, rows)
    else:
        copy_whole(plane, slots, rows)


@njit(cache=True, nogil=True)
def copy_whole(plane: NDArray, slots: Int32, rows: Float32) -> None:
    """Float32 rows [n, KV heads, d] of slots [n]."""
    size = plane.shape[2]
    for i in range(rows.shape[0]):
        for h in range(rows.shape[1]):
            row = plane[slots[i] // size, h, slots[i] % size]
            for d in range(rows.shape[2]):
                rows[i, h, d] = row[d]


@njit(cache=True, nogil=True)
def copy_bfloats(plane: NDArray, slots: Int32, bits: NDArray[np.uint32]) -> None:
    """The same of bfloat16, as the bits of float32."""
    size = plane.shape[2]
    for i in range(bits.shape[0]):
        for h in range(bits.shape[1]):
            row = plane[slots[i] // size, h, slots[i] % size]
            for d in range(bits.shape[2]):
                bits[i, h, d] = np.uint32(row[d]) << np.uint32(16)


@njit(cache=True, nogil=True)
def copy_scaled(plane: NDArray, scales: NDArray, slots: Int32, rows: Float32) -> None:
    """The same of int8 with a scale per entry and head."""
    size = plane.shape[2]
    for i in range(rows.shape[0]):
        for h in range(rows.shape[1]):
            page, offset = slots[i] // size, slots[i] % size
            for d in range(rows.shape[2]):
                rows[i, h, d] = np.float32(plane[page, h, offset, d]) * scales[page, h, offset]
