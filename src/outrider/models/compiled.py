"""The decoder of the CPU path: packed weights, and one compiled call per forward pass (docs/kernels.md)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError, ModelError, RequestError
from outrider.kernels.cpu import isa, layout
from outrider.kernels.cpu.pack import Mode, Packed, pack
from outrider.kernels.cpu.pool import pool, usable_threads
from outrider.kernels.cpu.product import product_address
from outrider.kernels.cpu.rope import tables
from outrider.kernels.cpu.step import prepare_step, run_step
from outrider.kernels.cpu.workspace import Workspace, address, padded
from outrider.models.cache import KINDS, PagedKVCache, entry_bytes
from outrider.models.spec import DecoderSpec, KVCache, Weights
from outrider.types import Batch, Float32, Result, SlowView

KVType = Literal["auto", "float32", "bfloat16", "int8"]
MODES = ("auto", "float32", "int8", "int4")
_QUIET = 2.0  # seconds of compiling before a line says so
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class CompiledDecoder:
    """Runs any norm-first DecoderSpec from packed weights; see Decoder for what forward() promises."""

    def __init__(
        self, spec: DecoderSpec, packed: _PackedModel, kv_dtype: str, threads: int, taps: tuple[int, ...], path: str
    ) -> None:
        self.spec, self.taps, self.kv_dtype, self.path = spec, taps, kv_dtype, path
        self.query_taps: tuple[int, ...] = ()
        self.weight_bytes = packed.nbytes
        self.step_bytes = packed.nbytes - packed.looked_up + packed.looked_up // spec.vocab_size
        self._packed = packed
        self._product = warm_up(path, prepare_step)
        self._pool = pool(threads)
        self._work = Workspace(_sizes(spec), threads)
        self._lock = threading.Lock()
        self._cos = self._sin = np.zeros((0, 0), np.float32)

    @classmethod
    def build(
        cls,
        spec: DecoderSpec,
        weights: Weights,
        *,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        threads: int | None = None,
        taps: tuple[int, ...] = (),
    ) -> CompiledDecoder:
        """Pack the weights. auto: stored integers as they are and the rest as int8 groups; KV as bfloat16.

        Raises ModelError where the model is of a kind that only the reference decoder runs (post-norm, projections
        around the embedding), ConfigError for an unknown type.
        """
        _check(spec, weights, dtype, kv_dtype, taps)
        if kv_dtype == "auto":
            kv_dtype = "float32" if dtype == "float32" else "bfloat16"
        packed = _PackedModel(spec, weights, dtype, taps)  # type: ignore[arg-type]
        return cls(spec, packed, kv_dtype, usable_threads(threads), taps, isa.resolve(isa.wanted()))

    @property
    def threads(self) -> int:
        """Threads of a forward pass."""
        return self._pool.members

    @property
    def embedding(self) -> NDArray:
        """The record (layout.MATRIX) of the packed embedding, for those who read its rows beside this decoder."""
        return self._packed.matrices[self.spec.num_layers, layout.EMBED]

    def new_cache(self, num_pages: int, page_size: int) -> PagedKVCache:
        """An empty cache of this decoder's KV type."""
        spec = self.spec
        return PagedKVCache(spec.num_layers, num_pages, page_size, spec.num_kv_heads, spec.head_dim, self.kv_dtype)

    def retap(self, taps: tuple[int, ...]) -> None:
        """Give the states behind other layers from the next pass on."""
        self.spec.check_taps(taps)
        with self._lock:
            self._packed.tap("tap", taps)
            self.taps = taps

    def retap_queries(self, taps: tuple[int, ...]) -> None:
        """Give the queries of other layers from the next pass on."""
        self.spec.check_taps(taps)
        with self._lock:
            self._packed.tap("query_tap", taps)
            self.query_taps = taps

    def kv_bytes_per_token(self) -> int:
        return self.spec.num_layers * entry_bytes(self.spec.num_kv_heads, self.spec.head_dim, self.kv_dtype)

    def forward(self, batch: Batch, cache: KVCache, before_layer: Callable[[int], int | None] | None = None) -> Result:
        """One forward pass; `before_layer(l)` waits for KV on its way ahead of slow layers, see Decoder.forward."""
        if not isinstance(cache, PagedKVCache):
            raise RequestError("this cache belongs to another decoder; use new_cache()")
        with self._lock:
            inputs = self._enter(batch, cache)
            logits, features, queries = self._outputs(batch)
            views = {view.first: view for view in batch.slow}
            first = 0
            while first < self.spec.num_layers:
                last = self._last(first, views, before_layer)
                if first in views:
                    inputs += self._descend(views[first])
                self._run(cache, first, last)
                first = last
            del inputs  # kept alive until here: the step reads them by address
            seen = None if queries is None else queries[..., : self.spec.head_dim]
            return Result(self._work.best(len(batch.logit_rows)), logits, features, seen)

    def _last(self, first: int, views: Collection[int], before_layer: Callable[[int], int | None] | None) -> int:
        """Where a run of layers from `first` on ends: where the view changes, or where KV has to be waited for."""
        last = min((view for view in views if view > first), default=self.spec.num_layers)
        if before_layer is None or first < min(views, default=0):
            return last
        return min(last, before_layer(first) or first + 1)

    def _run(self, cache: PagedKVCache, first: int, last: int) -> None:
        """Layers first .. last - 1 on all threads."""
        model, members = self._packed, self._pool.members
        # Records alone: the pool keeps its latest job, which must keep neither weights nor KV alive.
        records = (model.model, model.layers, model.matrices, cache.table, self._work.step)

        def job(member: int) -> None:
            run_step(*records, first, last, member, members)

        self._pool.run(job)

    def _enter(self, batch: Batch, cache: PagedKVCache) -> list[NDArray]:
        """Check a batch and put it into the step record; gives the arrays that must stay alive."""
        step, spec = self._work.step, self.spec
        rows, sequences = len(batch.tokens), len(batch.contexts)
        _check_batch(batch, spec, cache)
        self._grow_tables(int(batch.positions.max(initial=0)) + 1)
        chunks = (int(batch.contexts.max(initial=0)) + rows + layout.CHUNK - 1) // layout.CHUNK
        self._work.fit(rows, len(batch.logit_rows), chunks)
        held: list[NDArray] = []
        place = partial(self._place, held)
        for name in ("tokens", "positions", "slots", "row_starts", "contexts", "pages", "logit_rows"):
            place(name, getattr(batch, name))
        place("ancestors", np.zeros(0) if batch.ancestors is None else batch.ancestors, np.uint64)
        step["rows"], step["sequences"], step["wanted"] = rows, sequences, len(batch.logit_rows)
        step["page_columns"] = batch.pages.shape[1]
        chosen = batch.selection
        step["selected"] = 0
        if chosen is not None:
            held += self._read_only(chosen.entries, chosen.counts, chosen.groups)
        step["product"] = self._product
        step["kv_kind"], step["page_size"] = cache.kind, cache.page_size
        return held

    def _descend(self, slow: SlowView) -> list[NDArray]:
        """From here on layers read and write in their buffers; gives the arrays that must stay alive."""
        held = self._read_only(slow.entries, slow.counts, slow.groups)
        self._place(held, "slots", slow.slots)
        self._place(held, "pages", slow.pages)
        self._work.step["page_columns"] = slow.pages.shape[1]
        return held

    def _read_only(self, entries: NDArray, counts: NDArray, groups: NDArray) -> list[NDArray]:
        """Put a selection into the step record."""
        held: list[NDArray] = []
        self._place(held, "selected", entries if entries.size else np.zeros(1))
        self._place(held, "counts", counts)
        self._place(held, "groups", groups)
        self._work.step["selected_heads"], self._work.step["selected_columns"] = counts.shape[2], entries.shape[3]
        return held

    def _place(self, held: list[NDArray], name: str, array: NDArray, kind: type = np.int32) -> None:
        """The address of an array of the right type, which `held` keeps alive."""
        held.append(np.ascontiguousarray(array, kind))
        self._work.step[name] = address(held[-1])

    def _outputs(self, batch: Batch) -> tuple[Float32 | None, Float32 | None, Float32 | None]:
        """Arrays for logits, features and queries (heads padded as in the workspace) where they are wanted."""
        step, spec = self._work.step, self.spec
        wanted, rows = len(batch.logit_rows), len(batch.tokens)
        logits = np.empty((wanted, spec.vocab_size), np.float32) if batch.want_logits else None
        features = np.empty((len(self.taps), rows, spec.hidden_size), np.float32) if self.taps else None
        shape = (len(self.query_taps), wanted, spec.num_heads, padded(spec.head_dim, 16))
        queries = np.zeros(shape, np.float32) if self.query_taps and wanted else None
        for name, array in (("logits", logits), ("features", features), ("queries", queries)):
            step[name] = 0 if array is None else address(array)
        return logits, features, queries

    def _grow_tables(self, positions: int) -> None:
        """Cosines and sines up to a power of two of positions."""
        spec = self.spec
        if spec.rope is None or positions <= len(self._cos):
            return
        size = max(1024, 1 << (positions - 1).bit_length())
        self._cos, self._sin = tables(spec.rope, spec.head_dim, size)
        self._work.step["cos"], self._work.step["sin"] = address(self._cos), address(self._sin)


