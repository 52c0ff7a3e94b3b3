"""Options that several commands share, and the LLM they describe."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.models.load import LoadedModel


def writable(path: Path | None) -> Path | None:
    """A file that is written when all is measured: where it cannot be, that is said before anything runs."""
    if path is None:
        return path
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "is a folder" if path.is_dir() else "cannot be written: its folder is missing or not writable"
        raise ConfigError(f"--out {path} {reason}; name a file in a folder that exists", "--out")
    return path


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
Out = Annotated[Path | None, typer.Option("--out", help="Write the record to this file too.", callback=writable)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Model = Annotated[str, typer.Argument(help="Alias, folder, .gguf file or hub id.")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds; figures are medians.")]

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "t": 10**12, "ti": 2**40}


@dataclass(frozen=True)
class Compute:
    """How a model computes: the types of its numbers, and threads. What commands that measure say about it."""

    dtype: Dtype = "auto"
    kv_cache_dtype: KvDtype = "auto"
    threads: Threads = None

    def open(self, model: str | LoadedModel, **more: Any) -> LLM:
        """The LLM that they describe; `more` are further options of LLM."""
        from outrider.api.llm import LLM

        return LLM(model, **vars(self), **more)


@dataclass(frozen=True)
class Shared(Compute):
    """What commands that answer say about the model, in the same words. Options that are None keep their defaults."""

    seed: Seed = 0
    max_model_len: MaxModelLen = None
    kv_memory: KvMemory = None
    revision: Revision = None
    speculative_config: Speculative = "auto"
    context_config: ContextTable = None

    def open(self, model: str | LoadedModel, **more: Any) -> LLM:
        """The LLM that they describe; `more` are further options of LLM."""
        from outrider.api.llm import LLM

        given = {name: value for name, value in (vars(self) | more).items() if value is not None}
        given["speculative_config"] = parse_speculative(self.speculative_config)
        if self.kv_memory is not None:
            given["kv_memory"] = parse_bytes(self.kv_memory)
        if self.context_config is not None:
            given["context_config"] = parse_table(self.context_config, "--context-config")
        llm = LLM(model, **given)
        if self.context_config is not None:
            print_plan(llm.context_plan())
        return llm


def print_plan(plan: Mapping[str, Any]) -> None:
    """What attention reads and where KV will be, on stderr; notes are warnings of the start already."""
    for line in plan["lines"]:
        if not line.startswith("note:"):
            print(line, file=sys.stderr)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of its keyword that is a dataclass (Shared or Compute) as options in its place."""
    own = list(signature(command, eval_str=True).parameters.values())
    group = next(parameter for parameter in own if is_dataclass(parameter.annotation))
    kind: Any = group.annotation
    hints = get_type_hints(kind, include_extras=True)
    common = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(kind)
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        options = kind(**{parameter.name: given.pop(parameter.name) for parameter in common})
        command(**given, **{group.name: options})

    parameters = [*(parameter for parameter in own if parameter is not group), *common]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def words(text: str, option: str) -> list[str]:
    """Words between commas, of which there must be one; ConfigError names the option otherwise."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ConfigError(f"{option} names nothing; give words, comma separated", option)
    return found


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers from 1 between commas, of which there must be one; ConfigError names the option otherwise."""
    found = words(text, option)
    if not all(word.isdecimal() and int(word) for word in found):
        raise ConfigError(f"{option} = {text!r} is refused; give numbers from 1, comma separated", option)
    return [int(word) for word in found]


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


def parse_bytes(text: str, option: str = "--kv-memory") -> int:
    """Bytes from "80GiB", "24 GB", "512m" or "1000000"; ConfigError names the option otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"{option} = {text!r} is no amount of memory; write it like 512MiB or 80GiB", option)
    return int(float(match[1]) * UNITS[(match[2] or "").lower()])
