"""The tokenizer of a Hugging Face folder: tokenizer.json, or GPT-2's vocab.json and merges.txt (as OPT has them)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from outrider.errors import ModelError
from outrider.models.load.json_file import read_json, read_json_if_there
from outrider.models.load.tokenizer import Tokenizer

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def folder_tokenizer(folder: Path, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
    """Build the folder's tokenizer; `eos_token_ids` of the model come before the tokenizer's own end token.

    ModelError where there is none, or one of a kind that is not supported.
    """
    settings = read_json_if_there(folder / "tokenizer_config.json")
    named = _named(settings, read_json_if_there(folder / "special_tokens_map.json"))
    backend = _backend(folder, settings, named)
    own_end = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    ends = [*eos_token_ids, *([] if own_end is None else [own_end])]
    return Tokenizer(backend, eos_token_ids=ends, templates=_templates(folder, settings), named=named)


def _named(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Texts of bos_token and its like; files hold them as strings or as tables."""
    found: dict[str, str] = {}
    for source in sources:
        for name in NAMED:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def _backend(folder: Path, settings: Mapping[str, Any], named: Mapping[str, str]) -> Backend:
    if (folder / "tokenizer.json").exists():
        backend = _from_json(folder / "tokenizer.json")
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        backend = _from_gpt2_files(folder, settings, named)
    elif (folder / "tokenizer.model").exists():
        raise ModelError(f"{folder} has only tokenizer.model; save its tokenizer.json with transformers first")
    else:
        raise ModelError(f"{folder} has no tokenizer.json; use the model's complete folder")
    _declare(backend, settings)
    return backend


def _from_json(path: Path) -> Backend:
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"{path} cannot be read ({error}); fetch it again") from None
    backend.no_truncation()  # some files were saved with the limits of a training run
    backend.no_padding()
    return backend


def _from_gpt2_files(folder: Path, settings: Mapping[str, Any], named: Mapping[str, str]) -> Backend:
    vocabulary = read_json(folder / "vocab.json")
    try:
        lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
        merges = [_pair(line) for line in lines if line and not line.startswith("#version")]
        backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(
            f"{folder} has a vocab.json and merges.txt that do not fit ({error}); fetch them again"
        ) from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in set(named.values())])
    start = named.get("bos_token")
    if settings.get("add_bos_token") and start is not None:
        pair = (start, backend.token_to_id(start))
        backend.post_processor = processors.TemplateProcessing(single=[start, "$A"], special_tokens=[pair])
    return backend


def _pair(line: str) -> tuple[str, str]:
    left, right = line.split(" ")
    return left, right


def _declare(backend: Backend, settings: Mapping[str, Any]) -> None:
    """Tokens that tokenizer_config.json declares and tokenizer.json left out."""
    known = backend.get_added_tokens_decoder()
    declared = {int(i): entry for i, entry in (settings.get("added_tokens_decoder") or {}).items()}
    for i in sorted(set(declared) - set(known)):
        entry = {k: v for k, v in declared[i].items() if k != "__type"}
        backend.add_tokens([AddedToken(**entry)])


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, newest place first: chat_template.jinja, chat_template.json, tokenizer_config.json."""
    if (folder / "chat_template.jinja").exists():
        return {"default": (folder / "chat_template.jinja").read_text(encoding="utf-8")}
    own = read_json_if_there(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(own, list):
        return {entry["name"]: entry["template"] for entry in own}
    return {} if own is None else {"default": own}
