"""Hugging Face folders: single and sharded safetensors in three types, and every way in which one can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import loading
from outrider.errors import ModelError
from outrider.models import llama
from outrider.models.load import load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return loading.llama_folder(tmp_path / "model")


def rewrite(folder: Path, name: str, **changes: object) -> None:
    path = folder / name
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


def test_a_folder_is_loaded_whole(folder: Path) -> None:
    loaded = load_model(str(folder))
    tensors = loading.llama_tensors()
    names = llama.tensor_names(loaded.spec)
    assert {names[canonical] for canonical in loaded.weights} == set(tensors)
    for canonical, weight in loaded.weights.items():
        dense = weight.dense()
        assert dense.dtype == np.float32
        assert dense.flags.c_contiguous
        assert weight.shape == dense.shape
        assert weight.groups() is None
        np.testing.assert_array_equal(dense, tensors[names[canonical]])
    assert loaded.source == "folder"
    assert loaded.path == folder
    assert loaded.spec.eos_token_ids == loaded.tokenizer.eos_token_ids == (2,)
    assert loaded.tokenizer.has_chat_template


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_exactly(folder: Path, kind: torch.dtype) -> None:
    tensors = {name: torch.from_numpy(value).to(kind) for name, value in loading.llama_tensors().items()}
    save_file(tensors, folder / "model.safetensors")
    loaded = load_model(str(folder))
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(loaded.weights["layers.1.down"].dense(), tensors[name].float().numpy())
    assert not np.array_equal(loaded.weights["layers.1.down"].dense(), loading.llama_tensors()[name])


def shard(folder: Path) -> dict[str, str]:
    """Cut the folder's weights into two files and an index."""
    tensors = {name: torch.from_numpy(value) for name, value in loading.llama_tensors().items()}
    names = sorted(tensors)
    where = {name: f"model-{1 + (i > len(names) // 2):05d}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(where.values())):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    rewrite(folder, "model.safetensors.index.json", weight_map=where)
    return where


def test_shards_are_joined_by_their_index(folder: Path) -> None:
    assert len(set(shard(folder).values())) == 2
    loaded = load_model(str(folder))
    for canonical, name in llama.tensor_names(loaded.spec).items():
        if canonical in loaded.weights:
            np.testing.assert_array_equal(loaded.weights[canonical].dense(), loading.llama_tensors()[name])


def test_a_missing_shard_is_named(folder: Path) -> None:
    gone = shard(folder)["model.norm.weight"]
    (folder / gone).unlink()
    with pytest.raises(ModelError, match=f"lacks {gone}"):
        load_model(str(folder))


def test_an_index_cannot_point_outside_the_folder(folder: Path) -> None:
    rewrite(folder, "model.safetensors.index.json", weight_map={"model.norm.weight": "../model.safetensors"})
    with pytest.raises(ModelError, match="outside its folder"):
        load_model(str(folder))


def test_tensor_names_without_the_leading_model(folder: Path) -> None:
    tensors = loading.llama_tensors()
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    loaded = load_model(str(loading.llama_folder(folder, bare)))
    np.testing.assert_array_equal(loaded.weights["final_norm"].dense(), tensors["model.norm.weight"])


def test_weights_are_read_when_asked_for(folder: Path) -> None:
    loaded = load_model(str(folder))
    (folder / "model.safetensors").write_bytes(b"gone")
    with pytest.raises(ModelError, match="damaged"):
        loaded.weights["embed"].dense()


def test_end_tokens_of_the_generation_config_come_first(folder: Path) -> None:
    rewrite(folder, "generation_config.json", eos_token_id=[0, 2])
    rewrite(folder, "config.json", eos_token_id=1)
    assert load_model(str(folder)).spec.eos_token_ids == (0, 2, 1)


def test_a_truncated_file_is_said_to_be_so(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ModelError, match="damaged or truncated") as caught:
            load_model(str(folder))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_opened(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match="convert them to safetensors"):
        load_model(str(folder))
    with pytest.raises(ModelError, match="convert it to safetensors"):
        load_model(str(folder / name))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM, which is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised safetensors"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"num_hidden_layers": 3}, r"lack layers\.2"),
        ({"hidden_size": 32}, "shape"),
        ({"vocab_size": 319}, "shape"),
        ({"num_hidden_layers": 1 << 40}, "claims 1099511627776 layers"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"tie_word_embeddings": False}, "lack lm_head"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(folder: Path, changes: dict, said: str) -> None:
    rewrite(folder, "config.json", **changes)
    with pytest.raises(ModelError, match=said):
        load_model(str(folder))


def test_tensors_that_no_decoder_uses_are_refused_and_computed_ones_ignored(folder: Path) -> None:
    tensors = loading.llama_tensors()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert load_model(str(loading.llama_folder(folder, tensors))).spec.tied
    tensors["model.layers.0.self_attn.sinks"] = np.ones(4, np.float32)
    with pytest.raises(ModelError, match="sinks, which a decoder of this config"):
        load_model(str(loading.llama_folder(folder, tensors)))


def test_integer_weights_are_refused(folder: Path) -> None:
    tensors = loading.llama_tensors()
    tensors["model.norm.weight"] = np.ones(loading.HIDDEN, np.int8)
    with pytest.raises(ModelError, match="stored as I8, which is not supported; supported: F32, F16, BF16"):
        load_model(str(loading.llama_folder(folder, tensors)))


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    tokenizer = loading.byte_level_tokenizer()
    tokenizer.add_tokens(["<one-more>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match="the tokenizer has 321 tokens, the model 320"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", "[]", "holds no JSON object"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("model.safetensors.index.json", "{}", "no weight_map"),
        ("config.json", None, "config.json does not exist"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("model.safetensors", None, "holds no safetensors file"),
    ],
)
def test_damaged_or_missing_parts_are_named(folder: Path, name: str, content: str | None, said: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ModelError, match=said) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_the_only_gguf_of_a_folder_is_taken(tmp_path: Path) -> None:
    path = loading.llama_gguf(tmp_path / "only.gguf")
    assert load_model(str(tmp_path)).path == path
    loading.llama_gguf(tmp_path / "second.gguf")
    with pytest.raises(ModelError, match=r"2 \.gguf files; name one"):
        load_model(str(tmp_path))
