"""The reference decoder: any DecoderSpec in plain torch, written to be read.

On a CPU every row is computed alone, so its bits do not depend on the batch, on chunks or on its neighbours; that
makes it the oracle of the compiled decoder. On an accelerator all rows share one product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.errors import ConfigError, RequestError
from outrider.kernels import reference as ops
from outrider.models.families import check_weights
from outrider.models.rope import rope_tables
from outrider.models.spec import DecoderSpec, KVCache, Weights
from outrider.models.torch_cache import TorchCache, codec_for
from outrider.types import Batch, Result

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, "int8": torch.int8}
Tensors = Mapping[str, Tensor]


class ReferenceDecoder:
    """A decoder of models/spec.py's protocol, for any spec, in torch."""

    def __init__(self, spec: DecoderSpec, tensors: Tensors, kv_dtype: torch.dtype, taps: tuple[int, ...]) -> None:
        """`tensors` by canonical name, all of one floating point type on one device; see `build`."""
        self.spec, self.taps, self.tensors, self.kv_dtype = spec, taps, tensors, kv_dtype
        self.query_taps: tuple[int, ...] = ()
        self.device, self.dtype = tensors["embed"].device, tensors["embed"].dtype
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
        looked_up = tensors["embed"].nbytes if "lm_head" in tensors and not spec.tied else 0
        self.step_bytes = self.weight_bytes - looked_up + looked_up // spec.vocab_size
        self.rows: ops.Rows = ops.RowByRow() if self.device.type == "cpu" else ops.AllRows()
        self.layers = [Layer(spec, _under(tensors, f"layers.{i}.")) for i in range(spec.num_layers)]

    @classmethod
    def build(
        cls,
        spec: DecoderSpec,
        weights: Weights,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        kv_dtype: str = "auto",
        taps: Sequence[int] = (),
    ) -> ReferenceDecoder:
        """Check the weights, make them dense and place them. ModelError or ConfigError says what does not fit."""
        check_weights(spec, weights)
        torch_dtype = _lookup("dtype", dtype, DTYPES)
        kept = torch_dtype if kv_dtype == "auto" else _lookup("kv_cache_dtype", kv_dtype, KV_DTYPES)
        spec.check_taps(taps)
        tensors = {name: _place(weights[name].dense(), torch_dtype, device) for name in weights}
        return cls(spec, tensors, kept, tuple(taps))

    def retap(self, taps: tuple[int, ...]) -> None:
        """Give the states behind other layers from the next pass on."""
        self.spec.check_taps(taps)
        self.taps = taps

    def retap_queries(self, taps: tuple[int, ...]) -> None:
        """Give the queries of other layers from the next pass on."""
        self.spec.check_taps(taps)
        self.query_taps = taps

    def new_cache(self, num_pages: int, page_size: int) -> TorchCache:
        """An empty cache for this decoder, on its device."""
        return TorchCache(self.spec, num_pages, page_size, codec_for(self.kv_dtype), self.device)

    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes in all layers."""
        return self.new_cache(1, 1).nbytes

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, before_layer: Callable[[int], int | None] | None = None) -> Result:
        """See models/spec.py; `cache` is one that new_cache gave."""
        assert isinstance(cache, TorchCache)
        if batch.slow:
            raise RequestError("the reference decoder keeps all KV resident; use the compiled one for slow layers")
        x = self._embed(batch)
        cos, sin = self._rotation(batch)
        attention = Attention(self.spec, batch, cache, self.rows)
        features: dict[int, Tensor] = {}
        queries: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            queries[index], k, v = self.rows.map(layer.project, x, cos, sin)
            x = self.rows.map(layer.combine, x, attention(index, queries[index], k, v))
            features[index] = x
        asked = [queries[tap][_indices(batch.logit_rows, self.device)] for tap in self.query_taps]
        return self._result(batch, x, [features[tap] for tap in self.taps], asked)

    def _embed(self, batch: Batch) -> Tensor:
        """Rows of the residual stream before the first layer: [T, hidden]."""
        x = self.tensors["embed"][_indices(batch.tokens, self.device)]
        if "project_in" in self.tensors:
            x = self.rows.map(lambda rows: F.linear(rows, self.tensors["project_in"]), x)
        if self.spec.rope is None:
            x = x + self.tensors["pos_embed"][_indices(batch.positions, self.device) + self.spec.position_offset]
        return x

    def _rotation(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, head_dim / 2]; learned positions turn nothing, by an angle of zero."""
        if self.spec.rope is None:
            shape = (len(batch.tokens), self.spec.head_dim // 2)
            return torch.ones(shape, device=self.device), torch.zeros(shape, device=self.device)
        cos, sin = rope_tables(self.spec.rope, self.spec.head_dim, batch.positions)
        return torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device)

    def _result(self, batch: Batch, x: Tensor, features: Sequence[Tensor], queries: Sequence[Tensor]) -> Result:
        logits = self.rows.map(self._logits, x[_indices(batch.logit_rows, self.device)])
        return Result(
            best=logits[:, : self.spec.num_tokens].argmax(-1).cpu().numpy(),
            logits=logits.cpu().numpy() if batch.want_logits else None,
            features=_stacked(features),
            queries=_stacked(queries),
        )

    def _logits(self, x: Tensor) -> Tensor:
        """Logits [rows, V] in fp32 of rows of the residual stream."""
        if "final_norm" in self.tensors:
            x = norm(self.spec, self.tensors, "final_norm", x)
        if "project_out" in self.tensors:
            x = F.linear(x, self.tensors["project_out"])
        return F.linear(x, self.tensors["embed" if self.spec.tied else "lm_head"]).float()


