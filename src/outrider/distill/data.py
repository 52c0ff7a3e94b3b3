"""The prompts of a run: read from .jsonl or .txt, checked, and told apart into training and evaluation.

A line of .jsonl is {"prompt": text} or {"question": text} or {"messages": [{"role": ..., "content": ...}, ...]}, with
an optional "domain" (chat, maths, code); a line of .txt is one prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from outrider.distill.guard import is_evaluation
from outrider.distill.options import Domain
from outrider.errors import ConfigError

TEXT_KEYS = ("prompt", "question", "instruction", "text")
DOMAINS = tuple(name for name in get_args(Domain) if name != "all")


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered, and what kind of task it is."""

    messages: tuple[tuple[str, str], ...]  # (role, content)
    domain: str = "chat"

    @property
    def text(self) -> str:
        """All it says."""
        return "\n".join(content for _, content in self.messages)

    @property
    def key(self) -> int:
        """A number that depends on the text alone."""
        return int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:8], "little")

    def to_dict(self) -> dict[str, Any]:
        """A line of .jsonl."""
        messages = [{"role": role, "content": content} for role, content in self.messages]
        return {"messages": messages, "domain": self.domain}


def read_prompts(path: Path, domain: str = "all") -> list[Prompt]:
    """The distinct prompts of a file, in its order; of one domain, where one is asked for.

    ConfigError names the line that cannot be used, evaluation prompts included.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path} cannot be read ({error}); give a .jsonl or .txt file of prompts") from None
    prompts = distinct(_prompts(path, lines))
    kept = [prompt for prompt in prompts if domain in ("all", prompt.domain)]
    if not kept:
        raise ConfigError(f"{path} holds no prompts of the domain {domain!r}; name their domain in the file", "domain")
    return kept


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts as .jsonl."""
    lines = [json.dumps(prompt.to_dict(), ensure_ascii=False) + "\n" for prompt in prompts]
    path.write_text("".join(lines), encoding="utf-8")


def distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Each text once, the first time it comes."""
    kept: dict[str, Prompt] = {}
    for prompt in prompts:
        kept.setdefault(prompt.text, prompt)
    return list(kept.values())


def is_held_out(prompt: Prompt, one_in: int) -> bool:
    """Whether a prompt is for evaluation: decided by its text, so that no order or selection changes it."""
    return prompt.key % one_in == 0


def digest_of_prompts(prompts: Sequence[Prompt]) -> str:
    """One hash of all prompts in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt.to_dict(), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _prompts(path: Path, lines: Sequence[str]) -> Iterator[Prompt]:
    read = _from_json if path.suffix in (".jsonl", ".json") else _from_text
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = read(line, f"{path.name}, line {number}")
        if is_evaluation(prompt.text):
            raise ConfigError(f"{path.name}, line {number} is an evaluation prompt; take it out of the training data")
        yield prompt


def _from_text(line: str, where: str) -> Prompt:
    return Prompt((("user", line.strip()),))


def _from_json(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}); write one object per line") from None
    messages = _messages(record)
    if not messages:
        raise ConfigError(f"{where} has neither a text ({', '.join(TEXT_KEYS)}) nor messages with role and content")
    domain = record.get("domain", "chat")
    if domain not in DOMAINS:
        raise ConfigError(f"{where}: domain {domain!r} is unknown; use one of {', '.join(DOMAINS)}", "domain")
    return Prompt(messages, domain)


def _messages(record: Any) -> tuple[tuple[str, str], ...]:
    """The conversation of a record; empty where there is none."""
    if not isinstance(record, dict):
        return ()
    texts = [record[key] for key in TEXT_KEYS if isinstance(record.get(key), str) and record[key].strip()]
    if texts:
        return (("user", texts[0]),)
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        return ()
    try:
        return tuple((str(m["role"]), str(m["content"])) for m in messages)
    except (TypeError, KeyError):
        return ()