class _PackedModel:
    """The records that the compiled step reads, and the arrays behind their addresses."""

    def __init__(self, spec: DecoderSpec, weights: Weights, dtype: Mode, taps: tuple[int, ...]) -> None:
        self.nbytes = 0
        self.looked_up = 0  # bytes of a matrix of which a token reads one row
        self._held: list[NDArray] = []
        self._weights, self._dtype = weights, dtype
        self._kinds: set[int] = set()
        self.layers = np.zeros(spec.num_layers, layout.LAYER)
        self.matrices = np.zeros((spec.num_layers + 1, 7), layout.MATRIX)
        last = self.matrices[spec.num_layers]
        self._add_matrix("embed", last, layout.EMBED)  # the largest first, while little else is held
        if spec.tied or "lm_head" not in weights:
            last[layout.HEAD] = last[layout.EMBED]
        else:
            self.looked_up = self.nbytes
            self._add_matrix("lm_head", last, layout.HEAD)
        for number in range(spec.num_layers):
            self._add_layer(spec, number)
        self.tap("tap", taps)
        self.tap("query_tap", ())
        self.model = self._describe(spec)

    def tap(self, field: str, taps: tuple[int, ...]) -> None:
        """Number the tapped layers in one field of their records."""
        self.layers[field] = -1
        for place, layer in enumerate(taps):
            self.layers[field][layer] = place

    def _add_layer(self, spec: DecoderSpec, number: int) -> None:
        record, prefix = self.layers[number], f"layers.{number}."
        for field in ("attn_norm", "attn_norm_bias", "mlp_norm", "mlp_norm_bias", "q_norm", "k_norm"):
            record[field] = self._vector(prefix + field.replace("_bias", ".bias"))
        windowed = spec.windowed_layers is None or number in spec.windowed_layers
        record["window"] = (spec.sliding_window or 0) if windowed else 0
        for column, name in enumerate(_MATRICES):
            if name != "gate" or spec.gated:
                self._add_matrix(prefix + name, self.matrices[number], column)

    def _add_matrix(self, name: str, row: NDArray, column: int) -> None:
        if name not in self._weights:
            raise ModelError(f"the model lacks the weight {name!r}; its files are incomplete")
        packed: Packed = pack(self._weights[name], self._dtype)
        self._kinds.add(packed.kind)
        bias = self._vector(f"{name}.bias", 16)
        tiles, size = packed.data.shape
        row[column] = (self._keep(packed.data), bias, tiles, packed.groups, packed.kind, size, packed.n)

    def _vector(self, name: str, unit: int = 32) -> int:
        """Address of an fp32 vector, padded with zeros to `unit` values; 0 where the model has none."""
        if name not in self._weights:
            return 0
        values = self._weights[name].dense().reshape(-1)
        whole = np.zeros(padded(len(values), unit), np.float32)
        whole[: len(values)] = values
        return self._keep(whole)

    def _keep(self, array: NDArray) -> int:
        self._held.append(array)
        self.nbytes += array.nbytes
        return address(array)

    def _describe(self, spec: DecoderSpec) -> NDArray:
        sizes = _sizes(spec)
        model = np.zeros(1, layout.MODEL)
        values = {
            "num_layers": spec.num_layers,
            "hidden": spec.hidden_size,
            "heads": spec.num_heads,
            "kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "head_pad": sizes["head_pad"],
            "q_width": padded(spec.num_heads * spec.head_dim, 16),
            "kv_width": padded(spec.num_kv_heads * spec.head_dim, 16),
            "inter": spec.intermediate_size,
            "layer_norm": spec.norm == "layer",
            "activation": _ACTIVATIONS.index(spec.activation),
            "gated": spec.gated,
            "rope": spec.rope is not None,
            "final_norm": self._vector("final_norm"),
            "final_norm_bias": self._vector("final_norm.bias"),
            "pos_embed": self._positions(),
            "position_offset": spec.position_offset,
            "integers": bool(self._kinds - {0}),
            "eps": spec.norm_eps,
            "scale": spec.head_dim**-0.5,
        }
        for name, value in values.items():
            model[name] = value
        return model

    def _positions(self) -> int:
        if "pos_embed" not in self._weights:
            return 0
        return self._keep(np.ascontiguousarray(self._weights["pos_embed"].dense(), np.float32))


