"""A run from prompts to a head: generate, train, evaluate, export. Each stage goes on where it stopped.

out/prompts are read from --data; out/answers/ holds shards, out/training/ the checkpoint, out/head/ the result,
out/report.html the curves.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from outrider.distill import acceptance
from outrider.distill.batches import Scale
from outrider.distill.data import Prompt, read_prompts
from outrider.distill.export import export_head, size_of, write_card
from outrider.distill.files import read_json, write_json
from outrider.distill.generate import Report, generate
from outrider.distill.initial import new_head, unfold_scale
from outrider.distill.measure import measure
from outrider.distill.options import DistillOptions
from outrider.distill.report import write_report
from outrider.distill.shape import draft_weights, head_spec, target_weights
from outrider.distill.shards import Answers
from outrider.distill.target import Target, check_supported
from outrider.distill.teacher import Teacher, TeacherAttention
from outrider.distill.train import Trainer
from outrider.distill.vocabulary import choose_vocabulary
from outrider.errors import ConfigError
from outrider.models.build import Backend
from outrider.models.eagle3 import Eagle3Head, Eagle3Spec, default_taps
from outrider.models.eagle3_files import load_head
from outrider.models.load import LoadedModel

DEPTH = 4  # tokens of the evaluated chains


@dataclass(frozen=True)
class Result:
    """What a run gave."""

    folder: Path  # of the head
    scores: dict[str, Any]  # acceptance by domain
    history: list[dict[str, Any]]


@dataclass
class Run:
    """One distillation run in one folder."""

    loaded: LoadedModel
    data: Path
    out: Path
    options: DistillOptions
    report: Report
    backend: Backend = "auto"
    device: str = "cpu"
    threads: int | None = None

    def all(self) -> Result:
        """Every stage."""
        self.answer()
        return self.train()

    def answer(self) -> None:
        """The target answers the prompts; a folder whose answers were captured before needs no target."""
        check_supported(self.loaded)
        prompts = read_prompts(self.data)
        target = Target(
            self.loaded,
            (*self.taps, self.loaded.spec.num_layers - 1),
            batch=self.options.batch,
            max_model_len=self.options.max_prompt + self.options.max_tokens,
            backend=self.backend,
            device=self.device,
            threads=self.threads,
        )
        generate(target, prompts, self.options, self.out / "answers", self.report)

    def train(self) -> Result:
        """Train on the captured answers, evaluate, export."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        started = perf_counter()
        answers = Answers(self.out / "answers")
        device = torch.device(self.device)
        entries = [e for e in answers.training() if self.options.domain in ("all", e.domain)]
        if not entries:
            raise ConfigError(f"no captured answer is of the domain {self.options.domain!r}", "domain")
        scale = Scale.measure(answers, entries, len(self.taps), self.options.clamp)
        head, teacher = self._start(answers, scale, device)
        trainer = Trainer(
            head.to(device), teacher, self._attention(device), answers, entries, scale, self.options, device
        )
        plan = self._plan(answers, head.spec)
        progress = trainer.run(self._training, plan, lambda done, total, _: self.report("training", done, total))
        scores = self._evaluate(head, teacher, answers, scale)
        tokens = sum(entry.length - entry.prompt_length for entry in entries)
        facts = self._facts(head, len(entries), tokens, progress.updates, perf_counter() - started)
        self._publish(facts, scores, progress.history)
        return Result(self.head_folder, scores, progress.history)

    def _evaluate(self, head: Eagle3Head, teacher: Teacher, answers: Answers, scale: Scale) -> dict[str, Any]:
        """Acceptance on held-out prompts: over their captured answers, and of some of them in the engine."""
        held_out = answers.held_out(self.options.eval_prompts)
        if not held_out:
            raise ConfigError("no prompt was held out for evaluation; give more prompts or lower holdout", "holdout")
        eos, report = self.loaded.spec.eos_token_ids, lambda done, total: self.report("evaluating", done, total)
        tallies = acceptance.simulate(head, teacher.embedding, answers, held_out, scale, eos, DEPTH, report)
        export_head(head, scale, self.head_folder, self.loaded.spec)
        keys = {entry.key for entry in answers.held_out(self.options.engine_prompts)}
        prompts = [prompt for prompt in read_prompts(self.data) if prompt.key in keys]
        if prompts:
            tallies["engine"] = self.measure(prompts)["all"]
        return acceptance.summary(tallies)

    def measure(self, prompts: Sequence[Prompt]) -> dict[str, acceptance.Tally]:
        """Acceptance of the exported head while the engine answers prompts."""
        return measure(
            self.loaded,
            [{"name": "head", "path": str(self.head_folder)}],
            prompts,
            depth=DEPTH,
            max_tokens=self.options.max_tokens,
            max_model_len=min(self.options.max_prompt + self.options.max_tokens, self.loaded.spec.max_positions),
            backend=self.backend,
            device=self.device,
            threads=self.threads,
        )

    @property
    def taps(self) -> tuple[int, ...]:
        return self.options.taps or default_taps(self.loaded.spec.num_layers)

    @property
    def name(self) -> str:
        """A generalist or a specialist."""
        return "generalist" if self.options.domain == "all" else self.options.domain

    @property
    def head_folder(self) -> Path:
        return self.out / "heads" / self.name

    @property
    def _training(self) -> Path:
        return self.out / "training" / self.name

    def _start(self, answers: Answers, scale: Scale, device: torch.device) -> tuple[Eagle3Head, Teacher]:
        """The head to train, new or a finished one, and its teacher."""
        if self.options.init:
            head = load_head(self.options.init, self.loaded.spec)
            if head.spec.taps != self.taps:
                raise ConfigError(
                    f"{self.options.init} taps the layers {head.spec.taps}, the answers {self.taps}", "init"
                )
            unfold_scale(head, scale)
            return head, Teacher(self.loaded, kept_by(head), device)
        spec = head_spec(self.loaded.spec, self.options)
        kept = choose_vocabulary(answers, spec.draft_vocab_size, spec.vocab_size)
        teacher = Teacher(self.loaded, kept, device)
        return new_head(spec, kept, teacher, self.options.seed), teacher

    def _attention(self, device: torch.device) -> TeacherAttention | None:
        if not self.options.l_attn:
            return None
        return TeacherAttention(self.loaded, self.taps, self.options.l_attn_top, device)

    def _plan(self, answers: Answers, spec: Eagle3Spec) -> dict[str, Any]:
        """What a checkpoint belongs to: the settings, the shards and the shape."""
        shards = [path.with_name(path.name + ".sha256").read_text(encoding="ascii")[:16] for path in answers.paths]
        return {**self.options.to_dict(), "shards": shards, "draft_vocab_size": spec.draft_vocab_size}

    def _facts(self, head: Eagle3Head, answers: int, tokens: int, updates: int, seconds: float) -> dict[str, Any]:
        earlier = read_json(self._training / "time.json") or {"minutes": 0.0}
        minutes = round(earlier["minutes"] + seconds / 60, 1)
        write_json(self._training / "time.json", {"minutes": minutes})
        share = draft_weights(head.spec) / target_weights(self.loaded.spec)
        return {
            "target": self.loaded.name,
            "data": f"{answers} answers of the target ({tokens} tokens) to {self.data.name}",
            "command": shlex.join(["outrider", *sys.argv[1:]]) if sys.argv[1:2] == ["distill"] else "see the recipe",
            "seed": self.options.seed,
            "training": f"{updates} updates, {minutes} minutes on {self.device}, {torch.get_num_threads()} threads",
            "vocabulary": f"{head.spec.draft_vocab_size} of {head.spec.vocab_size} tokens",
            "weights of a drafted token over the target's step": f"{share:.1%}",
            "size": f"{size_of(head) / 2e6:.1f} MB in bf16",
            "licence": "Apache-2.0 (the head); the target's licence applies to what was learned from it",
        }

    def _publish(self, facts: dict, scores: dict, history: list[dict]) -> None:
        """The card and the summary page."""
        title = f"{self.loaded.name}, {self.name} head"
        write_card(self.head_folder, title, facts, scores, self.options.to_dict())
        write_json(self.head_folder / "acceptance.json", scores)
        write_report(self.out / f"report-{self.name}.html", title, facts, history, scores)


def kept_by(head: Eagle3Head) -> list[int]:
    """The target ids that a head drafts."""
    return head.target_ids(torch.arange(head.spec.draft_vocab_size)).tolist()
