"""The target as a source of data: it answers prompts in the engine, and its hidden states are kept as they pass by.

What is captured is what a drafter will see: the same loop, the same kernels, the same quantised weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.config import EngineConfig
from outrider.distill.data import Prompt
from outrider.drafters.base import Need, Observation
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, ModelError
from outrider.memory.kv import KVMemory
from outrider.models.build import Backend, build_decoder
from outrider.models.load import LoadedModel
from outrider.sampling.sampler import Sampler
from outrider.sampling.stopper import Stopper
from outrider.sequence import Sequence as Sample
from outrider.speculation.none import NoSpeculator
from outrider.speculation.timing import StepTiming
from outrider.types import Request, SamplingParams

PAGE = 16  # tokens
LARGEST = 60000.0  # fp16 ends at 65504; only the first token's states come near it

States = NDArray[np.float16]


@dataclass(frozen=True)
class Answer:
    """One answered prompt. `states`: fp16 [layers, tokens - 1, hidden], the last token was never computed."""

    tokens: tuple[int, ...]  # prompt and answer
    prompt_length: int
    states: States


@dataclass(frozen=True)
class Job:
    """Something to be continued by the target; `key` comes back with the answer."""

    key: int
    prompt: tuple[int, ...]
    params: SamplingParams


class Recorder(NoSpeculator):
    """A speculator that never drafts and keeps the hidden states of every committed token."""

    needs: frozenset[Need] = frozenset({"features"})

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, list[States]] = {}
        self._ended: dict[int, States] = {}

    def observe(self, observations: Sequence[Observation], timing: StepTiming) -> None:
        super().observe(observations, timing)
        for seen in observations:
            if seen.features is None:
                raise ModelError("this decoder gives no hidden states; use another backend")
            pieces = self._open.setdefault(seen.sequence_id, [])
            pieces.append(np.clip(seen.features, -LARGEST, LARGEST).astype(np.float16))

    def forget(self, sequence_id: int) -> None:
        """The sequence ended, or starts anew after a preemption: what it had counts only in the first case."""
        pieces = self._open.pop(sequence_id, None)
        if pieces:
            self._ended[sequence_id] = np.concatenate(pieces, axis=1)

    def clear(self) -> None:
        """Keep nothing."""
        self._open.clear()
        self._ended.clear()

    def take(self, sequence_id: int) -> States:
        """States of a sequence that has ended; they are kept no longer."""
        return self._ended.pop(sequence_id)


class Target:
    """A loaded model that answers many prompts at once."""

    def __init__(
        self,
        loaded: LoadedModel,
        taps: Sequence[int],
        *,
        batch: int = 24,
        max_model_len: int = 2048,
        backend: Backend = "auto",
        device: str = "auto",
        threads: int | None = None,
    ) -> None:
        """`taps`: layers whose output is captured, in this order; `batch`: sequences at a time."""
        check_supported(loaded)
        self.loaded, self.spec, self.tokenizer = loaded, loaded.spec, loaded.tokenizer
        self.room = min(max_model_len, loaded.spec.max_positions)
        self.decoder = build_decoder(
            loaded.spec, loaded.weights, taps=taps, backend=backend, device=device, threads=threads
        )
        self._batch = batch
        self._recorder = Recorder()
        config = EngineConfig(max_model_len=self.room, max_num_seqs=batch, page_size=PAGE, prefix_caching=False)
        cache = self.decoder.new_cache(batch * -(-self.room // PAGE), PAGE)
        self._engine = Engine(self.decoder, KVMemory(cache, prefix_caching=False), self._recorder, config)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, by the chat template where there is one."""
        if not self.tokenizer.has_chat_template:
            return tuple(self.tokenizer.encode(prompt.text, add_special=True))
        return tuple(self.tokenizer.chat([{"role": role, "content": content} for role, content in prompt.messages]))

    def answers(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Answer]]:
        """Answer all jobs, some together; (key, answer) as they end. Leaving early drops the rest."""
        waiting = iter(jobs)
        running: dict[str, tuple[int, Sample]] = {}
        try:
            while True:
                for job in islice(waiting, self._batch + 1 - len(running)):
                    sample = self._sample(job)
                    running[sample.request.id] = (job.key, sample)
                    self._engine.add([sample])
                if not running:
                    return
                for delta in self._engine.step():
                    if delta.finish is not None:
                        key, sample = running.pop(delta.request_id)
                        yield key, self._answer(sample, delta.finish)
        finally:
            for request_id in running:
                self._engine.abort(request_id)
            self._recorder.clear()

    def _answer(self, sample: Sample, finish: Any) -> Answer:
        if finish.reason == "error":
            raise ModelError(f"the target failed on a prompt: {finish.detail}")
        states = self._recorder.take(sample.id)
        return Answer(tuple(sample.tokens), sample.prompt_length, states)

    def _sample(self, job: Job) -> Sample:
        """A sequence of the engine. Its noise depends on the job alone."""
        room = self.room - len(job.prompt)
        vocabulary, eos = self.spec.num_tokens or self.spec.vocab_size, self.spec.eos_token_ids
        return Sample(
            id=job.key,
            request=Request(f"prompt-{job.key}", job.prompt, job.params),
            index=0,
            sampler=Sampler(job.params, job.prompt, vocabulary, eos, job.params.seed or 0),
            stopper=Stopper(job.params, eos, room, self.tokenizer.decode),
            tokens=list(job.prompt),
        )


def check_supported(loaded: LoadedModel) -> None:
    """ConfigError for targets that an EAGLE-3 head cannot be trained for."""
    spec = loaded.spec
    if "project_in" in loaded.weights or not spec.norm_first:
        raise ConfigError(f"{loaded.name}: heads are not trained for post-norm or projected decoders", "model")
    if spec.num_layers < 3:
        raise ConfigError(f"{loaded.name} has {spec.num_layers} layers; a head needs the states of three", "model")
