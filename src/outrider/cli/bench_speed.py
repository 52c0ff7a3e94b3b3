"""`outrider bench speed MODEL`: decode speed of one model in several ways to speculate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options as opt

if TYPE_CHECKING:
    from outrider.bench.speed import Mode


@opt.takes_options
def speed(
    model: opt.Model = "smollm2-135m",
    modes: Annotated[
        str, typer.Option(help="Ways to speculate, comma separated; the first is the reference.")
    ] = "plain,auto",
    ablation: Annotated[
        str | None,
        typer.Option(help="Instead of modes: these drafters one by one, then vote, length and pipeline step by step."),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at a time, comma separated.")] = "1",
    tasks: Annotated[str | None, typer.Option(help="Tasks, comma separated; default: all.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Prompts per task.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 128,
    repeats: opt.Repeats = 3,
    by_task: Annotated[bool, typer.Option("--by-task", help="A row per task besides the mixed stream.")] = False,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Measure bandwidth and the cost of 1 to 16 rows.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write a page with charts (needs matplotlib).")] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder with spec_bench.jsonl; default: OUTRIDER_DATA, else own prompts.")
    ] = None,
    out: opt.Out = None,
    *,
    compute: opt.Compute,
) -> None:
    """Measure decode speed in several modes, in turns.

    Example: outrider bench speed smollm2-135m --modes plain,ngram,goodput --concurrency 1,8
    Example: outrider bench speed smollm2-135m --ablation ngram,suffix,heads --by-task --report speed.html
    """
    from outrider.bench import record, speed, table
    from outrider.bench.roofline import roof
    from outrider.bench.workloads import load_prompts

    wanted, levels = read_modes(modes, ablation), opt.numbers(concurrency, "--concurrency")
    prompts = load_prompts(data, opt.words(tasks, "--tasks") if tasks else None, requests)
    with compute.open(model, speculative_config=None, max_num_seqs=max(levels), prefix_caching=False) as llm:
        cases = speed.measure(llm, wanted, prompts, levels, max_tokens=max_tokens, repeats=repeats, by_task=by_task)
        more: dict[str, Any] = {"roofline": roof(llm)} if roofline else {}
        config = llm.describe()
    rows, shown = speed.rows_of(cases, len(wanted)), columns(wanted[0].name)
    table.show(rows, shown, f"speed of {model}")
    if ablation is not None:
        more["ablation"] = show_ablation(rows, model)
    made = record.new_record("speed", config, rows, **more)
    if report is not None:
        from outrider.bench.page import write_page

        write_page(report, f"Speed of {model}", made, cases, shown)
    record.emit(made, out)


def read_modes(modes: str, ablation: str | None) -> list[Mode]:
    """The ways to speculate that the options name: an ablation's where there is one."""
    from outrider.bench.ablation import ablation_modes
    from outrider.bench.speed import Mode

    if ablation is not None:
        return ablation_modes(opt.words(ablation, "--ablation"))
    return [Mode.parse(name) for name in opt.words(modes, "--modes")]


def columns(reference: str) -> list[str]:
    """What of a row people see."""
    ratio = f"ratio_to_{reference}"
    speeds = ["output_tokens_per_second", ratio, f"decode_{ratio}", "acceptance_length"]
    times = ["draft_ms", "verify_ms", "overhead_ms", "control_ms"]
    return ["task", "concurrency", "mode", *speeds, *times, f"identical_to_{reference}"]


def show_ablation(rows: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """What each step gained, as a table for people; gives its rows."""
    from outrider.bench import table
    from outrider.bench.ablation import ablation_rows

    steps = ablation_rows(rows)
    table.show(steps, list(steps[0]), f"step by step, {model}")
    return steps
