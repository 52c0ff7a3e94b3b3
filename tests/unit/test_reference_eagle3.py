"""The EAGLE-3 head: its arithmetic by hand, both checkpoint layouts, and refusals with a reason."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ModelError
from outrider.models import eagle3, eagle3_files
from outrider.models.eagle3_store import stored_head
from outrider.models.rope import rope_tables
from outrider.models.spec import DecoderSpec

TARGET = DecoderSpec(
    family="llama",
    vocab_size=50,
    hidden_size=16,
    num_layers=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=32,
    max_positions=256,
)
TOKENS = [1, 4, 5, 9, 17, 18, 40, 49]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50,
    "draft_vocab_size": len(TOKENS),
}


def make_head(**changes) -> eagle3.Eagle3Head:
    torch.manual_seed(0)
    head = eagle3.Eagle3Head(eagle3.spec_from_config({**CONFIG, **changes}, TARGET), TOKENS)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return head.eval()


def inputs(rows: int = 6, batch: int = 2):
    generator = torch.Generator().manual_seed(1)
    g, e = (torch.randn(batch, rows, 16, generator=generator) for _ in range(2))
    return g, e, torch.arange(rows).expand(batch, rows)


def by_hand(head, g, e, positions):
    """One text, in numpy, from the published structure."""
    w = {name: tensor.double().numpy() for name, tensor in head.state_dict().items()}

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    def turned(x):
        cos, sin = (t[:, None] for t in rope_tables(head.spec.rope, 4, positions))
        a, b = x[..., :2], x[..., 2:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = np.concatenate([norm(e, "midlayer.input_layernorm"), norm(g, "midlayer.hidden_norm")], axis=-1)
    q, k, v = ((x @ w[f"midlayer.self_attn.{n}_proj.weight"].T).reshape(len(x), -1, 4) for n in "qkv")
    q, k = turned(q), turned(k)
    out, maps = np.zeros_like(q), np.zeros((4, len(x), len(x)))
    for i in range(4):
        scores = q[:, i] @ k[:, i // 2].T / 2 + np.where(np.tri(len(x)) > 0, 0, -np.inf)
        maps[i] = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        out[:, i] = maps[i] @ v[:, i // 2]
    h = g + out.reshape(len(x), -1) @ w["midlayer.self_attn.o_proj.weight"].T
    m = norm(h, "midlayer.post_attention_layernorm")
    gate, up = (m @ w[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    h = h + (gate / (1 + np.exp(-gate)) * up) @ w["midlayer.mlp.down_proj.weight"].T
    return h, norm(h, "norm") @ w["lm_head.weight"].T, maps


def test_step_is_the_published_arithmetic():
    head = make_head()
    g, e, positions = inputs()
    with torch.inference_mode():
        step = head.step(g, e, positions, want_weights=True)
    for b in range(2):
        h, logits, maps = by_hand(head, g[b].double().numpy(), e[b].double().numpy(), np.arange(6))
        assert np.allclose(step.h[b], h, atol=1e-5)
        assert np.allclose(step.logits[b], logits, atol=1e-5)
        assert np.allclose(step.weights[b], maps, atol=1e-5)


def test_rows_after_a_cache_equal_rows_at_once():
    head = make_head()
    g, e, positions = inputs()
    whole = head.step(g, e, positions)
    first = head.step(g[:, :4], e[:, :4], positions[:, :4])
    rest = head.step(g[:, 4:], e[:, 4:], positions[:, 4:], kv=first.kv)
    assert torch.allclose(rest.logits, whole.logits[:, 4:], atol=1e-5)
    assert rest.kv.k.shape == (2, 2, 6, 4)
    assert first.weights is None


def test_a_mask_hides_entries_and_gradients_reach_every_weight():
    head = make_head().train()
    g, e, positions = inputs()
    alone = torch.eye(6, dtype=torch.bool)
    step = head.step(head.fuse(torch.stack([g, e, g])), e, positions, mask=alone, want_weights=True)
    assert torch.allclose(step.weights, torch.eye(6).expand(2, 4, 6, 6))
    again = head.step(step.h, e, positions + 1, kv=step.kv)
    again.logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


def test_draft_ids_stand_for_target_ids():
    head = make_head()
    assert head.target_ids(torch.arange(len(TOKENS))).tolist() == TOKENS
    assert head.t2d.nonzero().flatten().tolist() == TOKENS


def test_absent_fields_mean_the_first_llama():
    spec = eagle3.spec_from_config(CONFIG, TARGET)
    assert (spec.rope.theta, spec.max_positions, spec.taps) == (10000.0, 2048, (1, 5, 8))
    assert not spec.norm_before_residual
    assert eagle3.default_taps(32) == (1, 15, 28)
    assert eagle3.default_taps(2) == (1, 0, 0)


def test_tapped_layers_of_either_layout():
    ids = [2, 6, 9]
    nested = eagle3.spec_from_config({**CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, TARGET)
    assert nested.taps == (2, 6, 9)
    assert eagle3.spec_from_config(speculators(eagle_aux_hidden_state_layer_ids=ids), TARGET).taps == (1, 5, 8)
    assert eagle3.spec_from_config({**CONFIG, "eagle_aux_hidden_state_layer_ids": ids}, TARGET).taps == (1, 5, 8)
    with pytest.raises(ModelError, match="the target's 12"):
        eagle3.spec_from_config({**CONFIG, "eagle_aux_hidden_state_layer_ids": [1, 5, 13]}, TARGET)


def test_the_exported_folder_is_what_vllm_and_sglang_read(tmp_path):
    """Names and fields as their loaders ask for them (docs/distillation.md); tapped layers in the way of each."""
    head = make_head(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}).to(torch.bfloat16)
    eagle3_files.save_head(head, tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["model_type"], config["num_hidden_layers"], config["tie_word_embeddings"]) == ("llama", 1, False)
    assert config["eagle_aux_hidden_state_layer_ids"] == [3, 7, 10]
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 6, 9]}
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert all(isinstance(config[key], int) for key in (*sizes, "vocab_size", "draft_vocab_size"))
    assert {"hidden_act", "rms_norm_eps", "rope_theta", "max_position_embeddings", "torch_dtype"} <= set(config)
    projections = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    norms = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    layer = {f"midlayer.{name}.weight" for name in (*projections, *norms)}
    assert set(tensors) == layer | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    hidden, vocabulary = config["hidden_size"], config["draft_vocab_size"]
    assert tensors["fc.weight"].shape == (hidden, 3 * hidden)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * hidden
    assert tensors["lm_head.weight"].shape == (vocabulary, hidden)
    assert (tensors["d2t"].dtype, tensors["d2t"].shape) == (torch.int64, (vocabulary,))
    assert (tensors["t2d"].dtype, tensors["t2d"].shape) == (torch.bool, (config["vocab_size"],))
    hot = tensors["d2t"] + torch.arange(vocabulary)  # how SGLang reads d2t
    assert hot.tolist() == TOKENS


def speculators(**changes) -> dict:
    layer = {key: value for key, value in CONFIG.items() if key not in ("architectures", "draft_vocab_size")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "draft_vocab_size": len(TOKENS),
        "norm_before_residual": True,
        "transformer_layer_config": layer,
        **changes,
    }


def test_round_trip_through_a_folder(tmp_path):
    head = make_head(rope_theta=5000.0, rope_scaling={"rope_type": "yarn", "factor": 4.0}, attention_bias=True)
    eagle3_files.save_head(head, tmp_path)
    again = eagle3_files.load_head(tmp_path, TARGET)
    assert again.spec == head.spec
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64
    assert stored["t2d"].dtype == torch.bool
    assert "midlayer.self_attn.q_proj.weight" in stored
    g, e, positions = inputs()
    assert torch.equal(again.step(g, e, positions).logits, head.step(g, e, positions).logits)


def test_the_other_layout_gives_the_same_head(tmp_path):
    head = make_head(norm_before_residual=True)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.state_dict().items()}
    own = torch.randn(50, 16)
    save_file({**tensors, "embed_tokens.weight": own}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(speculators()))
    again = eagle3_files.load_head(tmp_path, TARGET)
    g, e, positions = inputs()
    assert torch.equal(again.step(g, e, positions).logits, head.step(g, e, positions).logits)
    assert not torch.equal(again.step(g, e, positions).h, make_head().step(g, e, positions).h)
    assert torch.equal(again.embed_tokens(torch.tensor([3])), own[3:4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, the target's is 16"),
        ({"vocab_size": 51}, "vocab_size is 51, the target's is 50"),
        ({"target_hidden_size": 20}, "target_hidden_size is 20"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"architectures": ["MedusaModel"]}, "MedusaModel.*not an EAGLE-3 head"),
        ({"fc_norm": True}, "fc_norm"),
        ({"eagle_config": {eagle3_files.TAPS: "x"}}, "= 'x' is refused; expected a list of whole numbers"),
        ({eagle3_files.TAPS: [1, 2.5, 3]}, "expected a list of whole numbers"),
        ({eagle3_files.TAPS: 7}, "= 7 is refused; expected a list of whole numbers"),
    ],
)
def test_heads_of_another_target_or_kind_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        eagle3.spec_from_config({**CONFIG, **changes}, TARGET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "lacks fc.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "superfluous extra"),
        (lambda t: t.update({"fc.weight": torch.zeros(16, 32)}), r"fc.weight has shape \[16, 32\]"),
        (lambda t: t.update(d2t=t["d2t"] + 1), "d2t and t2d"),
        (lambda t: t.update(d2t=t["d2t"] - 9), "d2t and t2d"),
    ],
)
def test_files_that_do_not_fit_are_refused(change, message):
    tensors = dict(make_head().state_dict())
    change(tensors)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    with pytest.raises(ModelError, match=message):
        stored_head(eagle3.spec_from_config(CONFIG, TARGET), arrays)


def test_unreadable_folders_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config.json"):
        eagle3_files.load_head(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"holds no JSON object"):
        eagle3_files.load_head(tmp_path, TARGET)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ModelError, match=r"\.bin must be converted"):
        eagle3_files.load_head(tmp_path, TARGET)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ModelError, match="not a readable safetensors"):
        eagle3_files.load_head(tmp_path, TARGET)
