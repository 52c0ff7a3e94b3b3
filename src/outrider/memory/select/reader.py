"""What an engine asks: which entries does each sequence read in this step? Selection, mode and memory in one object.

selection = reader.select(looks)                  # None: everything, by the kernels of full attention
reader.fold(slots, keys)                          # after a commit: the rows that were kept
reader.learn(gains)                               # and what their pass showed
reader.forget(sequence)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.config import ContextConfig
from outrider.errors import ConfigError
from outrider.memory.look import Gain, Look
from outrider.memory.report import ContextReport
from outrider.memory.select.base import Selector, Share, View, check_budget, group_layers, spread_taps
from outrider.memory.select.choose import Chooser
from outrider.memory.select.head import HeadSelector
from outrider.memory.select.head_memory import HeadMemory
from outrider.memory.select.pages import PageSelector, PageSummaries
from outrider.memory.select.policy import ReadPolicy, make_policy
from outrider.memory.select.sticky import Sticky
from outrider.memory.select.tally import Tally, share_kept
from outrider.memory.select.window import WindowSelector
from outrider.memory.selectors import full_steps, read_selector
from outrider.models.spec import DecoderSpec
from outrider.types import Float32, Int32, Reads, Selection

#: Steps of a sequence from one look at the captured and kept shares to the next; looking costs a little.
LOOK_EVERY = 8
#: Tokens of context in a step from which handing sequences to threads costs less than it gains.
WORTH_THREADS = 8192


class ContextReader:
    """Selects by one selector under one policy, and keeps what the selector needs to know between steps."""

    def __init__(
        self,
        chooser: Chooser,
        policy: ReadPolicy,
        budget: int,
        summaries: PageSummaries | None,
        threads: int = 1,
        head: HeadMemory | None = None,
        first_full: int = 0,
    ) -> None:
        self.chooser = chooser
        self.taps = chooser.selector.taps
        self.states = () if head is None else head.taps
        self.mark = "" if head is None else head.fingerprint
        self._head, self._first_full = head, first_full
        self._policy, self._budget, self._summaries = policy, budget, summaries
        self.reads: dict[int, Reads] = {}  # by sequence id: its latest step
        self._tally = Tally()
        self._queries: dict[int, Float32] = {}
        self._last: dict[int, Int32] = {}  # the latest selection of each sequence
        self._steps: dict[int, int] = {}
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held for selection, beside what the sequences' own queries take."""
        return sum(held.nbytes for held in (self._summaries, self._head) if held is not None)

    def select(self, looks: Sequence[Look]) -> Selection | None:
        """The step's Selection, or None where every sequence reads everything."""
        return self.chooser.join(self.choose_all(looks))

    def choose_all(self, looks: Sequence[Look]) -> list[Int32 | None]:
        """`choose` for every sequence, long ones on several threads: scoring runs without the interpreter's lock."""
        self.follow(looks)
        self._ask(looks)
        if self._threads == 1 or sum(look.length for look in looks) < WORTH_THREADS:
            return [self._choose_counted(look) for look in looks]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "outrider-select")
        if len(looks) == 1:  # its layers side by side, else sequences
            return [self._choose_counted(looks[0], self._pool.map)]
        chosen = list(self._pool.map(self._choose, looks))
        for look in looks:
            self._count(look)
        return chosen

    def choose(self, look: Look) -> Int32 | None:
        """Entries [G, KV heads, n] of one sequence, or None for everything."""
        self._ask([look])
        return self._choose_counted(look)

    def follow(self, looks: Iterable[Look]) -> None:
        """The sequences of the step to come, before it."""
        if self._head is not None:
            self._head.follow(looks)

    def _ask(self, looks: Sequence[Look]) -> None:
        """The head's queries of the sequences that are about to select, in one go."""
        if self._head is not None:
            ids = [look.sequence_id for look in looks if self._selects(look)]
            for sequence_id, query in zip(ids, self._head.ask(ids), strict=True):
                if query is not None:
                    self._queries[sequence_id] = query

    def _selects(self, look: Look) -> bool:
        """Whether the sequence may read less than everything in this step."""
        return not look.prefill and look.length > self.chooser.keep(self._view(look))

    def _choose_counted(self, look: Look, share: Share = map) -> Int32 | None:
        chosen = self._choose(look, share)
        self._count(look)
        return chosen

    def _choose(self, look: Look, share: Share = map) -> Int32 | None:
        """`choose`, leaving the common record alone: several threads may be in here, for different sequences."""
        if look.prefill:
            return None
        policy, view = self._policy, self._view(look)
        steps = self._steps.get(look.sequence_id, 0)
        full = steps < self._first_full or policy.wants_full(look.sequence_id)
        entries, scores = (None, None) if full else self.chooser.choose_scored(view, share)
        watched = steps >= self._first_full and (steps - self._first_full) % LOOK_EVERY == 0
        captured = self.chooser.captured(view, entries, scores) if watched or policy.watches else None
        policy.note(look.sequence_id, entries is None, 1.0 if captured is None else captured)
        self.reads[look.sequence_id] = self._describe(view, entries, captured, watched)
        return entries

    def fold(self, slots: Int32, keys: Float32) -> None:
        """Rows that were committed, in entry order within a sequence: slots [n], and the tapped layers' rotated keys
        [taps, n, KV heads, head_dim]."""
        if self._summaries is not None:
            self._summaries.fold(slots, keys)

    def remember(self, sequence_id: int, queries: Float32) -> None:
        """The rotated queries [taps, heads, head_dim] of a sequence's latest committed row."""
        self._queries[sequence_id] = np.array(queries, np.float32)

    def learn(self, gains: Sequence[Gain]) -> None:
        """What a step committed, and what its pass showed of it."""
        for gain in gains:
            if gain.queries is not None:
                self.remember(gain.sequence_id, gain.queries)
        if self._head is not None:
            self._head.learn(gains)

    def take(self, sequence_id: int, slots: Int32) -> Any:
        """What selection holds for some entries that no recomputation would give again, for `put`."""
        return None if self._head is None else self._head.take(sequence_id, slots)

    def put(self, slots: Int32, held: Any) -> None:
        """Entries that were taken are back, in other slots."""
        if self._head is not None and held is not None:
            self._head.put(slots, held)

    def keep(self, pages: Int32) -> list[NDArray]:
        """What selection holds of full pages and could not find again from their keys, for `recall`."""
        return [] if self._head is None else self._head.keep(pages)

    def recall(self, pages: Int32, held: Sequence[NDArray]) -> None:
        """What `keep` gave is back, in other pages."""
        if self._head is not None:
            self._head.recall(pages, held)

    def report(self, mode: str, select_s: float) -> ContextReport:
        """What was read so far."""
        return self._tally.report(mode, self.chooser.selector.name, self._budget, select_s, self.nbytes)

    def forget(self, sequence_id: int) -> None:
        """The sequence ended. A preempted one that keeps its pages is not forgotten."""
        for held in (self._queries, self._last, self._steps, self.reads):
            held.pop(sequence_id, None)
        self._policy.forget(sequence_id)
        self.chooser.forget(sequence_id)
        if self._head is not None:
            self._head.forget(sequence_id)

    def close(self) -> None:
        """Stop the threads. Closing twice is fine."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _describe(self, view: View, entries: Int32 | None, captured: float | None, watched: bool) -> Reads:
        """What a step reads; the overlap is worked out where somebody watches."""
        if entries is None:
            return Reads(view.budget, view.length, view.length)
        last = self._last.get(view.sequence_id)
        overlap = share_kept(last, entries, view.length) if watched and last is not None else None
        self._last[view.sequence_id] = entries
        weighed = captured if self.chooser.selector.weighs else None
        return Reads(view.budget, entries.shape[2], view.length, weighed, overlap)

    def _count(self, look: Look) -> None:
        if not look.prefill:
            self._steps[look.sequence_id] = self._steps.get(look.sequence_id, 0) + 1
            self._tally.add(self.reads[look.sequence_id])

    def _view(self, look: Look) -> View:
        budget = self._budget if look.budget is None else look.budget
        return View(look.sequence_id, look.length, look.block, budget, look.pages, self._queries.get(look.sequence_id))


def make_reader(
    config: ContextConfig,
    spec: DecoderSpec,
    num_pages: int,
    page_size: int,
    head: HeadMemory | None = None,
    threads: int = 1,
) -> ContextReader:
    """The reader that a configuration asks for. ConfigError where a selector is unknown or lacks what it needs."""
    if config.mode != "full":
        check_budget(config.budget, config.sinks, config.window)
    groups = group_layers(spec.num_layers, config.group)
    name = "window" if config.mode == "full" else read_selector(config.selector).name
    summaries = None
    selector: Selector
    if name == "window":
        selector = WindowSelector(groups, spec.num_kv_heads)
    elif name == "pages":
        taps, _ = spread_taps(groups, config.taps)
        summaries = PageSummaries(len(taps), num_pages, spec.num_kv_heads, page_size, spec.head_dim)
        selector = PageSelector(summaries, groups, config.taps)
    else:
        if head is None:
            raise ConfigError("selector = 'head' needs the head's memory, which nobody made", "selector")
        selector = HeadSelector(head, spec)
    chooser = Chooser(selector, spec.num_kv_heads, config.sinks, config.window, Sticky(config.sticky))
    first_full = 0 if config.mode == "full" else full_steps(config)
    return ContextReader(chooser, make_policy(config), config.budget, summaries, threads, head, first_full)
