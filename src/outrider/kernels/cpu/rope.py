"""Tables of cosines and sines for rotary positions: default, linear, llama3 and yarn frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from outrider.models.spec import Rope
from outrider.types import Float32


def frequencies(rope: Rope, head_dim: int) -> tuple[Float32, float]:
    """Angle per position of every pair [head_dim / 2], and the factor on cosines and sines (yarn)."""
    base = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaling = dict(rope.scaling)
    if rope.kind == "linear":
        return (base / scaling["factor"]).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(base, scaling).astype(np.float32), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope.theta, head_dim, scaling).astype(np.float32), _yarn_factor(scaling)
    return base.astype(np.float32), 1.0


def tables(rope: Rope, head_dim: int, positions: int) -> tuple[Float32, Float32]:
    """cos and sin, fp32 [positions, head_dim / 2]; angles are fp32 products, as the models were trained with."""
    turn, factor = frequencies(rope, head_dim)
    angle = (np.arange(positions, dtype=np.float32)[:, None] * turn).astype(np.float64)
    return (np.cos(angle) * factor).astype(np.float32), (np.sin(angle) * factor).astype(np.float32)


def _llama3(base: np.ndarray, scaling: Mapping[str, float]) -> np.ndarray:
    """Slow turns are stretched, fast ones kept, those between blended (Llama 3.1)."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    length = scaling["original_max_position_embeddings"] * base / (2 * math.pi)  # turns within the old context
    blend = np.clip((length - low) / (high - low), 0, 1)
    return base * ((1 - blend) / factor + blend)


def _yarn(base: np.ndarray, theta: float, dim: int, scaling: Mapping[str, float]) -> np.ndarray:
    """Interpolation of slow turns, extrapolation of fast ones, a ramp between (YaRN, section 3.2)."""
    old = scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return base / scaling["factor"] * ramp + base * (1 - ramp)


def _yarn_factor(scaling: Mapping[str, float]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def growth(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return growth(scaling["mscale"]) / growth(scaling["mscale_all_dim"])
    return growth(1.0)
