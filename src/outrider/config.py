"""Composed, frozen configuration. Every field has a default, a unit and a line of documentation.

`from_mapping` refuses unknown keys by name. "auto" is resolved once (api/resolve.py), printed at start and stored in
every benchmark record.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from outrider.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class EngineConfig:
    """How the engine batches and how much it may use."""

    max_model_len: int | None = None  # tokens; None: what the model was trained for, lowered to what memory holds
    max_num_seqs: int = 16  # sequences decoded together
    max_num_batched_tokens: int = 512  # rows of one forward pass, drafts included; bounds a prefill chunk
    page_size: int = 16  # tokens per KV page
    kv_memory: int | None = None  # bytes for KV pages; None: enough for max_num_seqs x 2048 tokens or one full context
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"  # type of resident K and V
    prefix_caching: bool = True  # reuse the pages of prompts that begin alike
    seed: int = 0  # of requests that bring none
    threads: int | None = None  # CPU threads of the forward pass; None: the cores this process may use

    def __post_init__(self) -> None:
        sizes = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "kv_memory", "threads")
        _at_least(self, 1, sizes)
        _at_least(self, 0, ("seed",))


@dataclass(frozen=True)
class SpeculativeConfig:
    """Who drafts, how drafts are merged and how far they reach (docs/speculation.md)."""

    drafters: Sequence[Any] = ("ngram",)  # names, model paths, or tables {"name": ..., options}
    num_speculative_tokens: int | Sequence[int] = 4  # tokens per draft, or [low, high] for adaptive length
    vote: Literal["hedge", "majority", "none"] = "none"  # how several drafters agree on one draft
    length: Literal["fixed", "trend", "goodput"] = "fixed"  # how the draft length adapts
    pipeline: bool = False  # draft for some requests while the target verifies others
    flow: Literal["published", "little"] = "published"  # when the pipeline's drafting pauses
    vote_options: Any = None  # table of the vote's own settings
    length_options: Any = None  # table of the length policy's own settings


@dataclass(frozen=True)
class ContextConfig:
    """What attention reads and where KV lives (docs/context.md)."""

    mode: Literal["full", "sparse", "bounded", "lossless"] = "full"
    selector: Any = "pages"  # pages, window, or {"name": "head", "path": FOLDER} of a retrieval head
    budget: int = 1024  # entries attention reads per KV head, sinks and window included
    sinks: int = 4  # first entries that are always read
    window: int = 64  # latest entries that are always read
    kv_memory: int | None = None  # bytes of KV in fast memory; None: everything stays resident
    kv_path: str | None = None  # folder of the slow tier's files; None: no slow tier
    slow_kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"  # KV in the slow tier; auto: as resident
    slow_layers: int | None = None  # layers kept in the slow tier; None: as few as kv_memory asks for
    prefetch: int | None = None  # slow layers whose loads may run ahead of the one that computes; None: all
    elastic: bool = True  # load only entries that the step before did not read; False: all of them, to compare
    keep_prompts: int | None = None  # tokens; prompts this long or longer stay in kv_path for later starts; None: none
    keep_bytes: int = 8 << 30  # of kept prompts in kv_path; the least recently used ones are removed first
    group: int = 0  # consecutive layers that share a selection; 0: all of them, as published
    taps: int = 8  # layers of every group whose queries `pages` goes by; 0: all of them
    sticky: float = 1.0  # nats by which a newcomer must beat an entry that was read last; 0: choose anew
    first_full: int | None = None  # full decoding steps before the first selection; None: 4 with pages, 1 with a head
    full_every: int = 32  # bounded mode: steps from one full one to the next, at most
    min_captured: float = 0.8  # bounded mode: estimated share of attention below which the next step is full

    def __post_init__(self) -> None:
        _at_least(self, 1, ("budget", "kv_memory", "full_every", "keep_prompts", "keep_bytes"))
        _at_least(self, 0, ("sinks", "window", "group", "taps", "sticky", "first_full", "slow_layers", "prefetch"))
        if not 0 <= self.min_captured <= 1:
            raise ConfigError(
                f"min_captured = {self.min_captured} is refused; it is a share, from 0 to 1", "min_captured"
            )
        if self.kv_path is not None and (not self.kv_path.strip() or "\0" in self.kv_path):
            raise ConfigError(f"kv_path = {self.kv_path!r} is refused; name a folder, or leave it out", "kv_path")

    @property
    def may_move(self) -> bool:
        """Whether layers may go to the slow tier; a folder alone only keeps prompts."""
        return self.kv_path is not None and (self.kv_memory is not None or bool(self.slow_layers))


def _at_least(config: Any, least: int, names: Sequence[str]) -> None:
    """Refuse fields that are set and too small."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:  # not a number is refused, too
            raise ConfigError(f"{name} = {value} is refused; use {least} or more", name)


def named_options(entry: Any) -> tuple[str, dict[str, Any]] | None:
    """(name, options) of what a user typed: a name, or a table {"name": ..., options}. None for anything else."""
    if isinstance(entry, str):
        return entry, {}
    options = dict(entry) if isinstance(entry, Mapping) else {}
    name = options.pop("name", None)
    return (name, options) if isinstance(name, str) else None


def from_mapping(cls: type[T], values: Mapping[str, Any] | None, where: str) -> T:
    """Build a config from keys that a user typed: unknown keys and wrong kinds are errors that name the fix."""
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(f"{where} = {values!r} is refused; give a table", where)
    values = dict(values or {})
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    for key, value in values.items():
        if key not in known:
            raise ConfigError.unknown(key, known, where)
        if not _fits(value, hints[key]):
            raise ConfigError(f"{where}: {key} = {value!r} is refused; expected {_spell(hints[key])}", key)
    return cls(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the kind a field declares."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is not None:
        return isinstance(value, (list, tuple)) and all(_fits(v, get_args(hint)[0]) for v in value)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return value is None if hint is type(None) else isinstance(value, hint)


def _spell(hint: Any) -> str:
    """A field's kind in words, for error messages."""
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if origin in (Union, types.UnionType):
        return " or ".join(_spell(option) for option in get_args(hint))
    if origin is not None:
        return f"a list of {_spell(get_args(hint)[0])}"
    return {type(None): "nothing", Any: "anything"}.get(hint, getattr(hint, "__name__", str(hint)))
