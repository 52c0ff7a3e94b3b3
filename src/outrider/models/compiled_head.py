"""The EAGLE-3 head of the CPU path: packed weights, and one compiled call per draft (kernels/cpu/head_step.py)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.cpu import isa, layout
from outrider.kernels.cpu.head_step import FOUND, HEAD, prepare_head, run_head
from outrider.kernels.cpu.pack import Mode, pack
from outrider.kernels.cpu.pool import pool, usable_threads
from outrider.kernels.cpu.product import MAX_ROWS
from outrider.kernels.cpu.rope import tables
from outrider.kernels.cpu.workspace import Workspace, address, padded
from outrider.models.compiled import warm_up
from outrider.models.eagle3_spec import Eagle3Spec
from outrider.models.eagle3_store import EMBEDDING, StoredHead
from outrider.models.head import Chain, Guess, Job
from outrider.models.spec import Weight
from outrider.types import Float32

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
_NAMES = (
    "fc",
    *(f"midlayer.self_attn.{name}_proj" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")),
    "lm_head",
)
_NORMS = {
    "input_norm": "midlayer.input_layernorm",
    "hidden_norm": "midlayer.hidden_norm",
    "post_norm": "midlayer.post_attention_layernorm",
    "final_norm": "norm",
}
_UNIT = 16  # entries that room grows by at least; kernels read whole groups of so many


class HeadEntries:
    """Keys and values of one sequence, fp32 [2, KV heads, room, head_dim padded to 16]; they move when they grow."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        self.count, self.room, self._dim = 0, 0, head_dim
        self._held = np.zeros((2, kv_heads, 0, padded(head_dim, 16)), np.float32)
        self.places = (0, 0)  # addresses of keys and values

    @property
    def keys(self) -> Float32:
        view = self._held[0, :, : self.count, : self._dim]
        view.flags.writeable = False
        return view

    def first(self, count: int) -> HeadEntries:
        copy = HeadEntries(self._held.shape[1], self._dim)
        copy.fit(count)
        copy._held[:, :, :count] = self._held[:, :, :count]
        copy.count = count
        return copy

    def fit(self, entries: int) -> None:
        """Make room for so many entries."""
        if entries <= self.room:
            return
        room = padded(max(entries, self.room + self.room // 2), _UNIT)
        kinds, heads, _, width = self._held.shape
        grown = np.zeros((kinds, heads, room, width), np.float32)
        grown[:, :, : self.count] = self._held[:, :, : self.count]
        self._held, self.room = grown, room
        self.places = (address(grown[0]), address(grown[1]))


class CompiledHead:
    """Runs a stored head; see HeadBackend for what its methods promise."""

    def __init__(
        self,
        stored: StoredHead,
        embedding: Weight | NDArray,
        *,
        dtype: Mode = "auto",
        threads: int | None = None,
    ) -> None:
        """embedding: the target's, as it is stored or as the record of its packed form (CompiledDecoder.embedding).

        dtype auto: stored integers as they are and the rest as int8 groups. A head that brings an embedding of its own
        uses that.
        """
        self.spec, self.ids = stored.spec, stored.ids
        self._pool = pool(usable_threads(threads))
        self._lock = threading.Lock()
        self._held: list[object] = [embedding]
        self._head = np.zeros(1, HEAD)
        self._call = self._head.view(np.int64)  # fields by their place: quicker to set than by name
        self._matrices = np.zeros(len(_NAMES) + 1, layout.MATRIX)
        self.weight_bytes = self._pack(stored, stored.weights.get(EMBEDDING, embedding), dtype)
        self._model = _describe(stored.spec, bool((self._matrices["kind"][:-1] != 0).any()))
        self._work = Workspace(_sizes(stored.spec), self._pool.members)
        self._work.step["product"] = warm_up(isa.resolve(isa.wanted()), prepare_head)
        self._buffers = _Buffers(self, self._pool.members)
        self._rows = self._positions = 0

    def entries(self) -> HeadEntries:
        return HeadEntries(self.spec.num_kv_heads, self.spec.head_dim)

    def greedy(self, jobs: Sequence[Job], floor: float) -> list[Guess]:
        order = sorted(range(len(jobs)), key=lambda i: -jobs[i].depth)
        ordered = [jobs[i] for i in order]
        depth = ordered[0].depth
        with self._lock:
            self._enter(ordered, floor)
            self._run(0, depth)
            self._leave(ordered)
            tokens, confidence = self._buffers.drafted(depth)
        guesses = [Guess([], [])] * len(jobs)
        for row, i in enumerate(order[: len(tokens)]):
            count = _stops(confidence[row][: jobs[i].depth], floor)
            guesses[i] = Guess(tokens[row][:count], confidence[row][:count])
        return guesses

    def chain(self, jobs: Sequence[Job]) -> Chain:
        with self._lock:
            deepest = max(job.depth for job in jobs)
            self._enter([replace(job, depth=deepest) for job in jobs], 0.0)
            self._run(0, 1)
            self._leave(jobs)
        return _Chain(self, jobs)

    def _run(self, first: int, last: int) -> None:
        """Drafted tokens first .. last - 1 of every chain, on all threads."""
        model, head, matrices, step, members = self._model, self._head, self._matrices, self._work.step, self._members

        def job(member: int) -> None:
            run_head(model, head, matrices, step, first, last, member, members)

        self._pool.run(job)

    @property
    def _members(self) -> int:
        return self._pool.members

    def _enter(self, jobs: Sequence[Job], floor: float) -> None:
        """Put a call into the record: rows that are only fed first, then the last row of every job that drafts."""
        entries = [_own(job) for job in jobs]
        for job, held in zip(jobs, entries, strict=True):
            held.fit(held.count + len(job.tokens) + job.depth)
        rows, chains = _flat_rows(jobs), sum(job.depth > 0 for job in jobs)
        numbers = [n for line in zip(*rows, strict=True) for n in line]
        numbers += [place for kind in range(2) for place in (held.places[kind] for held in entries)]
        numbers += [held.room for held in entries] + [job.depth for job in jobs]
        self._numbers, self._features = np.array(numbers, np.int64), self._side_by_side(jobs, len(rows))
        self._point(len(rows), len(jobs), chains)
        self._head["floor"] = floor
        reach = max(job.first + len(job.tokens) + job.depth for job in jobs)
        self._fit(len(rows), chains, max(job.depth for job in jobs), reach, max(held.room for held in entries))

    def _point(self, rows: int, jobs: int, chains: int) -> None:
        """Where the parts of a call begin."""
        call, start = self._call, address(self._numbers)
        call[_FIELD["rows"]], call[_FIELD["feeds"]], call[_FIELD["chains"]] = rows, rows - chains, chains
        call[_FIELD["features"]], call[_FIELD["features_stride"]] = address(self._features), self._features.strides[0]
        for place, name in enumerate(("tokens", "positions", "slots", "owners")):
            call[_FIELD[name]] = start + place * rows * 8
        for place, name in enumerate(("keys", "values", "room", "depths")):
            call[_FIELD[name]] = start + (4 * rows + place * jobs) * 8

    def _side_by_side(self, jobs: Sequence[Job], rows: int) -> Float32:
        """The features of all rows, in their order, each followed by zeros up to a multiple of 32."""
        width = len(self.spec.taps) * self.spec.hidden_size
        features = np.zeros((rows, padded(width, 32)), np.float32)
        parts = [job.features[:-1] if job.depth > 0 else job.features for job in jobs]
        parts += [job.features[-1:] for job in jobs if job.depth > 0]
        np.concatenate(parts, out=features[:, :width])
        return features

    def _fit(self, rows: int, chains: int, deepest: int, positions: int, room: int) -> None:
        """Buffers and tables large enough for a call."""
        if rows > self._rows:
            self._work.fit(rows, 1, 0)
            self._rows = rows
        self._buffers.fit(rows, chains, deepest, room)
        if positions > self._positions:
            self._positions = max(1024, 1 << (positions - 1).bit_length())
            self._turns = tables(self.spec.rope, self.spec.head_dim, self._positions)
            self._work.step["cos"], self._work.step["sin"] = map(address, self._turns)

    def _leave(self, jobs: Sequence[Job]) -> None:
        """Keep the rows of all jobs."""
        for job in jobs:
            job.entries.count += len(job.tokens)

    def _pack(self, stored: StoredHead, embedding: Weight | NDArray, dtype: Mode) -> int:
        """Fill the records of weights; gives their bytes."""
        size = 0
        for place, name in enumerate(_NAMES):
            size += self._add_matrix(place, stored.weights[f"{name}.weight"], dtype)
            if f"{name}.bias" in stored.weights:
                bias = self._keep(_row(stored.weights[f"{name}.bias"], 16))
                self._matrices[place]["bias"] = address(bias)
        if isinstance(embedding, np.ndarray | np.void):
            self._matrices[len(_NAMES)] = embedding
        else:
            size += self._add_matrix(len(_NAMES), embedding, dtype)
        for field, name in _NORMS.items():
            self._head[field] = address(self._keep(_row(stored.weights[f"{name}.weight"], 32)))
        self._head["ids"] = address(self._keep(self.ids))
        self._head["residual_normed"] = self.spec.norm_before_residual
        return size

    def _add_matrix(self, place: int, weight: Weight, dtype: Mode) -> int:
        packed = pack(weight, dtype)
        tiles, tile_bytes = packed.data.shape
        data = address(self._keep(packed.data))
        self._matrices[place] = (data, 0, tiles, packed.groups, packed.kind, tile_bytes, packed.n)
        return packed.data.nbytes

    def _keep(self, array: NDArray) -> NDArray:
        self._held.append(array)
        return array


class _Chain:
    """A chain whose tokens somebody else chooses, one compiled call each."""

    def __init__(self, head: CompiledHead, jobs: Sequence[Job]) -> None:
        self._head, self._jobs, self._ahead = head, jobs, 0  # the jobs hold the entries that are written to

    @property
    def logits(self) -> Float32:
        return self._head._buffers.logits

    def extend(self, tokens: Sequence[int]) -> None:
        self._ahead += 1
        with self._head._lock:
            self._head._buffers.go_on(tokens)
            self._head._run(self._ahead, self._ahead + 1)


class _Buffers:
    """What a call writes beside the workspace; buffers grow with the largest call, then stay."""

    def __init__(self, head: CompiledHead, members: int) -> None:
        self._record, self._spec, self._members = head._head, head.spec, members
        self._sizes = (0, 0, 0, 0)
        self._chains = 0

    def fit(self, rows: int, chains: int, deepest: int, room: int) -> None:
        """Make room, and forget the last call."""
        wanted = (rows, chains, deepest, room)
        if any(new > old for new, old in zip(wanted, self._sizes, strict=True)):
            rows, chains, deepest, room = self._sizes = tuple(map(max, wanted, self._sizes))  # type: ignore[assignment]
            self._allocate(padded(rows, 16), chains, deepest, room)
        self._chains = wanted[1]
        self._alive.fill(1)
        self._confidence.fill(-1)

    def drafted(self, depth: int) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and confidences of the chains of the last call; -1 where a chain had stopped."""
        shape, count = (depth, self._chains), depth * self._chains
        confidence = self._confidence[:count].reshape(shape).T.tolist()
        return self._drafted[:count].reshape(shape).T.tolist(), confidence

    @property
    def logits(self) -> Float32:
        return self._logits[: self._chains, : self._spec.draft_vocab_size]

    def go_on(self, tokens: Sequence[int]) -> None:
        """Chosen tokens in place of the best ones, for every thread."""
        self._next[: self._members * self._chains].reshape(self._members, -1)[:] = tokens
        self._alive.fill(1)

    def _allocate(self, rows: int, chains: int, deepest: int, room: int) -> None:
        spec, members = self._spec, self._members
        prepared = max(rows, members * layout.PRIVATE) + MAX_ROWS
        self._joined = np.zeros((prepared, padded(2 * spec.hidden_size, 32)), np.float32)
        self._logits = np.zeros((chains, padded(spec.draft_vocab_size, 16)), np.float32)
        self._next = np.zeros(members * chains, np.int64)
        self._alive = np.zeros(members * chains, np.int64)
        self._found = np.zeros(members * chains * FOUND, np.uint8)
        self._drafted = np.zeros(deepest * chains, np.int64)
        self._confidence = np.zeros(deepest * chains, np.float32)
        self._iota = np.arange(room + layout.CHUNK, dtype=np.int64)
        for name in ("joined", "logits", "next", "alive", "found", "drafted", "confidence", "iota"):
            self._record[name] = address(getattr(self, f"_{name}"))
        self._record["joined_stride"], self._record["logits_stride"] = self._joined.strides[0], self._logits.strides[0]


_FIELD = {name: place for place, name in enumerate(HEAD.names or ())}


def _own(job: Job) -> HeadEntries:
    """A job's entries, which this backend made."""
    return cast(HeadEntries, job.entries)


def _flat_rows(jobs: Sequence[Job]) -> list[tuple[int, int, int, int]]:
    """(token, position, slot, job) of every row: first those that are only fed, then the last ones of drafting jobs."""
    fed: list[tuple[int, int, int, int]] = []
    last: list[tuple[int, int, int, int]] = []
    for owner, job in enumerate(jobs):
        base = job.entries.count
        fed += [(token, job.first + i, base + i, owner) for i, token in enumerate(job.tokens)]
        if job.depth > 0:
            last.append(fed.pop())
    return fed + last


def _stops(confidence: Sequence[float], floor: float) -> int:
    """Tokens of a chain up to the first one below the floor, which it keeps; none from one without a probability."""
    for place, value in enumerate(confidence):
        if not 0 <= value <= 1.001:
            return place
        if value < floor:
            return place + 1
    return len(confidence)


def _row(weight: Weight, unit: int) -> Float32:
    """A vector in fp32, padded with zeros to `unit` values."""
    values = weight.dense().reshape(-1)
    whole = np.zeros(padded(len(values), unit), np.float32)
    whole[: len(values)] = values
    return whole


def _describe(spec: Eagle3Spec, integers: bool) -> NDArray:
    """The head as the record that the kernels of a decoder's layer read."""
    model = np.zeros(1, layout.MODEL)
    values = {
        "num_layers": 1,
        "hidden": spec.hidden_size,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "head_pad": padded(spec.head_dim, 16),
        "q_width": padded(spec.num_heads * spec.head_dim, 16),
        "kv_width": padded(spec.num_kv_heads * spec.head_dim, 16),
        "inter": spec.intermediate_size,
        "activation": _ACTIVATIONS.index(spec.activation),
        "gated": True,
        "rope": True,
        "integers": integers,
        "eps": spec.norm_eps,
        "scale": spec.head_dim**-0.5,
    }
    for name, value in values.items():
        model[name] = value
    return model


def _sizes(spec: Eagle3Spec) -> dict[str, int]:
    """Floats per row of every buffer."""
    mixed, hidden = padded(spec.num_heads * spec.head_dim, 32), padded(spec.intermediate_size, 32)
    width = max(len(spec.taps), 2) * spec.hidden_size
    q, kv = padded(spec.num_heads * spec.head_dim, 16), padded(spec.num_kv_heads * spec.head_dim, 16)
    head_pad = padded(spec.head_dim, 16)
    return {
        "x": padded(spec.hidden_size, 32),
        "qkv": q + 2 * kv,
        "query": spec.num_heads * head_pad,
        "mixed": mixed,
        "hidden": hidden,
        "inputs": max(padded(width, 32), mixed, hidden),
        "head_pad": head_pad,
        "heads": spec.num_heads,
        "shared": spec.num_heads // spec.num_kv_heads,
    }
