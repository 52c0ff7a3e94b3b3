"""Rows of KV in page layout, moved between caches, buffers and blocks as plain bytes.

A *plane* is one array of a cache layer: K, V, or their scales; [pages, KV heads, page size, ...] of any type. A slot
is page * page size + offset, as everywhere. A raw block is one page of one KV head: its planes' bytes in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from outrider.kernels.cpu.machine import SOURCES, u8
from outrider.memory.tiers.base import Bytes
from outrider.types import Int32

Planes = Sequence[NDArray]


class Rows:
    """The planes of one layer, seen as bytes."""

    def __init__(self, planes: Planes) -> None:
        self.pages, self.kv_heads, self.page_size = planes[0].shape[:3]
        self._planes = tuple(_as_bytes(plane) for plane in planes)
        self.widths = np.array([plane.shape[3] for plane in self._planes])
        self.addresses = [plane.__array_interface__["data"][0] for plane in self._planes]

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

    def scatter(
        self, raw: Bytes, first: int, starts: NDArray[np.int64], offsets: Int32, heads: Int32, slots: Int32
    ) -> None:
        """Of block raw[i], rows offsets[r] go to (heads[r], slots[r]): r from starts[first + i] to the next one."""
        copy_in(self._planes, raw, first, starts, offsets, heads, slots)

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
def copy_in(planes, raw, first, starts, offsets, heads, slots):
    """Rows r at `offsets` of raw[i] into slots of all planes; starts[first + i] <= r < starts[first + i + 1]."""
    start = 0
    for plane in planes:
        page_size, width = plane.shape[2], plane.shape[3]
        for i in range(raw.shape[0]):
            for r in range(starts[first + i], starts[first + i + 1]):
                at = start + offsets[r] * width
                plane[slots[r] // page_size, heads[r], slots[r] % page_size] = raw[i, at : at + width]
        start += page_size * width


@njit(cache=True, nogil=True)
def copy_rows(plane, source, heads, source_slots, slots):
    """Rows at source_slots [n] of one plane into slots [n] of another."""
    page_size = plane.shape[2]
    for i in range(heads.shape[0]):
        old, new = source_slots[i], slots[i]
        plane[new // page_size, heads[i], new % page_size] = source[old // page_size, heads[i], old % page_size]


def copy_layers(
    targets: Sequence[Rows], sources: Sequence[Rows], groups: Int32, heads: Int32, source_slots: Int32, slots: Int32
) -> None:
    """Rows.copy for many layers at once: row i of layer l goes to (heads[i], slots[groups[l], i])."""
    to = np.array([rows.addresses for rows in targets])
    of, first = to if sources is targets else np.array([rows.addresses for rows in sources]), targets[0]
    _copy_layers(to, of, first.widths, first.kv_heads, first.page_size, groups, heads, source_slots, slots)


def _layer_copier(sources: int) -> Any:
    """The compiled loop of copy_layers, cached on disk under the digest of what it is built from."""

    @njit(cache=True, nogil=True)
    def copy(targets, planes, widths, kv_heads, page_size, groups, heads, source_slots, slots):
        for layer in range(targets.shape[0] if sources != 0 else 0):
            for plane in range(targets.shape[1]):
                width, new, old = widths[plane], u8(targets[layer, plane]), u8(planes[layer, plane])
                for i in range(heads.shape[0]):
                    slot, source = slots[groups[layer], i], source_slots[i]
                    at = ((slot // page_size * kv_heads + heads[i]) * page_size + slot % page_size) * width
                    place = ((source // page_size * kv_heads + heads[i]) * page_size + source % page_size) * width
                    for byte in range(width):
                        new[at + byte] = old[place + byte]

    return copy


_copy_layers = _layer_copier(SOURCES)