def _sizes(spec: DecoderSpec) -> dict[str, int]:
    """Floats per row of every buffer."""
    head_pad = padded(spec.head_dim, 16)
    mixed = padded(spec.num_heads * spec.head_dim, 32)
    x, hidden = padded(spec.hidden_size, 32), padded(spec.intermediate_size, 32)
    q, kv = padded(spec.num_heads * spec.head_dim, 16), padded(spec.num_kv_heads * spec.head_dim, 16)
    return {
        "x": x,
        "qkv": q + 2 * kv,
        "query": spec.num_heads * head_pad,
        "mixed": mixed,
        "hidden": hidden,
        "inputs": max(x, mixed, hidden),
        "head_pad": head_pad,
        "heads": spec.num_heads,
        "shared": spec.num_heads // spec.num_kv_heads,
    }


def _check(spec: DecoderSpec, weights: Weights, dtype: str, kv_dtype: str, taps: tuple[int, ...]) -> None:
    if dtype not in MODES:
        raise ConfigError.unknown(dtype, MODES, "dtype")
    if kv_dtype != "auto" and kv_dtype not in KINDS:
        raise ConfigError.unknown(kv_dtype, ("auto", *KINDS), "kv_cache_dtype")
    if not spec.norm_first or "project_in" in weights or "project_out" in weights:
        raise ModelError(f"the compiled decoder does not run {spec.family} with norms after; use the reference decoder")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{spec.num_heads} heads do not share {spec.num_kv_heads} KV heads evenly")
    spec.check_taps(taps)


