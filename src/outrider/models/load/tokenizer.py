"""Text to tokens and back, the same for every source of a tokenizer.

Built from tokenizer.json (tokenizer_files.py) or from the vocabulary inside a GGUF (gguf_tokenizer.py); encoding is
the `tokenizers` library's, decoding is by the bytes of each token, so that it can be done a token at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from outrider.errors import ModelError, UnsupportedError
from outrider.models.load.chat import Fence, render, strings_of, unused_mark
from outrider.models.load.detokenizer import Detokenizer

SPACE_MARK = "▁"
TOOL_TEMPLATE = "tool_use"


def _byte_letters() -> dict[int, str]:
    """GPT-2's table (Radford et al. 2019): how byte-level vocabularies spell each byte as one printable character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_OF_LETTER = {ord(letter): byte for byte, letter in _byte_letters().items()}


class Tokenizer:
    """Encodes, decodes and renders chats. Safe to share between threads.

    Control tokens ("special" ones) in a user's text are encoded as text unless `allow_special` says otherwise.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: Iterable[int] = (),
        templates: Mapping[str, str] | None = None,
        named: Mapping[str, str] | None = None,
    ) -> None:
        """`templates`: name -> chat template, of which "default" is used; `named`: bos_token and such -> its text."""
        self._backend = backend
        self._lock = threading.Lock()  # encode_special_tokens is a setting of the shared backend
        self._templates = dict(templates or {})
        self._named = dict(named or {})
        added = backend.get_added_tokens_decoder()
        self._added = {token: entry.content for token, entry in added.items()}
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._controls = {added[token].content: token for token in self._special}
        self._fence = Fence(self._controls)
        self._pieces = _pieces(backend)
        self._spell, self.strips_first_space = _spelling(backend)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model's own vocabulary may be padded beyond it."""
        return len(self._pieces)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and the chat template, as folder_tokenizer reads them."""
        self._backend.save(str(folder / "tokenizer.json"))
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")

    @property
    def chat_template(self) -> str | None:
        """The template that chat() renders, as Jinja source."""
        return self._templates.get("default")

    @property
    def has_chat_template(self) -> bool:
        """Whether chat() can render."""
        return self.chat_template is not None

    def encode(self, text: str, *, add_special: bool = False, allow_special: bool = False) -> list[int]:
        """Token ids of a text. `add_special` puts what the model wants around every text (such as a BOS token)."""
        with self._lock:
            self._backend.encode_special_tokens = not allow_special
            return list(self._backend.encode(_well_formed(text), add_special_tokens=add_special).ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of tokens; bytes that are no valid UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for; empty for an id that is padding or beyond the vocabulary."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._pieces[token] if 0 <= token < len(self._pieces) else None
        return b"" if piece is None else self._spell(piece)

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token: it steers the model and is no part of the text."""
        return token in self._special

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> list[int]:
        """Token ids of a conversation, by the model's template. Nothing in messages or tools becomes a control token.

        Raises UnsupportedError where there is no template or it refuses the messages.
        """
        template = self._templates.get(TOOL_TEMPLATE if tools else "default") or self.chat_template
        if template is None:
            raise UnsupportedError("this model has no chat template; use completions, or a model with one", field=None)
        given = {"messages": list(messages), "tools": list(tools) if tools else None, "args": template_args}
        mark = unused_mark(strings_of(given) + template)
        fenced = self._fence.apply(given, mark)
        variables = {**self._named, "add_generation_prompt": add_generation_prompt, **fenced["args"]}
        text = render(template, fenced["messages"], fenced["tools"], variables)
        return self._encode_fenced(text, mark)

    def first_difference(self, other: Tokenizer) -> tuple[int, str, str] | None:
        """The first token that differs: (id, mine, theirs); None where all shared ids mean the same.

        Vocabularies of one tokenizer padded to several sizes are the same: only ids that both have are compared.
        """
        for token, (mine, theirs) in enumerate(zip(self._pieces, other._pieces, strict=False)):
            if mine != theirs and None not in (mine, theirs) and self.token_bytes(token) != other.token_bytes(token):
                return token, str(mine), str(theirs)
        return None

    def _encode_fenced(self, text: str, mark: str) -> list[int]:
        """Encode rendered text; where users wrote control tokens, piece by piece, so that theirs stay text."""
        if mark not in text:
            return self.encode(text, allow_special=True)
        ids: list[int] = []
        for number, piece in enumerate(self._fence.split(text, mark)):
            ids += [self._controls[piece]] if number % 2 else self.encode(piece)
        return ids


def _pieces(backend: Backend) -> list[str | None]:
    """Spelling of every token by id; None where an id is not used."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token in vocabulary.items():
        pieces[token] = piece
    return pieces


def _spelling(backend: Backend) -> tuple[Callable[[str], bytes], bool]:
    """How pieces spell bytes, and whether decoding strips one space at the very beginning.

    The library gives a component's settings only as the JSON of its saved state.
    """
    if backend.decoder is None:
        return _word_bytes, True
    state = json.loads(backend.decoder.__getstate__())
    parts = state.get("decoders", [state])
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return _byte_level_bytes, False
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strips = [p for p in parts if p["type"] == "Strip" and p["content"] == " " and p["start"]]
        spaced = [p for p in parts if p["type"] == "Metaspace" and p.get("prepend_scheme") != "never"]
        return _sentencepiece_bytes, bool(strips or spaced)
    raise ModelError(
        f"the tokenizer decodes with {', '.join(sorted(kinds))}, which is not supported; "
        "supported: byte-level BPE and sentencepiece"
    )


def _well_formed(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _word_bytes(piece: str) -> bytes:
    """Without a decoder, pieces are words with a space between them."""
    return b" " + piece.encode()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(BYTE_OF_LETTER[ord(letter)] for letter in piece)
    except KeyError:
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(SPACE_MARK, " ").encode()
