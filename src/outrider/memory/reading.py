"""What attention reads in an engine's passes: everything, or what a selector picks, with what must hold around it.

`FullAttention` is the null object. `SparseAttention` selects for every decoding sequence; `LosslessAttention` only for
passes that draft. Both keep three promises, whatever else runs:

* Entries that were computed while everything was read are *whole*: a prompt always is, an answer as far as it was read
  in full. Whole entries come out of a recomputation bit for bit, so they alone are published to other prompts.
* The others cannot be recomputed. A sequence that is preempted takes them along (memory/kv.py).
* What a selection rests on (summaries of keys, the latest queries) covers committed entries only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.config import ContextConfig
from outrider.memory.look import Gain, Look
from outrider.memory.report import ContextReport
from outrider.memory.selectors import full_steps, read_selector
from outrider.models.spec import Decoder, DecoderSpec, KVCache, Weights
from outrider.sequence import Plan, Sequence
from outrider.types import Draft, Int32, Reads, Selection

#: Entries whose keys are read together, as floats of every tapped layer: bounds the scratch memory of long prompts.
FOLD_AT_ONCE = 256

if TYPE_CHECKING:
    from outrider.memory.select import ContextReader, HeadMemory


class Reading(Protocol):
    """Decides what a step reads, from its `prepare` to its `commit`.

    taps, states: layers whose queries, and layers whose output states, it is to be shown.
    """

    taps: tuple[int, ...]
    states: tuple[int, ...]
    mark: str  # names what kept prompts rest on beside KV; empty: nothing else

    def select(self, plan: Plan, drafts: SequenceOf[Draft], pages: Int32) -> Selection | None:
        """What the step reads; pages [S, P] of the plan's sequences. None: everything."""
        ...

    def observe(self, gains: Iterable[Gain]) -> None:
        """What the step committed."""
        ...

    def due(self, sequence: Sequence) -> int:
        """How many known tokens the next pass may compute: whole entries and others never share a pass."""
        ...

    def whole(self, sequence: Sequence) -> int:
        """Leading entries that a recomputation gives again, bit for bit."""
        ...

    def adopt(self, sequence: Sequence) -> None:
        """The sequence starts on `computed` whole entries of an earlier one."""
        ...

    def take(self, sequence: Sequence, slots: Int32) -> Any:
        """What is held for entries that a preempted sequence takes along, for `rejoin`."""
        ...

    def rejoin(self, slots: Int32, held: Any = None) -> None:
        """Entries that a preempted sequence took along, or that a cache holds, are in `slots`, ascending."""
        ...

    def keep(self, pages: Int32) -> list[NDArray]:
        """What is held of full pages and cannot be found from their keys, each [pages, ...], for `recall`."""
        ...

    def recall(self, pages: Int32, held: SequenceOf[NDArray]) -> None:
        """An earlier start kept this of pages that are here again."""
        ...

    def redo(self, sequence: Sequence) -> None:
        """All that the sequence has computed was lost; it is computed again, reading everything."""
        ...

    def reads(self, sequence: Sequence) -> Reads | None:
        """What the sequence's latest step read."""
        ...

    def report(self) -> ContextReport: ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended: release what is held for it. Never fails."""
        ...

    def close(self) -> None: ...


class FullAttention:
    """Everything is read, always; nothing is held."""

    taps: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    mark = ""

    def select(self, plan: Plan, drafts: SequenceOf[Draft], pages: Int32) -> Selection | None:
        return None

    def observe(self, gains: Iterable[Gain]) -> None:
        """Nothing to learn."""

    def due(self, sequence: Sequence) -> int:
        return sequence.remaining

    def whole(self, sequence: Sequence) -> int:
        return sequence.computed

    def adopt(self, sequence: Sequence) -> None:
        """All entries are whole."""

    def take(self, sequence: Sequence, slots: Int32) -> Any:
        """Nobody takes anything along."""

    def rejoin(self, slots: Int32, held: Any = None) -> None:
        """Nothing is held."""

    def keep(self, pages: Int32) -> list[NDArray]:
        return []

    def recall(self, pages: Int32, held: SequenceOf[NDArray]) -> None:
        """Nothing is held."""

    def redo(self, sequence: Sequence) -> None:
        """It would be read in full anyway."""

    def reads(self, sequence: Sequence) -> Reads | None:
        return None

    def report(self) -> ContextReport:
        return ContextReport()

    def forget(self, sequence: Sequence) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing runs."""