def _check_batch(batch: Batch, spec: DecoderSpec, cache: PagedKVCache) -> None:
    """Refuse what would read or write outside the arrays."""
    rows, slots = len(batch.tokens), cache.num_pages * cache.page_size
    if not len(batch.positions) == len(batch.slots) == rows == int(batch.row_starts[-1]) > 0:
        raise RequestError("a batch needs a token, position and slot per row, and row_starts that end at the last row")
    for name, values, limit in (
        ("tokens", batch.tokens, spec.vocab_size),
        ("positions", batch.positions, spec.max_positions if spec.rope is None else 2**31),
        ("slots", batch.slots, slots),
        ("pages", batch.pages, cache.num_pages),
        ("contexts", batch.contexts, batch.pages.shape[1] * cache.page_size + 1),
        ("logit_rows", batch.logit_rows, rows),
    ):
        if values.size and not 0 <= int(values.min()) <= int(values.max()) < limit:
            raise RequestError(f"batch.{name} has a value outside 0 .. {limit - 1}")


def _say() -> None:
    print(
        "outrider: compiling the CPU kernels (once per machine, about half a minute) ...", file=sys.stderr, flush=True
    )


def warm_up(path: str, prepare: Callable[[], None]) -> int:
    """Compile what `prepare` compiles and the product of a path, whose address is given; says so if it takes long."""
    notice = threading.Timer(_QUIET, _say)
    notice.daemon = True
    notice.start()
    try:
        prepare()
        return product_address(path)
    finally:
        notice.cancel()
