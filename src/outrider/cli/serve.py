"""`outrider serve`: a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.options import parse_bytes, parse_speculative, parse_table
from outrider.errors import ConfigError

# What a configuration file or the environment may say about the model, and how its text is read.
ENGINE: Mapping[str, Callable[[Any], Any]] = {
    "model": str,
    "revision": str,
    "dtype": str,
    "device": str,
    "kv_cache_dtype": str,
    "kv_memory": lambda value: parse_bytes(str(value)),
    "max_model_len": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "page_size": int,
    "prefix_caching": lambda value: str(value).lower() in ("1", "true", "yes", "on"),
    "seed": int,
    "threads": int,
    "speculative_config": lambda value: parse_speculative(value) if isinstance(value, str) else value,
    "context_config": lambda value: parse_table(value, "context_config") if isinstance(value, str) else value,
}


def serve(
    model: Annotated[str | None, typer.Argument(help="Alias, hub id, folder or .gguf file.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file; keys are those of the settings page.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; default 8000, 0 takes a free one.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve /metrics on a port of its own.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Accepted key; repeat for several.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with one accepted key a line.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that clients ask for; repeat for several.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context in tokens, answer included.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Samples that are decoded together.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Weights: auto, int8, int4, float32, bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Memory for keys and values, such as 2GiB.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: the cores it may use.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of requests that bring none.")] = None,
    speculative_config: Annotated[
        str | None, typer.Option(help='"auto", "off" or a JSON table such as {"drafters": ["ngram"]}.')
    ] = None,
    context_config: Annotated[
        str | None, typer.Option(help='A JSON table such as {"mode": "sparse", "budget": 1024}.')
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any other setting as KEY=VALUE; repeat for several.")
    ] = None,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API, with a chat page at / and metrics at /metrics.

    Settings come from --config, then OUTRIDER_* variables, then flags; the later wins.

    Example: outrider serve smollm2-135m --port 8000
    """
    flags = {name: value for name, value in locals().items() if name not in ("config", "setting") and value != []}
    run(config, os.environ, flags | parse_settings(setting or []))


def run(config: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> None:
    """Merge all sources, load the model and serve it until a signal comes."""
    try:
        from outrider.server import serve as serve_http
        from outrider.server.settings import build, gather
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'outrider[server]'") from None
    own, others = gather(config, environment, flags, ENGINE)
    engine = read_engine(others)
    model = engine.pop("model", None)
    if model is None:
        raise ConfigError("name a model: outrider serve smollm2-135m", "model")
    own.setdefault("served_model_name", [served_name(model)])
    settings = build(own)
    serve_http(lambda: open_service(model, engine | {"pace": settings.stream_interval}), settings)


def open_service(model: str, options: Mapping[str, Any]) -> Any:
    """The engine on its own thread."""
    from outrider.api.service import Service

    return Service(model, **options)


def read_engine(values: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's options with the types they need."""
    read = {}
    for key, value in values.items():
        try:
            read[key] = ENGINE[key](value)
        except (TypeError, ValueError):
            raise ConfigError(f"{key} = {value!r} is refused; give a whole number", key) from None
    return read


def parse_settings(given: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE pairs of --set."""
    pairs = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text!r} has no value; write --set KEY=VALUE", "set")
        pairs[key.strip().replace("-", "_")] = value.strip()
    return pairs


def served_name(model: str) -> str:
    """What clients call a model by default: never a path of this machine."""
    return Path(model).name.removesuffix(".gguf") if Path(model).exists() else model
