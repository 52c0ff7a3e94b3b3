"""Structured output: a grammar as a processor, through llguidance.

    processors = grammar_processors(SamplingParams(structured_outputs={"regex": "[0-9]+"}), tokenizer)

The matcher only ever holds a prefix of the output that it was asked about: tokens of a rejected draft are rolled back,
tokens behind the grammar's end are never fed, and behind the end only an end token is allowed.

Grammars come from users, so everything is bounded: the size of the text, the number of its parts, the lexer's states
and the work per token. What exceeds a bound is refused with UnsupportedError.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from outrider.errors import UnsupportedError
from outrider.sampling.prefix import shared_length
from outrider.sampling.processors import Processor
from outrider.types import Float32, SamplingParams

T = TypeVar("T")

FIELD = "structured_outputs"

#: Characters of a grammar's text.
MAX_TEXT = 1 << 18

#: Rules, groups and subschemas of one grammar. llguidance descends recursively through chains of them.
MAX_PARTS = 4000

#: Stack of the thread that compiles: enough for a chain of MAX_PARTS, whatever the caller's stack is.
COMPILE_STACK = 128 << 20

#: llguidance's own bounds; a lexer state takes 1 to 2 kB.
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "max_lexer_states": 20_000}

_compiling = threading.Lock()


class Vocabulary(Protocol):
    """What a grammar must know of a tokenizer (models/load/tokenizer.py)."""

    @property
    def vocab_size(self) -> int:
        """Tokens, control tokens included."""
        ...

    @property
    def eos_token_ids(self) -> Collection[int]:
        """Tokens that end an answer."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token and no part of the text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for in text."""
        ...


class Grammar:
    """Allows what a matcher allows. `matcher` is this object's own; `eos` are the ids that may end the text."""

    def __init__(self, matcher: Any, eos: Collection[int]) -> None:
        self._matcher = matcher
        self._eos = np.array(sorted(eos), np.int64)
        self._consumed: list[int] = []

    def apply(self, logits: Float32, output: Sequence[int]) -> None:
        """Forbid every token that cannot continue `output`; where nothing can, all but the end tokens."""
        allowed = self._allowed(len(logits)) if self._move_to(output) else np.zeros(len(logits), np.bool_)
        if not allowed.any():
            allowed[self._eos] = True
        logits[~allowed] = -np.inf

    def _move_to(self, output: Sequence[int]) -> bool:
        """Bring the matcher to `output`; False when the grammar ended before its last token."""
        shared = shared_length(self._consumed, output)
        if shared < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - shared)
            del self._consumed[shared:]
        rest = list(output[shared:])
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._consumed += rest[:taken]
        _refuse_error(self._matcher)
        return taken == len(rest)

    def _allowed(self, size: int) -> np.ndarray:
        """The matcher's mask as booleans over a row of logits; padding behind the vocabulary is not allowed."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        _refuse_error(self._matcher)
        allowed = np.zeros(size, np.bool_)
        allowed[: len(bits)] = bits[:size]
        return allowed


def grammar_processors(
    params: SamplingParams, tokenizer: Vocabulary, eos_token_ids: Collection[int] | None = None
) -> tuple[Processor, ...]:
    """The processor for `params.structured_outputs`, or none. `eos_token_ids`: the tokenizer's own unless given."""
    if params.structured_outputs is None:
        return ()
    given = tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids
    eos = tuple(sorted(token for token in given if token < tokenizer.vocab_size))
    if not eos:
        raise UnsupportedError(f"{FIELD} needs a model that has an end token", field=FIELD)
    matcher = _compile(_source(params.structured_outputs), _library_tokenizer(tokenizer, eos))
    return (Grammar(matcher.deep_copy(), eos),)


