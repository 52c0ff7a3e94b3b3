""" "auto" is resolved once, here, by a pure function; the result is printed at start and kept in benchmark records."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outrider.config import ContextConfig, EngineConfig, SpeculativeConfig
from outrider.errors import CapacityError, ConfigError, UnsupportedError
from outrider.memory.outlook import Outlook, look_ahead
from outrider.memory.place.build import check_tiers, footprint_of, longest_in
from outrider.memory.planner import head_page_bytes, selector_token_bytes
from outrider.memory.selectors import read_selector
from outrider.models.cache import entry_bytes
from outrider.models.eagle3_spec import spec_from_config
from outrider.models.eagle3_store import read_config
from outrider.models.spec import DecoderSpec

if TYPE_CHECKING:
    from outrider.api.core import Options

#: What plain decoding becomes in lossless mode.
LOSSLESS = SpeculativeConfig(drafters=("sparse_self",), num_speculative_tokens=4)
TOKENS_PER_SEQUENCE = 2048  # what a default pool holds for each of max_num_seqs


@dataclass(frozen=True)
class Resolved:
    """What an engine really runs with."""

    max_model_len: int
    num_pages: int
    kv_bytes: int
    weight_bytes: int
    speculative: SpeculativeConfig | None
    context: ContextConfig

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class Sized(Protocol):
    """What sizes depend on: a decoder, or what one would be."""

    @property
    def spec(self) -> DecoderSpec:
        """Shape of the model."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        ...

    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        ...


@dataclass(frozen=True)
class Described:
    """A decoder that nobody has built: as the compiled one would be, with its weights as they are stored."""

    spec: DecoderSpec
    weight_bytes: int
    kv_dtype: str = "bfloat16"

    def kv_bytes_per_token(self) -> int:
        return self.spec.num_layers * entry_bytes(self.spec.num_kv_heads, self.spec.head_dim, self.kv_dtype)


def resolve(decoder: Sized, options: Options) -> Resolved:
    """Sizes from the model, the options and the memory of this machine."""
    engine, spec, context = options.engine, decoder.spec, options.context or ContextConfig()
    check_context(context)
    check_tiers(context, spec, engine.page_size)
    if engine.max_model_len is not None and engine.max_model_len > spec.max_positions:
        raise ConfigError(
            f"max_model_len = {engine.max_model_len} is more than the {spec.max_positions} positions of the model; "
            "lower it",
            "max_model_len",
        )
    check_kv_memory(engine.kv_memory if context.kv_path is None else context.kv_memory, decoder)
    per_page = decoder.kv_bytes_per_token() * engine.page_size + selector_bytes(context, spec, engine.page_size)
    longest = engine.max_model_len or spec.max_positions
    if context.kv_path is None:
        num_pages = kv_pages(engine.kv_memory, per_page, longest, engine.max_num_seqs, engine.page_size)
    else:
        longest = tiered_length(context, engine, spec, decoder, longest)
        num_pages = tiered_pages(context, engine, per_page, longest)
    if engine.max_model_len is not None and num_pages * engine.page_size < engine.max_model_len:
        raise CapacityError(
            f"kv_memory holds {num_pages * engine.page_size} tokens, less than max_model_len = {engine.max_model_len}; "
            "raise kv_memory or lower max_model_len"
        )
    return Resolved(
        max_model_len=min(longest, num_pages * engine.page_size),
        num_pages=num_pages,
        kv_bytes=num_pages * per_page,
        weight_bytes=decoder.weight_bytes,
        speculative=resolve_speculation(options.speculative, context),
        context=context,
    )


def outlook(decoder: Sized, resolved: Resolved, engine: EngineConfig) -> Outlook:
    """What the configuration means, for one request and for as many as are decoded together."""
    context, spec, size = resolved.context, decoder.spec, engine.page_size
    selector = selector_bytes(context, spec, size) // size
    model = footprint_of(context, engine, spec.num_layers, decoder.kv_bytes_per_token(), selector)
    if context.kv_path is not None and context.slow_kv_dtype != "auto":
        slow = entry_bytes(spec.num_kv_heads, spec.head_dim, context.slow_kv_dtype)
        model = replace(model, slow_kv_bytes=slow)
    kv_type = str(getattr(decoder, "kv_dtype", "float32")).removeprefix("torch.")
    tokens, requests = resolved.num_pages * size, (1, engine.max_num_seqs)
    return look_ahead(context, model, kv_type, tokens, resolved.max_model_len, requests)


