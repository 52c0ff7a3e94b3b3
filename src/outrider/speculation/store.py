"""KV memory of a drafter: the same pages and tables as the target's, without sharing between sequences."""

from __future__ import annotations

from outrider.memory.pool import PagePool
from outrider.memory.table import PageTable
from outrider.models.spec import Decoder, KVCache

PAGE_SIZE = 16  # tokens


class DraftStore:
    """One cache and one pool."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._pool = PagePool(cache.num_pages)

    @property
    def available(self) -> int:
        """Pages that can still be reserved."""
        return self._pool.available

    @property
    def held(self) -> int:
        """Pages that belong to a sequence."""
        return self._pool.held

    def table(self) -> PageTable:
        """An empty table of a new sequence."""
        return PageTable(self._pool, self.cache.page_size)


def new_store(decoder: Decoder, tokens: int) -> DraftStore:
    """KV memory for `tokens` tokens of all sequences together."""
    return DraftStore(decoder.new_cache(-(-tokens // PAGE_SIZE), PAGE_SIZE))
