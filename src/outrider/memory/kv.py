"""KV memory of one decoder: reserve slots before a forward pass, keep or release them after it.

`prepare` and `commit` are a pair: between them a sequence's speculative entries exist but belong to nobody else; after
`commit` only the accepted ones are left. Nobody edits a length. The pair serves chains, trees, aborts and preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from outrider.memory.keep import NoPrompts, Prompt
from outrider.memory.look import Gain
from outrider.memory.place.single import Pass, Run, SingleTier
from outrider.memory.place.step import Need
from outrider.memory.pool import PagePool
from outrider.memory.reading import FullAttention, Reading
from outrider.memory.report import ContextReport
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
    passes: tuple[Pass, ...] = ()  # forward passes that the step takes; empty: one, over resident KV


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


@dataclass(frozen=True)
class _Done:
    """One sequence's part of a step that is being committed."""

    place: int  # in the plan
    work: Work
    draft: Draft
    verdict: Verdict
    start: int  # entries before the step

    @property
    def tokens(self) -> list[int]:
        """The tokens that were committed."""
        known = self.work.sequence.tokens[self.start : self.start + self.work.rows]
        return [*known, *(self.draft.tokens[node] for node in self.verdict.accepted)]

    @property
    def nodes(self) -> list[int]:
        """Rows of the accepted draft nodes in the sequence's part of the pass."""
        return [self.work.rows + node for node in self.verdict.accepted]


