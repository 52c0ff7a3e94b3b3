"""Sequences side by side, aligned where their answers begin: prompts end at one column, answers start at the next.

A slot t holds the target's states at token t and stands for token t + 1; its logits are of token t + 2. The first
draft follows an answer's first token, so the rows that are trained begin with slot (prompt length - 1); the slots
before it are only ever attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from outrider.distill.shards import Answers, Entry

SAMPLE = 24  # sequences from which the scale of each layer is measured
BUCKET = 24  # batches whose sequences are sorted by length together


@dataclass(frozen=True)
class Block:
    """Slots of B sequences: states of the taps [taps, B, C, hidden], the token one ahead [B, C], positions [B, C]."""

    states: Tensor
    next_tokens: Tensor
    positions: Tensor
    real: Tensor  # bool [B, C]: False where a shorter sequence was padded


@dataclass(frozen=True)
class TrainBatch:
    """Prompt slots (padded on the left), answer slots (padded on the right) and what the target said at the latter."""

    prompt: Block
    answer: Block
    teacher: Tensor  # [B, A, hidden]: the target's last hidden state at the token one ahead
    targets: Tensor  # [B, A]: the token two ahead

    def to(self, device: torch.device) -> TrainBatch:
        """The same on a device."""
        if device.type == "cpu":
            return self
        return TrainBatch(
            _moved(self.prompt, device), _moved(self.answer, device), self.teacher.to(device), self.targets.to(device)
        )


class Scale:
    """Brings the tapped states to a common size: each tap by its own RMS, and the few huge ones (first tokens) down.

    A token's states are scaled down together, which the head's norm cannot see: what it attends to stays the same.
    """

    def __init__(self, rms: Sequence[float], clamp: float) -> None:
        self.rms, self.clamp = list(rms), clamp
        self._divisor = torch.tensor(self.rms).view(-1, 1, 1)

    @classmethod
    def measure(cls, answers: Answers, entries: Sequence[Entry], taps: int, clamp: float) -> Scale:
        """Median over tokens of each tap's RMS, from the first sequences."""
        sizes = [answers.states(entry)[:taps].square().mean(-1).sqrt() for entry in entries[:SAMPLE]]
        return cls(torch.cat(sizes, dim=1).median(dim=1).values.clamp_min(1e-6).tolist(), clamp)

    def apply(self, states: Tensor) -> Tensor:
        """Scaled states [taps, tokens, hidden]."""
        scaled = states / self._divisor
        largest = scaled.square().mean(-1).sqrt().amax(0)
        return scaled * (self.clamp / largest).clamp(max=1.0).view(1, -1, 1)


def plan_epoch(entries: Sequence[Entry], tokens: int, seed: int, epoch: int) -> list[list[Entry]]:
    """One pass over the data as batches of about `tokens` answer slots, each of sequences of about one length."""
    rng = np.random.default_rng((seed, epoch))
    order = [entries[i] for i in rng.permutation(len(entries))]
    mean = sum(entry.rows for entry in entries) / len(entries)
    window = max(1, int(BUCKET * tokens / mean))
    batches: list[list[Entry]] = []
    for start in range(0, len(order), window):
        batches += _pack(sorted(order[start : start + window], key=lambda entry: entry.rows), tokens)
    return [batches[i] for i in rng.permutation(len(batches))]


def make_batch(answers: Answers, entries: Sequence[Entry], scale: Scale) -> TrainBatch:
    """Read sequences and lay them out."""
    taps = len(scale.rms)
    prompts, rows, teachers, targets = [], [], [], []
    for entry in entries:
        tokens, states = answers.tokens(entry), answers.states(entry)
        first, last = entry.prompt_length - 1, entry.length - 2
        scaled = scale.apply(states[:taps])
        prompts.append((scaled[:, :first], tokens[1 : first + 1], torch.arange(first)))
        rows.append((scaled[:, first:last], tokens[first + 1 : last + 1], torch.arange(first, last)))
        teachers.append(states[-1, first + 1 : last + 1])
        targets.append(tokens[first + 2 : last + 2])
    return TrainBatch(
        _block(prompts, left=True),
        _block(rows, left=False),
        _padded([t[None] for t in teachers], left=False)[0],
        torch.stack([_pad(t, max(map(len, targets)), left=False) for t in targets]),
    )


def _pack(entries: Sequence[Entry], tokens: int) -> list[list[Entry]]:
    """Neighbours together while their padded size stays within `tokens`."""
    batches: list[list[Entry]] = []
    for entry in entries:
        if batches and entry.rows * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(entry)
        else:
            batches.append([entry])
    return batches


def _block(parts: Sequence[tuple[Tensor, Tensor, Tensor]], left: bool) -> Block:
    width = max(len(tokens) for _, tokens, _ in parts)
    return Block(
        _padded([states for states, _, _ in parts], left),
        torch.stack([_pad(tokens, width, left) for _, tokens, _ in parts]),
        torch.stack([_pad(positions, width, left) for _, _, positions in parts]),
        torch.stack([_pad(torch.ones(len(tokens), dtype=torch.bool), width, left) for _, tokens, _ in parts]),
    )


def _padded(states: Sequence[Tensor], left: bool) -> Tensor:
    """[taps, B, C, hidden] of states [taps, tokens, hidden]."""
    width = max(part.shape[1] for part in states)
    out = states[0].new_zeros(states[0].shape[0], len(states), width, states[0].shape[2])
    for i, part in enumerate(states):
        count = part.shape[1]
        out[:, i, width - count if left else 0 : width if left else count] = part
    return out


def _pad(values: Tensor, width: int, left: bool) -> Tensor:
    empty = values.new_zeros(width - len(values))
    return torch.cat([empty, values] if left else [values, empty])


def _moved(block: Block, device: torch.device) -> Block:
    return Block(*(getattr(block, field.name).to(device) for field in fields(block)))
