"""What an engine asks: which entries does each sequence read in this step? Selection, mode and memory in one object.

selection = reader.select(looks)                  # None: everything, by the kernels of full attention
reader.observe(sequence, slots, keys, queries)    # after a commit: the rows that were kept
reader.forget(sequence)
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.config import ContextConfig
from outrider.errors import ConfigError
from outrider.memory.select.base import Selector, View, check_budget, group_layers, spread_taps
from outrider.memory.select.choose import Chooser
from outrider.memory.select.head import HeadSelector, RetrievalHead
from outrider.memory.select.pages import PageSelector, PageSummaries
from outrider.memory.select.policy import ReadPolicy, make_policy
from outrider.memory.select.sticky import Sticky
from outrider.memory.select.window import WindowSelector
from outrider.models.spec import DecoderSpec
from outrider.types import Float32, Int32, Selection

TAPS_PER_GROUP = 1
#: Tokens of context in a step from which handing sequences to threads costs less than it gains.
WORTH_THREADS = 8192


@dataclass(frozen=True)
class Look:
    """One sequence before a step. `block` rows follow `length` committed entries; prefill says so and reads all."""

    sequence_id: int
    length: int
    block: int
    pages: Int32  # [P] physical page of every logical page
    budget: int | None = None  # the request's own; None: the configured one
    prefill: bool = False


class ContextReader:
    """Selects by one selector under one policy, and keeps what the selector needs to know between steps."""

    def __init__(
        self, chooser: Chooser, policy: ReadPolicy, budget: int, summaries: PageSummaries | None, threads: int = 1
    ) -> None:
        self.chooser = chooser
        self.taps = chooser.selector.taps
        self._policy, self._budget, self._summaries = policy, budget, summaries
        self._queries: dict[int, Float32] = {}
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held for selection, beside what the sequences' own queries take."""
        return 0 if self._summaries is None else self._summaries.nbytes

    def select(self, looks: Sequence[Look]) -> Selection | None:
        """The step's Selection, or None where every sequence reads everything."""
        return self.chooser.join(self.choose_all(looks))

    def choose_all(self, looks: Sequence[Look]) -> list[Int32 | None]:
        """`choose` for every sequence, long ones on several threads: scoring runs without the interpreter's lock."""
        if self._threads == 1 or len(looks) == 1 or sum(look.length for look in looks) < WORTH_THREADS:
            return [self.choose(look) for look in looks]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "outrider-select")
        return list(self._pool.map(self.choose, looks))

    def choose(self, look: Look) -> Int32 | None:
        """Entries [G, KV heads, n] of one sequence, or None for everything."""
        if look.prefill:
            return None
        policy, view = self._policy, self._view(look)
        full = policy.wants_full(look.sequence_id)
        entries, scores = (None, None) if full else self.chooser.choose_scored(view)
        captured = self.chooser.captured(view, entries, scores) if policy.watches else 1.0
        policy.note(look.sequence_id, entries is None, captured)
        return entries

    def observe(self, sequence_id: int, slots: Int32, keys: Float32, queries: Float32) -> None:
        """Rows that were committed, in entry order: slots [n], and of the tapped layers rotated keys
        [taps, n, KV heads, head_dim] and the rotated queries of the last row [taps, heads, head_dim]."""
        if self._summaries is not None:
            self._summaries.fold(slots, keys)
            self._queries[sequence_id] = np.array(queries, np.float32)

    def copy_page(self, source: int, target: int) -> None:
        """A page was copied."""
        if self._summaries is not None:
            self._summaries.copy(source, target)

    def forget(self, sequence_id: int) -> None:
        """The sequence ended. A preempted one that keeps its pages is not forgotten."""
        self._queries.pop(sequence_id, None)
        self._policy.forget(sequence_id)
        self.chooser.forget(sequence_id)

    def close(self) -> None:
        """Stop the threads. Closing twice is fine."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _view(self, look: Look) -> View:
        budget = self._budget if look.budget is None else look.budget
        return View(look.sequence_id, look.length, look.block, budget, look.pages, self._queries.get(look.sequence_id))


def make_reader(
    config: ContextConfig,
    spec: DecoderSpec,
    num_pages: int,
    page_size: int,
    head: RetrievalHead | None = None,
    threads: int = 1,
) -> ContextReader:
    """The reader that a configuration asks for. ConfigError where a selector is unknown or lacks what it needs."""
    if config.mode != "full":
        check_budget(config.budget, config.sinks, config.window)
    groups = group_layers(spec.num_layers, config.group)
    summaries = None
    selector: Selector
    if config.mode == "full" or config.selector == "window":
        selector = WindowSelector(groups, spec.num_kv_heads)
    elif config.selector == "pages":
        taps, _ = spread_taps(groups, TAPS_PER_GROUP)
        summaries = PageSummaries(len(taps), num_pages, spec.num_kv_heads, page_size, spec.head_dim)
        selector = PageSelector(summaries, groups, TAPS_PER_GROUP)
    elif head is not None:
        selector = HeadSelector(head, groups)
    elif config.selector == "head":
        raise ConfigError(
            "selector = 'head' needs a retrieval head; give its folder, or use pages or window", "selector"
        )
    else:
        raise ConfigError.unknown(config.selector, ("pages", "window", "head"), "context_config.selector")
    chooser = Chooser(selector, spec.num_kv_heads, config.sinks, config.window, Sticky(config.sticky))
    return ContextReader(chooser, make_policy(config), config.budget, summaries, threads)


def float_rows(plane: NDArray, scales: NDArray | None, slots: Int32, head_dim: int) -> Float32:
    """Rows [n, KV heads, head_dim] of a cache plane [pages, KV heads, page size, >= head_dim] as fp32.

    float32 as it is, uint16 as bfloat16, int8 times its scales [pages, KV heads, page size].
    """
    page_size = plane.shape[2]
    pages, offsets = slots // page_size, slots % page_size
    rows = plane[pages, :, offsets, :head_dim]
    if plane.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    if plane.dtype == np.int8:
        assert scales is not None, "int8 KV has scales"
        return rows.astype(np.float32) * scales[pages, :, offsets][..., None]
    return rows.astype(np.float32)
