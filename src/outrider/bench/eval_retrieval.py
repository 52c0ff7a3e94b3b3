"""Key-value retrieval and multi-document question answering at chosen depths, after "Lost in the Middle"
(arXiv 2307.03172)."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.bench.eval_cases import Case, Count
from outrider.errors import ConfigError


def key_value_retrieval(
    records: Sequence[tuple[str, str]] | None, length: int, depth: float, count: Count, seed: int = 0
) -> Case:
    """A JSON object of as many random pairs as fit; the one at `depth` is asked for. records None: made here."""
    rng = random.Random(seed)
    opening = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
    pool = list(records) if records else []
    while len(pool) < 2:
        pool.append((_uuid(rng), _uuid(rng)))
    line = json.dumps(dict(pool[:1]))
    question = '\n\nKey: "{}"\nCorresponding value:'
    room = length - count(opening) - count(question.format(pool[0][0])) - 4
    pairs = max(1, room // (count(line) + 1))
    while len(pool) < pairs:
        pool.append((_uuid(rng), _uuid(rng)))
    pool = pool[:pairs]
    rng.shuffle(pool)
    key, value = pool[min(pairs - 1, int(depth * pairs))]
    body = "{" + ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in pool) + "}"
    facts = {"depth": depth, "length": length, "pairs": pairs, "seed": seed}
    return Case("key_value", opening + body + question.format(key), ((value,),), 48, facts)


def multi_document_qa(
    rows: Sequence[Mapping[str, Any]], index: int, length: int, depth: float, count: Count, seed: int = 0
) -> Case:
    """Question `index` with its passage at `depth` among passages of other questions, as many as fit."""
    if len(rows) < 2:
        raise ConfigError("multi-document questions need two rows or more", "data")
    row = rows[index]
    answers = tuple(row["answers"])
    opening = (
        "Write a high-quality answer for the given question using only the provided search results (some of which "
        "might be irrelevant).\n\n"
    )
    question = f"\n\nQuestion: {row['question']}\nAnswer:"
    gold = row["ctxs"][0]
    used = count(opening) + count(question) + count(_document(99, gold)) + 1
    others = list(range(len(rows)))
    random.Random(seed).shuffle(others)
    chosen: list[Mapping[str, Any]] = []
    for other in others:
        passage = rows[other]["ctxs"][0]
        if other == index or any(answer.lower() in passage["text"].lower() for answer in answers):
            continue
        used += count(_document(99, passage)) + 1
        if used > length:
            break
        chosen.append(passage)
    place = round(depth * len(chosen))
    chosen.insert(place, gold)
    body = "\n".join(_document(i + 1, passage) for i, passage in enumerate(chosen))
    facts = {"depth": depth, "length": length, "documents": len(chosen), "row": index, "seed": seed}
    return Case("multi_document", opening + body + question, (answers,), 40, facts)


def _document(number: int, passage: Mapping[str, Any]) -> str:
    return f"Document [{number}](Title: {passage['title']}) {passage['text']}"


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
