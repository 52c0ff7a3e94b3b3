"""Llama, and what most dense families share with it: RMS norms, RoPE, a gated SiLU MLP, grouped KV heads."""

from __future__ import annotations

from typing import Any

from outrider.models import hf_config
from outrider.models.rope import rope_from_config
from outrider.models.spec import DecoderSpec

MODEL_TYPE = "llama"
ARCHITECTURES = ("LlamaForCausalLM",)

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def spec_from_config(config: hf_config.Config) -> DecoderSpec:
    """The spec of a config.json. ModelError names what is missing or unsupported."""
    return gated_spec(config, MODEL_TYPE)


def tensor_names(spec: DecoderSpec) -> dict[str, str]:
    """Canonical names to those of the file. A file need not hold the biases it has no use for."""
    biased = tuple(f"{name}.bias" for name in ("q", "k", "v", "o", "gate", "up", "down"))
    return gated_names(spec, biased)


def gated_spec(config: hf_config.Config, family: str, **changes: Any) -> DecoderSpec:
    """A decoder of Llama's shape, with what a family changes in it."""
    hf_config.refuse_unsupported(config)
    hidden = hf_config.integer(config, "hidden_size")
    num_heads, num_kv_heads = hf_config.heads(config)
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": hf_config.integer(config, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": hf_config.integer(config, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": hf_config.integer(config, "head_dim", hidden // num_heads),
        "intermediate_size": hf_config.integer(config, "intermediate_size"),
        "max_positions": hf_config.integer(config, "max_position_embeddings"),
        "norm_eps": hf_config.real(config, "rms_norm_eps", 1e-6),
        "activation": hf_config.activation(config, "hidden_act", "silu"),
        "rope": rope_from_config(config),
        "tied": hf_config.truth(config, "tie_word_embeddings", False),
        "eos_token_ids": hf_config.eos_ids(config),
    }
    return DecoderSpec(**{**fields, **changes})


def gated_names(spec: DecoderSpec, optional: tuple[str, ...]) -> dict[str, str]:
    """Names of a decoder of Llama's shape; `optional` are layer weights beyond the common ones."""
    names = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
    if not spec.tied:
        names["lm_head"] = "lm_head.weight"
    for i in range(spec.num_layers):
        here = f"model.layers.{i}."
        names |= {f"layers.{i}.{name}": f"{here}{stored}.weight" for name, stored in LAYER_NAMES.items()}
        for bias in optional:
            name = bias.removesuffix(".bias")
            names[f"layers.{i}.{bias}"] = f"{here}{LAYER_NAMES[name]}.bias"
    return names
