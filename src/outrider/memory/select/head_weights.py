"""An EAGLE-3 head pruned to what gives attention: the fusion of the target's states, Q, K and two norms.

V, the output projection, the MLP and the LM head are dropped (SpeContext, arXiv 2512.00722): more than 90 % of a head
with a whole vocabulary. Embeddings are the target's, row by row, unless the checkpoint brings its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import ceil

import numpy as np
from numpy.typing import NDArray

from outrider.models.eagle3_store import EMBEDDING, StoredHead, read_head
from outrider.models.spec import DecoderSpec, Rope, SlicedWeight, Weight
from outrider.types import Float32

#: Tokens whose embeddings are kept at hand.
RECENT_TOKENS = 4096
FINGERPRINT_ROWS = 64  # of every matrix


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b, rows of W padded to whole vectors of 16 values."""

    weight: Float32 | NDArray[np.uint16]  # [out, padded in]; bfloat16 where that holds every value
    bias: Float32 | None

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True)
class HeadWeights:
    """What is left of a head."""

    taps: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    eps: float
    fuse: Linear
    q: Linear
    k: Linear
    state_norm: Float32  # [hidden]
    input_norm: Float32  # [hidden]

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return self.fuse.nbytes + self.q.nbytes + self.k.nbytes

    @property
    def fingerprint(self) -> str:
        """A digest of the shape, the rope and a few rows of what makes keys."""
        shape = (self.taps, self.heads, self.kv_heads, self.head_dim, self.rope, self.eps)
        digest = blake2b(repr(shape).encode(), digest_size=16)
        for values in (self.fuse.weight, self.k.weight, self.fuse.bias, self.k.bias, self.state_norm, self.input_norm):
            if values is not None:
                digest.update(np.ascontiguousarray(values[:FINGERPRINT_ROWS]).tobytes())
        return digest.hexdigest()


class Embeddings:
    """Rows of an embedding table as fp32, unpacked when a token appears; the latest ones are kept."""

    def __init__(self, table: Weight) -> None:
        self._part = table.part if isinstance(table, SlicedWeight) else None
        self._whole = None if self._part else table.dense().astype(np.float16)
        self._recent: OrderedDict[int, Float32] = OrderedDict()

    def rows(self, tokens: Sequence[int]) -> Float32:
        """Embeddings [tokens, hidden]."""
        if self._whole is not None:
            return self._whole[np.asarray(tokens, np.int64)].astype(np.float32)
        return np.stack([self._row(int(token)) for token in tokens])

    def _row(self, token: int) -> Float32:
        row = self._recent.get(token)
        if row is None:
            assert self._part is not None, "only parts are unpacked row by row"
            row = self._recent[token] = np.array(self._part(token, token + 1).dense()[0], np.float32)
            if len(self._recent) > RECENT_TOKENS:
                self._recent.popitem(last=False)
        return row


def prune(head: StoredHead, positions: int) -> HeadWeights:
    """The part of a head that selects, for contexts of up to `positions` tokens.

    A head that was trained on fewer is extended by YaRN (arXiv 2309.00071), without training.
    """
    spec = head.spec

    def vector(name: str) -> Float32:
        return np.ascontiguousarray(head.weights[f"midlayer.{name}.weight"].dense(), np.float32)

    def linear(name: str) -> Linear:
        bias = head.weights.get(f"{name}.bias")
        weight = np.asarray(head.weights[f"{name}.weight"].dense(), np.float32)
        return Linear(shorten(pad_rows(weight)), None if bias is None else bias.dense())

    return HeadWeights(
        taps=spec.taps,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rope=extend(spec.rope, spec.max_positions, positions),
        eps=spec.norm_eps,
        fuse=linear("fc"),
        q=linear("midlayer.self_attn.q_proj"),
        k=linear("midlayer.self_attn.k_proj"),
        state_norm=vector("hidden_norm"),
        input_norm=vector("input_layernorm"),
    )


def extend(rope: Rope, trained: int, positions: int) -> Rope:
    """The rope for `positions` of a head trained on `trained` of them; one that is scaled already stays as it is."""
    if positions <= trained or rope.kind != "default":
        return rope
    scaling = {"factor": float(ceil(positions / trained)), "original_max_position_embeddings": float(trained)}
    return replace(rope, kind="yarn", scaling=scaling)


def padded(size: int) -> int:
    """Rounded up to whole vectors."""
    return -(-size // 16) * 16


def shorten(weight: Float32) -> Float32 | NDArray[np.uint16]:
    """A matrix in bfloat16, as heads are usually stored, unless that loses something."""
    bits = weight.view(np.uint32)
    return (bits >> 16).astype(np.uint16) if not (bits & 0xFFFF).any() else weight


def pad_rows(values: Float32) -> Float32:
    """Rows [n, padded size]; the same memory where nothing is to be added."""
    missing = padded(values.shape[-1]) - values.shape[-1]
    return np.pad(values, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(values)


def load_weights(path: str, target: DecoderSpec, table: Weight, positions: int) -> tuple[HeadWeights, Embeddings]:
    """The pruned head in a folder and the embeddings it reads. ModelError where it is not one of this target."""
    head = read_head(path, target)
    return prune(head, positions), Embeddings(head.weights.get(EMBEDDING, table))
