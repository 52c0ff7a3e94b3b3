"""Blocks in host memory: the slow tier beside an accelerator, and the simplest tier in tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outrider.errors import ConfigError
from outrider.memory.tiers.base import Blocks, BookedTier, Bytes

#: Gives an uninitialised byte array of a shape; a caller with an accelerator passes one that pins its memory.
Allocate = Callable[[tuple[int, int]], Bytes]


class HostTier(BookedTier):
    """One array. The operating system backs it page by page as blocks are written."""

    def __init__(self, block_bytes: int, capacity: int, allocate: Allocate | None = None) -> None:
        if capacity < 1:
            raise ConfigError("the host tier needs room for one block at least; raise its memory", "kv_memory")
        super().__init__(block_bytes, capacity)
        self._data = (allocate or (lambda shape: np.empty(shape, np.uint8)))((capacity, block_bytes))

    def read(self, blocks: Blocks, out: Bytes) -> None:
        self._require(blocks)
        np.take(self._data, blocks, axis=0, out=out)

    def write(self, blocks: Blocks, data: Bytes) -> None:
        self._data[blocks] = data
        self._written[blocks] = True

    def close(self) -> None:
        self._data = np.empty((0, self.block_bytes), np.uint8)
        self._written[:] = False
