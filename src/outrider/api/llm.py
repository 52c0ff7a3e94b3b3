"""The Python API: `LLM.generate`, `chat` and `stream`; streaming is the base case, the others collect it.

Several threads may call one LLM; whoever waits for a token steps the engine for all, so that a single caller pays no
hand-over between threads. Closing a stream early aborts its request at once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from outrider.api.core import Core, Options, parse_speculative
from outrider.api.outputs import CompletionOutput, Piece, RequestOutput
from outrider.config import ContextConfig, from_mapping
from outrider.errors import RequestError
from outrider.models.load import LoadedModel
from outrider.runner.measure import forward_seconds
from outrider.speculation.report import SpeculationReport
from outrider.types import Delta, Request, SamplingParams

Message = Mapping[str, Any]
Job = tuple[str | None, Sequence[int], SamplingParams]  # prompt text, prompt token ids, how to answer


class LLM:
    """A model that answers, with small models riding ahead of it.

    model: a catalogue alias, a folder, a .gguf file or a hub id. speculative_config: "auto", None (plain decoding) or
    a table (config.SpeculativeConfig); context_config: None or a table (config.ContextConfig). Other options: dtype,
    device, revision and the fields of config.EngineConfig; unknown ones are refused by name.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel,
        *,
        speculative_config: Mapping[str, Any] | str | None = "auto",
        context_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._core: Core | None = Core(model, Options.parse(speculative_config, context_config, options))
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._inboxes: dict[str, deque[Delta]] = {}

    @property
    def core(self) -> Core:
        """The model and engine behind this object; an error once it is closed."""
        if self._core is None:
            raise RequestError("this LLM is closed; make a new one")
        if self._process != os.getpid():  # a fork copies no threads: the forward pass would wait for them forever
            raise RequestError("this LLM belongs to the process that made it; make one after the fork, or use spawn")
        return self._core

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.core.tokenizer

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one prompt or many together; outputs come in the order of the prompts."""
        many = prompts if _is_batch(prompts) else [prompts]
        params = _params_for(many, sampling_params)
        encoded = [self.core.encode(prompt) for prompt in many]
        return self._collect([(text, ids, p) for (text, ids), p in zip(encoded, params, strict=True)], use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template."""
        if isinstance(messages, (str, bytes)):
            raise RequestError('chat takes messages like [{"role": "user", "content": ...}]; for text use generate')
        many: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = _params_for(many, sampling_params)
        prompts = [self.core.tokenizer.chat(conversation, tools=tools) for conversation in many]
        return self._collect([(None, ids, p) for ids, p in zip(prompts, params, strict=True)], use_tqdm)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Generator[Piece]:
        """Pieces of one answer as they come. Close the iterator to abort."""
        _, ids = self.core.encode(prompt)
        return self._stream(ids, sampling_params)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[Piece]:
        """Pieces of one answer to a conversation as they come."""
        return self._stream(self.core.tokenizer.chat(messages), sampling_params)

    def set_speculative_config(self, config: Mapping[str, Any] | str | None) -> None:
        """Speculate in another way from now on (same values as at the start); only while no request is open."""
        with self._lock:
            self.core.respeculate(parse_speculative(config))

    def set_context_config(self, config: Mapping[str, Any] | None) -> None:
        """Read the context in another way from now on (same values as at the start); only while no request is open.

        Cached prefixes stay. The KV pool keeps its size, so what a selector holds may come on top of `kv_memory`.
        """
        with self._lock:
            self.core.recontext(from_mapping(ContextConfig, config, "context_config"))

    def speculation_report(self) -> SpeculationReport:
        """What every drafter did so far, the draft lengths, the time spent on drafting, verifying and the rest, and
        what attention read (`context`)."""
        return replace(self.core.speculator.report(), context=self.core.memory.report())

    def forward_seconds(self, rows: int, context: int = 128) -> float:
        """Median seconds of a forward pass of `rows` rows of one sequence behind `context` entries."""
        with self._lock:
            return forward_seconds(self.core.decoder, rows, context=context, repeats=9)

    @property
    def context_mode(self) -> str:
        """What attention reads: full, sparse, bounded or lossless."""
        return self.core.resolved.context.mode

    def describe(self) -> dict[str, Any]:
        """The resolved configuration and the memory plan."""
        return self.core.describe()

    def memory_plan(self) -> dict[str, int]:
        """What is where, in bytes: weights, the KV pool with what of it is in use, and what selection holds.

        With a slow tier also its layers, what is in it, and of fast memory the limit, the plan for now and the use.
        """
        core = self.core
        used = core.memory.pool.held * core.memory.cache.page_size * core.decoder.kv_bytes_per_token()
        return {
            "weights": core.resolved.weight_bytes,
            "kv_pool": core.resolved.kv_bytes,
            "kv_used": used,
            "selector": core.memory.reading.report().selector_bytes,
            **core.place.describe(),
        }

    def context_plan(self) -> dict[str, Any]:
        """What the context configuration means: what attention reads, what is resident and what is slow, for one
        request and for `max_num_seqs`, each as long as the engine takes; `lines` says it in words."""
        return self.core.outlook().to_dict()

    def kept_prompts(self) -> list[dict[str, Any]]:
        """The prompts that `keep_prompts` left in `kv_path`, the least recently used first: path, tokens, bytes, when
        each was last used (seconds since 1970), and whether this model and configuration can use it."""
        prompts = self.core.memory.prompts
        return [
            {"path": str(file.path), "tokens": file.tokens, "bytes": file.nbytes, "used": file.used}
            | {"usable": file.model == prompts.model}
            for file in prompts.files()
        ]

    def close(self) -> None:
        """Release the model. Streams that are open end with an error."""
        with self._lock:
            if self._core is not None:
                self._core.close()
            self._core = None
            self._inboxes.clear()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        with self._lock:
            request = self.core.request(prompt, params)
            samples = self.core.samples(request)
            self._inboxes[request.id] = deque()
            self.core.engine.add(samples)
            return request

    def _stream(self, prompt: Sequence[int], params: SamplingParams | None) -> Generator[Piece]:
        """Submit a request and give its pieces."""
        request = self._submit(prompt, params or SamplingParams())
        pieces = self._pieces(request)
        next(pieces)  # a generator that never ran would not hear that it is closed
        return pieces

    def _pieces(self, request: Request) -> Generator[Piece]:
        """Turn a request's deltas into text until every sample has ended; the first piece is empty."""
        streams = [self.core.text_stream(request.params) for _ in range(request.params.n)]
        with closing(self._deltas(request)) as deltas:
            next(deltas)
            yield Piece(request.id, 0, "")
            for delta in deltas:
                yield streams[delta.index].push(delta)

    def _deltas(self, request: Request) -> Generator[Delta]:
        """A request's news behind an empty delta; steps the engine while there is none. Leaving early aborts it."""
        inbox, open_samples = self._inboxes.get(request.id, deque()), request.params.n
        try:
            yield Delta(request.id, 0)
            while open_samples:
                while not inbox:
                    self._advance(inbox)
                delta = inbox.popleft()
                open_samples -= delta.finish is not None
                yield delta
        finally:
            with self._lock:
                self._inboxes.pop(request.id, None)
                if open_samples and self._core is not None:
                    self._deliver(self._core.engine.abort(request.id))

    def _advance(self, inbox: deque[Delta]) -> None:
        """One step for everybody, unless another thread has filled the inbox meanwhile."""
        with self._lock:
            if inbox:
                return
            try:
                self._deliver(self.core.engine.step())
            except BaseException:
                self._abort_all()  # a step that was torn apart leaves nobody half-served
                raise

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is not None:
                inbox.append(delta)

    def _abort_all(self) -> None:
        if self._core is not None:
            for request_id in list(self._inboxes):
                self._deliver(self._core.engine.abort(request_id))

    def _collect(
        self, jobs: Sequence[tuple[str | None, Sequence[int], SamplingParams]], progress: bool
    ) -> list[RequestOutput]:
        """Submit all, then gather the answers in order."""
        started = perf_counter()
        requests: list[Request] = []
        try:
            for _, ids, params in jobs:
                requests.append(self._submit(ids, params))
            outputs = []
            for (text, _, _), request in _progress(list(zip(jobs, requests, strict=True)), progress):
                outputs.append(self._gather(text, request, started))
            return outputs
        except BaseException:
            self._drop(requests)
            raise

    def _drop(self, requests: Sequence[Request]) -> None:
        """Abort what is left of a call that failed."""
        with self._lock:
            for request in requests:
                if self._inboxes.pop(request.id, None) is not None and self._core is not None:
                    self._core.engine.abort(request.id)

    def _gather(self, text: str | None, request: Request, started: float) -> RequestOutput:
        """One request's answer, whole."""
        params = request.params
        samples = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        output = RequestOutput(request.id, text, list(request.prompt), samples)
        output.metrics.context.mode = self.context_mode
        streams = [self.core.text_stream(params) for _ in range(params.n)]
        with closing(self._deltas(request)) as deltas:
            next(deltas)
            for delta in deltas:
                output.metrics.add(delta, perf_counter() - started)
                samples[delta.index].add(streams[delta.index].push(delta))
                if delta.prompt_logprobs is not None and output.prompt_logprobs is None:
                    output.prompt_logprobs = list(delta.prompt_logprobs)
        return output


def _is_batch(prompts: Any) -> bool:
    """Whether `prompts` is several prompts: a list whose members are not token ids."""
    return isinstance(prompts, (list, tuple)) and not (prompts and isinstance(prompts[0], (int, np.integer)))


def _params_for(
    prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """One SamplingParams per prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not isinstance(params, (list, tuple)) or not all(isinstance(given, SamplingParams) for given in params):
        raise RequestError(f"sampling_params = {params!r} is refused; give SamplingParams, or one for each prompt")
    if len(params) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(params)} sampling_params; give one, or one for each")
    return list(params)


def _progress(items: Sequence[Any], show: bool) -> Iterator[Any]:
    """Iterate, with a progress bar on stderr where one is wanted."""
    if not show:
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description="answering", console=Console(stderr=True))
