"""A Hugging Face folder: config.json and safetensors files, single or sharded, memory-mapped.

A weight is read when its dense() is called and not before. Nothing is unpickled: .bin and .pt files are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import ModelError
from outrider.models.load.json_file import read_json, read_json_if_there
from outrider.models.spec import GroupedInts
from outrider.types import Float32

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
KINDS: Mapping[str, tuple[str, int]] = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

#: Tensors that some files carry and that decoders compute themselves.
COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of a safetensors file, by its name in the file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str  # float32, float16 or bfloat16

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape)) * {name: size for name, size in KINDS.values()}[self.kind]

    def dense(self) -> Float32:
        """The values in fp32. ModelError where the file has become unreadable."""
        with _opened(self.path) as file:
            tensor = file.get_tensor(self.name)
        return np.ascontiguousarray(tensor.float().numpy())

    def groups(self) -> GroupedInts | None:
        """None: the file holds floating point."""
        return None


def folder_config(folder: Path) -> dict[str, Any]:
    """config.json, with the end tokens of generation_config.json, which chat models keep up to date."""
    config = read_json(folder / "config.json")
    generation = read_json_if_there(folder / "generation_config.json")
    ends = [*_as_list(generation.get("eos_token_id")), *_as_list(config.get("eos_token_id"))]
    return {**config, "eos_token_id": list(dict.fromkeys(ends)) or None}


def _as_list(ids: Any) -> list[Any]:
    return [] if ids is None else list(ids) if isinstance(ids, (list, tuple)) else [ids]


def folder_weights(folder: Path, names: Mapping[str, str]) -> dict[str, StoredWeight]:
    """The folder's tensors under their canonical names; `names` maps canonical names to those of the files.

    ModelError where files are missing, truncated or of a type that is not floating point, or where a tensor is there
    that the decoder does not use.
    """
    stored: dict[str, StoredWeight] = {}
    for path in _weight_files(folder):
        stored |= _tensors(path)
    weights = {}
    for canonical, name in names.items():
        found = next((n for n in (name, name.removeprefix("model.")) if n in stored), None)
        if found is not None:
            weights[canonical] = stored.pop(found)
    unused = [n for n in stored if not n.endswith(COMPUTED) and n != "lm_head.weight"]
    if unused:
        raise ModelError(f"{folder} holds {unused[0]}, which a decoder of this config.json does not use")
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, all of them there."""
    if (folder / INDEX).exists():
        shards = read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{folder / INDEX} has no weight_map; fetch it again")
        return [_present(folder, name) for name in sorted(set(shards.values()))]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    if any(True for pattern in PICKLED for _ in folder.glob(pattern)):
        raise ModelError(f"{folder} holds pickled weights only, which are never loaded; convert them to safetensors")
    raise ModelError(f"{folder} holds no safetensors file; use the model's complete folder or a .gguf file")


def _present(folder: Path, name: Any) -> Path:
    """A shard that the index names. The name must stay inside the folder."""
    if not isinstance(name, str) or Path(name).name != name:
        raise ModelError(f"{folder / INDEX} names a file outside its folder ({name!r}); fetch it again")
    if not (folder / name).exists():
        raise ModelError(f"{folder} lacks {name}, which its index names; fetch the model again")
    return folder / name


def _tensors(path: Path) -> dict[str, StoredWeight]:
    with _opened(path) as file:
        found = {}
        for name in file.keys():  # noqa: SIM118 (no mapping)
            part = file.get_slice(name)
            kind = part.get_dtype()
            if kind not in KINDS and not name.endswith(COMPUTED):
                raise ModelError(
                    f"{path}: {name} is stored as {kind}, which is not supported; supported: {', '.join(KINDS)}"
                )
            found[name] = StoredWeight(path, name, tuple(part.get_shape()), KINDS.get(kind, (kind, 1))[0])
        return found


def _opened(path: Path) -> Any:
    """A memory-mapped safetensors file; torch's view of it is the one that knows bfloat16."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; fetch the model again") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or truncated ({error}); fetch it again") from None
