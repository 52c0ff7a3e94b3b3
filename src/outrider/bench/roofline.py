"""How near a decoding step is to the memory limit: bytes that it must read over measured bandwidth."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

import numpy as np
from numba import njit

from outrider.api.llm import LLM
from outrider.bench.record import cores

ROWS = (1, 2, 4, 5, 8, 16)
BYTES = 1 << 28  # per thread: far more than any cache


def roof(llm: LLM, context: int = 128) -> dict[str, Any]:
    """Bandwidth in GB/s, bytes of a one-row step, its share of the limit, and the cost of more rows over one."""
    threads = llm.core.config.threads or len(cores())
    bandwidth = max(read_bandwidth(threads) for _ in range(5))
    seconds = {rows: llm.forward_seconds(rows, context) for rows in ROWS}
    needed = llm.core.decoder.step_bytes + context * llm.core.decoder.kv_bytes_per_token()
    return {
        "threads": threads,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "bytes_per_step": needed,
        "limit_ms": 1e3 * needed / bandwidth,
        "step_ms": 1e3 * seconds[1],
        "fraction_of_limit": needed / bandwidth / seconds[1],
        "rows_over_one": {str(rows): seconds[rows] / seconds[1] for rows in ROWS},
    }


def read_bandwidth(threads: int) -> float:
    """Bytes per second that so many threads read together from memory."""
    arrays = [np.ones(BYTES // 8, np.int64) for _ in range(threads)]
    total(arrays[0][:8])
    workers = [threading.Thread(target=total, args=(array,)) for array in arrays]
    started = perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return threads * BYTES / (perf_counter() - started)


@njit(nogil=True, cache=True)
def total(array: np.ndarray) -> int:
    """A sum that LLVM turns into wide loads."""
    result = 0
    for index in range(array.size):
        result += array[index]
    return result
