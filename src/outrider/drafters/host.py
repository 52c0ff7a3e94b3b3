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

    def missing(self, entries: int) -> int:
        """Pages to be reserved before there is room for so many entries."""
        ...

    def reserve(self, entries: int) -> None:
        """Make room for so many entries; the store must have that many pages `available`."""
        ...

    def shrink(self, entries: int) -> None:
        """Keep so many entries; pages behind them go back."""
        ...

    def slots(self, start: int, count: int) -> Int32:
        """Slots [count] of entries start .. start + count - 1."""
        ...

    def release(self) -> None:
        """Give every page back."""
        ...


class Store(Protocol):
    """KV memory of one drafter: a cache, and tables over one pool of its pages."""

    cache: KVCache

    @property
    def available(self) -> int:
        """Pages that can still be reserved."""
        ...

    def table(self) -> Pages:
        """An empty map over the pool."""
        ...


@dataclass(frozen=True)
class Trail:
    """Where a sequence's drafted entries may lie, behind its committed ones, and what drafting reads of these."""

    pages: Int32  # [P] physical page of every logical page, drafted entries included
    slots: Int32  # [depth] of the drafted entries
    entries: Int32  # [G, KV heads, n] committed entries to read, ascending


class SparseContext(Protocol):
    """The target's own KV, for passes that draft over a selected context (memory/trails.py fulfils it)."""

    cache: KVCache
    groups: Int32  # [L] as in Selection

    def trail(self, sequence_id: int, length: int, depth: int) -> Trail | None:
        """Room for `depth` entries behind `length` committed ones; None where all of the context would be read."""
        ...


def _no_store(decoder: Decoder, tokens: int) -> Store:
    raise ConfigError("this drafter needs KV memory, which the engine was started without", "drafters")


@dataclass(frozen=True)
class Host:
    """The target's side of the bargain.

    vocab_size: length of the target's tokenizer (not the padded width of its logits); ids from 0 may be proposed.
    new_store: (decoder, tokens) -> KV memory for that many tokens in all.
    sparse: the target's own KV and what to read of it, in lossless mode.
    """

    vocab_size: int
    tokenizer: Tokenizer | None = None  # None: tokenizers are not compared
    target: Decoder | None = None
    weights: Weights | None = None  # of the target
    max_sequences: int = 16
    max_model_len: int = 2048
    new_store: Callable[[Decoder, int], Store] = _no_store
    sparse: SparseContext | None = None  # None: nothing is selected for drafts
