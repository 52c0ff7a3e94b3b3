"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window in the upper layers where switched on."""

from __future__ import annotations

from outrider.models import hf_config
from outrider.models.llama import gated_names, gated_spec
from outrider.models.spec import DecoderSpec

MODEL_TYPE = "qwen2"
ARCHITECTURES = ("Qwen2ForCausalLM",)


def spec_from_config(config: hf_config.Config) -> DecoderSpec:
    """The spec of a config.json. ModelError names what is missing or unsupported."""
    sliding, windowed = upper_window(config)
    return gated_spec(config, MODEL_TYPE, sliding_window=sliding, windowed_layers=windowed)


def tensor_names(spec: DecoderSpec) -> dict[str, str]:
    """Canonical names to those of the file."""
    return gated_names(spec, ("q.bias", "k.bias", "v.bias"))


def upper_window(config: hf_config.Config) -> tuple[int | None, tuple[int, ...] | None]:
    """Qwen's window: only with use_sliding_window, and only from layer max_window_layers on."""
    if not hf_config.truth(config, "use_sliding_window", False):
        return None, None
    layers = hf_config.integer(config, "num_hidden_layers")
    first = config.get("max_window_layers")
    return hf_config.window(config, layers, first=min(28 if first is None else int(first), layers))
