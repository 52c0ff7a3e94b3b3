"""Which model a model is, whatever file it lies in: what a head that was trained for it is matched with."""

from __future__ import annotations

from hashlib import sha256
from typing import Protocol

import numpy as np

from outrider.models.load.tokenizer import Tokenizer
from outrider.models.spec import DecoderSpec, Weights
from outrider.types import Float32

_TOKENS = 256  # tokens of the vocabulary that are looked at


class Model(Protocol):
    """The parts of a loaded model."""

    @property
    def spec(self) -> DecoderSpec:
        """Its shape."""
        ...

    @property
    def weights(self) -> Weights:
        """Its weights as they were stored."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        ...


def identity(model: Model) -> str:
    """A digest of the shape, of three norms rounded to bfloat16, and of tokens from all over the vocabulary.

    Norms are kept whole in every format, so that a model quantised in another way is the same one, and are changed by
    training: a base model and its fine-tuned one differ. What changes no norm, such as a merged low-rank adapter, does
    not show.
    """
    spec, digest = model.spec, sha256()
    sizes = (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    digest.update(repr((*sizes, spec.intermediate_size)).encode())
    for name in ("final_norm", "layers.0.attn_norm", f"layers.{spec.num_layers - 1}.mlp_norm"):
        if name in model.weights:
            digest.update(_rounded(model.weights[name].dense()))
    for token in np.linspace(0, model.tokenizer.vocab_size - 1, _TOKENS).astype(int).tolist():
        digest.update(model.tokenizer.token_bytes(token) + b"\0")
    return digest.hexdigest()[:32]


def _rounded(values: Float32) -> bytes:
    """The values in bfloat16, to the nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
