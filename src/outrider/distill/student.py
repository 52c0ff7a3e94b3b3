"""A small decoder of the target's own layers: some of them, with a narrower MLP, or its first ones as an early exit.

It runs whole sequences in torch for training; written as a folder (student_files.py) it is a model like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.distill.teacher import tensor
from outrider.errors import ConfigError
from outrider.kernels import reference as ops
from outrider.models.decoder import norm
from outrider.models.load import LoadedModel
from outrider.models.rope import rope_tables
from outrider.models.spec import DecoderSpec

RANK = 64  # of an early exit's adapter


class Student(nn.Module):
    """Layers, last norm and adapter; the embedding and the output rows stay the target's. Names are canonical."""

    def __init__(self, spec: DecoderSpec, rank: int) -> None:
        """`rank` of the adapter behind the last norm; 0: none."""
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList(nn.Module() for _ in range(spec.num_layers))
        self.final_norm = nn.Parameter(torch.ones(spec.hidden_size))
        self.adapter_in = nn.Parameter(torch.randn(rank, spec.hidden_size) / spec.hidden_size**0.5)
        self.adapter_out = nn.Parameter(torch.zeros(spec.hidden_size, rank))

    def forward(self, tokens: Tensor, embedding: Tensor, dropout: float = 0.0) -> Tensor:
        """What the output rows are multiplied with: [B, T, hidden], of texts padded on the right, tokens [B, T]."""
        x = F.dropout(F.embedding(tokens, embedding), dropout, self.training)
        tables = rope_tables(self.spec.rope, self.spec.head_dim, np.arange(tokens.shape[1])) if self.spec.rope else None
        rotation = None if tables is None else tuple(torch.from_numpy(table).to(x.device) for table in tables)
        for i in range(self.spec.num_layers):
            x = self._layer(self.layer(i), x, rotation)
        x = norm(self.spec, {"final_norm": self.final_norm}, "final_norm", x)
        return x + F.linear(F.linear(x, self.adapter_in), self.adapter_out)

    def layer(self, i: int) -> dict[str, Tensor]:
        """The weights of one layer, by canonical name with "_bias" for ".bias"."""
        return dict(self.layers[i].named_parameters())

    def _layer(self, w: dict[str, Tensor], x: Tensor, rotation: tuple[Tensor, ...] | None) -> Tensor:
        y = norm(self.spec, w, "attn_norm", x)
        q, k, v = (self._heads(F.linear(y, w[name], w.get(f"{name}_bias"))) for name in "qkv")
        if self.spec.qk_norm:
            q, k = norm(self.spec, w, "q_norm", q), norm(self.spec, w, "k_norm", k)
        if rotation is not None:
            q, k = _rotate(q, rotation), _rotate(k, rotation)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).flatten(2), w["o"], w.get("o_bias"))
        y = norm(self.spec, w, "mlp_norm", x)
        wide = F.linear(y, w["up"])
        activate = ops.ACTIVATIONS[self.spec.activation]
        wide = activate(F.linear(y, w["gate"])) * wide if self.spec.gated else activate(wide)
        return x + F.linear(wide, w["down"])

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.spec.head_dim))


def new_student(loaded: LoadedModel, layers: Sequence[int], mlp_share: float, exit_only: bool, seed: int) -> Student:
    """A student of the target's layers with these numbers.

    mlp_share: of the MLP's neurons those whose weights are largest are kept. exit_only: the layers are frozen, and a
    low-rank adapter learns to read the last one.
    """
    check_layers(loaded, layers)
    torch.manual_seed(seed)
    wide = max(1, round(mlp_share * loaded.spec.intermediate_size))
    student = Student(replace(loaded.spec, num_layers=len(layers), intermediate_size=wide), RANK if exit_only else 0)
    for place, layer in enumerate(layers):
        for name, value in _narrowed(_layer_weights(loaded, layer), wide).items():
            student.layers[place].register_parameter(name, nn.Parameter(value, requires_grad=not exit_only))
    with torch.no_grad():
        student.final_norm.copy_(tensor(loaded.weights, "final_norm", torch.device("cpu")))
    return student


def check_layers(loaded: LoadedModel, layers: Sequence[int]) -> None:
    """ConfigError for what no student is made of."""
    spec = loaded.spec
    biased = any(name.split(".")[-2:] == ["gate", "bias"] for name in loaded.weights)
    if spec.norm != "rms" or not spec.gated or spec.sliding_window is not None or biased:
        raise ConfigError(f"{loaded.name}: students are made of gated decoders with RMS norms and no window", "kind")
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < spec.num_layers:
        raise ConfigError(f"layers {list(layers)} are refused; use ascending numbers from 0 to {spec.num_layers - 1}")


def _layer_weights(loaded: LoadedModel, layer: int) -> dict[str, Tensor]:
    prefix = f"layers.{layer}."
    names = [name for name in loaded.weights if name.startswith(prefix)]
    return {
        name.removeprefix(prefix).replace(".bias", "_bias"): tensor(loaded.weights, name, torch.device("cpu"))
        for name in names
    }


def _narrowed(weights: dict[str, Tensor], wide: int) -> dict[str, Tensor]:
    """The same layer with the `wide` neurons that weigh most."""
    size = weights["up"].norm(dim=1) * weights["gate"].norm(dim=1) * weights["down"].norm(dim=0)
    kept = size.topk(wide).indices.sort().values
    narrow = {"up": weights["up"][kept], "gate": weights["gate"][kept], "down": weights["down"][:, kept].contiguous()}
    return {**weights, **narrow}


def _rotate(x: Tensor, rotation: tuple[Tensor, ...]) -> Tensor:
    """Turn heads [B, T, heads, d] of positions 0 to T - 1."""
    cos, sin = (table.repeat(len(x), 1) for table in rotation)
    return ops.rotate(x.flatten(0, 1), cos, sin).view_as(x)
