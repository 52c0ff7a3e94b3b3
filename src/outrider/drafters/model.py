"""A smaller model of the same tokenizer drafts for the large one (Leviathan et al. 2023; the SSM of SC '25).

It keeps KV of its own per sequence. After a round it drops back to the longest prefix of what it computed that turned
out to be true, whether its draft won, lost a vote or was cut, and extends over the missing tokens with one short
forward pass. All sequences of a call draft together, one batched pass per depth.

Tokens are chosen by the sequence's own chooser: greedy, or with the very noise that the target will use.

With `recall` it begins a text, or takes it up again after a long rest, with the last so many tokens as if there were
none before them: a long prompt then costs it little, and what follows is drafted with less context.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from outrider.drafters.base import Context, Need, Observation
from outrider.drafters.host import Host, Pages, Store
from outrider.errors import ConfigError
from outrider.models.build import FEWEST, build_decoder
from outrider.models.load import Tokenizer, load_model
from outrider.models.spec import Decoder
from outrider.types import NO_DRAFT, Batch, Draft, Float32

_CHUNK = 512  # rows of one catching-up pass
_KV_TOKENS_PER_SEQUENCE = 2048  # what the default KV memory holds for every sequence


@dataclass(frozen=True)
class ModelOptions:
    """Options of the `model` drafter."""

    path: str = ""  # alias, folder, .gguf file or hub id
    device: str = "auto"  # where it runs; may differ from the target's
    dtype: str = "auto"  # auto: the fewest bits, since a drafter is only as fast as it is small
    threads: int | None = None  # CPU threads; None: the cores this process may use
    min_confidence: float = 0.0  # a draft stops behind the first token below this probability
    kv_tokens: int | None = None  # tokens of all sequences that its KV memory holds; None: from the engine's sizes
    recall: int | None = None  # most tokens that it reads of a text before it drafts; None: all of it

    def __post_init__(self) -> None:
        if self.recall is not None and self.recall < 1:
            raise ConfigError("model: use recall from 1, or leave it out to read everything", "drafters")
        if not 0 <= self.min_confidence < 1:
            raise ConfigError("model: use min_confidence from 0 to below 1", "drafters")


@dataclass
class _State:
    """One sequence: its pages, and what its KV was computed from."""

    pages: Pages
    first: int = 0  # token of the sequence that its first entry is of
    known: int = 0  # tokens of the sequence that were known when it last drafted
    guessed: list[int] = field(default_factory=list)  # drafted tokens computed behind them


@dataclass
class _Turn:
    """One sequence's part of a call: the rows it has to compute next, and the draft so far."""

    context: Context
    state: _State
    depth: int
    start: int  # tokens of the sequence, from its first on, that are computed or were passed over
    rows: list[int]  # tokens to compute next
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    @property
    def entries(self) -> int:
        """Entries of KV that are computed, and the position of the next token."""
        return self.start - self.state.first


