"""What a forward pass costs on this machine: the measurement behind adaptive lengths and the roofline."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np

from outrider.models.spec import Decoder
from outrider.types import Batch

PAGE = 16


def forward_seconds(decoder: Decoder, rows: int, *, context: int = 128, repeats: int = 3) -> float:
    """Median seconds of a pass of `rows` rows of one sequence behind `context` entries, greedy.

    It runs on a scratch cache, so nothing that a sequence holds is touched. The first call is not counted.
    """
    context = max(0, min(context, decoder.spec.max_positions - rows))
    pages = -(-(context + rows) // PAGE)
    cache = decoder.new_cache(pages, PAGE)
    places = np.arange(context, context + rows, dtype=np.int32)
    batch = Batch(
        tokens=places % decoder.spec.vocab_size,
        positions=places,
        slots=places,
        row_starts=np.array([0, rows], np.int32),
        contexts=np.array([context], np.int32),
        pages=np.arange(pages, dtype=np.int32)[None],
        logit_rows=np.arange(rows, dtype=np.int32),
        want_logits=False,
    )
    decoder.forward(batch, cache)
    times = []
    for _ in range(repeats):
        started = perf_counter()
        decoder.forward(batch, cache)
        times.append(perf_counter() - started)
    return median(times)
