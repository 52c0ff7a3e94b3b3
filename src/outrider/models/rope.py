"""Rotary positions: from config.json to a table of cosines and sines, the same one for every backend.

Sources: RoPE (arXiv 2104.09864), linear interpolation (2306.15595), YaRN (2309.00071) and the scaling of Llama 3.1,
with the arithmetic of transformers (angles are products in fp32), so that long positions agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from outrider.errors import ModelError
from outrider.models.spec import Rope
from outrider.types import Float32, Float64

RopeKind = Literal["default", "linear", "llama3", "yarn"]
KINDS: tuple[str, ...] = get_args(RopeKind)
REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
OPTIONAL = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}
SPELLING = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}


def rope_from_config(config: Mapping[str, Any], default_theta: float = 10000.0) -> Rope:
    """The Rope of a config.json, old (rope_theta, rope_scaling) or new (rope_parameters). ModelError if unknown."""
    fields = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in fields.values()):
        raise ModelError("config.json: rope_parameters that differ by layer are not supported; use one set for all")
    kind: Any = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in KINDS:
        raise ModelError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelError("config.json: partial_rotary_factor below 1 is not supported; supported: 1")
    theta = fields.get("rope_theta") or config.get("rope_theta") or default_theta
    return Rope(theta=float(theta), kind=kind, scaling=_scaling(kind, fields, config))


def _scaling(kind: str, fields: dict[str, Any], config: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that a kind reads, and no others; an unknown one is refused because it would be ignored."""
    required, optional = REQUIRED.get(kind, ()), OPTIONAL.get(kind, ())
    unknown = set(fields) - SPELLING - set(required) - set(optional)
    if unknown and kind != "default":
        known = ", ".join(required + optional)
        raise ModelError(f"config.json: {kind} RoPE with {', '.join(sorted(unknown))} is not supported; known: {known}")
    missing = [name for name in required if fields.get(name) is None]
    if missing:
        raise ModelError(f"config.json: {kind} RoPE needs {', '.join(missing)}; add it to rope_scaling")
    scaling = {name: float(fields[name]) for name in required + optional if fields.get(name) is not None}
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = float(_trained_positions(fields, config))
    return scaling


def _trained_positions(fields: dict[str, Any], config: Mapping[str, Any]) -> int:
    """Positions before the extension; a model that does not say was not extended."""
    name = "original_max_position_embeddings"
    return config.get(name) or fields.get(name) or config["max_position_embeddings"]


def rope_tables(rope: Rope, head_dim: int, positions: ArrayLike) -> tuple[Float32, Float32]:
    """Cosines and sines, both fp32 [positions, head_dim / 2], the attention factor multiplied in.

    Dimension i of a head turns with i + head_dim / 2: (x1 cos - x2 sin, x2 cos + x1 sin).
    A position's row is the same bits whichever other positions are asked for.
    """
    frequencies, factor = _frequencies(rope, head_dim)
    angles = np.asarray(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    wide = angles.astype(np.float64)
    return (np.cos(wide) * factor).astype(np.float32), (np.sin(wide) * factor).astype(np.float32)


def _frequencies(rope: Rope, head_dim: int) -> tuple[Float32, float]:
    """Radians per position for each pair of dimensions, fp32 [head_dim / 2], and the factor on cosines and sines."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = np.float32(1.0) / (np.float64(rope.theta) ** exponents).astype(np.float32)
    scaled, factor = _SCALE[rope.kind](base.astype(np.float64), rope, head_dim)
    return scaled.astype(np.float32), factor


def _default(base: Float64, rope: Rope, head_dim: int) -> tuple[Float64, float]:
    return base, 1.0


def _linear(base: Float64, rope: Rope, head_dim: int) -> tuple[Float64, float]:
    return base / rope.scaling["factor"], 1.0


def _llama3(base: Float64, rope: Rope, head_dim: int) -> tuple[Float64, float]:
    """Long waves are stretched by the factor, short ones kept, those between are blended."""
    low, high = rope.scaling["low_freq_factor"], rope.scaling["high_freq_factor"]
    turns = rope.scaling["original_max_position_embeddings"] * base / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * base / rope.scaling["factor"] + blend * base, 1.0


def _yarn(base: Float64, rope: Rope, head_dim: int) -> tuple[Float64, float]:
    """Dimensions that turn often keep their frequency, slow ones are interpolated, a ramp lies between."""
    get, factor = rope.scaling.get, rope.scaling["factor"]

    def dimension(rotations: float) -> float:
        ratio = rope.scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(get("beta_fast") or 32.0), dimension(get("beta_slow") or 1.0)
    if get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(len(base)) - low) / span, 0.0, 1.0)
    return base / factor * ramp + base * (1 - ramp), _attention_factor(rope)


def _attention_factor(rope: Rope) -> float:
    """YaRN's temperature of attention, as a factor on cosines and sines."""
    given, mscale, all_dim = (rope.scaling.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))

    def grow(scale: float) -> float:
        factor = rope.scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if given is not None:
        return given
    return grow(mscale) / grow(all_dim) if mscale and all_dim else grow(1.0)


_SCALE = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
