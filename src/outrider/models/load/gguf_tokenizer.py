"""The tokenizer inside a GGUF: its vocabulary, merges or scores, control tokens and chat template.

Two kinds are known: byte-level BPE ("gpt2"), whose way of cutting text into words the file names in
tokenizer.ggml.pre, and sentencepiece BPE ("llama"), whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from outrider.errors import ModelError
from outrider.models.load.gguf_file import GGUFFile
from outrider.models.load.tokenizer import SPACE_MARK, Tokenizer


class TokenType(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


#: Control tokens that end an answer although the header names only one of them (the chat models' usual set).
ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{{end}}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{{end}}"
SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + PUNCTUATION_AND_SPACE
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + PUNCTUATION_AND_SPACE
TEKKEN = CASED.replace("{end}", "") + r"|\p{N}" + SLASHED
GPT4O = CASED.replace("{end}", CONTRACTIONS + "?") + r"|\p{N}{1,3}" + SLASHED

#: tokenizer.ggml.pre -> the pattern of a word; None: GPT-2's own words; "digits": the same with every digit alone.
WORDS: Mapping[str, str | None] = {
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "mpt", "jais", "phi-2", "granite-docling"), None),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "digits"),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "grok-2"), QWEN2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), LLAMA3),
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
}
IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "tekken", "llama4")
NFC = ("qwen2", "deepseek-r1-qwen", "megrez")
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
TEMPLATE = "tokenizer.chat_template"


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer of a GGUF. ModelError where it has none or one of a kind that is not known."""
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in file.fields.items()}
    kind = own.get("model")
    if kind not in BUILDERS or not own.get("tokens"):
        raise ModelError(
            f"{file.path} has a tokenizer of kind {kind!r}, which is not supported; supported: {', '.join(BUILDERS)}"
        )
    types = own.get("token_type") or [TokenType.NORMAL] * len(own["tokens"])
    pieces = own["tokens"][: _used(types)]
    backend = BUILDERS[kind](file, own, pieces, types)
    backend.add_tokens(_added(pieces, types, TokenType.USER_DEFINED))
    backend.add_special_tokens(_added(pieces, types, TokenType.CONTROL))
    _frame(backend, own, pieces, default_bos=kind == "llama")
    named = {name: pieces[own[f"{key}_token_id"]] for name, key in NAMED.items() if _known(own, key, pieces)}
    return Tokenizer(backend, eos_token_ids=_ends(own, pieces, types), templates=_templates(file), named=named)


def _used(types: Sequence[int]) -> int:
    """How many tokens there are without the padding behind the last real one."""
    return max((i + 1 for i, kind in enumerate(types) if kind != TokenType.UNUSED), default=0)


def _known(own: Mapping[str, Any], key: str, pieces: Sequence[str]) -> bool:
    return own.get(f"{key}_token_id") is not None and 0 <= own[f"{key}_token_id"] < len(pieces)


def _added(pieces: Sequence[str], types: Sequence[int], wanted: TokenType) -> list[AddedToken]:
    special = wanted == TokenType.CONTROL
    return [
        AddedToken(piece, special=special, normalized=False)
        for piece, kind in zip(pieces, types, strict=False)
        if kind == wanted and piece
    ]


def _ends(own: Mapping[str, Any], pieces: Sequence[str], types: Sequence[int]) -> list[int]:
    """Tokens that end an answer: those the header names, then the usual ones among the control tokens."""
    named = [own[f"{key}_token_id"] for key in ("eos", "eot", "eom") if _known(own, key, pieces)]
    usual = [i for i, piece in enumerate(pieces) if types[i] == TokenType.CONTROL and piece in ENDS]
    return named + usual


def _templates(file: GGUFFile) -> dict[str, str]:
    """Chat templates by name; the nameless one is "default"."""
    found = {k.removeprefix(TEMPLATE + "."): v for k, v in file.fields.items() if k.startswith(TEMPLATE + ".")}
    if TEMPLATE in file.fields:
        found["default"] = file.fields[TEMPLATE]
    return found


def _frame(backend: Backend, own: Mapping[str, Any], pieces: Sequence[str], default_bos: bool) -> None:
    """BOS before and EOS behind every text, where the header asks for them; what the words need stays in place."""
    start = _token(own, "bos", pieces) if own.get("add_bos_token", default_bos) else []
    end = _token(own, "eos", pieces) if own.get("add_eos_token", False) else []
    if start or end:
        single = [text for text, _ in start] + ["$A"] + [text for text, _ in end]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=start + end)


def _token(own: Mapping[str, Any], key: str, pieces: Sequence[str]) -> list[tuple[str, int]]:
    """Text and id of a token that the header names; nothing where it names none."""
    return [(pieces[own[f"{key}_token_id"]], own[f"{key}_token_id"])] if _known(own, key, pieces) else []


def _byte_level(file: GGUFFile, own: Mapping[str, Any], pieces: Sequence[str], types: Sequence[int]) -> Backend:
    pre = own.get("pre", "gpt-2")
    if pre not in WORDS:
        known = ", ".join(WORDS)
        raise ModelError(f"{file.path} cuts words by {pre!r} (tokenizer.ggml.pre), which is not known; known: {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in own.get("merges", [])]
    vocabulary = {piece: i for i, piece in enumerate(pieces) if types[i] != TokenType.UNUSED}
    try:
        backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in IGNORE_MERGES))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"{file.path} has merges that do not fit its vocabulary ({error}); fetch it again") from None
    if pre in NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _words(WORDS[pre])
    backend.decoder = decoders.ByteLevel()
    return backend


def _words(pattern: str | None) -> pre_tokenizers.PreTokenizer:
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern == "digits":
        own_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), own_words])
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), letters])


def _sentencepiece(file: GGUFFile, own: Mapping[str, Any], pieces: Sequence[str], types: Sequence[int]) -> Backend:
    scores = own.get("scores")
    if not scores or len(scores) < len(pieces):
        raise ModelError(f"{file.path} has a sentencepiece vocabulary without scores; fetch it again")
    vocabulary = {piece: i for i, piece in enumerate(pieces) if types[i] != TokenType.UNUSED}
    mergeable = [i for i in vocabulary.values() if types[i] == TokenType.NORMAL]
    unknown = pieces[own["unknown_token_id"]] if _known(own, "unknown", pieces) else None
    merges = merges_by_score(vocabulary, {pieces[i]: scores[i] for i in mergeable})
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Backend(model)
    replace = normalizers.Replace(" ", SPACE_MARK)
    prefixed = own.get("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), replace]) if prefixed else replace
    parts = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    return backend


def merges_by_score(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Sentencepiece BPE as merges: every way to split a piece into two pieces, best score first."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
