"""EAGLE-3 heads as PyTorch modules, from folders (eagle3_store.py) and into the public `midlayer.*` layout.

A head stored as pytorch_model.bin is refused: reading it would run code of the file.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from outrider.models.eagle3 import Eagle3Head, Embedding
from outrider.models.eagle3_spec import TAPS
from outrider.models.eagle3_store import CONFIG, EMBEDDING, WEIGHTS, StoredHead, read_head
from outrider.models.spec import DecoderSpec


def load_head(folder: str | Path, target: DecoderSpec) -> Eagle3Head:
    """The head in a folder, in fp32 on the CPU. ModelError says what is missing or does not belong to the target."""
    return head_from_stored(read_head(folder, target))


def head_from_stored(stored: StoredHead) -> Eagle3Head:
    """The head that lies in a folder, as a module."""
    head = Eagle3Head(stored.spec)
    if EMBEDDING in stored.weights:
        head.embed_tokens = Embedding(torch.zeros(stored.spec.vocab_size, stored.spec.hidden_size))
    tensors = {name: torch.from_numpy(np.array(weight.dense())) for name, weight in stored.weights.items()}
    tensors |= {"d2t": torch.from_numpy(np.array(stored.d2t)), "t2d": torch.from_numpy(np.array(stored.t2d))}
    head.load_state_dict(tensors)
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
        TAPS: [tap + 1 for tap in spec.taps],  # vLLM counts states, of which the first is the embedding
        "eagle_config": {"use_aux_hidden_state": True, TAPS: list(spec.taps)},  # SGLang counts layers
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }
