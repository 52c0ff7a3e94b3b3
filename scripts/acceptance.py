"""Acceptance of drafters by kind of task, specialists against the generalist, and the cost of a drafted token.

    OUTRIDER_DATA=FOLDER python scripts/acceptance.py smollm2-135m --out acceptance.json
    OUTRIDER_DATA=FOLDER python scripts/acceptance.py smollm2-135m --heads runs/smollm2/heads/generalist --prompts 20
    OUTRIDER_DATA=FOLDER python scripts/acceptance.py smollm2-135m --cost-only        (half a minute on idle cores)

FOLDER holds spec_bench.jsonl, gsm8k_test.jsonl and humaneval.jsonl. Ways to draft: every head alone (those that come
with the model, or --heads), n-gram, suffix, and a vote of all. The last line is one JSON record.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider import LLM
from outrider.bench.acceptance import (
    accepted_per_draft,
    gain,
    load_suites,
    measure,
    rows,
    token_cost,
    tokens_per_step,
)
from outrider.bench.record import emit, new_record
from outrider.bench.workloads import data_folder
from outrider.drafters.shipped import shipped_heads
from outrider.errors import ConfigError, OutriderError
from outrider.models.load import load_model

MODEL_FREE = ("ngram", "suffix")


def ways_of(heads: Mapping[str, Path], depth: int) -> dict[str, dict[str, Any]]:
    """Every drafter alone, and a vote of all."""
    alone: dict[str, Any] = {name: {"name": "head", "path": str(folder)} for name, folder in heads.items()}
    alone |= {name: name for name in MODEL_FREE}
    ways: dict[str, dict[str, Any]] = {name: {"drafters": [entry]} for name, entry in alone.items()}
    ways["vote"] = {"drafters": list(alone.values()), "vote": "hedge"}
    return {name: {**way, "num_speculative_tokens": depth} for name, way in ways.items()}


def comparisons(found: Mapping[str, Mapping[str, Any]], heads: Sequence[str]) -> dict[str, Any]:
    """Every specialist over the generalist in its own domain, and the vote over the best drafter alone."""
    special = [name for name in heads if "generalist" in heads and name in found[name] and name != "generalist"]
    result: dict[str, Any] = {
        f"{name} over generalist, {name}, accepted per draft": gain(
            accepted_per_draft, found[name][name], found["generalist"][name]
        )
        for name in special
    }
    alone = [way for way in found if way != "vote"]
    best = max(alone, key=lambda way: float(tokens_per_step(found[way]["mixed"].sum(axis=0))))
    result[f"vote over {best}, mixed, tokens per step"] = gain(
        tokens_per_step, found["vote"]["mixed"], found[best]["mixed"]
    )
    return result


def show(record: Mapping[str, Any]) -> None:
    """The record for people."""
    for row in record["rows"]:
        length, (low, high) = row["acceptance_length"], row["acceptance_length_interval"]
        steps = f"{row['tokens_per_step']:.2f} a step"
        print(f"{row['task']:6} {row['way']:12} {length:.2f} ({low:.2f} - {high:.2f})  {steps}")
    for name, change in record["comparisons"].items():
        low, high = change["interval"]
        print(f"{name}: {change['gain']:+.1%} ({low:+.1%} to {high:+.1%})")
    for name, cost in record["cost"].items():
        print(f"{name}: {cost['token_ms']:.3f} ms a token, {cost['share']:.1%} of a step of {cost['step_ms']:.2f} ms")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--heads", type=Path, nargs="*", help="folders of heads; default: those of the model")
    parser.add_argument("--data", help="folder of evaluation prompts; default: OUTRIDER_DATA")
    parser.add_argument("--prompts", type=int, default=60, help="of every kind")
    parser.add_argument("--depth", type=int, default=4, help="tokens of a chain")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8, help="prompts at a time")
    parser.add_argument("--cost-only", action="store_true", help="measure what a drafted token costs and nothing else")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that was asked for."""
    folder = data_folder(given.data)
    if folder is None:
        raise ConfigError("give --data or OUTRIDER_DATA a folder of evaluation prompts", "data")
    loaded = load_model(given.model)
    heads = shipped_heads(loaded) if given.heads is None else {path.name: path for path in given.heads}
    ways, suites = ways_of(heads, given.depth), load_suites(folder, given.prompts)
    # Without cached prefixes: a head that takes over from another way would not see the states of a cached prompt.
    with LLM(loaded, speculative_config=None, max_model_len=2048, prefix_caching=False) as llm:
        first = [[{"role": "user", "content": suite.openings[0]}] for suite in suites.values()]
        cost = {name: token_cost(llm, ways[name], first) for name in heads}
        sizes = {"max_tokens": given.max_tokens, "concurrency": given.concurrency}
        found = {} if given.cost_only else measure(llm, ways, suites, **sizes)
    config = {"model": given.model, "depth": given.depth, "ways": ways, **sizes}
    compared = comparisons(found, list(heads)) if found else {}
    return new_record("acceptance", config, rows(found), comparisons=compared, cost=cost)


def main() -> None:
    """Print the figures, then the record."""
    given = parse()
    try:
        record = run(given)
    except OutriderError as error:
        raise SystemExit(f"acceptance.py: {error}") from None
    show(record)
    emit(record, given.out)


if __name__ == "__main__":
    main()
