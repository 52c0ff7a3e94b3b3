"""Measure attention alone: rows of one sequence behind long contexts, as verification reads them.

    python scripts/measure_attention.py [--rows 1,2,5,8] [--contexts 2048,8192,32768] [--kv bfloat16] [--runs 9]

One thread, its CPU time, the best of many runs: figures of two versions may be compared where they are taken in turns.
The limit is the larger of two: bytes of K and V over the bandwidth that one thread reads with, and multiplications over
what the processor multiplies (two of them per value, query and entry).
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numba import njit

from outrider.kernels.cpu.attention import attend_split, store_row
from outrider.kernels.cpu.layout import LAYER, MODEL
from outrider.kernels.cpu.machine import f32
from outrider.kernels.cpu.workspace import Workspace, address
from outrider.models.cache import PagedKVCache

PAGE = 16
SPREAD = 192 << 20  # bytes of K and V that passes read one after the other: far more than the caches hold


@njit(nogil=True, error_model="numpy")
def attend(model, layers, caches, step, number):
    attend_split(model[0], step[0], layers[0], caches[number], 0, 0, 1)


@njit(nogil=True, error_model="numpy")
def store_rows(kind, source, rows, dim, base, scales):
    for row in range(rows):
        store_row(kind, source + row * dim * 4, dim, base, scales, row)


@njit(nogil=True, error_model="numpy")
def multiply_often(values, rounds):
    """Independent multiplications of 8 vectors in registers."""
    x = f32(values)
    for _ in range(rounds):
        for i in range(128):
            x[i] = x[i] * np.float32(1.0000001)


@njit(nogil=True, error_model="numpy")
def total(array):
    result = 0
    for value in array:
        result += value
    return result


def best_of(call, runs: int) -> float:
    """The shortest of `runs` calls, in seconds of this thread."""
    times = []
    for _ in range(runs):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def measure_machine() -> tuple[float, float]:
    """Bytes and fp32 multiplications per second of one thread."""
    array, values = np.ones(1 << 25, np.int64), np.ones(128, np.float32)
    total(array[:8])
    multiply_often(address(values), 1)
    rounds = 1 << 20
    return array.nbytes / best_of(lambda: total(array), 5), 128 * rounds / best_of(
        lambda: multiply_often(address(values), rounds), 5
    )


class Case:
    """Random K and V of some layers, and the record of a pass of `rows` rows behind `context` entries."""

    def __init__(self, heads: int, kv_heads: int, dim: int, context: int, kv: str) -> None:
        pages = -(-(context + 16) // PAGE)
        size = PagedKVCache(1, 1, PAGE, kv_heads, dim, kv).nbytes * pages
        self.layers = max(2, SPREAD // size)
        self.cache = PagedKVCache(self.layers, pages, PAGE, kv_heads, dim, kv)
        self.bytes = size * context // (pages * PAGE)
        self._fill(kv_heads, dim, pages)
        self.model, self.layer = np.zeros(1, MODEL), np.zeros(1, LAYER)
        for name, value in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", dim), ("head_pad", dim)):
            self.model[name] = value
        sizes = {"x": 32, "qkv": 32, "query": heads * dim, "mixed": heads * dim, "hidden": 32, "inputs": 32}
        self.work = Workspace({**sizes, "head_pad": dim, "heads": heads, "shared": heads // kv_heads}, 1)
        self.context, self._pages = context, np.arange(pages, dtype=np.int32)
        self.queries = heads

    def _fill(self, kv_heads: int, dim: int, pages: int) -> None:
        """The same random rows in every layer."""
        rows = np.random.default_rng(0).normal(size=(pages * kv_heads * PAGE, dim)).astype(np.float32)
        cache = self.cache
        for number in range(self.layers):
            for plane, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
                store_rows(cache.kind, address(rows), len(rows), dim, address(plane[number]), address(scales[number]))

    def lay_out(self, rows: int) -> None:
        entries = np.arange(self.context, self.context + rows, dtype=np.int32)
        step, work = self.work.step, self.work
        work.fit(rows, 1, (self.context + rows + 127) // 128)
        self._held = {
            "positions": entries,
            "slots": entries,
            "row_starts": np.array([0, rows], np.int32),
            "contexts": np.array([self.context], np.int32),
            "pages": self._pages,
        }
        for name, array in self._held.items():
            step[name] = address(array)
        step["rows"], step["sequences"], step["page_columns"] = rows, 1, len(self._pages)
        step["kv_kind"], step["page_size"] = self.cache.kind, PAGE
        queries = work._held["query"].view(np.float32)
        queries[:] = np.random.default_rng(1).normal(size=queries.size).astype(np.float32) / 8

    def run(self) -> None:
        for number in range(self.layers):
            attend(self.model, self.layer, self.cache.table, self.work.step, number)

    def digest(self) -> int:
        """A checksum of the latest results, to compare versions."""
        return hash(self.work._held["mixed"].tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--contexts", default="2048,8192,32768")
    parser.add_argument("--kv", default="bfloat16", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--shape", default="9,3,64", help="query heads, KV heads, values of a head (SmolLM2-135M)")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    heads, kv_heads, dim = (int(value) for value in options.shape.split(","))
    bandwidth, multiplications = measure_machine()
    print(f"one thread reads {bandwidth / 1e9:.1f} GB/s and multiplies {multiplications / 1e9:.1f} G/s")
    for context in (int(value) for value in options.contexts.split(",")):
        case, first = Case(heads, kv_heads, dim, context, options.kv), 0.0
        for rows in (int(value) for value in options.rows.split(",")):
            case.lay_out(rows)
            case.run()
            seconds = best_of(case.run, options.runs) / case.layers
            first = first or seconds
            met = rows * heads * (context + (rows + 1) / 2)
            limit = max(case.bytes / bandwidth, 2 * dim * met / multiplications)
            print(
                f"{context} entries, {rows} rows: {seconds * 1e6:.0f} us a layer, {seconds / first:.2f} of one row, "
                f"{seconds / met * 1e9:.2f} ns a query and entry, {limit / seconds:.2f} of the limit"
            )


if __name__ == "__main__":
    main()
