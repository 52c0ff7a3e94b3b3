"""Random lives of an engine whose layers move: tokens stay, no block is lost, leaked or counted twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider.memory.place.build as build
from faults import ShuffledTransfer
from loading import repeating_folder
from outrider import LLM, SamplingParams
from outrider.memory.place import Rules

OPTIONS: dict[str, Any] = {
    "page_size": 4, "max_num_seqs": 3, "threads": 1, "dtype": "float32", "max_num_batched_tokens": 24,
    "backend": "compiled", "speculative_config": None, "max_model_len": 160,
}  # fmt: skip
CONTEXT = {"mode": "bounded", "budget": 24, "sinks": 2, "window": 4, "group": 2, "full_every": 6}
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return repeating_folder(tmp_path_factory.mktemp("machine") / "model", layers=4, positions=256)


def prompts() -> list[list[int]]:
    """Some begin alike, so that pages are shared."""
    rng = np.random.default_rng(3)
    stem = rng.integers(3, 320, 60).tolist()
    return [[*stem[:cut], *rng.integers(3, 320, more).tolist()] for cut, more in ((0, 9), (24, 20), (48, 60), (60, 5))]


class Player:
    """Does one thing after another to an engine, and compares every answer that comes to its end."""

    def __init__(self, llm: LLM, known: list[list[int]], seed: int) -> None:
        self.llm, self.core, self.known = llm, llm.core, known
        self.rng = np.random.default_rng(seed)
        self.open: dict[str, tuple[int, list[int]]] = {}
        self.counts = {"answers": 0, "aborts": 0, "limits": 0, "drops": 0}
        self.params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        self.small, self.large = 150 * self.core.decoder.kv_bytes_per_token(), 1 << 28

    def play(self) -> None:
        kind = self.rng.choice(["submit", "step", "abort", "limit", "drop"], p=[0.1, 0.845, 0.02, 0.03, 0.005])
        if kind == "submit" and len(self.open) < 5:
            which = int(self.rng.integers(len(self.known)))
            request = self.core.request(prompts()[which], self.params)
            self.open[request.id] = (which, [])
            self.core.engine.add(self.core.samples(request))
        elif kind == "step":
            self.hear(self.core.engine.step())
        elif kind == "abort" and self.open:
            request_id = list(self.open)[int(self.rng.integers(len(self.open)))]
            self.core.engine.abort(request_id)
            del self.open[request_id]
            self.counts["aborts"] += 1
        elif kind == "limit":
            self.core.place.retune(Rules(self.small if self.rng.random() < 0.5 else self.large))
            self.counts["limits"] += 1
        elif kind == "drop":
            self.core.memory.pool.drop_cached()
            self.counts["drops"] += 1

    def hear(self, deltas: Any) -> None:
        for delta in deltas:
            if delta.request_id in self.open:
                which, said = self.open[delta.request_id]
                said += delta.tokens
                if delta.finish is not None:
                    assert delta.finish.reason == "length", delta.finish
                    assert said == self.known[which]
                    del self.open[delta.request_id]
                    self.counts["answers"] += 1

    def settled(self) -> None:
        """Resident + slow + in flight = total, at any moment between two steps."""
        place, memory = self.core.place, self.core.memory
        place.mover.drain()
        place._drop_freed()
        place.mover.drain()
        pages = len(place._in_use(memory.pool, memory._needs()))
        assert place.pages.in_flight == 0
        assert place.tier.held == place.slow_layers * pages * place.pages.heads
        memory.check()


@pytest.mark.parametrize("operations", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_operations(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operations: int) -> None:
    with LLM(folder, context_config=CONTEXT, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        known = [output.outputs[0].token_ids for output in llm.generate(prompts(), params)]
    monkeypatch.setattr(build, "Transfer", lambda: ShuffledTransfer(1, 0.0001))
    with LLM(folder, context_config={**CONTEXT, "kv_path": str(tmp_path), "kv_memory": 1 << 28}, **OPTIONS) as llm:
        player = Player(llm, known, operations)
        for number in range(operations):
            player.play()
            if number % 25 == 0:
                player.settled()
        while llm.core.engine.scheduler.busy:
            player.hear(llm.core.engine.step())
        player.settled()
        llm.core.engine.check()
        report = llm.core.place.report()
        assert player.counts["answers"] > operations // 100
        assert min(player.counts.values()) >= operations // 2500
        assert report.moved_layers > 3 < report.loads
        assert report.failures == report.lost_sequences == 0
        assert llm.core.place.mover.reordered > 0
        offload, memory = llm.core.place.offload, llm.core.memory
        held = (offload._sequences, memory._tables, memory._sequences, memory._kept, player.open)
        assert not any(held)
