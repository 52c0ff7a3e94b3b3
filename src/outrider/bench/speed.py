"""Decode speed, acceptance and time per phase, for several ways to speculate, in turns in one run.

    outrider bench speed smollm2-135m --modes plain,ngram --concurrency 1,8 --requests 4 --repeats 3

Every mode answers the same prompts in every round; a figure is the median of the rounds, and ratios are taken within a
round. Answers are compared with those of the first mode, token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from outrider.api.llm import LLM
from outrider.api.outputs import RequestOutput, SpeculativeMetrics
from outrider.bench.record import note, percentile
from outrider.bench.workloads import Prompt
from outrider.errors import ConfigError
from outrider.speculation.report import DrafterReport, SpeculationReport
from outrider.types import SamplingParams

#: Ways to speculate by name; a table of speculative_config may stand instead of a name.
MODES: Mapping[str, Mapping[str, Any] | str | None] = {
    "plain": None,
    "auto": "auto",
    "ngram": {"drafters": ["ngram"], "num_speculative_tokens": 4},
    "suffix": {"drafters": ["suffix"], "num_speculative_tokens": 4},
    "majority": {"drafters": ["ngram", "suffix"], "vote": "majority", "num_speculative_tokens": 4},
    "trend": {
        "drafters": ["ngram", "suffix"],
        "vote": "majority",
        "length": "trend",
        "num_speculative_tokens": [1, 8],
    },
    "hedge": {"drafters": ["ngram", "suffix"], "vote": "hedge", "num_speculative_tokens": 4},
    "goodput": {
        "drafters": ["ngram", "suffix"],
        "vote": "hedge",
        "length": "goodput",
        "num_speculative_tokens": [0, 8],
    },
}


@dataclass(frozen=True)
class Mode:
    """One way to speculate."""

    name: str
    config: Mapping[str, Any] | str | None

    @classmethod
    def parse(cls, text: str) -> Mode:
        """A mode by its name."""
        if text not in MODES:
            raise ConfigError.unknown(text, MODES, "--modes")
        return cls(text, MODES[text])


@dataclass
class Round:
    """One mode's answers to one group of prompts in one round."""

    seconds: float
    outputs: list[RequestOutput]
    report: SpeculationReport

    @property
    def tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(len(sample.token_ids) for output in self.outputs for sample in output.outputs)

    @property
    def decode_speed(self) -> float:
        """Tokens per second and stream behind the first ones: what speculation speeds up, prompts left out."""
        spans = [((o.metrics.finished_s or 0) - (o.metrics.first_token_s or 0)) for o in self.outputs]
        return (self.tokens - len(self.outputs)) / max(sum(spans), 1e-9)

    @property
    def answers(self) -> list[list[int]]:
        """Token ids of every sample."""
        return [sample.token_ids for output in self.outputs for sample in output.outputs]


@dataclass
class Case:
    """One cell of the table: a mode at a concurrency on a task, over all rounds."""

    mode: str
    concurrency: int
    task: str
    rounds: list[Round] = field(default_factory=list)

    @property
    def report(self) -> SpeculationReport:
        """What speculation did in the last round."""
        return self.rounds[-1].report

    def row(self, reference: Case) -> dict[str, Any]:
        """The record's row; the ratio is the median over rounds of this mode's speed over the reference's."""
        outputs = [output for r in self.rounds for output in r.outputs]
        speculative = total(outputs)
        speeds = [r.tokens / r.seconds for r in self.rounds]
        ratios = [s / (r.tokens / r.seconds) for s, r in zip(speeds, reference.rounds, strict=True)]
        first = [1e3 * (output.metrics.first_token_s or 0) for output in outputs]
        each = [per_token_ms(output) for output in outputs]
        reports = [r.report for r in self.rounds]
        per_step = 1e3 / max(1, sum(report.steps for report in reports))
        return {
            "mode": self.mode,
            "concurrency": self.concurrency,
            "task": self.task,
            "requests": len(self.rounds[0].outputs),
            "output_tokens": self.rounds[0].tokens,
            "output_tokens_per_second": median(speeds),
            "ratio_to_" + reference.mode: median(ratios),
            "decode_tokens_per_second": median(r.decode_speed for r in self.rounds),
            "decode_ratio_to_" + reference.mode: median(
                mine.decode_speed / theirs.decode_speed
                for mine, theirs in zip(self.rounds, reference.rounds, strict=True)
            ),
            "ttft_ms_p50": percentile(first, 50),
            "ttft_ms_p99": percentile(first, 99),
            "tpot_ms_p50": percentile(each, 50),
            "tpot_ms_p99": percentile(each, 99),
            "num_drafts": speculative.num_drafts,
            "num_draft_tokens": speculative.num_draft_tokens,
            "num_accepted_tokens": speculative.num_accepted_tokens,
            "acceptance_length": speculative.acceptance_length,
            "per_position": speculative.per_position,
            "draft_ms": per_step * sum(report.draft_s for report in reports),
            "verify_ms": per_step * sum(report.verify_s for report in reports),
            "overhead_ms": per_step * sum(report.overhead_s for report in reports),
            "control_ms": per_step * sum(report.control_s for report in reports),
            "drafters": [drafter_row(drafter) for drafter in self.report.drafters],
            "lengths": dict(self.report.lengths),
            "identical_to_" + reference.mode: all(
                mine.answers == theirs.answers for mine, theirs in zip(self.rounds, reference.rounds, strict=True)
            ),
        }


