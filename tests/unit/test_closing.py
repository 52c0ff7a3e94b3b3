"""A closed LLM gives its memory back: weights, KV and slow layers, though threads and caches of the process stay."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from loading import repeating_folder
from outrider import LLM, SamplingParams


@pytest.mark.parametrize("tier", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_large_outlives_it(tmp_path, tier, threads) -> None:
    folder = repeating_folder(tmp_path / "model", layers=4)
    context: dict[str, Any] = {"mode": "sparse", "budget": 48, "window": 16}
    if tier:
        context |= {"kv_path": str(tmp_path / "kv"), "kv_memory": 2_000_000, "slow_layers": 2}
    llm = LLM(folder, context_config=context, threads=threads, speculative_config=None, backend="compiled")
    llm.generate([list(range(3, 90))], SamplingParams(temperature=0, max_tokens=4))
    core = llm.core
    held = {
        "KV": core.memory.cache, "keys": core.memory.cache.planes(0)[0].base, "weights": core.decoder._packed,
        "loaded": core.loaded, "reading": core.memory.reading, "place": core.place,
    }  # fmt: skip
    alive = {name: weakref.ref(value) for name, value in held.items() if value is not None}
    llm.close()
    del llm, core, held
    gc.collect()
    assert [name for name, value in alive.items() if value() is not None] == []
