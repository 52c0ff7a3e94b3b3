"""A run from prompts to a head: generate, train, evaluate, export. Each stage goes on where it stopped.

out/prompts are read from --data; out/answers/ holds shards, out/training/ the checkpoint, out/head/ the result,
out/report.html the curves.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from outrider.distill import acceptance
from outrider.distill.checkpoint import NAME as CHECKPOINT
from outrider.distill.data import Prompt, is_held_out, read_prompts
from outrider.distill.export import write_card
from outrider.distill.files import read_json, write_json
from outrider.distill.generate import Report, check_alike, generate
from outrider.distill.head_task import HeadTask
from outrider.distill.measure import measure
from outrider.distill.options import DistillOptions
from outrider.distill.report import write_report
from outrider.distill.shape import head_taps
from outrider.distill.shards import Answers
from outrider.distill.student import check_layers
from outrider.distill.student_task import StudentTask, chosen_layers
from outrider.distill.target import Target, check_supported
from outrider.distill.task import Task
from outrider.distill.train import Trainer
from outrider.errors import ConfigError
from outrider.models.build import Backend
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
    also: tuple[Path, ...] = ()  # other runs whose answers are trained on too

    def all(self) -> Result:
        """Every stage."""
        self.answer()
        return self.train()

    def answer(self) -> None:
        """The target answers the prompts, as many as it has time for.

        Where training has begun there are enough: more answers would make its checkpoint one of another run.
        """
        check_supported(self.loaded)
        prompts = read_prompts(self.data)
        self._check(prompts)
        target = Target(
            self.loaded,
            (*head_taps(self.loaded.spec, self.options), self.loaded.spec.num_layers - 1),
            batch=self.options.batch,
            max_model_len=self.options.max_prompt + self.options.max_tokens,
            backend=self.backend,
            device=self.device,
            threads=self.threads,
        )
        enough = any((self.out / "training").glob(f"*/{CHECKPOINT}"))
        generate(target, prompts, self.options, self.out / "answers", self.report, enough)

    def _check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse before hours of answering what would only be noticed behind them."""
        kept = sum(is_held_out(prompt, self.options.holdout) for prompt in prompts)
        if kept in (0, len(prompts)):
            raise ConfigError(
                f"{kept} of {len(prompts)} prompts are kept for evaluation (one in {self.options.holdout}, by the hash "
                "of its text), so nothing could be trained or nothing evaluated; give more prompts or another holdout",
                "holdout",
            )
        if self.options.kind != "head":
            check_layers(self.loaded, chosen_layers(self.loaded.spec.num_layers, self.options))

    def train(self) -> Result:
        """Train on the captured answers, evaluate, export."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        started = perf_counter()
        answers = self._answers()
        entries = [e for e in answers.training() if self.options.domain in ("all", e.domain)]
        if not entries:
            raise ConfigError(f"no captured answer is of the domain {self.options.domain!r}", "domain")
        start = HeadTask.start if self.options.kind == "head" else StudentTask.start
        task: Task = start(self.loaded, answers, entries, self.options, torch.device(self.device))
        progress = Trainer(task, entries, self.options).run(
            self._training, self._plan(answers), lambda done, total, _: self.report("training", done, total)
        )
        scores = self._evaluate(task, answers)
        tokens = sum(entry.length - entry.prompt_length for entry in entries)
        facts = self._facts(task, len(entries), tokens, progress.updates, perf_counter() - started)
        self._publish(facts, scores, progress.history)
        return Result(self.head_folder, scores, progress.history)

    def _answers(self) -> Answers:
        """This run's own, and those of the runs beside it."""
        own, others = self.out / "answers", [run / "answers" for run in self.also]
        for other in others:
            check_alike(own, other)
        return Answers(own, *others)

    def _evaluate(self, task: Task, answers: Answers) -> dict[str, Any]:
        """Acceptance on held-out prompts: over their captured answers, and of some of them in the engine."""
        held_out = answers.held_out(self.options.eval_prompts)
        if not held_out:
            raise ConfigError("no prompt was held out for evaluation; give more prompts or lower holdout", "holdout")
        eos, report = self.loaded.spec.eos_token_ids, lambda done, total: self.report("evaluating", done, total)
        tallies = acceptance.simulate(task, answers, held_out, eos, DEPTH, report)
        task.export(self.head_folder)
        keys = {entry.key for entry in answers.held_out(self.options.engine_prompts)}
        prompts = [prompt for prompt in read_prompts(self.data) if prompt.key in keys]
        if prompts:
            tallies["engine"] = self.measure(task.drafter(self.head_folder), prompts)["all"]
        return acceptance.summary(tallies)

    def measure(self, drafter: Mapping[str, Any], prompts: Sequence[Prompt]) -> dict[str, acceptance.Tally]:
        """Acceptance of an exported drafter while the engine answers prompts."""
        return measure(
            self.loaded,
            [drafter],
            prompts,
            depth=DEPTH,
            max_tokens=self.options.max_tokens,
            max_model_len=min(self.options.max_prompt + self.options.max_tokens, self.loaded.spec.max_positions),
            backend=self.backend,
            device=self.device,
            threads=self.threads,
        )

    @property
    def name(self) -> str:
        """A generalist or a specialist, of its kind."""
        name = "generalist" if self.options.domain == "all" else self.options.domain
        return name if self.options.kind == "head" else f"{self.options.kind}-{name}"

    @property
    def head_folder(self) -> Path:
        """Where the drafter is exported to."""
        return self.out / "heads" / self.name

    @property
    def _training(self) -> Path:
        return self.out / "training" / self.name

    def _plan(self, answers: Answers) -> dict[str, Any]:
        """What a checkpoint belongs to: the settings and the shards."""
        shards = [path.with_name(path.name + ".sha256").read_text(encoding="ascii")[:16] for path in answers.paths]
        return {**self.options.to_dict(), "shards": shards}

    def _facts(self, task: Task, answers: int, tokens: int, updates: int, seconds: float) -> dict[str, Any]:
        earlier = read_json(self._training / "time.json") or {"minutes": 0.0}
        minutes = round(earlier["minutes"] + seconds / 60, 1)
        write_json(self._training / "time.json", {"minutes": minutes})
        return {
            "target": self.loaded.name,
            "data": f"{answers} answers of the target ({tokens} tokens) to {self.data.name}",
            "command": shlex.join(["outrider", *sys.argv[1:]]) if sys.argv[1:2] == ["distill"] else "see the recipe",
            "seed": self.options.seed,
            "training": f"{updates} updates, {minutes} minutes on {self.device}, {torch.get_num_threads()} threads",
            **task.facts(),
            "licence": "Apache-2.0; the target's licence applies to what was learned from it",
        }

    def _publish(self, facts: dict, scores: dict, history: list[dict]) -> None:
        """The card and the summary page."""
        title = f"{self.loaded.name}: {self.name}"
        settings = {**self.options.to_dict(), "init": Path(self.options.init).name}  # where it lay is nobody's business
        write_card(self.head_folder, title, facts, scores, settings)
        write_json(self.head_folder / "acceptance.json", scores)
        write_report(self.out / f"report-{self.name}.html", title, facts, history, scores)
