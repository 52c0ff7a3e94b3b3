"""Decode speed behind long contexts in several context modes and budgets, in turns in one run.

    outrider bench context smollm2-135m --requests 8 --context 8192 --budgets 1024

Every request has its own prompt; prompts are computed once and found in the prefix cache afterwards, so that what is
timed is decoding: from the moment when every request has its first token to the end. A figure is the median of the
rounds, ratios are taken within a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

from outrider.api.llm import LLM
from outrider.api.outputs import RequestMetrics
from outrider.bench.eval_cases import fill, paragraphs
from outrider.bench.eval_plots import plot_moved, plot_timeline
from outrider.bench.eval_retrieval import key_value_retrieval
from outrider.bench.record import note
from outrider.bench.speed import rotate
from outrider.bench.timeline import Timeline
from outrider.errors import CapacityError, ConfigError
from outrider.memory.report import ContextReport
from outrider.models.cache import entry_bytes
from outrider.models.spec import DecoderSpec
from outrider.types import SamplingParams

ALL = -1  # slow layers: every one
#: What is timed is how long answers go on: the few full steps that an answer begins with would weigh too much.
GOING_ON: Mapping[str, Any] = {"first_full": 0}

#: Ways to read by name: what the table of context_config says beside the budget.
MODES: Mapping[str, Mapping[str, Any]] = {
    "full": {"mode": "full"},
    "sparse": {"mode": "sparse", **GOING_ON},
    "fresh": {"mode": "sparse", "sticky": 0.0, **GOING_ON},
    "grouped": {"mode": "sparse", "group": 6, "taps": 0, **GOING_ON},
    "single": {"mode": "sparse", "group": 6, "taps": 1, **GOING_ON},
    "layers": {"mode": "sparse", "group": 1, **GOING_ON},
    "window": {"mode": "sparse", "selector": "window", **GOING_ON},
    "bounded": {"mode": "bounded", **GOING_ON},
    "lossless": {"mode": "lossless"},  # its drafts select from the first token on anyway
}

#: Ways to place KV, with a slow tier; the first is the reference, the next three are the published ablation.
TIERS: Mapping[str, Mapping[str, Any]] = {
    "resident": {"mode": "sparse", "slow_layers": 0, **GOING_ON},
    "offloaded": {
        "mode": "sparse",
        "slow_layers": ALL,
        "elastic": False,
        "prefetch": 0,
        **GOING_ON,
    },  # the selector alone
    "elastic": {"mode": "sparse", "slow_layers": ALL, **GOING_ON},  # + elastic loading, ahead of the layers
    "tiered": {"mode": "sparse", **GOING_ON},  # + as few slow layers as the memory asks for
    "reread": {
        "mode": "sparse",
        "elastic": False,
        "prefetch": 0,
        **GOING_ON,
    },  # of as few: every selected row, every step
}


@dataclass(frozen=True)
class Way:
    """A mode at a budget."""

    name: str
    budget: int | None  # None: all
    kv_memory: int | None = None  # bytes of fast memory for KV, where there is a slow tier

    def config(self, layers: int) -> dict[str, Any]:
        """As context_config, for a model of so many layers."""
        table = {**MODES, **TIERS}[self.name]
        named = {key: layers if value == ALL and key == "slow_layers" else value for key, value in table.items()}
        budget = {} if self.budget is None else {"budget": self.budget}
        free = self.kv_memory is None or "slow_layers" in table  # a given number of slow layers, whatever that takes
        limit = {} if free else {"kv_memory": self.kv_memory}
        return {**named, **budget, **limit}


@dataclass
class Round:
    """One way's answers in one round. tokens and seconds: of decoding, once every request has its first token."""

    answers: list[list[int]]
    metrics: list[RequestMetrics]
    tokens: int
    seconds: float
    report: ContextReport
    busy_s: float  # of all steps
    steps: int
    tiers: Mapping[str, float]  # what moved while decoding: of TierReport's sums
    resident_bytes: int  # of KV in fast memory at the end
    moved: Sequence[int] = ()  # bytes loaded in each step

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
            **self._tiers(),
            "identical": all(mine == theirs for mine, theirs in pairs),
        }

    def _tiers(self) -> dict[str, Any]:
        """Columns of the slow tier, per step of decoding; empty without one."""
        if not self.rounds[0].tiers:
            return {}
        loaded = [r.tiers["loaded_bytes"] / r.steps for r in self.rounds]
        exposed = [1e3 * r.tiers["exposed_s"] / r.steps for r in self.rounds]
        busy = [1e3 * r.tiers["busy_s"] / r.steps for r in self.rounds]
        return {
            "slow_layers": self.rounds[-1].tiers["slow_layers"],
            "resident_bytes": self.rounds[-1].resident_bytes,
            "moved_bytes": median(loaded),
            "exposed_wait_ms": median(exposed),
            "transfer_ms": median(busy),
        }


