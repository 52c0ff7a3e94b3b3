"""KV of slow layers: whole pages in a tier, the selected entries of running sequences in small buffers.

A slow layer keeps the page numbers of the page table, so sharing, reference counts and prefix hits need nothing new:
block (layer, page, KV head) of the tier is that page. Full pages are written back as they fill; the page that is still
filling lies in the buffer, where the recent window keeps it (the window must be at least a page).

    step = offload.prepare(needs)          # differences once, loads of all slow layers queued in layer order
    failed = step.wait(layer)              # before that layer's attention; step.view says where it reads and writes
    offload.commit(sequence, pages, kept)  # accepted rows stay, full pages go back to the tier
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from outrider.errors import CapacityError, OutriderError
from outrider.memory.place.buffers import Rows
from outrider.memory.place.elastic import Elastic
from outrider.memory.place.loads import Loads, Wanted, locate
from outrider.memory.place.step import NOTHING_SLOW, Layout, Need, Step
from outrider.memory.tiers.base import Blocks, Bytes, Tier
from outrider.memory.tiers.codec import Codec
from outrider.memory.transfer import Mover, Ticket
from outrider.types import Int32, SlowView

#: Full pages written by one job: few enough that a queue of them holds little memory.
PAGES_PER_JOB = 8


class _Resident:
    """One sequence's share of the buffers: a region, and per layer group which entry is in which row."""

    def __init__(self, region: int, groups: int, kv_heads: int, capacity: int) -> None:
        self.region = region
        self.length = 0
        self.block = 0
        self.groups = [Elastic(kv_heads, capacity) for _ in range(groups)]


