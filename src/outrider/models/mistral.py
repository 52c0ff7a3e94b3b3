"""Mistral: Llama with a sliding window in every layer, where config.json gives one."""

from __future__ import annotations

from outrider.models import hf_config
from outrider.models.llama import gated_names, gated_spec
from outrider.models.spec import DecoderSpec

MODEL_TYPE = "mistral"
ARCHITECTURES = ("MistralForCausalLM",)


def spec_from_config(config: hf_config.Config) -> DecoderSpec:
    """The spec of a config.json. ModelError names what is missing or unsupported."""
    layers = hf_config.integer(config, "num_hidden_layers")
    sliding, windowed = hf_config.window({**config, "layer_types": None}, layers, first=0)
    return gated_spec(config, MODEL_TYPE, sliding_window=sliding, windowed_layers=windowed)


def tensor_names(spec: DecoderSpec) -> dict[str, str]:
    """Canonical names to those of the file."""
    return gated_names(spec, ())
