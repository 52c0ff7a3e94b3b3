"""Decode speed behind long contexts in several context modes and budgets, in turns in one run.

    outrider bench context smollm2-135m --requests 8 --context 8192 --budgets 1024

Every request has its own prompt; prompts are computed once and found in the prefix cache afterwards, so that what is
timed is decoding: from the moment when every request has its first token to the end. A figure is the median of the
rounds, ratios are taken within a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from time import perf_counter
from typing import Any

from outrider.api.llm import LLM
from outrider.api.outputs import RequestMetrics
from outrider.bench.eval_cases import fill, paragraphs
from outrider.bench.eval_retrieval import key_value_retrieval
from outrider.bench.record import note
from outrider.bench.speed import rotate
from outrider.errors import ConfigError
from outrider.memory.report import ContextReport
from outrider.models.cache import entry_bytes
from outrider.models.spec import DecoderSpec
from outrider.types import SamplingParams

#: Ways to read by name: what the table of context_config says beside the budget.
MODES: Mapping[str, Mapping[str, Any]] = {
    "full": {"mode": "full"},
    "sparse": {"mode": "sparse"},
    "fresh": {"mode": "sparse", "sticky": 0.0},
    "shared": {"mode": "sparse", "group": 0},
    "window": {"mode": "sparse", "selector": "window"},
    "bounded": {"mode": "bounded"},
    "lossless": {"mode": "lossless"},
}


@dataclass(frozen=True)
class Way:
    """A mode at a budget."""

    name: str
    budget: int | None  # None: all

    def config(self) -> dict[str, Any]:
        """As context_config."""
        return {**MODES[self.name], **({} if self.budget is None else {"budget": self.budget})}


@dataclass
class Round:
    """One way's answers in one round. tokens and seconds: of decoding, once every request has its first token."""

    answers: list[list[int]]
    metrics: list[RequestMetrics]
    tokens: int
    seconds: float
    report: ContextReport
    busy_s: float  # of all steps

    @property
    def speed(self) -> float:
        """Tokens per second of all requests together."""
        return self.tokens / self.seconds

    @property
    def select_share(self) -> float:
        """Share of the steps' time that selecting took."""
        return self.report.select_s / self.busy_s


@dataclass
class Cell:
    """One row of the table."""

    way: Way
    rounds: list[Round] = field(default_factory=list)

    def row(self, reference: Cell, tokens: int) -> dict[str, Any]:
        """The record's row. `identical` compares with the reference's answers, token by token."""
        ratios = [mine.speed / theirs.speed for mine, theirs in zip(self.rounds, reference.rounds, strict=True)]
        seen = [metrics.context for r in self.rounds for metrics in r.metrics]
        drafts = [metrics.speculative.acceptance_length for r in self.rounds for metrics in r.metrics]
        pairs = [
            (mine, theirs)
            for a, b in zip(self.rounds, reference.rounds, strict=True)
            for mine, theirs in zip(a.answers, b.answers, strict=True)
        ]
        return {
            "mode": self.way.name,
            "budget": self.way.budget,
            "context_tokens": tokens,
            "requests": len(self.rounds[0].answers),
            "output_tokens": sum(map(len, self.rounds[0].answers)),
            "output_tokens_per_second": median(r.speed for r in self.rounds),
            "ratio_to_" + reference.way.name: median(ratios),
            "read_share": mean([s.read_entries / s.known_entries for s in seen if s.known_entries]),
            "captured_mass": mean([s.captured_mass for s in seen if s.captured_mass is not None]),
            "overlap": mean([s.overlap for s in seen if s.overlap is not None]),
            "select_share": median(r.select_share for r in self.rounds),
            "acceptance_length": mean(drafts),
            "selector_bytes": self.rounds[0].report.selector_bytes,
            "identical": all(mine == theirs for mine, theirs in pairs),
        }


def parse_ways(names: Sequence[str], budgets: Sequence[int]) -> list[Way]:
    """The modes, each at every budget; full attention has none."""
    for name in names:
        if name not in MODES:
            raise ConfigError.unknown(name, MODES, "--modes")
    return [Way(name, budget) for name in names for budget in ([None] if name == "full" else budgets)]


def kv_bytes(spec: DecoderSpec, dtype: str, kv_dtype: str, tokens: int) -> int:
    """Memory for the KV of so many tokens, of the type that the options mean on a CPU."""
    kind = kv_dtype if kv_dtype != "auto" else "float32" if dtype == "float32" else "bfloat16"
    return tokens * spec.num_layers * entry_bytes(spec.num_kv_heads, spec.head_dim, kind)


def make_prompts(llm: LLM, text: str | None, count: int, tokens: int) -> list[list[int]]:
    """`count` different prompts of exactly `tokens` tokens: prose to go on with, or random pairs without a text."""

    def counted(words: str) -> int:
        return len(llm.tokenizer.encode(words))

    if text is None:
        made = [key_value_retrieval(None, 2 * tokens, 0.5, counted, seed).prompt for seed in range(count)]
    else:
        parts = paragraphs(text)
        made = ["\n\n".join(fill(parts, 2 * tokens, counted, seed * len(parts) // count)) for seed in range(count)]
    return [list(llm.tokenizer.encode(prompt))[:tokens] for prompt in made]


def measure(
    llm: LLM, ways: Sequence[Way], prompts: Sequence[Sequence[int]], max_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """A row per way. The first round of all is not counted: it computes the prompts."""
    answer(llm, ways[0], prompts, 2)
    cells = [Cell(way) for way in ways]
    for turn in range(repeats):
        for cell in rotate(cells, turn):
            done = answer(llm, cell.way, prompts, max_tokens)
            cell.rounds.append(done)
            note(f"{cell.way.name} {cell.way.budget or ''}: {done.speed:.1f} tokens/s")
    return [cell.row(cells[0], len(prompts[0])) for cell in cells]


def answer(llm: LLM, way: Way, prompts: Sequence[Sequence[int]], max_tokens: int) -> Round:
    """Answer all prompts together. End tokens are passed over, so that every way decodes as much."""
    llm.set_context_config(way.config())
    core, params = llm.core, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    sequences = [sequence for prompt in prompts for sequence in core.samples(core.request(prompt, params))]
    metrics = {sequence.request.id: RequestMetrics() for sequence in sequences}
    core.engine.add(sequences)

    def step() -> None:
        for delta in core.engine.step():
            metrics[delta.request_id].add(delta, 0.0)

    while any(not sequence.output for sequence in sequences):
        step()
    before, started = sum(len(sequence.tokens) for sequence in sequences), perf_counter()
    while core.engine.scheduler.busy:
        step()
    seconds, tokens = perf_counter() - started, sum(len(sequence.tokens) for sequence in sequences) - before
    report = llm.speculation_report()
    busy_s = report.draft_s + report.verify_s + report.overhead_s
    answers = [sequence.output for sequence in sequences]
    return Round(answers, list(metrics.values()), tokens, seconds, report.context, busy_s)


def mean(values: Sequence[float]) -> float | None:
    """Their mean; None for none."""
    return fmean(values) if values else None
