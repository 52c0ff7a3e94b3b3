"""Reading a Hugging Face config.json: every field by name, and a refusal of what no decoder here computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from outrider.errors import ModelError

Config = Mapping[str, Any]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

#: What config.json calls an activation, and what a DecoderSpec does.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

#: Options that change what a model computes and that are refused, unless they hold one of the neutral values.
REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "quantization_config": ("quantised safetensors", ()),
    "num_local_experts": ("mixture of experts", (0, 1)),
    "num_experts": ("mixture of experts", (0, 1)),
    "n_routed_experts": ("mixture of experts", (0,)),
    "kv_lora_rank": ("multi-head latent attention", ()),
    "is_encoder_decoder": ("encoder-decoder models", (False,)),
    "vision_config": ("vision towers", ()),
    "audio_config": ("audio towers", ()),
    "partial_rotary_factor": ("rotation of a part of each head", (1, 1.0)),
    "no_rope_layers": ("layers without RoPE", ()),
    "attn_logit_softcapping": ("capped attention scores", ()),
    "final_logit_softcapping": ("capped logits", ()),
    "clip_qkv": ("clipped queries and keys", ()),
    "attention_chunk_size": ("chunked attention", ()),
    "embedding_multiplier": ("scaled embeddings", (1, 1.0)),
    "residual_multiplier": ("scaled residuals", (1, 1.0)),
    "logits_scaling": ("scaled logits", (1, 1.0)),
}


def refuse_unsupported(config: Config) -> None:
    """Raise ModelError for the first option that would change the result and is not computed here."""
    for key, (meaning, neutral) in REFUSED.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            raise ModelError(
                f"config.json: {key} = {_short(value)} ({meaning}) is not supported; "
                "supported: dense decoders in float32, float16 or bfloat16, or a GGUF file"
            )


def integer(config: Config, key: str, default: int | None = None) -> int:
    """A positive whole number of config.json; required where there is no default."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json: {key} is missing; add it or use the model's complete folder")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} = {_short(value)} is refused; expected a positive whole number")
    return value


def real(config: Config, key: str, default: float) -> float:
    """A positive number of config.json."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ModelError(f"config.json: {key} = {_short(value)} is refused; expected a positive number")
    return float(value)


def truth(config: Config, key: str, default: bool) -> bool:
    """A yes or no of config.json; null means the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} = {_short(value)} is refused; expected true or false")
    return value


def activation(config: Config, key: str, default: str) -> Activation:
    """The activation of the MLP."""
    name = config.get(key) or default
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json: {key} = {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def eos_ids(config: Config) -> tuple[int, ...]:
    """The tokens that end a text: none, one or several in config.json."""
    ids = config.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)


def heads(config: Config) -> tuple[int, int]:
    """Numbers of query heads and KV heads; absent KV heads mean as many as query heads (MHA)."""
    query = integer(config, "num_attention_heads")
    kv = integer(config, "num_key_value_heads", query)
    if query % kv:
        raise ModelError(f"config.json: {query} query heads cannot share {kv} KV heads; one must divide the other")
    return query, kv


def window(config: Config, layers: int, first: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Sliding window and the layers that have it: those of `layer_types`, else from layer `first` on.

    None, None without a window; layers None means all of them.
    """
    if config.get("sliding_window") is None:
        return None, None
    types = config.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (layers - first)
    types = types[:layers]
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != layers:
        raise ModelError(
            f"config.json: layer_types {sorted(unknown) or len(types)} is not supported; "
            f"supported: full_attention or sliding_attention for each of the {layers} layers"
        )
    windowed = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    if not windowed:
        return None, None
    return integer(config, "sliding_window"), None if len(windowed) == layers else windowed


def _short(value: Any) -> str:
    """A value for an error message: one line of at most 80 characters."""
    text = repr(dict(value) if isinstance(value, Mapping) else value)
    return text if len(text) <= 80 else text[:77] + "..."
