"""`outrider bench ...`: measurements whose last line on stdout is one JSON record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import options as opt
from outrider.cli.bench_simulate import simulate
from outrider.errors import ConfigError

app = typer.Typer(
    help="Measure speed, context, serving, or compare with peers.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(help="Alias, folder, .gguf file or hub id.")]
Data = Annotated[
    str | None, typer.Option(help="Folder with spec_bench.jsonl; default: OUTRIDER_DATA, else own prompts.")
]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds; figures are medians.")]


@app.command()
def speed(
    model: Model = "smollm2-135m",
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
    repeats: Repeats = 3,
    by_task: Annotated[bool, typer.Option("--by-task", help="A row per task besides the mixed stream.")] = False,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Measure bandwidth and the cost of 1 to 16 rows.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write a page with charts (needs matplotlib).")] = None,
    data: Data = None,
    out: opt.Out = None,
    dtype: opt.Dtype = "auto",
    kv_cache_dtype: opt.KvDtype = "auto",
    threads: opt.Threads = None,
) -> None:
    """Measure decode speed in several modes, in turns.

    Example: outrider bench speed smollm2-135m --modes plain,ngram,goodput --concurrency 1,8
    Example: outrider bench speed smollm2-135m --ablation ngram,suffix,heads --by-task --report speed.html
    """
    from outrider.api.llm import LLM
    from outrider.bench import ablation as steps
    from outrider.bench import record, speed, table
    from outrider.bench.roofline import roof
    from outrider.bench.workloads import load_prompts

    if ablation is None:
        wanted = [speed.Mode.parse(name) for name in some(modes, "--modes")]
    else:
        wanted = steps.ablation_modes(some(ablation, "--ablation"))
    levels = parse_levels(concurrency)
    prompts = load_prompts(data, split(tasks) if tasks else None, requests)
    with LLM(
        model,
        speculative_config=None,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        max_num_seqs=max(levels),
        prefix_caching=False,
    ) as llm:
        for mode in wanted:  # compile and touch everything before anything is timed
            speed.answer(llm, mode, prompts[:1], 1, 8)
        cases = []
        for level in levels:
            cases += speed.run_cases(
                llm, wanted, prompts, concurrency=level, max_tokens=max_tokens, repeats=repeats, by_task=by_task
            )
        rows = speed.rows_of(cases, len(wanted))
        more: dict[str, Any] = {"roofline": roof(llm)} if roofline else {}
        config = llm.describe()
    ratio = f"ratio_to_{wanted[0].name}"
    columns = ["task", "concurrency", "mode", "output_tokens_per_second", ratio, f"decode_{ratio}", "acceptance_length"]
    columns += ["draft_ms", "verify_ms", "overhead_ms", "control_ms", f"identical_to_{wanted[0].name}"]
    table.show(rows, columns, f"speed of {model}")
    if ablation is not None:
        more["ablation"] = steps.ablation_rows(rows)
        table.show(more["ablation"], list(more["ablation"][0]), f"step by step, {model}")
    made = record.new_record("speed", config, rows, **more)
    if report is not None:
        from outrider.bench.page import write_page

        write_page(report, f"Speed of {model}", made, cases, columns)
    record.emit(made, out)


def some(text: str, option: str) -> list[str]:
    """Words between commas, of which there must be one."""
    words = split(text)
    if not words:
        raise ConfigError(f"{option} names nothing; give words, comma separated", option)
    return words


def parse_levels(text: str) -> list[int]:
    """Numbers of requests at a time, of which there must be one."""
    words = some(text, "--concurrency")
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--concurrency = {text!r} is refused; give numbers from 1, comma separated", "--concurrency")
    return [int(word) for word in words]


def split(text: str) -> list[str]:
    """Words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


