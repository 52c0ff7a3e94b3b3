"""load_model: from the name of a model, wherever it is, to its spec, weights and tokenizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ModelError
from outrider.models.families import check_weights, family_of
from outrider.models.load.folder import folder_config, folder_weights
from outrider.models.load.gguf_file import read_gguf
from outrider.models.load.gguf_model import config_of, weights_of
from outrider.models.load.gguf_tokenizer import gguf_tokenizer
from outrider.models.load.progress import Progress
from outrider.models.load.resolve import resolve
from outrider.models.load.tokenizer import Tokenizer
from outrider.models.load.tokenizer_files import folder_tokenizer
from outrider.models.spec import DecoderSpec, Weights


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be given to a decoder. Weights stay in their files until they are asked for."""

    name: str  # as the user wrote it
    spec: DecoderSpec
    weights: Weights  # by canonical name (models/spec.py)
    tokenizer: Tokenizer
    path: Path  # the .gguf file or the folder
    source: str  # "catalogue", "folder", "gguf" or "hub"


def load_model(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load an alias of the catalogue, a folder, a .gguf file or a hub id ("org/name", "org/name/file.gguf").

    `revision` and `token` are for the hub; `cache_dir` replaces the cache folder; `progress` hears about downloads.
    Raises ModelError (ChecksumError) for what cannot be found, read or supported, CapacityError for a full disk.
    """
    found = resolve(name, revision=revision, token=token, cache_dir=cache_dir, progress=progress)
    spec, weights, tokenizer = _load(found.path)
    check_weights(spec, weights)
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(
            f"{found.path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {spec.vocab_size}; "
            "the files do not belong together"
        )
    spec = dataclasses.replace(spec, num_tokens=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    return LoadedModel(name, spec, weights, tokenizer, found.path, found.source)


MOST_LAYERS = 2048  # far above any model; a damaged count must not become gigabytes of names

Parts = tuple[DecoderSpec, Weights, Tokenizer]


def _load(path: Path) -> Parts:
    try:
        return _load_gguf(path) if path.suffix == ".gguf" else _load_folder(path)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        # What a file holds is not to be trusted: a field of another kind than its format says ends up here.
        raise ModelError(f"{path} is damaged or of an unknown layout ({error!r}); fetch it again") from error


def _load_gguf(path: Path) -> Parts:
    file = read_gguf(path)
    config = config_of(file)
    spec = _plausible(path, family_of(config).spec_from_config(config))
    return spec, weights_of(file, config), gguf_tokenizer(file)


def _load_folder(folder: Path) -> Parts:
    config = folder_config(folder)
    family = family_of(config)
    spec = _plausible(folder, family.spec_from_config(config))
    weights = folder_weights(folder, family.tensor_names(spec))
    tokenizer = folder_tokenizer(folder, spec.eos_token_ids)
    return spec, weights, tokenizer


def _plausible(path: Path, spec: DecoderSpec) -> DecoderSpec:
    if spec.num_layers > MOST_LAYERS:
        raise ModelError(f"{path} claims {spec.num_layers} layers, more than {MOST_LAYERS}; fetch it again")
    return spec
