"""Perplexity of a model on a text, by any of three backends; prints one JSON line.

    python scripts/perplexity.py smollm2-135m --text war_and_peace.txt --tokens 20000
    python scripts/perplexity.py smollm2-135m --text war_and_peace.txt --backend transformers

The text is cut into windows that do not overlap; a window's first token is given, the others are scored. `transformers`
runs the same file dequantised to fp32, and is what the others are held against.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from outrider.errors import ConfigError, OutriderError
from outrider.models.build import build_decoder
from outrider.models.load import LoadedModel, load_model
from outrider.models.spec import Decoder, KVCache
from outrider.types import Batch, Float32

PAGE = 16
ROWS = 128

#: Logits [tokens, vocabulary] of one window.
Scorer = Callable[[Sequence[int]], Float32]


def perplexity(score: Scorer, tokens: Sequence[int], window: int) -> float:
    """exp of the mean negative log-likelihood of all but the first token of every window."""
    losses = [loss(score(part), part) for part in cut(tokens, window)]
    return float(np.exp(np.concatenate(losses).mean()))


def cut(tokens: Sequence[int], window: int) -> list[Sequence[int]]:
    """Windows in order; a last one of a single token has nothing to score and is left out."""
    parts = [tokens[i : i + window] for i in range(0, len(tokens), window)]
    return [part for part in parts if len(part) > 1]


def loss(logits: Float32, tokens: Sequence[int]) -> np.ndarray:
    """Negative log-likelihood of tokens 1, 2, ... of a window, in fp64."""
    wide = logits[:-1].astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    totals = np.log(np.exp(wide - top).sum(axis=-1)) + top[:, 0]
    return totals - wide[np.arange(len(wide)), list(tokens[1:])]


def decoder_scorer(decoder: Decoder, window: int) -> Scorer:
    """Scores a window by one of our decoders, in chunks of rows."""
    cache = decoder.new_cache(-(-window // PAGE), PAGE)

    def score(tokens: Sequence[int]) -> Float32:
        starts = range(0, len(tokens), ROWS)
        return np.concatenate([_chunk(decoder, cache, tokens[i : i + ROWS], i) for i in starts])

    return score


def _chunk(decoder: Decoder, cache: KVCache, tokens: Sequence[int], start: int) -> Float32:
    rows = np.arange(len(tokens), dtype=np.int32)
    batch = Batch(
        tokens=np.asarray(tokens, dtype=np.int32),
        positions=rows + start,
        slots=rows + start,
        row_starts=np.array([0, len(tokens)], dtype=np.int32),
        contexts=np.array([start], dtype=np.int32),
        pages=np.arange(cache.num_pages, dtype=np.int32)[None],
        logit_rows=rows,
    )
    logits = decoder.forward(batch, cache).logits
    assert logits is not None
    return logits


def transformers_scorer(loaded: LoadedModel) -> Scorer:
    """Scores a window by transformers, in fp32, from the same file or folder."""
    import torch
    import transformers

    is_file = loaded.path.is_file()
    folder, file = (loaded.path.parent, loaded.path.name) if is_file else (loaded.path, None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()

    def score(tokens: Sequence[int]) -> Float32:
        with torch.inference_mode():
            return model(torch.tensor([list(tokens)])).logits[0].numpy()

    return score


def measure(args: argparse.Namespace) -> dict[str, object]:
    """The record of one run."""
    loaded = load_model(args.model)
    tokens = loaded.tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    if args.backend == "transformers":
        score = transformers_scorer(loaded)
    else:
        decoder = build_decoder(
            loaded.spec, loaded.weights, dtype=args.dtype, kv_dtype=args.kv_dtype, backend=args.backend
        )
        score = decoder_scorer(decoder, args.window)
    start = time.perf_counter()
    value = perplexity(score, tokens, args.window)
    return {
        "schema": "outrider.perplexity/1",
        "model": args.model,
        "backend": args.backend,
        "dtype": "float32" if args.backend == "transformers" else args.dtype,
        "kv_dtype": "float32" if args.backend == "transformers" else args.kv_dtype,
        "text": args.text.name,
        "tokens": len(tokens),
        "window": args.window,
        "perplexity": value,
        "seconds": round(time.perf_counter() - start, 2),
    }


def main() -> int:
    """Exit status 0 done, 1 failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(description="Perplexity of a model on a text.")
    parser.add_argument("model", help="alias, folder, .gguf file or hub id")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file")
    parser.add_argument("--tokens", type=int, default=20000, help="how many of the text's first tokens")
    parser.add_argument("--window", type=int, default=1024, help="tokens per window")
    parser.add_argument("--backend", choices=["compiled", "reference", "transformers"], default="compiled")
    parser.add_argument("--dtype", default="auto", help="of weights, as in LLM(dtype=...)")
    parser.add_argument("--kv-dtype", default="auto", help="of keys and values")
    args = parser.parse_args()
    try:
        if min(args.tokens, args.window) < 2:
            raise ConfigError("--tokens and --window must be at least 2")
        print(json.dumps(measure(args)))
    except (OutriderError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