def tiered_length(context: ContextConfig, engine: EngineConfig, spec: DecoderSpec, decoder: Sized, longest: int) -> int:
    """The longest context with this much fast memory for KV. CapacityError where less was asked for than it takes."""
    selector = selector_bytes(context, spec, engine.page_size) // engine.page_size
    model = footprint_of(context, engine, spec.num_layers, decoder.kv_bytes_per_token(), selector)
    most = longest_in(model, context)
    if engine.max_model_len is not None and most < longest:
        raise CapacityError(
            f"context_config: kv_memory serves contexts of {most} tokens, less than max_model_len = {longest}; raise "
            "it, or lower max_model_len, budget or max_num_batched_tokens"
        )
    return min(longest, most)


def tiered_pages(context: ContextConfig, engine: EngineConfig, per_page: int, longest: int) -> int:
    """Pages in all tiers together: what was asked for, else room for every sequence, within half of the free disk."""
    if engine.kv_memory is not None:
        return kv_pages(engine.kv_memory, per_page, longest, engine.max_num_seqs, engine.page_size)
    tokens = max(longest, engine.max_num_seqs * min(longest, TOKENS_PER_SEQUENCE))
    return max(1, min(-(-tokens // engine.page_size), free_space(context.kv_path or ".") // 2 // per_page))


def free_space(folder: str) -> int:
    """Bytes that a folder's disk can still take; the folder need not exist yet."""
    path = Path(folder).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def check_kv_memory(kv_memory: int | None, decoder: Sized) -> None:
    """Refuse more memory for keys and values than this machine has; what an accelerator has it says itself."""
    device = getattr(decoder, "device", None)
    if kv_memory is None or (device is not None and device.type != "cpu"):
        return
    machine = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _cgroup_limit())
    if kv_memory > machine:
        raise CapacityError(f"kv_memory = {kv_memory} bytes, but this machine has {machine} bytes of memory; lower it")


def check_context(context: ContextConfig) -> None:
    """Refuse, by name, what this engine does not do."""
    read_selector(context.selector)


def check_context_budget(budget: int | None, context: ContextConfig, request_id: str) -> None:
    """Refuse a request's own budget where it means nothing or is too small."""
    if budget is None:
        return
    if context.mode == "full":
        raise UnsupportedError(
            "context_budget is refused while everything is read; start with context_config "
            '{"mode": "sparse"}, "bounded" or "lossless"',
            request_id,
            "context_budget",
        )
    from outrider.memory.select import check_budget  # only who selects pays for importing it

    check_budget(budget, context.sinks, context.window, request_id)
    if context.may_move and budget > context.budget and context.mode != "lossless":
        raise UnsupportedError(
            f"context_budget = {budget} is more than the buffers of slow layers hold; use {context.budget} or less, "
            "or start with a larger budget",
            request_id,
            "context_budget",
        )


def resolve_speculation(config: SpeculativeConfig | None, context: ContextConfig) -> SpeculativeConfig | None:
    """Who drafts: lossless mode is a drafter, the last one where others are asked for."""
    if context.mode != "lossless":
        return config
    if config is None:
        return LOSSLESS
    if config.pipeline:
        raise ConfigError(
            "pipeline = True is refused in lossless mode, where the target drafts for itself; use False",
            "pipeline",
        )
    named = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in config.drafters]
    own = () if "sparse_self" in named else ("sparse_self",)
    return replace(config, drafters=(*config.drafters, *own))


def selector_bytes(context: ContextConfig, spec: DecoderSpec, page_size: int) -> int:
    """Bytes that selection holds for every page of KV."""
    choice = read_selector(context.selector)
    if context.mode == "full" or choice.name == "window":
        return 0
    if choice.path is None:
        return selector_token_bytes(spec, "pages", page_size, context.group, context.taps) * page_size
    head = spec_from_config(read_config(Path(choice.path)), spec)
    return head_page_bytes(head.num_kv_heads, head.head_dim, head.hidden_size, page_size)


def kv_pages(kv_memory: int | None, per_page: int, longest: int, sequences: int, page_size: int) -> int:
    """Pages of the pool: what was asked for, else room for every sequence, within half of the free memory."""
    if kv_memory is not None:
        pages = kv_memory // per_page
        if pages < 1:
            raise CapacityError(f"kv_memory = {kv_memory} bytes holds no page of {per_page} bytes; raise it")
        return pages
    tokens = max(longest, sequences * min(longest, TOKENS_PER_SEQUENCE))
    return max(1, min(-(-tokens // page_size), available_memory() // 2 // per_page))


def available_memory() -> int:
    """Bytes of memory that could be used now, cgroup limits included."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = max(free, _meminfo_available())
    return min(free, _cgroup_limit())


def _meminfo_available() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0


def _cgroup_limit() -> int:
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            text = limit.read().strip()
    except OSError:
        return 1 << 62
    return 1 << 62 if text == "max" else int(text)
