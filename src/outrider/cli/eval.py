"""`outrider eval MODEL`: what reading less of a long context costs in accuracy, against the same model reading all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options as opt

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.bench.eval import Answer, Reads
    from outrider.bench.eval_cases import Case


@dataclass(frozen=True)
class Questions:
    """What the model is asked about: texts of so many tokens, and how many cases of each kind."""

    lengths: list[int]
    cases: int
    folder: Path | None  # with the public texts
    seed: int


@opt.takes_options
def eval_command(
    model: opt.Model = "smollm2-135m",
    suite: Annotated[
        str, typer.Option(help="Suites, comma separated; all: every one; captured: attention that selections hold.")
    ] = "key_value",
    budgets: Annotated[str, typer.Option(help="Entries read per KV head, comma separated.")] = "512,1024",
    selectors: Annotated[
        str | None, typer.Option(help="Selectors to compare, comma separated; default: the one of --context-config.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of context, comma separated.")] = "2048",
    cases: Annotated[int, typer.Option(min=1, help="Cases per suite and length, at as many depths.")] = 5,
    context_config: opt.ContextTable = None,
    data: Annotated[str | None, typer.Option(help="Folder with the public texts; default: OUTRIDER_DATA.")] = None,
    seed: Annotated[int, typer.Option(help="Of the cases.")] = 0,
    plots: Annotated[Path | None, typer.Option(help="Folder for pictures (needs matplotlib).")] = None,
    out: opt.Out = None,
    *,
    compute: opt.Compute,
) -> None:
    """Score a model on long contexts at several budgets.

    The suite captured compares selectors with the best shared set instead (of_oracle), on texts of every kind at hand.

    Example: outrider eval qwen2.5-coder-0.5b --suite needle_single,key_value --lengths 4096 --selectors pages,window
    """
    from outrider.bench import record, table
    from outrider.bench.eval import SUITES, Reads, summarise
    from outrider.bench.workloads import data_folder

    names = list(SUITES) if suite == "all" else opt.words(suite, "--suite")
    asked = Questions(opt.numbers(lengths, "--lengths"), cases, data_folder(data), seed)
    sizes, picked = opt.numbers(budgets, "--budgets"), opt.words(selectors, "--selectors") if selectors else [None]
    settings = {"mode": "sparse", **(opt.parse_table(context_config, "--context-config") if context_config else {})}
    room = {"max_model_len": max(asked.lengths) + 128, "max_num_seqs": 1}
    with compute.open(model, speculative_config=None, context_config=settings, **room) as llm:
        shares = measure_shares(llm, asked, sizes, settings) if "captured" in names else []
        scored = [name for name in names if name != "captured"]
        rows = score(llm, scored, asked, [Reads(size, name) for name in picked for size in sizes], settings)
        config = {**llm.describe(), "context": settings, "seed": seed}
    means = summarise(rows)
    if shares:
        columns = ["text", "length", "budget", "selector", "captured", "of_oracle", "oracle_shared", "moved"]
        table.show(shares, columns, f"attention captured, {model}")
    if rows:
        columns = ["task", "length", "reads", "cases", "score", "points_lost", "equal", "prefix"]
        table.show(means, columns, f"eval of {model}")
    if plots and rows:
        _draw(rows, plots, max(asked.lengths))
    record.emit(record.new_record("eval", config, [*means, *shares], cases=rows), out)


def measure_shares(
    llm: LLM, asked: Questions, budgets: Sequence[int], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the suite captured; the engine reads as `settings` say afterwards."""
    from outrider.bench.eval_captured import captured_texts, measure_captured

    rows: list[dict[str, Any]] = []
    for length in asked.lengths:
        texts = captured_texts(asked.folder, length, _counter(llm), asked.seed)
        rows += measure_captured(llm, texts, budgets, settings)
    llm.set_context_config(settings)
    return rows


def score(
    llm: LLM, suites: Sequence[str], asked: Questions, ways: Sequence[Reads], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the other suites, a case in one way of reading each."""
    from outrider.bench.eval import evaluate, make_cases
    from outrider.bench.record import note

    rows: list[dict[str, Any]] = []
    for suite in suites:
        made = make_cases(suite, asked.folder, asked.lengths, asked.cases, _counter(llm), asked.seed)
        note(f"{suite}: {len(made)} cases, full attention and {', '.join(way.label for way in ways)}")
        rows += evaluate(made, _asker(llm, settings, 4 * max(asked.lengths)), ways)
    return rows


def _counter(llm: LLM) -> Callable[[str], int]:
    """Tokens of a text."""
    return lambda text: len(llm.tokenizer.encode(text))


def _asker(llm: LLM, settings: Mapping[str, Any], everything: int) -> Callable[[Case, Reads | None], Answer]:
    """Greedy answers; a budget that holds the whole context is exactly full attention."""
    from outrider.bench.eval import Answer
    from outrider.types import SamplingParams

    configured: list[str | None] = [None]  # the selector in use; None: that of `settings`

    def ask(case: Case, reads: Reads | None) -> Answer:
        if reads is not None and [reads.selector] != configured:
            configured[:] = [reads.selector]
            llm.set_context_config({**settings, **({"selector": reads.selector} if reads.selector else {})})
        extra = {"context_budget": everything if reads is None else reads.budget}
        output = llm.generate(case.prompt, SamplingParams(temperature=0, max_tokens=case.max_tokens, extra_args=extra))
        said = output[0].outputs[0]
        return Answer(said.text, tuple(said.token_ids))

    return ask


def _line(row: Mapping[str, Any]) -> str:
    """Where a row belongs in the picture: its task, and its selector where several are compared."""
    return f"{row['task']}, {row['selector']}" if row.get("selector") else str(row["task"])


def _draw(rows: Sequence[dict[str, Any]], folder: Path, longest: int) -> None:
    """Accuracy against budget, and where in the context things were found."""
    from outrider.bench.eval_plots import plot_depths, plot_lines

    points = [{**row, "budget": row["budget"] or longest, "line": _line(row)} for row in rows]
    labels = ("entries read per KV head (right: all)", "accuracy")
    plot_lines(points, "budget", "score", "line", folder / "accuracy.png", "Accuracy against budget", labels)
    for task in dict.fromkeys(row["task"] for row in rows):
        for reads in dict.fromkeys(row["reads"] for row in rows):
            own = [r for r in rows if (r["task"], r["reads"]) == (task, reads) and r.get("depth") is not None]
            if own:
                plot_depths(own, folder / f"{task}-{reads}.png", f"{task}, {reads}")
