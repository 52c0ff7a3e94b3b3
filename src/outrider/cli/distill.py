"""`outrider distill MODEL --data FILE --out DIR`: train a draft head for a model from its own answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from outrider.distill.generate import Report
    from outrider.distill.pipeline import Result


def distill(
    model: Annotated[str, typer.Argument(help="The target: alias, folder, .gguf file or hub id.")],
    data: Annotated[Path, typer.Option(help="Prompts: .jsonl (prompt or messages, domain) or .txt, one a line.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; running again goes on where it stopped.")],
    kind: Annotated[str, typer.Option(help="head, model (a small decoder) or early-exit.")] = "head",
    domain: Annotated[str, typer.Option(help="all (a generalist), chat, maths or code (a specialist).")] = "all",
    minutes: Annotated[float | None, typer.Option(help="Most minutes of training.")] = None,
    data_minutes: Annotated[float | None, typer.Option(help="Most minutes of answering.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data, at most.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of answers, weights and batches.")] = 0,
    vocab_size: Annotated[int, typer.Option(help="Tokens that the head can draft.")] = 8192,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 is greedy.")] = 0.0,
    batch: Annotated[int, typer.Option(help="Prompts that are answered together.")] = 24,
    l_attn: Annotated[float, typer.Option(help="Weight of the attention alignment; 0: off.")] = 0.0,
    yarn_factor: Annotated[float, typer.Option(help="Stretch positions for longer contexts; 1: off.")] = 1.0,
    init: Annotated[str, typer.Option(help="Folder of a head to train further.")] = "",
    also: Annotated[list[Path] | None, typer.Option(help="Another run's folder: train on its answers too.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any other setting, as name=value.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    backend: Annotated[str, typer.Option(help="Decoder of the target: auto, compiled, reference.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Distil a draft head: the target answers the prompts, a head learns to foresee them.

    Example: outrider distill smollm2-135m --data prompts.jsonl --out runs/smollm2 --minutes 40
    """
    from outrider.distill.pipeline import Run
    from outrider.models.load import load_model
    from outrider.models.load.progress import progress_bar

    named = {
        "kind": kind,
        "domain": domain,
        "minutes": minutes,
        "data_minutes": data_minutes,
        "epochs": epochs,
        "seed": seed,
        "vocab_size": vocab_size,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "batch": batch,
        "l_attn": l_attn,
        "yarn_factor": yarn_factor,
        "init": init,
    }
    options = parse_options(named, set_ or [])
    with progress_bar() as download:
        loaded = load_model(model, progress=download)
    with bars() as report:
        places = {"backend": backend, "device": device, "threads": threads, "also": tuple(also or ())}
        run = Run(loaded, data, out, options, report, **places)  # type: ignore[arg-type]
        result = run.all()
    show(result, json_output)


def parse_options(named: dict[str, Any], settings: list[str]) -> Any:
    """DistillOptions from the command line; `settings` are name=value, values in JSON where they are no plain words."""
    from outrider.config import from_mapping
    from outrider.distill.options import DistillOptions
    from outrider.errors import ConfigError

    values = dict(named)
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting} is refused; write name=value", "--set")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    for name in ("taps", "layers"):
        values |= {name: tuple(values[name])} if isinstance(values.get(name), list) else {}
    return from_mapping(DistillOptions, values, "distill")


@contextmanager
def bars() -> Iterator[Report]:
    """One bar per stage on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield report


def show(result: Result, as_json: bool) -> None:
    """What came out: one line per kind of task, or one JSON object."""
    if as_json:
        print(json.dumps({"head": str(result.folder), "acceptance": result.scores}))
        return
    for name, score in result.scores.items():
        low, high = score["interval"]
        print(f"{name}: acceptance length {score['acceptance_length']:.2f} ({low:.2f} - {high:.2f})", file=sys.stderr)
    print(result.folder)
