"""How much of what drafters guess is accepted, by kind of task, and what a drafted token costs; in the real engine.

Evaluation prompts of three kinds (chat: Spec-Bench's multi_turn, both turns; maths: GSM8K's test split; code:
HumanEval) are answered greedily with chains of a fixed length. All ways to draft answer the same prompts with the same
tokens, so that they are compared prompt by prompt; intervals come from resampling prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.api.llm import LLM
from outrider.api.outputs import RequestOutput
from outrider.bench.record import note
from outrider.errors import ConfigError
from outrider.types import SamplingParams

Messages = list[dict[str, str]]
Counts = NDArray[np.int64]  # [prompts, 3]: drafts, accepted tokens, output tokens

RESAMPLES = 2000  # of an interval
CODE = "Complete this Python function:\n\n```python\n{}```"


@dataclass(frozen=True)
class Suite:
    """Prompts of one kind. `openings` are first turns; `follow_ups` (first, second) go on behind an answer."""

    openings: Sequence[str]
    follow_ups: Sequence[tuple[str, str]] = ()


def load_suites(folder: Path, prompts: int) -> dict[str, Suite]:
    """At most so many prompts of every kind, from the files of a data folder."""
    turns = [row["turns"] for row in _rows(folder / "spec_bench.jsonl") if row["task"] == "multi_turn"]
    openings = [turn[0] for turn in turns][:prompts]
    behind = [(turn[0], turn[1]) for turn in turns if len(turn) > 1]
    maths = [row["question"] for row in _rows(folder / "gsm8k_test.jsonl")]
    code = [CODE.format(row["prompt"]) for row in _rows(folder / "humaneval.jsonl")]
    return {
        "chat": Suite(openings, behind[: prompts - len(openings)]),
        "maths": Suite(maths[:prompts]),
        "code": Suite(code[:prompts]),
    }


def conversations(llm: LLM, suite: Suite, params: SamplingParams, concurrency: int) -> list[Messages]:
    """The prompts of a suite; second turns stand behind the model's own answer to the first."""
    opened = [[{"role": "user", "content": text}] for text in suite.openings]
    behind = [[{"role": "user", "content": first}] for first, _ in suite.follow_ups]
    answers = answer(llm, None, behind, params, concurrency)
    return opened + [
        [*first, {"role": "assistant", "content": output.outputs[0].text}, {"role": "user", "content": second}]
        for first, output, (_, second) in zip(behind, answers, suite.follow_ups, strict=True)
    ]


def answer(
    llm: LLM,
    config: Mapping[str, Any] | None,
    prompts: Sequence[Messages],
    params: SamplingParams,
    concurrency: int,
) -> list[RequestOutput]:
    """Answers of one way to draft, so many at a time."""
    llm.set_speculative_config(config)
    outputs: list[RequestOutput] = []
    for at in range(0, len(prompts), concurrency):
        outputs += llm.chat(prompts[at : at + concurrency], params)
    return outputs


def count(outputs: Sequence[RequestOutput]) -> Counts:
    """What was drafted and accepted for every prompt."""
    seen = [(output.metrics.speculative, len(output.outputs[0].token_ids)) for output in outputs]
    return np.array([(s.num_drafts, s.num_accepted_tokens, tokens) for s, tokens in seen], np.int64).reshape(-1, 3)


def acceptance_length(sums: NDArray) -> NDArray:
    """1 + accepted / drafts of summed counts [..., 3]."""
    return 1 + sums[..., 1] / np.maximum(1, sums[..., 0])


def tokens_per_step(sums: NDArray) -> NDArray:
    """Output tokens per pass of the target: counts what a drafter without an idea does not gain."""
    return sums[..., 2] / np.maximum(1, sums[..., 2] - sums[..., 1])


def accepted_per_draft(sums: NDArray) -> NDArray:
    """Accepted tokens per draft of summed counts."""
    return acceptance_length(sums) - 1


