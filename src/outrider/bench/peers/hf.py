"""transformers in fp32 on the CPU, its own cache, eager loop of single steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
import transformers

from outrider.bench.peers.peer import Timing


class Transformers:
    """One model; prompts of a batch must have one length, as its batches are rectangular."""

    name = "transformers"
    version = transformers.__version__

    def __init__(self, model: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        folder, file = (str(model.parent), model.name) if model.suffix == ".gguf" else (str(model), None)
        options = {"gguf_file": file} if file else {}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
        self.settings = {"threads": threads, "dtype": "float32"}

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], count: int) -> Timing:
        started = perf_counter()
        result = self._model(torch.tensor([list(prompt) for prompt in prompts]), use_cache=True, logits_to_keep=1)
        tokens, first = result.logits[:, -1].argmax(-1, keepdim=True), perf_counter()
        for _ in range(count - 1):
            result = self._model(tokens, past_key_values=result.past_key_values, use_cache=True)
            tokens = result.logits[:, -1].argmax(-1, keepdim=True)
        return Timing(first - started, perf_counter() - first, len(prompts) * (count - 1))

    def close(self) -> None:
        del self._model


def open_peer(model: Path, *, threads: int, context: int, streams: int) -> Transformers:
    """Load a folder or a .gguf file."""
    return Transformers(model, threads)