class SparseAttention:
    """Decoding sequences read what `reader` chooses; prompts, and what is recomputed, read everything."""

    def __init__(self, reader: ContextReader, cache: KVCache, mode: str) -> None:
        self.reader = reader
        self.taps, self.states, self.mark = reader.taps, reader.states, reader.mark
        self._cache, self._mode = cache, mode
        self._whole: dict[int, int] = {}  # by sequence id
        self._partly: set[int] = set()  # sequences that do not read everything in the open step
        self._select_s = 0.0

    def select(self, plan: Plan, drafts: SequenceOf[Draft], pages: Int32) -> Selection | None:
        started = perf_counter()
        looks = list(self._looks(plan, drafts, pages))
        chosen = self.reader.choose_all(looks)
        self._partly = {look.sequence_id for look, part in zip(looks, chosen, strict=True) if part is not None}
        selection = self.reader.chooser.join(chosen)
        self._select_s += perf_counter() - started
        return selection

    def observe(self, gains: Iterable[Gain]) -> None:
        gained = [gain for gain in gains if len(gain.slots)]
        self._fold(gain.slots for gain in gained)
        started = perf_counter()
        self.reader.learn(gained)
        self._select_s += perf_counter() - started
        for number, start, slots, *_ in gained:
            if number not in self._partly and start <= self._whole.get(number, 0):
                self._whole[number] = max(start + len(slots), self._whole.get(number, 0))

    def due(self, sequence: Sequence) -> int:
        behind = self._behind(sequence)
        return min(behind, sequence.remaining) if behind > 0 else sequence.remaining

    def whole(self, sequence: Sequence) -> int:
        return self._whole.get(sequence.id, 0)

    def adopt(self, sequence: Sequence) -> None:
        self._whole[sequence.id] = max(sequence.computed, self.whole(sequence))

    def take(self, sequence: Sequence, slots: Int32) -> Any:
        return self.reader.take(sequence.id, slots)

    def rejoin(self, slots: Int32, held: Any = None) -> None:
        self._fold([slots])
        self.reader.put(slots, held)

    def keep(self, pages: Int32) -> list[NDArray]:
        return self.reader.keep(pages)

    def recall(self, pages: Int32, held: SequenceOf[NDArray]) -> None:
        self.reader.recall(pages, held)

    def redo(self, sequence: Sequence) -> None:
        self._whole[sequence.id] = max(sequence.computed, self._whole.get(sequence.id, 0))

    def reads(self, sequence: Sequence) -> Reads | None:
        return self.reader.reads.get(sequence.id)

    def report(self) -> ContextReport:
        return self.reader.report(self._mode, self._select_s)

    def forget(self, sequence: Sequence) -> None:
        self._whole.pop(sequence.id, None)
        self.reader.forget(sequence.id)

    def close(self) -> None:
        self.reader.close()

    def _looks(self, plan: Plan, drafts: SequenceOf[Draft], pages: Int32) -> Iterator[Look]:
        for work, draft, row in zip(plan.works, drafts, pages, strict=True):
            sequence = work.sequence
            budget, prefill = sequence.params.context_budget, self._behind(sequence) > 0
            yield Look(sequence.id, sequence.computed, work.rows + len(draft), row, budget, prefill)

    def _behind(self, sequence: Sequence) -> int:
        """Entries that are still to be computed reading everything; 0 or less while decoding.

        These are the rest of the prompt and, after a preemption, of all that was whole before it.
        """
        return max(sequence.prompt_length, self.whole(sequence)) - sequence.computed

    def _fold(self, parts: Iterable[Int32]) -> None:
        """Committed keys into the selector's summaries."""
        if self.taps:
            several = list(parts)
            slots = several[0] if len(several) == 1 else np.concatenate([np.zeros(0, np.int32), *several])
            for first in range(0, len(slots), FOLD_AT_ONCE):
                part = slots[first : first + FOLD_AT_ONCE]
                self.reader.fold(part, self._cache.key_rows(self.taps, part))


class LosslessAttention(SparseAttention):
    """The target's own passes read everything, so all entries are whole; passes that draft read what `choose` gives."""

    def __init__(self, reader: ContextReader, cache: KVCache, mode: str) -> None:
        super().__init__(reader, cache, mode)
        self._budgets: dict[int, int | None] = {}

    def select(self, plan: Plan, drafts: SequenceOf[Draft], pages: Int32) -> Selection | None:
        for work in plan.works:
            self._budgets[work.sequence.id] = work.sequence.params.context_budget
        self.reader.follow(self._looks(plan, drafts, pages))
        return None

    def choose(self, sequence_id: int, length: int, block: int, pages: Int32) -> Int32 | None:
        """Entries [G, KV heads, n] that drafting behind `length` entries reads, or None for everything."""
        started = perf_counter()
        chosen = self.reader.choose(Look(sequence_id, length, block, pages, self._budgets.get(sequence_id)))
        self._select_s += perf_counter() - started
        return chosen

    def due(self, sequence: Sequence) -> int:
        return sequence.remaining

    def whole(self, sequence: Sequence) -> int:
        return sequence.computed

    def forget(self, sequence: Sequence) -> None:
        self._budgets.pop(sequence.id, None)
        super().forget(sequence)


def make_reading(
    config: ContextConfig,
    spec: DecoderSpec,
    cache: KVCache,
    threads: int | None = None,
    head: HeadMemory | None = None,
) -> FullAttention | SparseAttention:
    """The reading that a configuration asks for; `head` is the memory of its retrieval head, where it names one.

    ConfigError where the selector is unknown or the budget too small.
    """
    if config.mode == "full":
        return FullAttention()
    from outrider.kernels.cpu.pool import usable_threads  # only who selects pays for importing these
    from outrider.memory.select import make_reader

    pages, size = cache.num_pages, cache.page_size
    if config.mode == "lossless":
        drafting = make_reader(replace(config, mode="sparse", first_full=full_steps(config)), spec, pages, size, head)
        return LosslessAttention(drafting, cache, config.mode)
    reader = make_reader(config, spec, pages, size, head, usable_threads(threads))
    return SparseAttention(reader, cache, config.mode)


def make_head(
    config: ContextConfig, decoder: Decoder, weights: Weights, cache: KVCache, positions: int
) -> HeadMemory | None:
    """The memory of the retrieval head that a configuration names, for contexts of up to `positions`; None: no head.

    ModelError where the head is not one of this target.
    """
    choice = read_selector(config.selector)
    if config.mode == "full" or choice.path is None:
        return None
    from outrider.memory.select.head_memory import HeadMemory
    from outrider.memory.select.head_weights import load_weights

    pruned, embeddings = load_weights(choice.path, decoder.spec, weights["embed"], positions)
    return HeadMemory(pruned, embeddings, lambda: decoder.taps, cache.num_pages, cache.page_size)
