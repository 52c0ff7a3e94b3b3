"""config.json to DecoderSpec: what is read, and what is refused by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from outrider.errors import ModelError
from outrider.models import llama, mistral, opt, qwen2, qwen3
from outrider.models.families import check_weights, expected_shapes, family_of
from outrider.models.rope import rope_from_config, rope_tables
from outrider.models.spec import Rope

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}


def spec_of(**changes):
    config = {**LLAMA, **changes}
    return family_of(config).spec_from_config(config)


def test_family_is_found_by_architecture_then_model_type():
    assert family_of({"architectures": ["Qwen3ForCausalLM"], "model_type": "other"}) is qwen3
    assert family_of({"model_type": "opt"}) is opt
    assert family_of({"architectures": ["MistralForCausalLM"]}) is mistral


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
            "LlamaForSequenceClassification",
        ),
        ({}, "no architecture"),
    ],
)
def test_unsupported_architecture_lists_the_supported(config, names):
    with pytest.raises(ModelError, match=f"{names}.*supported: LlamaForCausalLM, .*OPTForCausalLM"):
        family_of(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.*awq"),
        ({"num_experts": 8}, "num_experts.*mixture of experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "relu2"}, "relu2.*supported: silu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*supported: default, linear"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "new_trick": 1}}, "new_trick"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
    ],
)
def test_refusals_name_the_option(changes, message):
    with pytest.raises(ModelError, match=message) as caught:
        spec_of(**changes)
    assert "\n" not in str(caught.value)


def test_absent_fields_have_their_published_meaning():
    spec = spec_of()
    assert (spec.num_kv_heads, spec.head_dim, spec.tied, spec.norm_eps) == (4, 16, False, 1e-6)
    assert spec.rope == Rope(theta=10000.0)
    assert spec_of(eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    assert spec_of(eos_token_id=5).eos_token_ids == (5,)
    assert spec_of(num_experts=0, quantization_config=None).family == "llama"


def test_old_and_new_rope_fields_mean_the_same():
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    old = spec_of(rope_theta=500.0, rope_scaling={"rope_type": "llama3", **numbers}).rope
    new = spec_of(rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **numbers}).rope
    assert old == new
    assert (old.theta, old.kind, old.scaling["original_max_position_embeddings"]) == (500.0, "llama3", 128)
    assert spec_of(rope_scaling={"type": "yarn", "factor": 2.0}).rope.scaling["original_max_position_embeddings"] == 512


def test_windows():
    window = {"sliding_window": 32}
    assert mistral.spec_from_config({**LLAMA, **window}).sliding_window == 32
    assert mistral.spec_from_config({**LLAMA, **window}).windowed_layers is None
    assert mistral.spec_from_config({**LLAMA, "sliding_window": None}).sliding_window is None
    assert qwen2.spec_from_config({**LLAMA, **window, "use_sliding_window": False}).sliding_window is None
    upper = qwen2.spec_from_config({**LLAMA, **window, "use_sliding_window": True, "max_window_layers": 2})
    assert (upper.sliding_window, upper.windowed_layers) == (32, (2, 3))
    types = ["sliding_attention", "full_attention"] * 2
    named = qwen3.spec_from_config({**LLAMA, **window, "use_sliding_window": True, "layer_types": types})
    assert named.windowed_layers == (0, 2)
    never = qwen2.spec_from_config({**LLAMA, **window, "use_sliding_window": True, "max_window_layers": 28})
    assert never.sliding_window is None


def test_opt_refuses_what_it_does_not_compute():
    config = {**LLAMA, "ffn_dim": 128}
    assert opt.spec_from_config(config).position_offset == 2
    with pytest.raises(ModelError, match="layer_norm_elementwise_affine"):
        opt.spec_from_config({**config, "layer_norm_elementwise_affine": False})


@dataclass(frozen=True)
class Shape:
    shape: tuple[int, ...]


def test_tensor_names_cover_every_expected_weight():
    for family, config in ((llama, LLAMA), (qwen2, LLAMA), (qwen3, LLAMA), (opt, {**LLAMA, "ffn_dim": 9})):
        spec = family.spec_from_config(config)
        names = family.tensor_names(spec)
        assert set(expected_shapes(spec, spec.hidden_size)) == {name for name in names if not name.endswith("bias")} - {
            "project_in",
            "project_out",
        }
        assert len(set(names.values())) == len(names)


def test_weights_are_checked_against_the_spec():
    spec = spec_of()
    weights = {name: Shape(shape) for name, shape in expected_shapes(spec, spec.hidden_size).items()}
    check_weights(spec, weights)
    check_weights(spec, {**weights, "layers.1.q.bias": Shape((64,))})
    with pytest.raises(ModelError, match=r"layers.1.q_norm, which a llama decoder"):
        check_weights(spec, {**weights, "layers.1.q_norm": Shape((16,))})
    with pytest.raises(ModelError, match=r"layers.1.k has shape \(3, 64\).*\(64, 64\)"):
        check_weights(spec, {**weights, "layers.1.k": Shape((3, 64))})
    with pytest.raises(ModelError, match=r"layers.1.q.bias has shape"):
        check_weights(spec, {**weights, "layers.1.q.bias": Shape((63,))})
    with pytest.raises(ModelError, match=r"lack layers.3.down"):
        check_weights(spec, {name: w for name, w in weights.items() if name != "layers.3.down"})


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rope_tables(kind):
    numbers = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    needed = {"linear": ["factor"], "llama3": numbers, "yarn": ["factor"]}.get(kind, [])
    fields = {"rope_type": kind, **{name: numbers[name] for name in needed}}
    rope = rope_from_config({"rope_scaling": fields, "rope_theta": 100.0, "max_position_embeddings": 64})
    positions = np.arange(300)
    cos, sin = rope_tables(rope, 16, positions)
    assert cos.shape == sin.shape == (300, 8)
    assert cos.dtype == sin.dtype == np.float32
    one = [np.array_equal(rope_tables(rope, 16, [p])[0][0], cos[p]) for p in positions]
    assert all(one), "a position's row does not depend on the others"
    factor = 0.1 * np.log(4.0) + 1 if kind == "yarn" else 1.0
    assert np.allclose(cos**2 + sin**2, factor**2, rtol=1e-6)
    plain, _ = rope_tables(Rope(theta=100.0), 16, positions)
    assert np.array_equal(cos, plain) == (kind == "default")
