"""Blocks between planes and the tier: whole pages both ways, and selected rows into buffers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import numpy as np

from outrider.errors import OutriderError
from outrider.memory.place.buffers import Rows
from outrider.memory.place.loads import Loads, read_blocks
from outrider.memory.place.step import Layout
from outrider.memory.tiers.base import Blocks, Bytes, Tier
from outrider.memory.tiers.codec import Codec
from outrider.memory.transfer import Mover, Ticket
from outrider.types import Int32

#: Full pages written by one job: few enough that a queue of them holds little memory.
PAGES_PER_JOB = 8
#: Bytes of pages that may wait for the tier. Whoever writes back more waits: a slow disk costs time, not memory.
QUEUED_BYTES = 2 << 20


class PageMover:
    """Knows where block (layer, page, KV head) is in the tier, and moves blocks through the codec."""

    def __init__(self, tier: Tier, mover: Mover, codec: Codec, layout: Layout, chunk: int) -> None:
        self.in_flight = 0  # blocks on their way to the tier
        self.trouble: OutriderError | None = None  # the latest write-back that failed
        self._tier, self._mover, self._codec, self._chunk = tier, mover, codec, chunk
        self.heads, self.page_size, self._pages = layout.kv_heads, layout.page_size, layout.num_pages
        self._lock = threading.Lock()
        self._queued: deque[tuple[Ticket, int]] = deque()  # write-backs and their bytes, the oldest first

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in the tier."""
        return self._tier.block_bytes

    def base(self, layer: int) -> int:
        """The first block of a layer."""
        return layer * self._pages * self.heads

    def blocks(self, layer: int, pages: Int32) -> Blocks:
        """The blocks of some pages: page by page, head by head."""
        first = self.base(layer) + np.asarray(pages, np.int64) * self.heads
        return (first[:, None] + np.arange(self.heads)).reshape(-1)

    def load(self, layer: int, target: Rows, pages: Int32, places: Int32) -> tuple[int, set[int]]:
        """Read pages[i] into page places[i] of `target`, now; returns bytes, and the pages that are lost."""
        lost: set[int] = set()
        step = max(1, self._chunk // self.heads)
        for start in range(0, len(pages), step):
            part = slice(start, start + step)
            blocks = self.blocks(layer, pages[part])
            missing: set[int] = set()
            raw = self._codec.decode(read_blocks(self._tier, blocks, missing))
            target.fill(raw, self._every(len(pages[part])), np.repeat(places[part], self.heads).astype(np.int32))
            lost.update(int(pages[start + i // self.heads]) for i in missing)
        return len(pages) * self.heads * self.block_bytes, lost

    def load_all(self, layer: int, target: Rows, pages: Int32, places: Int32 | None = None) -> set[int]:
        """`load` behind what is queued, into the pages of the same numbers by default; returns the lost pages."""
        lost: set[int] = set()

        def run() -> int:
            moved, missing = self.load(layer, target, pages, pages if places is None else places)
            lost.update(missing)
            return moved

        if len(pages):
            self._mover.wait(self._mover.submit("load", self.blocks(layer, pages), run))
        return lost

    def load_rows(self, target: Rows, loads: Loads, blocks: Blocks, failed: set[int]) -> int:
        """Read blocks, put their wanted rows in place; returns bytes. Lost ones cost only those who wanted them."""
        lost: set[int] = set()
        for start in range(0, len(blocks), self._chunk):
            part = slice(start, min(start + self._chunk, len(blocks)))
            missing: set[int] = set()
            loads.place(target, self._codec.decode(read_blocks(self._tier, blocks[part], missing)), part)
            lost.update(start + i for i in missing)
        failed.update(loads.owners_of(lost))
        return len(blocks) * self.block_bytes

    def store_all(self, layer: int, source: Rows, pages: Int32) -> None:
        """Write full pages of a layer, and return when they are there. The first failure is raised; nothing is kept
        then."""
        tickets = []
        for start in range(0, len(pages), PAGES_PER_JOB):
            part = pages[start : start + PAGES_PER_JOB]
            blocks = self.blocks(layer, part)

            def run(part: Int32 = part, blocks: Blocks = blocks) -> int:
                slots = np.repeat(part, self.heads)[:, None] * self.page_size + np.arange(self.page_size)
                return self._write(blocks, source.gather(self._every(len(part)), slots.astype(np.int32)))

            tickets.append(self._mover.submit("store", blocks, run))
        try:
            for ticket in tickets:
                self._mover.wait(ticket)
        except OutriderError:
            self._mover.drain()
            self.drop([layer], pages)
            raise

    def write_back(self, layer: int, plane: Rows, slots: Int32, pages: Int32, other: Rows | None) -> None:
        """Queue full pages whose rows lie at slots [KV heads, n * page size], a few to a job. Their bytes are taken
        now. Negative slots are those of `other`."""
        for start in range(0, len(pages), PAGES_PER_JOB):
            part = pages[start : start + PAGES_PER_JOB]
            mine = slots[:, start * self.page_size : (start + len(part)) * self.page_size]
            mine = mine.reshape(self.heads, len(part), self.page_size).transpose(1, 0, 2).reshape(-1, self.page_size)
            self._wait_for_room(len(part) * self.heads * self._codec.raw_bytes)
            raw = plane.gather(self._every(len(part)), np.ascontiguousarray(mine, np.int32), other)
            blocks = self.blocks(layer, part)
            with self._lock:
                self.in_flight += len(blocks)
            ticket = self._mover.submit("store", blocks, partial(self._store, blocks, raw))
            self._queued.append((ticket, raw.nbytes))

    def drop(self, layers: Iterable[int], pages: Int32) -> None:
        """Blocks of these pages are free. Queued, behind what is still on its way to them."""
        parts = [self.blocks(layer, pages) for layer in layers]
        if not len(pages) or not parts:
            return
        blocks = np.concatenate(parts)

        def run() -> int:
            self._tier.drop(blocks)
            return 0

        self._mover.submit("store", blocks, run)

    def _wait_for_room(self, size: int) -> None:
        """Until so many bytes more may wait for the tier. Failures are those of whoever wants the blocks back."""
        while self._queued and (self._queued[0][0].done or size + sum(held for _, held in self._queued) > QUEUED_BYTES):
            with suppress(OutriderError):
                self._mover.wait(self._queued[0][0])
            self._queued.popleft()

    def _store(self, blocks: Blocks, raw: Bytes) -> int:
        try:
            return self._write(blocks, raw)
        finally:
            with self._lock:
                self.in_flight -= len(blocks)

    def _write(self, blocks: Blocks, raw: Bytes) -> int:
        try:
            stored = self._codec.encode(raw)
            self._tier.write(blocks, stored)
            return stored.nbytes
        except OutriderError as error:
            self.trouble = error
            self._tier.drop(blocks)
            raise

    def _every(self, pages: int) -> Int32:
        """The head of every block of so many pages."""
        return np.tile(np.arange(self.heads, dtype=np.int32), pages)
