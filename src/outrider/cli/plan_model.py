"""What `outrider plan` plans for: the shape and the weight bytes of a model, which need not be downloaded."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.errors import ConfigError, ModelError
from outrider.memory.planner import count_parameters
from outrider.memory.shapes import SHAPES
from outrider.models.families import family_of
from outrider.models.load import load_model
from outrider.models.load.catalogue import CATALOGUE
from outrider.models.spec import DecoderSpec

#: Bits per stored weight; int4 carries a scale and a minimum per 32 values.
WEIGHT_BITS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.0, "int4": 5.0}


def find_model(name: str, weights: str = "bfloat16") -> tuple[DecoderSpec, int]:
    """The spec and weight bytes of a built-in shape, folder, config.json, GGUF file, alias or hub id.

    Shapes and configs need no weights: they are counted at `weights`. The others know what they store.
    """
    if weights not in WEIGHT_BITS:
        raise ConfigError(f"weights = {weights!r} is refused; use {', '.join(WEIGHT_BITS)}", "weights")
    if name in SHAPES:
        return _sized(SHAPES[name], weights)
    path = Path(name).expanduser()
    config = path / "config.json" if path.is_dir() else path
    if config.suffix == ".json" and config.exists():
        return _sized(_read_config(config), weights)
    if path.suffix == ".gguf" or "/" in name or name in CATALOGUE:
        loaded = load_model(name)
        return loaded.spec, sum(int(getattr(weight, "nbytes", 0)) for weight in loaded.weights.values())
    raise ModelError(
        f"{name!r} is no known shape and no file; use a folder, a .gguf file, a config.json or one of "
        f"{', '.join(SHAPES)}"
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
