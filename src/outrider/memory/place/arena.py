"""Memory for buffers and resident planes: zeroed, backed by the system as it is written, and given back in parts."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

Shape = tuple[tuple[int, ...], DTypeLike]  # of one plane without its pages: [KV heads, page size, ...], and its type


class Arena:
    """Pages of all planes of a KV type in one piece, so that any page can be named from any other one."""

    def __init__(self, shapes: Sequence[Shape], pages: int) -> None:
        self._planes = [np.zeros((pages, *shape), kind) for shape, kind in shapes]

    def planes(self, first: int, count: int) -> list[NDArray]:
        """Pages first .. first + count - 1 of every plane."""
        return [plane[first : first + count] for plane in self._planes]


def shapes_of(planes: Sequence[NDArray]) -> list[Shape]:
    """What an arena for pages like these needs to know."""
    return [(plane.shape[1:], plane.dtype) for plane in planes]


def discard(planes: Sequence[NDArray]) -> None:
    """Give the memory of contiguous arrays back to the system, as far as it can take it; what they held is lost."""
    if not sys.platform.startswith("linux"):
        return
    for plane in planes:
        start = -(-plane.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (plane.ctypes.data + plane.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            _madvise()(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def _madvise() -> ctypes._NamedFuncPointer:
    return ctypes.CDLL(None).madvise
