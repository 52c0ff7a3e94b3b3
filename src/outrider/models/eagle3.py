"""An EAGLE-3 head: one transformer layer over fused hidden states of the target (arXiv 2503.01840).

The module's parameter names are those of the public checkpoints, so that a state dict is a checkpoint. Its shape is
eagle3_spec.py, folders are eagle3_files.py. The same head drafts tokens and, by its attention, points at context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outrider.kernels import reference as ops
from outrider.models.eagle3_spec import Eagle3Spec, default_taps, spec_from_config
from outrider.models.rope import rope_tables

__all__ = ["Eagle3Head", "Eagle3Spec", "Embedding", "HeadKV", "HeadStep", "default_taps", "spec_from_config"]


class HeadKV(NamedTuple):
    """Keys and values that a head has seen: both [batch, kv_heads, entries, head_dim]."""

    k: Tensor
    v: Tensor


class HeadStep(NamedTuple):
    """What one pass of a head gives; slot t stands for token t + 1, its logits are of token t + 2."""

    h: Tensor  # [batch, rows, hidden]: fed back in place of the fused states, to draft further
    logits: Tensor  # [batch, rows, draft vocabulary]
    kv: HeadKV  # all entries, this pass's included
    weights: Tensor | None  # [batch, heads, rows, entries] attention weights, where asked for


class Eagle3Head(nn.Module):
    """The head's weights and forward pass. A new one has random weights and drafts the given tokens."""

    d2t: Tensor  # [draft vocabulary] int64: target id - draft id
    t2d: Tensor  # [vocabulary] bool: whether the head can draft a token

    def __init__(self, spec: Eagle3Spec, tokens: Sequence[int] | None = None) -> None:
        """`tokens`: the target ids that the head drafts, ascending; None: the first draft_vocab_size ones."""
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(len(spec.taps) * spec.hidden_size, spec.hidden_size, bias=False)
        self.midlayer = Midlayer(spec)
        self.norm = Norm(spec.hidden_size, spec.norm_eps)
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
        self.embed_tokens: Embedding | None = None  # the target's embedding, unless a checkpoint brings its own
        kept = torch.arange(spec.draft_vocab_size) if tokens is None else torch.tensor(list(tokens))
        self.register_buffer("d2t", kept - torch.arange(len(kept)))
        self.register_buffer("t2d", torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill(0, kept, True))

    def fuse(self, features: Tensor) -> Tensor:
        """g [..., hidden] of the target's tapped states [taps, ..., hidden], as Result.features holds them."""
        return self.fc(torch.cat(features.unbind(0), dim=-1))

    def step(
        self,
        states: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        kv: HeadKV | None = None,
        mask: Tensor | None = None,
        want_weights: bool = False,
    ) -> HeadStep:
        """One pass over rows that follow the entries of `kv`; differentiable.

        states: g of `fuse`, or h of an earlier step, [batch, rows, hidden]. embeddings: of the token one ahead, same
        shape. positions [batch, rows] of the states. mask: bool, broadcast to [batch, heads, rows, entries + rows],
        True where a row may read; None is causal.
        """
        h, kv, weights = self.midlayer(states, embeddings, positions, kv, mask)
        return HeadStep(h, self.lm_head(self.norm(h)), kv, weights if want_weights else None)

    def prefill(self, states: Tensor, embeddings: Tensor, positions: Tensor) -> HeadKV:
        """Entries of rows that draft nothing themselves, such as a prompt's: of the layer only K and V are computed."""
        return self.midlayer.entries(states, embeddings, positions)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft token ids."""
        return draft_ids + self.d2t[draft_ids]


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """An embedding of the head's own: frozen, because heads are trained on the target's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Midlayer(nn.Module):
    """The one layer: attention over [embedding, state] of double width, then a gated MLP."""

    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.spec = spec
        self.input_layernorm = Norm(spec.hidden_size, spec.norm_eps)
        self.hidden_norm = Norm(spec.hidden_size, spec.norm_eps)
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.norm_eps)
        self.self_attn = HeadAttention(spec)
        self.mlp = GatedMLP(spec)

    def forward(
        self, states: Tensor, embeddings: Tensor, positions: Tensor, kv: HeadKV | None, mask: Tensor | None
    ) -> tuple[Tensor, HeadKV, Tensor]:
        """The residual stream, all entries so far and the attention weights."""
        normed = self.hidden_norm(states)
        residual = normed if self.spec.norm_before_residual else states
        attended, kv, weights = self.self_attn(self._join(embeddings, normed), positions, kv, mask)
        h = residual + attended
        return h + self.mlp(self.post_attention_layernorm(h)), kv, weights

    def entries(self, states: Tensor, embeddings: Tensor, positions: Tensor) -> HeadKV:
        """K and V of rows."""
        return self.self_attn.entries(self._join(embeddings, self.hidden_norm(states)), positions)

    def _join(self, embeddings: Tensor, normed: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embeddings), normed], dim=-1)


