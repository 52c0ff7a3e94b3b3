"""An engine over a scripted target, small enough to run thousands of steps in a second."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from outrider.config import ContextConfig, EngineConfig
from outrider.drafters.base import Context, Drafter, NoDrafter, Observation
from outrider.engine.engine import Engine
from outrider.engine.pipelined import PipelinedEngine
from outrider.memory.kv import KVMemory
from outrider.memory.reading import make_reading
from outrider.sampling.sampler import Sampler
from outrider.sampling.stopper import Stopper
from outrider.sequence import Sequence as Sample
from outrider.speculation.pools import FlowControl
from outrider.speculation.timing import StepTiming
from outrider.types import Delta, Draft, Request, SamplingParams
from scripted import Script, ScriptedDecoder

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


class OneDrafter:
    """The simplest speculation: one drafter, one depth. Keeps what it was shown."""

    def __init__(self, drafter: Drafter | None = None, depth: int = 4) -> None:
        self.drafter = drafter or NoDrafter()
        self.max_depth = depth if drafter else 0
        self.drafted = 0
        self.timings: list[StepTiming] = []

    def draft(self, contexts: Sequence[Context], limits: Sequence[int]) -> list[Draft]:
        drafts = self.drafter.propose(contexts, limits)
        self.drafted += sum(map(len, drafts))
        return drafts

    def observe(self, observations: Sequence[Observation], timing: StepTiming) -> None:
        self.timings.append(timing)
        self.drafter.observe(observations)

    def forget(self, sequence_id: int) -> None:
        self.drafter.forget(sequence_id)


class Harness:
    """Submit prompts, step, collect. `tokens[request id][index]` are the tokens told so far."""

    def __init__(
        self,
        script: Script,
        drafter: Drafter | None = None,
        *,
        depth: int = 4,
        pages: int = 64,
        page_size: int = 4,
        eos: Sequence[int] = (),
        vocab_size: int = 50,
        taps: tuple[int, ...] = (),
        speculator: object | None = None,
        flow: FlowControl | None = None,
        context: ContextConfig | None = None,
        **config: object,
    ) -> None:
        self.decoder = ScriptedDecoder(script, vocab_size=vocab_size, taps=taps)
        cache = self.decoder.new_cache(pages, page_size)
        reading = make_reading(context or ContextConfig(), self.decoder.spec, cache, threads=1)
        self.memory = KVMemory(cache, bool(config.get("prefix_caching", True)), reading)
        self.speculator = speculator or OneDrafter(drafter, depth)
        parts = (self.decoder, self.memory, self.speculator, EngineConfig(page_size=page_size, **config))
        self.engine = Engine(*parts) if flow is None else PipelinedEngine(*parts, flow)
        self.vocab_size, self.eos = vocab_size, tuple(eos)
        self.deltas: list[Delta] = []
        self._ids = itertools.count()

    def submit(self, prompt: Sequence[int], params: SamplingParams = GREEDY) -> str:
        """Queue a request; returns its id."""
        request = Request(f"r{next(self._ids)}", tuple(prompt), params)
        room = self.memory.capacity - len(prompt)
        seed = params.seed if params.seed is not None else 0
        self.engine.add(
            [
                Sample(
                    next(self._ids),
                    request,
                    index,
                    Sampler(params, request.prompt, self.vocab_size, self.eos, seed, index),
                    Stopper(params, self.eos, room, lambda ids: " ".join(map(str, ids)) + " "),
                    list(prompt),
                )
                for index in range(params.n)
            ]
        )
        return request.id

    def step(self) -> list[Delta]:
        """One step; keeps its news."""
        deltas = self.engine.step()
        self.deltas += deltas
        return deltas

    def drain(self, most: int = 10_000) -> None:
        """Step until everybody has ended; prove that nothing is held then."""
        for _ in range(most):
            if not self.engine.scheduler.busy:
                self.engine.check()
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
        """The answers to several prompts together (first samples)."""
        ids = [self.submit(prompt, params) for prompt in prompts]
        self.drain()
        return [self.tokens(i) for i in ids]

    def abort(self, request_id: str) -> None:
        """Abort and keep the news."""
        self.deltas += self.engine.abort(request_id)

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        """Tokens told of one sample."""
        return [t for d in self.deltas if (d.request_id, d.index) == (request_id, index) for t in d.tokens]

    def outputs(self) -> dict[str, list[int]]:
        """Tokens told of every request's first sample."""
        told: dict[str, list[int]] = {}
        for delta in self.deltas:
            if delta.index == 0:
                told.setdefault(delta.request_id, []).extend(delta.tokens)
        return told

    def finishes(self, request_id: str, index: int = 0) -> list[str]:
        """Reasons of all final deltas of one sample: exactly one, if all is well."""
        return [
            d.finish.reason
            for d in self.deltas
            if d.finish is not None and (d.request_id, d.index) == (request_id, index)
        ]

    @property
    def accepted(self) -> int:
        return sum(d.accepted for d in self.deltas)

    @property
    def drafted(self) -> int:
        return sum(d.drafted for d in self.deltas)