class KVMemory:
    """Pages of one KV cache, shared by the sequences that a decoder runs."""

    def __init__(
        self,
        cache: KVCache,
        prefix_caching: bool = True,
        reading: Reading | None = None,
        place: SingleTier | None = None,
        prompts: NoPrompts | None = None,
    ) -> None:
        self.cache = cache
        self.reading: Reading = reading or FullAttention()
        self.place = place or SingleTier(cache)
        self.prompts = prompts or NoPrompts()
        self.pool = PagePool(cache.num_pages)
        self.pool.on_take, self.pool.on_free = self.place.took, self.place.freed
        self.prefix_queries = 0  # tokens looked up
        self.prefix_hits = 0  # tokens found
        self._prefix_caching = prefix_caching
        self._tables: dict[int, PageTable] = {}
        self._sequences: dict[int, Sequence] = {}  # those that have a table
        self._kept: dict[int, _Kept] = {}
        self._lost: frozenset[int] = frozenset()
        self._view = np.zeros((0, 0), np.int32)

    @property
    def capacity(self) -> int:
        """Entries that one sequence alone could hold."""
        return self.cache.num_pages * self.cache.page_size

    def room(self) -> int:
        """Pages that can be taken while those sequences run that have pages, or have just been adopted."""
        self.pool.limit = self.place.room(self.pool, self._sequences.values())
        return self.pool.available

    def missing(self, sequence: Sequence, rows: int) -> int:
        """Pages that `rows` more entries of a sequence would take from the pool."""
        return self._table(sequence).missing(sequence.computed + rows)

    def due(self, sequence: Sequence) -> int:
        """How many known tokens of a sequence the next pass may compute."""
        return self.reading.due(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Start a waiting sequence on the pages of an earlier one that began alike."""
        table = self._table(sequence)
        if not self._prefix_caching or sequence.params.prompt_logprobs is not None:
            return
        sequence.computed = table.adopt(sequence.tokens[: self.due(sequence) + 1])
        self._recall(sequence, table)
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
        self.place.fit(self.pool, self._needs, self._sequences.values())
        contexts = np.array([work.sequence.computed for work in plan.works], np.int32)
        pages = self._pages(plan)
        selection = self.reading.select(plan, drafts, pages)
        passes = self.place.passes(lambda: self._step_needs(plan, drafts, selection))
        return View(pages, slots[0] if len(slots) == 1 else np.concatenate(slots), contexts, selection, passes)

    def finish(self) -> frozenset[int]:
        """The forward passes of the step are over: the sequences whose rows mean nothing, since KV that they read was
        lost. `commit` leaves them out, and `redo` comes next for them."""
        self._lost = self.place.finish()
        return self._lost

    def commit(
        self, plan: Plan, drafts: SequenceOf[Draft], verdicts: SequenceOf[Verdict], seen: Seen | None = None
    ) -> None:
        """Keep the known tokens and the accepted part of every draft; release the rest."""
        steps = [
            _Done(index, work, draft, verdict, work.sequence.computed)
            for index, (work, draft, verdict) in enumerate(zip(plan.works, drafts, verdicts, strict=True))
            if work.sequence.id not in self._lost
        ]
        for done in steps:
            self._commit(done)
        self.reading.observe(self._gains(steps, seen))
        for done in steps:
            self._publish(done)
            self._rejoin(done.work.sequence)

    def release(self, sequence: Sequence) -> None:
        """A sequence ended: it holds nothing afterwards. Published pages stay findable."""
        self._kept.pop(sequence.id, None)
        self._keep(sequence)
        self._release_pages(sequence)
        self.reading.forget(sequence)

    def suspend(self, sequence: Sequence) -> None:
        """A sequence is preempted: its pages are free, and it starts anew when `restore` is called.

        What a recomputation would not give again, bit for bit, is kept aside; usually nothing.
        """
        whole, computed = self.reading.whole(sequence), sequence.computed
        if computed > whole:
            run = self._run(sequence, whole, computed - whole)
            rows = self.place.take(run)
            if rows is None:
                self.reading.redo(sequence)
            else:
                held = self.reading.take(sequence, run.slots)
                self._kept[sequence.id] = _Kept(whole, computed - whole, rows, held)
        self._release_pages(sequence)
        sequence.computed = 0

    def redo(self, sequence: Sequence) -> None:
        """KV of a sequence was lost: it starts anew, reads everything until it is where it was, and shares nothing of
        what it had."""
        for page in self._table(sequence).pages:
            self.pool.withdraw(page)
        self.reading.redo(sequence)
        self._kept.pop(sequence.id, None)
        self._release_pages(sequence)
        sequence.computed = 0

    def restore(self, sequence: Sequence) -> None:
        """A waiting sequence is admitted: make room for what it took along. The plan has made sure that pages
        suffice."""
        kept = self._kept.get(sequence.id)
        if kept is not None:
            self._table(sequence).reserve(kept.start + kept.entries)
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

    def report(self) -> ContextReport:
        """What was read, and what moved for it."""
        return replace(self.reading.report(), tiers=self.place.report(), kept=self.prompts.report())

    def close(self) -> None:
        """Nothing is asked any more."""
        self.reading.close()
        self.place.close()

    def check(self) -> None:
        """Prove that the pool is whole and that the tables hold exactly the held pages."""
        self.pool.check()
        owned = {page for table in self._tables.values() for page in table.pages}
        assert len(owned) == self.pool.held, "a page is held by nobody, or a sequence has a page that is not held"

    def _commit(self, done: _Done) -> None:
        sequence, table = done.work.sequence, self._table(done.work.sequence)
        start = done.start + done.work.rows
        for offset, node in enumerate(done.verdict.accepted):
            if node != offset:  # a tree's accepted path is compacted; parents come first, so nothing is overwritten
                source, target = table.slots(start + node, 1)[0], table.slots(start + offset, 1)[0]
                self.cache.move(int(source), int(target))
        sequence.computed = start + len(done.verdict.accepted)
        run = self._run(sequence, done.start, sequence.computed - done.start)
        self.place.commit(run, np.array([*range(done.work.rows), *done.nodes], np.int32))
        kept = self._kept.get(sequence.id)
        table.shrink(sequence.computed if kept is None else kept.start + kept.entries)

    def _publish(self, done: _Done) -> None:
        """Let other prompts find pages that have become full, as far as they are whole."""
        sequence, size = done.work.sequence, self.cache.page_size
        whole = min(sequence.computed, self.reading.whole(sequence))
        if self._prefix_caching and whole // size > done.start // size:
            known = sequence.tokens[: done.start] + done.tokens
            self._table(sequence).publish(known[:whole])

    def _rejoin(self, sequence: Sequence) -> None:
        """All that is whole has been computed again: what the sequence took along counts from now on."""
        kept = self._kept.get(sequence.id)
        if kept is not None and sequence.computed == kept.start:
            run = self._run(sequence, kept.start, kept.entries)
            self.place.put(run, kept.rows)
            sequence.computed += kept.entries
            self.reading.rejoin(run.slots, kept.held)
            del self._kept[sequence.id]

    def _recall(self, sequence: Sequence, table: PageTable) -> None:
        """A prompt that an earlier start kept is there too, as far as it is longer and there are pages for it."""
        size = self.cache.page_size
        known = sequence.tokens[: (min(sequence.prompt_length, len(sequence.tokens) - 1)) // size * size]
        found = self.prompts.find(known)
        if found <= sequence.computed or table.missing(found) > self.pool.available:
            return
        prompt = self.prompts.load(known[:found])
        if prompt is None:
            return
        table.reserve(found)
        first = sequence.computed // size
        run, new = self._run(sequence, sequence.computed, found - sequence.computed), prompt.after(first)
        self.place.put(run, new.planes)
        sequence.computed = found
        self.reading.rejoin(run.slots)
        self.reading.recall(run.pages[first:], new.held)
        table.publish(known[:found])

    def _keep(self, sequence: Sequence) -> None:
        """What is whole of a prompt that was computed to its end stays on disk, where that is wanted."""
        size = self.cache.page_size
        wanted = (sequence.prompt_length - 1) // size * size  # the last token is computed anew, to say what follows
        whole = min(wanted, sequence.computed, self.reading.whole(sequence))
        if whole == wanted > 0:
            self.prompts.keep(sequence.tokens[:whole], partial(self._whole_pages, sequence, whole))

    def _whole_pages(self, sequence: Sequence, entries: int) -> Prompt | None:
        """A copy of a sequence's first entries, all of full pages; None where some are lost."""
        run = self._run(sequence, 0, entries)
        planes = self.place.take(run)
        held = self.reading.keep(run.pages[: entries // self.cache.page_size])
        return None if planes is None else Prompt(planes, held)

    def _run(self, sequence: Sequence, start: int, count: int) -> Run:
        table = self._table(sequence)
        return Run(sequence.id, np.asarray(table.pages, np.int32), start, table.slots(start, count))

    def _gains(self, steps: SequenceOf[_Done], seen: Seen | None) -> Iterator[Gain]:
        """What each sequence of the plan has gained; states only where somebody reads them."""
        states = seen if self.reading.states else None
        for done in steps:
            sequence, start, accepted = done.work.sequence, done.start, done.verdict.accepted
            yield Gain(
                sequence.id,
                start,
                self._table(sequence).slots(start, sequence.computed - start),
                done.tokens,
                following(done.work, done.verdict, start),
                seen.queries(done.place, accepted) if seen else None,
                states.features(done.place, accepted) if states else None,
            )

    def _needs(self) -> list[Need]:
        """What every sequence has that has pages."""
        return [self._need(sequence, 0, None) for sequence in self._sequences.values()]

    def _step_needs(self, plan: Plan, drafts: SequenceOf[Draft], selection: Selection | None) -> list[Need]:
        """What a step reads of its sequences."""
        needs = []
        for s, (work, draft) in enumerate(zip(plan.works, drafts, strict=True)):
            count = -1 if selection is None else int(selection.counts[0, s, 0])
            chosen = None if count < 0 or selection is None else selection.entries[:, s, :, :count]
            needs.append(self._need(work.sequence, work.rows + len(draft), chosen))
        return needs

    def _need(self, sequence: Sequence, block: int, entries: Int32 | None) -> Need:
        pages = np.asarray(self._table(sequence).pages, np.int32)
        return Need(sequence.id, pages, sequence.computed, block, entries)

    def _release_pages(self, sequence: Sequence) -> None:
        table = self._tables.pop(sequence.id, None)
        if table is not None:
            del self._sequences[sequence.id]
            table.release()
            self.place.release(sequence.id)

    def _table(self, sequence: Sequence) -> PageTable:
        table = self._tables.get(sequence.id)
        if table is None:
            table = self._tables[sequence.id] = PageTable(self.pool, self.cache.page_size)
            self._sequences[sequence.id] = sequence
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
