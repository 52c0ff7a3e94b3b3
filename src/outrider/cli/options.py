"""Options that several commands share, and the LLM they describe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.api.llm import LLM

Dtype = Annotated[str, typer.Option(help="Weights: auto, int8, int4 or float32; bfloat16 on an accelerator.")]
KvDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="Keys and values: auto, float32, bfloat16, int8.")]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", help="Context in tokens, answer included.")]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", help="Requests that are decoded together.")]
KvMemory = Annotated[str | None, typer.Option("--kv-memory", help="Memory for keys and values, such as 2GiB.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: the cores this process may use.")]
Seed = Annotated[int, typer.Option(help="Seed of requests that bring none.")]
Speculative = Annotated[
    str, typer.Option("--speculative-config", help='"auto", "off" or a JSON table such as {"drafters": ["ngram"]}.')
]
ContextTable = Annotated[
    str | None, typer.Option("--context-config", help='A JSON table such as {"mode": "sparse", "budget": 1024}.')
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "t": 10**12, "ti": 2**40}


def open_llm(model: str, *, speculative: str, context: str | None, kv_memory: str | None, **options: Any) -> LLM:
    """The LLM that command-line options describe; options that are None keep their defaults."""
    from outrider.api.llm import LLM

    given = {key: value for key, value in options.items() if value is not None}
    if kv_memory is not None:
        given["kv_memory"] = parse_bytes(kv_memory)
    return LLM(
        model,
        speculative_config=parse_speculative(speculative),
        context_config=None if context is None else parse_table(context, "--context-config"),
        **given,
    )


def parse_speculative(text: str) -> Mapping[str, Any] | str | None:
    """ "auto" stays, "off" is plain decoding, anything else is a JSON table."""
    if text == "auto":
        return text
    return None if text in ("off", "none", "null") else parse_table(text, "--speculative-config")


def parse_table(text: str, option: str) -> Mapping[str, Any]:
    """A JSON object from the command line."""
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is not JSON ({error}); quote it like '{{\"key\": 1}}'", option) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{option} must be a JSON table, like '{{\"key\": 1}}'", option)
    return table


def parse_bytes(text: str) -> int:
    """Bytes from "80GiB", "512m" or "1000000"."""
    digits = text.strip().lower().removesuffix("b")
    number = digits.rstrip("kmgti")
    try:
        return int(float(number) * UNITS[digits[len(number) :]])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{text!r} is no amount of memory; write it like 512MiB or 80GiB") from None
