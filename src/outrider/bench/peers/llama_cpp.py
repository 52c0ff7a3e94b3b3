"""llama.cpp through llama-cpp-python's low-level calls, so that no Python sampling stands between its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as lib

from outrider.bench.peers.peer import Timing
from outrider.errors import ModelError


class LlamaCpp:
    """One context; its memory is cleared before every run."""

    name = "llama.cpp"
    version = llama_cpp.__version__

    def __init__(self, model: Path, threads: int, context: int, streams: int) -> None:
        lib.llama_log_set(_SILENT, None)
        self._model = lib.llama_model_load_from_file(str(model).encode(), lib.llama_model_default_params())
        if not self._model:
            raise ModelError(f"llama.cpp cannot load {model}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context * streams, 2048, 512
        params.n_seq_max, params.n_threads, params.n_threads_batch = streams, threads, threads
        params.kv_unified = True
        self._context = lib.llama_init_from_model(self._model, params)
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(2048, 0, streams)
        self.settings = {"threads": threads, "n_ubatch": 512, "flash_attn": "auto"}

    def run(self, prompts: Sequence[Sequence[int]], count: int) -> Timing:
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        started = perf_counter()
        tokens = [self._prefill(prompt, stream) for stream, prompt in enumerate(prompts)]
        first = perf_counter()
        places = [len(prompt) for prompt in prompts]
        for _ in range(count - 1):
            self._fill(
                [(token, at, stream, True) for stream, (token, at) in enumerate(zip(tokens, places, strict=True))]
            )
            tokens = [self._best(row) for row in range(len(prompts))]
            places = [at + 1 for at in places]
        return Timing(first - started, perf_counter() - first, len(prompts) * (count - 1))

    def close(self) -> None:
        lib.llama_batch_free(self._batch)
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)

    def _prefill(self, prompt: Sequence[int], stream: int) -> int:
        """Read a prompt in one call; only its last row gives logits."""
        last = len(prompt) - 1
        self._fill([(token, at, stream, at == last) for at, token in enumerate(prompt)])
        return self._best(last)

    def _fill(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Decode rows of (token, position, stream, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, stream, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, stream
        if lib.llama_decode(self._context, batch):
            raise ModelError("llama.cpp failed to decode")

    def _best(self, row: int) -> int:
        logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, row), shape=(self._vocabulary,))
        return int(logits.argmax())


@lib.llama_log_callback
def _SILENT(level: int, text: bytes, data: Any) -> None:
    """Its log would bury ours."""


def open_peer(model: Path, *, threads: int, context: int, streams: int) -> LlamaCpp:
    """Load a .gguf file."""
    return LlamaCpp(model, threads, context, streams)
