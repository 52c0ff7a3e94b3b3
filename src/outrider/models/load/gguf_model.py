"""From a GGUF file to a DecoderSpec and canonical weights.

The header becomes the dict that the same model's config.json would be, so that one family file serves both formats.
What GGUF stores differently is undone here: q and k rows of the llama architecture are interleaved for RoPE, and the
frequency scaling of Llama 3 is stored as a table of factors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from outrider.errors import ModelError
from outrider.models.load.gguf_file import GGUFFile, GGUFTensor
from outrider.models.load.grouped import EXACT, grouped, values_of
from outrider.models.spec import GroupedInts
from outrider.types import Float32

#: GGUF architecture -> model_type and architecture of config.json. Mistral's files call themselves llama.
ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}

FIELDS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}

#: Header fields that change what the model computes and that no decoder here computes, unless neutral.
REFUSED = ("expert_count", "attention.sliding_window", "logit_scale", "embedding_scale", "residual_scale")

TOP_NAMES = {"token_embd": "embed", "output_norm": "final_norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"

#: Numbers of Llama 3's published scaling; its factor is read from the table.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class GGUFWeight:
    """One tensor of the file; `order` picks its rows where the file's order is not ours."""

    tensor: GGUFTensor
    order: NDArray[np.int64] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def kind(self) -> str:
        """The stored type, such as Q4_K."""
        return self.tensor.kind.name

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.tensor.rows.nbytes

    def dense(self) -> Float32:
        """The values in fp32, as the gguf package dequantises them; the array is the caller's own."""
        if self.tensor.kind in EXACT and (groups := self.groups()) is not None:
            return values_of(groups)  # the same values, several times as fast
        values = dequantize(self._rows(), self.tensor.kind)
        return np.require(values.reshape(self.shape), np.float32, ["C", "W"])

    def groups(self) -> GroupedInts | None:
        """The stored integers (see grouped.py for which types are exact); None for other types and for vectors."""
        return grouped(self._rows(), self.tensor.kind) if len(self.shape) == 2 else None

    def part(self, first: int, last: int) -> GGUFWeight:
        """Rows first .. last - 1 of a matrix, in our order."""
        order = self.order
        rows = self.tensor.rows[first:last] if order is None else self.tensor.rows[order[first:last]]
        return GGUFWeight(replace(self.tensor, shape=(len(rows), *self.shape[1:]), rows=rows))

    def release(self) -> None:
        """Let the system take back the pages of the file that the tensor fills."""
        self.tensor.release()

    def _rows(self) -> NDArray[np.uint8]:
        rows = self.tensor.rows
        if self.order is None:
            return rows
        return (
            rows[self.order] if len(self.shape) == 2 else rows.reshape(len(self.order), -1)[self.order].reshape(1, -1)
        )


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The config.json that this file's model would have. ModelError for an architecture that is not supported."""
    architecture = str(file.fields.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{file.path} has architecture {architecture!r}, which is not supported; supported: {known}")
    if file.fields.get("split.count", 1) > 1:
        raise ModelError(f"{file.path} is one part of a split GGUF; join the parts (llama-gguf-split --merge) first")
    own = {k.removeprefix(f"{architecture}."): v for k, v in file.fields.items() if k.startswith(f"{architecture}.")}
    _refuse_unsupported(file, own)
    model_type, class_name = ARCHITECTURES[architecture]
    config: dict[str, Any] = {"model_type": model_type, "architectures": [class_name]}
    config |= {name: own[key] for key, name in FIELDS.items() if key in own}
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks token_embd.weight; fetch the model again")
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config.setdefault("head_dim", own.get("rope.dimension_count") or _head_dim(config))
    if own.get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise ModelError(f"{file.path} rotates only a part of each head, which is not supported")
    if (scaling := _rope_scaling(file, own, config)) is not None:
        config["rope_scaling"] = scaling
    return config


def _refuse_unsupported(file: GGUFFile, own: Mapping[str, Any]) -> None:
    for key in REFUSED:
        if own.get(key):
            raise ModelError(f"{file.path}: {key} = {own[key]!r} is not supported; supported: plain dense decoders")
    for key in FIELDS:
        if isinstance(own.get(key), list):
            raise ModelError(f"{file.path}: {key} differs by layer, which is not supported; use another model")


def _head_dim(config: Mapping[str, Any]) -> int | None:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return hidden // heads if hidden and heads else None


def _rope_scaling(file: GGUFFile, own: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` as config.json spells it: from the header, or from the table of frequency factors."""
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, config)
    kind = own.get("rope.scaling.type", "linear" if own.get("rope.scale_linear", 1.0) != 1.0 else "none")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= _yarn_scaling(own, factor)
    return scaling


def _yarn_scaling(own: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """YaRN's optional fields. GGUF's attention factor multiplies YaRN's own 0.1 ln(factor) + 1."""
    names = {"original_context_length": "original_max_position_embeddings"}
    names |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    fields = {name: own[f"rope.scaling.{key}"] for key, name in names.items() if f"rope.scaling.{key}" in own}
    attention = own.get("rope.scaling.attn_factor", own.get("rope.scaling.yarn_attn_factor", 1.0))
    if attention != 1.0:
        fields["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return fields


def _llama3_scaling(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """The llama3 scaling whose factors the file holds, within 1e-3 of each; ModelError where none gives them."""
    factors = dequantize(file.tensors[ROPE_FACTORS].rows, file.tensors[ROPE_FACTORS].kind).reshape(-1)
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
    theta, dim = config.get("rope_theta", 10000.0), config["head_dim"]
    turns = LLAMA3["original_max_position_embeddings"] * theta ** (-np.arange(0, dim, 2) / dim) / (2 * np.pi)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    blend = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - blend) / scaling["factor"] + blend)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"{file.path}: {ROPE_FACTORS} is not Llama 3's scaling; only that table is supported")
    return scaling


def weights_of(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, GGUFWeight]:
    """The file's tensors under their canonical names. ModelError for a tensor that no decoder here uses."""
    heads = {"q": config.get("num_attention_heads", 1), "k": config.get("num_key_value_heads", 0)}
    heads["k"] = heads["k"] or heads["q"]
    interleaved = file.fields["general.architecture"] == "llama"
    weights = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        canonical = _canonical(file, name)
        _refuse_unreadable(file, tensor)
        role = canonical.removesuffix(".bias").rpartition(".")[2]
        order = half_split_order(tensor.shape[0], heads[role]) if interleaved and role in heads else None
        weights[canonical] = GGUFWeight(tensor, order)
    return weights


def _canonical(file: GGUFFile, name: str) -> str:
    top, _, kind = name.rpartition(".")
    if top in TOP_NAMES:
        return TOP_NAMES[top] + (".bias" if kind == "bias" else "")
    match = LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in LAYER_NAMES:
        raise ModelError(f"{file.path} holds {name}, which no supported decoder uses; the architecture is not plain")
    return f"layers.{match[1]}.{LAYER_NAMES[match[2]]}" + (".bias" if match[3] == "bias" else "")


def _refuse_unreadable(file: GGUFFile, tensor: GGUFTensor) -> None:
    """Find out at loading, not in the middle of a run, that a type cannot be dequantised: try one empty row."""
    try:
        dequantize(np.empty((0, tensor.rows.shape[1]), np.uint8), tensor.kind)
    except NotImplementedError:
        raise ModelError(
            f"{file.path}: {tensor.name} has quantisation {tensor.kind.name}, which cannot be dequantised; "
            "use a file with a common quantisation such as Q4_K_M or Q8_0"
        ) from None
    except ValueError:
        return


def half_split_order(rows: int, heads: int) -> NDArray[np.int64]:
    """Stored row of each row in half-split RoPE order, where every head's rows are stored as 0, d/2, 1, d/2 + 1, ..."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