class ModelDrafter:
    """Drafts chains with a decoder. `store` is KV memory of its own."""

    needs: frozenset[Need] = frozenset()
    Options = ModelOptions

    def __init__(
        self,
        decoder: Decoder,
        store: Store,
        vocab_size: int,
        *,
        min_confidence: float = 0.0,
        recall: int | None = None,
        name: str = "model",
    ) -> None:
        """vocab_size: length of the target's tokenizer; ids from there on are padding and are never proposed."""
        self.name = name
        self.recall = None if recall is None else min(recall, max(1, decoder.spec.max_positions // 2))
        self._decoder = decoder
        self._store = store
        self._vocab_size = vocab_size
        self._min_confidence = min_confidence
        self._states: dict[int, _State] = {}

    @classmethod
    def build(cls, options: ModelOptions, host: Host) -> ModelDrafter:
        """Load the model; ConfigError where its tokenizer is not the target's."""
        if not options.path:
            raise ConfigError('drafter "model" needs a path: {"name": "model", "path": ...}', "drafters")
        loaded = load_model(options.path)
        check_tokenizer(host.tokenizer, loaded.tokenizer, options.path)
        dtype = FEWEST if options.dtype == "auto" else options.dtype
        decoder = build_decoder(
            loaded.spec, loaded.weights, dtype=dtype, device=options.device, threads=options.threads
        )
        store = host.new_store(decoder, options.kv_tokens or default_kv_tokens(host))
        name = Path(options.path).name.removesuffix(".gguf")
        kept = {"min_confidence": options.min_confidence, "recall": options.recall}
        return cls(decoder, store, host.vocab_size, **kept, name=name)  # type: ignore[arg-type]

    @property
    def held(self) -> Collection[int]:
        """Sequences that something is held for."""
        return self._states.keys()

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        calling = {context.sequence_id for context in contexts}
        turns = {
            i: turn
            for i, (context, depth) in enumerate(zip(contexts, depths, strict=True))
            if depth > 0 and (turn := self._begin(context, depth, calling))
        }
        self._catch_up(list(turns.values()))
        drafting = list(turns.values())
        while drafting:
            self._forward(drafting, [turn.rows for turn in drafting], choose=True)
            drafting = [turn for turn in drafting if self._goes_on(turn)]
        return [self._draft(turns[i]) if i in turns else NO_DRAFT for i in range(len(contexts))]

    def observe(self, observations: Sequence[Observation]) -> None:
        """What became true shows in the tokens of the next call."""

    def forget(self, sequence_id: int) -> None:
        state = self._states.pop(sequence_id, None)
        if state is not None:
            state.pages.release()

    def _begin(self, context: Context, depth: int, calling: set[int]) -> _Turn | None:
        """Drop back to what is true and make room; None where this sequence cannot be drafted for."""
        tokens = context.tokens
        state = self._states.get(context.sequence_id)
        if (
            state is None
            or not state.first < len(tokens) >= state.known
            or self._is_outdated(state, len(tokens), depth)
        ):
            state = self._anew(context)
        start = min(state.known + _common(state.guessed, tokens[state.known :]), len(tokens) - 1)
        rows = list(tokens[start:])
        spec = self._decoder.spec
        length = len(tokens) - state.first
        depth = min(depth, spec.max_positions - length)
        state.pages.shrink(start - state.first)
        state.known, state.guessed = start, []
        # A token that only the target knows has no embedding here.
        if depth <= 0 or max(rows) >= spec.vocab_size or not self._reserve(state, length + depth - 1, calling):
            return None
        return _Turn(context, state, depth, start, rows)

    def _is_outdated(self, state: _State, length: int, depth: int) -> bool:
        """Whether a recall does better than going on: after a long rest, or at the end of the model's positions."""
        if self.recall is None:
            return False
        outgrown = length - state.first + depth > self._decoder.spec.max_positions
        return outgrown or length - state.known > self.recall

    def _anew(self, context: Context) -> _State:
        """Begin with a sequence, at its end where only so much is read."""
        self.forget(context.sequence_id)
        first = max(0, len(context.tokens) - self.recall) if self.recall is not None else 0
        state = self._states[context.sequence_id] = _State(self._store.table(), first, first)
        return state

    def _reserve(self, state: _State, entries: int, calling: set[int]) -> bool:
        """Own pages for so many entries, taking them from sequences that are not part of this call if need be."""
        if state.pages.missing(entries) > self._store.available:
            for sequence_id in [i for i in self._states if i not in calling]:
                self.forget(sequence_id)
        if state.pages.missing(entries) > self._store.available:
            return False
        state.pages.reserve(entries)
        return True

    def _catch_up(self, turns: Sequence[_Turn]) -> None:
        """Compute long backlogs, such as prompts, in chunks, until one batched pass is left for each sequence."""
        room = max(1, _CHUNK // max(1, len(turns)))
        for turn in turns:
            while len(turn.rows) > room:
                count = min(_CHUNK, len(turn.rows) - 1)
                self._forward([turn], [turn.rows[:count]], choose=False)
                turn.rows = turn.rows[count:]

    def _forward(self, turns: Sequence[_Turn], rows: Sequence[list[int]], choose: bool) -> None:
        """One pass over the next rows of every turn; with `choose`, each gains one drafted token."""
        result = self._decoder.forward(self._batch(turns, rows, choose), self._store.cache)
        for turn, computed in zip(turns, rows, strict=True):
            turn.start += len(computed)
            turn.state.known = min(turn.start, len(turn.context.tokens))
            turn.state.guessed = turn.tokens[: turn.start - turn.state.known]
        if choose:
            assert result.logits is not None, "logits were asked for"
            for turn, logits in zip(turns, result.logits, strict=True):
                self._choose(turn, logits)

    def _batch(self, turns: Sequence[_Turn], rows: Sequence[list[int]], choose: bool) -> Batch:
        counts = [len(part) for part in rows]
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        pages = np.zeros((len(turns), max(len(turn.state.pages.pages) for turn in turns)), np.int32)
        for index, turn in enumerate(turns):
            pages[index, : len(turn.state.pages.pages)] = turn.state.pages.pages
        spans = [(turn.entries, count) for turn, count in zip(turns, counts, strict=True)]
        return Batch(
            tokens=np.array([token for part in rows for token in part], np.int32),
            positions=np.concatenate([np.arange(start, start + count, dtype=np.int32) for start, count in spans]),
            slots=np.concatenate([turn.state.pages.slots(*span) for turn, span in zip(turns, spans, strict=True)]),
            row_starts=starts,
            contexts=np.array([turn.entries for turn in turns], np.int32),
            pages=pages,
            logit_rows=starts[1:] - 1 if choose else np.zeros(0, np.int32),
            want_logits=choose,
        )

    def _choose(self, turn: _Turn, logits: Float32) -> None:
        logits = self._fit(logits)
        output = [*turn.context.tokens[turn.context.prompt_length :], *turn.tokens]
        token = int(turn.context.chooser.pick(logits, output))
        turn.tokens.append(token)
        turn.confidence.append(_probability(logits, token))
        turn.rows = [token]

    def _fit(self, logits: Float32) -> Float32:
        """Logits [vocab_size]: padding cut off, ids that only the target knows impossible."""
        missing = self._vocab_size - len(logits)
        if missing <= 0:
            return logits[: self._vocab_size]
        return np.concatenate((logits, np.full(missing, -np.inf, np.float32)))

    def _goes_on(self, turn: _Turn) -> bool:
        """Whether another token is to be drafted; the last one's KV is not computed before it is known to be true."""
        if len(turn.tokens) >= turn.depth or turn.confidence[-1] < self._min_confidence:
            return False
        return turn.tokens[-1] < self._decoder.spec.vocab_size

    def _draft(self, turn: _Turn) -> Draft:
        return Draft(tuple(turn.tokens), drafter=self.name, confidence=tuple(turn.confidence))


def check_tokenizer(target: Tokenizer | None, own: Tokenizer, path: str) -> None:
    """Refuse a drafter whose token ids mean something else than the target's."""
    difference = None if target is None else target.first_difference(own)
    if difference:
        token, theirs, mine = difference
        raise ConfigError(
            f"drafter {path!r} has another tokenizer than the target: token {token} is {mine!r} there and {theirs!r} "
            "in the target; use a drafter of the same family",
            "drafters",
        )


def default_kv_tokens(host: Host) -> int:
    """One full context at least, else a fair share for every sequence, and a page of slack each."""
    per_sequence = min(host.max_model_len, _KV_TOKENS_PER_SEQUENCE)
    return max(host.max_model_len, host.max_sequences * per_sequence) + 64 * host.max_sequences


def _common(guessed: Iterable[int], known: Iterable[int]) -> int:
    """Length of the common prefix."""
    count = 0
    for guess, token in zip(guessed, known, strict=False):
        if guess != token:
            break
        count += 1
    return count


def _probability(logits: Float32, token: int) -> float:
    """Softmax probability of one token; logits [V]."""
    shifted = np.exp(logits - logits.max())
    return min(1.0, float(shifted[token] / shifted.sum()))