class Offload:
    """Keeps slow layers' KV in a tier and their selected entries in buffers.

    groups [L] as in Selection. chunk: blocks read at once, which bounds scratch memory.
    """

    def __init__(self, tier: Tier, mover: Mover, codec: Codec, layout: Layout, groups: Int32, chunk: int = 256) -> None:
        self.layout = layout
        self.in_flight = 0  # blocks on their way to the tier
        self.trouble: OutriderError | None = None  # the latest write-back that failed
        self._tier, self._mover, self._codec, self._chunk = tier, mover, codec, chunk
        self._groups = groups
        self._buffers: dict[int, Rows] = {}
        self._free = list(range(layout.sequences))[::-1]
        self._sequences: dict[int, _Resident] = {}
        self._lock = threading.Lock()

    @property
    def layers(self) -> tuple[int, ...]:
        """The slow layers, in the order in which they are loaded."""
        return tuple(self._buffers)

    def add_layer(self, layer: int, buffer: Rows) -> None:
        """A layer goes down: `buffer` has layout.buffer_pages pages. `absorb` its KV of every sequence next."""
        assert (buffer.pages, buffer.kv_heads, buffer.page_size) == (
            self.layout.buffer_pages, self.layout.kv_heads, self.layout.page_size,
        ), "the buffer's shape is not the layout's"  # fmt: skip
        self._buffers = dict(sorted({**self._buffers, layer: buffer}.items()))

    def remove_layer(self, layer: int, pages: Int32) -> None:
        """A layer came back (`stage` brought its KV): its blocks of `pages` are free."""
        del self._buffers[layer]
        self._drop(self._page_blocks(layer, pages))

    def prepare(self, needs: Sequence[Need]) -> Step:
        """Lay out every sequence's entries and queue what is missing. CapacityError where a selection is too large."""
        if not self._buffers:
            return Step(NOTHING_SLOW, {}, set(), self._mover)
        groups = int(self._groups.max()) + 1
        changes: list[list[Int32]] = [[] for _ in range(groups)]
        wants: list[list[Wanted]] = [[] for _ in range(groups)]
        for need in needs:
            state = self._state(need.sequence_id)
            if need.block > self.layout.block:
                raise CapacityError(f"a pass of {need.block} rows for buffers made for {self.layout.block}")
            state.block = need.block
            for group in range(groups):
                change = state.groups[group].update(self._wanted(need, state, group))
                changes[group].append(change.rows)
                wants[group].append(self._locate(need, state, change.heads, change.entries, change.new_rows))
        failed: set[int] = set()
        view = self._view(needs, changes)  # first: from the moment loads are queued, they compete for the interpreter
        tickets = self._queue([Loads.join(part) for part in wants], failed)
        return Step(view, tickets, failed, self._mover)

    def commit(self, sequence_id: int, pages: Int32, kept: Int32) -> None:
        """Keep rows `kept` (ascending offsets in the pass) as the next entries; write pages that are now full."""
        if not self._buffers:
            return
        state = self._sequences[sequence_id]
        entries = np.arange(state.length, state.length + len(kept), dtype=np.int32)
        source = self._block_slot(state) + np.tile(kept, self.layout.kv_heads)
        heads = np.repeat(np.arange(self.layout.kv_heads, dtype=np.int32), len(kept))
        rows = [self._base(state) + elastic.append(entries).reshape(-1) for elastic in state.groups]
        for layer, buffer in self._buffers.items():
            buffer.copy(buffer, heads, source.astype(np.int32), rows[self._groups[layer]].astype(np.int32))
        first, state.length = state.length // self.layout.page_size, state.length + len(kept)
        last = state.length // self.layout.page_size
        for layer, buffer in self._buffers.items():
            self._write_back(layer, buffer, pages, first, last, self._held_slots(state, layer))

    def absorb(self, sequence_id: int, pages: Int32, layer: int, source: Rows, slots: Int32, start: int) -> None:
        """Take over a layer's entries 0 .. len(slots) - 1 from other planes (a prefill's staging, or resident KV).

        Pages from entry `start` on are written to the tier, the last partial page comes into the buffer. Every slow
        layer of the sequence has to be absorbed to the same length before the next `prepare`.
        """
        state, size = self._state(sequence_id), self.layout.page_size
        state.length = len(slots)
        tail = self._tail(state)
        for elastic in state.groups:
            elastic.update(np.broadcast_to(tail, (self.layout.kv_heads, len(tail))))
        heads, held = self._tail_slots(state, layer)
        self._buffers[layer].copy(source, heads, np.tile(slots[tail], self.layout.kv_heads), held)

        def slots_of(entries: Int32) -> Int32:
            return np.broadcast_to(slots[entries], (self.layout.kv_heads, len(entries)))

        self._write_back(layer, source, pages, start // size, len(slots) // size, slots_of)

    def stage(self, sequence_id: int, pages: Int32, layer: int, target: Rows, slots: Int32) -> Ticket:
        """Queue a copy of all of a layer's entries into other planes: slots [length] say where each one goes.

        The ticket raises LostBlocksError where some are lost. For full steps, prefill, and layers that come back.
        """
        state, count = self._sequences[sequence_id], self.layout.kv_heads
        tail = self._tail(state)
        heads, held = self._tail_slots(state, layer)
        target.copy(self._buffers[layer], heads, held, np.tile(slots[tail], count))
        whole = np.arange(state.length - len(tail), dtype=np.int32)
        every = np.repeat(np.arange(count, dtype=np.int32), len(whole))
        entries, places = np.tile(whole, count), np.tile(slots[: len(whole)], count)
        loads = Loads.join([locate(sequence_id, pages, count, self.layout.page_size, every, entries, places)])
        blocks = loads.blocks + self._layer_base(layer)
        return self._mover.submit("load", blocks, lambda: self._fill(target, loads, blocks))

    def release(self, sequence_id: int) -> None:
        """The sequence ended or is preempted: its region is free. Its full pages stay in the tier."""
        state = self._sequences.pop(sequence_id, None)
        if state is not None:
            self._free.append(state.region)

    def drop_pages(self, pages: Int32) -> None:
        """Nobody will ask for these pages again: their blocks are free in every slow layer."""
        for layer in self._buffers:
            self._drop(self._page_blocks(layer, pages))

    def _drop(self, blocks: Blocks) -> None:
        """Queue it, behind what is still on its way to these blocks."""

        def drop() -> int:
            self._tier.drop(blocks)
            return 0

        self._mover.submit("store", blocks, drop)

    def _wanted(self, need: Need, state: _Resident, group: int) -> Int32:
        if need.entries is not None:
            return need.entries[group]
        everything = np.arange(state.length, dtype=np.int32)
        return np.broadcast_to(everything, (self.layout.kv_heads, state.length))

    def _view(self, needs: Sequence[Need], changes: list[list[Int32]]) -> SlowView:
        states = [self._sequences[need.sequence_id] for need in needs]
        width = max((rows.shape[1] for rows in changes[0]), default=0)
        entries = np.zeros((len(changes), len(needs), self.layout.kv_heads, width), np.int32)
        counts = np.zeros(entries.shape[:3], np.int32)
        for group, parts in enumerate(changes):
            for s, rows in enumerate(parts):
                entries[group, s, :, : rows.shape[1]] = rows
                counts[group, s] = rows.shape[1]
        first = np.array([state.region * self.layout.region_pages for state in states], np.int32)
        pages = (first[:, None] + np.arange(self.layout.region_pages)).astype(np.int32)
        slots = [np.arange(state.block) + self._block_slot(state) for state in states]
        written = np.concatenate([np.zeros(0), *slots], dtype=np.int32, casting="unsafe")
        return SlowView(pages, written, entries, counts, self._groups, self.layers[0])

    def _locate(self, need: Need, state: _Resident, heads: Int32, entries: Int32, rows: Int32) -> Wanted:
        """Where newcomers come from and go to. The page that is filling is never among them."""
        if len(entries) and entries.max() >= state.length // self.layout.page_size * self.layout.page_size:
            raise CapacityError(
                f"entry {entries.max()} of sequence {need.sequence_id} left the buffer before its page was full; "
                f"set window to {self.layout.page_size} or more"
            )
        slots = self._base(state) + rows
        return locate(need.sequence_id, need.pages, self.layout.kv_heads, self.layout.page_size, heads, entries, slots)

    def _queue(self, loads: Sequence[Loads], failed: set[int]) -> dict[int, Ticket]:
        """One job per slow layer, in layer order; layers with nothing to load have none."""
        layers, jobs = [], []
        for layer, buffer in self._buffers.items():
            part = loads[self._groups[layer]]
            if len(part.blocks):
                blocks = part.blocks + self._layer_base(layer)
                layers.append(layer)
                jobs.append((blocks, partial(self._load, buffer, part, blocks, failed)))
        return dict(zip(layers, self._mover.submit_all("load", jobs), strict=True))

    def _load(self, buffer: Rows, loads: Loads, blocks: Blocks, failed: set[int]) -> int:
        """The job of one layer: what is lost costs only the sequences that wanted it."""
        lost: set[int] = set()
        moved = self._fill(buffer, loads, blocks, lost)
        failed.update(loads.owners_of(lost))
        return moved

    def _fill(self, target: Rows, loads: Loads, blocks: Blocks, lost: set[int] | None = None) -> int:
        """Read blocks chunk by chunk and put their rows in place; returns bytes. Collects losses where it may."""
        for start in range(0, len(blocks), self._chunk):
            part = slice(start, min(start + self._chunk, len(blocks)))
            stored = loads.read(self._tier, blocks[part], start, lost)
            loads.place(target, self._codec.decode(stored), part)
        return len(blocks) * self._tier.block_bytes

    def _write_back(
        self, layer: int, source: Rows, pages: Int32, first: int, last: int, slots_of: Callable[[Int32], Int32]
    ) -> None:
        """Queue full pages first .. last - 1 (logical), a few to a job. Their bytes are taken now."""
        heads, size = self.layout.kv_heads, self.layout.page_size
        for start in range(first, last, PAGES_PER_JOB):
            count = min(last - start, PAGES_PER_JOB)
            entries = np.arange(start * size, (start + count) * size, dtype=np.int32)
            slots = slots_of(entries).reshape(heads, count, size).transpose(1, 0, 2).reshape(-1, size)
            every = np.tile(np.arange(heads, dtype=np.int32), count)
            raw = source.gather(every, np.ascontiguousarray(slots, np.int32))
            blocks = self._page_blocks(layer, pages[start : start + count])
            with self._lock:
                self.in_flight += len(blocks)
            self._mover.submit("store", blocks, partial(self._store, blocks, raw))

    def _store(self, blocks: Blocks, raw: Bytes) -> int:
        try:
            stored = self._codec.encode(raw)
            self._tier.write(blocks, stored)
            return stored.nbytes
        except OutriderError as error:
            self.trouble = error
            self._tier.drop(blocks)
            raise
        finally:
            with self._lock:
                self.in_flight -= len(blocks)

    def _held_slots(self, state: _Resident, layer: int) -> Callable[[Int32], Int32]:
        return lambda entries: (self._base(state) + state.groups[self._groups[layer]].find(entries)).astype(np.int32)

    def _state(self, sequence_id: int) -> _Resident:
        state = self._sequences.get(sequence_id)
        if state is None:
            if not self._free:
                raise CapacityError("no buffer is free for another sequence; lower max_num_seqs")
            groups, rows = int(self._groups.max()) + 1, self.layout.main_pages * self.layout.page_size
            state = self._sequences[sequence_id] = _Resident(self._free.pop(), groups, self.layout.kv_heads, rows)
        return state

    def _tail(self, state: _Resident) -> Int32:
        """Entries of the page that is still filling."""
        return np.arange(state.length // self.layout.page_size * self.layout.page_size, state.length, dtype=np.int32)

    def _tail_slots(self, state: _Resident, layer: int) -> tuple[Int32, Int32]:
        """Head and buffer slot of every tail entry, head by head."""
        rows = self._held_slots(state, layer)(self._tail(state))
        return np.repeat(np.arange(self.layout.kv_heads, dtype=np.int32), rows.shape[1]), rows.reshape(-1)

    def _base(self, state: _Resident) -> int:
        return state.region * self.layout.region_pages * self.layout.page_size

    def _block_slot(self, state: _Resident) -> int:
        return self._base(state) + self.layout.main_pages * self.layout.page_size

    def _layer_base(self, layer: int) -> int:
        return layer * self.layout.num_pages * self.layout.kv_heads

    def _page_blocks(self, layer: int, pages: Int32) -> Blocks:
        first = self._layer_base(layer) + np.asarray(pages, np.int64) * self.layout.kv_heads
        return (first[:, None] + np.arange(self.layout.kv_heads)).reshape(-1)
