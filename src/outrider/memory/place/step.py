"""What the engine tells the offload before a step, and what it gets: sizes, needs, views and the waits of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from outrider.memory.transfer import Mover, Ticket
from outrider.types import Int32, SlowView


@dataclass(frozen=True)
class Layout:
    """Sizes of the buffers: one region per sequence, `capacity` entries (the largest budget), then one pass's rows."""

    kv_heads: int
    page_size: int
    num_pages: int  # of the page table
    sequences: int  # regions
    capacity: int
    block: int

    @property
    def main_pages(self) -> int:
        """Pages of a region that hold selected entries."""
        return -(-self.capacity // self.page_size)

    @property
    def region_pages(self) -> int:
        """All pages of a region."""
        return self.main_pages + -(-self.block // self.page_size)

    @property
    def buffer_pages(self) -> int:
        """Pages that a slow layer's planes must have."""
        return self.sequences * self.region_pages

    def tier_blocks(self, layers: int) -> int:
        """Blocks of a tier that can hold every page of every layer."""
        return layers * self.num_pages * self.kv_heads


@dataclass(frozen=True)
class Need:
    """What one sequence reads in a step."""

    sequence_id: int
    pages: Int32  # [P] its page table
    block: int  # rows of this pass
    entries: Int32 | None  # [G, KV heads, n] selected committed entries, ascending; None: all of them


#: The view of a step in which every layer is resident.
NOTHING_SLOW = SlowView(
    pages=np.zeros((0, 0), np.int32),
    slots=np.zeros(0, np.int32),
    entries=np.zeros((0, 0, 0, 0), np.int32),
    counts=np.zeros((0, 0, 0), np.int32),
    groups=np.zeros(0, np.int32),
    first=1 << 30,
)


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
