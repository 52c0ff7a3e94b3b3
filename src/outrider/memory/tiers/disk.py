"""Blocks in a file under `kv_path`, each checked against the checksum of what was written.

Checksums stay in memory: beside a corrupt block they also catch a lost or torn write, after which the file holds an
older block that would agree with a checksum stored next to it. Reads are plain reads, not a memory map, so a failing
disk is an error and not a signal.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CapacityError, ConfigError
from outrider.memory.tiers.base import Blocks, BookedTier, Bytes, LostBlocksError, runs
from outrider.memory.tiers.blockio import read_blocks, sum_blocks
from outrider.memory.tiers.scratch import ScratchFile

#: The file grows by this many bytes at a time.
GROWTH = 64 << 20


class DiskTier(BookedTier):
    """A scratch file that grows with use and disappears with its owner."""

    def __init__(self, folder: str | Path, block_bytes: int, capacity: int) -> None:
        assert block_bytes % 8 == 0, "blocks are checked in words of 8 bytes"
        if capacity < 1:
            raise ConfigError("the disk tier needs room for one block at least; give it more space", "kv_path")
        super().__init__(block_bytes, capacity)
        self._file = ScratchFile(folder)
        self._fd = self._file.fd
        self._size = 0
        self._checksums = np.zeros(capacity, np.uint64)

    @property
    def path(self) -> Path:
        """The file that holds the blocks."""
        return self._file.path

    def read(self, blocks: Blocks, out: Bytes) -> None:
        self._require(blocks)
        got = np.zeros(len(blocks), np.int64)
        self._read_fast(blocks, out, got)
        late = np.flatnonzero(got != self.block_bytes)
        if len(late):
            self._read_late(blocks[late], out, late)

    def write(self, blocks: Blocks, data: Bytes) -> None:
        self._written[blocks] = False
        for start, stop in runs(blocks):
            self._write_run(int(blocks[start]), np.ascontiguousarray(data[start:stop]))
        self._checksums[blocks] = _sums(data)
        self._written[blocks] = True

    def close(self) -> None:
        self._written[:] = False
        self._file.close()

    def _read_fast(self, blocks: Blocks, out: Bytes, got: NDArray[np.int64]) -> None:
        """Whatever arrives at the first try, as it was written; the rest is read again, patiently."""
        assert out.flags.c_contiguous
        read_blocks(self._fd, blocks, self._checksums, out.view(np.uint64), got)

    def _read_late(self, blocks: Blocks, out: Bytes, rows: NDArray[np.int64]) -> None:
        """Blocks that did not arrive at once, or not as they were written, into these rows of `out`."""
        for block, row in zip(blocks, rows, strict=True):
            self._read_block(int(block), out[row].data)
        corrupt = blocks[self._checksums[blocks] != _sums(out[rows])]
        if len(corrupt):
            raise LostBlocksError(corrupt, f"corrupt in {self.path}")

    def _read_block(self, block: int, view: memoryview) -> None:
        """One block: every short read is continued, every failure named."""
        offset = block * self.block_bytes
        try:
            while view:
                count = self._pread(view, offset)
                if count == 0:
                    raise LostBlocksError([block], f"short read of {self.path}")
                view, offset = view[count:], offset + count
        except OSError as error:
            raise LostBlocksError([block], f"{self.path}: {error.strerror}") from None

    def _write_run(self, block: int, data: Bytes) -> None:
        view, offset = data.data.cast("B"), block * self.block_bytes
        self._reserve(offset + len(view))
        try:
            while view:
                count = self._pwrite(view, offset)
                if count == 0:
                    raise OSError(errno.EIO, "nothing could be written")
                view, offset = view[count:], offset + count
        except OSError as error:
            raise CapacityError(
                f"{self.path} cannot be written ({error.strerror}); free space on that disk or name another kv_path"
            ) from None

    def _reserve(self, size: int) -> None:
        if size <= self._size:
            return
        limit = self.capacity * self.block_bytes
        wanted = min(limit, -(-size // GROWTH) * GROWTH)
        self._file.grow(wanted)
        self._size = wanted

    def _pread(self, view: memoryview, offset: int) -> int:
        """One read; may be short. Tests put faults here."""
        return os.preadv(self._fd, [view], offset)

    def _pwrite(self, view: memoryview, offset: int) -> int:
        """One write; may be short. Tests put faults here."""
        return os.pwrite(self._fd, view, offset)


def _sums(data: Bytes) -> NDArray[np.uint64]:
    """Checksums [n] of blocks [n, block_bytes]."""
    sums = np.empty(len(data), np.uint64)
    sum_blocks(np.ascontiguousarray(data).view(np.uint64), sums)
    return sums
