"""Streaming text: any cut of any tokens gives the text of all of them, and nothing half-finished is shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

import loading
from outrider.models.load.detokenizer import Detokenizer
from outrider.models.load.tokenizer import Tokenizer as Ours


def sentencepiece() -> Ours:
    """A vocabulary of bytes and a few words, spelled the sentencepiece way."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab", "é"]
    backend = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "a"), ("▁a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    return Ours(backend)


TOKENIZERS = {"byte level": Ours(loading.byte_level_tokenizer()), "sentencepiece": sentencepiece()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_cut_gives_the_whole_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=16))
    skip = data.draw(st.booleans())
    detokenizer, pieces, rest = Detokenizer(tokenizer, skip_special=skip), [], list(ids)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(detokenizer.push(rest[:size]))
        rest = rest[size:]
    pieces.append(detokenizer.push([]))
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_text_survives_the_round_trip_token_by_token(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    if kind == "sentencepiece":
        text = text.replace("▁", "_")
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token]) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_held_back() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer.encode("x🚀")
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token]) for token in ids]
    assert len(pieces) >= 4
    assert pieces == ["x", *[""] * (len(pieces) - 2), "🚀"]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[:3]) == "x"
    assert detokenizer.flush() == "\ufffd"


def test_the_first_space_is_stripped_once() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    first = tokenizer.encode(" a a")
    assert tokenizer.decode(first) == " a a"
    assert tokenizer.decode([1, *first]) == " a a"
    assert tokenizer.decode([1, *first], skip_special=False) == "<s>  a a"


class Counting:
    """Counts how often a token's bytes are asked for."""

    strips_first_space = False

    def __init__(self) -> None:
        self.asked = 0

    def token_bytes(self, token: int) -> bytes:
        self.asked += 1
        return bytes([token])

    def is_special(self, token: int) -> bool:
        return False


def test_every_token_is_looked_at_once() -> None:
    counting = Counting()
    detokenizer = Detokenizer(counting)
    text = "naïve 🙂 " * 50
    assert "".join(detokenizer.push([byte]) for byte in text.encode()) == text
    assert counting.asked == len(text.encode())
