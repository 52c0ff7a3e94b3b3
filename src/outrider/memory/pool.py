"""Physical KV pages with reference counts, and the published ones that later prompts may find.

A page is free (nobody's), held (references > 0) or cached (published, no references, evicted oldest first).
free + held + cached = num_pages at any time; `check` proves it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from outrider.errors import CapacityError

Digest = bytes


def ignore(page: int) -> None:
    """Nobody wants to know."""


class PagePool:
    """Hands out pages and counts who holds them. It never touches their bytes."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.touched = 0  # pages that were ever handed out: what an array of pages really takes of memory
        self._free = list(range(num_pages - 1, -1, -1))  # used again before others are touched: last in, first out
        self._references = [0] * num_pages
        self._digests: dict[int, Digest] = {}
        self._published: dict[Digest, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.limit = num_pages  # pages that may be held
        self.on_take: Callable[[int], object] = ignore  # told of every page that is handed out ...
        self.on_free: Callable[[int], object] = ignore  # ... and that is nobody's again

    @property
    def available(self) -> int:
        """Pages that `take` can still give: free ones and cached ones that it may evict."""
        return min(self.num_pages, self.limit) - self.held

    @property
    def held(self) -> int:
        """Pages with at least one reference."""
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def cached(self) -> list[int]:
        """Published pages that nobody holds, the oldest first."""
        return list(self._cached)

    @property
    def free(self) -> list[int]:
        """Nobody's pages; the last one is taken next."""
        return self._free

    def take(self) -> int:
        """A page with one reference; evicts the oldest cached page when none is free."""
        if not self._free:
            self._evict()
        page = self._free.pop()
        self.touched = max(self.touched, page + 1)
        self._references[page] = 1
        self.on_take(page)
        return page

    def evict_to(self, pages: int) -> None:
        """Forget the oldest cached pages until at most `pages` are in use, as far as that goes."""
        while self._cached and self.num_pages - len(self._free) > pages:
            self._evict()

    def withdraw(self, page: int) -> None:
        """Later prompts must not find this page any more: what it holds cannot be read."""
        digest = self._digests.pop(page, None)
        if digest is not None:
            del self._published[digest]
        if page in self._cached:
            del self._cached[page]
            self._give(page)

    def retain(self, page: int) -> None:
        """One more holder of a held or cached page."""
        self._cached.pop(page, None)
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one leaves the page cached if it was published, else free."""
        assert self._references[page] > 0, f"page {page} is released but not held"
        self._references[page] -= 1
        if self._references[page]:
            return
        if page in self._digests:
            self._cached[page] = None
        else:
            self._give(page)

    @property
    def published(self) -> list[int]:
        """The pages that later prompts may find."""
        return sorted(self._digests)

    def publish(self, page: int, digest: Digest) -> None:
        """Let later prompts find a full page of committed tokens. A digest that is published already stays as it is."""
        if digest not in self._published and page not in self._digests:
            self._published[digest] = page
            self._digests[page] = digest

    def find(self, digest: Digest) -> int | None:
        """The published page of a digest; the caller retains it before anything else is taken."""
        return self._published.get(digest)

    def drop_cached(self) -> None:
        """Forget every cached page (their bytes are about to be invalid or unwanted)."""
        while self._cached:
            self._evict()

    def _evict(self) -> None:
        if not self._cached:
            raise CapacityError("no KV page is free; lower max_num_seqs or max_model_len, or raise kv_memory")
        page, _ = self._cached.popitem(last=False)
        del self._published[self._digests.pop(page)]
        self._give(page)

    def _give(self, page: int) -> None:
        """A page is nobody's."""
        self._free.append(page)
        self.on_free(page)

    def check(self) -> None:
        """Prove that no page is owned twice or lost."""
        free, cached = set(self._free), set(self._cached)
        held = {page for page, count in enumerate(self._references) if count}
        assert all(count >= 0 for count in self._references), "a reference count is negative"
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(cached) + len(held) == self.num_pages, "a page is lost or has two states"
        assert len(free | cached | held) == self.num_pages, "a page is lost or has two states"
        assert cached <= set(self._digests), "a cached page is not published"
        assert {p: d for d, p in self._published.items()} == self._digests, "the published index is torn"
