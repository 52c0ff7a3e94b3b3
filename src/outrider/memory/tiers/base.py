"""The tier protocol: a place for KV blocks of one size. It stores and checks; it never picks victims.

A block is one page of K and V of one layer and KV head (all planes of it, scales included), so that a block travels
with everything that gives it meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import TransferError

Blocks = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class LostBlocksError(TransferError):
    """Blocks cannot be given back as they were written; `blocks` names them. What they held must be recomputed."""

    def __init__(self, blocks: Iterable[int], why: str) -> None:
        self.blocks = tuple(int(block) for block in blocks)
        super().__init__(f"{len(self.blocks)} KV blocks are lost ({why}); what they held has to be recomputed")


class Tier(Protocol):
    """Numbered blocks of `block_bytes` each. Reads and writes of disjoint blocks may come from several threads."""

    block_bytes: int
    capacity: int  # blocks

    @property
    def held(self) -> int:
        """Blocks that hold something."""
        ...

    def read(self, blocks: Blocks, out: Bytes) -> None:
        """Fill out [n, block_bytes]. LostBlocksError where any block was never written, is short or is corrupt."""
        ...

    def write(self, blocks: Blocks, data: Bytes) -> None:
        """Store data [n, block_bytes]. On CapacityError or LostBlocksError the blocks hold nothing."""
        ...

    def drop(self, blocks: Blocks) -> None:
        """The blocks hold nothing from here on; dropping what holds nothing is fine."""
        ...

    def close(self) -> None:
        """Give everything back. Closing twice is fine."""
        ...


class BookedTier:
    """Keeps book of which blocks hold something; what a tier is made of is its own."""

    def __init__(self, block_bytes: int, capacity: int) -> None:
        self.block_bytes = block_bytes
        self.capacity = capacity
        self._written = np.zeros(capacity, np.bool_)

    @property
    def held(self) -> int:
        return int(self._written.sum())

    def drop(self, blocks: Blocks) -> None:
        self._written[blocks] = False

    def _require(self, blocks: Blocks) -> None:
        """LostBlocksError where any of them holds nothing."""
        missing = blocks[~self._written[blocks]]
        if len(missing):
            raise LostBlocksError(missing, "never written")


def runs(blocks: Blocks) -> list[tuple[int, int]]:
    """[start, stop) spans of consecutive numbers, so that neighbours cost one transfer."""
    if not len(blocks):
        return []
    cuts = np.flatnonzero(np.diff(blocks) != 1) + 1
    edges = [0, *cuts.tolist(), len(blocks)]
    return list(pairwise(edges))
