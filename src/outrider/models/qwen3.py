"""Qwen3 (dense): Qwen2's window, a head size of its own, and an RMS norm on every query and key head."""

from __future__ import annotations

from outrider.models import hf_config
from outrider.models.llama import gated_names, gated_spec
from outrider.models.qwen2 import upper_window
from outrider.models.spec import DecoderSpec

MODEL_TYPE = "qwen3"
ARCHITECTURES = ("Qwen3ForCausalLM",)


def spec_from_config(config: hf_config.Config) -> DecoderSpec:
    """The spec of a config.json. ModelError names what is missing or unsupported."""
    sliding, windowed = upper_window(config)
    return gated_spec(
        config,
        MODEL_TYPE,
        head_dim=hf_config.integer(config, "head_dim", 128),
        qk_norm=True,
        sliding_window=sliding,
        windowed_layers=windowed,
    )


def tensor_names(spec: DecoderSpec) -> dict[str, str]:
    """Canonical names to those of the file."""
    names = gated_names(spec, ("q.bias", "k.bias", "v.bias", "o.bias"))
    for i in range(spec.num_layers):
        names[f"layers.{i}.q_norm"] = f"model.layers.{i}.self_attn.q_norm.weight"
        names[f"layers.{i}.k_norm"] = f"model.layers.{i}.self_attn.k_norm.weight"
    return names
