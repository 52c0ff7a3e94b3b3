"""Outrider itself, through its Python API, as one of the engines that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider import __version__
from outrider.api.llm import LLM
from outrider.bench.peers.peer import Timing
from outrider.types import SamplingParams


class Ours:
    """Plain decoding, or any way to speculate."""

    version = __version__

    def __init__(self, llm: LLM, name: str, settings: dict[str, Any]) -> None:
        self._llm, self.name, self.settings = llm, name, settings

    def run(self, prompts: Sequence[Sequence[int]], count: int) -> Timing:
        """The first token of every prompt, then the rest; each is timed by a call of its own kind.

        One stream is timed at its own pieces. Several are timed whole, and their prefill alone is taken off.
        """
        if len(prompts) == 1:
            return self._stream(prompts[0], count)
        first = self._seconds(prompts, 1)
        return Timing(first, self._seconds(prompts, count) - first, len(prompts) * (count - 1))

    def close(self) -> None:
        self._llm.close()

    def _stream(self, prompt: Sequence[int], count: int) -> Timing:
        started, stamps = perf_counter(), []
        for piece in self._llm.stream(list(prompt), greedy(count)):
            stamps.append((perf_counter() - started, len(piece.token_ids)))
        return Timing(stamps[0][0], stamps[-1][0] - stamps[0][0], count - stamps[0][1])

    def _seconds(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        started = perf_counter()
        self._llm.generate([list(prompt) for prompt in prompts], greedy(count))
        return perf_counter() - started


def greedy(count: int) -> SamplingParams:
    """Exactly `count` tokens, the likeliest each."""
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def open_peer(
    model: Path,
    *,
    threads: int,
    context: int,
    streams: int,
    speculative: Mapping[str, Any] | str | None = None,
    name: str = "outrider",
    **options: Any,
) -> Ours:
    """Load the model; `options` are LLM's."""
    llm = LLM(
        str(model),
        speculative_config=speculative,
        threads=threads,
        max_model_len=context,
        max_num_seqs=streams,
        prefix_caching=False,
        **options,
    )
    return Ours(llm, name, {"threads": threads, "speculative": speculative, **options})
