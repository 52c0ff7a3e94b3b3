"""Rows of KV in page layout, moved between caches, buffers and blocks as plain bytes.

A *plane* is one array of a cache layer: K, V, or their scales; [pages, KV heads, page size, ...] of any type. A slot
is page * page size + offset, as everywhere. A raw block is one page of one KV head: its planes' bytes in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from outrider.memory.tiers.base import Bytes
from outrider.types import Int32

Planes = Sequence[NDArray]


class Rows:
    """The planes of one layer, seen as bytes."""

    def __init__(self, planes: Planes) -> None:
        self.pages, self.kv_heads, self.page_size = planes[0].shape[:3]
        self._planes = [_as_bytes(plane) for plane in planes]

    @property
    def raw_bytes(self) -> int:
        """Bytes of one block."""
        return self.page_size * sum(plane.shape[3] for plane in self._planes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of one KV head."""
        return sum(plane.shape[3] for plane in self._planes)

    def gather(self, heads: Int32, slots: Int32, other: Rows | None = None) -> Bytes:
        """Raw blocks [n, raw_bytes] of n pages of one head each; slots [n, page size] say where each entry is.

        A negative slot s stands for slot ~s of `other`.
        """
        raw = np.empty((len(heads), self.raw_bytes), np.uint8)
        start = 0
        for mine, theirs in zip(self._planes, (other or self)._planes, strict=True):
            copy_out(mine, theirs, heads, slots, raw, start)
            start += self.page_size * mine.shape[3]
        return raw

    def fill(self, raw: Bytes, heads: Int32, pages: Int32) -> None:
        """Block raw[i] becomes page pages[i] of head heads[i]."""
        start = 0
        for plane in self._planes:
            copy_pages(plane, raw, start, heads, pages)
            start += self.page_size * plane.shape[3]

    def scatter(self, raw: Bytes, index: Int32, offsets: Int32, heads: Int32, slots: Int32) -> None:
        """Row offsets[i] of block raw[index[i]] goes to (heads[i], slots[i])."""
        start = 0
        for plane in self._planes:
            copy_in(plane, raw, start, index, offsets, heads, slots)
            start += self.page_size * plane.shape[3]

    def copy(self, source: Rows, heads: Int32, source_slots: Int32, slots: Int32) -> None:
        """Rows (heads[i], source_slots[i]) of another layer's planes come to (heads[i], slots[i]) of these."""
        for mine, theirs in zip(self._planes, source._planes, strict=True):
            copy_rows(mine, theirs, heads, source_slots, slots)


def _as_bytes(plane: NDArray) -> Bytes:
    """A view [pages, KV heads, page size, bytes] of a plane, scales without a last axis included."""
    if not plane.flags.c_contiguous:
        raise ValueError("planes must be contiguous")
    return plane.reshape(*plane.shape[:3], -1).view(np.uint8)


@njit(cache=True, nogil=True)
def copy_out(plane, other, heads, slots, raw, start):
    """Whole pages of slots [n, page size] into raw [n, bytes]; a slot below 0 is ~slot of the other plane."""
    page_size, width = plane.shape[2], plane.shape[3]
    for i in range(heads.shape[0]):
        for offset in range(page_size):
            slot, at = slots[i, offset], start + offset * width
            if slot >= 0:
                raw[i, at : at + width] = plane[slot // page_size, heads[i], slot % page_size]
            else:
                raw[i, at : at + width] = other[~slot // page_size, heads[i], ~slot % page_size]


@njit(cache=True, nogil=True)
def copy_pages(plane, raw, start, heads, pages):
    """raw [n, bytes] into whole pages [n] of a plane."""
    page_size, width = plane.shape[2], plane.shape[3]
    for i in range(heads.shape[0]):
        for offset in range(page_size):
            at = start + offset * width
            plane[pages[i], heads[i], offset] = raw[i, at : at + width]


@njit(cache=True, nogil=True)
def copy_in(plane, raw, start, index, offsets, heads, slots):
    """Rows at `offsets` of raw[index] into slots [n] of a plane."""
    page_size, width = plane.shape[2], plane.shape[3]
    for i in range(index.shape[0]):
        at = start + offsets[i] * width
        plane[slots[i] // page_size, heads[i], slots[i] % page_size] = raw[index[i], at : at + width]


@njit(cache=True, nogil=True)
def copy_rows(plane, source, heads, source_slots, slots):
    """Rows at source_slots [n] of one plane into slots [n] of another."""
    page_size = plane.shape[2]
    for i in range(heads.shape[0]):
        old, new = source_slots[i], slots[i]
        plane[new // page_size, heads[i], new % page_size] = source[old // page_size, heads[i], old % page_size]