def parse_ways(names: Sequence[str], budgets: Sequence[int], kv_memory: int | None = None) -> list[Way]:
    """The modes, each at every budget; full attention has none. kv_memory: given where there is a slow tier."""
    known = {**MODES, **({} if kv_memory is None else TIERS)}
    for name in names:
        if name in TIERS and name not in known:
            raise ConfigError(f"--modes {name} needs a slow tier: give --kv-memory and --kv-path", "--modes")
        if name not in known:
            raise ConfigError.unknown(name, known, "--modes")
    return [Way(name, budget, kv_memory) for name in names for budget in ([None] if name == "full" else budgets)]


def parse_share(text: str, need: int) -> int:
    """Bytes from "25%" of what is needed."""
    digits = text.strip().removesuffix("%")
    if not digits.replace(".", "", 1).isdecimal() or not 0 < float(digits) <= 100:
        raise ConfigError(
            f"--kv-memory = {text!r} is refused; give bytes like 256MiB, or a share like 25%", "--kv-memory"
        )
    return int(need * float(digits) / 100)


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


def measure_cells(
    llm: LLM, ways: Sequence[Way], prompts: Sequence[Sequence[int]], max_tokens: int, repeats: int
) -> list[Cell]:
    """The rounds of every way, in turns."""
    answer(llm, ways[0], prompts, 2)
    cells = [Cell(way) for way in ways]
    for turn in range(repeats):
        for cell in rotate(cells, turn):
            done = answer(llm, cell.way, prompts, max_tokens)
            cell.rounds.append(done)
            note(f"{cell.way.name} {cell.way.budget or ''}: {done.speed:.1f} tokens/s")
    return cells


def answer(llm: LLM, way: Way, prompts: Sequence[Sequence[int]], max_tokens: int) -> Round:
    """Answer all prompts together. End tokens are passed over, so that every way decodes as much."""
    llm.set_context_config(way.config(llm.core.spec.num_layers))
    return run(llm, prompts, max_tokens)


def watch(llm: LLM, way: Way, prompts: Sequence[Sequence[int]]) -> list[tuple[str, int, float, float]]:
    """Loads and layers of a late step of a few: (kind, layer, start, stop) in seconds since the step began."""
    llm.set_context_config(way.config(llm.core.spec.num_layers))
    with Timeline(llm) as timeline:
        run(llm, prompts, 12)
    return timeline.last_step()


def draw(llm: LLM, cells: Sequence[Cell], prompts: Sequence[Sequence[int]], folder: Path) -> None:
    """Pictures of what moved: bytes of every step by way, and loads against layers for the first way that moves."""
    ways = [cell for cell in cells if sum(cell.rounds[-1].moved)]
    if not ways:
        return
    read = llm.core.place.row_bytes * len(prompts)
    entries = {cell.way.budget or 0 for cell in ways}
    steps = {f"{cell.way.name} {cell.way.budget or ''}": cell.rounds[-1].moved for cell in ways}
    slow = max(cell.rounds[-1].tiers["slow_layers"] for cell in ways)
    plot_moved(steps, int(read * max(entries) * slow), folder / "moved.png")
    best = next((cell for cell in ways if cell.way.name == "tiered"), ways[0])
    plot_timeline(watch(llm, best.way, prompts), folder / "timeline.png")


def run(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> Round:
    """Answer all prompts together, in whatever way is set."""
    core, params = llm.core, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    sequences = [sequence for prompt in prompts for sequence in core.samples(core.request(prompt, params))]
    metrics = {sequence.request.id: RequestMetrics() for sequence in sequences}
    core.engine.add(sequences)

    def step() -> None:
        for delta in core.engine.step():
            metrics[delta.request_id].add(delta, 0.0)

    while any(not sequence.output for sequence in sequences):
        if not core.engine.scheduler.busy:
            raise CapacityError("a prompt could not be answered: there is too little memory; raise --kv-memory")
        step()
    before, begun, resident = sum(len(sequence.tokens) for sequence in sequences), traffic(llm), 0
    steps, moved, started = core.engine.steps, [], perf_counter()
    while core.engine.scheduler.busy:
        loaded = core.place.loaded_bytes
        step()
        moved.append(core.place.loaded_bytes - loaded)
        resident = max(resident, core.place.used())
    seconds, tokens = perf_counter() - started, sum(len(sequence.tokens) for sequence in sequences) - before
    report = llm.speculation_report()
    busy_s = report.draft_s + report.verify_s + report.overhead_s
    answers = [sequence.output for sequence in sequences]
    spent = {name: value - begun[name] * (name != "slow_layers") for name, value in traffic(llm).items()}
    done = core.engine.steps - steps
    return Round(answers, list(metrics.values()), tokens, seconds, report.context, busy_s, done, spent, resident, moved)


def traffic(llm: LLM) -> dict[str, float]:
    """The slow tier's sums so far; empty where there is none."""
    report = llm.core.place.report()
    names = ("slow_layers", "loaded_bytes", "stored_bytes", "busy_s", "exposed_s")
    return {} if report is None else {name: getattr(report, name) for name in names}


def mean(values: Sequence[float]) -> float | None:
    """Their mean; None for none."""
    return fmean(values) if values else None
