"""Small random models for the compiled decoder, and a driver that feeds a decoder in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.models.spec import DecoderSpec, GroupedInts
from outrider.types import Batch, Result, Selection

BASE: dict[str, Any] = {
    "family": "test",
    "vocab_size": 101,
    "hidden_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 72,
    "max_positions": 512,
}
WIRINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "opt": {
        "norm": "layer",
        "gated": False,
        "activation": "relu",
        "rope": None,
        "position_offset": 2,
        "num_kv_heads": 4,
    },
    "qwen3": {"qk_norm": True, "head_dim": 24, "tied": False, "num_kv_heads": 1},
    "windows": {"sliding_window": 7, "windowed_layers": (1,), "activation": "gelu"},
    "wide": {"head_dim": 64, "num_heads": 6, "num_kv_heads": 1, "activation": "gelu_tanh"},
}


@dataclass(frozen=True)
class Stored:
    """A weight that is its own dense form, or stored integers."""

    values: np.ndarray
    integers: GroupedInts | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def dense(self) -> np.ndarray:
        return self.values

    def groups(self) -> GroupedInts | None:
        return self.integers


def spec_of(wiring: str) -> DecoderSpec:
    return DecoderSpec(**{**BASE, **WIRINGS[wiring]})


def random_weights(spec: DecoderSpec, seed: int = 0) -> dict[str, Stored]:
    """Every weight of a spec: biases on q, k, v, and everywhere for layer norms."""
    rng = np.random.default_rng(seed)

    def matrix(out: int, inputs: int) -> Stored:
        return Stored((rng.normal(size=(out, inputs)) / inputs**0.5).astype(np.float32))

    def vector(size: int, centre: float) -> Stored:
        return Stored((centre + 0.2 * rng.normal(size=size)).astype(np.float32))

    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    weights = {"embed": matrix(spec.vocab_size, hidden), "final_norm": vector(hidden, 1)}
    if not spec.tied:
        weights["lm_head"] = matrix(spec.vocab_size, hidden)
    if spec.rope is None:
        weights["pos_embed"] = matrix(spec.max_positions + spec.position_offset, hidden)
    shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        for name, shape in shapes.items():
            weights[prefix + name] = matrix(*shape)
            if spec.norm == "layer" or name in ("q", "k", "v"):
                weights[f"{prefix}{name}.bias"] = vector(shape[0], 0)
        if not spec.gated:
            del weights[prefix + "gate"]
            weights.pop(prefix + "gate.bias", None)
        norms = {"attn_norm": hidden, "mlp_norm": hidden}
        if spec.qk_norm:
            norms |= {"q_norm": spec.head_dim, "k_norm": spec.head_dim}
        for name, size in norms.items():
            weights[prefix + name] = vector(size, 1)
            if spec.norm == "layer":
                weights[f"{prefix}{name}.bias"] = vector(size, 0)
    if spec.norm == "layer":
        weights["final_norm.bias"] = vector(hidden, 0)
    return weights


class Feeder:
    """Feeds sequences to one decoder; their pages are scattered over the cache."""

    def __init__(self, decoder: Any, sequences: int = 1, page_size: int = 8, length: int = 400) -> None:
        self.decoder, self.page_size = decoder, page_size
        columns = -(-length // page_size)
        order = np.random.default_rng(7).permutation(sequences * columns)
        self.pages = order.reshape(sequences, columns).astype(np.int32)
        self.cache = decoder.new_cache(sequences * columns, page_size)
        self.lengths = [0] * sequences

    def slots(self, sequence: int, entries: np.ndarray) -> np.ndarray:
        pages = self.pages[sequence][entries // self.page_size]
        return (pages * self.page_size + entries % self.page_size).astype(np.int32)

    def batch(
        self,
        rows: dict[int, Sequence[int]],
        parents: dict[int, Sequence[int]] | None = None,
        selection: Selection | None = None,
    ) -> Batch:
        """Rows by sequence: chains, or trees where `parents` names them."""
        positions, slots, masks, starts = [], [], [], [0]
        for s, tokens in rows.items():
            length, tree = self.lengths[s], (parents or {}).get(s)
            entries = np.arange(length, length + len(tokens))
            slots.append(self.slots(s, entries))
            masks.append(_masks(tree, len(tokens)))
            positions.append(entries if tree is None else length + _depths(tree))
            starts.append(starts[-1] + len(tokens))
        return Batch(
            tokens=np.array([t for tokens in rows.values() for t in tokens], np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            slots=np.concatenate(slots),
            row_starts=np.array(starts, np.int32),
            contexts=np.array([self.lengths[s] for s in rows], np.int32),
            pages=self.pages[list(rows)],
            logit_rows=np.arange(starts[-1], dtype=np.int32),
            ancestors=np.concatenate(masks) if parents else None,
            selection=selection,
        )

    def feed(self, rows: dict[int, Sequence[int]], **options: Any) -> Result:
        """One pass whose rows are kept."""
        result = self.decoder.forward(self.batch(rows, **options), self.cache)
        for s, tokens in rows.items():
            self.lengths[s] += len(tokens)
        return result

    def logits(self, tokens: Sequence[int], cuts: Sequence[int] = ()) -> np.ndarray:
        """Logits of every token of sequence 0, fed in pieces that end at `cuts`."""
        pieces = np.split(np.asarray(tokens), list(cuts))
        return np.concatenate([self.feed({0: piece}).logits for piece in pieces])


def _masks(parents: Sequence[int] | None, rows: int) -> np.ndarray:
    if parents is None:
        return np.full(rows, 2**64 - 1, np.uint64)
    masks = [0] * rows
    for row, parent in enumerate(parents):
        masks[row] = (masks[parent] if parent >= 0 else 0) | 1 << row
    return np.array(masks, np.uint64)


def _depths(parents: Sequence[int]) -> np.ndarray:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return np.array(depths)
