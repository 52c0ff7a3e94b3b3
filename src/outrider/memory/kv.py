"""KV memory of one decoder: reserve slots before a forward pass, keep or release them after it.

`prepare` and `commit` are a pair: between them a sequence's speculative entries exist but belong to nobody else; after
`commit` only the accepted ones are left. Nobody edits a length. The pair serves chains, trees, aborts and preemption.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from outrider.memory.pool import PagePool
from outrider.memory.table import PageTable
from outrider.models.spec import KVCache
from outrider.sequence import Plan, Sequence, Work
from outrider.types import Draft, Int32, Verdict


@dataclass(frozen=True)
class View:
    """Where the rows of one forward pass live. S sequences, T rows, P pages of the longest sequence."""

    pages: Int32  # [S, P]
    slots: Int32  # [T]
    contexts: Int32  # [S]


class KVMemory:
    """Pages of one KV cache, shared by the sequences that a decoder runs."""

    def __init__(self, cache: KVCache, prefix_caching: bool = True) -> None:
        self.cache = cache
        self.pool = PagePool(cache.num_pages)
        self.prefix_queries = 0  # tokens looked up
        self.prefix_hits = 0  # tokens found
        self._prefix_caching = prefix_caching
        self._tables: dict[int, PageTable] = {}
        self._view = np.zeros((0, 0), np.int32)

    @property
    def capacity(self) -> int:
        """Entries that one sequence alone could hold."""
        return self.cache.num_pages * self.cache.page_size

    def missing(self, sequence: Sequence, rows: int) -> int:
        """Pages that `rows` more entries of a sequence would take from the pool."""
        return self._table(sequence).missing(sequence.computed + rows)

    def adopt(self, sequence: Sequence) -> None:
        """Start a waiting sequence on the pages of an earlier one that began alike."""
        if not self._prefix_caching or sequence.params.prompt_logprobs is not None:
            return
        sequence.computed = self._table(sequence).adopt(sequence.tokens)
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.computed
        self.prefix_queries += len(sequence.tokens)
        self.prefix_hits += sequence.computed

    def prepare(self, plan: Plan, drafts: SequenceOf[Draft]) -> View:
        """Reserve slots for the known tokens and drafts of a step. The plan has made sure that pages suffice."""
        slots = []
        for work, draft in zip(plan.works, drafts, strict=True):
            table, count = self._table(work.sequence), work.rows + len(draft)
            table.reserve(work.sequence.computed + count)
            slots.append(table.slots(work.sequence.computed, count))
        contexts = np.array([work.sequence.computed for work in plan.works], np.int32)
        return View(self._pages(plan), slots[0] if len(slots) == 1 else np.concatenate(slots), contexts)

    def commit(self, plan: Plan, drafts: SequenceOf[Draft], verdicts: SequenceOf[Verdict]) -> None:
        """Keep the known tokens and the accepted part of every draft; release the rest."""
        for work, draft, verdict in zip(plan.works, drafts, verdicts, strict=True):
            self._commit(work, draft, verdict)

    def release(self, sequence: Sequence) -> None:
        """A sequence ended or is preempted: it holds nothing afterwards. Published pages stay findable."""
        table = self._tables.pop(sequence.id, None)
        if table is not None:
            table.release()

    def check(self) -> None:
        """Prove that the pool is whole and that the tables hold exactly the held pages."""
        self.pool.check()
        owned = {page for table in self._tables.values() for page in table.pages}
        assert len(owned) == self.pool.held, "a page is held by nobody, or a sequence has a page that is not held"

    def _commit(self, work: Work, draft: Draft, verdict: Verdict) -> None:
        sequence, table = work.sequence, self._table(work.sequence)
        start = sequence.computed + work.rows
        for offset, node in enumerate(verdict.accepted):
            if node != offset:  # a tree's accepted path is compacted; parents come first, so nothing is overwritten
                source, target = table.slots(start + node, 1)[0], table.slots(start + offset, 1)[0]
                self.cache.move(int(source), int(target))
        committed = start + len(verdict.accepted)
        sequence.computed = committed
        table.shrink(committed)
        if self._prefix_caching and committed // self.cache.page_size > (start - work.rows) // self.cache.page_size:
            accepted = [draft.tokens[node] for node in verdict.accepted]
            table.publish((sequence.tokens[:start] + accepted)[:committed])

    def _table(self, sequence: Sequence) -> PageTable:
        table = self._tables.get(sequence.id)
        if table is None:
            table = self._tables[sequence.id] = PageTable(self.pool, self.cache.page_size)
        return table

    def _pages(self, plan: Plan) -> Int32:
        """Logical to physical pages [S, P] of the plan's sequences, in a buffer that grows and is reused."""
        rows = [self._table(work.sequence).pages for work in plan.works]
        width = max(map(len, rows))
        if self._view.shape[0] < len(rows) or self._view.shape[1] < width:
            self._view = np.zeros((max(len(rows), self._view.shape[0]), max(2 * width, self._view.shape[1])), np.int32)
        for index, pages in enumerate(rows):
            self._view[index, : len(pages)] = pages
        return self._view[: len(rows)]
