"""A scripted target: the whole engine is tested on models whose every token is known. Drafters: scripted_drafters.py.

`ScriptedDecoder` fulfils the Decoder protocol. Its logits come from a *script*, a function of the whole prefix, and it
reads that prefix back from its own KV cache through the batch's pages, slots and contexts. A slot that was committed
wrongly, a page that was shared too early or a stale entry therefore shows as a wrong token.

    target = ScriptedDecoder(walk(vocab_size=50))
    cache = target.new_cache(num_pages=8, page_size=4)
    plain(target.script, prompt=[1, 2], count=10)      # what greedy decoding must give
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.drafters.base import Chooser, Context, Observation
from outrider.models.spec import DecoderSpec
from outrider.types import Batch, Draft, Float32, Result, Verdict

#: prefix -> the next token, or a whole row of logits.
Script = Callable[[tuple[int, ...]], "int | Float32"]

ALL_ROWS = (1 << 64) - 1  # an ancestor mask that means "every row before mine"
UNWRITTEN = -1  # what a slot holds before anything was written to it


# --- scripts -------------------------------------------------------------------------------------------------------


def walk(vocab_size: int = 50, seed: int = 0, memory: int = 3, avoid: Sequence[int] = ()) -> Script:
    """A script that depends on the last `memory` tokens and on the length; never gives a token of `avoid`."""
    allowed = [token for token in range(vocab_size) if token not in avoid]

    def script(prefix: tuple[int, ...]) -> int:
        key = np.array([seed, len(prefix), *prefix[-memory:]], np.int64).tobytes()
        return allowed[zlib.crc32(key) % len(allowed)]

    return script


def cycle(tokens: Sequence[int]) -> Script:
    """A script that repeats `tokens` by position: a lookup drafter can guess it."""
    return lambda prefix: tokens[len(prefix) % len(tokens)]


def whole_prefix(vocab_size: int = 50) -> Script:
    """A script that depends on every token of the prefix: one wrong entry changes everything after it."""
    return lambda prefix: zlib.crc32(np.array(prefix, np.int64).tobytes()) % vocab_size


def random_logits(vocab_size: int = 6, seed: int = 0, spread: float = 1.5) -> Script:
    """A script that gives a fixed random row of logits for every prefix: for laws at temperature > 0."""

    def script(prefix: tuple[int, ...]) -> Float32:
        key = zlib.crc32(np.array([seed, *prefix], np.int64).tobytes())
        return np.random.default_rng(key).normal(0.0, spread, vocab_size).astype(np.float32)

    return script


def next_token(script: Script, prefix: Sequence[int]) -> int:
    """The greedy token behind a prefix."""
    value = script(tuple(prefix))
    return int(np.argmax(value)) if isinstance(value, np.ndarray) else int(value)


def plain(script: Script, prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens of plain greedy decoding."""
    prefix = list(prompt)
    for _ in range(count):
        prefix.append(next_token(script, prefix))
    return prefix[len(prompt) :]


# --- the target ----------------------------------------------------------------------------------------------------


