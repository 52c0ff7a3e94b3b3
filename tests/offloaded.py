"""A small world in which KV of slow layers is checked against plain arrays that keep everything."""

import numpy as np

from outrider.memory.place import Layout, Need, Offload, PageMover, Rows, Staging
from outrider.memory.place.arena import Arena, shapes_of
from outrider.memory.tiers import HostTier, make_codec

HEADS, PAGE, DIM, LAYERS = 2, 4, 8, 4
GROUPS = np.array([0, 0, 1, 1], np.int32)
WINDOW, SINKS = PAGE, 1


def planes(pages, dtype="float32"):
    """K and V, and for int8 their scales, of one layer."""
    shape = (pages, HEADS, PAGE, DIM)
    element = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}[dtype]
    scales = [np.zeros(shape[:3], np.float32) for _ in range(2)] if dtype == "int8" else []
    return [np.zeros(shape, element), np.zeros(shape, element), *scales]


def raw_bytes(dtype="float32"):
    return Rows(planes(1, dtype)).raw_bytes


def as_bytes(arrays):
    """Byte views [pages, heads, page size, bytes] of planes."""
    return [plane.reshape(*plane.shape[:3], -1).view(np.uint8) for plane in arrays]


def rows_of(arrays, slots, heads=slice(None)):
    """Bytes [n, heads, row bytes] of rows in all planes."""
    return np.concatenate([view[slots // PAGE, heads, slots % PAGE] for view in as_bytes(arrays)], axis=-1)


def paint(arrays, slots, rows):
    """Write rows [n, heads, row bytes] into slots."""
    at = 0
    for view in as_bytes(arrays):
        view[slots // PAGE, :, slots % PAGE] = rows[:, :, at : at + view.shape[3]]
        at += view.shape[3]


class Life:
    """One sequence: its pages, and the bytes of every entry of every layer."""

    def __init__(self, number, row_bytes):
        self.number, self.pages, self.length = number, [], 0
        self.truth = np.zeros((LAYERS, 128, HEADS, row_bytes), np.uint8)

    def table(self):
        return np.array(self.pages, np.int32)

    def slots(self, start, stop):
        entries = np.arange(start, stop)
        return (self.table()[entries // PAGE] * PAGE + entries % PAGE).astype(np.int32)

    def known(self, layer):
        return self.truth[layer, : self.length]


class World:
    """Sequences over one Offload. `slow` are the layers whose KV is in the tier; the others are only remembered."""

    def __init__(self, mover, tier=None, dtype="float32", num_pages=60, sequences=3, capacity=20, block=6, seed=0):
        self.rng = np.random.default_rng(seed)
        self.layout = Layout(HEADS, PAGE, num_pages, sequences, capacity, block * sequences)
        codec = make_codec(dtype, dtype, raw_bytes(dtype), PAGE, DIM)
        self.tier = tier or HostTier(codec.stored_bytes, self.layout.tier_blocks(LAYERS))
        self.mover, self.dtype, self.row_bytes = mover, dtype, raw_bytes(dtype) // PAGE
        pages, buffer = PageMover(self.tier, mover, codec, self.layout, chunk=5), self.layout.buffer_pages
        self.arena = Arena(shapes_of(planes(1, dtype)), LAYERS * buffer + 2 * num_pages)
        staging = Staging(self.arena, LAYERS, buffer, num_pages)
        self.offload = Offload(pages, mover, self.layout, GROUPS, staging)
        self.buffers, self.lives = {}, {}
        self.staged = 0
        self.free, self.holders = list(range(num_pages))[::-1], {}
        self.checked = self.moved_pages = 0

    # ---- pages, as a page table would count them

    def claim(self, life, count):
        for _ in range(count):
            page = self.free.pop()
            self.holders[page] = 1
            life.pages.append(page)

    def give(self, pages):
        gone = []
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                del self.holders[page]
                gone.append(page)
        self.offload.drop_pages(np.array(gone, np.int32))
        self.free.extend(gone)

    def full_pages(self):
        return {page for life in self.lives.values() for page in life.pages[: life.length // PAGE]}

    # ---- what can happen

    def lower(self, layer):
        """A layer goes down, with the KV of every living sequence; nothing of its planes is needed afterwards."""
        self.buffers[layer] = self.arena.planes(layer * self.layout.buffer_pages, self.layout.buffer_pages)
        source = planes(self.layout.num_pages, self.dtype)
        for life in self.lives.values():
            paint(source, life.slots(0, life.length), life.known(layer))
        self.offload.lower(layer, Rows(self.buffers[layer]), Rows(source), self.in_use(), self.residents())
        for plane in source:
            plane[:] = 0

    def lift(self, layer):
        """A layer comes back: everything arrives unharmed."""
        target = planes(self.layout.num_pages, self.dtype)
        lost = self.offload.lift(layer, Rows(target), self.in_use(), self.residents())
        for life in self.lives.values():
            if not lost & set(life.pages):
                assert (rows_of(target, life.slots(0, life.length)) == life.known(layer)).all()
        del self.buffers[layer]
        return lost

    def in_use(self):
        return np.array(sorted(self.full_pages()), np.int32)

    def residents(self):
        return [Need(life.number, life.table(), life.length, 0, None) for life in self.lives.values()]

    def put(self, life, start=0):
        """The entries from `start` on come from elsewhere, in all slow layers."""
        count, first = life.length - start, start % PAGE
        sources, slots = {}, np.arange(first, first + count, dtype=np.int32)
        for layer in self.buffers:
            source = planes(-(-max(1, first + count) // PAGE), self.dtype)
            paint(source, slots, life.known(layer)[start:])
            sources[layer] = Rows(source)
        self.offload.put(Need(life.number, life.table(), start, 0, None), sources, slots)

    def take(self, life, layer, start=0):
        """The entries from a page's beginning on, as a preempted sequence takes them along."""
        target = planes(-(-max(1, life.length - start) // PAGE), self.dtype)
        need = Need(life.number, life.table(), start, life.length - start, None)
        assert not self.offload.take(need, layer, Rows(target))
        found = rows_of(target, np.arange(life.length - start))
        assert (found == life.known(layer)[start:]).all()

    def random_rows(self, count):
        """Bytes of rows that nobody has seen before; as floats they may be anything."""
        return self.rng.integers(0, 256, (count, HEADS, self.row_bytes), dtype=np.uint8)

    def start(self, number, length, parent=None):
        """A sequence begins with a computed prompt, on the full pages of another one where they are shared."""
        life = self.lives[number] = Life(number, self.row_bytes)
        shared = 0
        if parent is not None:
            shared = min(parent.length // PAGE, length // PAGE) * PAGE
            for page in parent.pages[: shared // PAGE]:
                self.holders[page] += 1
                life.pages.append(page)
            life.truth[:, :shared] = parent.truth[:, :shared]
        self.claim(life, -(-length // PAGE) - len(life.pages))
        for layer in range(LAYERS):
            life.truth[layer, shared:length] = self.random_rows(length - shared)
        life.length = length
        self.put(life, shared)
        return life

    def choose(self, life, budget):
        """A random selection with sinks and window, or everything where it fits."""
        if life.length <= budget:
            return None
        rows = np.empty((2, HEADS, budget), np.int32)
        middle = np.arange(SINKS, life.length - WINDOW)
        for group in range(2):
            for head in range(HEADS):
                picked = self.rng.choice(middle, budget - SINKS - WINDOW, replace=False)
                ends = [*range(SINKS), *range(life.length - WINDOW, life.length)]
                rows[group, head] = np.sort([*ends, *picked])
        return rows

    def step(self, lives, budget=14, block=3, kept=None, whole=()):
        """One pass over some sequences, every byte checked before `attention`; returns the sequences that failed.

        whole: numbers of sequences that read everything.
        """
        needs = []
        for life in lives:
            self.claim(life, max(0, -(-(life.length + block) // PAGE) - len(life.pages)))
            chosen = None if life.number in whole else self.choose(life, budget)
            needs.append(Need(life.number, life.table(), life.length, block, chosen))
        step = self.offload.prepare(needs)
        failed = frozenset()
        written = {(life.number, layer): self.random_rows(block) for life in lives for layer in range(LAYERS)}
        for layer in self.offload.layers:
            failed = step.wait(layer)
            view = [view for view in step.views if view.first <= layer][-1]
            self.check(view, needs, lives, layer, failed)
            for s, life in enumerate(lives):  # the pass writes its rows
                paint(self.buffers[layer], view.slots[s * block :][:block], written[life.number, layer])
        failed = step.finish()
        for life in lives:
            if life.number not in failed:
                self.commit(life, block, written, kept)
        return failed

    def check(self, view, needs, lives, layer, failed):
        """Every selected entry is where the view says, in entry order, bit for bit."""
        group = GROUPS[layer]
        for s, (need, life) in enumerate(zip(needs, lives, strict=True)):
            for head in range(HEADS):
                if life.number in failed:
                    continue
                entries = np.arange(life.length) if need.entries is None else need.entries[group, head]
                rows = view.entries[group, s, head, : len(entries)]
                if view.counts[group, s, head] < 0:
                    rows, self.staged = entries, self.staged + 1
                else:
                    assert view.counts[group, s, head] == len(entries)
                slots = view.pages[s, rows // PAGE] * PAGE + rows % PAGE
                whole = self.arena.planes(layer * self.layout.buffer_pages, 1 << 20)  # pages count from the buffer
                found = rows_of(whole, slots, head)
                assert (found == life.known(layer)[entries, head]).all()
                self.checked += len(entries)

    def commit(self, life, block, written, kept):
        if kept is None:
            count = int(self.rng.integers(1, block + 1))
            kept = np.sort(self.rng.choice(block, count, replace=False)).astype(np.int32)
        self.offload.commit(life.number, life.table(), kept)
        for layer in range(LAYERS):
            life.truth[layer, life.length : life.length + len(kept)] = written[life.number, layer][kept]
        life.length += len(kept)
        self.give([life.pages.pop() for _ in range(len(life.pages) - -(-life.length // PAGE))])

    def end(self, number):
        life = self.lives.pop(number)
        self.offload.release(number)
        self.give(life.pages)

    # ---- the account

    def balance(self):
        """Blocks of full pages: resident + slow + in flight = total."""
        pages = len(self.full_pages())
        resident = (LAYERS - len(self.buffers)) * pages * HEADS
        return resident + self.tier.held + self.offload.pages.in_flight, LAYERS * pages * HEADS
