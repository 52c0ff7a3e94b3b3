"""Each family gives transformers' logits in fp32, by either decoder, and the same bits however the work is cut."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import transformers
from random_models import SMALL, Driver, cut, hf_logits, paths_of, save_random

from outrider.errors import ModelError
from outrider.models.build import build_decoder
from outrider.models.decoder import ReferenceDecoder
from outrider.models.load import LoadedModel, load_model

TOKENS = [int(t) for t in np.random.default_rng(7).integers(3, 97, 26)]
OTHERS = {1: [5, 9, 11, 40, 3], 2: [96, 8]}

GATED = {**SMALL, "intermediate_size": 80}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_TUNED = {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False}

MODELS = {
    "llama-mha-tied": transformers.LlamaConfig(**GATED, tie_word_embeddings=True),
    "llama-gqa-llama3-biased": transformers.LlamaConfig(
        **GATED, num_key_value_heads=2, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True
    ),
    "llama-mqa-yarn": transformers.LlamaConfig(**GATED, num_key_value_heads=1, rope_parameters=YARN),
    "llama-linear-gelu": transformers.LlamaConfig(
        **GATED,
        num_key_value_heads=2,
        hidden_act="gelu_pytorch_tanh",
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    ),
    "mistral-window": transformers.MistralConfig(**GATED, num_key_value_heads=2, sliding_window=5),
    "mistral-head-dim": transformers.MistralConfig(**GATED, num_key_value_heads=1, head_dim=8, sliding_window=None),
    "qwen2-tied": transformers.Qwen2Config(**GATED, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2-upper-window": transformers.Qwen2Config(
        **GATED, num_key_value_heads=4, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": transformers.Qwen3Config(**GATED, num_key_value_heads=2, head_dim=20),
    "qwen3-yarn-biased": transformers.Qwen3Config(
        **GATED, num_key_value_heads=1, head_dim=16, rope_parameters=YARN_TUNED, attention_bias=True
    ),
    "opt": transformers.OPTConfig(**SMALL, ffn_dim=80),
    "opt-post-norm-narrow": transformers.OPTConfig(
        **SMALL, ffn_dim=80, do_layer_norm_before=False, word_embed_proj_dim=32
    ),
    "opt-unbiased-untied": transformers.OPTConfig(**SMALL, ffn_dim=80, enable_bias=False, tie_word_embeddings=False),
}


CASES = [(name, backend) for name in MODELS for backend in ("reference", "compiled")]
CASES.remove(("opt-post-norm-narrow", "compiled"))  # refused by it, see below


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By name: transformers' logits of TOKENS, and what load_model reads of the saved folder."""

    @functools.cache
    def save(name: str) -> tuple[np.ndarray, LoadedModel]:
        folder = tmp_path_factory.mktemp(name)
        return hf_logits(save_random(folder, MODELS[name]), TOKENS), load_model(str(folder))

    return save


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request, saved):
    """transformers' logits of TOKENS, and one of our decoders of the same saved folder."""
    name, backend = request.param
    theirs, ours = saved(name)
    taps = (0, ours.spec.num_layers - 1)
    options = {"dtype": "float32", "device": "cpu", "threads": 2, "taps": taps, "backend": backend}
    return theirs, build_decoder(ours.spec, ours.weights, **options)


def agrees(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return float(np.abs(ours - theirs).max()) < 1e-4 * float(np.abs(theirs).max())


def test_same_logits_as_transformers(pair):
    theirs, decoder = pair
    ours = cut(Driver(decoder), 0, TOKENS, [len(TOKENS)])
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    assert agrees(ours, theirs)


def test_every_way_of_cutting_gives_the_same_bits(pair):
    theirs, decoder = pair
    at_once = cut(Driver(decoder), 0, TOKENS, [len(TOKENS)])
    assert np.ptp(at_once, axis=0).min() > 0, "the rows differ, so that mixing them up would show"
    in_chunks = cut(Driver(decoder), 0, TOKENS, [3, 7, 1, 5, 10])
    by_step = cut(Driver(decoder), 0, TOKENS, [1])
    crowd = Driver(decoder)
    ragged = [crowd.step({2: OTHERS[2], 0: TOKENS[:9], 1: OTHERS[1]})[0], crowd.step({0: TOKENS[9:], 1: [4]})[0]]
    for name, ours in {"chunks": in_chunks, "steps": by_step, "ragged": np.concatenate(ragged)}.items():
        assert np.array_equal(ours, at_once), name
    assert agrees(by_step, theirs)


@pytest.mark.parametrize("name", ["llama-gqa-llama3-biased", "qwen3", "opt"])
def test_threads_do_not_change_the_bits(saved, name):
    """The reference's products run on torch's threads."""
    _, ours = saved(name)
    decoder = build_decoder(ours.spec, ours.weights, device="cpu", backend="reference")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cut(Driver(decoder), 0, TOKENS, [len(TOKENS)])
        torch.set_num_threads(2)
        assert np.array_equal(cut(Driver(decoder), 0, TOKENS, [len(TOKENS)]), alone)
    finally:
        torch.set_num_threads(threads)


def test_what_the_compiled_decoder_refuses_runs_on_the_reference(saved, caplog):
    theirs, ours = saved("opt-post-norm-narrow")
    with pytest.raises(ModelError, match="compiled decoder does not run"):
        build_decoder(ours.spec, ours.weights, device="cpu", backend="compiled")
    decoder = build_decoder(ours.spec, ours.weights, device="cpu")
    assert isinstance(decoder, ReferenceDecoder)
    assert "reference decoder is used" in caplog.text
    assert agrees(cut(Driver(decoder), 0, TOKENS, [len(TOKENS)]), theirs)


def test_tree_rows_equal_their_branch_alone(pair):
    _, decoder = pair
    tokens, parents = [31, 32, 33, 34, 35, 36], [-1, 0, 0, 1, 2, 2]
    driver = Driver(decoder)
    driver.step({0: TOKENS[:6], 1: OTHERS[1]})
    tree = driver.step({1: OTHERS[2], 0: tokens}, parents={0: parents}, keep=False)[0]
    for node, path in enumerate(paths_of(parents)):
        alone = Driver(decoder)
        alone.step({0: TOKENS[:6]})
        branch = alone.step({0: [tokens[i] for i in path]})[0]
        assert np.array_equal(tree[node], branch[-1]), path


def test_taps_and_best_tokens(pair):
    theirs, decoder = pair
    driver = Driver(decoder)
    driver.step({0: TOKENS})
    assert driver.result.features.shape == (2, len(TOKENS), decoder.spec.hidden_size)
    assert np.array_equal(driver.result.best, driver.result.logits.argmax(-1))
    assert np.array_equal(driver.result.best, theirs.argmax(-1))