class Layer:
    """One layer's arithmetic outside attention; every method takes and gives rows."""

    def __init__(self, spec: DecoderSpec, tensors: Tensors) -> None:
        self.spec, self.tensors = spec, tensors
        self.activate = ops.ACTIVATIONS[spec.activation]

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [rows, heads, d], keys and values [rows, kv_heads, d], turned to their positions."""
        x = self._norm("attn_norm", x) if self.spec.norm_first else x
        q, k, v = (self._linear(name, x).view(len(x), -1, self.spec.head_dim) for name in "qkv")
        if self.spec.qk_norm:
            q, k = self._norm("q_norm", q), self._norm("k_norm", k)
        return ops.rotate(q, cos, sin), ops.rotate(k, cos, sin), v

    def combine(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after the layer: [rows, hidden]."""
        x = x + self._linear("o", attended.flatten(1))
        if self.spec.norm_first:
            return x + self._mlp(self._norm("mlp_norm", x))
        x = self._norm("attn_norm", x)
        return self._norm("mlp_norm", x + self._mlp(x))

    def _mlp(self, x: Tensor) -> Tensor:
        up = self._linear("up", x)
        wide = self.activate(self._linear("gate", x)) * up if self.spec.gated else self.activate(up)
        return self._linear("down", wide)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[name], self.tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return norm(self.spec, self.tensors, name, x)


class Attention:
    """Attention of one pass: what each sequence reads is worked out once and shared by the layers that agree on it."""

    def __init__(self, spec: DecoderSpec, batch: Batch, cache: TorchCache, rows: ops.Rows) -> None:
        self.spec, self.batch, self.cache, self.rows = spec, batch, cache, rows
        self.windowed = range(spec.num_layers) if spec.windowed_layers is None else spec.windowed_layers
        sequences = range(len(batch.contexts))
        self.own = _indices(batch.slots, cache.device)
        self.slots = [_indices(ops.sequence_slots(batch, s, cache.page_size), cache.device) for s in sequences]
        self.reads: dict[tuple[int, int | None, int], Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the rows' k and v, then read: rows see each other as the cache holds them, whatever its type."""
        self.cache.write(layer, self.own, k, v)
        return torch.cat([self._sequence(layer, s, q) for s in range(len(self.slots))])

    def _sequence(self, layer: int, s: int, q: Tensor) -> Tensor:
        k, v = self.cache.read(layer, self.slots[s], q.dtype)
        rows = q[self.batch.row_starts[s] : self.batch.row_starts[s + 1]]
        return self.rows.attention(rows, k, v, self._reads(layer, s))

    def _reads(self, layer: int, s: int) -> Tensor:
        window = self.spec.sliding_window if layer in self.windowed else None
        group = 0 if self.batch.selection is None else int(self.batch.selection.groups[layer])
        key = (s, window, group)
        if key not in self.reads:
            reads = ops.visible(self.batch, s, self.spec.num_kv_heads, window, group)
            self.reads[key] = self.rows.place(reads, self.cache.device)
        return self.reads[key]


def _indices(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)


def _stacked(parts: Sequence[Tensor]) -> np.ndarray | None:
    """Tensors of one shape as one fp32 array; None where there are none."""
    return torch.stack(list(parts)).float().cpu().numpy() if parts else None


def norm(spec: DecoderSpec, tensors: Tensors, name: str, x: Tensor) -> Tensor:
    """The spec's norm with the weights of that name; heads have RMS norms in every family that norms them."""
    if spec.norm == "rms":
        return ops.rms_norm(x, tensors[name], spec.norm_eps)
    return ops.layer_norm(x, tensors[name], tensors.get(f"{name}.bias"), spec.norm_eps)


def _under(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _place(values: np.ndarray, dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of its own memory: weights may be views of a file that is closed later."""
    return torch.tensor(values, dtype=dtype, device=device)


def _lookup(field: str, name: str, known: Mapping[str, torch.dtype]) -> torch.dtype:
    if name not in known:
        raise ConfigError(f"{field} = {name!r} is refused; use one of {', '.join(known)}", field)
    return known[name]
