"""Where the KV of an engine lives: which layers are slow now, and what a step needs of them.

Layers go down one by one, from the last, when what is held would pass the limit; they come back when all of it has
fitted with room to spare for a while. The numbers are those of planner.py, for the requests that run now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CapacityError
from outrider.memory.place.arena import Arena, discard, shapes_of
from outrider.memory.place.buffers import Rows
from outrider.memory.place.offload import Offload
from outrider.memory.place.pages import PageMover
from outrider.memory.place.rules import Rules, Shape
from outrider.memory.place.single import Pass, Run, SingleTier
from outrider.memory.place.staging import SLOTS, Staging
from outrider.memory.place.step import Layout, Need, Step
from outrider.memory.planner import Footprint, Load, MemoryPlan, fit_layers, most_tokens, plan, shortage
from outrider.memory.pool import PagePool
from outrider.memory.report import TierReport
from outrider.memory.tiers.base import Tier
from outrider.memory.tiers.codec import make_codec
from outrider.memory.transfer import Mover, Transfer, Watcher
from outrider.models.cache import PagedKVCache, copy_floats
from outrider.sequence import Sequence as Sample
from outrider.types import Float32, Int32, Traffic

#: Steps for which a layer must have had room before it comes back: a burst of requests does not carry it to and fro.
PATIENCE = 32
MARGIN = 0.05  # of the limit that must be to spare then


class Placement(SingleTier):
    """The last layers' KV in a tier, the others' in the cache's pages."""

    def __init__(
        self, cache: PagedKVCache, make_tier: Callable[[int, int], Tier], mover: Mover, shape: Shape, rules: Rules,
        slow_type: str = "auto",
    ) -> None:  # fmt: skip
        """make_tier: (bytes of a block, blocks) -> the tier. ConfigError where slow_type is larger than the cache's."""
        super().__init__(cache)
        self.cache, self.rules, self.mover = cache, rules, mover
        self._layers, self._planes = len(cache.keys), [cache.planes(layer) for layer in range(len(cache.keys))]
        pages, heads, size = self._planes[0][0].shape[:3]
        raw = Rows(self._planes[0]).raw_bytes
        codec = make_codec(cache.dtype, slow_type, raw, size, self._planes[0][0].shape[3])
        self._slow_bytes = codec.stored_bytes * heads
        self.tier = make_tier(codec.stored_bytes, self._layers * pages * heads)
        self.pages = PageMover(self.tier, mover, codec, Layout(heads, size, pages, 0, 0, 0), chunk=256)
        self._page_bytes = raw * heads
        self._slow = self._moved = self._calm = self._lost = 0
        self._full = False  # the tier took no further layer
        self._steps: list[Step] = []
        self._freed: list[int] = []
        self._touched = np.zeros(pages, np.bool_)
        self._where = np.full(pages * size, -1, np.int32)  # of slots whose keys are at hand: the row in `_fresh`
        self._fresh: dict[int, list[NDArray]] = {}
        self._exposed = 0.0
        self._waits: dict[int, float] = {}
        self._plan: MemoryPlan | None = None
        self._rows = 0  # the most of a pass
        self.arrange(shape)

    @property
    def slow_layers(self) -> int:
        """Layers whose KV is in the tier."""
        return self._slow

    def arrange(self, shape: Shape) -> None:
        """Make buffers for other budgets or groups, while nobody runs. What is in the tier stays."""
        heads, size = self.pages.heads, self.pages.page_size
        layout = Layout(heads, size, self.cache.num_pages, shape.sequences, shape.capacity, shape.rows)
        longest = -(-shape.longest // size) + 1
        arena = Arena(shapes_of(self._planes[0]), self._layers * layout.buffer_pages + SLOTS * longest)
        self._staging = Staging(arena, self._layers, layout.buffer_pages, longest)
        self._buffers = [arena.planes(l * layout.buffer_pages, layout.buffer_pages) for l in range(self._layers)]  # noqa: E741
        self.offload = Offload(self.pages, self.mover, layout, shape.groups, self._staging)
        self.shape = shape
        self.model = Footprint(
            weight_bytes=0,
            layers=self._layers,
            kv_bytes=self._page_bytes // size,
            slow_kv_bytes=self._slow_bytes // size,
            selector_bytes=shape.selector_bytes,
            overhead=1.0,
            staging_layers=SLOTS,
            page_size=size,
            pass_rows=shape.rows,
        )
        self.retune(self.rules)
        slow = range(self._layers - self._slow, self._layers)
        self.offload.resume({layer: Rows(self._buffers[layer]) for layer in slow})
        for layer in slow:
            self.cache.hold(layer, self._buffers[layer], partial(self._read_keys, layer))

    def retune(self, rules: Rules) -> None:
        """Follow other rules from the next step on."""
        self.rules, self._calm = rules, PATIENCE  # whoever changes the rules need not wait for layers to come back
        self._where[:] = -1
        self.offload.elastic, self.offload.ahead = rules.elastic, rules.ahead

    # ---- room

    def room(self, pool: PagePool, running: Collection[Sample]) -> int:
        loads = self._loads([len(sequence.tokens) for sequence in running])
        forced = self.rules.slow_layers
        choices = range(self._layers + 1) if forced is None else range(forced, forced + 1)
        self._full = self._full and pool.held > 0  # with nothing to keep, it may be tried again
        if self._full:
            choices = range(self._slow + 1)
        most = 0
        for slow in choices:
            most = max(most, most_tokens(self.model, self.rules.limit, loads, slow) // self.model.page_size)
            if most >= pool.num_pages:
                return pool.num_pages
        return most

    def fit(self, pool: PagePool, holders: Callable[[], Sequence[Need]], running: Collection[Sample]) -> None:
        self._drop_freed()
        lengths = [len(sequence.tokens) for sequence in running]
        loads, tokens = self._loads(lengths), pool.held * self.model.page_size
        wanted = self._wanted(loads, tokens)
        most = most_tokens(self.model, self.rules.limit, loads, wanted) // self.model.page_size
        pool.evict_to(most)
        self._drop_freed()
        self._forget_memory(pool, most, max(lengths, default=0))
        while self._slow < wanted:
            self._lower(pool, holders())
        while self._slow > wanted:
            self._lift(pool, holders())
        if not self._slow:
            self._staging.shrink(0)
        touched = int(self._touched.sum()) * self.model.page_size  # cached pages live in what is left over
        self._plan = plan(self.model, self.rules.limit, loads, self._slow, tokens=touched)

    def took(self, page: int) -> None:
        self._touched[page] = True

    def freed(self, page: int) -> None:
        self._freed.append(page)  # its blocks are dropped with the next step

    def _wanted(self, loads: Sequence[Load], tokens: int) -> int:
        """The number of slow layers for the coming step."""
        if self.rules.slow_layers is not None:
            return self.rules.slow_layers
        fits = partial(self._fits, loads, tokens)
        if not fits(self._slow, 0):
            self._calm = 0
            needed = fit_layers(self.model, self.rules.limit, loads, tokens=tokens)
            if needed is None:
                raise CapacityError(shortage(self.model, self.rules.limit, loads, None))
            return needed
        spare = max(int(MARGIN * self.rules.limit), self._page_bytes * self.offload.layout.buffer_pages)
        if self._slow and fits(self._slow - 1, spare):
            self._calm += 1
        else:
            self._calm = 0
        if self._calm < PATIENCE:
            return self._slow
        return self._slow - 1

    def _fits(self, loads: Sequence[Load], tokens: int, slow: int, spare: int) -> bool:
        return plan(self.model, self.rules.limit - spare, loads, slow, tokens=tokens).fits

    def _loads(self, lengths: Sequence[int]) -> list[Load]:
        return [Load(length, self.shape.capacity) for length in lengths]

    # ---- layers

    def _lower(self, pool: PagePool, holders: Sequence[Need]) -> None:
        """The last resident layer goes down."""
        layer = self._layers - self._slow - 1
        try:
            source, buffer = Rows(self._planes[layer]), Rows(self._buffers[layer])
            self.offload.lower(layer, buffer, source, self._in_use(pool, holders), holders)
        except CapacityError:
            self._full = True
            raise
        self.cache.hold(layer, self._buffers[layer], partial(self._read_keys, layer))
        discard(self._planes[layer])
        self._slow, self._moved = self._slow + 1, self._moved + 1

    def _lift(self, pool: PagePool, holders: Sequence[Need]) -> None:
        """The first slow layer comes back. Its lost pages, if any, are of use to nobody."""
        layer = self._layers - self._slow
        lost = self.offload.lift(layer, Rows(self._planes[layer]), self._in_use(pool, holders), holders)
        for page in lost:
            pool.withdraw(page)
        self.offload.lose(need.sequence_id for need in holders if lost & set(need.pages.tolist()))
        self.cache.hold(layer, self._planes[layer])
        discard(self._buffers[layer])
        self._slow, self._moved, self._full = self._slow - 1, self._moved + 1, False

    def _in_use(self, pool: PagePool, holders: Sequence[Need]) -> Int32:
        """Full pages that somebody has or may find."""
        size = self.model.page_size
        parts = [need.pages[: need.start // size] for need in holders]
        return np.unique(np.concatenate([np.array(pool.published, np.int32), *parts])).astype(np.int32)

    def _forget_memory(self, pool: PagePool, most: int, longest: int) -> None:
        """Give the memory of free pages and of unused staging back, where more was touched than may be used."""
        self._staging.shrink(-(-longest // self.model.page_size) + 1)
        if int(self._touched.sum()) <= most:
            return
        idle = np.zeros(len(self._touched), np.bool_)
        idle[pool.free] = True
        idle &= self._touched
        for first, last in _runs(np.flatnonzero(idle)):
            for planes in self._planes[: self._layers - self._slow]:
                discard([plane[first:last] for plane in planes])
        self._touched &= ~idle

    def _drop_freed(self) -> None:
        if self._freed:
            freed, self._freed = np.array(self._freed, np.int32), []
            self.offload.drop_pages(freed)

    # ---- steps

    def passes(self, ask: Callable[[], Sequence[Need]]) -> tuple[Pass, ...]:
        self._steps, self._exposed = [], self.mover.account.exposed_seconds
        if not self._slow:
            return ()
        self._where[:] = -1
        self._fresh, needs = {}, ask()
        room = max(self.offload.staged(need) for need in needs)
        made, first, row, staged = [], 0, 0, 0
        for last, need in enumerate([*needs, None]):
            pages = 0 if need is None else self.offload.staged(need)
            if need is None or staged + pages > room:
                made.append(Pass(first, last, partial(self._open, needs[first:last], row)))
                row += sum(part.block for part in needs[first:last])
                first, staged = last, 0
            staged += pages
        self._rows = max(self._rows, row)
        return tuple(made)

    def _open(self, needs: Sequence[Need], row: int) -> Step:
        self._steps.append(self.offload.prepare(needs, row))
        return self._steps[-1]

    def finish(self) -> frozenset[int]:
        lost = frozenset().union(*(step.finish() for step in self._steps))
        self._exposed = self.mover.account.exposed_seconds - self._exposed
        self._lost += len(lost)
        return lost

    def excuse(self) -> str:
        trouble = self.pages.trouble
        return f"KV of this request was lost in the slow tier: {trouble or 'what came back was not what was written'}"

    def commit(self, run: Run, kept: Int32) -> None:
        if not self._slow:
            return
        at = self.offload.pass_slots(self.offload.pass_row(run.sequence_id) + kept)
        self._where[run.slots] = at
        self._fresh = dict(enumerate(self._buffers))
        self.offload.commit(run.sequence_id, run.pages, kept)
        self._waits[run.sequence_id] = self._waits.get(run.sequence_id, 0.0) + self._exposed

    # ---- entries that come and go with their sequences

    def take(self, run: Run) -> list[list[NDArray]] | None:
        """Pages [ceil] of every plane of every layer, the first one starting at a page's beginning; None: lost."""
        size = self.model.page_size
        base = run.start // size * size
        pages = -(-(run.start - base + len(run.slots)) // size)
        kept = [[np.zeros((pages, *plane.shape[1:]), plane.dtype) for plane in planes] for planes in self._planes]
        need = Need(run.sequence_id, run.pages, base, run.start - base + len(run.slots), None)
        target = np.tile(np.arange(len(run.slots), dtype=np.int32) + (run.start - base), self.pages.heads)
        heads = np.repeat(np.arange(self.pages.heads, dtype=np.int32), len(run.slots))
        lost: set[int] = set()
        for layer, planes in enumerate(kept):
            if layer >= self._layers - self._slow:
                lost |= self.offload.take(need, layer, Rows(planes))
            else:
                Rows(planes).copy(Rows(self._planes[layer]), heads, np.tile(run.slots, self.pages.heads), target)
        return None if lost else kept

    def put(self, run: Run, kept: list[list[NDArray]]) -> None:
        self._drop_freed()  # the run may lie in pages that were given up a moment ago: their old blocks go first
        size = self.model.page_size
        slots = np.arange(len(run.slots), dtype=np.int32) + run.start % size
        heads = np.repeat(np.arange(self.pages.heads, dtype=np.int32), len(run.slots))
        for layer in range(self._layers - self._slow):
            target = np.tile(run.slots, self.pages.heads)
            Rows(self._planes[layer]).copy(Rows(kept[layer]), heads, np.tile(slots, self.pages.heads), target)
        sources = {layer: Rows(planes) for layer, planes in enumerate(kept)}
        self.offload.put(Need(run.sequence_id, run.pages, run.start, 0, None), sources, slots)
        self._where[:] = -1
        self._where[run.slots] = slots
        self._fresh = dict(enumerate(kept))  # until the next step

    def _read_keys(self, layer: int, slots: Int32, rows: Float32) -> None:
        """Keys of a slow layer: of what was just committed or put back, else of full pages in the tier."""
        at = self._where[slots]
        here = at >= 0
        if here.any():
            part = np.empty((int(here.sum()), *rows.shape[1:]), np.float32)
            planes = self._fresh[layer]
            copy_floats(planes[0], planes[2] if len(planes) > 2 else None, at[here], part)
            rows[here] = part
        if not here.all():
            rows[~here] = self._stored_keys(layer, slots[~here], rows)

    def _stored_keys(self, layer: int, slots: Int32, like: Float32) -> Float32:
        pages, index = np.unique(slots // self.model.page_size, return_inverse=True)
        planes = [np.zeros((len(pages), *plane.shape[1:]), plane.dtype) for plane in self._planes[0]]
        places = np.arange(len(pages), dtype=np.int32)
        self.pages.load_all(layer, Rows(planes), pages.astype(np.int32), places)
        rows = np.empty((len(slots), *like.shape[1:]), np.float32)
        at = index.reshape(-1) * self.model.page_size + slots % self.model.page_size
        copy_floats(planes[0], planes[2] if len(planes) > 2 else None, at.astype(np.int32), rows)
        return rows

    def release(self, sequence_id: int) -> None:
        region = self.offload.release(sequence_id)
        self._waits.pop(sequence_id, None)
        if region is not None:
            first = region * self.offload.layout.region_pages
            last = first + self.offload.layout.region_pages
            for layer in self.offload.layers:
                discard([plane[first:last] for plane in self._buffers[layer]])

    # ---- what is told

    def tell(self, sequence_id: int) -> Traffic:
        return Traffic(*self.offload.tell(sequence_id), self._waits.pop(sequence_id, 0.0))

    @property
    def row_bytes(self) -> int:
        return self._slow_bytes // self.model.page_size

    @property
    def loaded_bytes(self) -> int:
        return self.mover.account.loaded_bytes

    def report(self) -> TierReport:
        account = self.mover.account
        return TierReport(
            layers=self._layers,
            slow_layers=self._slow,
            moved_layers=self._moved,
            loads=account.loads,
            stores=account.stores,
            loaded_bytes=account.loaded_bytes,
            stored_bytes=account.stored_bytes,
            busy_s=account.busy_seconds,
            exposed_s=account.exposed_seconds,
            failures=account.failures,
            lost_sequences=self._lost,
        )

    def plan(self) -> MemoryPlan | None:
        return self._plan

    def used(self) -> int:
        resident = (self._layers - self._slow) * int(self._touched.sum()) * self._page_bytes
        selector = int(self._touched.sum()) * self.model.page_size * self.model.selector_bytes
        rows = self.offload.rows + self._rows if self._slow else 0
        return resident + selector + self._slow * rows * self.model.kv_bytes + self._staging.used * self._page_bytes

    def describe(self) -> dict[str, int]:
        return {
            "layers": self._layers,
            "slow_layers": self._slow,
            "kv_limit": self.rules.limit,
            "kv_planned": 0 if self._plan is None else self._plan.fast_bytes,
            "kv_fast": self.used(),
            "kv_slow": self.tier.held * self.tier.block_bytes,
        }

    def watch(self, watcher: Watcher | None) -> None:
        if isinstance(self.mover, Transfer):
            each = self.pages.base(1)
            told = watcher and (lambda kind, block, start, stop: watcher(kind, block // each, start, stop))
            self.mover.watcher = told

    def close(self) -> None:
        self.mover.close()
        self.tier.close()


def _runs(numbers: NDArray) -> list[tuple[int, int]]:
    """[first, last) of consecutive numbers."""
    if not len(numbers):
        return []
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(numbers, cuts)]
