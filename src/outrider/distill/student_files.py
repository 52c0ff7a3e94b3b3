"""A student as a folder that `model` drafters, this engine and others load: config.json, weights, tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.distill.files import full_disk_told, replacing, write_json
from outrider.distill.student import Student
from outrider.errors import ConfigError, ModelError
from outrider.models.families import FAMILIES, Family
from outrider.models.load import LoadedModel, load_model
from outrider.models.spec import DecoderSpec


def export_student(student: Student, loaded: LoadedModel, embedding: Tensor, output: Tensor, folder: Path) -> None:
    """Write the student in bf16 and read it again. embedding, output: the target's rows [vocabulary, hidden]."""
    adapted = student.adapter_in.shape[0] > 0
    spec = replace(student.spec, tied=student.spec.tied and not adapted)
    tensors = _tensors(student, embedding, output, spec.tied)
    family = family_named(spec.family)
    names = family.tensor_names(spec)
    stored = {names[name]: value.detach().to(torch.bfloat16).contiguous().cpu() for name, value in tensors.items()}
    write_json(folder / "config.json", config_of(spec, family))
    with replacing(folder / "model.safetensors") as partial:
        save_file(stored, partial, {"format": "pt"})
    with full_disk_told(folder):
        loaded.tokenizer.save(folder)
    again = load_model(str(folder))
    first = f"layers.{spec.num_layers - 1}.down"
    if not torch.equal(torch.from_numpy(again.weights[first].dense()), stored[names[first]].float()):
        raise ModelError(f"{folder} does not read as it was written; check the disk and export again")


def config_of(spec: DecoderSpec, family: Family) -> dict[str, Any]:
    """The config.json of a decoder of Llama's shape. ConfigError where it would be read as another one."""
    rope = spec.rope
    scaling = {"rope_type": rope.kind, **rope.scaling} if rope and rope.kind != "default" else None
    config = {
        "architectures": list(family.ARCHITECTURES[:1]),
        "model_type": family.MODEL_TYPE,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "gelu_pytorch_tanh" if spec.activation == "gelu_tanh" else spec.activation,
        "rope_theta": rope.theta if rope else None,
        "rope_scaling": scaling,
        "tie_word_embeddings": spec.tied,
        "eos_token_id": list(spec.eos_token_ids),
        "torch_dtype": "bfloat16",
    }
    if replace(family.spec_from_config(config), num_tokens=spec.num_tokens) != spec:
        raise ConfigError(f"students of this {spec.family} model cannot be written; distil a head instead", "kind")
    return config


def family_named(name: str) -> Family:
    """The family of a spec."""
    return next(family for family in FAMILIES if name == family.MODEL_TYPE)


def _tensors(student: Student, embedding: Tensor, output: Tensor, tied: bool) -> Mapping[str, Tensor]:
    tensors = {"embed": embedding, "final_norm": student.final_norm}
    if not tied:
        tensors["lm_head"] = output + output @ student.adapter_out @ student.adapter_in
    for i in range(student.spec.num_layers):
        tensors |= {f"layers.{i}.{name.replace('_bias', '.bias')}": value for name, value in student.layer(i).items()}
    return tensors
