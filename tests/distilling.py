"""A tiny random target of four layers, and runs on it that take a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from compiling import Stored
from loading import CHAT, byte_level_tokenizer
from outrider.distill.data import Prompt, write_prompts
from outrider.distill.options import DistillOptions
from outrider.distill.pipeline import Run
from outrider.models.load import LoadedModel
from outrider.models.load.tokenizer import Tokenizer
from outrider.models.spec import DecoderSpec

TAPS = (0, 1, 2)
SPEC = DecoderSpec(
    family="llama",
    vocab_size=320,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=256,
    tied=False,
    eos_token_ids=(2,),
    num_tokens=320,
)
OPTIONS = {
    "taps": TAPS,
    "vocab_size": 64,
    "max_tokens": 20,
    "temperature": 0.7,
    "batch": 4,
    "shard_prompts": 4,
    "holdout": 4,
    "epochs": 16.0,
    "tokens_per_update": 40,
    "checkpoint_every": 20,
    "engine_prompts": 0,
}


def tiny_target(seed: int = 0, spec: DecoderSpec = SPEC) -> LoadedModel:
    """A target whose answers run in a circle of 48 tokens, disturbed by its layers: there is something to learn."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> Stored:
        return Stored((scale * rng.standard_normal(shape)).astype(np.float32))

    hidden, query, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    embed = normal(spec.vocab_size, hidden)
    weights = {"embed": embed, "final_norm": Stored(np.ones(hidden, np.float32))}
    weights["lm_head"] = normal(spec.vocab_size, hidden, scale=0.3)
    circle = np.arange(60, 108)
    weights["lm_head"].values[np.roll(circle, -1)] = 0.4 * embed.values[circle]
    for i in range(spec.num_layers):
        shapes = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
        shapes |= {"gate": (spec.intermediate_size, hidden), "up": (spec.intermediate_size, hidden)}
        shapes["down"] = (hidden, spec.intermediate_size)
        weights |= {f"layers.{i}.{name}": normal(*shape, scale=0.15) for name, shape in shapes.items()}
        weights |= {f"layers.{i}.{name}": Stored(np.ones(hidden, np.float32)) for name in ("attn_norm", "mlp_norm")}
    tokenizer = Tokenizer(byte_level_tokenizer(), eos_token_ids=(2,), templates={"default": CHAT})
    return LoadedModel("tiny", spec, weights, tokenizer, Path("tiny"), "folder")


def tiny_prompts(count: int) -> list[Prompt]:
    """Distinct prompts of three domains."""
    domains = ("chat", "maths", "code")
    return [Prompt((("user", f"the fox {i} jumps {i * i}"),), domains[i % 3]) for i in range(count)]


def tiny_run(folder: Path, loaded: LoadedModel | None = None, count: int = 18, **changes: object) -> Run:
    """A run in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_prompts(folder / "prompts.jsonl", tiny_prompts(count))
    options = DistillOptions(**{**OPTIONS, **changes})  # type: ignore[arg-type]
    return Run(
        loaded or tiny_target(),
        folder / "prompts.jsonl",
        folder,
        options,
        lambda stage, done, total: None,
        backend="reference",
        threads=1,  # several threads may differ in the last bits
    )
