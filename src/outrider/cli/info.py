"""`outrider info MODEL`: what a model is, resolved: family, shape, size, quantisation, tokenizer; and with a context
configuration what attention would read, what would be resident and what slow."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options as opt

if TYPE_CHECKING:
    from outrider.models.load import LoadedModel
    from outrider.models.spec import DecoderSpec


def info(
    model: Annotated[str, typer.Argument(help="Alias, folder, .gguf file or hub id; fetched where needed.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    context_config: opt.ContextTable = None,
    kv_cache_dtype: opt.KvDtype = "auto",
    max_model_len: opt.MaxModelLen = None,
    max_num_seqs: opt.MaxNumSeqs = 16,
    kv_memory: opt.KvMemory = None,
) -> None:
    """Show what a model is, and what a context configuration would mean for it.

    Example: outrider info smollm2-135m --context-config '{"mode": "sparse", "budget": 1024}'
    """
    from outrider.models.load import load_model
    from outrider.models.load.progress import progress_bar

    with progress_bar() as progress:
        loaded = load_model(model, revision=revision, progress=progress)
    engine = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "kv_cache_dtype": kv_cache_dtype}
    engine["kv_memory"] = opt.parse_bytes(kv_memory) if kv_memory else None
    context = opt.parse_table(context_config, "--context-config") if context_config else None
    facts = {**describe(loaded), "context_plan": context_plan(loaded, context, engine)}
    if json_output:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print_table(facts)


def describe(loaded: LoadedModel) -> dict[str, Any]:
    """The facts as JSON types. Sizes in bytes, context in tokens; memory: weights as stored and one full context."""
    from outrider.api.core import AUTO
    from outrider.drafters.shipped import shipped_heads, with_heads

    spec, tokenizer = loaded.spec, loaded.tokenizer
    stored = [(str(getattr(w, "kind", "float32")), int(getattr(w, "nbytes", 0))) for w in loaded.weights.values()]
    kinds: dict[str, int] = {}
    for kind, size in stored:
        kinds[kind] = kinds.get(kind, 0) + size
    return {
        "model": loaded.name,
        "source": loaded.source,
        "path": str(loaded.path),
        "family": spec.family,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "context": spec.max_positions,
        "sliding_window": spec.sliding_window,
        "rope": None if spec.rope is None else {"kind": spec.rope.kind, "theta": spec.rope.theta, **spec.rope.scaling},
        "tied_embeddings": spec.tied,
        "parameters": sum(math.prod(weight.shape) for weight in loaded.weights.values()),
        "weight_bytes": sum(size for _, size in stored),
        "stored_as": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "kv_bytes_per_token": kv_bytes(spec),
        "memory_at_full_context": {
            kind: sum(size for _, size in stored) + spec.max_positions * size for kind, size in kv_bytes(spec).items()
        },
        "vocabulary": spec.vocab_size,
        "tokenizer_tokens": tokenizer.vocab_size,
        "end_tokens": [{"id": token, "text": _text(tokenizer, token)} for token in tokenizer.eos_token_ids],
        "chat_template": tokenizer.has_chat_template,
        "speculation_auto": asdict(with_heads(AUTO, shipped_heads(loaded)) or AUTO),
    }


def context_plan(loaded: LoadedModel, context: Mapping[str, Any] | None, engine: Mapping[str, Any]) -> dict[str, Any]:
    """What the configuration means on this machine; ConfigError or CapacityError as a start with it would give."""
    from outrider.api.core import Options
    from outrider.api.resolve import Described, outlook, resolve

    options = Options.parse(None, context, engine)
    kind = options.engine.kv_cache_dtype
    weight_bytes = sum(int(getattr(weight, "nbytes", 0)) for weight in loaded.weights.values())
    model = Described(loaded.spec, weight_bytes, "bfloat16" if kind == "auto" else kind)
    return outlook(model, resolve(model, options), options.engine).to_dict()


def kv_bytes(spec: DecoderSpec) -> dict[str, int]:
    """Bytes of one token's keys and values in all layers, by type; int8 has a scale per entry and head."""
    heads = 2 * spec.num_layers * spec.num_kv_heads
    return {
        "bfloat16": heads * spec.head_dim * 2,
        "float32": heads * spec.head_dim * 4,
        "int8": heads * (spec.head_dim + 4),
    }


def _text(tokenizer: Any, token: int) -> str:
    return str(tokenizer.token_bytes(token).decode("utf-8", "replace"))


def print_table(facts: dict[str, Any]) -> None:
    """One fact a line."""
    width = max(map(len, facts))
    for name, value in facts.items():
        if name != "context_plan":
            print(f"{name.replace('_', ' '):<{width}}  {_shown(name, value)}")
    for line in facts.get("context_plan", {}).get("lines", ()):
        title, _, text = line.partition(": ") if not line.startswith(" ") else ("", "", line.strip())
        print(f"{title:<{width}}  {text}")


def _drafter(entry: Any) -> str:
    """A drafter as people call it: of a head or model in a folder the folder's name too."""
    if isinstance(entry, str):
        return entry
    path = entry.get("path")
    return f"{entry['name']} {Path(path).name}" if path else str(entry["name"])


def _shown(name: str, value: Any) -> str:
    """A value for people."""
    if name in ("stored_as", "memory_at_full_context"):
        return ", ".join(f"{kind} {size / 1e6:,.1f} MB" for kind, size in value.items())
    if name == "kv_bytes_per_token":
        return ", ".join(f"{kind} {size:,}" for kind, size in value.items())
    if name == "speculation_auto":
        length = "-".join(map(str, value["num_speculative_tokens"]))
        drafters = " + ".join(map(_drafter, value["drafters"]))
        return f"{drafters}, {value['vote']} vote, {value['length']} length {length}"
    if name == "end_tokens":
        return ", ".join(f"{token['text']} ({token['id']})" for token in value) or "none"
    if name == "rope" and value:
        return ", ".join(f"{key} {number}" for key, number in value.items())
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)
