"""`outrider bench peers MODEL`: Outrider and other engines on the same model file."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli import options as opt


@opt.takes_options
def peers(
    model: opt.Model = "smollm2-135m",
    names: Annotated[str, typer.Option("--peers", help="Engines, comma separated, ours first.")] = "outrider,llama.cpp",
    streams: Annotated[int, typer.Option(min=1, help="Streams of the batched decode; 1 leaves it out.")] = 8,
    prefill: Annotated[int, typer.Option(min=0, help="Tokens of the prefill; 0 leaves it out.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    speculative: opt.Speculative = "off",
    repeats: opt.Repeats = 5,
    out: opt.Out = None,
    *,
    compute: opt.Compute,
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
    shared = {"threads": compute.threads or len(record.cores()), "context": 1024 + max_tokens, "streams": streams}
    ours = {
        "speculative": opt.parse_speculative(speculative),
        "dtype": compute.dtype,
        "kv_cache_dtype": compute.kv_cache_dtype,
    }
    engines = [
        opener(name)(loaded.path, **shared, **(ours if name == "outrider" else {}))
        for name in opt.words(names, "--peers")
    ]
    try:
        rows = compare(engines, shapes, repeats)
    finally:
        for engine in engines:
            engine.close()
    columns = ["shape", "peer", "version", "tokens_per_second", f"{engines[0].name}_over_it"]
    table.show(rows, columns, f"engines on {loaded.path.name}")
    record.emit(record.new_record("peers", {"model": model, **shared, **ours}, rows), out)
