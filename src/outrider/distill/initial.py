"""A head before its first update: what it can borrow from the target, it borrows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.distill.batches import Scale
from outrider.distill.teacher import Teacher
from outrider.models.eagle3 import Eagle3Head, Eagle3Spec


def new_head(spec: Eagle3Spec, kept: Sequence[int], teacher: Teacher, seed: int) -> Eagle3Head:
    """`fc` passes the last tap on unchanged, the LM head is the target's rows; the rest is small and random.

    It expects states that Scale has brought to a common size, until `fold_scale`.
    """
    torch.manual_seed(seed)
    head = Eagle3Head(spec, kept)
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -spec.hidden_size :] = torch.eye(spec.hidden_size)
        head.midlayer.self_attn.o_proj.weight.mul_(0.1)
        head.midlayer.mlp.down_proj.weight.mul_(0.1)
        head.lm_head.weight.copy_(teacher.rows)
    return head


def fold_scale(head: Eagle3Head, scale: Scale) -> None:
    """Let `fc` take the target's states as they are."""
    _multiply(head, [1 / size for size in scale.rms])


def unfold_scale(head: Eagle3Head, scale: Scale) -> None:
    """Let `fc` take scaled states again, to train a finished head further."""
    _multiply(head, scale.rms)


def _multiply(head: Eagle3Head, factors: Sequence[float]) -> None:
    with torch.no_grad():
        for block, factor in zip(head.fc.weight.split(head.spec.hidden_size, dim=1), factors, strict=True):
            block.mul_(factor)
