"""Which model families are read, and the check that a set of weights fits its spec.

A family is a module with MODEL_TYPE, ARCHITECTURES, spec_from_config and tensor_names: add yours to FAMILIES.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from outrider.errors import ModelError
from outrider.models import llama, mistral, opt, qwen2, qwen3
from outrider.models.spec import DecoderSpec, Weights


class Family(Protocol):
    """What a family's module offers."""

    @property
    def MODEL_TYPE(self) -> str:
        """config.json's model_type."""
        ...

    @property
    def ARCHITECTURES(self) -> tuple[str, ...]:
        """config.json's architectures that it reads."""
        ...

    def spec_from_config(self, config: Mapping[str, Any]) -> DecoderSpec:
        """The spec of a config.json. ModelError names what is missing or unsupported."""
        ...

    def tensor_names(self, spec: DecoderSpec) -> dict[str, str]:
        """Canonical weight names (models/spec.py) to those of the safetensors files, optional ones included."""
        ...


FAMILIES: tuple[Family, ...] = (llama, mistral, qwen2, qwen3, opt)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json: by its architecture, and by model_type where it names none. Else ModelError."""
    architectures = config.get("architectures") or []
    model_type = config.get("model_type")
    for family in FAMILIES:
        if set(architectures) & set(family.ARCHITECTURES) or (not architectures and model_type == family.MODEL_TYPE):
            return family
    named = ", ".join(architectures) or model_type or "no architecture at all"
    supported = ", ".join(name for family in FAMILIES for name in family.ARCHITECTURES)
    raise ModelError(f"config.json names {named}, which is not supported; supported: {supported}")


def expected_shapes(spec: DecoderSpec, embed_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of every weight a decoder of this spec may have; `embed_size` is the width of `embed`."""
    hidden, wide = spec.hidden_size, spec.intermediate_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "mlp_norm": (hidden,)}
    layer |= {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
    layer |= {"up": (wide, hidden), "down": (hidden, wide)}
    if spec.gated:
        layer["gate"] = (wide, hidden)
    if spec.qk_norm:
        layer |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, embed_size)}
    if spec.norm_first:
        shapes["final_norm"] = (hidden,)
    if not spec.tied:
        shapes["lm_head"] = (spec.vocab_size, embed_size)
    if spec.rope is None:
        shapes["pos_embed"] = (spec.max_positions + spec.position_offset, hidden)
    if embed_size != hidden:
        shapes |= {"project_in": (hidden, embed_size), "project_out": (embed_size, hidden)}
    for i in range(spec.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_weights(spec: DecoderSpec, weights: Weights) -> None:
    """Raise ModelError where a weight is missing, superfluous or of another shape than the spec says."""
    if "embed" not in weights:
        raise ModelError("the weights lack embed; the model's files are incomplete, fetch them again")
    if spec.num_layers > len(weights):  # also keeps a damaged header from asking for a billion names
        raise ModelError(f"the config asks for {spec.num_layers} layers, the files hold {len(weights)} weights in all")
    shapes = expected_shapes(spec, weights["embed"].shape[-1])
    for name, shape in shapes.items():
        if name not in weights:
            raise ModelError(f"the weights lack {name}; the model's files are incomplete, fetch them again")
        if tuple(weights[name].shape) != shape:
            found = tuple(weights[name].shape)
            raise ModelError(f"{name} has shape {found}, the config asks for {shape}; the files do not belong together")
    for name in weights:
        owner = name.removesuffix(".bias")
        if owner not in shapes:
            raise ModelError(f"the weights hold {name}, which a {spec.family} decoder of this config does not use")
        if name != owner and tuple(weights[name].shape) != shapes[owner][:1]:
            raise ModelError(f"{name} has shape {tuple(weights[name].shape)}, expected {shapes[owner][:1]}")
