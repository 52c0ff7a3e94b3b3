"""KV of slow layers: whole pages in a tier, the selected entries of running sequences in small buffers.

A slow layer keeps the page numbers of the page table, so sharing, reference counts and prefix hits need nothing new:
block (layer, page, KV head) of the tier is that page. Full pages are written back as they fill; the page that is still
filling lies in the buffer, where the recent window keeps it (the window must be at least a page).

    step = offload.prepare(needs)          # differences once; loads of all slow layers in layer order
    step.wait(layer)                       # before that layer's attention; step.views say where it reads and writes
    failed = step.finish()
    offload.commit(sequence, pages, kept)  # accepted rows stay, full pages go back to the tier

Who reads more than its buffer holds (prefill, full steps) has whole layers staged, one while the next is on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from outrider.errors import CapacityError
from outrider.memory.place.buffers import Rows, copy_layers
from outrider.memory.place.elastic import Elastic, Resident
from outrider.memory.place.loads import Loads, Wanted, locate
from outrider.memory.place.pages import PageMover
from outrider.memory.place.staging import Staging
from outrider.memory.place.step import EVERYTHING, NOTHING_SLOW, Ahead, Job, Layout, Need, Step
from outrider.memory.transfer import Mover
from outrider.types import Int32, SlowView


class Offload:
    """Keeps slow layers' KV in a tier and their selected entries in buffers.

    groups [L] as in Selection. elastic False: every step loads all it reads (an ablation). ahead: look-ahead in slow
    layers, None: all of them.
    """

    def __init__(
        self,
        pages: PageMover,
        mover: Mover,
        layout: Layout,
        groups: Int32,
        staging: Staging | None = None,
    ) -> None:
        self.layout, self.pages, self.elastic = layout, pages, True
        self.ahead: int | None = None
        self._mover, self._staging, self._groups = mover, staging, groups
        self._buffers: dict[int, Rows] = {}
        self._free = list(range(layout.sequences))[::-1]
        self._sequences: dict[int, Resident] = {}
        self._lost: set[int] = set()  # found between two steps

    @property
    def layers(self) -> tuple[int, ...]:
        """The slow layers, in the order in which they are loaded."""
        return tuple(self._buffers)

    @property
    def rows(self) -> int:
        """Rows of a slow layer's buffer that sequences have used, beside those of the pass."""
        return sum(state.peak for state in self._sequences.values())

    def resume(self, buffers: Mapping[int, Rows]) -> None:
        """Layers that are slow already get these buffers, while nobody runs."""
        self._buffers = dict(sorted(buffers.items()))

    # ---- layers go down and come back

    def lower(self, layer: int, buffer: Rows, source: Rows, pages: Int32, holders: Sequence[Need]) -> None:
        """A layer goes down: full `pages` of `source` go to the tier, the rest of every holder into the buffer.

        CapacityError where the tier has no room; the layer then stays as it was. The source is not needed afterwards.
        """
        assert (buffer.pages, buffer.kv_heads, buffer.page_size) == (
            self.layout.buffer_pages, self.layout.kv_heads, self.layout.page_size,
        ), "the buffer's shape is not the layout's"  # fmt: skip
        self.pages.store_all(layer, source, pages)
        self._buffers = dict(sorted({**self._buffers, layer: buffer}.items()))
        for need in holders:
            state = self._state(need)
            entries, rows = self._tail(state), self._tail_slots(state, layer)
            slots = need.pages[entries // self.layout.page_size] * self.layout.page_size
            buffer.copy(
                source, rows[0], np.tile(slots + entries % self.layout.page_size, self.layout.kv_heads), rows[1]
            )
            self._refill(need, state, layer)

    def lift(self, layer: int, target: Rows, pages: Int32, holders: Sequence[Need]) -> set[int]:
        """A layer comes back into `target`; returns the pages that are lost. Its blocks are free afterwards."""
        lost = self.pages.load_all(layer, target, pages)
        for need in holders:
            state = self._state(need)
            entries, (heads, held) = self._tail(state), self._tail_slots(state, layer)
            slots = need.pages[entries // self.layout.page_size] * self.layout.page_size
            slots = np.tile(slots + entries % self.layout.page_size, self.layout.kv_heads)
            target.copy(self._buffers[layer], heads, held, slots.astype(np.int32))
        del self._buffers[layer]
        self.pages.drop([layer], pages)
        if not self._buffers:
            for sequence_id in list(self._sequences):
                self.release(sequence_id)
        return lost

    # ---- a step

    def staged(self, need: Need) -> int:
        """Pages of staging that a sequence takes in a step; 0 where its buffer holds all that it reads."""
        if need.entries is not None or need.start <= self.layout.capacity:
            return 0
        return -(-need.start // self.layout.page_size)

    def prepare(self, needs: Sequence[Need], first: int = 0) -> Step:
        """Lay out every sequence's entries and queue what is missing. first: of the step's rows, in this pass.

        CapacityError where a selection, the pass or what has to be staged is too large.
        """
        if not self._buffers:
            return NOTHING_SLOW
        last = first + sum(need.block for need in needs)
        if last > self.layout.block:
            raise CapacityError(f"a pass of {last} rows for buffers made for {self.layout.block}")
        states = [self._state(need) for need in needs]
        for need, state in zip(needs, states, strict=True):
            state.first, first = first, first + need.block
        failed = self._lost & {need.sequence_id for need in needs}
        self._lost -= failed
        rows, jobs = self._settle(needs, states, failed)
        views = self._view(needs, states, rows)
        staged: dict[int, Job] = {}
        if any(self.staged(need) for need in needs):
            views, staged = self._stage(needs, states, views, failed)
        near = 1 if self.ahead is None else min(1, self.ahead)
        queues = [Ahead(self._mover, self.layers, jobs, self.ahead), Ahead(self._mover, self.layers, staged, near)]
        return Step(views, queues, failed, self.layers)

    def commit(self, sequence_id: int, pages: Int32, kept: Int32) -> None:
        """Keep rows `kept` (ascending offsets in the pass) as the next entries; write pages that are now full."""
        if self._buffers:
            state = self._sequences[sequence_id]
            self._extend(state, pages, {layer: None for layer in self._buffers}, self.pass_slots(state.first + kept))

    def put(self, need: Need, sources: Mapping[int, Rows], slots: Int32) -> None:
        """Entries from need.start on lie at `slots` of other planes, one source for every slow layer."""
        if self._buffers:
            self._extend(self._state(need), need.pages, {layer: sources[layer] for layer in self._buffers}, slots)

    def take(self, need: Need, layer: int, target: Rows) -> set[int]:
        """Copy need.block entries of a sequence's layer, from need.start (a page's beginning) on, into `target`.

        They are its latest ones, or end with a page. Returns lost pages.
        """
        state, size = self._sequences[need.sequence_id], self.layout.page_size
        first, last = need.start // size, (need.start + need.block) // size
        places = np.arange(max(0, last - first), dtype=np.int32)
        lost = self.pages.load_all(layer, target, need.pages[first:last], places)
        if (need.start + need.block) % size:
            entries, (heads, held) = self._tail(state), self._tail_slots(state, layer)
            slots = np.tile(entries - first * size, self.layout.kv_heads)
            target.copy(self._buffers[layer], heads, held, slots.astype(np.int32))
        return lost

    def pass_slots(self, rows: Int32) -> Int32:
        """Where rows of the pass lie in every slow layer's buffer."""
        return (rows + self.layout.sequences * self.layout.region_pages * self.layout.page_size).astype(np.int32)

    def pass_row(self, sequence_id: int) -> int:
        """The first row of a sequence in the latest pass."""
        return self._sequences[sequence_id].first

    def release(self, sequence_id: int) -> int | None:
        """The sequence ended or is preempted: its region, whose number is returned, is free. Its full pages stay in
        the tier."""
        state = self._sequences.pop(sequence_id, None)
        if state is None:
            return None
        self._free.append(state.region)
        return state.region

    def tell(self, sequence_id: int) -> tuple[int, int]:
        """Bytes loaded and stored for a sequence since it was last told."""
        state = self._sequences.get(sequence_id)
        if state is None:
            return 0, 0
        told = state.loaded_bytes, state.stored_bytes
        state.loaded_bytes = state.stored_bytes = 0
        return told

    def lose(self, sequence_ids: Iterable[int]) -> None:
        """KV of these sequences was lost between two steps: the next one reports them."""
        self._lost.update(sequence_ids)

    def drop_pages(self, pages: Int32) -> None:
        """Nobody will ask for these pages again: their blocks are free in every slow layer."""
        self.pages.drop(self.layers, pages)

    # ---- how

    def _settle(
        self, needs: Sequence[Need], states: Sequence[Resident], failed: set[int]
    ) -> tuple[list[list[Int32]], dict[int, Job]]:
        """Rows [KV heads, n] of every group and sequence, and the loads of the layers that miss something."""
        groups = range(int(self._groups.max()) + 1)
        rows: list[list[Int32]] = [[] for _ in groups]
        wants: list[list[Wanted]] = [[] for _ in groups]
        for need, state in zip(needs, states, strict=True):
            for group in groups:
                if self.staged(need):
                    rows[group].append(np.zeros((self.layout.kv_heads, 0), np.int32))
                    continue
                if not self.elastic:
                    state.groups[group].update(self._alike(self._tail(state)))
                change = state.groups[group].update(self._wanted(need, state, group))
                rows[group].append(change.rows)
                wants[group].append(self._locate(need, state, change.heads, change.entries, change.new_rows))
        self._count(needs, states, wants)
        return rows, self._loads([Loads.join(part) for part in wants], failed)

    def _loads(self, loads: Sequence[Loads], failed: set[int]) -> dict[int, Job]:
        jobs = {}
        for layer, buffer in self._buffers.items():
            part = loads[self._groups[layer]]
            if len(part.blocks):
                blocks = part.blocks + self.pages.base(layer)
                jobs[layer] = Job(blocks, partial(self.pages.load_rows, buffer, part, blocks, failed))
        return jobs

    def _count(self, needs: Sequence[Need], states: Sequence[Resident], wants: Sequence[Sequence[Wanted]]) -> None:
        """Book the blocks that each sequence asks for; those that several want are booked for each."""
        size = self.pages.block_bytes
        moving = [i for i, need in enumerate(needs) if not self.staged(need)]
        for group, parts in enumerate(wants):
            layers = int((self._groups[list(self._buffers)] == group).sum())
            for i, part in zip(moving, parts, strict=True):
                states[i].loaded_bytes += layers * size * len(set(part.blocks.tolist()))

    def _stage(
        self, needs: Sequence[Need], states: Sequence[Resident], views: Sequence[SlowView], failed: set[int]
    ) -> tuple[list[SlowView], dict[int, Job]]:
        """A view per slow layer, and the jobs that bring whole layers for those who read everything."""
        view, wanted = views[0], [self.staged(need) for need in needs]
        if self._staging is None or sum(wanted) > self._staging.pages:
            room = 0 if self._staging is None else self._staging.pages
            raise CapacityError(f"{sum(wanted)} pages to be read whole for staging of {room}; lower max_model_len")
        self._staging.grow(sum(wanted))
        width = max(view.pages.shape[1], *wanted)
        made, jobs = [], {}
        for place, layer in enumerate(self._buffers):
            pages = np.zeros((len(needs), width), np.int32)
            pages[:, : view.pages.shape[1]] = view.pages
            first = 0
            for s, count in enumerate(wanted):
                if count:
                    pages[s, :count] = self._staging.numbers(layer, place, first, count)
                    first += count
            made.append(SlowView(pages, view.slots, view.entries, view.counts, view.groups, layer))
            jobs[layer] = self._stage_layer(layer, self._staging.slot(place), needs, states, wanted, failed)
        return made, jobs

    def _stage_layer(
        self, layer: int, slot: Rows, needs: Sequence[Need], states: Sequence[Resident], wanted: Sequence[int],
        failed: set[int],
    ) -> Job:  # fmt: skip
        """The job that fills a slot with all that some sequences have of a layer."""
        size, first, parts = self.layout.page_size, 0, []
        for need, state, count in zip(needs, states, wanted, strict=True):
            if not count:
                continue
            full = need.start // size
            places = np.arange(first, first + full, dtype=np.int32)
            heads, held = self._tail_slots(state, layer)
            tail = np.arange(need.start - full * size, dtype=np.int32) + (first + full) * size
            parts.append((need, places, heads, held, np.tile(tail, self.layout.kv_heads)))
            state.loaded_bytes += full * self.layout.kv_heads * self.pages.block_bytes
            first += count

        def run() -> int:
            moved = 0
            for need, places, heads, held, tail in parts:
                slot.copy(self._buffers[layer], heads, held, tail)
                bytes_, lost = self.pages.load(layer, slot, need.pages[: len(places)], places)
                moved += bytes_
                failed.update([need.sequence_id] if lost else [])
            return moved

        blocks = [self.pages.blocks(layer, part[0].pages[: len(part[1])]) for part in parts]
        return Job(np.concatenate(blocks), run)

    def _extend(self, state: Resident, pages: Int32, sources: Mapping[int, Rows | None], slots: Int32) -> None:
        """The next entries lie at `slots` of the sources (None: the layer's own buffer): write full pages, keep the
        latest entries in the buffer."""
        size, heads, count = self.layout.page_size, self.layout.kv_heads, len(slots)
        first, start, stop = state.length // size, state.length, state.length + count
        last = stop // size
        for layer, source in sources.items():
            if last > first:
                tail = self._groups_of(state, layer).find(self._tail(state)) + self._base(state)
                fresh = np.broadcast_to(slots if source is None else ~slots, (heads, count))
                whole = np.concatenate([tail, fresh], axis=1)[:, : (last - first) * size]
                self.pages.write_back(layer, self._buffers[layer], whole, pages[first:last], source)
                state.stored_bytes += (last - first) * heads * self.pages.block_bytes
        entries = np.arange(start, stop, dtype=np.int32)[-self.layout.capacity :]
        rows = [self._base(state) + elastic.append(entries).reshape(-1) for elastic in state.groups]
        state.peak = max(state.peak, *(elastic.entries.shape[1] for elastic in state.groups))
        which, places = (
            np.repeat(np.arange(heads, dtype=np.int32), len(entries)),
            np.tile(slots[-len(entries) :], heads),
        )
        if len(entries):
            targets = [self._buffers[layer] for layer in sources]
            given = [source for source in sources.values() if source is not None] or targets  # all of them, or none
            copy_layers(targets, given, self._groups[list(sources)], which, places, np.stack(rows).astype(np.int32))
        state.length = stop

    def _refill(self, need: Need, state: Resident, layer: int) -> None:
        """A layer joins its group's buffers: what the group holds beside the tail comes back from the tier."""
        held = self._groups_of(state, layer)
        old = held.entries < state.length // self.layout.page_size * self.layout.page_size
        heads = np.nonzero(old)[0].astype(np.int32)
        if len(heads):
            part = Loads.join([self._locate(need, state, heads, held.entries[old], held.rows[old])])
            blocks = part.blocks + self.pages.base(layer)
            job = partial(self.pages.load_rows, self._buffers[layer], part, blocks, self._lost)
            self._mover.wait(self._mover.submit("load", blocks, job))

    def _wanted(self, need: Need, state: Resident, group: int) -> Int32:
        if need.entries is not None:
            return need.entries[group]
        return self._alike(np.arange(state.length, dtype=np.int32))

    def _alike(self, entries: Int32) -> Int32:
        """The same entries for every KV head."""
        return np.broadcast_to(entries, (self.layout.kv_heads, len(entries)))

    def _view(
        self, needs: Sequence[Need], states: Sequence[Resident], rows: Sequence[Sequence[Int32]]
    ) -> list[SlowView]:
        """The view of all slow layers, as far as nothing is staged."""
        width = max(part.shape[1] for group in rows for part in group)
        entries = np.zeros((len(rows), len(needs), self.layout.kv_heads, width), np.int32)
        counts = np.full(entries.shape[:3], EVERYTHING, np.int32)
        for group, parts in enumerate(rows):
            for s, part in enumerate(parts):
                if not self.staged(needs[s]):
                    entries[group, s, :, : part.shape[1]] = part
                    counts[group, s] = part.shape[1]
        first = np.array([state.region * self.layout.region_pages for state in states], np.int32)
        pages = (first[:, None] + np.arange(self.layout.region_pages)).astype(np.int32)
        spans = [np.arange(state.first, state.first + need.block) for need, state in zip(needs, states, strict=True)]
        return [SlowView(pages, self.pass_slots(np.concatenate(spans)), entries, counts, self._groups, self.layers[0])]

    def _locate(self, need: Need, state: Resident, heads: Int32, entries: Int32, rows: Int32) -> Wanted:
        """Where newcomers come from and go to. The page that is filling is never among them."""
        if len(entries) and entries.max() >= state.length // self.layout.page_size * self.layout.page_size:
            raise CapacityError(
                f"entry {entries.max()} of sequence {need.sequence_id} left the buffer before its page was full; "
                f"set window to {self.layout.page_size} or more"
            )
        slots = self._base(state) + rows
        return locate(need.sequence_id, need.pages, self.layout.kv_heads, self.layout.page_size, heads, entries, slots)

    def _state(self, need: Need) -> Resident:
        """The sequence's share; a new one begins with need.start entries, whose last page is to be filled by the
        caller where it is not full."""
        state = self._sequences.get(need.sequence_id)
        if state is None:
            if not self._free:
                raise CapacityError("no buffer is free for another sequence; lower max_num_seqs")
            groups = int(self._groups.max()) + 1
            state = Resident(self._free.pop(), need.start, groups, self.layout.kv_heads, self.layout.capacity)
            for elastic in state.groups:
                elastic.update(self._alike(self._tail(state)))
            self._sequences[need.sequence_id] = state
        return state

    def _groups_of(self, state: Resident, layer: int) -> Elastic:
        return state.groups[self._groups[layer]]

    def _tail(self, state: Resident) -> Int32:
        """Entries of the page that is still filling."""
        return np.arange(state.length // self.layout.page_size * self.layout.page_size, state.length, dtype=np.int32)

    def _tail_slots(self, state: Resident, layer: int) -> tuple[Int32, Int32]:
        """Head and buffer slot of every tail entry, head by head."""
        rows = self._groups_of(state, layer).find(self._tail(state)) + self._base(state)
        heads = np.repeat(np.arange(self.layout.kv_heads, dtype=np.int32), rows.shape[1])
        return heads, rows.reshape(-1).astype(np.int32)

    def _base(self, state: Resident) -> int:
        return state.region * self.layout.region_pages * self.layout.page_size