def _source(structure: Mapping[str, Any]) -> str:
    """The grammar in llguidance's own format. SamplingParams has seen to it that there is exactly one key."""
    ((kind, value),) = structure.items()
    try:
        return _SOURCES[kind](value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedError(f"{FIELD}: {kind} is refused; {_one_line(error)}", field=FIELD) from error


def _json(schema: Any) -> str:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return _library().LLMatcher.grammar_from_json_schema(_bounded(text, "{["))


def _json_object(wanted: Any) -> str:
    if wanted is not True:
        raise ValueError("use true")
    return _json({"type": "object"})


def _regex(pattern: Any) -> str:
    return _library().LLMatcher.grammar_from_regex(_bounded(_text(pattern), "("))


def _choice(options: Any) -> str:
    if isinstance(options, str) or not isinstance(options, Sequence) or not options:
        raise ValueError("use a list of one or more strings")
    return _regex("|".join(_literal(_text(option)) for option in options))


def _lark(grammar: Any) -> str:
    return _library().LLMatcher.grammar_from_lark(_bounded(_text(grammar), "{[(:"))


_SOURCES: dict[str, Callable[[Any], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}


def _literal(text: str) -> str:
    """A regex that matches `text` and nothing else."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("use a string that is not empty")
    return value


def _bounded(text: str, marks: str) -> str:
    """The text, if neither it nor the number of its parts (at most one per mark) is too large."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"it has {len(text)} characters; use at most {MAX_TEXT}")
    parts = sum(map(text.count, marks))
    if parts > MAX_PARTS:
        raise ValueError(f"it has {parts} parts; use at most {MAX_PARTS}")
    return text


@lru_cache(maxsize=8)
def _compile(source: str, library_tokenizer: Any) -> Any:
    """A fresh matcher that has been shown to start: errors and grammars that match nothing are refused here."""
    library = _library()
    limits = library.LLParserLimits(verbose_errors=False, **LIMITS)

    def build() -> Any:
        matcher = library.LLMatcher(library_tokenizer, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    matcher = _on_deep_stack(build)
    _refuse_error(matcher)
    if matcher.is_stopped() and not matcher.is_accepting():
        raise UnsupportedError(f"{FIELD}: no text fits this grammar; loosen it", field=FIELD)
    return matcher


def _refuse_error(matcher: Any) -> None:
    if matcher.is_error():
        raise UnsupportedError(f"{FIELD}: {_one_line(matcher.get_error())}; simplify the grammar", field=FIELD)


def _on_deep_stack(function: Callable[[], T]) -> T:
    """Run a function in a thread of its own whose stack is COMPILE_STACK bytes."""
    results: list[T] = []
    with _compiling:
        usual = threading.stack_size(COMPILE_STACK)
        try:
            thread = threading.Thread(target=lambda: results.append(function()))
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return results[0]


_tokenizers: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def _library_tokenizer(tokenizer: Vocabulary, eos: tuple[int, ...]) -> Any:
    """llguidance's view of a tokenizer, built once for each."""
    known = _tokenizers.setdefault(tokenizer, {})
    if eos not in known:
        library = _library()
        known[eos] = library.LLTokenizer(
            library.TokenizerWrapper(_Tokens(tokenizer, eos)), n_vocab=tokenizer.vocab_size, eos_token=list(eos)
        )
    return known[eos]


class _Tokens:
    """What llguidance asks of a tokenizer: bytes per token. It splits text itself, so any valid splitting will do."""

    bos_token_id = None

    def __init__(self, tokenizer: Vocabulary, eos: tuple[int, ...]) -> None:
        self.eos_token_id = eos[0]
        ids = range(tokenizer.vocab_size)
        self.special_token_ids = [token for token in ids if token in eos or tokenizer.is_special(token)]
        self.tokens = [tokenizer.token_bytes(token) for token in ids]
        self._single = {text: token for token, text in enumerate(self.tokens) if len(text) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._single[bytes([byte])] for byte in data if bytes([byte]) in self._single]


def _library() -> Any:
    """llguidance, which is an optional part of an installation."""
    try:
        import llguidance
    except ImportError as error:
        raise UnsupportedError(f"{FIELD} needs llguidance; pip install 'outrider[server]'", field=FIELD) from error
    return llguidance


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:200]
