"""What a drafter may use of the engine it rides ahead of; built once at start and handed to every factory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.errors import ConfigError
from outrider.models.spec import Decoder, KVCache
from outrider.types import Int32


class Pages(Protocol):
    """One sequence's map from entries to slots of a drafter's cache (memory/table.py fulfils it)."""

    pages: list[int]

    def missing(self, entries: int) -> int: ...
    def reserve(self, entries: int) -> None: ...
    def shrink(self, entries: int) -> None: ...
    def slots(self, start: int, count: int) -> Int32: ...
    def release(self) -> None: ...


class Store(Protocol):
    """KV memory of one drafter: a cache, and tables over one pool of its pages."""

    cache: KVCache

    @property
    def available(self) -> int:
        """Pages that can still be reserved."""
        ...

    def table(self) -> Pages: ...


@dataclass(frozen=True)
class LoadedModel:
    """A smaller model as a drafter gets it: its decoder and the text of every token of its tokenizer, by id."""

    decoder: Decoder
    vocabulary: Sequence[str]


def _no_models(name: str) -> LoadedModel:
    raise ConfigError(f"drafter {name!r} needs a model loader, which this engine was started without", "drafters")


def _no_store(decoder: Decoder) -> Store:
    raise ConfigError("a model drafter needs KV memory, which this engine was started without", "drafters")


@dataclass(frozen=True)
class Host:
    """The target's side of the bargain.

    vocab_size: length of the target's tokenizer (not the padded width of its logits); ids from 0 may be proposed.
    vocabulary: text of every token by id, to compare tokenizers; empty: not compared.
    aliases: names under which models are known, besides paths and hub ids.
    """

    vocab_size: int
    vocabulary: Sequence[str] = ()
    target: Decoder | None = None
    aliases: frozenset[str] = frozenset()
    load_model: Callable[[str], LoadedModel] = _no_models
    new_store: Callable[[Decoder], Store] = _no_store
