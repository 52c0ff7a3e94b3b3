"""When a text ends, and what is said about it."""

from __future__ import annotations

import pytest

from judging import spell
from outrider.sampling import Stopper
from outrider.types import Finish, SamplingParams

EOS = 25


def stopper(room: int = 100, decode=spell, **params: object) -> Stopper:
    return Stopper(SamplingParams(**{"max_tokens": None, **params}), (EOS, 24), room, decode)  # type: ignore[arg-type]


def ends_at(checker: Stopper, output: list[int]) -> tuple[int, Finish] | None:
    """The first length at which the text ends, and why."""
    found = ((n, checker.check(output[:n])) for n in range(1, len(output) + 1))
    return next(((n, finish) for n, finish in found if finish), None)


def test_any_end_token_ends_unless_ignored() -> None:
    assert ends_at(stopper(), [1, 24, 3]) == (2, Finish("stop"))
    assert ends_at(stopper(ignore_eos=True), [1, 24, EOS]) is None


def test_a_stop_id_is_named() -> None:
    assert ends_at(stopper(stop_token_ids=[7], ignore_eos=True), [1, EOS, 7]) == (3, Finish("stop", 7))


def test_stop_wins_over_length_on_the_same_token() -> None:
    text = [10, 11, 2, 20, 21, 22]
    assert ends_at(stopper(max_tokens=5, stop_token_ids=[2]), text) == (3, Finish("stop", 2))
    assert ends_at(stopper(max_tokens=3, stop_token_ids=[2]), text) == (3, Finish("stop", 2))
    assert ends_at(stopper(max_tokens=5, stop_token_ids=[22]), text) == (5, Finish("length"))


def test_the_context_is_a_limit_too() -> None:
    assert ends_at(stopper(room=3, max_tokens=5), [1] * 9) == (3, Finish("length"))
    assert ends_at(stopper(room=3), [1] * 9) == (3, Finish("length"))
    assert ends_at(stopper(room=9, max_tokens=5), [1] * 9) == (5, Finish("length"))


@pytest.mark.parametrize("before", [0, 1, 7, 40])
def test_a_stop_string_ends_at_the_token_that_completes_it(before: int) -> None:
    text = [9] * before + [0, 1, 2, 3]
    assert ends_at(stopper(stop=["bc"]), text) == (before + 3, Finish("stop", "bc"))


def test_of_several_stop_strings_the_one_that_begins_first_is_named() -> None:
    def wide(tokens):
        return "".join("xaby"[t] if t < 4 else "ab" for t in tokens)

    assert ends_at(stopper(stop=["b", "ab"], decode=wide), [0, 5, 0]) == (2, Finish("stop", "ab"))
    assert ends_at(stopper(stop=["b", "ab"], decode=wide), [0, 2]) == (2, Finish("stop", "b"))


def test_a_stop_string_inside_one_token_and_across_empty_ones() -> None:
    def decode(tokens):
        return "".join({0: "one END two", 1: "", 2: "EN", 3: "D"}.get(t, "-") for t in tokens)

    assert ends_at(stopper(stop="END", decode=decode), [9, 0]) == (2, Finish("stop", "END"))
    assert ends_at(stopper(stop="END", decode=decode), [9, 2, *[1] * 50, 3]) == (53, Finish("stop", "END"))


def test_half_a_character_neither_hides_nor_makes_a_stop() -> None:
    pieces = {0: b"ab", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"c"}

    def decode(tokens):
        return b"".join(pieces[t] for t in tokens).decode("utf-8", "replace")

    assert ends_at(stopper(stop="é", decode=decode), [0, 1, 2, 3]) == (3, Finish("stop", "é"))
    assert ends_at(stopper(stop="béc", decode=decode), [0, 1, 2, 3]) == (4, Finish("stop", "béc"))
    assert ends_at(stopper(stop="bc", decode=decode), [0, 1, 2, 3]) is None


def test_stop_strings_wait_for_min_tokens() -> None:
    text = [0, 1, 9, 0, 1, 9]
    assert ends_at(stopper(stop="ab", min_tokens=3), text) == (5, Finish("stop", "ab"))
    assert ends_at(stopper(stop="ab", min_tokens=2), text) == (2, Finish("stop", "ab"))


def test_only_the_tail_is_decoded() -> None:
    widths = []

    def decode(tokens):
        widths.append(len(tokens))
        return spell(tokens)

    assert stopper(stop="xyz", decode=decode, room=10**6).check([1] * 5000) is None
    assert 0 < max(widths) < 50
