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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from outrider.errors import CapacityError, OutriderError
from outrider.memory.place.buffers import Rows
from outrider.memory.place.elastic import Elastic
from outrider.memory.place.loads import Loads, Wanted, locate
from outrider.memory.tiers.base import Blocks, Bytes, Tier
from outrider.memory.tiers.codec import Codec
from outrider.memory.transfer import Mover, Ticket
from outrider.types import Int32


@dataclass(frozen=True)
class Need:
    """What one sequence reads in a step."""

    sequence_id: int
    pages: Int32  # [P] its page table
    block: int  # rows of this pass
    entries: Int32 | None  # [G, KV heads, n] selected committed entries, ascending; None: all of them


@dataclass(frozen=True)
class SlowView:
    """What takes the place of a Batch's pages, slots and selection in slow layers.

    `entries` are rows of the sequence's region, in the order of the entries they hold, so that attention adds up in
    the same order as over resident KV and gives the same bits.
    """

    pages: Int32  # [S, region pages]
    slots: Int32  # [T] where the rows of the pass are written
    entries: Int32  # [G, S, KV heads, n]
    counts: Int32  # [G, S, KV heads]


class Step:
    """The loads of one step. `wait` before every slow layer; `finish` before anything else touches the buffers."""

    def __init__(self, view: SlowView, tickets: Mapping[int, Ticket], failed: set[int], mover: Mover) -> None:
        self.view = view
        self._tickets, self._failed, self._mover = tickets, failed, mover

    def wait(self, layer: int) -> frozenset[int]:
        """Return when the layer's entries are there; the sequences whose KV is lost have to be recomputed or ended."""
        if layer in self._tickets:
            self._mover.wait(self._tickets[layer])
        return frozenset(self._failed)

    def finish(self) -> frozenset[int]:
        """wait for all layers."""
        for layer in self._tickets:
            self.wait(layer)
        return frozenset(self._failed)


class _Resident:
    """One sequence's share of the buffers: a region, and per layer group which entry is in which row."""

    def __init__(self, region: int, groups: int, kv_heads: int, capacity: int) -> None:
        self.region = region
        self.length = 0
        self.block = 0
        self.groups = [Elastic(kv_heads, capacity) for _ in range(groups)]


