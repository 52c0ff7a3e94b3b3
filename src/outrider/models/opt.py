"""OPT: LayerNorm, learned positions with an offset of 2, biases everywhere, a plain ReLU MLP.

OPT-350m alone normalises after each block (no final norm) and projects narrow embeddings in and out.
"""

from __future__ import annotations

from outrider.errors import ModelError
from outrider.models import hf_config
from outrider.models.spec import DecoderSpec

MODEL_TYPE = "opt"
ARCHITECTURES = ("OPTForCausalLM",)
POSITION_OFFSET = 2

LAYER_NAMES = {
    "attn_norm": "self_attn_layer_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}


def spec_from_config(config: hf_config.Config) -> DecoderSpec:
    """The spec of a config.json. ModelError names what is missing or unsupported."""
    hf_config.refuse_unsupported(config)
    if not hf_config.truth(config, "layer_norm_elementwise_affine", True):
        raise ModelError("config.json: layer_norm_elementwise_affine = False is not supported; supported: True")
    if config.get("_remove_final_layer_norm"):
        raise ModelError("config.json: _remove_final_layer_norm = True is not supported; supported: False")
    hidden = hf_config.integer(config, "hidden_size")
    num_heads = hf_config.integer(config, "num_attention_heads")
    return DecoderSpec(
        family=MODEL_TYPE,
        vocab_size=hf_config.integer(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=hf_config.integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        intermediate_size=hf_config.integer(config, "ffn_dim"),
        max_positions=hf_config.integer(config, "max_position_embeddings"),
        norm="layer",
        norm_eps=1e-5,
        norm_first=hf_config.truth(config, "do_layer_norm_before", True),
        activation=hf_config.activation(config, "activation_function", "relu"),
        gated=False,
        rope=None,
        position_offset=POSITION_OFFSET,
        tied=hf_config.truth(config, "tie_word_embeddings", True),
        eos_token_ids=hf_config.eos_ids(config),
    )


def tensor_names(spec: DecoderSpec) -> dict[str, str]:
    """Canonical names to those of the file; the projections are there only where embeddings are narrow."""
    here = "model.decoder."
    names = {
        "embed": f"{here}embed_tokens.weight",
        "pos_embed": f"{here}embed_positions.weight",
        "project_in": f"{here}project_in.weight",
        "project_out": f"{here}project_out.weight",
    }
    if spec.norm_first:
        names |= {"final_norm": f"{here}final_layer_norm.weight", "final_norm.bias": f"{here}final_layer_norm.bias"}
    if not spec.tied:
        names["lm_head"] = "lm_head.weight"
    for i in range(spec.num_layers):
        for name, stored in LAYER_NAMES.items():
            names[f"layers.{i}.{name}"] = f"{here}layers.{i}.{stored}.weight"
            names[f"layers.{i}.{name}.bias"] = f"{here}layers.{i}.{stored}.bias"
    return names
