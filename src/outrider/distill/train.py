"""The training loop. An update depends on the settings and its number alone, so a killed run ends as it would have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from outrider.distill.batches import plan_epoch
from outrider.distill.checkpoint import Progress, load_checkpoint, save_checkpoint
from outrider.distill.options import DistillOptions
from outrider.distill.shards import Entry
from outrider.distill.task import Task
from outrider.errors import ModelError

LOG_EVERY = 20  # updates per point of the curves
TRIAL = 3  # updates that are timed to plan a run by minutes

#: Called with the number of updates done, of all, and the latest figures.
Watch = Callable[[int, int, dict[str, Any]], None]


@dataclass
class Trainer:
    """One training run over captured answers; the module is changed in place."""

    task: Task
    entries: Sequence[Entry]
    options: DistillOptions

    def run(self, folder: Path, plan: dict[str, Any], watch: Watch) -> Progress:
        """Train to the end, from the last checkpoint in `folder` where there is one."""
        optimizer = self._optimizer()
        progress = load_checkpoint(folder, self.task.module, optimizer, plan) or Progress()
        progress.updates = progress.updates or progress.step + self._count_updates(progress.step)
        recent: list[dict[str, float]] = []
        self.task.module.train()
        for entries in self._batches(progress.step):
            if progress.step >= progress.updates:
                break
            recent.append(self._update(optimizer, entries, progress.step, progress.updates))
            progress.step += 1
            if progress.step % LOG_EVERY == 0 or progress.step == progress.updates:
                progress.history.append({"update": progress.step, **_mean(recent)})
                recent = []
                watch(progress.step, progress.updates, progress.history[-1])
            if progress.step % self._checkpoint_every == 0 or progress.step == progress.updates:
                save_checkpoint(folder, self.task.module, optimizer, progress, plan)
        self.task.module.eval()
        return progress

    @property
    def _checkpoint_every(self) -> int:
        """A multiple of LOG_EVERY, so that no point of the curves is averaged over two runs."""
        return -(-self.options.checkpoint_every // LOG_EVERY) * LOG_EVERY

    def _update(self, optimizer: torch.optim.AdamW, entries: Sequence[Entry], step: int, updates: int) -> dict:
        """One batch, one step of the optimiser."""
        options = self.options
        torch.manual_seed(options.seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * learning_rate(options, step, updates)
        loss = self.task.loss(entries, self._steps_at(step, updates))
        if not math.isfinite(float(loss.total.detach())):
            raise ModelError(f"the loss is {float(loss.total)} at update {step}; lower lr or check the data")
        optimizer.zero_grad(set_to_none=True)
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(self.task.module.parameters(), options.clip)
        optimizer.step()
        return {
            "loss": float(loss.total.detach()),
            "kl": loss.kl,
            "attention": loss.attention,
            **{f"right_{i}": value for i, value in enumerate(loss.right)},
        }

    def _steps_at(self, step: int, updates: int) -> int:
        return 1 if step < self.options.unroll_from * updates else self.options.unroll

    def _batches(self, skip: int) -> Iterator[list[Entry]]:
        """Batches of all epochs from update `skip` on, without end."""
        epoch = 0
        while True:
            batches = plan_epoch(self.entries, self.options.tokens_per_update, self.options.seed, epoch)
            yield from batches[skip:]
            skip = max(0, skip - len(batches))
            epoch += 1

    def _optimizer(self) -> torch.optim.AdamW:
        slow = list(self.task.slow())
        known = {id(parameter) for parameter in slow}
        body = [p for p in self.task.module.parameters() if p.requires_grad and id(p) not in known]
        groups = [{"params": body, "factor": 1.0}, {"params": slow, "factor": self.options.lm_head_lr}]
        decay = self.options.weight_decay
        return torch.optim.AdamW(groups, lr=self.options.lr, betas=(0.9, 0.95), weight_decay=decay, fused=True)

    def _count_updates(self, done: int) -> int:
        """Updates still to make: up to so many epochs, or fewer where the minutes do not last."""
        per_epoch = len(plan_epoch(self.entries, self.options.tokens_per_update, self.options.seed, 0))
        updates = max(1, round(self.options.epochs * per_epoch) - done)
        if self.options.minutes is None:
            return updates
        share = self.options.unroll_from
        seconds = share * self._time_update(1) + (1 - share) * self._time_update(self.options.unroll)
        return max(1, min(updates, int(60 * self.options.minutes / seconds)))

    def _time_update(self, steps: int) -> float:
        """Seconds of one update, tried on a copy."""
        batches = plan_epoch(self.entries, self.options.tokens_per_update, self.options.seed, 0)[: TRIAL + 1]
        trial = Trainer(self.task.copy(), self.entries, self.options)
        trial.task.module.train()
        optimizer = trial._optimizer()
        started = perf_counter()
        for number, entries in enumerate(batches):
            if number == 1:
                started = perf_counter()  # the first one is slower than the others
            trial._update(optimizer, entries, step=0 if steps == 1 else 1, updates=1)
        return (perf_counter() - started) / max(1, len(batches) - 1)


def learning_rate(options: DistillOptions, step: int, updates: int) -> float:
    """Linear warm-up, then a cosine down to `final_lr` of the highest."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, updates - options.warmup)
    return options.lr * (options.final_lr + (1 - options.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def _mean(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each figure over the records that have it, to five digits."""
    names = dict.fromkeys(name for record in records for name in record)
    values = {name: [record[name] for record in records if name in record] for name in names}
    return {name: round(sum(v) / len(v), 5) for name, v in values.items()}
