"""The training-time test: a head is fed its own states for some steps, exactly as it will be when it drafts.

Step 0 reads the target's states. In step i the row of slot t reads the head's own state of slot t - 1 from step i - 1;
its keys are those of step 0 up to slot t - i, then one of every step between, then its own. Source: Li et al. 2025,
EAGLE-3, section 3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.distill.batches import TrainBatch
from outrider.models.eagle3 import Eagle3Head, HeadKV, HeadStep


def unroll(
    head: Eagle3Head, batch: TrainBatch, embedding: Tensor, steps: int, dropout: float = 0.0, want_weights: bool = False
) -> Iterator[tuple[HeadStep, Tensor]]:
    """(step, rows of it that are real: bool [B, A]) for each step; attention weights of step 0 where asked for.

    embedding: the target's, [vocabulary, hidden].
    """
    answer = batch.answer
    kv = prompt_entries(head, batch, embedding, dropout)
    states = F.dropout(head.fuse(answer.states), dropout, head.training)
    tokens = F.embedding(answer.next_tokens, embedding)
    for i in range(steps):
        embedded = F.dropout(tokens, dropout, head.training)
        mask = step_mask(batch, i)
        step = head.step(states, embedded, answer.positions, kv, mask, want_weights=want_weights and i == 0)
        yield step, answer.real & (torch.arange(answer.real.shape[1], device=mask.device) >= i)
        kv, states = step.kv, F.pad(step.h[:, :-1], (0, 0, 1, 0))


def prompt_entries(head: Eagle3Head, batch: TrainBatch, embedding: Tensor, dropout: float = 0.0) -> HeadKV | None:
    """Keys and values of the prompt slots; None where no prompt has more than one token."""
    prompt = batch.prompt
    if not prompt.real.shape[1]:
        return None
    states = F.dropout(head.fuse(prompt.states), dropout, head.training)
    return head.prefill(states, F.embedding(prompt.next_tokens, embedding), prompt.positions)


def step_mask(batch: TrainBatch, step: int) -> Tensor:
    """What the rows of one step read: bool [B, 1, A, P + A * (step + 1)]."""
    rows = batch.answer.real.shape[1]
    square = torch.ones(rows, rows, dtype=torch.bool, device=batch.answer.real.device)
    blocks = [square.tril(-step)]
    blocks += [square.tril(j - step).triu(j - step) for j in range(1, step + 1)]
    among = torch.cat(blocks, dim=1).expand(len(batch.answer.real), -1, -1)
    prompt = batch.prompt.real[:, None, :].expand(-1, rows, -1)
    return torch.cat([prompt, among], dim=2)[:, None]
