"""EAGLE-3 heads in folders, read without PyTorch: both public layouts, and the compact one of the shipped heads.

The compact layout is head.q8.safetensors instead of model.safetensors: every matrix NAME as int8 `NAME` with one scale
per row and 32 inputs in `NAME.scale` (fp16, or fp32 where fp16 does not hold it), which is what the compiled head
computes with anyway; norms and maps as they are. Its config.json is the public one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ModelError
from outrider.models.eagle3_spec import Eagle3Spec, spec_from_config
from outrider.models.load.json_file import read_json
from outrider.models.spec import DecoderSpec, GroupedInts, Weight
from outrider.types import Float32

CONFIG, WEIGHTS, COMPACT = "config.json", "model.safetensors", "head.q8.safetensors"
CARD = "README.md"
EMBEDDING = "embed_tokens.weight"
_SCALE = ".scale"
_GROUP = 32  # inputs that share a scale
_KINDS = {"F32": "f4", "F16": "f2", "BF16": "u2", "I64": "i8", "I32": "i4", "I8": "i1", "BOOL": "?"}


@dataclass(frozen=True)
class Dense:
    """Values as they were stored, in fp32."""

    values: Float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def dense(self) -> Float32:
        return self.values

    def groups(self) -> GroupedInts | None:
        return None


@dataclass(frozen=True)
class Compact:
    """A matrix of the compact layout: q int8 [N, K], scale [N, ceil(K / 32)]."""

    q: NDArray[np.int8]
    scale: Float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.q.shape

    def dense(self) -> Float32:
        spread = np.repeat(self.scale, _GROUP, axis=1)[:, : self.q.shape[1]]
        return self.q * spread

    def groups(self) -> GroupedInts | None:
        return GroupedInts(8, self.q, self.scale)


@dataclass(frozen=True)
class StoredHead:
    """A head as it lies in a folder, checked against its target. Weights are named as in the `midlayer.*` layout."""

    spec: Eagle3Spec
    weights: Mapping[str, Weight]  # names end with .weight or .bias
    d2t: NDArray[np.int64]  # [draft vocabulary] target id - draft id
    t2d: NDArray[np.bool_]  # [vocabulary] whether the head can draft a token

    @property
    def ids(self) -> NDArray[np.int64]:
        """Target id of every draft id."""
        return self.d2t + np.arange(len(self.d2t))


def read_head(folder: str | Path, target: DecoderSpec) -> StoredHead:
    """The head in a folder. ModelError says what is missing or does not belong to the target."""
    folder = Path(folder)
    return stored_head(spec_from_config(read_config(folder), target), _read_tensors(folder))


def stored_head(spec: Eagle3Spec, tensors: Mapping[str, NDArray]) -> StoredHead:
    """A head of arrays, named in any of the layouts."""
    stored = {canonical(name): values for name, values in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if spec.draft_vocab_size == spec.vocab_size:
        everything = {"d2t": np.zeros(spec.vocab_size, np.int64), "t2d": np.ones(spec.vocab_size, bool)}
        stored = {**everything, **stored}
    scales = {name: stored.pop(name) for name in [name for name in stored if name.endswith(_SCALE)]}
    _check_shapes(stored, shapes(spec))
    d2t, t2d = stored.pop("d2t").astype(np.int64), stored.pop("t2d").astype(bool)
    _check_vocabulary(d2t, t2d)
    return StoredHead(spec, {name: _weight(name, stored[name], scales) for name in stored}, d2t, t2d)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a head's folder."""
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} holds no {CONFIG}; give the folder of an EAGLE-3 head")
    return read_json(folder / CONFIG)


def head_taps(folder: str | Path, target: DecoderSpec) -> tuple[int, ...]:
    """The target's layers whose states the head in a folder needs. ModelError where it is not one of this target."""
    return spec_from_config(read_config(Path(folder)), target).taps


