"""Prometheus metrics: the engine's counters read at scrape time, times measured here. vLLM's names, our prefix.

Counters keep the engine's own cumulative values, so a scrape never misses or doubles anything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from outrider.server.backend import Backend
from outrider.server.snapshot import DrafterStats, Snapshot

PREFIX = "outrider:"
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
EACH = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.3, 0.4, 0.5, 1, 2, 5)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """All metrics of one server; `render` is the scrape."""

    def __init__(self, backend: Backend) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(backend))
        self.first = self._histogram("time_to_first_token_seconds", "From request to first token.", FIRST)
        self.each = Latencies(PREFIX + "inter_token_latency_seconds", "Time per token after the first.", EACH)
        self.registry.register(self.each)
        self.whole = self._histogram("e2e_request_latency_seconds", "From request to last token.", WHOLE)
        self.prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.generated = self._histogram("request_generation_tokens", "Generated tokens of a request.", TOKENS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens delivered.")
        self.finished = self._counter("request_success", "Samples that ended, by reason.", "finished_reason")
        self.refused = self._counter("request_refused", "Requests answered with an error, by code.", "code")
        self.cancelled = self._counter("request_cancelled", "Requests whose client left early.")

    def render(self) -> bytes:
        """The exposition format's text."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)


class Latencies(Collector):
    """A histogram that is cheap to feed, once for every token. One thread, the event loop's, observes."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name, self._text, self._buckets = name, text, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that occurred so many times."""
        self._counts[bisect_left(self._buckets, value)] += times
        self._sum += value * times

    def describe(self) -> list[Metric]:
        """Its name, before anything was observed."""
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        """Counts up to every bound."""
        bounds = [*map(floatToGoString, self._buckets), "+Inf"]
        counts = zip(bounds, accumulate(self._counts), strict=True)
        yield HistogramMetricFamily(self._name, self._text, buckets=list(counts), sum_value=self._sum)


class EngineCollector(Collector):
    """Reads the engine's snapshot once per scrape."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def describe(self) -> list[Metric]:
        """Nothing is read when registering."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Gauges and cumulative counters of this moment."""
        now = Snapshot.of(self._backend.stats())
        yield _gauge("num_requests_running", "Samples being decoded.", now.running)
        yield _gauge("num_requests_waiting", "Samples that wait.", now.waiting)
        yield _gauge("kv_cache_usage_perc", "Share of KV pages in use; 1 is full.", now.kv_usage)
        yield _gauge("kv_cache_touched_bytes", "Memory that KV pages have taken so far.", now.kv_bytes_touched)
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.prefix_cache_queries)
        yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", now.prefix_cache_hits)
        yield _counter("num_preemptions", "Samples set back for lack of pages.", now.preemptions)
        yield _counter("engine_steps", "Forward passes.", now.steps)
        yield from _speculation(now)
        yield from _tiers(now)
        yield from _context(now)
        yield from _kept(now)


def _speculation(now: Snapshot) -> Iterator[Metric]:
    yield _by_drafter("num_drafts", "Drafts verified.", now, "drafts")
    yield _by_drafter("num_draft_tokens", "Tokens proposed.", now, "draft_tokens")
    yield _by_drafter("num_accepted_tokens", "Proposed tokens that the target accepted.", now, "accepted_tokens")
    yield _by_drafter("votes_won", "Rounds won against another proposal.", now, "votes_won")
    yield _by_drafter("failures", "Failures of a drafter; they cost speed, never output.", now, "failures")
    yield _by_drafter("draft_seconds", "Time spent drafting.", now, "time_s")
    positions = CounterMetricFamily(
        PREFIX + "spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens by place in the draft.",
        labels=("drafter", "position"),
    )
    for drafter in now.drafters:
        for position, count in enumerate(drafter.per_position):
            positions.add_metric((drafter.name, str(position)), count)
    yield positions
    weights = GaugeMetricFamily(PREFIX + "spec_decode_vote_weight", "Share of the vote.", labels=("drafter",))
    lengths = GaugeMetricFamily(
        PREFIX + "spec_decode_acceptance_length", "1 + accepted / drafts since the start.", labels=("drafter",)
    )
    held = GaugeMetricFamily(
        PREFIX + "spec_decode_held_sequences", "Sequences that a drafter holds something for.", labels=("drafter",)
    )
    for drafter in now.drafters:
        weights.add_metric((drafter.name,), drafter.weight)
        lengths.add_metric((drafter.name,), drafter.acceptance_length)
        held.add_metric((drafter.name,), drafter.held)
    yield weights
    yield lengths
    yield held
    drafts = CounterMetricFamily(
        PREFIX + "spec_decode_drafts_by_length", "Drafts by number of tokens.", labels=("length",)
    )
    for length, count in sorted(now.lengths.items()):
        drafts.add_metric((str(length),), count)
    yield drafts
    yield _counter("spec_decode_verify_seconds", "Time spent verifying.", now.verify_s)
    yield _counter("spec_decode_overhead_seconds", "Time of neither drafting nor verifying.", now.overhead_s)


