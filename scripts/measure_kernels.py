"""Measure the CPU path: the product by format and row count, and a forward pass by row count.

    python scripts/measure_kernels.py                          # product only
    python scripts/measure_kernels.py MODEL [--threads N]      # and the forward pass of a model

Times are CPU time of one thread unless --threads asks for more (then wall time: nothing else should run).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np

from outrider.kernels.cpu import formats, isa
from outrider.kernels.cpu.layout import PLANES
from outrider.kernels.cpu.machine import compiled
from outrider.kernels.cpu.pack import pack_groups, quantise_dense
from outrider.kernels.cpu.product import MAX_ROWS, multiply, product_address
from outrider.kernels.cpu.workspace import address
from outrider.models.compiled import CompiledDecoder
from outrider.models.load import load_model
from outrider.models.spec import GroupedInts
from outrider.types import Batch, Float32

SIZE, INPUTS, REPEATS = 64, 1536, 200


@compiled
def repeat(product, kind, rows, w, size, tiles, groups, x, meta, plane, out, count):
    for _ in range(count):
        for tile in range(tiles):
            multiply(
                *(product, kind, rows, w + tile * size, 0, groups, x, groups * 32),
                *(meta, groups * 4, plane, out, 64, 0),
            )


def best_of(call: Callable[[], object], runs: int, clock: Callable[[], float]) -> float:
    """The shortest of `runs` calls, in seconds."""
    times = []
    for _ in range(runs):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def sixes(values: Float32) -> GroupedInts:
    """Six-bit integers of about these values, all counts 1."""
    factor = np.ones((len(values), INPUTS // 256), np.float32)
    q = np.clip(np.rint(values * 8), -32, 31).astype(np.int8)
    return GroupedInts(6, q, np.repeat(factor, 16, 1), factor=factor)


def measure_product(path: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(SIZE, INPUTS)).astype(np.float32)
    x = rng.integers(-127, 128, (MAX_ROWS, INPUTS)).astype(np.int8)
    meta, out = np.ones((PLANES, MAX_ROWS, INPUTS // 32), np.float32), np.zeros((MAX_ROWS, 16), np.float32)
    for ints in (quantise_dense(values, 4), quantise_dense(values, 8), sixes(values)):
        packed = pack_groups(ints)
        tiles, size = packed.data.shape
        speeds = []
        for rows in (1, 2, 4, 8):
            arguments = (
                *(product_address(path), packed.kind, rows, address(packed.data), size, tiles, packed.groups),
                *(address(x), address(meta), meta.strides[0], address(out)),
            )
            seconds = best_of(lambda a=arguments: repeat(*a, REPEATS), 9, time.thread_time)
            speeds.append(f"{rows} rows {SIZE * INPUTS * rows * REPEATS / seconds / 1e9:.0f}")
        print(f"{path} {formats.NAMES[packed.kind]}: {', '.join(speeds)} GMAC/s a thread")


def chain(rows: int, context: int, page_size: int, pages: int) -> Batch:
    """Rows 0 .. rows - 1 behind `context` entries; only the last row is read out in long passes."""
    entries = np.arange(context, context + rows, dtype=np.int32)
    wanted = np.arange(rows) if rows <= 16 else np.array([rows - 1])
    return Batch(
        tokens=entries % 1000,
        positions=entries,
        slots=entries,
        row_starts=np.array([0, rows], np.int32),
        contexts=np.array([context], np.int32),
        pages=np.arange(pages, dtype=np.int32)[None],
        logit_rows=wanted.astype(np.int32),
        want_logits=False,
    )


def measure_forward(model: str, threads: int) -> None:
    loaded = load_model(model)
    decoder = CompiledDecoder.build(loaded.spec, loaded.weights, threads=threads)
    cache = decoder.new_cache(264, 16)
    clock = time.thread_time if threads == 1 else time.perf_counter
    first = 0.0
    for rows, context in ((1, 200), (2, 200), (5, 200), (8, 200), (512, 0), (1, 4000)):
        batch = chain(rows, context, 16, 264)
        decoder.forward(batch, cache)
        seconds = best_of(lambda b=batch: decoder.forward(b, cache), 3 if rows > 16 else 25, clock)
        first = first or seconds
        print(
            f"rows {rows} after {context}: {seconds * 1e3:.2f} ms, {seconds / first:.2f} of one row, "
            f"{rows / seconds:.0f} tok/s, {decoder.weight_bytes / seconds / 1e9:.1f} GB/s of weights"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder, file or alias of a model")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for path in [os.environ["OUTRIDER_CPU"]] if os.environ.get("OUTRIDER_CPU") else isa.available():
        measure_product(path)
    if options.model:
        measure_forward(options.model, options.threads)


if __name__ == "__main__":
    main()
