"""A plan becomes one forward pass: lay the rows out flat, run the decoder, hand every sequence its own rows back."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import accumulate

import numpy as np

from outrider.memory.kv import View
from outrider.memory.place.single import Pass
from outrider.models.spec import Decoder, KVCache
from outrider.sequence import Plan, Work
from outrider.types import Batch, Draft, Float32, Result, Selection, SlowView
from outrider.verify.judge import Rows

TREE_ROWS = 64  # rows of one sequence that an ancestor mask can name


class Forward:
    """One forward pass and where each sequence's rows and logits are in it."""

    def __init__(self, plan: Plan, drafts: SequenceOf[Draft], result: Result) -> None:
        self._works, self._drafts, self._result = plan.works, drafts, result
        self._samples = [work.samples for work in plan.works]  # as of now: a commit moves the sequences on
        counts = [work.rows + len(draft) for work, draft in zip(plan.works, drafts, strict=True)]
        wanted = [len(logit_rows(work, draft)) for work, draft in zip(plan.works, drafts, strict=True)]
        self._row_starts = list(accumulate(counts, initial=0))
        self._logit_starts = list(accumulate(wanted, initial=0))

    def rows(self, index: int) -> Rows:
        """The root's and every draft node's best token and logits; empty where the step does not sample."""
        stop = self._logit_starts[index + 1]
        start = stop - 1 - len(self._drafts[index]) if self._samples[index] else stop
        return Rows(self._result.best[start:stop], self._slice(start, stop))

    def prompt_logits(self, index: int) -> Float32:
        """Logits [rows, V] of the known tokens of a sequence whose prompt is scored."""
        start = self._logit_starts[index]
        logits = self._slice(start, start + self._works[index].rows)
        assert logits is not None, "prompt positions are scored from logits"
        return logits

    def queries(self, index: int, accepted: SequenceOf[int]) -> Float32 | None:
        """Queries [taps, heads, head_dim] of the last row that a sequence keeps; None where no row is sampled."""
        if self._result.queries is None or not self._samples[index]:
            return None
        root = self._logit_starts[index + 1] - 1 - len(self._drafts[index])
        return self._result.queries[:, root + 1 + accepted[-1] if accepted else root]

    def features(self, index: int, accepted: SequenceOf[int]) -> Float32 | None:
        """Hidden states [taps, rows + accepted, hidden] of the tokens that a sequence committed in this step."""
        if self._result.features is None:
            return None
        start, rows = self._row_starts[index], self._works[index].rows
        kept = [*range(start, start + rows), *(start + rows + node for node in accepted)]
        return self._result.features[:, kept]

    def _slice(self, start: int, stop: int) -> Float32 | None:
        return None if self._result.logits is None else self._result.logits[start:stop]