def _tiers(now: Snapshot) -> Iterator[Metric]:
    """Traffic of the KV tiers; empty while everything is resident."""
    names = {"loaded_bytes": "Bytes read from a tier.", "stored_bytes": "Bytes written to a tier."}
    names["exposed_wait_seconds"] = "Time that attention waited for a tier."
    names["busy_seconds"] = "Time that a tier's transfers took; what was not waited for was hidden."
    for name, text in names.items():
        family = CounterMetricFamily(f"{PREFIX}kv_tier_{name}", text, labels=("tier",))
        for tier, values in now.tiers.items():
            family.add_metric((tier,), values.get(name, 0))
        yield family
    layers = GaugeMetricFamily(f"{PREFIX}kv_tier_layers", "Layers whose KV is in a tier now.", labels=("tier",))
    for tier, values in now.tiers.items():
        layers.add_metric((tier,), values.get("slow_layers", 0))
    yield layers


def _context(now: Snapshot) -> Iterator[Metric]:
    """What attention read; silent about selections while there are none."""
    context = now.context
    yield _counter("context_read_entries", "Context entries that attention read per KV head.", context.read_entries)
    yield _counter("context_known_entries", "Context entries that there were.", context.known_entries)
    yield _counter("context_select_seconds", "Time spent selecting what to read.", context.select_s)
    if context.overlap is not None:
        yield _gauge("selection_overlap", "Share of selected entries that the step before read too.", context.overlap)
    if context.captured is not None:
        yield _gauge("selection_captured", "Share of attention believed to be in the selections.", context.captured)


def _kept(now: Snapshot) -> Iterator[Metric]:
    """Prompts that stay on disk for later starts; silent where none do."""
    kept = now.context.kept
    if kept is None:
        return
    yield _gauge("kept_prompts", "Prompts on disk.", kept["files"])
    yield _gauge("kept_prompts_tokens", "Tokens of the prompts on disk.", kept["tokens"])
    yield _gauge("kept_prompts_bytes", "Size of the prompts on disk.", kept["bytes"])
    yield _gauge("kept_prompts_limit_bytes", "Size that they may reach.", kept["limit"])
    yield _counter("kept_prompts_found", "Requests that began on a prompt from disk.", kept["found"])
    yield _counter("kept_prompts_written", "Prompts written to disk.", kept["written"])
    yield _counter("kept_prompts_removed", "Least recently used prompts that made room for others.", kept["removed"])
    yield _counter("kept_prompts_damaged", "Damaged prompts, deleted and computed again.", kept["damaged"])
    yield _counter("kept_prompts_failed", "Prompts that the disk did not take.", kept["failed"])
    yield _counter("kept_prompts_too_large", "Prompts larger than the limit.", kept["too_large"])


def _by_drafter(name: str, text: str, now: Snapshot, attribute: str) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}spec_decode_{name}", text, labels=("drafter",))
    for drafter in now.drafters:
        family.add_metric((drafter.name,), _value(drafter, attribute))
    return family


def _value(drafter: DrafterStats, attribute: str) -> Any:
    return getattr(drafter, attribute)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)
