"""Accuracy at long contexts: suites of cases, asked at several budgets beside full attention, as rows of a record.

    rows = evaluate(make_cases("needle_single", folder, [4096], 2, count), ask, [Reads(512), Reads(1024, "window")])

`ask` answers a case in one way of reading (None: full attention); nothing here knows a model. All ways of a case follow
each other, so that its prompt is computed once. Suites that need public data read it from the folder that --data or
OUTRIDER_DATA names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from outrider.bench.eval_cases import Case, Count, paragraphs, spread
from outrider.bench.eval_measures import agreement
from outrider.bench.eval_needles import needle_late, needle_multi, needle_single, variable_tracking
from outrider.bench.eval_retrieval import key_value_retrieval, multi_document_qa
from outrider.bench.record import note
from outrider.errors import ConfigError

#: Suites, and the file of the data folder that each needs.
SUITES: Mapping[str, str | None] = {
    "needle_single": "war_and_peace.txt",
    "needle_multi": "war_and_peace.txt",
    "needle_late": "war_and_peace.txt",
    "variable_tracking": "war_and_peace.txt",
    "key_value": None,
    "multi_document": "nq_open_oracle.jsonl",
}
NEEDLES, HOPS = 4, 4


class Answer(NamedTuple):
    """What a model said."""

    text: str
    tokens: tuple[int, ...]


class Reads(NamedTuple):
    """What attention reads: `budget` entries per KV head that a selector picks (None: the configured one)."""

    budget: int
    selector: str | None = None

    @property
    def label(self) -> str:
        """As a row of the record names it."""
        return str(self.budget) if self.selector is None else f"{self.selector} {self.budget}"


Ask = Callable[[Case, Reads | None], Answer]


def make_cases(
    suite: str, folder: Path | None, lengths: Sequence[int], per_length: int, count: Count, seed: int = 0
) -> list[Case]:
    """`per_length` cases of one suite at every length, their depths spread over the context."""
    if suite not in SUITES:
        raise ConfigError.unknown(suite, SUITES, "--suite")
    text = _read(folder, SUITES[suite])
    build = _builder(suite, text, count)
    depths = spread(per_length, 0.05, 0.95)
    return [build(length, depth, seed + i) for length in lengths for i, depth in enumerate(depths)]


def evaluate(cases: Sequence[Case], ask: Ask, ways: Sequence[Reads]) -> list[dict[str, Any]]:
    """A row per case and way, the full answer first: its score, and how far the tokens follow the full ones."""
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(cases, 1):
        full = ask(case, None)
        own = [_row(case, None, full, full), *(_row(case, reads, ask(case, reads), full) for reads in ways)]
        scores = ", ".join(f"{row['reads']} {row['score']:.2f}" for row in own)
        note(f"{case.task} {number} of {len(cases)}: {scores}")
        rows += own
    return rows


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean score and agreement by task, length and way of reading, with the points lost against full attention."""
    groups: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["length"], row["reads"]), []).append(row)
    means = {key: _means(part) for key, part in groups.items()}
    return [
        {"task": task, "length": length, "reads": reads, "cases": len(groups[task, length, reads]), **mean,
         "points_lost": 100 * (means[task, length, "full"]["score"] - mean["score"])}
        for (task, length, reads), mean in means.items()
    ]  # fmt: skip


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in ("score", "equal", "prefix")}


def _row(case: Case, reads: Reads | None, answer: Answer, full: Answer) -> dict[str, Any]:
    how = {"reads": "full", "budget": None} if reads is None else {"reads": reads.label, **reads._asdict()}
    said = {"score": case.score(answer.text), **agreement(full.tokens, answer.tokens), "said": answer.text[:80]}
    return {"task": case.task, **how, **case.facts, **said}


def _builder(suite: str, text: str, count: Count) -> Callable[[int, float, int], Case]:
    """The suite's cases by length, depth and seed."""
    if suite == "key_value":
        return lambda length, depth, seed: key_value_retrieval(None, length, depth, count, seed)
    if suite == "multi_document":
        rows = [json.loads(line) for line in text.splitlines()]
        return lambda length, depth, seed: multi_document_qa(rows, seed * 7 % len(rows), length, depth, count, seed)
    parts = paragraphs(text)
    if suite == "needle_multi":
        return lambda length, depth, seed: needle_multi(parts, length, NEEDLES, count, seed)
    if suite == "variable_tracking":
        return lambda length, depth, seed: variable_tracking(parts, length, HOPS, count, seed)
    needle = partial(needle_late if suite == "needle_late" else needle_single, parts)
    return lambda length, depth, seed: needle(length, depth, count, seed)


def _read(folder: Path | None, name: str | None) -> str:
    if name is None:
        return ""
    if folder is None:
        raise ConfigError(f"this suite needs {name}; give --data or OUTRIDER_DATA a folder that has it", "data")
    try:
        return (folder / name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder / name} cannot be read ({error.strerror}); give --data a folder with it") from None
