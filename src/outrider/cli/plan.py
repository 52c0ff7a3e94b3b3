"""`outrider plan`: how much context fits where, for any model and any memory, before buying or downloading anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from outrider.api.resolve import selector_bytes
from outrider.cli import options as opt
from outrider.cli.plan_model import find_model
from outrider.config import ContextConfig, EngineConfig, from_mapping
from outrider.errors import ConfigError
from outrider.memory.outlook import reads_line, show_bytes
from outrider.memory.place.build import STAGING_LAYERS, buffer_capacity, check_tiers
from outrider.memory.planner import (
    Footprint,
    Load,
    MemoryPlan,
    fit_layers,
    footprint,
    most_requests,
    plan,
    thresholds,
)
from outrider.memory.selectors import read_selector
from outrider.models.spec import DecoderSpec


def plan_command(
    model: Annotated[str, typer.Argument(help="A shape (llama3-8b ...), alias, folder, .gguf or config.json")],
    memory: Annotated[
        str | None,
        typer.Option(help="Fast memory, such as 80GiB; default: kv_memory of --context-config, for KV alone"),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests decoded together")] = 1,
    budget: Annotated[
        int | None, typer.Option(help="Entries that attention reads per KV head; default: the config's, else 2048")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Context length to place; default: the model's own")] = None,
    slow_memory: Annotated[str | None, typer.Option(help="Slow tier, such as 512GiB; default: no limit")] = None,
    weights: Annotated[
        str, typer.Option(help="float32, bfloat16, int8 or int4; .gguf files know their own")
    ] = "bfloat16",
    kv_type: Annotated[str, typer.Option(help="KV in the fast tier: float32, bfloat16 or int8")] = "bfloat16",
    slow_type: Annotated[str | None, typer.Option(help="KV in the slow tier; default: as in the fast one")] = None,
    selector: Annotated[
        str | None, typer.Option(help="published, head, pages or window; default: the config's, else published")
    ] = None,
    context_config: opt.ContextTable = None,
    overhead: Annotated[float, typer.Option(help="Factor on the weights for activations and fragmentation")] = 1.3,
    plot: Annotated[Path | None, typer.Option(help="Also draw the chart into this file (needs matplotlib)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else")] = False,
) -> None:
    """Print what fits: thresholds, placement and a chart.

    Example: outrider plan llama3-8b --memory 80GiB --requests 32 --budget 2048
    Example: outrider plan llama3-8b --memory 24GiB --context-config '{"mode": "sparse", "budget": 1024}'
    """
    table = opt.parse_table(context_config, "--context-config") if context_config else None
    context = None if table is None else from_mapping(ContextConfig, table, "--context-config")
    report = make_report(
        model,
        None if memory is None else opt.parse_bytes(memory, "--memory"),
        requests,
        budget,
        length,
        opt.parse_bytes(slow_memory, "--slow-memory") if slow_memory else None,
        weights,
        {"kv_type": kv_type, "slow_type": slow_type, "selector": selector, "overhead": overhead},
        context,
    )
    if plot:
        draw_chart(report, plot)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        print_report(report, Console())


def make_report(
    name: str,
    memory: int | None,
    requests: int = 1,
    budget: int | None = None,
    length: int | None = None,
    slow_limit: int | None = None,
    weights: str = "bfloat16",
    options: dict[str, Any] | None = None,
    context: ContextConfig | None = None,
) -> dict[str, Any]:
    """Everything that the command prints, as JSON types. ConfigError or ModelError name what is wrong."""
    spec, weight_bytes = find_model(name, weights)
    given = {key: value for key, value in (options or {}).items() if value is not None}
    model = footprint(spec, weight_bytes, **given) if context is None else serve(spec, weight_bytes, given, context)
    memory, model = limit(memory, model, context)
    budget, buffered = budgets(budget, context, model)
    length = spec.max_positions if length is None else length
    if length < 1:
        raise ConfigError("length must be 1 or more", "length")
    loads = [Load(length, buffered)] * requests
    bounds = thresholds(model, memory, requests, buffered, slow_limit)
    forced = None if context is None else context.slow_layers
    layers = fit_layers(model, memory, loads, slow_limit) if forced is None else forced
    chosen = plan(model, memory, loads, model.layers if layers is None else layers, slow_limit)
    return {
        "schema": "outrider.plan/1",
        "model": name,
        "layers": spec.num_layers,
        "requests": requests,
        "budget": budget,
        "reads": None if context is None else reads_line(replace(context, budget=budget)),
        "length": length,
        "memory": memory,
        "slow_memory": slow_limit,
        "footprint": asdict(model),
        "thresholds": bounds,
        "slow_layers": layers if chosen.fits else None,
        "fast_bytes": chosen.fast_bytes,
        "slow_bytes": chosen.slow_bytes,
        "parts": chosen.parts(),
        "most_requests": most_requests(model, memory, Load(length, buffered), slow_limit),
        "curve": _curve(model, memory, requests, buffered, slow_limit, chosen),
    }


def serve(spec: DecoderSpec, weight_bytes: int, given: Mapping[str, Any], context: ContextConfig) -> Footprint:
    """The footprint of a model that this engine serves with a context configuration: its own selector and staging."""
    engine, choice = EngineConfig(), read_selector(context.selector)
    check_tiers(replace(context, kv_path=context.kv_path or "."), spec, engine.page_size)
    kind = given.get("selector", "window" if context.mode == "full" else choice.name)
    slow = given.get("slow_type", None if context.slow_kv_dtype == "auto" else context.slow_kv_dtype)
    more = {
        **given,
        "selector": kind,
        "slow_type": slow,
        "page_size": engine.page_size,
        "staging_layers": STAGING_LAYERS,
    }
    model = replace(footprint(spec, weight_bytes, **more), pass_rows=engine.max_num_batched_tokens)
    if "selector" in given:
        return model
    return replace(model, selector_bytes=selector_bytes(context, spec, engine.page_size) // engine.page_size)


def limit(memory: int | None, model: Footprint, context: ContextConfig | None) -> tuple[int, Footprint]:
    """The bytes that are planned with, and what they are to hold: all, or KV alone as kv_memory means it."""
    if memory is not None:
        return memory, model
    if context is None or context.kv_memory is None:
        raise ConfigError("give --memory, such as 80GiB, or kv_memory in --context-config", "memory")
    return context.kv_memory, replace(model, weight_bytes=0, head_bytes=0)


def budgets(budget: int | None, context: ContextConfig | None, model: Footprint) -> tuple[int, int]:
    """Entries that attention reads, and those that the buffer of a slow layer holds of them."""
    if context is None:
        return (2048, 2048) if budget is None else (budget, budget)
    read = context.budget if budget is None else budget
    return read, buffer_capacity(replace(context, budget=read), model.page_size)


def _curve(
    model: Footprint, memory: int, requests: int, budget: int, slow_limit: int | None, chosen: MemoryPlan
) -> list[dict[str, int | None]]:
    """Slow layers and fast bytes at lengths that double: the chart's points."""
    points: list[dict[str, int | None]] = []
    tokens = 1024
    while tokens <= 1 << 20:
        loads = [Load(tokens, budget)] * requests
        slow = fit_layers(model, memory, loads, slow_limit)
        used = plan(model, memory, loads, model.layers if slow is None else slow, slow_limit).fast_bytes
        points.append({"length": tokens, "slow_layers": slow, "fast_bytes": used})
        tokens *= 2
    return points


