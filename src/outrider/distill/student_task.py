"""Training a small decoder, or an early exit, on the target's distribution."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.distill.losses import Losses, kl_divergence
from outrider.distill.options import DistillOptions
from outrider.distill.shape import target_weights
from outrider.distill.shards import Answers, Entry
from outrider.distill.student import Student, new_student
from outrider.distill.student_files import export_student
from outrider.distill.teacher import Teacher
from outrider.models.load import LoadedModel


@dataclass
class StudentTask:
    """A student, its teacher and its data."""

    module: Student
    teacher: Teacher
    answers: Answers
    options: DistillOptions
    loaded: LoadedModel
    device: torch.device

    @classmethod
    def start(
        cls,
        loaded: LoadedModel,
        answers: Answers,
        entries: Sequence[Entry],
        options: DistillOptions,
        device: torch.device,
    ) -> StudentTask:
        """A student of the layers that the options ask for."""
        exit_only = options.kind == "early-exit"
        layers = chosen_layers(loaded.spec.num_layers, options)
        student = new_student(loaded, layers, 1.0 if exit_only else options.mlp_share, exit_only, options.seed)
        teacher = Teacher(loaded, range(loaded.spec.vocab_size), device)
        return cls(student.to(device), teacher, answers, options, loaded, device)

    def copy(self) -> StudentTask:
        return replace(self, module=copy.deepcopy(self.module))

    def slow(self) -> Sequence[nn.Parameter]:
        return ()

    def loss(self, entries: Sequence[Entry], steps: int) -> Losses:
        """KL of the target from the student at every row; a student always reads the true tokens, so steps are one."""
        hidden, teacher, targets = self._rows(entries, self.options.dropout)
        logits = F.linear(hidden, self.teacher.rows)
        with torch.no_grad():
            p_logits = self.teacher.logits(teacher)
        divergence = kl_divergence(p_logits, logits).mean()
        right = float((logits.detach().argmax(-1) == targets).float().mean())
        return Losses(divergence, float(divergence.detach()), 0.0, [right])

    @torch.inference_mode()
    def right(self, entry: Entry, depth: int) -> np.ndarray:
        hidden, _, targets = self._rows([entry], 0.0)
        right = F.linear(hidden, self.teacher.rows).argmax(-1) == targets
        return right.cpu().numpy()[None].repeat(depth, axis=0)

    def export(self, folder: Path) -> None:
        export_student(self.module, self.loaded, self.teacher.embedding, self.teacher.rows, folder)

    def drafter(self, folder: Path) -> Mapping[str, Any]:
        return {"name": "model", "path": str(folder)}

    def facts(self) -> dict[str, Any]:
        share = target_weights(self.module.spec) / target_weights(self.loaded.spec)
        layers = list(chosen_layers(self.loaded.spec.num_layers, self.options))
        return {
            "drafter": f"a decoder of the target's layers {layers}, for the `model` drafter",
            "weights of a drafted token over the target's step": f"{share:.1%}",
        }

    def _rows(self, entries: Sequence[Entry], dropout: float) -> tuple[Tensor, Tensor, Tensor]:
        """What the student says, the target's last states and the next tokens, at all rows of some sequences, flat."""
        texts = [self.answers.tokens(entry)[:-1] for entry in entries]
        tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True).to(self.device)
        hidden = self.module(tokens, self.teacher.embedding, dropout)
        rows = [hidden[i, entry.prompt_length : entry.length - 1] for i, entry in enumerate(entries)]
        states = [self.answers.states(entry)[-1, entry.prompt_length :] for entry in entries]
        following = [self.answers.tokens(entry)[entry.prompt_length + 1 :] for entry in entries]
        return torch.cat(rows), torch.cat(states).to(self.device), torch.cat(following).to(self.device)


def chosen_layers(num_layers: int, options: DistillOptions) -> tuple[int, ...]:
    """The target's layers that a student is made of: as given, else a third for an exit and a fifth for a model."""
    if options.layers:
        return options.layers
    if options.kind == "early-exit":
        return tuple(range(max(1, num_layers // 3)))
    count = max(2, num_layers // 5)
    return tuple(sorted({round(i * (num_layers - 1) / (count - 1)) for i in range(count)}))