def shapes(spec: Eagle3Spec) -> dict[str, tuple[int, ...]]:
    """What a head's file holds, by name in the `midlayer.*` layout, but for an embedding of its own."""
    hidden, inner, query = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    matrices = {
        "fc": (hidden, len(spec.taps) * hidden),
        "lm_head": (spec.draft_vocab_size, hidden),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    attention = {"q": (query, 2 * hidden), "k": (kv, 2 * hidden), "v": (kv, 2 * hidden), "o": (hidden, query)}
    matrices |= {f"midlayer.self_attn.{name}_proj": shape for name, shape in attention.items()}
    found: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
    if spec.attention_bias:
        found |= {f"midlayer.self_attn.{name}_proj.bias": shape[:1] for name, shape in attention.items()}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        found[f"midlayer.{norm}.weight"] = (hidden,)
    vocabulary = {"d2t": (spec.draft_vocab_size,), "t2d": (spec.vocab_size,)}
    return {**found, "norm.weight": (hidden,), **vocabulary, EMBEDDING: (spec.vocab_size, hidden)}


def install_compact(source: str | Path, folder: str | Path, target: DecoderSpec) -> None:
    """Write the head in `source` as a compact folder, with its config and card; whole files replace what was there."""
    from outrider.kernels.cpu.pack import quantise_dense  # imports Numba, which reading a head need not

    source, folder = Path(source), Path(folder)
    head = read_head(source, target)
    tensors: dict[str, NDArray] = {"d2t": head.d2t, "t2d": head.t2d}
    for name, weight in head.weights.items():
        tensors[name] = weight.dense()
        if len(weight.shape) == 2:
            groups = weight.groups() or quantise_dense(weight.dense(), 8)
            tensors[name], tensors[name + _SCALE] = np.ascontiguousarray(groups.q), _short(groups.scale)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        _save(tensors, Path(draft, COMPACT))
        for name in (name for name in (CONFIG, CARD) if (source / name).exists()):
            shutil.copyfile(source / name, Path(draft, name))
        for path in Path(draft).iterdir():
            path.chmod(0o644)  # safetensors makes files that only their owner reads
            os.replace(path, folder / path.name)


def canonical(name: str) -> str:
    """A stored name in the `midlayer.*` layout."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _save(tensors: Mapping[str, NDArray], path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, path)


def _short(scale: Float32) -> NDArray:
    """fp16 where it holds every scale exactly."""
    with np.errstate(over="ignore"):
        half = scale.astype(np.float16)
    return half if (half.astype(np.float32) == scale).all() else scale


def _weight(name: str, values: NDArray, scales: Mapping[str, NDArray]) -> Weight:
    scale = scales.get(name + _SCALE)
    if scale is None:
        return Dense(np.ascontiguousarray(values, np.float32))
    if values.dtype != np.int8 or scale.shape != (len(values), -(-values.shape[1] // _GROUP)):
        raise ModelError(f"the head's {name} and its scales do not fit together; fetch the head again")
    return Compact(values, scale.astype(np.float32))


def _read_tensors(folder: Path) -> dict[str, NDArray]:
    """The arrays of a folder's file, the public one where it is there."""
    from safetensors import SafetensorError, deserialize

    path = next((folder / name for name in (WEIGHTS, COMPACT) if (folder / name).exists()), None)
    if path is None:
        raise ModelError(f"{folder} holds no {WEIGHTS}; heads stored as .bin must be converted to safetensors first")
    try:
        return {name: _array(name, part) for name, part in deserialize(path.read_bytes())}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file ({error}); fetch the head again") from None


def _array(name: str, part: Mapping[str, Any]) -> NDArray:
    """One tensor; bfloat16 as fp32."""
    kind = part["dtype"]
    if kind not in _KINDS:
        raise ModelError(f"the head's {name} is stored as {kind}, which is not supported; known: {', '.join(_KINDS)}")
    values = np.frombuffer(part["data"], _KINDS[kind]).reshape(part["shape"])
    return (values.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else values


def _check_shapes(stored: Mapping[str, NDArray], expected: Mapping[str, tuple[int, ...]]) -> None:
    for verb, names in (
        ("lacks", set(expected) - set(stored) - {EMBEDDING}),
        ("has a superfluous", set(stored) - set(expected)),
    ):
        if names:
            raise ModelError(f"the head {verb} {', '.join(sorted(names)[:4])}; this is not an EAGLE-3 head's file")
    for name, values in stored.items():
        if tuple(values.shape) != expected[name]:
            found, wanted = list(values.shape), list(expected[name])
            raise ModelError(f"the head's {name} has shape {found}, its config asks for {wanted}")


def _check_vocabulary(d2t: NDArray[np.int64], t2d: NDArray[np.bool_]) -> None:
    """The two maps must name the same tokens, each once, inside the target's vocabulary."""
    ids = d2t + np.arange(len(d2t))
    inside = bool(((ids >= 0) & (ids < len(t2d))).all())
    if not inside or len(np.unique(ids)) != len(ids) or not np.array_equal(np.unique(ids), np.flatnonzero(t2d)):
        raise ModelError("the head's d2t and t2d do not name the same tokens of the target; fetch the head again")
