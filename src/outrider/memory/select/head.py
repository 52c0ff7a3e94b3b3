"""The retrieval head: a distilled head of the target points at what the target is about to read.

SpeContext, section on the retrieval head: softmax(q K^T / sqrt(d)) over all positions, the element-wise maximum over
the query heads of a group (GQA; MHA is groups of one, MQA one group), then the best per KV head, shared by all layers.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from outrider.memory.select.base import View, group_count
from outrider.memory.select.kernels import score_keys
from outrider.types import Float32, Int32


class RetrievalHead(Protocol):
    """What a head offers to selection. Its keys live in pages with the target's page numbers.

    slot j of a sequence stands for entry j + shift: an EAGLE-3 head reads token j + 1 in slot j, so its shift is 1.
    """

    shift: int

    @property
    def keys(self) -> Float32:
        """Rotated keys [physical pages, KV heads, page size, head_dim]."""
        ...

    def look(self, sequence_id: int) -> tuple[Float32, int] | None:
        """The rotated query [heads, head_dim] of the newest token and the slots in use; None: not ready."""
        ...


class HeadSelector:
    """Scores every entry by the attention weight that the head gives it."""

    name = "head"
    weighs = True
    unit = 1
    taps: tuple[int, ...] = ()

    def __init__(self, head: RetrievalHead, groups: Int32) -> None:
        self._head = head
        self.groups = groups

    def score(self, view: View) -> Float32 | None:
        seen = self._head.look(view.sequence_id)
        if seen is None:
            return None
        query, slots = seen
        keys = self._head.keys
        slots = min(slots, view.length)
        scaled = np.ascontiguousarray(query, np.float32) * np.float32(query.shape[-1] ** -0.5)
        scores = np.empty((keys.shape[1], view.length), np.float32)
        scratch = np.empty(slots, np.float32)
        score_keys(scaled, keys, view.pages, slots, self._head.shift, scores, scratch)
        return np.broadcast_to(scores, (group_count(self.groups), *scores.shape))