class HeadAttention(nn.Module):
    """Grouped-query attention whose inputs are twice as wide as its output."""

    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.spec = spec
        wide, query, kv = 2 * spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(wide, query, bias=spec.attention_bias)
        self.k_proj = nn.Linear(wide, kv, bias=spec.attention_bias)
        self.v_proj = nn.Linear(wide, kv, bias=spec.attention_bias)
        self.o_proj = nn.Linear(query, spec.hidden_size, bias=spec.attention_bias)

    def forward(
        self, x: Tensor, positions: Tensor, kv: HeadKV | None, mask: Tensor | None
    ) -> tuple[Tensor, HeadKV, Tensor]:
        """Attended rows [batch, rows, hidden], all entries, weights [batch, heads, rows, entries]."""
        q = self._rotate(self._heads(self.q_proj(x)), positions)
        kv = _extend(kv, self.entries(x, positions))
        groups = self.spec.num_heads // self.spec.num_kv_heads
        keys, values = (part.repeat_interleave(groups, dim=1) for part in kv)
        scores = (q.transpose(1, 2) @ keys.transpose(2, 3)).float() / math.sqrt(self.spec.head_dim)
        reads = _causal(scores) if mask is None else mask
        weights = torch.softmax(scores.masked_fill(~reads, -math.inf), dim=-1)
        attended = (weights.to(values.dtype) @ values).transpose(1, 2).flatten(2)
        return self.o_proj(attended), kv, weights

    def entries(self, x: Tensor, positions: Tensor) -> HeadKV:
        """Keys, turned to their positions, and values of rows."""
        k, v = self._rotate(self._heads(self.k_proj(x)), positions), self._heads(self.v_proj(x))
        return HeadKV(k.transpose(1, 2), v.transpose(1, 2))

    def _heads(self, x: Tensor) -> Tensor:
        """Rows [batch, rows, heads * d] as [batch, rows, heads, d]."""
        return x.view(*x.shape[:2], -1, self.spec.head_dim)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        tables = rope_tables(self.spec.rope, self.spec.head_dim, positions.flatten().cpu().numpy())
        cos, sin = (torch.from_numpy(table).to(x.device) for table in tables)
        return ops.rotate(x.flatten(0, 1), cos, sin).view_as(x)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.activate = ops.ACTIVATIONS[spec.activation]
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activate(self.gate_proj(x)) * self.up_proj(x))


def _extend(kv: HeadKV | None, new: HeadKV) -> HeadKV:
    if kv is None:
        return new
    return HeadKV(torch.cat([kv.k, new.k], dim=2), torch.cat([kv.v, new.v], dim=2))


def _causal(scores: Tensor) -> Tensor:
    """Rows read every earlier entry and themselves: bool [rows, entries]."""
    rows, entries = scores.shape[-2:]
    return torch.ones(rows, entries, dtype=torch.bool, device=scores.device).tril(entries - rows)