class Runner:
    """Runs plans on one decoder and its KV cache."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder, self._cache = decoder, cache

    def forward(self, plan: Plan, drafts: SequenceOf[Draft], view: View) -> Forward:
        """The known tokens and drafts of a plan: one forward pass, or several where slow layers ask for it."""
        batch = layout(plan, drafts, view)
        if not view.passes:
            return Forward(plan, drafts, self.decoder.forward(batch, self._cache))
        return Forward(plan, drafts, join([self._pass(batch, part) for part in view.passes]))

    def _pass(self, batch: Batch, part: Pass) -> Result:
        step = part.open()
        rows = cut(batch, part.first, part.last, step.views)
        return self.decoder.forward(rows, self._cache, step.before_layer)


def layout(plan: Plan, drafts: SequenceOf[Draft], view: View) -> Batch:
    """The flat rows of a plan: of every sequence its known tokens, then its draft."""
    tokens: list[int] = []
    positions: list[int] = []
    starts, wanted = [0], []
    for work, draft in zip(plan.works, drafts, strict=True):
        first, sequence = work.sequence.computed, work.sequence
        wanted += [starts[-1] + row for row in logit_rows(work, draft)]
        tokens += sequence.tokens[first : first + work.rows]
        tokens += draft.tokens
        positions += range(first, first + work.rows)
        positions += draft_positions(draft, first + work.rows)
        starts.append(len(tokens))
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        slots=view.slots,
        row_starts=np.array(starts, np.int32),
        contexts=view.contexts,
        pages=view.pages,
        logit_rows=np.array(wanted, np.int32),
        ancestors=None if all(draft.is_chain for draft in drafts) else ancestors(plan, drafts),
        want_logits=any(
            work.sequence.sampler.needs_logits or work.sequence.wants_prompt_logprobs for work in plan.works
        ),
        selection=view.selection,
    )


def cut(batch: Batch, first: int, last: int, slow: tuple[SlowView, ...]) -> Batch:
    """Sequences first .. last - 1 of a batch, over these slow layers. A row's result does not depend on the others."""
    start, stop = int(batch.row_starts[first]), int(batch.row_starts[last])
    wanted = batch.logit_rows[(batch.logit_rows >= start) & (batch.logit_rows < stop)] - start
    chosen = batch.selection
    if chosen is not None:
        chosen = Selection(chosen.entries[:, first:last], chosen.counts[:, first:last], chosen.groups)
    return Batch(
        tokens=batch.tokens[start:stop],
        positions=batch.positions[start:stop],
        slots=batch.slots[start:stop],
        row_starts=batch.row_starts[first : last + 1] - start,
        contexts=batch.contexts[first:last],
        pages=batch.pages[first:last],
        logit_rows=wanted.astype(np.int32),
        ancestors=None if batch.ancestors is None else batch.ancestors[start:stop],
        want_logits=batch.want_logits,
        selection=chosen,
        slow=slow,
    )


def join(results: SequenceOf[Result]) -> Result:
    """The results of a batch that was cut, as one."""
    if len(results) == 1:
        return results[0]
    logits, features, queries = (
        [part for result in results if (part := getattr(result, name)) is not None]
        for name in ("logits", "features", "queries")
    )
    return Result(
        best=np.concatenate([result.best for result in results]),
        logits=np.concatenate(logits) if logits else None,
        features=np.concatenate(features, axis=1) if features else None,
        queries=np.concatenate(queries, axis=1) if queries else None,
    )


def logit_rows(work: Work, draft: Draft) -> range:
    """Rows (from the sequence's first) whose logits matter: the last known one and the draft's, or all when scored."""
    stop = work.rows + len(draft) if work.samples else work.rows
    if work.sequence.wants_prompt_logprobs:
        return range(0, stop)
    return range(work.rows - 1, stop) if work.samples else range(0)


def draft_positions(draft: Draft, start: int) -> list[int]:
    """True positions of draft nodes: siblings of a tree share one."""
    if draft.is_chain:
        return list(range(start, start + len(draft)))
    depths: list[int] = []
    for node in range(len(draft)):
        parent = draft.parent(node)
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return [start + depth for depth in depths]


def ancestors(plan: Plan, drafts: SequenceOf[Draft]) -> np.ndarray:
    """Masks uint64 [T]: bit j of a row is set where it may read row j of its own sequence, itself included.

    Chains longer than 64 rows (prompt chunks) carry all ones, which the kernels read as "causal".
    """
    masks: list[int] = []
    for work, draft in zip(plan.works, drafts, strict=True):
        if draft.is_chain:
            masks += chain_masks(work.rows + len(draft))
        else:
            masks += tree_masks(work.rows, draft)
    return np.array(masks, np.uint64)


def chain_masks(rows: int) -> list[int]:
    """Causal masks of a chain; all ones where a row has more predecessors than a mask has bits."""
    return [(1 << (row + 1)) - 1 if rows <= TREE_ROWS else (1 << TREE_ROWS) - 1 for row in range(rows)]


def tree_masks(rows: int, draft: Draft) -> list[int]:
    """Masks of the known rows and of a tree's nodes behind them."""
    masks = chain_masks(rows)
    for node in range(len(draft)):
        parent = draft.parent(node)
        above = masks[rows + parent] if parent >= 0 else masks[rows - 1]
        masks.append(above | 1 << (rows + node))
    return masks
