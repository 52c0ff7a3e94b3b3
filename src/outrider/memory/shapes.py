"""Shapes of well-known models, so that a memory plan can be made before anything is downloaded.

Only what a plan needs is exact (layers, heads, widths, vocabulary); these specs do not run.
"""

from __future__ import annotations

from outrider.models.spec import DecoderSpec


def _shape(
    family: str,
    layers: int,
    hidden: int,
    mlp: int,
    heads: tuple[int, int, int],
    vocab: int,
    positions: int,
    tied: bool = False,
) -> DecoderSpec:
    """A spec from the numbers of a model card; heads are (query heads, KV heads, size of a head)."""
    return DecoderSpec(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        intermediate_size=mlp,
        max_positions=positions,
        tied=tied,
    )


SHAPES: dict[str, DecoderSpec] = {
    "smollm2-135m": _shape("llama", 30, 576, 1536, (9, 3, 64), 49152, 8192, tied=True),
    "llama2-7b": _shape("llama", 32, 4096, 11008, (32, 32, 128), 32000, 4096),
    "llama3-8b": _shape("llama", 32, 4096, 14336, (32, 8, 128), 128256, 131072),
    "llama3-70b": _shape("llama", 80, 8192, 28672, (64, 8, 128), 128256, 131072),
    "llama3.2-1b": _shape("llama", 16, 2048, 8192, (32, 8, 64), 128256, 131072, tied=True),
    "llama3.2-3b": _shape("llama", 28, 3072, 8192, (24, 8, 128), 128256, 131072, tied=True),
    "qwen2.5-0.5b": _shape("qwen2", 24, 896, 4864, (14, 2, 64), 151936, 32768, tied=True),
    "qwen2.5-1.5b": _shape("qwen2", 28, 1536, 8960, (12, 2, 128), 151936, 32768, tied=True),
    "qwen2.5-coder-0.5b": _shape("qwen2", 24, 896, 4864, (14, 2, 64), 151936, 32768, tied=True),
    "qwen2.5-coder-1.5b": _shape("qwen2", 28, 1536, 8960, (12, 2, 128), 151936, 32768, tied=True),
    "qwen2.5-7b": _shape("qwen2", 28, 3584, 18944, (28, 4, 128), 152064, 131072),
    "qwen2.5-32b": _shape("qwen2", 64, 5120, 27648, (40, 8, 128), 152064, 131072),
    "qwen3-8b": _shape("qwen3", 36, 4096, 12288, (32, 8, 128), 151936, 40960),
    "mistral-7b": _shape("mistral", 32, 4096, 14336, (32, 8, 128), 32000, 32768),
}
