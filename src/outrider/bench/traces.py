"""Recorded answers, so that policies are compared offline: what the target said, and what each drafter would have said.

A greedy draft is right until the first place where the drafter's own best token behind the true text differs from the
target's. One pass of the drafter over the finished answer therefore tells every draft it could have made, at any
position and of any depth. Drafters without a model (`ngram`, `suffix`) are run for real on the recorded tokens.

    python scripts/record_traces.py smollm2-135m --out traces.jsonl
    outrider bench simulate --traces traces.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import exp
from pathlib import Path

from outrider.api.llm import LLM
from outrider.bench.workloads import Prompt
from outrider.errors import ConfigError
from outrider.types import SamplingParams

#: For every output token: a drafter's best guess behind the true text, and its probability of it.
Guesses = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Trace:
    """One answered prompt. `guesses`: by name of a drafter with a model, one entry per output token."""

    task: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    guesses: Mapping[str, Guesses] = field(default_factory=dict)


def record_answers(llm: LLM, prompts: Sequence[Prompt], max_tokens: int, batch: int = 8) -> list[Trace]:
    """Answer every prompt greedily, `batch` at a time; prompts that the model's context does not hold are left out."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    traces: list[Trace] = []
    longest = llm.core.resolved.max_model_len - max_tokens
    for at in range(0, len(prompts), batch):
        chats = [(p.task, llm.tokenizer.chat([{"role": "user", "content": p.text}])) for p in prompts[at : at + batch]]
        fitting = [(task, ids) for task, ids in chats if len(ids) <= longest]
        outputs = llm.generate([ids for _, ids in fitting], params) if fitting else []
        for (task, ids), output in zip(fitting, outputs, strict=True):
            traces.append(Trace(task, tuple(ids), tuple(output.outputs[0].token_ids)))
    return traces


def add_guesses(llm: LLM, name: str, traces: Iterable[Trace]) -> list[Trace]:
    """The traces with what `llm`, as a drafter called `name`, would have guessed at every position."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    told = []
    for trace in traces:
        scored = llm.generate([[*trace.prompt, *trace.output]], params)[0].prompt_logprobs or []
        best = [entry.top[0] for entry in scored[len(trace.prompt) :] if entry is not None]
        guesses = tuple((token, exp(logprob)) for token, logprob in best)
        told.append(Trace(trace.task, trace.prompt, trace.output, {**trace.guesses, name: guesses}))
    return told


def write_traces(path: Path, traces: Iterable[Trace]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(asdict(trace)) + "\n" for trace in traces), encoding="utf-8")


def read_traces(path: Path) -> list[Trace]:
    """What `write_traces` wrote; ConfigError for anything else."""
    try:
        return [_trace(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a file of traces", "traces") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no traces ({type(error).__name__}: {error}); record some with scripts/record_traces.py",
            "traces",
        ) from None


def _trace(row: Mapping[str, object]) -> Trace:
    guesses = {name: tuple((int(t), float(c)) for t, c in told) for name, told in row["guesses"].items()}  # type: ignore[attr-defined]
    if any(len(told) != len(row["output"]) for told in guesses.values()):  # type: ignore[arg-type]
        raise ValueError("a drafter has not one guess per output token")
    return Trace(str(row["task"]), tuple(row["prompt"]), tuple(row["output"]), guesses)  # type: ignore[arg-type]
