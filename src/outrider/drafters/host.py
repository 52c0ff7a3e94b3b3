"""What a drafter may use of the engine it rides ahead of; built once at start and handed to every factory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from outrider.errors import ConfigError
from outrider.models.load import Tokenizer
from outrider.models.spec import Decoder, KVCache, Weights
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


def _no_store(decoder: Decoder, tokens: int) -> Store:
    raise ConfigError("this drafter needs KV memory, which the engine was started without", "drafters")


@dataclass(frozen=True)
class Host:
    """The target's side of the bargain.

    vocab_size: length of the target's tokenizer (not the padded width of its logits); ids from 0 may be proposed.
    new_store: (decoder, tokens) -> KV memory for that many tokens in all.
    """

    vocab_size: int
    tokenizer: Tokenizer | None = None  # None: tokenizers are not compared
    target: Decoder | None = None
    weights: Weights | None = None  # of the target
    max_sequences: int = 16
    max_model_len: int = 2048
    new_store: Callable[[Decoder, int], Store] = _no_store