def rows_of(cases: Sequence[Case], modes: int) -> list[dict[str, Any]]:
    """The record's rows; the first of every `modes` cases is what the others are compared with."""
    return [case.row(cases[index - index % modes]) for index, case in enumerate(cases)]


def measure(
    llm: LLM,
    modes: Sequence[Mode],
    prompts: Sequence[Prompt],
    levels: Sequence[int],
    *,
    max_tokens: int,
    repeats: int,
    by_task: bool,
) -> list[Case]:
    """All modes at every concurrency, once each has compiled and touched what it needs."""
    for mode in modes:
        answer(llm, mode, prompts[:1], 1, 8)
    cases: list[Case] = []
    for level in levels:
        cases += run_cases(
            llm, modes, prompts, concurrency=level, max_tokens=max_tokens, repeats=repeats, by_task=by_task
        )
    return cases


def run_cases(
    llm: LLM,
    modes: Sequence[Mode],
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    max_tokens: int,
    repeats: int,
    by_task: bool,
) -> list[Case]:
    """All modes on the mixed stream, then on every task alone where asked for; within a group they take turns."""
    groups = {"mixed": list(prompts)}
    if by_task:
        groups |= {task: [p for p in prompts if p.task == task] for task in dict.fromkeys(p.task for p in prompts)}
    done: list[Case] = []
    for task, members in groups.items():
        cases = [Case(mode.name, concurrency, task) for mode in modes]
        for turn in range(repeats):
            for mode, case in rotate(list(zip(modes, cases, strict=True)), turn):
                answered = answer(llm, mode, members, concurrency, max_tokens)
                case.rounds.append(answered)
                note(f"{task} x{concurrency} {mode.name}: {answered.tokens / answered.seconds:.1f} tokens/s")
        done += cases
    return done


def answer(llm: LLM, mode: Mode, prompts: Sequence[Prompt], concurrency: int, max_tokens: int) -> Round:
    """Answer the prompts in one mode, `concurrency` at a time; answers end where the model ends them.

    Going on behind an end token would flatter speculation: what follows it mostly repeats itself.
    """
    llm.set_speculative_config(mode.config)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    messages = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    started, outputs = perf_counter(), []
    for at in range(0, len(messages), concurrency):
        outputs += llm.chat(messages[at : at + concurrency], params)
    seconds = perf_counter() - started
    return Round(seconds, outputs, llm.speculation_report())


def drafter_row(drafter: DrafterReport) -> dict[str, Any]:
    """One drafter's part of a row."""
    wanted = ("name", "rounds", "proposals", "agreed_tokens", "drafts", "draft_tokens", "accepted_tokens")
    told = {key: getattr(drafter, key) for key in (*wanted, "votes_won", "weight", "off")}
    return {**told, "acceptance_length": drafter.acceptance_length, "time_ms": 1e3 * drafter.time_s}


def rotate(items: list[Any], turn: int) -> list[Any]:
    """Another order every round, so that no mode always runs behind the same one."""
    at = turn % len(items)
    return items[at:] + items[:at]


def total(outputs: Sequence[RequestOutput]) -> SpeculativeMetrics:
    """Speculation over several answers."""
    result = SpeculativeMetrics()
    for output in outputs:
        one = output.metrics.speculative
        result.num_drafts += one.num_drafts
        result.num_draft_tokens += one.num_draft_tokens
        result.num_accepted_tokens += one.num_accepted_tokens
        longest = max(len(result.accepted_per_position), len(one.accepted_per_position))
        result.accepted_per_position += [0] * (longest - len(result.accepted_per_position))
        for position, count in enumerate(one.accepted_per_position):
            result.accepted_per_position[position] += count
    return result


def per_token_ms(output: RequestOutput) -> float:
    """Milliseconds per token behind the first."""
    tokens = sum(len(sample.token_ids) for sample in output.outputs)
    first, last = output.metrics.first_token_s or 0.0, output.metrics.finished_s or 0.0
    return 1e3 * (last - first) / max(1, tokens - 1)
