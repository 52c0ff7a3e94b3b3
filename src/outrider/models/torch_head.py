"""An EAGLE-3 head in PyTorch: the oracle of the compiled one, and what drafts on accelerators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.models.eagle3 import Eagle3Head, HeadKV
from outrider.models.head import Chain, Guess, Job
from outrider.types import Float32


class TorchEntries:
    """Keys and values of one sequence, [1, kv_heads, count, head_dim] each."""

    def __init__(self, kv: HeadKV) -> None:
        self.kv, self.count = kv, kv.k.shape[2]

    @property
    def keys(self) -> Float32:
        return self.kv.k[0].float().cpu().numpy()

    def first(self, count: int) -> TorchEntries:
        return TorchEntries(HeadKV(*(part[:, :, :count].clone() for part in self.kv)))

    def extend(self, new: HeadKV) -> None:
        """Entries behind those that are there."""
        self.kv = HeadKV(*(torch.cat(pair, dim=2) for pair in zip(self.kv, new, strict=True)))
        self.count = self.kv.k.shape[2]


class TorchHead:
    """Runs an Eagle3Head; see HeadBackend for what its methods promise. `embedding` [vocabulary, hidden]."""

    def __init__(self, head: Eagle3Head, embedding: Tensor) -> None:
        self.spec, self.head = head.spec, head
        self.ids = head.target_ids(torch.arange(len(head.d2t), device=head.d2t.device)).cpu().numpy()
        self._embedding = embedding

    def entries(self) -> TorchEntries:
        weight, spec = self.head.fc.weight, self.spec
        shape = (1, spec.num_kv_heads, 0, spec.head_dim)
        return TorchEntries(HeadKV(*(torch.zeros(shape, device=weight.device, dtype=weight.dtype) for _ in range(2))))

    @torch.inference_mode()
    def greedy(self, jobs: Sequence[Job], floor: float) -> list[Guess]:
        for job in jobs:
            if job.depth == 0:
                self.feed(job, len(job.tokens))
        drafting = [job for job in jobs if job.depth > 0]
        guesses = iter(self._greedy(drafting, floor) if drafting else [])
        return [next(guesses) if job.depth > 0 else Guess([], []) for job in jobs]

    @torch.inference_mode()
    def chain(self, jobs: Sequence[Job]) -> Chain:
        return _Chain(self, jobs)

    def feed(self, job: Job, count: int) -> Tensor:
        """Keep the entries of a job's first `count` rows; gives the fused states [rows, hidden] of the others."""
        states = self.head.fuse(self._features(job))
        if count:
            positions = torch.arange(job.first, job.first + count, device=states.device)
            new = self.head.prefill(states[None, :count], self.embed(job.tokens[:count])[None], positions[None])
            job.entries.extend(new)  # type: ignore[attr-defined]
        return states[count:]

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings [tokens, hidden] of the target."""
        index = torch.tensor(list(tokens), dtype=torch.long, device=self._embedding.device)
        return self._embedding[index].to(self.head.fc.weight.dtype)

    def _features(self, job: Job) -> Tensor:
        weight, width = self.head.fc.weight, (len(self.spec.taps), self.spec.hidden_size)
        rows = torch.from_numpy(np.ascontiguousarray(job.features)).to(weight.device, weight.dtype)
        return rows.unflatten(1, width).transpose(0, 1)

    def _greedy(self, jobs: Sequence[Job], floor: float) -> list[Guess]:
        guesses = [Guess([], []) for _ in jobs]
        going, chain = [True] * len(jobs), _Chain(self, jobs)
        for depth in range(max(job.depth for job in jobs)):
            if depth:
                chain.extend([guess.tokens[-1] for guess in guesses])
            p = torch.softmax(torch.from_numpy(chain.logits), dim=-1)
            for row, (guess, job) in enumerate(zip(guesses, jobs, strict=True)):
                if going[row]:
                    best = int(p[row].argmax())
                    guess.confidence.append(float(p[row, best]))
                    guess.tokens.append(int(self.ids[best]))
                    going[row] = guess.confidence[-1] >= floor and depth + 1 < job.depth
            if not any(going):
                break
        return guesses


class _Chain:
    """One padded batch per token: one row of every sequence."""

    def __init__(self, owner: TorchHead, jobs: Sequence[Job]) -> None:
        self._owner = owner
        self._positions = torch.tensor([[job.first + len(job.tokens) - 1] for job in jobs])
        states = torch.stack([owner.feed(job, len(job.tokens) - 1) for job in jobs])
        self._kv, self._valid = _stack([job.entries for job in jobs])  # type: ignore[misc]
        tokens = [job.tokens[-1] for job in jobs]
        self._step(states, tokens)
        for row, job in enumerate(jobs):
            new = HeadKV(*(part[row : row + 1, :, -1:].clone() for part in self._kv))
            job.entries.extend(new)  # type: ignore[attr-defined]

    @property
    def logits(self) -> Float32:
        return self._logits

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int]) -> None:
        self._positions = self._positions + 1
        self._step(self._h, tokens)

    def _step(self, states: Tensor, tokens: Sequence[int]) -> None:
        self._valid = torch.cat([self._valid, torch.ones_like(self._valid[:, :1])], dim=1)
        embeddings = self._owner.embed(tokens)[:, None]
        mask = self._valid[:, None, None]
        step = self._owner.head.step(states, embeddings, self._positions.to(states.device), self._kv, mask)
        self._h, self._kv, self._logits = step.h, step.kv, step.logits[:, 0].float().cpu().numpy()


def _stack(entries: Sequence[TorchEntries]) -> tuple[HeadKV, Tensor]:
    """Entries of several sequences padded at the end, and which of them are real [sequences, entries]."""
    counts = torch.tensor([one.count for one in entries], device=entries[0].kv.k.device)
    most = int(counts.max())
    kv = [
        torch.cat([torch.nn.functional.pad(one.kv[part], (0, 0, 0, most - one.count)) for one in entries])
        for part in range(2)
    ]
    return HeadKV(*kv), torch.arange(most, device=counts.device) < counts[:, None]