def interval(figure: Callable[[NDArray], NDArray], *counts: Counts) -> tuple[float, float]:
    """95 % interval of a figure of one way, or, of two ways on the same prompts, of their ratio - 1."""
    picks = np.random.default_rng(0).integers(len(counts[0]), size=(RESAMPLES, len(counts[0])))
    low, high = np.percentile(_compare(figure, [one[picks].sum(axis=1) for one in counts]), (2.5, 97.5))
    return float(low), float(high)


def gain(figure: Callable[[NDArray], NDArray], new: Counts, old: Counts) -> dict[str, Any]:
    """By how much a figure is larger, prompt by prompt: share and its 95 % interval."""
    value = float(_compare(figure, [new.sum(axis=0), old.sum(axis=0)]))
    return {"gain": round(value, 4), "interval": [round(bound, 4) for bound in interval(figure, new, old)]}


def measure(
    llm: LLM,
    ways: Mapping[str, Mapping[str, Any]],
    suites: Mapping[str, Suite],
    *,
    max_tokens: int,
    concurrency: int,
) -> dict[str, dict[str, Counts]]:
    """Counts by way and kind of task, with all of them together as "mixed"."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    found: dict[str, dict[str, Counts]] = {way: {} for way in ways}
    for task, suite in suites.items():
        prompts = conversations(llm, suite, params, concurrency)
        texts: dict[str, list[list[int]]] = {}
        for way, config in ways.items():
            outputs = answer(llm, config, prompts, params, concurrency)
            found[way][task] = count(outputs)
            texts[way] = [output.outputs[0].token_ids for output in outputs]
            note(f"{task} {way}: {float(acceptance_length(found[way][task].sum(axis=0))):.2f}")
        if any(tokens != texts[next(iter(ways))] for tokens in texts.values()):
            raise ConfigError(f"answers to {task} differ between ways to draft; report this with the command", "ways")
    for tasks in found.values():
        tasks["mixed"] = np.concatenate(list(tasks.values()))
    return found


def rows(found: Mapping[str, Mapping[str, Counts]]) -> list[dict[str, Any]]:
    """The record's rows."""
    return [_row(way, task, counts) for way, tasks in found.items() for task, counts in tasks.items()]


def token_cost(llm: LLM, config: Mapping[str, Any], prompts: Sequence[Messages], repeats: int = 3) -> dict[str, float]:
    """What a drafted token costs, one stream, in turns with plain decoding: all of the drafter's time over its tokens.

    `share` is the median over turns of that, over a plain step of the target.
    """
    params, shares, drafting, stepping = SamplingParams(temperature=0, max_tokens=64), [], [], []
    for _ in range(repeats):
        answer(llm, None, prompts, params, 1)
        plain = llm.speculation_report()
        stepping.append(1e3 * plain.verify_s / max(1, plain.steps))
        answer(llm, config, prompts, params, 1)
        drafter = llm.speculation_report().drafters[0]
        drafting.append(1e3 * drafter.time_s / max(1, drafter.draft_tokens))
        shares.append(drafting[-1] / stepping[-1])
    return {"token_ms": median(drafting), "step_ms": median(stepping), "share": median(shares)}


def _compare(figure: Callable[[NDArray], NDArray], sums: Sequence[NDArray]) -> NDArray:
    if len(sums) == 1:
        return figure(sums[0])
    return figure(sums[0]) / np.maximum(1e-9, figure(sums[1])) - 1


def _row(way: str, task: str, counts: Counts) -> dict[str, Any]:
    drafts, accepted, tokens = counts.sum(axis=0).tolist()
    row: dict[str, Any] = {"way": way, "task": task, "prompts": len(counts), "output_tokens": tokens}
    row |= {"num_drafts": drafts, "num_accepted_tokens": accepted}
    for name, figure in (("acceptance_length", acceptance_length), ("tokens_per_step", tokens_per_step)):
        row[name] = round(float(figure(counts.sum(axis=0))), 4)
        row[f"{name}_interval"] = [round(bound, 4) for bound in interval(figure, counts)]
    return row


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give --data a folder with it", "data") from None
    return [json.loads(line) for line in lines if line]
