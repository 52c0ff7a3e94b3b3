"""The placement that a configuration asks for, and what it means for sizes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from outrider.config import ContextConfig, EngineConfig
from outrider.errors import CapacityError, ConfigError
from outrider.memory.place.placement import Placement
from outrider.memory.place.rules import Rules, Shape
from outrider.memory.place.single import SingleTier
from outrider.memory.planner import Footprint, longest_context
from outrider.memory.reading import FullAttention, LosslessAttention, SparseAttention
from outrider.memory.tiers.disk import DiskTier
from outrider.memory.transfer import Transfer
from outrider.models.cache import PagedKVCache
from outrider.models.spec import DecoderSpec, KVCache
from outrider.types import Int32

#: A limit that nothing reaches.
UNLIMITED = 1 << 60
STAGING_LAYERS = 2
#: What transfers hold beside the buffers, at most, and the share of kv_memory that is set aside for it: pages that wait
#: to be written, blocks that are being read, and memory that the allocator has not given back yet.
TRANSFER_BYTES, TRANSFER_SHARE = 8 << 20, 16
#: Options that mean nothing without a slow tier, and the values that ask for nothing.
WITHOUT_TIER: Mapping[str, tuple[Any, ...]] = {
    "slow_layers": (None, 0),
    "slow_kv_dtype": ("auto",),
    "prefetch": (None,),
    "elastic": (True,),
}


def check_tiers(context: ContextConfig, spec: DecoderSpec, page_size: int) -> None:
    """Refuse, by name, combinations that slow layers do not serve."""
    if context.kv_memory is not None and context.kv_path is None:
        raise ConfigError("context_config: kv_memory needs kv_path, a folder for the layers that do not fit", "kv_path")
    if context.keep_prompts is not None and context.kv_path is None:
        raise ConfigError("context_config: keep_prompts needs kv_path, the folder to keep them in", "kv_path")
    if context.kv_path is None:
        for name, idle in WITHOUT_TIER.items():
            if getattr(context, name) not in idle:
                raise ConfigError(f"context_config: {name} needs kv_path, the folder of the slow tier", name)
        return
    if (context.slow_layers or 0) > spec.num_layers:
        raise ConfigError(f"slow_layers = {context.slow_layers} is refused; use 0 to {spec.num_layers}", "slow_layers")
    if spec.sliding_window is not None:
        raise ConfigError(
            "context_config: kv_path is refused for models with a sliding window, whose layers need little KV anyway; "
            "leave it out",
            "kv_path",
        )
    if context.mode in ("sparse", "bounded") and context.window < page_size:
        raise ConfigError(
            f"context_config: window = {context.window} is refused with kv_path; the page that is filling must be "
            f"read, so use {page_size} or more, or a smaller page_size",
            "window",
        )


def fast_limit(context: ContextConfig) -> int:
    """Bytes of fast memory that KV is planned with: kv_memory, less what its transfers hold on their way."""
    if context.kv_memory is None:
        return UNLIMITED
    return context.kv_memory - min(TRANSFER_BYTES, context.kv_memory // TRANSFER_SHARE)


def buffer_capacity(context: ContextConfig, page_size: int) -> int:
    """Entries of a sequence that a slow layer's buffer holds: a selection, or only the page that is filling."""
    return context.budget if context.mode in ("sparse", "bounded") else page_size


def footprint_of(
    context: ContextConfig, engine: EngineConfig, layers: int, token_bytes: int, selector: int
) -> Footprint:
    """Memory of KV alone. token_bytes: of K and V in all layers; selector: of a token."""
    return Footprint(
        weight_bytes=0,
        layers=layers,
        kv_bytes=token_bytes // layers,
        slow_kv_bytes=token_bytes // layers,
        selector_bytes=selector,
        overhead=1.0,
        staging_layers=STAGING_LAYERS,
        page_size=engine.page_size,
        pass_rows=engine.max_num_batched_tokens,
    )


def longest_in(model: Footprint, context: ContextConfig) -> int:
    """The longest context of one request that kv_memory can serve. CapacityError where not even a page fits."""
    if context.kv_memory is None:
        return UNLIMITED
    capacity = buffer_capacity(context, model.page_size)
    forced = context.slow_layers
    choices = range(model.layers + 1) if forced is None else range(forced, forced + 1)
    lengths = [longest_context(model, fast_limit(context), 1, capacity, slow) for slow in choices]
    longest = max(UNLIMITED if length is None else length for length in lengths)
    if longest < model.page_size:
        raise CapacityError(
            f"context_config: kv_memory = {context.kv_memory} bytes cannot hold the buffers of one request; raise it, "
            "or lower budget or max_num_batched_tokens"
        )
    return longest


def rules_of(context: ContextConfig) -> Rules:
    """How the configuration wants layers to move."""
    return Rules(fast_limit(context), context.elastic, context.prefetch, context.slow_layers)


def describe_limits(model: Footprint, context: ContextConfig, requests: int) -> str:
    """The plan in a line: how long contexts may be before layers go down, for one request and for all together."""
    if context.kv_path is None:
        return "all KV stays in fast memory"
    if context.kv_memory is None:
        return "all KV stays in fast memory; kv_path is ready for when kv_memory is set"
    capacity, parts = buffer_capacity(context, model.page_size), []
    for count in sorted({1, requests}):
        lengths = [longest_context(model, fast_limit(context), count, capacity, i) for i in range(model.layers + 1)]
        most = max(range(len(lengths)), key=lambda i: UNLIMITED if lengths[i] is None else lengths[i] or 0)
        top = "any length" if lengths[most] is None else f"{lengths[most]} tokens"
        parts.append(
            f"{count} of {lengths[0]} tokens with all {model.layers} layers there, up to {top} with {most} in kv_path"
        )
    return f"KV in {context.kv_memory} bytes of fast memory: requests: " + "; ".join(parts)


def shape_of(
    context: ContextConfig, engine: EngineConfig, reading: FullAttention | SparseAttention, layers: int, selector: int
) -> Shape:
    """What the buffers are made for. engine.max_model_len is resolved; selector: bytes per token."""
    assert engine.max_model_len is not None, "max_model_len is resolved before memory is made"
    longest = (-(-engine.max_model_len // engine.page_size) + 1) * engine.page_size
    return Shape(
        groups=groups_of(reading, layers),
        capacity=min(buffer_capacity(context, engine.page_size), longest),
        sequences=engine.max_num_seqs,
        rows=engine.max_num_batched_tokens,
        longest=engine.max_model_len,
        selector_bytes=selector,
    )


def groups_of(reading: FullAttention | SparseAttention, layers: int) -> Int32:
    """Group of each layer: those of the selector, or one where the target always reads everything."""
    if isinstance(reading, SparseAttention) and not isinstance(reading, LosslessAttention):
        return reading.reader.chooser.selector.groups
    return np.zeros(layers, np.int32)


def make_place(context: ContextConfig, cache: KVCache, shape: Shape) -> SingleTier:
    """The placement of a checked configuration. ConfigError where the decoder's cache cannot be split."""
    if context.kv_path is None:
        return SingleTier(cache)
    if not isinstance(cache, PagedKVCache):
        raise ConfigError(
            "context_config: kv_path is refused for the reference decoder, which keeps all KV at hand; use "
            "backend = 'compiled' on the CPU",
            "kv_path",
        )
    tier = partial(DiskTier, context.kv_path)
    return Placement(cache, tier, Transfer(), shape, rules_of(context), context.slow_kv_dtype)
