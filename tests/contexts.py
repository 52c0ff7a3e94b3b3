"""Long prompts for a tiny model, an engine that reads them, and its answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDS = np.random.default_rng(5)
LONG = [SEEDS.integers(3, 320, length).tolist() for length in (90, 60, 33, 121)]
OPTIONS: dict[str, Any] = {
    "page_size": 4, "max_num_seqs": 4, "threads": 1, "dtype": "float32", "backend": "compiled",
    "speculative_config": None,
}  # fmt: skip


def start(folder: str, context: dict[str, Any] | None = None, **options: Any) -> LLM:
    """An engine in one context config."""
    return LLM(folder, context_config=context, **{**OPTIONS, **options})


def answers(llm: LLM, prompts: list[list[int]] = LONG, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Token ids of every sample; the engine is whole and idle afterwards."""
    outputs = llm.generate(prompts, params)
    llm.core.engine.check()
    assert not llm.core.engine.scheduler.busy
    return [sample.token_ids for output in outputs for sample in output.outputs]
