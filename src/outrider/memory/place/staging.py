"""Where slow layers are read whole: two slots, so that the next layer is staged while one computes."""

from __future__ import annotations

import numpy as np

from outrider.memory.place.arena import Arena, discard
from outrider.memory.place.buffers import Rows
from outrider.types import Int32

SLOTS = 2


class Staging:
    """Two slots of `pages` pages each, behind the buffers of all layers in one arena (layer l's are at l * buffer)."""

    def __init__(self, arena: Arena, layers: int, buffer_pages: int, pages: int) -> None:
        self.pages = pages  # of a slot
        self._arena, self._buffer, self._first = arena, buffer_pages, layers * buffer_pages
        self._slots = [Rows(arena.planes(self._first + slot * pages, pages)) for slot in range(SLOTS)]
        self._used = 0  # pages of a slot that were written since the last `shrink`

    @property
    def used(self) -> int:
        """Pages of both slots that hold memory."""
        return SLOTS * self._used

    def slot(self, place: int) -> Rows:
        """Where the place-th slow layer is staged."""
        return self._slots[place % SLOTS]

    def numbers(self, layer: int, place: int, first: int, count: int) -> Int32:
        """Pages first .. of the slot, counted from the layer's own buffer as a view counts them."""
        start = self._first + place % SLOTS * self.pages + first - layer * self._buffer
        return np.arange(start, start + count, dtype=np.int32)

    def grow(self, pages: int) -> None:
        """So many pages of a slot are about to be written."""
        self._used = max(self._used, pages)

    def shrink(self, pages: int) -> None:
        """Keep the memory of so many pages of a slot at most."""
        if self._used > pages:
            for slot in range(SLOTS):
                discard(self._arena.planes(self._first + slot * self.pages + pages, self._used - pages))
            self._used = pages
