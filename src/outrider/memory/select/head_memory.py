"""What the retrieval head remembers of the context: its keys, in pages with the target's page numbers.

An EAGLE-3 head joins the target's states of entry e - 1 with token e, in its slot e - 1. That slot *stands for* entry
e, and its key is kept where entry e lies: then all that a key rests on is the tokens up to its own, and pages that are
shared, evicted, or found again carry their keys along without a word. The fused state of a page's last entry is kept
with the page: a prompt that goes on behind a found page needs it, and the target does not compute it again.

Only committed entries have keys. What one-row steps bring is fused in batches, and not at all before a page is full or
a selection asks: a context that fits its budget hardly pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.memory.look import Gain, Look
from outrider.memory.select.head_kernels import normalise, project
from outrider.memory.select.head_weights import Embeddings, HeadWeights, pad_rows, padded
from outrider.memory.tiers.codec import to_bfloat16
from outrider.models.rope import rope_tables
from outrider.types import Float32, Int32


@dataclass
class _Trace:
    """One sequence: `done` entries are fused, those of the gains behind them are not."""

    done: int = 0
    state: Float32 | None = None  # [hidden] fused and normed, of entry done - 1
    waiting: list[Gain] = field(default_factory=list)
    following: int | None = None  # the token behind all of them
    query: Float32 | None = None  # [1, heads, head_dim]: fused, and nothing came after

    @property
    def end(self) -> int:
        return self.waiting[-1].start + len(self.waiting[-1].slots) if self.waiting else self.done


class HeadMemory:
    """Keys [pages, KV heads, page size, padded head_dim] in bfloat16, and queries when they are asked for."""

    def __init__(
        self,
        weights: HeadWeights,
        embeddings: Embeddings,
        given_taps: Callable[[], tuple[int, ...]],
        pages: int,
        page_size: int,
    ) -> None:
        """given_taps: the layers whose states the target gives, in order; they contain the head's."""
        self.taps = weights.taps
        self._weights, self._embeddings, self._given = weights, embeddings, given_taps
        self._page_size = page_size
        self.keys = np.zeros((pages, weights.kv_heads, page_size, padded(weights.head_dim)), np.uint16)
        self._ends = np.zeros((pages, len(weights.state_norm)), np.float32)
        self._traces: dict[int, _Trace] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of keys, states and weights."""
        return self.keys.nbytes + self._ends.nbytes + self._weights.nbytes

    def follow(self, looks: Iterable[Look]) -> None:
        """The sequences of a step. One that begins behind pages it found starts from their last state."""
        for look in looks:
            trace = self._traces.get(look.sequence_id)
            if trace is None or trace.end != look.length:
                self._traces[look.sequence_id] = self._found(look)

    def learn(self, gains: Iterable[Gain]) -> None:
        """What a step committed."""
        full: list[int] = []
        for gain in gains:
            trace = self._traces[gain.sequence_id]
            trace.waiting.append(gain)
            trace.following, trace.query = gain.following, None
            if trace.end // self._page_size > trace.done // self._page_size:
                full.append(gain.sequence_id)
        self._fuse(full, ask=False)

    def ask(self, sequence_ids: Sequence[int]) -> list[Float32 | None]:
        """The queries [1, heads, head_dim] of the newest tokens; None where no state is at hand."""
        self._fuse([i for i in sequence_ids if self._traces[i].query is None], ask=True)
        return [self._traces[i].query for i in sequence_ids]

    def take(self, sequence_id: int, slots: Int32) -> Any:
        """A copy of the keys in some slots and of where the sequence is, for `put`."""
        self._fuse([sequence_id], ask=False)
        trace = self._traces[sequence_id]
        kept = _Trace(trace.done, trace.state, [], trace.following)
        return sequence_id, kept, self.keys[slots // self._page_size, :, slots % self._page_size]

    def put(self, slots: Int32, held: Any) -> None:
        """What `take` gave is back, in other slots, behind what was computed again."""
        sequence_id, kept, rows = held
        self._fuse([sequence_id] if sequence_id in self._traces else [], ask=False)
        self.keys[slots // self._page_size, :, slots % self._page_size] = rows
        self._traces[sequence_id] = kept

    def keep(self, pages: Int32) -> list[NDArray]:
        """A copy of the keys, and of the last states, of full pages: all of their entries are fused."""
        return [self.keys[pages], self._ends[pages]]

    def recall(self, pages: Int32, held: Sequence[NDArray]) -> None:
        """What `keep` gave is back, in other pages."""
        self.keys[pages], self._ends[pages] = held

    @property
    def fingerprint(self) -> str:
        """Names the weights and positions that keys rest on."""
        return self._weights.fingerprint

    def forget(self, sequence_id: int) -> None:
        """The sequence ended."""
        self._traces.pop(sequence_id, None)

    def _found(self, look: Look) -> _Trace:
        """A sequence that starts on `length` entries, all of them in full pages."""
        last, offset = divmod(look.length, self._page_size)
        state = self._ends[look.pages[last - 1]].copy() if look.length and not offset else None
        return _Trace(look.length, state)

    def _fuse(self, sequence_ids: Sequence[int], ask: bool) -> None:
        """Keys of all entries that wait, and the newest token's query, of several sequences in one go."""
        traces = [self._traces[i] for i in sequence_ids]
        gains = [gain for trace in traces for gain in trace.waiting]
        fused = self._states(gains)
        before: list[Float32] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        at = 0
        for trace in traces:
            count = trace.end - trace.done
            own, at = fused[at : at + count], at + count
            states = own if trace.state is None else np.concatenate([trace.state[None], own])
            first = trace.end - len(states) + 1  # the entry that the first of these states leads to
            keyed = range(first, trace.end)
            before += list(states[: len(keyed)])
            positions += [entry - 1 for entry in keyed]
            own_tokens = [token for gain in trace.waiting for token in gain.tokens]
            own_slots = [int(slot) for gain in trace.waiting for slot in gain.slots]
            tokens += own_tokens[count - len(keyed) :]
            slots += own_slots[count - len(keyed) :]
            self._keep_ends(trace, own, own_slots)
            if len(states):
                trace.state = states[-1].copy()
            trace.done, trace.waiting = trace.end, []
        if slots:
            x = self._join(np.stack(before), tokens)
            self._store(np.array(slots), self._turn(x, positions, query=False))
        if ask:
            self._find_queries(traces)

    def _find_queries(self, traces: Sequence[_Trace]) -> None:
        able = [trace for trace in traces if trace.state is not None and trace.following is not None]
        if able:
            x = self._join(np.stack([trace.state for trace in able]), [trace.following for trace in able])  # type: ignore[misc]
            for trace, query in zip(able, self._turn(x, [t.done - 1 for t in able], query=True), strict=True):
                trace.query = query[None]

    def _states(self, gains: Sequence[Gain]) -> Float32:
        """Fused states, normed as the head's layer reads them: [entries, hidden]."""
        hidden = self._ends.shape[1]
        if not gains:
            return np.zeros((0, hidden), np.float32)
        given = self._given()
        rows = [gain.states[[given.index(tap) for tap in self.taps]] for gain in gains if gain.states is not None]
        flat = np.concatenate(rows, axis=1).swapaxes(0, 1)
        fuse = self._weights.fuse
        fused = project(pad_rows(flat.reshape(flat.shape[0], -1)), fuse.weight, fuse.bias)
        return normalise(fused, self._weights.state_norm, self._weights.eps)

    def _join(self, states: Float32, tokens: Sequence[int]) -> Float32:
        """The layer's input [rows, padded 2 * hidden]: token ahead, state behind."""
        ahead = normalise(self._embeddings.rows(tokens), self._weights.input_norm, self._weights.eps)
        return pad_rows(np.concatenate([ahead, states], axis=1))

    def _turn(self, x: Float32, positions: Sequence[int], query: bool) -> Float32:
        """Queries or keys [rows, heads, head_dim], rotated to the positions of their slots."""
        weights = self._weights
        linear = weights.q if query else weights.k
        rows = project(x, linear.weight, linear.bias).reshape(len(x), -1, weights.head_dim)
        cos, sin = rope_tables(weights.rope, weights.head_dim, np.asarray(positions))
        a, b = np.split(rows, 2, axis=-1)
        cos, sin = cos[:, None], sin[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _store(self, slots: Int32, rows: Float32) -> None:
        self.keys[slots // self._page_size, :, slots % self._page_size, : rows.shape[-1]] = to_bfloat16(rows)

    def _keep_ends(self, trace: _Trace, states: Float32, slots: Sequence[int]) -> None:
        """The states of last entries of pages."""
        for row, slot in enumerate(slots):
            if slot % self._page_size == self._page_size - 1:
                self._ends[slot // self._page_size] = states[row]
