"""The retrieval head: a distilled head of the target points at what the target is about to read.

SpeContext, section on the retrieval head: softmax(q K^T / sqrt(d)) over all positions, the element-wise maximum over
the query heads of a group (GQA; MHA is groups of one, MQA one group), then the best per KV head, shared by all layers.
"""

from __future__ import annotations

import numpy as np

from outrider.errors import ModelError
from outrider.memory.select.base import Share, View, group_layers
from outrider.memory.select.head_kernels import score_entries
from outrider.memory.select.head_memory import HeadMemory
from outrider.models.spec import DecoderSpec
from outrider.types import Float32


class HeadSelector:
    """Scores every entry by the attention weight that the head gives it. View.queries are the head's own, one row."""

    name = "head"
    weighs = True
    unit = 1
    taps: tuple[int, ...] = ()

    def __init__(self, memory: HeadMemory, spec: DecoderSpec) -> None:
        own, theirs = memory.keys.shape[1], spec.num_kv_heads
        if own % theirs and theirs % own:
            raise ModelError(
                f"a head of {own} KV heads cannot select for a target of {theirs}: neither divides the other; select "
                "by pages"
            )
        self.groups = group_layers(spec.num_layers, 0)
        self._memory, self._shared = memory, min(own, theirs)
        self._copies = theirs // self._shared

    def score(self, view: View, share: Share = map) -> Float32 | None:
        if view.queries is None:
            return None
        dim, room = view.queries.shape[-1], self._memory.keys.shape[-1]
        scaled = np.zeros((view.queries.shape[1], room), np.float32)
        scaled[:, :dim] = view.queries[0] * np.float32(dim**-0.5)
        scores = score_entries(scaled, self._memory.keys, view.pages, view.length)
        if len(scores) > self._shared:
            scores = scores.reshape(self._shared, -1, view.length).max(1)
        return np.repeat(scores, self._copies, axis=0)[None] if self._copies > 1 else scores[None]
