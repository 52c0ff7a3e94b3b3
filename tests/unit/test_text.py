"""Text of a stream: whole characters, stop strings across tokens and chunks, one text whatever the chunking."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.api.text import TextStream, held_length
from outrider.types import Delta, Finish, SamplingParams


class Bytes:
    """A detokenizer whose tokens are bytes; holds back incomplete UTF-8."""

    def __init__(self) -> None:
        self._buffer = b""

    def push(self, tokens: Sequence[int]) -> str:
        self._buffer += bytes(tokens)
        for length in range(len(self._buffer), max(-1, len(self._buffer) - 4), -1):
            try:
                text = self._buffer[:length].decode()
            except UnicodeDecodeError:
                continue
            self._buffer = self._buffer[length:]
            return text
        return ""

    def flush(self) -> str:
        text, self._buffer = self._buffer.decode(errors="replace"), b""
        return text


def shown(text: str, sizes: list[int], finish: Finish, params: SamplingParams) -> list[str]:
    """The pieces of `text`, given in chunks of the sizes (the last takes the rest)."""
    stream, raw, pieces, start = TextStream(Bytes(), params), text.encode(), [], 0
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    for end in [*(e for e in ends if e < len(raw)), len(raw)]:
        last = end == len(raw)
        piece = stream.push(Delta("r", 0, tuple(raw[start:end]), finish=finish if last else None))
        assert "".join(piece.texts) == piece.text
        pieces.append(piece.text)
        start = end
    return pieces


LENGTH = Finish("length")


@pytest.mark.parametrize("sizes", [[1] * 40, [2] * 20, [3, 1, 5, 2, 7], [100]])
@pytest.mark.parametrize("text", ["plain words", "Grüße, 世界 🚀!", "a STOX b STO"])
def test_the_pieces_make_the_text(sizes, text) -> None:
    params = SamplingParams(stop=["STOP"])
    assert "".join(shown(text, sizes, LENGTH, params)) == text


@pytest.mark.parametrize("sizes", [[1] * 40, [2] * 20, [3, 1, 5, 2, 7], [100]])
@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one STOP")])
def test_nothing_of_a_stop_string_is_shown(sizes, include, expected) -> None:
    params = SamplingParams(stop=["STOP", "STOPPED"], include_stop_str_in_output=include)
    pieces = shown("one STOP", sizes, Finish("stop", "STOP"), params)
    assert "".join(pieces) == expected


def test_a_stop_string_inside_a_token_cuts_what_follows_it() -> None:
    class Words(Bytes):
        def push(self, tokens: Sequence[int]) -> str:
            return "".join({1: "ab", 2: "c STOP de"}[t] for t in tokens)

    stream = TextStream(Words(), SamplingParams(stop="STOP"))
    assert stream.push(Delta("r", 0, (1, 2), finish=Finish("stop", "STOP"))).text == "abc "


def test_an_abort_gives_what_was_held() -> None:
    stream = TextStream(Bytes(), SamplingParams(stop="STOP"))
    assert stream.push(Delta("r", 0, tuple(b"x ST"))).text == "x "
    assert stream.push(Delta("r", 0, finish=Finish("abort"))).text == "ST"


def test_held_back_is_the_longest_possible_beginning() -> None:
    assert held_length("ab", ["abc", "bx"]) == 2
    assert held_length("xb", ["abc", "bx"]) == 1
    assert held_length("abc!", ["abc"]) == 4
    assert held_length("zzz", ["abc"]) == 0
    assert held_length("abc", []) == 0


@pytest.mark.parametrize("sizes", [[1] * 40, [2] * 20, [3, 1, 5, 2, 7], [100]])
@pytest.mark.parametrize(
    ("text", "minimum", "finish", "expected"),
    [
        ("abcba", 4, Finish("stop", "a"), "abcb"),  # the first one came before min_tokens
        ("a", 1, Finish("stop", "a"), ""),
        ("xaab!", 5, Finish("stop", "ab!"), "xa"),  # held for the longer one, and not cut for the shorter one
        ("abcbz", 5, LENGTH, "abcbz"),
    ],
)
def test_a_stop_string_before_min_tokens_cuts_nothing(sizes, text, minimum, finish, expected) -> None:
    params = SamplingParams(stop=["a", "ab!"], min_tokens=minimum)
    assert "".join(shown(text, sizes, finish, params)) == expected


def test_text_before_min_tokens_is_shown_at_once() -> None:
    stream = TextStream(Bytes(), SamplingParams(stop="a", min_tokens=4))
    assert [stream.push(Delta("r", 0, (token,))).text for token in b"abc"] == ["a", "b", "c"]
