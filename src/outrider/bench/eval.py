"""Accuracy at long contexts: suites of cases, asked at several budgets beside full attention, as rows of a record.

    rows = evaluate(make_cases("needle_single", folder, [4096], 2, count), ask, [512, 1024])

`ask` answers cases at one budget per KV head (None: full attention); nothing here knows a model. Suites that need
public data read it from the folder that --data or OUTRIDER_DATA names.
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


Ask = Callable[[Sequence[Case], int | None], Sequence[Answer]]


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


def evaluate(cases: Sequence[Case], ask: Ask, budgets: Sequence[int]) -> list[dict[str, Any]]:
    """A row per case and budget, the full answer first: its score, and how far the tokens follow the full ones."""
    full = ask(cases, None)
    rows = [_row(case, "full", None, answer, answer) for case, answer in zip(cases, full, strict=True)]
    for budget in budgets:
        answers = ask(cases, budget)
        parts = zip(cases, answers, full, strict=True)
        rows += [_row(case, str(budget), budget, answer, reference) for case, answer, reference in parts]
    return rows


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean score and agreement by task, length and budget, with the points lost against full attention."""
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


def _row(case: Case, reads: str, budget: int | None, answer: Answer, reference: Answer) -> dict[str, Any]:
    follows = agreement(reference.tokens, answer.tokens)
    said = {"score": case.score(answer.text), **follows, "said": answer.text[:80]}
    return {"task": case.task, "reads": reads, "budget": budget, **case.facts, **said}


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
