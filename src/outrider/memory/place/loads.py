"""Rows to load, grouped by the blocks that hold them: computed once per step, used for every slow layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.memory.place.buffers import Rows
from outrider.memory.tiers.base import Blocks, Bytes, LostBlocksError, Tier
from outrider.types import Int32

_NOTHING = np.zeros(0, np.int64)


class Wanted(NamedTuple):
    """m rows of one sequence: the block of each, the entry within its page, its head, and the slot it goes to."""

    blocks: Blocks
    offsets: Int32
    heads: Int32
    slots: Int32
    owner: int


@dataclass(frozen=True)
class Loads:
    """m rows in n distinct blocks; rows are sorted by block. Block numbers are those of layer 0."""

    blocks: Blocks  # [n] ascending
    starts: NDArray[np.int64]  # [n + 1] rows of each block
    offsets: Int32  # [m] entry within its page
    heads: Int32  # [m]
    slots: Int32  # [m] where the row goes
    owners: NDArray[np.int64]  # [m] sequence ids

    @classmethod
    def join(cls, parts: Sequence[Wanted]) -> Loads:
        """The wants of several sequences as one, so that a block they share is read once."""
        blocks, offsets, heads, slots = (np.concatenate([part[i] for part in parts] or [_NOTHING]) for i in range(4))
        owners = np.repeat([part.owner for part in parts], [len(part.blocks) for part in parts]).astype(np.int64)
        order = np.argsort(blocks, kind="stable")
        blocks = blocks[order]
        starts = np.flatnonzero(np.concatenate([blocks[:1] == blocks[:1], blocks[1:] != blocks[:-1]]))
        narrow = [np.ascontiguousarray(part[order], np.int32) for part in (offsets, heads, slots)]
        return cls(blocks[starts], np.append(starts, len(blocks)), narrow[0], narrow[1], narrow[2], owners[order])

    def place(self, target: Rows, raw: Bytes, part: slice) -> None:
        """Put the rows of blocks part.start .. part.stop - 1, whose raw bytes are given, into their slots."""
        target.scatter(raw, part.start, self.starts, self.offsets, self.heads, self.slots)

    def owners_of(self, indices: Iterable[int]) -> set[int]:
        """Sequences that wanted rows of these blocks (indices into `blocks`)."""
        return {int(owner) for i in indices for owner in self.owners[self.starts[i] : self.starts[i + 1]]}


def read_blocks(tier: Tier, blocks: Blocks, lost: set[int]) -> Bytes:
    """Stored bytes [n, block_bytes]. Indices of blocks that are lost go to `lost`, and their bytes are zero."""
    stored = np.empty((len(blocks), tier.block_bytes), np.uint8)
    try:
        tier.read(blocks, stored)
    except LostBlocksError:
        for i in range(len(blocks)):
            try:
                tier.read(blocks[i : i + 1], stored[i : i + 1])
            except LostBlocksError:
                stored[i] = 0
                lost.add(i)
    return stored


def locate(
    owner: int, pages: Int32, kv_heads: int, page_size: int, heads: Int32, entries: Int32, slots: Int32
) -> Wanted:
    """Rows (heads[i], entries[i]) of one sequence, to be put into slots[i]."""
    blocks = pages[entries // page_size].astype(np.int64) * kv_heads + heads
    return Wanted(blocks, entries % page_size, heads, slots, owner)