class Offload:
    """Keeps slow layers' KV in a tier and their selected entries in buffers.

    buffers: planes of every slow layer, [regions x region_pages pages]; see `region_pages`. groups [L] as in
    Selection. num_pages bounds the page numbers. chunk: blocks read at once, which bounds scratch memory.
    """

    def __init__(
        self,
        tier: Tier,
        mover: Mover,
        codec: Codec,
        buffers: Mapping[int, Rows],
        groups: Int32,
        num_pages: int,
        capacity: int,
        block: int,
        chunk: int = 256,
    ) -> None:
        self._tier, self._mover, self._codec, self._chunk = tier, mover, codec, chunk
        self._buffers = dict(sorted(buffers.items()))
        self._groups, self._num_pages = groups, num_pages
        first = next(iter(self._buffers.values()))
        self.page_size, self.kv_heads = first.page_size, first.kv_heads
        self._main_pages = -(-capacity // self.page_size)
        self._region_pages = region_pages(capacity, block, self.page_size)
        self._block = block
        self._free = list(range(first.pages // self._region_pages))[::-1]
        self._sequences: dict[int, _Resident] = {}
        self._lock = threading.Lock()
        self.in_flight = 0  # blocks on their way to the tier
        self.trouble: OutriderError | None = None  # the latest write-back that failed

    def prepare(self, needs: Sequence[Need]) -> Step:
        """Lay out every sequence's entries and queue what is missing. CapacityError where a selection is too large."""
        groups = int(self._groups.max()) + 1
        changes: list[list[Int32]] = [[] for _ in range(groups)]
        wants: list[list[Wanted]] = [[] for _ in range(groups)]
        for need in needs:
            state = self._state(need.sequence_id)
            if need.block > self._block:
                raise CapacityError(f"a pass of {need.block} rows for buffers made for {self._block}")
            state.block = need.block
            for group in range(groups):
                change = state.groups[group].update(self._wanted(need, state, group))
                changes[group].append(change.rows)
                wants[group].append(self._locate(need, state, change.heads, change.entries, change.new_rows))
        failed: set[int] = set()
        tickets = self._queue([Loads.join(part) for part in wants], failed)
        return Step(self._view(needs, changes), tickets, failed, self._mover)

    def commit(self, sequence_id: int, pages: Int32, kept: Int32) -> None:
        """Keep rows `kept` (ascending offsets in the pass) as the next entries; write pages that are now full."""
        state = self._sequences[sequence_id]
        entries = np.arange(state.length, state.length + len(kept), dtype=np.int32)
        source = self._block_slot(state) + np.tile(kept, self.kv_heads)
        heads = np.repeat(np.arange(self.kv_heads, dtype=np.int32), len(kept))
        rows = [self._base(state) + elastic.append(entries).reshape(-1) for elastic in state.groups]
        for layer, buffer in self._buffers.items():
            buffer.copy(buffer, heads, source.astype(np.int32), rows[self._groups[layer]].astype(np.int32))
        first, state.length = state.length // self.page_size, state.length + len(kept)
        for layer, buffer in self._buffers.items():
            self._write_back(
                layer, buffer, pages, first, state.length // self.page_size, self._held_slots(state, layer)
            )

    def absorb(self, sequence_id: int, pages: Int32, layer: int, source: Rows, slots: Int32, start: int) -> None:
        """Take over a layer's entries 0 .. len(slots) - 1 from other planes (a prefill's staging, or resident KV).

        Pages from entry `start` on are written to the tier, the last partial page comes into the buffer. Every slow
        layer of the sequence has to be absorbed to the same length before the next `prepare`.
        """
        state, stop = self._state(sequence_id), len(slots)
        tail = np.arange(stop // self.page_size * self.page_size, stop, dtype=np.int32)
        state.length = stop
        for elastic in state.groups:
            elastic.update(np.broadcast_to(tail, (self.kv_heads, len(tail))))
        rows = state.groups[self._groups[layer]].find(tail)
        heads = np.repeat(np.arange(self.kv_heads, dtype=np.int32), len(tail))
        target = (self._base(state) + rows.reshape(-1)).astype(np.int32)
        self._buffers[layer].copy(source, heads, np.tile(slots[tail], self.kv_heads), target)

        def held(entries: Int32) -> Int32:
            return np.broadcast_to(slots[entries], (self.kv_heads, len(entries)))

        self._write_back(layer, source, pages, start // self.page_size, stop // self.page_size, held)

    def stage(self, sequence_id: int, pages: Int32, layer: int, target: Rows, slots: Int32) -> Ticket:
        """Queue a copy of all of a layer's entries into other planes: slots [length] say where each one goes.

        The ticket raises LostBlocksError where some are lost. For full steps, prefill, and layers that come back.
        """
        state = self._sequences[sequence_id]
        whole = state.length // self.page_size * self.page_size
        tail = np.arange(whole, state.length, dtype=np.int32)
        rows = state.groups[self._groups[layer]].find(tail)
        heads = np.repeat(np.arange(self.kv_heads, dtype=np.int32), len(tail))
        source = (self._base(state) + rows.reshape(-1)).astype(np.int32)
        target.copy(self._buffers[layer], heads, source, np.tile(slots[tail], self.kv_heads))
        entries = np.arange(whole, dtype=np.int32)
        every = np.repeat(np.arange(self.kv_heads, dtype=np.int32), whole)
        places = np.tile(slots[:whole], self.kv_heads)
        tiled = np.tile(entries, self.kv_heads)
        loads = Loads.join([locate(sequence_id, pages, self.kv_heads, self.page_size, every, tiled, places)])
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
            self._tier.drop(self._page_blocks(layer, pages))

    def _wanted(self, need: Need, state: _Resident, group: int) -> Int32:
        if need.entries is not None:
            return need.entries[group]
        everything = np.arange(state.length, dtype=np.int32)
        return np.broadcast_to(everything, (self.kv_heads, state.length))

    def _view(self, needs: Sequence[Need], changes: list[list[Int32]]) -> SlowView:
        states = [self._sequences[need.sequence_id] for need in needs]
        width = max((rows.shape[1] for rows in changes[0]), default=0)
        entries = np.zeros((len(changes), len(needs), self.kv_heads, width), np.int32)
        counts = np.zeros(entries.shape[:3], np.int32)
        for group, parts in enumerate(changes):
            for s, rows in enumerate(parts):
                entries[group, s, :, : rows.shape[1]] = rows
                counts[group, s] = rows.shape[1]
        first = np.array([state.region * self._region_pages for state in states], np.int32)
        pages = (first[:, None] + np.arange(self._region_pages)).astype(np.int32)
        slots = [np.arange(state.block) + self._block_slot(state) for state in states]
        return SlowView(pages, np.concatenate([np.zeros(0), *slots], dtype=np.int32, casting="unsafe"), entries, counts)

    def _locate(self, need: Need, state: _Resident, heads: Int32, entries: Int32, rows: Int32) -> Wanted:
        """Where newcomers come from and go to. The page that is filling is never among them."""
        if len(entries) and entries.max() >= state.length // self.page_size * self.page_size:
            raise CapacityError(
                f"entry {entries.max()} of sequence {need.sequence_id} left the buffer before its page was full; "
                f"set window to {self.page_size} or more"
            )
        slots = self._base(state) + rows
        return locate(need.sequence_id, need.pages, self.kv_heads, self.page_size, heads, entries, slots)

    def _queue(self, loads: Sequence[Loads], failed: set[int]) -> dict[int, Ticket]:
        """One job per slow layer, in layer order; layers with nothing to load have none."""
        tickets = {}
        for layer, buffer in self._buffers.items():
            part = loads[self._groups[layer]]
            if len(part.blocks):
                blocks = part.blocks + self._layer_base(layer)
                job = partial(self._load, buffer, part, blocks, failed)
                tickets[layer] = self._mover.submit("load", blocks, job)
        return tickets

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
        """Queue the blocks of full pages first .. last - 1 (logical). Their bytes are taken now."""
        for index in range(first, last):
            entries = np.arange(index * self.page_size, (index + 1) * self.page_size, dtype=np.int32)
            heads = np.arange(self.kv_heads, dtype=np.int32)
            raw = source.gather(heads, np.ascontiguousarray(slots_of(entries), np.int32))
            blocks = self._page_blocks(layer, pages[index : index + 1])
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
        return lambda entries: self._base(state) + state.groups[self._groups[layer]].find(entries)

    def _state(self, sequence_id: int) -> _Resident:
        state = self._sequences.get(sequence_id)
        if state is None:
            if not self._free:
                raise CapacityError("no buffer is free for another sequence; lower max_num_seqs")
            groups, rows = int(self._groups.max()) + 1, self._main_pages * self.page_size
            state = self._sequences[sequence_id] = _Resident(self._free.pop(), groups, self.kv_heads, rows)
        return state

    def _base(self, state: _Resident) -> int:
        return state.region * self._region_pages * self.page_size

    def _block_slot(self, state: _Resident) -> int:
        return self._base(state) + self._main_pages * self.page_size

    def _layer_base(self, layer: int) -> int:
        return layer * self._num_pages * self.kv_heads

    def _page_blocks(self, layer: int, pages: Int32) -> Blocks:
        first = self._layer_base(layer) + np.asarray(pages, np.int64) * self.kv_heads
        return (first[:, None] + np.arange(self.kv_heads)).reshape(-1)


def region_pages(capacity: int, block: int, page_size: int) -> int:
    """Buffer pages of one sequence: `capacity` entries (the largest budget) and the rows of one pass."""
    return -(-capacity // page_size) + -(-block // page_size)


def tier_blocks(layers: int, num_pages: int, kv_heads: int) -> int:
    """Blocks that a tier needs to hold every page of every layer."""
    return layers * num_pages * kv_heads
