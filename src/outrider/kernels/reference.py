"""Every operation of a decoder in plain torch: the oracle of the compiled kernels, and the path of accelerators.

Operations take rows in their first dimension. How rows are combined is a choice of two: RowByRow computes each alone
(a row's bits cannot depend on its neighbours, on chunks or on the batch), AllRows computes them as one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from outrider.types import Batch

Mask = NDArray[np.bool_]
Out = TypeVar("Out", Tensor, tuple[Tensor, Tensor, Tensor])

#: Ancestors of a row that reads every row up to itself.
CAUSAL = np.uint64(0xFFFFFFFFFFFFFFFF)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; the mean square is fp32 (arXiv 1910.07467)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / deviation * weight + bias over the last dimension."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn dimensions i and i + d / 2 of every head: x [rows, heads, d], cos and sin [rows, d / 2], fp32 inside."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of one row and one KV head: q [g, d] reads all of k and v [entries, d]; fp32, gives [g, d]."""
    scores = q.float() @ k.float().T / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ v.float()


def sequence_slots(batch: Batch, s: int, page_size: int) -> NDArray[np.int64]:
    """Physical slots of the committed entries of sequence s, then those of its rows in this pass."""
    entries = np.arange(batch.contexts[s])
    committed = batch.pages[s, entries // page_size].astype(np.int64) * page_size + entries % page_size
    rows = slice(batch.row_starts[s], batch.row_starts[s + 1])
    return np.concatenate([committed, batch.slots[rows].astype(np.int64)])


def visible(batch: Batch, s: int, kv_heads: int, window: int | None, group: int) -> Mask:
    """What each row of sequence s reads: [rows, kv_heads, committed entries + rows], in the order of sequence_slots.

    The window counts positions, the row's own included; committed entry e stands at position e. `group` is the layer's
    group in batch.selection, which narrows the committed entries only: rows of this pass are always read.
    """
    context, among = int(batch.contexts[s]), _among_rows(batch, s)
    reads = np.concatenate([np.ones((len(among), context), dtype=bool), among], axis=1)
    if window is not None:
        own = batch.positions[batch.row_starts[s] : batch.row_starts[s + 1]]
        positions = np.concatenate([np.arange(context), own])
        reads &= positions[None, :] > own[:, None] - window
    reads = np.repeat(reads[:, None, :], kv_heads, axis=1)
    reads[:, :, :context] &= _selected(batch, s, kv_heads, group, context)
    return reads


def _among_rows(batch: Batch, s: int) -> Mask:
    """Which rows of sequence s read which of its rows in this pass: [rows, rows], none later, each itself."""
    start, stop = int(batch.row_starts[s]), int(batch.row_starts[s + 1])
    causal = np.tri(stop - start, dtype=bool)
    if batch.ancestors is None:
        return causal
    masks = batch.ancestors[start:stop, None]
    named = np.zeros_like(causal)
    width = min(stop - start, 64)
    named[:, :width] = (masks >> np.arange(width, dtype=np.uint64)) & np.uint64(1)
    return causal & ((masks == CAUSAL) | named | np.eye(stop - start, dtype=bool))


def _selected(batch: Batch, s: int, kv_heads: int, group: int, context: int) -> Mask:
    """Committed entries that each KV head may read: [kv_heads, context]."""
    chosen = np.ones((kv_heads, context), dtype=bool)
    if batch.selection is None:
        return chosen
    for head in range(kv_heads):
        count = int(batch.selection.counts[group, s, head])
        if count >= 0:
            chosen[head] = False
            chosen[head, batch.selection.entries[group, s, head, :count]] = True
    return chosen


class Rows(Protocol):
    """How the rows of one pass are combined."""

    def map(self, function: Callable[..., Out], *rows: Tensor) -> Out:
        """function over tensors whose first dimension is rows; it returns one tensor or three, rows first."""
        ...

    def place(self, reads: Mask, device: torch.device) -> Tensor:
        """What `visible` gave, once per pass, in the form that `attention` takes: bool [rows, kv_heads, entries]."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, reads: Tensor) -> Tensor:
        """Attention of one sequence: q [rows, heads, d], k and v [entries, kv_heads, d], reads as from `place`.

        Query head i belongs to KV head i // (heads / kv_heads). Gives [rows, heads, d] in q's type.
        """
        ...


class RowByRow:
    """Every row alone. Copies give each call the same alignment, hence the same instructions in the same order."""

    def map(self, function: Callable[..., Out], *rows: Tensor) -> Out:
        if not len(rows[0]):
            return function(*rows)
        results = [function(*(tensor[i : i + 1].clone() for tensor in rows)) for i in range(len(rows[0]))]
        return _stack(results)

    def place(self, reads: Mask, device: torch.device) -> Tensor:
        return torch.from_numpy(reads)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, reads: Tensor) -> Tensor:
        kv_heads = k.shape[1]
        grouped = q.view(len(q), kv_heads, -1, q.shape[-1])
        out = torch.empty_like(grouped)
        for row in range(len(q)):
            for head in range(kv_heads):
                entries = reads[row, head].nonzero().flatten()
                out[row, head] = attend(grouped[row, head].clone(), k[entries, head], v[entries, head])
        return out.view(q.shape)


class AllRows:
    """All rows in one product: fast on an accelerator, and only nearly the same from one batch to another."""

    def map(self, function: Callable[..., Out], *rows: Tensor) -> Out:
        return function(*rows)

    def place(self, reads: Mask, device: torch.device) -> Tensor:
        return torch.from_numpy(reads).to(device)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, reads: Tensor) -> Tensor:
        mask = reads.transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], dim=0)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None], enable_gqa=True)
        return out[0].transpose(0, 1)


def _stack(results: Sequence[Out]) -> Out:
    """One result per row, joined along the rows."""
    if isinstance(results[0], Tensor):
        return torch.cat(list(results))  # type: ignore[arg-type]
    first, second, third = (torch.cat(column) for column in zip(*results, strict=True))
    return first, second, third
