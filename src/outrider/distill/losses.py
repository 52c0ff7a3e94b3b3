"""What a head is trained to minimise: distance to the target's distribution, and to where the target looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.distill.batches import TrainBatch
from outrider.distill.teacher import Teacher
from outrider.distill.unroll import unroll
from outrider.models.eagle3 import Eagle3Head


@dataclass(frozen=True)
class Losses:
    """One batch: what to minimise, and figures to look at."""

    total: Tensor
    kl: float  # nats per token of step 0
    attention: float  # L_attn, 0 where it is off
    right: list[float]  # share of the rows whose token is drafted right, per step


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) in nats, [rows]."""
    return divergence(Told.of(p_logits), q_logits)


@dataclass(frozen=True)
class Told:
    """What the target says: p [..., vocabulary] in fp32, and the sum of p log p [...], which no training changes."""

    p: Tensor
    negative_entropy: Tensor

    @classmethod
    def of(cls, p_logits: Tensor) -> Told:
        """From the target's logits."""
        log_p = torch.log_softmax(p_logits.float(), dim=-1)
        p = log_p.exp()
        return cls(p, (p * log_p).sum(-1))


def divergence(told: Told, q_logits: Tensor) -> Tensor:
    """KL(p || q) in nats, [...]; only the logits of q learn."""
    return told.negative_entropy + _CrossEntropy.apply(told.p, q_logits)


class _CrossEntropy(torch.autograd.Function):
    """-sum p log q of rows. Its gradient is q - p, which costs one pass where autograd would take seven."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, q_logits: Tensor) -> Tensor:
        normaliser = torch.logsumexp(q_logits.float(), dim=-1)
        ctx.save_for_backward(p, q_logits, normaliser)
        return normaliser - torch.linalg.vecdot(p, q_logits.float())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        p, q_logits, normaliser = ctx.saved_tensors
        q = torch.exp(q_logits.float() - normaliser[..., None])
        return None, (q.sub_(p).mul_(grads[0][..., None])).to(q_logits.dtype)


def attention_alignment(weights: Tensor, looked_at: Tensor) -> Tensor:
    """L_attn: minus the head's attention on the positions the target looks at, a mean in [-1, 0].

    weights: [B, heads, A, entries] of the head; looked_at: bool [B, target's KV heads, A, entries]. Heads are matched
    group by group where their numbers allow it; otherwise every head is asked for the union.
    """
    kv_heads, heads = looked_at.shape[1], weights.shape[1]
    wanted = looked_at if heads % kv_heads == 0 else looked_at.any(1, keepdim=True)
    wanted = wanted.repeat_interleave(heads // wanted.shape[1], dim=1)
    told = wanted.any(-1)
    captured = (weights * wanted).sum(-1)
    return -(captured * told).sum() / told.sum().clamp_min(1)


def losses(
    head: Eagle3Head,
    batch: TrainBatch,
    teacher: Teacher,
    *,
    steps: int,
    step_decay: float,
    dropout: float = 0.0,
    l_attn: float = 0.0,
    looked_at: Tensor | None = None,
    precision: torch.dtype = torch.float32,
) -> Losses:
    """All losses of one batch. Rows whose token the head cannot draft teach nothing.

    precision: of the head's products; what the target says, sums and softmaxes are in fp32.
    """
    with torch.no_grad():
        told = Told.of(teacher.logits(batch.teacher))
    known = head.t2d[batch.targets]
    steps_taken = unroll(head, batch, teacher.embedding, steps, dropout, want_weights=looked_at is not None)
    divergences, right = [], []
    aligned = torch.zeros((), device=known.device)
    with torch.autocast(known.device.type, precision, enabled=precision != torch.float32):
        for step, real in steps_taken:
            rows = real & known
            divergences.append((divergence(told, step.logits) * rows).sum() / rows.sum().clamp_min(1))
            right.append(share_right(head, step.logits, batch.targets, real))
            if looked_at is not None and step.weights is not None:
                aligned = attention_alignment(step.weights, looked_at)
    weighted = sum(step_decay**i * each for i, each in enumerate(divergences))
    return Losses(weighted + l_attn * aligned, float(divergences[0].detach()), float(aligned.detach()), right)


def share_right(head: Eagle3Head, logits: Tensor, targets: Tensor, real: Tensor) -> float:
    """Share of the real rows whose best token is the target's; tokens that cannot be drafted count as wrong."""
    drafted = head.target_ids(logits.detach().argmax(-1))
    return float(((drafted == targets) & real).sum() / real.sum().clamp_min(1))
