"""What `outrider plan` plans for: the shape and the weight bytes of a model, which need not be downloaded."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.errors import ConfigError, ModelError
from outrider.memory.planner import count_parameters
from outrider.memory.shapes import SHAPES
from outrider.models.families import family_of
from outrider.models.spec import DecoderSpec

#: Bits per stored weight; int4 carries a scale and a minimum per 32 values.
WEIGHT_BITS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.0, "int4": 5.0}


def find_model(name: str, weights: str = "bfloat16") -> tuple[DecoderSpec, int]:
    """The spec and weight bytes of a built-in shape, alias, folder, config.json or GGUF file."""
    if weights not in WEIGHT_BITS:
        raise ConfigError(f"weights = {weights!r} is refused; use {', '.join(WEIGHT_BITS)}", "weights")
    if name in SHAPES:
        return _sized(SHAPES[name], weights)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return _read_gguf(path)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _sized(_read_config(path), weights)
    raise ModelError(
        f"{name} is no known shape and no file; use a folder, a .gguf file, a config.json or one of {', '.join(SHAPES)}"
    )


def _sized(spec: DecoderSpec, weights: str) -> tuple[DecoderSpec, int]:
    return spec, int(count_parameters(spec) * WEIGHT_BITS[weights] / 8)


def _read_config(path: Path) -> DecoderSpec:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check the path") from None
    except ValueError:
        raise ModelError(f"{path} is not JSON; use the model's own config.json") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a model's config.json; use the model's own")
    return family_of(config).spec_from_config(config)


def _read_gguf(path: Path) -> tuple[DecoderSpec, int]:
    """Shape and stored weight bytes of a GGUF file, from its header alone."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as GGUF ({error}); check the path") from None
    architecture = str(reader.fields["general.architecture"].contents())

    def number(key: str, default: int | None = None) -> int:
        field = reader.fields.get(f"{architecture}.{key}")
        if field is None and default is None:
            raise ModelError(f"{path} lacks {architecture}.{key}; it is not a dense decoder")
        return int(field.contents()) if field is not None else int(default or 0)

    heads, hidden = number("attention.head_count"), number("embedding_length")
    names = {tensor.name for tensor in reader.tensors}
    spec = DecoderSpec(
        family=architecture,
        vocab_size=int(next(t.shape[1] for t in reader.tensors if t.name == "token_embd.weight")),
        hidden_size=hidden,
        num_layers=number("block_count"),
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv", heads),
        head_dim=number("attention.key_length", hidden // heads),
        intermediate_size=number("feed_forward_length"),
        max_positions=number("context_length"),
        tied="output.weight" not in names,
    )
    return spec, sum(int(tensor.n_bytes) for tensor in reader.tensors)
