"""Blocks in a file under `kv_path`, each checked against the checksum of what was written.

Checksums stay in memory: beside a corrupt block they also catch a lost or torn write, after which the file holds an
older block that would agree with a checksum stored next to it. Reads are plain reads, not a memory map, so a failing
disk is an error and not a signal.
"""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import numpy as np

from outrider.errors import CapacityError, ConfigError
from outrider.memory.tiers.base import Blocks, Bytes, LostBlocksError, runs
from outrider.memory.tiers.scratch import ScratchFile

#: The file grows by this many bytes at a time.
GROWTH = 64 << 20


class DiskTier:
    """A scratch file that grows with use and disappears with its owner."""

    def __init__(self, folder: str | Path, block_bytes: int, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError("the disk tier needs room for one block at least; give it more space", "kv_path")
        self.block_bytes = block_bytes
        self.capacity = capacity
        self._file = ScratchFile(folder)
        self._fd = self._file.fd
        self._size = 0
        self._checksums = np.zeros(capacity, np.uint32)
        self._written = np.zeros(capacity, np.bool_)

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def held(self) -> int:
        return int(self._written.sum())

    def read(self, blocks: Blocks, out: Bytes) -> None:
        missing = blocks[~self._written[blocks]]
        if len(missing):
            raise LostBlocksError(missing, "never written")
        for start, stop in runs(blocks):
            self._read_run(blocks[start:stop], out[start:stop])
        sums = [zlib.crc32(row) for row in out]
        corrupt = blocks[self._checksums[blocks] != np.array(sums, np.uint32)]
        if len(corrupt):
            raise LostBlocksError(corrupt, f"corrupt in {self.path}")

    def write(self, blocks: Blocks, data: Bytes) -> None:
        self._written[blocks] = False
        for start, stop in runs(blocks):
            self._write_run(int(blocks[start]), np.ascontiguousarray(data[start:stop]))
        self._checksums[blocks] = [zlib.crc32(row) for row in np.ascontiguousarray(data)]
        self._written[blocks] = True

    def drop(self, blocks: Blocks) -> None:
        self._written[blocks] = False

    def close(self) -> None:
        self._written[:] = False
        self._file.close()

    def _read_run(self, blocks: Blocks, out: Bytes) -> None:
        view, offset = out.data.cast("B"), int(blocks[0]) * self.block_bytes
        try:
            while view:
                count = self._pread(view, offset)
                if count == 0:
                    raise LostBlocksError(blocks, f"short read of {self.path}")
                view, offset = view[count:], offset + count
        except OSError as error:
            raise LostBlocksError(blocks, f"{self.path}: {error.strerror}") from None

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
