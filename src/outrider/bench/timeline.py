"""When KV was loaded and when layers computed, in one step: what a picture of overlap is drawn from.

with Timeline(llm) as timeline:
    ...                      # steps
timeline.last_step()     # (kind, layer, start, stop) in seconds
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

from outrider.api.llm import LLM
from outrider.memory.transfer import Kind
from outrider.types import Batch, Result

Span = tuple[int, float, float]  # layer, start, stop


class Timeline:
    """Watches an engine whose last layers are slow."""

    def __init__(self, llm: LLM) -> None:
        self.loads: list[Span] = []
        self.layers: list[Span] = []
        self._runner, self._place = llm.core.engine.runner, llm.core.place
        self._decoder = self._runner.decoder

    def __enter__(self) -> Timeline:
        self._runner.decoder = _Watched(self._decoder, self.layers)
        self._place.watch(self._see)
        return self

    def __exit__(self, *exc: object) -> None:
        self._runner.decoder = self._decoder
        self._place.watch(None)

    def last_step(self) -> list[tuple[str, int, float, float]]:
        """Loads and layers of the latest step that loaded anything: (kind, layer, start, stop), from its beginning."""
        starts = [i for i, span in enumerate(self.layers) if i == 0 or span[0] <= self.layers[i - 1][0]]
        for first, last in reversed(list(pairwise([*starts, len(self.layers)]))):
            layers = self.layers[first:last]
            before = self.layers[first - 1][2] if first else 0.0
            loads = [span for span in self.loads if before <= span[1] <= layers[-1][2]]
            if loads:
                zero = min(loads[0][1], layers[0][1])
                kinds = [("compute", span) for span in layers] + [("load", span) for span in loads]
                return [(kind, layer, start - zero, stop - zero) for kind, (layer, start, stop) in kinds]
        return []

    def _see(self, kind: Kind, layer: int, start: float, stop: float) -> None:
        if kind == "load":
            self.loads.append((layer, start, stop))


class _Watched:
    """A decoder that notes when its slow layers ran."""

    def __init__(self, decoder: Any, spans: list[Span]) -> None:
        self._decoder, self._spans = decoder, spans

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: Batch, cache: Any, before_layer: Callable[[int], int | None] | None = None) -> Result:
        began: list[tuple[int, float]] = []

        def before(layer: int) -> None:
            self._close(began)
            if before_layer is not None:
                before_layer(layer)
            began.append((layer, perf_counter()))

        result = self._decoder.forward(batch, cache, before)
        self._close(began)
        return result

    def _close(self, began: list[tuple[int, float]]) -> None:
        if began:
            layer, start = began.pop()
            self._spans.append((layer, start, perf_counter()))
