"""Where the continuation of every n-gram of a text was last seen, in flat arrays.

`text` int32 holds the tokens. `tables` [n, slots] (a power of two of slots) have one table for every n from `low` on; a
slot holds the index of the token that followed, 0 where empty. The n tokens before it are the n-gram itself, so that
nothing else is stored and no two n-grams are ever confused.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True, inline="always")
def _slot(table, text, end, n):
    """Where the n tokens that end before `end` are in the table of that n, or would be."""
    mixed = np.uint64(0)
    for i in range(end - n, end):
        mixed = (mixed ^ np.uint64(text[i])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    mask = len(table) - 1
    at = np.int64(mixed >> np.uint64(7)) & mask
    while table[at] != 0:
        seen, same = table[at], True
        for i in range(1, n + 1):
            if text[seen - i] != text[end - i]:
                same = False
                break
        if same:
            break
        at = (at + 1) & mask
    return at


@njit(cache=True, nogil=True)
def read_and_match(text, start, stop, low, tables):
    """Index the n-grams before tokens start .. stop - 1, then look up those that end the text of `stop` tokens.

    (n, index of the continuation) of the longest that was seen before; (0, 0): none.
    """
    ns = len(tables)
    for end in range(max(start, 1), stop):
        for k in range(ns):
            if low + k <= end:
                tables[k, _slot(tables[k], text, end, low + k)] = end
    length, found = 0, np.int64(0)
    for k in range(ns):
        if low + k > stop:
            break
        seen = tables[k, _slot(tables[k], text, stop, low + k)]
        if seen == 0:
            break  # a longer n-gram cannot have been seen when a shorter one was not
        length, found = low + k, np.int64(seen)
    return length, found
