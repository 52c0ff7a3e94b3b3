"""Reading the small JSON files of a model folder, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. ModelError where it is missing, no JSON or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; use the model's complete folder") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; fetch it again")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no such file."""
    return read_json(path) if path.exists() else {}
