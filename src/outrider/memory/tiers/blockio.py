"""Compiled reading and checking of blocks: the transfer thread spends its time here, without the interpreter's lock."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

_pread: Any = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
_PRIME = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True)
def sum_block(words):
    """A 64-bit checksum of words [k] uint64.

    Four lanes of multiply and shift, each step one to one: a change of any single word always shows, any other one
    with odds of 2^64 to one against missing it.
    """
    a, b, c, d = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    whole = words.shape[0] // 4 * 4
    for j in range(0, whole, 4):
        a = (a ^ words[j]) * _PRIME
        b = (b ^ words[j + 1]) * _PRIME
        c = (c ^ words[j + 2]) * _PRIME
        d = (d ^ words[j + 3]) * _PRIME
        a ^= a >> np.uint64(29)
        b ^= b >> np.uint64(29)
        c ^= c >> np.uint64(29)
        d ^= d >> np.uint64(29)
    for j in range(whole, words.shape[0]):
        a = (a ^ words[j]) * _PRIME
        a ^= a >> np.uint64(29)
    for lane in (b, c, d):
        a = (a ^ lane) * _PRIME
        a ^= a >> np.uint64(29)
    return a


@njit(cache=True, nogil=True)
def sum_blocks(words, sums):
    """The checksum of every row of words [n, k] uint64."""
    for i in range(words.shape[0]):
        sums[i] = sum_block(words[i])


@njit(cache=True, nogil=True)
def read_blocks(fd, blocks, sums, words, got):
    """Fill words [n, k] uint64 with blocks, neighbours in one call. got[i]: how many bytes arrived; -1 where they are
    not those that sums[blocks[i]] stands for."""
    size = words.shape[1] * 8
    start = 0
    while start < blocks.shape[0]:
        stop = start + 1
        while stop < blocks.shape[0] and blocks[stop] == blocks[stop - 1] + 1:
            stop += 1
        target = np.uint64(words[start:stop].ctypes.data)
        count = _pread(fd, target, np.uint64((stop - start) * size), blocks[start] * size)
        for i in range(start, stop):
            got[i] = min(size, max(0, count - (i - start) * size))
            if got[i] == size and sum_block(words[i]) != sums[blocks[i]]:
                got[i] = -1
        start = stop
