"""What the engine tells the offload before a step, and what it gets: sizes, needs, views and the waits of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outrider.memory.tiers.base import Blocks
from outrider.memory.transfer import Mover, Ticket
from outrider.types import Int32, SlowView


@dataclass(frozen=True)
class Layout:
    """Sizes of a slow layer's buffer: a region per sequence for `capacity` entries (the largest budget), then the rows
    of one pass, of all its sequences together."""

    kv_heads: int
    page_size: int
    num_pages: int  # of the page table
    sequences: int  # regions
    capacity: int
    block: int  # rows of a pass

    @property
    def region_pages(self) -> int:
        """Pages of a region."""
        return -(-self.capacity // self.page_size)

    @property
    def pass_pages(self) -> int:
        """Pages that the rows of a pass take."""
        return -(-self.block // self.page_size)

    @property
    def buffer_pages(self) -> int:
        """Pages that a slow layer's planes must have."""
        return self.sequences * self.region_pages + self.pass_pages

    def tier_blocks(self, layers: int) -> int:
        """Blocks of a tier that can hold every page of every layer."""
        return layers * self.num_pages * self.kv_heads


class Need(NamedTuple):
    """What one sequence reads in a step."""

    sequence_id: int
    pages: Int32  # [P] its page table
    start: int  # committed entries before the pass
    block: int  # rows of this pass
    entries: Int32 | None  # [G, KV heads, n] selected committed entries, ascending; None: all of them


class Job(NamedTuple):
    """One layer's loads: the blocks it touches, and what moves them and returns their bytes."""

    blocks: Blocks
    run: Callable[[], int]


class Ahead:
    """The jobs of the slow layers in layer order, each submitted at most `depth` slow layers early. None: all at once.

    depth 0: nothing moves before the layer that needs it is reached.
    """

    def __init__(self, mover: Mover, layers: Sequence[int], jobs: Mapping[int, Job], depth: int | None) -> None:
        self._mover, self._jobs, self._layers = mover, jobs, layers
        self._place = {layer: place for place, layer in enumerate(layers)}
        self._waiting = [layer for layer in layers if layer in jobs]
        self._depth = len(layers) if depth is None else depth
        self._tickets: dict[int, Ticket] = {}
        self._submit(self._depth - 1)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to move at all."""
        return not self._jobs

    def reach(self, layer: int) -> int:
        """The layers before this one are done: submit what may follow, and wait for what is due. Gives the next slow
        layer to stop at: the first one whose loads are not there yet, or the one behind where others wait for that."""
        place = self._place[layer]
        self._submit(place + self._depth)
        for due in [number for number in self._tickets if number <= layer]:
            self._mover.wait(self._tickets.pop(due))
        if self._waiting:
            return self._layers[place + 1] if place + 1 < len(self._layers) else layer + 1
        return next((number for number, ticket in self._tickets.items() if not ticket.done), self._layers[-1] + 1)

    def _submit(self, last: int) -> None:
        """Submit the jobs of the slow layers up to the `last`-th."""
        ready = [layer for layer in self._waiting if self._place[layer] <= last]
        if ready:
            self._waiting = self._waiting[len(ready) :]
            tickets = self._mover.submit_all("load", [self._jobs[layer] for layer in ready])
            self._tickets.update(zip(ready, tickets, strict=True))


class Step:
    """The loads of one pass. `wait` before every slow layer; `finish` before anything else touches the buffers."""

    def __init__(self, views: Sequence[SlowView], queues: Sequence[Ahead], failed: set[int], layers: Sequence[int]):
        self.views, self._layers, self._failed = tuple(views), layers, failed
        self._queues = [queue for queue in queues if not queue.idle]

    @property
    def view(self) -> SlowView:
        """The first slow layer's view; it holds for all of them where nothing was staged."""
        return self.views[0]

    @property
    def before_layer(self) -> Callable[[int], int] | None:
        """`reach`, or None where there is nothing to wait for."""
        return self.reach if self._queues else None

    def reach(self, layer: int) -> int:
        """Return when the layer's entries are there, with the next layer to stop at."""
        return min(queue.reach(layer) for queue in self._queues)

    def wait(self, layer: int) -> frozenset[int]:
        """Return when the layer's entries are there; the sequences whose KV is lost have to be recomputed or ended."""
        for queue in self._queues:
            queue.reach(layer)
        return frozenset(self._failed)

    def finish(self) -> frozenset[int]:
        """wait for all layers."""
        for layer in self._layers[-1:]:
            self.wait(layer)
        return frozenset(self._failed)


#: The step of a pass in which every layer is resident.
NOTHING_SLOW = Step((), (), set(), ())


EVERYTHING = np.int32(-1)  # a count that says: read everything
