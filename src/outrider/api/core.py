"""From a model name and options to a running engine, and from a prompt to checked sequences.

Shared by `LLM` (one caller at a time steps the engine) and `Service` (a thread of its own steps it).
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from outrider.api.resolve import (
    Resolved,
    check_context,
    check_context_budget,
    check_kv_memory,
    outlook,
    resolve,
    resolve_speculation,
    selector_bytes,
)
from outrider.api.text import TextStream
from outrider.config import ContextConfig, EngineConfig, SpeculativeConfig, from_mapping
from outrider.drafters.registry import needed_taps
from outrider.drafters.shipped import ANY_HEADS, shipped_heads, with_heads
from outrider.engine.engine import Engine
from outrider.engine.pipelined import PipelinedEngine
from outrider.errors import CapacityError, ConfigError, PromptTooLongError, RequestError, UnsupportedError
from outrider.memory.keep import KeptPrompts, NoPrompts, fingerprint
from outrider.memory.kv import KVMemory
from outrider.memory.outlook import PAUSE, Outlook, drafts_may_pause
from outrider.memory.place import Placement, Shape
from outrider.memory.place.build import (
    check_tiers,
    describe_limits,
    footprint_of,
    longest_in,
    make_place,
    rules_of,
    shape_of,
)
from outrider.memory.planner import Footprint
from outrider.memory.reading import FullAttention, SparseAttention, make_head, make_reading
from outrider.memory.trails import find_trails
from outrider.models.build import build_decoder
from outrider.models.load import LoadedModel, load_model
from outrider.models.load.detokenizer import Detokenizer
from outrider.models.spec import KVCache
from outrider.runner.measure import forward_seconds
from outrider.sampling.grammar import grammar_processors
from outrider.sampling.sampler import Sampler
from outrider.sampling.stopper import Stopper
from outrider.sequence import Sequence as Sample
from outrider.speculation.build import build_speculator
from outrider.speculation.none import NoSpeculator
from outrider.speculation.pools import FLOWS
from outrider.speculation.speculator import Speculator
from outrider.types import Request, SamplingParams

log = logging.getLogger(__name__)

#: What "auto" speculation is: every drafter that needs no model of its own, and the heads that come with the target, as
#: far as they pay (docs/speculation.md).
AUTO = SpeculativeConfig(
    drafters=("ngram", "suffix", ANY_HEADS),
    vote="hedge",
    length="goodput",
    num_speculative_tokens=(0, 8),
    length_options={"crowd": 1},  # in company a head does not earn its keep on a CPU (docs/measurements.md)
)


@dataclass(frozen=True)
class Options:
    """What a user asked for, before "auto" is resolved. Engine options are the fields of EngineConfig."""

    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    backend: Literal["auto", "compiled", "reference"] = "auto"  # which decoder runs the model (models/build.py)
    engine: EngineConfig = field(default_factory=EngineConfig)
    speculative: SpeculativeConfig | None = None  # None: plain decoding
    context: ContextConfig | None = None

    @classmethod
    def parse(
        cls,
        speculative_config: Mapping[str, Any] | str | None,
        context_config: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> Options:
        """Check every key by name; "auto" speculation is the best set known for the model (resolve.py)."""
        own = {key: options[key] for key in ("dtype", "device", "revision", "backend") if key in options}
        for key, value in own.items():
            if not isinstance(value, str) and not (key == "revision" and value is None):
                raise ConfigError(f"{key} = {value!r} is refused; give a string", key)
        engine = {key: value for key, value in options.items() if key not in own}
        context = None if context_config is None else from_mapping(ContextConfig, context_config, "context_config")
        config = from_mapping(EngineConfig, engine, "LLM options")
        return cls(engine=config, speculative=parse_speculative(speculative_config), context=context, **own)


class Core:
    """One loaded model, its engine, and the making of sequences. Not thread-safe."""

    def __init__(self, model: str | os.PathLike[str] | LoadedModel, options: Options) -> None:
        if not isinstance(model, (str, os.PathLike, LoadedModel)):
            raise ConfigError(
                f"model = {model!r} is refused; give an alias, a folder, a .gguf file or a hub id", "model"
            )
        self.loaded: LoadedModel = (
            model if isinstance(model, LoadedModel) else load_model(os.fspath(model), revision=options.revision)
        )
        self.tokenizer = self.loaded.tokenizer
        self.spec = self.loaded.spec
        engine = options.engine
        self.decoder = build_decoder(
            self.spec,
            self.loaded.weights,
            dtype=options.dtype,
            device=options.device,
            kv_dtype=engine.kv_cache_dtype,
            threads=engine.threads,
            backend=options.backend,
        )
        self._heads = shipped_heads(self.loaded)
        options = replace(options, speculative=with_heads(options.speculative, self._heads))
        self.resolved: Resolved = resolve(self.decoder, options)
        self._asked = options.speculative
        self.config = replace(engine, max_model_len=self.resolved.max_model_len)
        cache = self.decoder.new_cache(self.resolved.num_pages, engine.page_size)
        reading = self._reading(self.resolved.context, cache)
        self.place = make_place(self.resolved.context, cache, self._shape(self.resolved.context, reading))
        self._mark = partial(self._fingerprint, options.dtype)
        self.memory = KVMemory(cache, engine.prefix_caching, reading, self.place, self._prompts(reading))
        log.info("%s", "; ".join(line.strip() for line in self.outlook().lines()))
        if drafts_may_pause(self.resolved.context):
            log.warning("lossless mode: %s", PAUSE)
        self.engine = self._engine(self.resolved.speculative)
        self._ids = itertools.count()
        self._seeds = np.random.default_rng(engine.seed)

    @property
    def speculator(self) -> Speculator | NoSpeculator:
        """The collective and adaptive part."""
        return self.engine.speculator

    def respeculate(self, config: SpeculativeConfig | None) -> None:
        """Speculate in another way from now on; only while no request is open."""
        if self.engine.scheduler.busy:
            raise CapacityError("speculation cannot be changed while requests are open; let them end first")
        self._asked = with_heads(config, self._heads)
        config = resolve_speculation(self._asked, self.resolved.context)
        engine = self._engine(config)
        self.engine.close()
        self.engine, self.resolved = engine, replace(self.resolved, speculative=config)

    def recontext(self, context: ContextConfig) -> None:
        """Read the context in another way from now on; only while no request is open. Cached prefixes stay."""
        if self.engine.scheduler.busy:
            raise CapacityError("what attention reads cannot be changed while requests are open; let them end first")
        check_context(context)
        reading = self._reading(context, self.memory.cache)
        context = self._replace(context, reading)
        self.resolved = replace(self.resolved, context=context)
        if reading.mark != self.memory.reading.mark:
            self.memory.prompts = self._prompts(reading)
        self.memory.reread(reading)
        self.respeculate(self._asked)

    def _replace(self, context: ContextConfig, reading: FullAttention | SparseAttention) -> ContextConfig:
        """Place KV in another way from now on. The folder stays the one of the start."""
        old = self.resolved.context
        context = replace(context, kv_path=context.kv_path or old.kv_path)
        if context.slow_kv_dtype == "auto":
            context = replace(context, slow_kv_dtype=old.slow_kv_dtype)
        context = replace(context, keep_prompts=context.keep_prompts or old.keep_prompts)
        if context.keep_bytes == ContextConfig.keep_bytes:
            context = replace(context, keep_bytes=old.keep_bytes)
        for name in ("kv_path", "slow_kv_dtype", "keep_prompts", "keep_bytes"):
            if getattr(context, name) != getattr(old, name):
                raise ConfigError(f"{name} cannot be changed; make a new LLM", name)
        check_tiers(context, self.spec, self.config.page_size)
        check_kv_memory(context.kv_memory, self.decoder)
        longest_in(self._footprint(context), context)
        if isinstance(self.place, Placement):
            self.place.rules = rules_of(context)
            self.place.arrange(self._shape(context, reading))
        return context

    def describe(self) -> dict[str, Any]:
        """The resolved configuration, and the memory plan in words."""
        named = {"model": self.loaded.name, "family": self.spec.family, "memory_plan": self.memory_line()}
        return {**named, **self.resolved.to_dict()}

    def outlook(self) -> Outlook:
        """What attention reads, what is resident and what is slow, as planned."""
        return outlook(self.decoder, self.resolved, self.config)

    def memory_line(self) -> str:
        """Where KV will be, as planned, in words."""
        context = self.resolved.context
        return describe_limits(self._footprint(context), context, self.config.max_num_seqs)

    def _footprint(self, context: ContextConfig) -> Footprint:
        """What KV takes, in the way that a configuration places it."""
        spec, size = self.spec, self.config.page_size
        selector = selector_bytes(context, spec, size) // size
        return footprint_of(context, self.config, spec.num_layers, self.decoder.kv_bytes_per_token(), selector)

    def _prompts(self, reading: FullAttention | SparseAttention) -> NoPrompts:
        """Prompts that stay on disk, where that is asked for; they are those of a retrieval head where one reads."""
        context = self.resolved.context
        if context.keep_prompts is None or context.kv_path is None:
            return NoPrompts()
        return KeptPrompts(context.kv_path, self._mark() + reading.mark, context.keep_prompts, context.keep_bytes)

    def _fingerprint(self, dtype: str) -> str:
        kind = getattr(self.decoder, "kv_dtype", None)
        return fingerprint(self.spec, self.loaded.weights, dtype, kind, self.config.page_size)

    def _shape(self, context: ContextConfig, reading: FullAttention | SparseAttention) -> Shape:
        """What the buffers of slow layers are made for."""
        selector = selector_bytes(context, self.spec, self.config.page_size) // self.config.page_size
        return shape_of(context, self.config, reading, self.spec.num_layers, selector)

    def close(self) -> None:
        """Stop what runs beside the engine."""
        self.engine.close()
        self.memory.close()

    def _reading(self, context: ContextConfig, cache: KVCache) -> FullAttention | SparseAttention:
        """What attention reads, with the retrieval head that the configuration names."""
        head = make_head(context, self.decoder, self.loaded.weights, cache, self.resolved.max_model_len)
        return make_reading(context, self.spec, cache, self.config.threads, head)

    def _engine(self, config: SpeculativeConfig | None) -> Engine:
        """The plain loop, or its pipelined twin."""
        drafting = needed_taps(config.drafters, self.spec) if config else ()
        self.decoder.retap(tuple(sorted({*drafting, *self.memory.reading.states})))
        self.decoder.retap_queries(self.memory.reading.taps)
        speculator = self._speculator(config)
        if config is None or not config.pipeline:
            return Engine(self.decoder, self.memory, speculator, self.config)
        return PipelinedEngine(self.decoder, self.memory, speculator, self.config, FLOWS[config.flow]())

    def _speculator(self, config: SpeculativeConfig | None) -> Speculator | NoSpeculator:
        return build_speculator(
            config,
            vocab_size=self.spec.num_tokens or self.spec.vocab_size,
            tokenizer=self.tokenizer,
            decoder=self.decoder,
            weights=self.loaded.weights,
            max_sequences=self.config.max_num_seqs,
            max_model_len=self.resolved.max_model_len,
            measure=partial(forward_seconds, self.decoder, repeats=2),
            sparse=find_trails(self.memory),
        )

    def request(self, prompt: Sequence[int], params: SamplingParams, request_id: str | None = None) -> Request:
        """A checked request: what cannot be served is refused here, before anything is queued."""
        request_id = request_id or f"request-{next(self._ids)}"
        limit, vocabulary = self.resolved.max_model_len, self.spec.vocab_size
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token", request_id, "prompt")
        if len(prompt) >= limit:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens but the context holds {limit}, answer included; "
                "shorten it or raise max_model_len (and kv_memory)",
                request_id,
                "prompt",
            )
        for token in prompt:
            if not 0 <= token < vocabulary:
                raise RequestError(f"token id {token} is outside 0 to {vocabulary - 1}", request_id, "prompt")
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"):
            check_token_ids(name, getattr(params, name) or (), vocabulary, request_id)
        check_context_budget(params.context_budget, self.resolved.context, request_id)
        return Request(request_id, tuple(prompt), params)

    def samples(self, request: Request) -> list[Sample]:
        """The n sequences of a request, each with its own noise, stops and grammar."""
        params = request.params
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**63))
        room = self.resolved.max_model_len - len(request.prompt)
        eos = tuple(self.spec.eos_token_ids) or tuple(self.tokenizer.eos_token_ids)
        return [
            Sample(
                id=next(self._ids),
                request=request,
                index=index,
                sampler=Sampler(
                    params,
                    request.prompt,
                    self.spec.num_tokens or self.spec.vocab_size,
                    eos,
                    seed,
                    index,
                    grammar_processors(params, self.tokenizer, eos),
                ),
                stopper=Stopper(params, eos, room, self.tokenizer.decode),
                tokens=list(request.prompt),
            )
            for index in range(params.n)
        ]

    def text_stream(self, params: SamplingParams) -> TextStream:
        """A fresh text assembler for one sample."""
        return TextStream(Detokenizer(self.tokenizer, skip_special=params.skip_special_tokens), params)

    def encode(self, prompt: Any) -> tuple[str | None, list[int]]:
        """A prompt as (text, token ids): a string, a list of ids, or vLLM's {"prompt_token_ids": [...]}."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special=True)
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
            prompt = prompt["prompt_token_ids"]
        if isinstance(prompt, (Sequence, np.ndarray)) and all(isinstance(token, (int, np.integer)) for token in prompt):
            return None, [int(token) for token in prompt]
        raise RequestError(
            f'a prompt is a string, a list of token ids or {{"prompt_token_ids": [...]}}; got {type(prompt).__name__}',
            field="prompt",
        )


def parse_speculative(given: Mapping[str, Any] | str | None) -> SpeculativeConfig | None:
    """A checked configuration from "auto" (the best set known), None (plain decoding) or a table."""
    if given is None:
        return None
    if given == "auto":
        return AUTO
    if isinstance(given, Mapping):
        return from_mapping(SpeculativeConfig, given, "speculative_config")
    raise ConfigError(f"speculative_config = {given!r} is refused; give 'auto', None or a table", "speculative_config")


def check_token_ids(name: str, tokens: Iterable[int], vocabulary: int, request_id: str) -> None:
    """Refuse token ids that the model does not have."""
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise UnsupportedError(f"{name}: token id {token} is outside 0 to {vocabulary - 1}", request_id, name)
