"""EAGLE-3 heads as folders: both public layouts are read, the older one (`midlayer.*`) is written.

A head stored as pytorch_model.bin is refused: reading it would run code of the file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.eagle3 import Eagle3Head, Embedding, spec_from_config
from outrider.models.spec import DecoderSpec

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def load_head(folder: str | Path, target: DecoderSpec) -> Eagle3Head:
    """The head in a folder, in fp32 on the CPU. ModelError says what is missing or does not belong to the target."""
    folder = Path(folder)
    return head_from_tensors(_read_config(folder), _read_tensors(folder), target)


def head_from_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: DecoderSpec) -> Eagle3Head:
    """A head of stored tensors, named in either layout."""
    spec = spec_from_config(config, target)
    stored = {_canonical(name): tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    head = Eagle3Head(spec)
    if "embed_tokens.weight" in stored:
        head.embed_tokens = Embedding(torch.zeros(spec.vocab_size, spec.hidden_size))
    expected = head.state_dict()
    if spec.draft_vocab_size == spec.vocab_size:
        stored = {"d2t": expected["d2t"], "t2d": expected["t2d"], **stored}
    _check_names(set(stored), set(expected))
    for name, tensor in stored.items():
        if tensor.shape != expected[name].shape:
            found, wanted = list(tensor.shape), list(expected[name].shape)
            raise ModelError(f"the head's {name} has shape {found}, its config asks for {wanted}")
    _check_vocabulary(stored["d2t"], stored["t2d"])
    head.load_state_dict(stored)
    return head.eval()


def save_head(head: Eagle3Head, folder: str | Path) -> None:
    """Write a head as the public `midlayer.*` layout; a file is replaced only when the new one is complete."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    text = json.dumps(config_of(head), indent=2) + "\n"
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        save_file(tensors, Path(draft, WEIGHTS), metadata={"format": "pt"})
        Path(draft, CONFIG).write_text(text, encoding="utf-8")
        for name in (WEIGHTS, CONFIG):
            os.replace(Path(draft, name), folder / name)


def config_of(head: Eagle3Head) -> dict[str, Any]:
    """The config.json of a head, as other engines read it."""
    spec = head.spec
    scaling = {"rope_type": spec.rope.kind, **spec.rope.scaling} if spec.rope.kind != "default" else None
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "gelu_pytorch_tanh" if spec.activation == "gelu_tanh" else spec.activation,
        "rms_norm_eps": spec.norm_eps,
        "attention_bias": spec.attention_bias,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope.theta,
        "rope_scaling": scaling,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "tie_word_embeddings": False,
        "norm_before_residual": spec.norm_before_residual,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(spec.taps)},
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} holds no {CONFIG}; give the folder of an EAGLE-3 head") from None
    except ValueError as error:
        raise ModelError(f"{folder / CONFIG} is not readable JSON ({error}); fetch the head again") from None


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / WEIGHTS
    if not file.exists():
        raise ModelError(f"{folder} holds no {WEIGHTS}; heads stored as .bin must be converted to safetensors first")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ModelError(f"{file} is not a readable safetensors file ({error}); fetch the head again") from None


def _canonical(name: str) -> str:
    """A stored name in the `midlayer.*` layout."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _check_names(stored: set[str], expected: set[str]) -> None:
    for verb, names in (("lacks", expected - stored), ("has a superfluous", stored - expected)):
        if names:
            raise ModelError(f"the head {verb} {', '.join(sorted(names)[:4])}; this is not an EAGLE-3 head's file")


def _check_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
    """The two maps must name the same tokens, each once, inside the target's vocabulary."""
    ids = torch.arange(len(d2t)) + d2t
    inside = bool(((ids >= 0) & (ids < len(t2d))).all())
    if not inside or not torch.equal(ids.unique(), t2d.nonzero().flatten()) or len(ids.unique()) != len(ids):
        raise ModelError("the head's d2t and t2d do not name the same tokens of the target; fetch the head again")
