""" "auto" is resolved once, here, by a pure function; the result is printed at start and kept in benchmark records."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from outrider.config import ContextConfig, SpeculativeConfig
from outrider.errors import CapacityError, ConfigError
from outrider.models.spec import Decoder

if TYPE_CHECKING:
    from outrider.api.core import Options

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


def resolve(decoder: Decoder, options: Options) -> Resolved:
    """Sizes from the model, the options and the memory of this machine."""
    engine, spec = options.engine, decoder.spec
    if options.context is not None and options.context.mode != "full":
        raise ConfigError(
            f"context_config: mode = {options.context.mode!r} is not served by the engine yet; use 'full'", "mode"
        )
    if engine.max_model_len is not None and engine.max_model_len > spec.max_positions:
        raise ConfigError(
            f"max_model_len = {engine.max_model_len} is more than the {spec.max_positions} positions of the model; "
            "lower it",
            "max_model_len",
        )
    per_page = decoder.kv_bytes_per_token() * engine.page_size
    longest = engine.max_model_len or spec.max_positions
    num_pages = kv_pages(engine.kv_memory, per_page, longest, engine.max_num_seqs, engine.page_size)
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
        speculative=options.speculative,
        context=options.context or ContextConfig(),
    )


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
