"""`outrider bench context MODEL`: decode speed behind long contexts in several ways to read and to place them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options as opt
from outrider.errors import ConfigError


@opt.takes_options
def context(
    model: opt.Model = "smollm2-135m",
    modes: Annotated[
        str,
        typer.Option(
            help="full, sparse, fresh, shared, window, bounded, lossless; with a slow tier also resident, offloaded, "
            "elastic, tiered, reread. The first is the reference."
        ),
    ] = "full,sparse",
    budgets: Annotated[str, typer.Option(help="Entries read per KV head, comma separated.")] = "1024",
    requests: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 1,
    context_tokens: Annotated[int, typer.Option("--context", min=16, help="Tokens of every prompt.")] = 4096,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 64,
    repeats: opt.Repeats = 3,
    kv_memory: Annotated[
        str | None, typer.Option("--kv-memory", help="Fast memory for KV: bytes like 256MiB, or a share like 25%.")
    ] = None,
    kv_path: Annotated[Path | None, typer.Option("--kv-path", help="Folder of the slow tier.")] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for pictures: bytes moved per step, loads against layers.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder with war_and_peace.txt; default: OUTRIDER_DATA, else random pairs.")
    ] = None,
    out: opt.Out = None,
    *,
    compute: opt.Compute,
) -> None:
    """Measure decoding behind long contexts in several context modes, in turns.

    Example: outrider bench context smollm2-135m --requests 8 --context 4096 --budgets 512,1024
    Example: outrider bench context smollm2-135m --modes resident,tiered,reread --kv-memory 25% --kv-path /tmp/kv
    """
    from outrider.bench import context, record, table
    from outrider.models.load import load_model

    if (kv_memory is None) != (kv_path is None):
        raise ConfigError("--kv-memory and --kv-path go together; give both", "--kv-memory")
    text, names, sizes = read_prose(data), opt.words(modes, "--modes"), opt.numbers(budgets, "--budgets")
    length, loaded = context_tokens + max_tokens + 16, load_model(model)
    need = context.kv_bytes(loaded.spec, compute.dtype, compute.kv_cache_dtype, requests * (length + 16))
    ways = context.parse_ways(names, sizes, None if kv_memory is None else read_memory(kv_memory, need))
    slow = None if kv_path is None else {"kv_path": str(kv_path)}
    room = {"max_num_seqs": requests, "max_model_len": length, "kv_memory": need}
    with compute.open(loaded, speculative_config=None, context_config=slow, **room) as llm:
        prompts = context.make_prompts(llm, text, requests, context_tokens)
        cells = context.measure_cells(llm, ways, prompts, max_tokens, repeats)
        if plots is not None:
            context.draw(llm, cells, prompts, plots)
        config = llm.describe()
    rows = [cell.row(cells[0], context_tokens) for cell in cells]
    table.show(rows, columns(ways[0].name, slow is not None), f"long contexts of {model}")
    record.emit(record.new_record("context", config, rows), out)


def read_prose(data: str | None) -> str | None:
    """The text that prompts are cut from; None without a data folder."""
    from outrider.bench.workloads import data_folder

    folder = data_folder(data)
    return None if folder is None else (folder / "war_and_peace.txt").read_text(encoding="utf-8")


def read_memory(text: str, need: int) -> int:
    """Bytes from an amount, or from a share of what is needed."""
    from outrider.bench.context import parse_share

    return parse_share(text, need) if text.strip().endswith("%") else opt.parse_bytes(text)


def columns(reference: str, slow_tier: bool) -> list[str]:
    """What of a row people see; with a slow tier also what moved."""
    size = ["mode", "budget", "requests", "context_tokens", "output_tokens_per_second", f"ratio_to_{reference}"]
    read = ["read_share", "captured_mass", "overlap", "select_share", "acceptance_length", "identical"]
    moved = ["slow_layers", "resident_bytes", "moved_bytes", "exposed_wait_ms", "transfer_ms"]
    return [*size, *read, *(moved if slow_tier else [])]
