"""The target drafts for itself, reading only the part of the context that matters (lossless mode).

TriForce (arXiv 2404.11912) and MagicDec (arXiv 2408.11049) with this project's selectors: a sparse pass costs the
weights and a small part of the KV, and says nearly always what the full pass says. The full pass then verifies.

No KV of its own: drafted entries lie behind the committed ones, where verification writes them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.drafters.base import Context, Need, Observation
from outrider.drafters.host import Host, SparseContext, Trail
from outrider.errors import ConfigError
from outrider.models.spec import Decoder
from outrider.types import NO_DRAFT, Batch, Draft, Float32, Int32, Selection


@dataclass(frozen=True)
class SparseSelfOptions:
    """Options of the `sparse_self` drafter."""

    min_confidence: float = 0.0  # a draft stops behind the first token below this probability

    def __post_init__(self) -> None:
        if not 0 <= self.min_confidence < 1:
            raise ConfigError("sparse_self: use min_confidence from 0 to below 1", "drafters")


@dataclass
class _Turn:
    """One sequence's part of a call."""

    context: Context
    trail: Trail
    depth: int
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Entries before the next row: committed ones, then drafted ones."""
        return len(self.context.tokens) - 1 + len(self.tokens)

    def entries(self) -> Int32:
        """What the next row reads [G, KV heads, n]: the selection, then every entry drafted in this call."""
        chosen = self.trail.entries
        drafted = np.arange(len(self.context.tokens) - 1, self.length, dtype=np.int32)
        return np.concatenate([chosen, np.broadcast_to(drafted, (*chosen.shape[:2], len(drafted)))], axis=2)


class SparseSelfDrafter:
    """Drafts chains with the target itself over a selected context; proposes nothing where all of it would be read."""

    needs: frozenset[Need] = frozenset()
    Options = SparseSelfOptions

    def __init__(
        self,
        decoder: Decoder,
        sparse: SparseContext,
        vocab_size: int,
        *,
        min_confidence: float = 0.0,
        name: str = "sparse_self",
    ) -> None:
        self.name = name
        self._decoder, self._sparse = decoder, sparse
        self._vocab_size, self._min_confidence = vocab_size, min_confidence

    @classmethod
    def build(cls, options: SparseSelfOptions, host: Host) -> SparseSelfDrafter:
        """ConfigError where the engine does not select for drafts."""
        if host.target is None or host.sparse is None:
            raise ConfigError('drafter "sparse_self" needs context_config {"mode": "lossless"}', "drafters")
        return cls(host.target, host.sparse, host.vocab_size, min_confidence=options.min_confidence)

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        turns = {
            i: turn
            for i, (context, depth) in enumerate(zip(contexts, depths, strict=True))
            if depth > 0 and (turn := self._begin(context, depth))
        }
        drafting = list(turns.values())
        while drafting:
            self._forward(drafting)
            drafting = [turn for turn in drafting if self._goes_on(turn)]
        return [self._draft(turns[i]) if i in turns else NO_DRAFT for i in range(len(contexts))]

    def observe(self, observations: Sequence[Observation]) -> None:
        """The engine's memory learns from every step already."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is held."""

    def _begin(self, context: Context, depth: int) -> _Turn | None:
        length = len(context.tokens) - 1
        depth = min(depth, self._decoder.spec.max_positions - len(context.tokens))
        trail = self._sparse.trail(context.sequence_id, length, depth) if depth > 0 else None
        return None if trail is None else _Turn(context, trail, depth)

    def _forward(self, turns: Sequence[_Turn]) -> None:
        """One pass of one row each."""
        result = self._decoder.forward(self._batch(turns), self._sparse.cache)
        assert result.logits is not None, "logits were asked for"
        for turn, logits in zip(turns, result.logits, strict=True):
            self._choose(turn, logits[: self._vocab_size])

    def _batch(self, turns: Sequence[_Turn]) -> Batch:
        lengths = np.array([turn.length for turn in turns], np.int32)
        last = [(turn.tokens or turn.context.tokens)[-1] for turn in turns]
        pages = np.zeros((len(turns), max(len(turn.trail.pages) for turn in turns)), np.int32)
        for index, turn in enumerate(turns):
            pages[index, : len(turn.trail.pages)] = turn.trail.pages
        return Batch(
            tokens=np.array(last, np.int32),
            positions=lengths,
            slots=np.array([turn.trail.slots[len(turn.tokens)] for turn in turns], np.int32),
            row_starts=np.arange(len(turns) + 1, dtype=np.int32),
            contexts=lengths,
            pages=pages,
            logit_rows=np.arange(len(turns), dtype=np.int32),
            selection=self._select(turns),
        )

    def _select(self, turns: Sequence[_Turn]) -> Selection:
        parts = [turn.entries() for turn in turns]
        shape = (*parts[0].shape[:1], len(turns), parts[0].shape[1])
        entries = np.zeros((*shape, max(part.shape[2] for part in parts)), np.int32)
        counts = np.empty(shape, np.int32)
        for index, part in enumerate(parts):
            entries[:, index, :, : part.shape[2]] = part
            counts[:, index] = part.shape[2]
        return Selection(entries, counts, self._sparse.groups)

    def _choose(self, turn: _Turn, logits: Float32) -> None:
        output = [*turn.context.tokens[turn.context.prompt_length :], *turn.tokens]
        token = int(turn.context.chooser.pick(logits, output))
        shifted = np.exp(logits - logits.max())
        turn.tokens.append(token)
        turn.confidence.append(min(1.0, float(shifted[token] / shifted.sum())))

    def _goes_on(self, turn: _Turn) -> bool:
        return len(turn.tokens) < turn.depth and turn.confidence[-1] >= self._min_confidence

    def _draft(self, turn: _Turn) -> Draft:
        return Draft(tuple(turn.tokens), drafter=self.name, confidence=tuple(turn.confidence))