@app.command()
def peers(
    model: Model = "smollm2-135m",
    names: Annotated[str, typer.Option("--peers", help="Engines, comma separated, ours first.")] = "outrider,llama.cpp",
    streams: Annotated[int, typer.Option(min=1, help="Streams of the batched decode; 1 leaves it out.")] = 8,
    prefill: Annotated[int, typer.Option(min=0, help="Tokens of the prefill; 0 leaves it out.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    speculative: opt.Speculative = "off",
    repeats: Repeats = 5,
    dtype: opt.Dtype = "auto",
    kv_cache_dtype: opt.KvDtype = "auto",
    threads: opt.Threads = None,
    out: opt.Out = None,
) -> None:
    """Compare with other engines on the same model file, in turns.

    Example: outrider bench peers smollm2-135m --peers outrider,llama.cpp --repeats 5
    """
    from outrider.bench import record, table
    from outrider.bench.peers.compare import compare
    from outrider.bench.peers.peer import opener
    from outrider.bench.peers.shapes import make_shapes
    from outrider.models.load import load_model

    loaded = load_model(model)
    shapes = make_shapes(loaded.tokenizer, streams, prefill, max_tokens)
    shared = {"threads": threads or len(record.cores()), "context": 1024 + max_tokens, "streams": streams}
    ours = {"speculative": opt.parse_speculative(speculative), "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    engines = [
        opener(name)(loaded.path, **shared, **(ours if name == "outrider" else {})) for name in some(names, "--peers")
    ]
    try:
        rows = compare(engines, shapes, repeats)
    finally:
        for engine in engines:
            engine.close()
    columns = ["shape", "peer", "version", "tokens_per_second", f"{engines[0].name}_over_it"]
    table.show(rows, columns, f"engines on {loaded.path.name}")
    record.emit(record.new_record("peers", {"model": model, **shared, **ours}, rows), out)


@app.command()
def context(
    model: Model = "smollm2-135m",
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
    repeats: Repeats = 3,
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
    dtype: opt.Dtype = "auto",
    kv_cache_dtype: opt.KvDtype = "auto",
    threads: opt.Threads = None,
) -> None:
    """Measure decoding behind long contexts in several context modes, in turns.

    Example: outrider bench context smollm2-135m --requests 8 --context 4096 --budgets 512,1024
    Example: outrider bench context smollm2-135m --modes resident,tiered,reread --kv-memory 25% --kv-path /tmp/kv
    """
    from outrider.api.llm import LLM
    from outrider.bench import context as bench
    from outrider.bench import record, table
    from outrider.bench.workloads import data_folder
    from outrider.models.load import load_model

    if (kv_memory is None) != (kv_path is None):
        raise ConfigError("--kv-memory and --kv-path go together; give both", "--kv-memory")
    folder = data_folder(data)
    length = context_tokens + max_tokens + 16
    loaded = load_model(model)
    need = bench.kv_bytes(loaded.spec, dtype, kv_cache_dtype, requests * (length + 16))
    limit = None if kv_memory is None else read_memory(kv_memory, need)
    ways = bench.parse_ways(split(modes), [int(budget) for budget in split(budgets)], limit)
    with LLM(
        loaded,
        speculative_config=None,
        context_config=None if kv_path is None else {"kv_path": str(kv_path)},
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        max_num_seqs=requests,
        max_model_len=length,
        kv_memory=need,
    ) as llm:
        text = None if folder is None else (folder / "war_and_peace.txt").read_text(encoding="utf-8")
        prompts = bench.make_prompts(llm, text, requests, context_tokens)
        cells = bench.measure_cells(llm, ways, prompts, max_tokens, repeats)
        rows = [cell.row(cells[0], context_tokens) for cell in cells]
        if plots is not None:
            bench.draw(llm, cells, prompts, plots)
        config = llm.describe()
    ratio = f"ratio_to_{ways[0].name}"
    columns = ["mode", "budget", "requests", "context_tokens", "output_tokens_per_second", ratio, "read_share"]
    more = ["captured_mass", "overlap", "select_share", "acceptance_length", "identical"]
    if kv_path is not None:
        more += ["slow_layers", "resident_bytes", "moved_bytes", "exposed_wait_ms", "transfer_ms"]
    table.show(rows, [*columns, *more], f"long contexts of {model}")
    record.emit(record.new_record("context", config, rows), out)


def read_memory(text: str, need: int) -> int:
    """Bytes from an amount, or from a share of what is needed."""
    from outrider.bench.context import parse_share

    return parse_share(text, need) if text.strip().endswith("%") else opt.parse_bytes(text)


app.command()(simulate)
