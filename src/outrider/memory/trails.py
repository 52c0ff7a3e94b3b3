"""Drafting over the target's own KV: room behind a sequence's committed entries, and a selection of these."""

from __future__ import annotations

import numpy as np

from outrider.drafters.host import Trail
from outrider.memory.kv import KVMemory
from outrider.memory.reading import LosslessAttention


class Trails:
    """What the `sparse_self` drafter is given of an engine's memory."""

    def __init__(self, memory: KVMemory, reading: LosslessAttention) -> None:
        self.cache, self.groups = memory.cache, reading.reader.chooser.selector.groups
        self._memory, self._reading = memory, reading

    def trail(self, sequence_id: int, length: int, depth: int) -> Trail | None:
        """Room for `depth` entries, which the step's plan has counted, or None where everything would be read, or
        where not all of it is at hand."""
        if self._memory.place.slow_layers:
            return None
        table = self._memory.reserve(sequence_id, length + depth)
        pages = np.asarray(table.pages, np.int32)
        entries = self._reading.choose(sequence_id, length, depth + 1, pages)
        return None if entries is None else Trail(pages, table.slots(length, depth), entries)


def find_trails(memory: KVMemory) -> Trails | None:
    """The trails of an engine that selects for its drafts."""
    return Trails(memory, memory.reading) if isinstance(memory.reading, LosslessAttention) else None