class ScriptedCache:
    """A KV cache that remembers which token and which position was written to every slot."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.tokens = np.full(num_pages * page_size, UNWRITTEN, np.int64)
        self.positions = np.full(num_pages * page_size, UNWRITTEN, np.int64)
        self.nbytes = self.tokens.nbytes + self.positions.nbytes

    def move(self, source: int, target: int) -> None:
        self.tokens[target] = self.tokens[source]
        self.positions[target] = self.positions[source]

    def key_rows(self, layers: Sequence[int], slots: np.ndarray) -> Float32:
        return np.zeros((len(layers), len(slots), 1, 4), np.float32)

    def take(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens[slots], self.positions[slots]

    def put(self, slots: np.ndarray, rows: tuple[np.ndarray, np.ndarray]) -> None:
        self.tokens[slots], self.positions[slots] = rows


@dataclass
class ScriptedDecoder:
    """A Decoder whose logits are scripted. `calls` counts forward passes, `rows` their rows.

    features[tap, row] = (token, position, tap, prefix checksum): tests can tell whose features they were handed.
    An entry that was never written, or that holds another position than its place in the prefix, raises.
    """

    script: Script
    vocab_size: int = 50
    taps: tuple[int, ...] = ()
    query_taps: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    max_positions: int = 1 << 16
    weight_bytes: int = 0
    calls: int = 0
    rows: int = 0
    spec: DecoderSpec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = DecoderSpec(
            family="scripted",
            vocab_size=self.vocab_size,
            hidden_size=4,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=4,
            intermediate_size=4,
            max_positions=self.max_positions,
            eos_token_ids=self.eos,
        )

    def new_cache(self, num_pages: int, page_size: int) -> ScriptedCache:
        return ScriptedCache(num_pages, page_size)

    def kv_bytes_per_token(self) -> int:
        return 16

    def retap(self, taps: tuple[int, ...]) -> None:
        self.spec.check_taps(taps)
        self.taps = taps

    def retap_queries(self, taps: tuple[int, ...]) -> None:
        self.query_taps = taps

    def forward(self, batch: Batch, cache: ScriptedCache) -> Result:
        self.calls += 1
        self.rows += len(batch.tokens)
        cache.tokens[batch.slots] = batch.tokens
        cache.positions[batch.slots] = batch.positions
        prefixes = [
            self._read(batch, cache, sequence, row)
            for sequence in range(len(batch.contexts))
            for row in range(int(batch.row_starts[sequence]), int(batch.row_starts[sequence + 1]))
        ]
        logits = np.stack([self._logits(prefixes[row]) for row in batch.logit_rows]) if len(batch.logit_rows) else None
        return Result(
            best=np.zeros(0, np.int64) if logits is None else logits.argmax(axis=1),
            logits=logits if batch.want_logits else None,
            features=self._features(batch, prefixes) if self.taps else None,
        )

    def _read(self, batch: Batch, cache: ScriptedCache, sequence: int, row: int) -> tuple[int, ...]:
        """The prefix that a row attends to, as it stands in the cache."""
        slots = [self._slot(batch, cache, sequence, entry) for entry in range(int(batch.contexts[sequence]))]
        slots += [int(batch.slots[r]) for r in self._own_rows(batch, sequence, row)]
        held = cache.positions[slots].tolist()
        if held != list(range(len(slots))):
            raise AssertionError(f"row {row} of sequence {sequence} reads entries of positions {held}")
        return tuple(cache.tokens[slots].tolist())

    @staticmethod
    def _slot(batch: Batch, cache: ScriptedCache, sequence: int, entry: int) -> int:
        page, offset = divmod(entry, cache.page_size)
        return int(batch.pages[sequence, page]) * cache.page_size + offset

    @staticmethod
    def _own_rows(batch: Batch, sequence: int, row: int) -> list[int]:
        start = int(batch.row_starts[sequence])
        mask = ALL_ROWS if batch.ancestors is None else int(batch.ancestors[row])
        if mask == ALL_ROWS:
            return list(range(start, row + 1))
        return [start + bit for bit in range(row - start) if mask >> bit & 1] + [row]

    def _logits(self, prefix: tuple[int, ...]) -> Float32:
        value = self.script(prefix)
        if isinstance(value, np.ndarray):
            return value
        logits = np.zeros(self.vocab_size, np.float32)
        logits[value] = 10.0
        return logits

    def _features(self, batch: Batch, prefixes: list[tuple[int, ...]]) -> Float32:
        checks = [zlib.crc32(np.array(prefix, np.int64).tobytes()) % 1000 for prefix in prefixes]
        return np.stack(
            [
                np.stack([batch.tokens, batch.positions, np.full(len(checks), tap), checks], axis=1).astype(np.float32)
                for tap in self.taps
            ]
        )


class GreedyChooser:
    """Chooses the best token; ties go to the lowest id."""

    plain = True

    def pick(self, logits: Float32, output: Sequence[int]) -> int:
        return int(np.argmax(logits))


GREEDY: Chooser = GreedyChooser()


def context(tokens: Sequence[int], sequence_id: int = 0, prompt_length: int | None = None) -> Context:
    """A drafting context with a greedy chooser."""
    length = len(tokens) if prompt_length is None else prompt_length
    return Context(sequence_id=sequence_id, tokens=list(tokens), prompt_length=length, chooser=GREEDY)


def judge_greedy(script: Script, tokens: Sequence[int], draft: Draft) -> Verdict:
    """What a greedy target makes of a draft (chain or tree): its own slow statement of acceptance."""
    prefix, node, accepted, gained = list(tokens), -1, [], []
    while True:
        wanted = next_token(script, prefix)
        gained.append(wanted)
        prefix.append(wanted)
        match = [child for child in draft.children(node) if draft.tokens[child] == wanted]
        if not match:
            return Verdict(tuple(gained), tuple(accepted), drafted=len(draft), drafter=draft.drafter)
        node = match[0]
        accepted.append(node)


def observation(sequence_id: int, known: int, verdict: Verdict, tokens: Sequence[int]) -> Observation:
    """The news of one decoding step: the last known token and the accepted ones were committed.

    `tokens` is the sequence after the step, `known` how many were known before it.
    """
    end = known + len(verdict.accepted)
    return Observation(sequence_id, start=known - 1, tokens=tuple(tokens[known - 1 : end]), verdict=verdict)
