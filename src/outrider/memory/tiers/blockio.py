"""Compiled reading and checking of blocks: the transfer thread spends its time here, without the interpreter's lock."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

_pread: Any = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
_PRIME = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True)
def read_blocks(fd, blocks, size, address, got):
    """Read blocks of `size` bytes to `address` onwards, neighbours in one call; got[i] bytes of each arrived."""
    start = 0
    while start < blocks.shape[0]:
        stop = start + 1
        while stop < blocks.shape[0] and blocks[stop] == blocks[stop - 1] + 1:
            stop += 1
        count = _pread(fd, address + np.uint64(start * size), np.uint64((stop - start) * size), blocks[start] * size)
        for i in range(start, stop):
            got[i] = min(size, max(0, count - (i - start) * size))
        start = stop


@njit(cache=True, nogil=True)
def sum_blocks(words, sums):
    """A 64-bit checksum of every row of words [n, k] uint64.

    Four lanes of multiply and shift, each step one to one: a change of any single word always shows, any other one
    with odds of 2^64 to one against missing it.
    """
    for i in range(words.shape[0]):
        a, b, c, d = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
        whole = words.shape[1] // 4 * 4
        for j in range(0, whole, 4):
            a = (a ^ words[i, j]) * _PRIME
            b = (b ^ words[i, j + 1]) * _PRIME
            c = (c ^ words[i, j + 2]) * _PRIME
            d = (d ^ words[i, j + 3]) * _PRIME
            a ^= a >> np.uint64(29)
            b ^= b >> np.uint64(29)
            c ^= c >> np.uint64(29)
            d ^= d >> np.uint64(29)
        for j in range(whole, words.shape[1]):
            a = (a ^ words[i, j]) * _PRIME
            a ^= a >> np.uint64(29)
        for lane in (b, c, d):
            a = (a ^ lane) * _PRIME
            a ^= a >> np.uint64(29)
        sums[i] = a
