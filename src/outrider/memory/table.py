"""One sequence's map from entries to physical pages, with the digests of its full pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from outrider.memory.pool import Digest, PagePool
from outrider.types import Int32


class PageTable:
    """Entry e of the sequence lives in slot pages[e // page_size] * page_size + e % page_size."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pages: list[int] = []
        self._pool = pool
        self._page_size = page_size
        self._digests: list[Digest] = []  # of the leading full pages that are committed

    def missing(self, entries: int) -> int:
        """Pages that `reserve(entries)` would take."""
        return max(0, -(-entries // self._page_size) - len(self.pages))

    def reserve(self, entries: int) -> None:
        """Own pages for the first `entries` entries."""
        for _ in range(self.missing(entries)):
            self.pages.append(self._pool.take())

    def shrink(self, entries: int) -> None:
        """Release the pages behind the first `entries` entries."""
        keep = -(-entries // self._page_size)
        while len(self.pages) > keep:
            self._pool.release(self.pages.pop())

    def slots(self, start: int, count: int) -> Int32:
        """Physical slots [count] of entries start .. start + count - 1."""
        size = self._page_size
        if count == 1:
            return np.array([self.pages[start // size] * size + start % size], np.int32)
        entries = np.arange(start, start + count, dtype=np.int32)
        return np.asarray(self.pages, np.int32)[entries // size] * size + entries % size

    def adopt(self, tokens: Sequence[int]) -> int:
        """Share published pages that hold the beginning of `tokens`; returns how many entries they cover.

        At least one token is left to compute, since only a forward pass says what follows.
        """
        assert not self.pages, "only an empty table adopts a prefix"
        for digest in self._chain(tokens, (len(tokens) - 1) // self._page_size):
            page = self._pool.find(digest)
            if page is None:
                break
            self._pool.retain(page)
            self.pages.append(page)
            self._digests.append(digest)
        return len(self.pages) * self._page_size

    def publish(self, tokens: Sequence[int]) -> None:
        """Publish the full pages of `tokens`, all of which are committed."""
        full = len(tokens) // self._page_size
        if full == len(self._digests):
            return
        for index, digest in enumerate(self._chain(tokens, full)):
            if index == len(self._digests):
                self._digests.append(digest)
                self._pool.publish(self.pages[index], digest)

    def release(self) -> None:
        """Release everything, last page first, so that the beginning of a prompt is evicted last."""
        self.shrink(0)
        self._digests.clear()

    def _chain(self, tokens: Sequence[int], pages: int) -> Iterator[Digest]:
        """Digests of the first pages, each covering all tokens before it; known ones are not computed again."""
        yield from self._digests[:pages]
        parent = self._digests[-1] if self._digests else b""
        for index in range(len(self._digests), pages):
            block = np.asarray(tokens[index * self._page_size : (index + 1) * self._page_size], np.int32)
            parent = blake2b(parent + block.tobytes(), digest_size=32).digest()
            yield parent
