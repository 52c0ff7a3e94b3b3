"""The null object: one tier, nothing ever moves. Its methods say what KVMemory asks of a placement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from outrider.memory.place.step import Need, Step
from outrider.memory.planner import MemoryPlan
from outrider.memory.pool import PagePool
from outrider.memory.report import TierReport
from outrider.memory.transfer import Watcher
from outrider.models.spec import KVCache
from outrider.sequence import Sequence as Sample
from outrider.types import Int32, Traffic


class Pass(NamedTuple):
    """Sequences first .. last - 1 of a step, in a forward pass of their own; `open` it when the one before is over."""

    first: int
    last: int
    open: Callable[[], Step]


class Run(NamedTuple):
    """Some entries of one sequence: from `start` on, at `slots` of the page table's `pages`."""

    sequence_id: int
    pages: Int32
    start: int
    slots: Int32


class SingleTier:
    """All KV is in the cache's pages."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def room(self, pool: PagePool, running: Collection[Sample]) -> int:
        """Pages that may be held while these sequences run."""
        return pool.num_pages

    @property
    def slow_layers(self) -> int:
        """Layers whose KV is in the slow tier now."""
        return 0

    def took(self, page: int) -> None:
        """A page was handed out."""

    def freed(self, page: int) -> None:
        """A page is nobody's any more."""

    def fit(self, pool: PagePool, holders: Callable[[], Sequence[Need]], running: Collection[Sample]) -> None:
        """Before a step, its pages reserved: move layers so that everything has its place. holders: what everybody
        has, should it be asked for. CapacityError where the slow tier cannot take a layer."""

    def passes(self, needs: Callable[[], Sequence[Need]]) -> tuple[Pass, ...]:
        """The forward passes of a step that needs this; empty: one, in which all KV is resident."""
        return ()

    def finish(self) -> frozenset[int]:
        """The step's passes are over: sequences whose KV could not be read, and whose rows mean nothing."""
        return frozenset()

    def excuse(self) -> str:
        """Why KV keeps getting lost, and what to do about it."""
        return "KV was lost"

    def commit(self, run: Run, kept: Int32) -> None:
        """Rows `kept` (offsets in the pass) of a sequence became the entries of a run."""

    def take(self, run: Run) -> Any:
        """A copy of a run's KV for `put`; None where it is lost."""
        return self._cache.take(run.slots)

    def put(self, run: Run, kept: Any) -> None:
        """Write back what `take` gave; the run follows all that its sequence has."""
        self._cache.put(run.slots, kept)

    def release(self, sequence_id: int) -> None:
        """The sequence is not running any more."""

    def tell(self, sequence_id: int) -> Traffic | None:
        """What moved for a sequence since this was last asked; None: nothing ever does."""
        return None

    @property
    def row_bytes(self) -> int:
        """Bytes of an entry's K and V in one layer of the slow tier."""
        return 0

    @property
    def loaded_bytes(self) -> int:
        """Bytes that came from the slow tier so far."""
        return 0

    def report(self) -> TierReport | None:
        """What moved so far."""
        return None

    def plan(self) -> MemoryPlan | None:
        """What is where, as planned for now."""
        return None

    def used(self) -> int:
        """Bytes of KV memory that were touched, where they are counted."""
        return 0

    def describe(self) -> dict[str, int]:
        """What is where between the tiers, in bytes; nothing to say where there is one."""
        return {}

    def watch(self, watcher: Watcher | None) -> None:
        """Tell of every transfer: kind, layer, start and stop in seconds."""

    def close(self) -> None:
        """Give the slow tier back."""
