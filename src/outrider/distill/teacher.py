"""What a head learns from: the target's distribution over the head's vocabulary, and where the target looks.

Both are recomputed from captured states, so that neither logits nor attention maps need space on disk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.distill.batches import Scale, TrainBatch
from outrider.kernels import reference as ops
from outrider.models.decoder import norm
from outrider.models.load import LoadedModel
from outrider.models.rope import rope_tables
from outrider.models.spec import Weights


class Teacher:
    """The target's embedding, last norm and output rows of the head's vocabulary, in fp32."""

    def __init__(self, loaded: LoadedModel, kept: Sequence[int], device: torch.device) -> None:
        self.spec = loaded.spec
        self.embedding = tensor(loaded.weights, "embed", device)
        output = self.embedding if loaded.spec.tied else tensor(loaded.weights, "lm_head", device)
        self.rows = output[torch.tensor(list(kept), device=device)].clone()
        self._norm = _tensors(loaded.weights, "final_norm", device)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., head's vocabulary] of last hidden states [..., hidden]."""
        return F.linear(norm(self.spec, self._norm, "final_norm", states), self.rows)


class TeacherAttention:
    """Where the target looks, in the layers behind the tapped ones: a tapped state is the next layer's input."""

    def __init__(self, loaded: LoadedModel, taps: Sequence[int], top: int, device: torch.device) -> None:
        self.spec, self.top = loaded.spec, top
        self.layers = {i: tap + 1 for i, tap in enumerate(taps) if tap + 1 < loaded.spec.num_layers}
        self._weights = {
            name: tensor(loaded.weights, name, device)
            for layer in self.layers.values()
            for name in loaded.weights
            if name.startswith(f"layers.{layer}.")
            and name.split(".", 2)[2].removesuffix(".bias") in ("attn_norm", "q", "k", "q_norm", "k_norm")
        }

    def weights(self, layer: int, states: Tensor, positions: Tensor, mask: Tensor, first: int = 0) -> Tensor:
        """Attention weights [B, heads, C - first, C] of a layer's rows from `first` on over its inputs [B, C, hidden].

        mask: bool [B, 1, C - first, C].
        """
        x = norm(self.spec, self._weights, f"layers.{layer}.attn_norm", states)
        q = self._heads(layer, "q", x[:, first:], positions[:, first:])
        k = self._heads(layer, "k", x, positions)
        k = k.repeat_interleave(self.spec.num_heads // self.spec.num_kv_heads, dim=1)
        scores = q @ k.transpose(2, 3) / self.spec.head_dim**0.5
        return torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)

    @torch.no_grad()
    def looked_at(self, batch: TrainBatch, scale: Scale) -> Tensor:
        """The union of the top positions over layers and heads: bool [B, KV heads, A, P + A] of slots for every row.

        A row's slot t stands for token t + 1, so it is told where the target looks from there; the first token has
        no slot. The last row of a sequence, whose successor was not captured, is told nothing.
        """
        prompt, answer = batch.prompt, batch.answer
        states = torch.cat([prompt.states, answer.states], dim=2)
        positions = torch.cat([prompt.positions, answer.positions], dim=1)
        real = torch.cat([prompt.real, answer.real], dim=1)
        first = prompt.real.shape[1] + 1  # rows before are not trained
        columns = torch.arange(real.shape[1], device=real.device)
        rows = columns[first:, None]
        mask = (real[:, None, None, :] & (columns <= rows)) | (columns == rows)
        found = None
        for i, layer in self.layers.items():
            chosen = self._top(self.weights(layer, states[i] * scale.rms[i], positions, mask, first)) & mask
            found = chosen if found is None else found | chosen
        assert found is not None, "a tap below the last layer has a layer behind it"
        slots = F.pad(found[..., 1:], (0, 1, 0, 1))
        told = F.pad(answer.real[:, 1:], (0, 1))
        return slots & told[:, None, :, None]

    def _top(self, weights: Tensor) -> Tensor:
        """The positions with the largest weights, shared by the query heads of a KV head."""
        best = weights.topk(min(self.top, weights.shape[-1]), dim=-1).indices
        chosen = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, best, True)
        return chosen.unflatten(1, (self.spec.num_kv_heads, -1)).any(2)

    def _heads(self, layer: int, name: str, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys [B, heads, C, d], turned to their positions."""
        prefix = f"layers.{layer}.{name}"
        rows = F.linear(x, self._weights[prefix], self._weights.get(f"{prefix}.bias"))
        rows = rows.view(*x.shape[:2], -1, self.spec.head_dim)
        if self.spec.qk_norm:
            rows = norm(self.spec, self._weights, f"{prefix}_norm", rows)
        if self.spec.rope is not None:
            tables = rope_tables(self.spec.rope, self.spec.head_dim, positions.flatten().cpu().numpy())
            cos, sin = (torch.from_numpy(table).to(x.device) for table in tables)
            rows = ops.rotate(rows.flatten(0, 1), cos, sin).view_as(rows)
        return rows.transpose(1, 2)


def tensor(weights: Weights, name: str, device: torch.device) -> Tensor:
    """One weight in fp32, in memory of its own."""
    return torch.from_numpy(np.array(weights[name].dense(), dtype=np.float32)).to(device)


def _tensors(weights: Weights, name: str, device: torch.device) -> dict[str, Tensor]:
    return {key: tensor(weights, key, device) for key in (name, f"{name}.bias") if key in weights}