def print_report(report: dict[str, Any], console: Console) -> None:
    """The report as two tables and a bar chart."""
    console.print(
        f"{report['model']}: {report['requests']} requests, budget {report['budget']}, "
        f"{show_bytes(report['memory'])} of fast memory"
    )
    if report["reads"]:
        console.print(f"context: {report['reads']}")
    _print_placement(report, console)
    _print_thresholds(report, console)
    _print_bars(report, console)


def _print_placement(report: dict[str, Any], console: Console) -> None:
    layers, total = report["slow_layers"], report["layers"]
    resident = f"; layers 0 to {total - layers - 1} stay resident" if layers and layers < total else ""
    verdict = (
        "does not fit even with every layer in the slow tier"
        if layers is None
        else f"fits with {layers} of {total} layers in the slow tier{resident}"
        if layers
        else "fits with everything resident"
    )
    console.print(
        f"at {report['length']:,} tokens each: {verdict}; most requests of that length: {report['most_requests']}"
    )
    table = Table("part", "bytes", box=None)
    for part, count in report["parts"].items():
        table.add_row(part, show_bytes(count))
    table.add_row("fast tier in all", show_bytes(report["fast_bytes"]))
    table.add_row("slow tier", show_bytes(report["slow_bytes"]))
    console.print(table)


def _print_thresholds(report: dict[str, Any], console: Console) -> None:
    limits = report["thresholds"]
    table = Table("layers in the slow tier", "longest context of every request", box=None)
    step = max(1, (len(limits) - 1) // 8)
    for i in sorted({*range(0, len(limits), step), len(limits) - 1}):
        table.add_row(str(i), "no bound" if limits[i] is None else f"{limits[i]:,} tokens")
    console.print(table)


def _print_bars(report: dict[str, Any], console: Console) -> None:
    table = Table("context", "fast tier in use", "", "slow layers", box=None)
    for point in report["curve"]:
        share = point["fast_bytes"] / max(1, report["memory"])
        slow = "does not fit" if point["slow_layers"] is None else str(point["slow_layers"])
        table.add_row(
            f"{point['length']:,}",
            Bar(1.0, 0, min(1.0, share), width=40),
            f"{share:.0%}" if share < 10 else "> 10x",
            slow,
        )
    console.print(table)


def draw_chart(report: dict[str, Any], path: Path) -> None:
    """Thresholds S_i against i, as a picture whose format follows the file's ending."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib; install outrider[plots]", "plot") from None
    bounded = [(i, limit) for i, limit in enumerate(report["thresholds"]) if limit is not None]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([i for i, _ in bounded], [limit for _, limit in bounded], marker="o", markersize=3)
    axes.axhline(report["length"], linestyle="--", linewidth=1, color="grey")
    axes.set_xlabel("layers in the slow tier")
    axes.set_ylabel("longest context of every request, tokens")
    axes.set_yscale("log")
    axes.set_title(
        f"{report['model']}: {report['requests']} requests, budget {report['budget']}, {show_bytes(report['memory'])}"
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the chart cannot be written to {path}: {error}", "plot") from None
