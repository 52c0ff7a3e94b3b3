"""KV memory of one decoder: reserve slots before a forward pass, keep or release them after it.

`prepare` and `commit` are a pair: between them a sequence's speculative entries exist but belong to nobody else; after
`commit` only the accepted ones are left. Nobody edits a length. The pair serves chains, trees, aborts and preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from outrider.memory.look import Gain
from outrider.memory.pool import PagePool
from outrider.memory.reading import FullAttention, Reading
from outrider.memory.table import PageTable
from outrider.models.spec import KVCache
from outrider.sequence import Plan, Sequence, Work
from outrider.types import Draft, Float32, Int32, Selection, Verdict

#: Pages whose keys are looked at together when a cache full of them is read anew: bounds the scratch memory.
PAGES_AT_ONCE = 256


@dataclass(frozen=True)
class View:
    """Where the rows of one forward pass live. S sequences, T rows, P pages of the longest sequence."""

    pages: Int32  # [S, P]
    slots: Int32  # [T]
    contexts: Int32  # [S]
    selection: Selection | None = None  # None: everything is read


class Seen(Protocol):
    """What a forward pass shows of itself."""

    def queries(self, index: int, accepted: SequenceOf[int]) -> Float32 | None:
        """Queries [taps, heads, head_dim] of the last row that the index-th sequence of the plan keeps."""
        ...

    def features(self, index: int, accepted: SequenceOf[int]) -> Float32 | None:
        """States [taps, entries, hidden] of the rows that the index-th sequence of the plan keeps."""
        ...


class _Kept(NamedTuple):
    """What a preempted sequence takes along: its entries from `start` on, which no recomputation would give again."""

    start: int
    entries: int
    rows: Any
    held: Any  # by the reading


class KVMemory:
    """Pages of one KV cache, shared by the sequences that a decoder runs."""

    def __init__(self, cache: KVCache, prefix_caching: bool = True, reading: Reading | None = None) -> None:
        self.cache = cache
        self.reading: Reading = reading or FullAttention()
        self.pool = PagePool(cache.num_pages)
        self.prefix_queries = 0  # tokens looked up
        self.prefix_hits = 0  # tokens found
        self._prefix_caching = prefix_caching
        self._tables: dict[int, PageTable] = {}
        self._kept: dict[int, _Kept] = {}
        self._view = np.zeros((0, 0), np.int32)

    @property
    def capacity(self) -> int:
        """Entries that one sequence alone could hold."""
        return self.cache.num_pages * self.cache.page_size

    def missing(self, sequence: Sequence, rows: int) -> int:
        """Pages that `rows` more entries of a sequence would take from the pool."""
        return self._table(sequence).missing(sequence.computed + rows)

    def due(self, sequence: Sequence) -> int:
        """How many known tokens of a sequence the next pass may compute."""
        return self.reading.due(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Start a waiting sequence on the pages of an earlier one that began alike."""
        if not self._prefix_caching or sequence.params.prompt_logprobs is not None:
            return
        sequence.computed = self._table(sequence).adopt(sequence.tokens[: self.due(sequence) + 1])
        self.reading.adopt(sequence)
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
        pages = self._pages(plan)
        selection = self.reading.select(plan, drafts, pages)
        return View(pages, slots[0] if len(slots) == 1 else np.concatenate(slots), contexts, selection)

    def commit(
        self, plan: Plan, drafts: SequenceOf[Draft], verdicts: SequenceOf[Verdict], seen: Seen | None = None
    ) -> None:
        """Keep the known tokens and the accepted part of every draft; release the rest."""
        starts = [work.sequence.computed for work in plan.works]
        for work, draft, verdict in zip(plan.works, drafts, verdicts, strict=True):
            self._commit(work, draft, verdict)
        self.reading.observe(self._gains(plan, drafts, verdicts, starts, seen))
        for work, draft, verdict, start in zip(plan.works, drafts, verdicts, starts, strict=True):
            self._publish(work, draft, verdict, start)
            self._rejoin(work.sequence)

    def release(self, sequence: Sequence) -> None:
        """A sequence ended: it holds nothing afterwards. Published pages stay findable."""
        self._kept.pop(sequence.id, None)
        self._release_pages(sequence)
        self.reading.forget(sequence)

    def suspend(self, sequence: Sequence) -> None:
        """A sequence is preempted: its pages are free, and it starts anew when `restore` is called.

        What a recomputation would not give again, bit for bit, is kept aside; usually nothing.
        """
        whole, computed = self.reading.whole(sequence), sequence.computed
        if computed > whole:
            slots = self._table(sequence).slots(whole, computed - whole)
            held = self.reading.take(sequence, slots)
            self._kept[sequence.id] = _Kept(whole, computed - whole, self.cache.take(slots), held)
        self._release_pages(sequence)
        sequence.computed = 0

    def restore(self, sequence: Sequence) -> None:
        """A waiting sequence is admitted: put back what it took along. The plan has made sure that pages suffice."""
        kept = self._kept.get(sequence.id)
        if kept is not None:
            table = self._table(sequence)
            table.reserve(kept.start + kept.entries)
            self.cache.put(table.slots(kept.start, kept.entries), kept.rows)
            self._rejoin(sequence)

    def reserve(self, sequence_id: int, entries: int) -> PageTable:
        """The pages of a running sequence, enough for `entries`; those behind its tokens go at the next `commit`."""
        table = self._tables[sequence_id]
        table.reserve(entries)
        return table

    def reread(self, reading: Reading) -> None:
        """Read in another way from now on, while nobody runs. Published pages stay; the new reading is shown them.

        One that rests on the target's states cannot be shown what was computed before: then they go.
        """
        assert not self._tables, "sequences are running"
        self.reading.close()
        self.reading = reading
        if reading.states:
            self.pool.drop_cached()
        size = self.cache.page_size
        pages = self.pool.published
        for start in range(0, len(pages), PAGES_AT_ONCE):
            part = pages[start : start + PAGES_AT_ONCE]
            reading.rejoin(np.concatenate([np.arange(p * size, (p + 1) * size, dtype=np.int32) for p in part]))

    def close(self) -> None:
        """Nothing is asked any more."""
        self.reading.close()

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
        sequence.computed = start + len(verdict.accepted)
        kept = self._kept.get(sequence.id)
        table.shrink(sequence.computed if kept is None else kept.start + kept.entries)

    def _publish(self, work: Work, draft: Draft, verdict: Verdict, start: int) -> None:
        """Let other prompts find pages that have become full, as far as they are whole."""
        sequence, size = work.sequence, self.cache.page_size
        whole = min(sequence.computed, self.reading.whole(sequence))
        if self._prefix_caching and whole // size > start // size:
            accepted = [draft.tokens[node] for node in verdict.accepted]
            known = sequence.tokens[: start + work.rows] + accepted
            self._table(sequence).publish(known[:whole])

    def _rejoin(self, sequence: Sequence) -> None:
        """All that is whole has been computed again: what the sequence took along counts from now on."""
        kept = self._kept.get(sequence.id)
        if kept is not None and sequence.computed == kept.start:
            sequence.computed += kept.entries
            self.reading.rejoin(self._table(sequence).slots(kept.start, kept.entries), kept.held)
            del self._kept[sequence.id]

    def _gains(
        self,
        plan: Plan,
        drafts: SequenceOf[Draft],
        verdicts: SequenceOf[Verdict],
        starts: SequenceOf[int],
        seen: Seen | None,
    ) -> Iterator[Gain]:
        """What each sequence of the plan has gained; states only where somebody reads them."""
        states = seen if self.reading.states else None
        for index, (work, draft, verdict, start) in enumerate(zip(plan.works, drafts, verdicts, starts, strict=True)):
            sequence, accepted = work.sequence, verdict.accepted
            yield Gain(
                sequence.id,
                start,
                self._table(sequence).slots(start, sequence.computed - start),
                [*sequence.tokens[start : start + work.rows], *(draft.tokens[node] for node in accepted)],
                following(work, verdict, start),
                seen.queries(index, accepted) if seen else None,
                states.features(index, accepted) if states else None,
            )

    def _release_pages(self, sequence: Sequence) -> None:
        table = self._tables.pop(sequence.id, None)
        if table is not None:
            table.release()

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


def following(work: Work, verdict: Verdict, start: int) -> int | None:
    """The token behind what a step computed: the target's own, or the next known one; None where the text ended."""
    if len(verdict.tokens) > len(verdict.accepted):
        return verdict.tokens[len(verdict.accepted)]
    end = start + work.rows
    return work.sequence.tokens[end] if end < len(work.sequence.tokens) else None
