"""OpenVINO GenAI on a folder that `optimum-cli export openvino` made; weights in the type of the export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import openvino
import openvino_genai

from outrider.bench.peers.peer import Timing


class OpenVino:
    """One pipeline; several prompts are answered as one batch."""

    name = "openvino"
    version = openvino.__version__

    def __init__(self, model: Path, threads: int) -> None:
        self._pipeline = openvino_genai.LLMPipeline(str(model), "CPU", INFERENCE_NUM_THREADS=threads)
        self.settings = {"threads": threads}

    def run(self, prompts: Sequence[Sequence[int]], count: int) -> Timing:
        first = self._seconds(prompts, 1)
        return Timing(first, self._seconds(prompts, count) - first, len(prompts) * (count - 1))

    def close(self) -> None:
        del self._pipeline

    def _seconds(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        ids = openvino.Tensor(np.array([list(prompt) for prompt in prompts], np.int64))
        started = perf_counter()
        self._pipeline.generate(ids, max_new_tokens=count, ignore_eos=True, do_sample=False)
        return perf_counter() - started


def open_peer(model: Path, *, threads: int, context: int, streams: int) -> OpenVino:
    """Load an exported folder."""
    return OpenVino(model, threads)
