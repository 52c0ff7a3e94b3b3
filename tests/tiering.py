"""Engines with slow layers on a tiny model, and what the same engines say with all KV in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import contexts
from contexts import GREEDY, LONG
from loading import repeating_folder
from outrider import LLM, SamplingParams
from outrider.memory.place.build import TRANSFER_SHARE

SPARSE = {"mode": "sparse", "budget": 24, "sinks": 2, "window": 4, "group": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return repeating_folder(tmp_path_factory.mktemp("tiers") / "model", layers=4)


def start(folder: str, context: dict[str, Any] | None = None, **options: Any) -> LLM:
    """An engine in one context config, that reads prompts in several chunks."""
    return contexts.start(folder, context, **{"max_num_batched_tokens": 64, **options})


def answers(llm: LLM, prompts: list[list[int]] = LONG, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Token ids of every sample; nothing is held afterwards."""
    found = contexts.answers(llm, prompts, params)
    check(llm)
    return found


def check(llm: LLM) -> None:
    """Nothing is held while idle, in any tier; every published page of a slow layer is in the tier."""
    llm.core.engine.check()
    place = llm.core.place
    place.mover.drain()
    place._drop_freed()
    place.mover.drain()
    assert not place.offload._sequences
    assert place.pages.in_flight == 0
    assert place.tier.held == place.slow_layers * len(llm.core.memory.pool.published) * place.pages.heads


def tiers(llm: LLM) -> Any:
    return llm.speculation_report().context.tiers


def slow(path: Path, context: dict[str, Any], layers: int | None = 3, **more: Any) -> dict[str, Any]:
    """A context config with so many slow layers."""
    return {**context, "kv_path": str(path), "kv_memory": 1 << 28, "slow_layers": layers, **more}


MODES = ["sparse", "bounded", "full", "lossless"]


def mode(name: str, **more: Any) -> dict[str, Any]:
    return {**SPARSE, "mode": name, "full_every": 5, **more}


@pytest.fixture(scope="module")
def resident(folder: str) -> Callable[..., list[list[int]]]:
    """Answers of the engine that keeps all KV in memory, by context config and options; each is computed once."""
    known: dict[str, list[list[int]]] = {}

    def ask(context: dict[str, Any], params: SamplingParams = GREEDY, **options: Any) -> list[list[int]]:
        key = repr((context, params, options))
        if key not in known:
            with start(folder, context, **options) as llm:
                outputs = llm.generate(LONG, params)
                known[key] = [sample.token_ids for output in outputs for sample in output.outputs]
        return known[key]

    return ask


def need(folder: str, tokens: int) -> int:
    """kv_memory that holds the KV of so many tokens beside what is set aside for transfers."""
    with start(folder) as llm:
        return -(-tokens * llm.core.decoder.kv_bytes_per_token() * TRANSFER_SHARE // (TRANSFER_SHARE - 1))


def watch(llm: LLM, look: Callable[[], Any]) -> list[Any]:
    """A list that grows by what `look` says behind every step."""
    seen: list[Any] = []
    step = llm.core.engine.step

    def watched() -> Any:
        deltas = step()
        seen.append(look())
        return deltas

    llm.core.engine.step = watched  # type: ignore[method-assign]
    return seen
