"""How much of the target's attention selections hold, beside the best that one shared set could hold.

    outrider eval qwen2.5-coder-0.5b --suite captured --lengths 4096 --budgets 512,1024

The model reads everything and decodes greedily; selectors choose before every step as they would in sparse mode, and
are judged by the attention that the step then pays. `captured` is the share of it that a selection holds, the mean over
layers, query heads and steps. `of_oracle` is that over `oracle_shared`: what the best set of the same size holds that
all layers share (one per KV head, the published shape), sinks and window included. `oracle_grouped` has a set for each
group of `group` layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.bench.eval_cases import Count, fill, paragraphs
from outrider.bench.eval_measures import captured_by_layer, overlap
from outrider.bench.eval_retrieval import key_value_retrieval, multi_document_qa
from outrider.bench.record import note
from outrider.config import ContextConfig, from_mapping
from outrider.memory.look import Gain, Look
from outrider.memory.reading import FullAttention, make_head
from outrider.memory.select import Chooser, ContextReader, OracleSelector, View, group_layers, make_reader
from outrider.memory.selectors import read_selector
from outrider.sequence import Plan
from outrider.types import Draft, Float32, Int32, SamplingParams, Selection

if TYPE_CHECKING:
    from outrider.api.llm import LLM

STEPS = 24
_SHARED, _GROUPED = "oracle_shared", "oracle_grouped"


@dataclass
class Seen:
    """What one way of selecting held, step by step."""

    captured: list[float] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)
    last: Int32 | None = None

    def add(self, share: float, entries: Int32) -> None:
        """One step."""
        if self.last is not None:
            self.overlaps.append(overlap(self.last, entries))
        self.captured.append(share)
        self.last = entries


class Watch(FullAttention):
    """Everything is read; what selectors would have read is looked at beside it. One sequence at a time."""

    def __init__(self, core: Any, readers: Mapping[str, ContextReader], config: ContextConfig) -> None:
        spec = core.spec
        self.taps = tuple(range(spec.num_layers))
        self.states = tuple(sorted({tap for reader in readers.values() for tap in reader.states}))
        self.seen: dict[str, Seen] = {name: Seen() for name in (_SHARED, _GROUPED, *readers)}
        self._readers, self._cache = readers, core.memory.cache
        self._chosen: dict[str, Int32] = {}
        self._view: View | None = None
        self._truth: tuple[Float32, Float32] | None = None
        self._budget = config.budget
        self._oracles = {
            name: Chooser(
                OracleSelector(lambda view: self._known(), groups), spec.num_kv_heads, config.sinks, config.window
            )
            for name, groups in (
                (_SHARED, group_layers(spec.num_layers, 0)),
                (_GROUPED, group_layers(spec.num_layers, config.group)),
            )
        }

    def select(self, plan: Plan, drafts: Sequence[Draft], pages: Int32) -> Selection | None:
        work = plan.works[0]
        sequence, row = work.sequence, pages[0].copy()
        prefill = sequence.computed < sequence.prompt_length
        look = Look(sequence.id, sequence.computed, work.rows, row, None, prefill)
        chosen = {name: reader.choose_all([look])[0] for name, reader in self._readers.items()}
        self._chosen = {name: entries for name, entries in chosen.items() if entries is not None}
        self._view = None if prefill else View(sequence.id, sequence.computed, 1, self._budget, row)
        return None

    def observe(self, gains: Iterable[Gain]) -> None:
        for gain in gains:
            if self._view is not None and gain.queries is not None:
                self._judge(gain, self._view)
            for reader in self._readers.values():
                reader.fold(gain.slots, self._cache.key_rows(reader.taps, gain.slots))
                queries = None if gain.queries is None else gain.queries[list(reader.taps)]
                reader.learn([gain._replace(queries=queries)])

    def _judge(self, gain: Gain, view: View) -> None:
        """The attention that the step paid, against what was chosen before it."""
        size, entries = self._cache.page_size, np.arange(view.length, dtype=np.int32)
        slots = np.append(view.pages[entries // size] * size + entries % size, gain.slots).astype(np.int32)
        queries, keys = gain.queries, self._cache.key_rows(self.taps, slots)
        assert queries is not None, "the step showed its queries"
        self._truth = queries, keys[:, :-1]
        groups = {name: reader.chooser.selector.groups for name, reader in self._readers.items()}
        for name, oracle in self._oracles.items():
            best = oracle.choose(view)
            if best is not None:
                self._chosen[name], groups[name] = best, oracle.selector.groups
        for name, chosen in self._chosen.items():
            share = captured_by_layer(queries, keys, chosen, groups[name]).mean()
            self.seen[name].add(float(share), chosen)

    def _known(self) -> tuple[Float32, Float32]:
        assert self._truth is not None, "the oracle is asked after the step"
        return self._truth


def captured_texts(folder: Path | None, length: int, count: Count, seed: int) -> dict[str, str]:
    """Prompts of about `length` tokens: random pairs, and with the public texts prose and documents with a question."""
    texts = {"key_value": key_value_retrieval(None, length, 0.5, count, seed).prompt}
    if folder is not None and (folder / "war_and_peace.txt").exists():
        parts = paragraphs((folder / "war_and_peace.txt").read_text(encoding="utf-8"))
        texts["prose"] = "\n\n".join(fill(parts, length, count, 100 * (seed + 1)))
    if folder is not None and (folder / "nq_open_oracle.jsonl").exists():
        lines = (folder / "nq_open_oracle.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        texts["multi_document"] = multi_document_qa(rows, seed, length, 0.5, count, seed).prompt
    return texts


def measure_captured(
    llm: LLM, texts: Mapping[str, str], budgets: Sequence[int], settings: Mapping[str, Any], steps: int = STEPS
) -> list[dict[str, Any]]:
    """A row per text, budget and selector: the configured one, pages and window."""
    names = {read_selector(given).name: given for given in (settings.get("selector", "pages"), "pages", "window")}
    rows = []
    for budget in budgets:
        configs = {
            name: from_mapping(
                ContextConfig,
                {**settings, "mode": "sparse", "budget": budget, "selector": given, "first_full": 0},
                "context_config",
            )
            for name, given in names.items()
        }
        for text, prompt in texts.items():
            seen = watch(llm, configs, prompt, steps)
            note(f"{text}, budget {budget}: {', '.join(f'{name} {fmean(s.captured):.3f}' for name, s in seen.items())}")
            rows += _rows(text, len(llm.tokenizer.encode(prompt)), budget, seen, list(configs))
    return rows


def watch(llm: LLM, configs: Mapping[str, ContextConfig], prompt: str, steps: int) -> dict[str, Seen]:
    """Decode behind a prompt, reading everything, and see what each configuration would have read."""
    core = llm.core
    readers = {name: _reader(core, config) for name, config in configs.items()}
    observer = Watch(core, readers, next(iter(configs.values())))
    core.memory.pool.drop_cached()
    core.memory.reread(observer)
    core.respeculate(None)
    request = core.request(
        llm.tokenizer.encode(prompt), SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
    )
    core.engine.add(core.samples(request))
    while core.engine.scheduler.busy:
        core.engine.step()
    return {name: seen for name, seen in observer.seen.items() if seen.captured}


def _reader(core: Any, config: ContextConfig) -> ContextReader:
    cache = core.memory.cache
    head = make_head(config, core.decoder, core.loaded.weights, cache, core.resolved.max_model_len)
    return make_reader(config, core.spec, cache.num_pages, cache.page_size, head)


def _rows(text: str, length: int, budget: int, seen: Mapping[str, Seen], names: Sequence[str]) -> list[dict[str, Any]]:
    if _SHARED not in seen:
        return []
    best = {name: fmean(seen[name].captured) for name in (_SHARED, _GROUPED)}
    return [
        {
            "text": text,
            "length": length,
            "budget": budget,
            "selector": name,
            "steps": len(seen[name].captured),
            "captured": fmean(seen[name].captured),
            "of_oracle": fmean(seen[name].captured) / best[_SHARED],
            "moved": 1 - fmean(seen[name].overlaps) if seen[name].overlaps else None,
            **best,
        }
        for name in names
        if name in seen
    ]
