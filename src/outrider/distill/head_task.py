"""Training an EAGLE-3 head."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from outrider.distill.batches import Scale, TrainBatch, make_batch
from outrider.distill.export import export_head, size_of
from outrider.distill.initial import new_head, unfold_scale
from outrider.distill.losses import Losses, losses
from outrider.distill.options import DistillOptions, Precision
from outrider.distill.shape import draft_weights, head_spec, head_taps, target_weights
from outrider.distill.shards import Answers, Entry
from outrider.distill.teacher import Teacher, TeacherAttention
from outrider.distill.unroll import unroll
from outrider.distill.vocabulary import choose_vocabulary
from outrider.errors import ConfigError
from outrider.models.eagle3 import Eagle3Head
from outrider.models.eagle3_files import load_head
from outrider.models.load import LoadedModel
from outrider.models.spec import DecoderSpec


@dataclass
class HeadTask:
    """A head, its teacher and its data."""

    module: Eagle3Head
    teacher: Teacher
    attention: TeacherAttention | None  # None: no attention alignment
    answers: Answers
    scale: Scale
    options: DistillOptions
    target: DecoderSpec
    device: torch.device

    @classmethod
    def start(
        cls,
        loaded: LoadedModel,
        answers: Answers,
        entries: Sequence[Entry],
        options: DistillOptions,
        device: torch.device,
    ) -> HeadTask:
        """A new head, or a finished one that is trained further."""
        taps = head_taps(loaded.spec, options)
        scale = Scale.measure(answers, entries, len(taps), options.clamp)
        if options.init:
            head = _finished(options.init, loaded.spec, taps)
            unfold_scale(head, scale)
            teacher = Teacher(loaded, kept_by(head), device)
        else:
            spec = head_spec(loaded.spec, options)
            kept = choose_vocabulary(answers, spec.draft_vocab_size, spec.vocab_size)
            teacher = Teacher(loaded, kept, device)
            head = new_head(spec, kept, teacher, options.seed)
        attention = TeacherAttention(loaded, taps, options.l_attn_top, device) if options.l_attn else None
        return cls(head.to(device), teacher, attention, answers, scale, options, loaded.spec, device)

    def copy(self) -> HeadTask:
        return replace(self, module=copy.deepcopy(self.module))

    def slow(self) -> Sequence[nn.Parameter]:
        return list(self.module.lm_head.parameters())

    def loss(self, entries: Sequence[Entry], steps: int) -> Losses:
        batch = make_batch(self.answers, entries, self.scale).to(self.device)
        return losses(
            self.module,
            batch,
            self.teacher,
            steps=steps,
            step_decay=self.options.step_decay,
            dropout=self.options.dropout,
            l_attn=self.options.l_attn,
            looked_at=None if self.attention is None else self.attention.looked_at(batch, self.scale),
            precision=training_dtype(self.options.precision, self.device),
        )

    @torch.inference_mode()
    def right(self, entry: Entry, depth: int) -> np.ndarray:
        batch = make_batch(self.answers, [entry], self.scale).to(self.device)
        return right_steps(self.module, batch, self.teacher.embedding, depth)

    def export(self, folder: Path) -> None:
        export_head(self.module, self.scale, folder, self.target)

    def drafter(self, folder: Path) -> Mapping[str, Any]:
        return {"name": "head", "path": str(folder)}

    def facts(self) -> dict[str, Any]:
        spec = self.module.spec
        share = draft_weights(spec) / target_weights(self.target)
        return {
            "drafter": "an EAGLE-3 head (one transformer layer), for the `head` drafter",
            "vocabulary": f"{spec.draft_vocab_size} of {spec.vocab_size} tokens",
            "weights of a drafted token over the target's step": f"{share:.1%}",
            "size": f"{size_of(self.module) / 2e6:.1f} MB in bf16",
        }


def training_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The type of products: bf16 where asked for, or where the machine multiplies it faster than fp32."""
    native = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and native) else torch.float32


def right_steps(head: Eagle3Head, batch: TrainBatch, embedding: torch.Tensor, depth: int) -> np.ndarray:
    """Whether step i, at row r, drafts the token that the target said: bool [depth, rows] of one sequence."""
    steps = unroll(head, batch, embedding, depth)
    right = [(head.target_ids(step.logits.argmax(-1)) == batch.targets) & real for step, real in steps]
    return torch.stack(right)[:, 0].cpu().numpy()


def kept_by(head: Eagle3Head) -> list[int]:
    """The target ids that a head drafts."""
    return head.target_ids(torch.arange(head.spec.draft_vocab_size)).tolist()


def _finished(folder: str, target: DecoderSpec, taps: tuple[int, ...]) -> Eagle3Head:
    head = load_head(folder, target)
    if head.spec.taps != taps:
        raise ConfigError(f"{folder} taps the layers {head.spec.taps}, the answers {taps}; use another head", "init")
    return head
