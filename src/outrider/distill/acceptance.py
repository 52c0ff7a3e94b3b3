"""What a drafter would have accepted: its chains over known greedy answers, counted as the engine counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.distill.shards import Answers, Entry
from outrider.distill.task import Task

RESAMPLES = 1000  # of the confidence interval


@dataclass
class Tally:
    """Drafts of some prompts. Acceptance length = 1 + accepted / drafts."""

    per_prompt: list[tuple[int, int]] = field(default_factory=list)  # (drafts, accepted tokens)
    positions: list[int] = field(default_factory=list)  # drafts whose i-th token was accepted

    def add(self, accepted: Sequence[int]) -> None:
        """Count one prompt: the accepted tokens of each of its drafts."""
        deepest = max(accepted, default=0)
        self.count(len(accepted), [sum(count > position for count in accepted) for position in range(deepest)])

    def count(self, drafts: int, positions: Sequence[int]) -> None:
        """Count one prompt: its drafts, and how many of them had their i-th token accepted."""
        self.per_prompt.append((drafts, sum(positions)))
        self.positions += [0] * (len(positions) - len(self.positions))
        for position, accepted in enumerate(positions):
            self.positions[position] += accepted

    @property
    def drafts(self) -> int:
        """Drafts over all prompts."""
        return sum(drafts for drafts, _ in self.per_prompt)

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification."""
        return 1 + sum(accepted for _, accepted in self.per_prompt) / max(1, self.drafts)

    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the acceptance length, by resampling prompts."""
        counts = np.array(self.per_prompt)
        picks = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
        sums = counts[picks].sum(axis=1)
        low, high = np.percentile(1 + sums[:, 1] / np.maximum(1, sums[:, 0]), (2.5, 97.5))
        return float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `conditional` is the acceptance of a position given that it was reached."""
        reached = [self.drafts, *self.positions]
        return {
            "prompts": len(self.per_prompt),
            "drafts": self.drafts,
            "acceptance_length": round(self.acceptance_length, 4),
            "interval": [round(bound, 4) for bound in self.interval()],
            "per_position": [round(count / max(1, self.drafts), 4) for count in self.positions],
            "conditional": [round(b / max(1, a), 4) for a, b in zip(reached, self.positions, strict=False)],
        }


def simulate(
    task: Task,
    answers: Answers,
    entries: Sequence[Entry],
    eos: Sequence[int],
    depth: int = 4,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Tally]:
    """Tallies by domain, and of "all", of greedy chains of `depth` tokens over captured answers.

    Before the last token of an answer that was cut by its length the engine does not draft; one that ended by itself,
    with a token of `eos`, it does not know to end.
    """
    tallies: dict[str, Tally] = {}
    for number, entry in enumerate(entries, start=1):
        ended = int(answers.tokens(entry)[-1]) in eos
        right = task.right(entry, depth)
        accepted = walk(right if ended else right[:, :-1])
        for name in (entry.domain, "all"):
            tallies.setdefault(name, Tally()).add(accepted)
        report(number, len(entries))
    return tallies


def walk(right: np.ndarray) -> list[int]:
    """Accepted tokens of each draft: a draft begins behind the last one's accepted tokens and the target's own."""
    depth, rows = right.shape
    accepted, row = [], 0
    while row < rows:
        count = 0
        while count < min(depth, rows - row) and right[count, row + count]:
            count += 1
        accepted.append(count)
        row += count + 1
    return accepted


def summary(tallies: dict[str, Tally]) -> dict[str, Any]:
    """JSON-ready, "all" last."""
    return {name: tallies[name].to_dict() for name in sorted(tallies, key=lambda name: (name == "all", name))}
