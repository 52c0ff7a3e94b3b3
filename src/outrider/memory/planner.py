"""How much memory a model and its contexts take, and which layers' KV must live in the slow tier.

The model is SpeContext's (section on adaptive memory), with its buffer term corrected and three assumptions lifted:
requests have their own lengths and budgets and come and go; every tier has its own KV type; what a selector keeps
resident is counted for the selector in use. Pure functions of numbers: nothing here allocates or copies.

    fast = overhead (M_O + M_D) + workspace
         + sum over requests of  [(L - i) kv + selector] S_r + i kv min(B_r, S_r)
         + staging kv max(S_r)                                     with i > 0 of L layers in the slow tier
    slow = i slow_kv sum of S_r

kv is the bytes of one token's K and V in one layer. Lengths are rounded up to pages. Try it:
`outrider plan llama3-8b --memory 80GiB --requests 32 --budget 2048`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.errors import ConfigError
from outrider.models.spec import DecoderSpec

KVType = Literal["float32", "bfloat16", "int8"]
SelectorKind = Literal["published", "head", "pages", "window"]

#: Bytes of one value, and bytes of the scale that a row of head_dim values carries.
VALUE_BYTES: dict[KVType, tuple[int, int]] = {"float32": (4, 0), "bfloat16": (2, 0), "int8": (1, 4)}


@dataclass(frozen=True)
class Footprint:
    """What one model costs in memory. Bytes; the per-token figures are per token of context of one request."""

    weight_bytes: int  # M_O
    layers: int  # L
    kv_bytes: int  # K and V of one token in one layer, fast tier
    slow_kv_bytes: int  # the same in the slow tier
    selector_bytes: int = 0  # per token, always resident: the head's own K cache, or page summaries
    head_bytes: int = 0  # M_D
    overhead: float = 1.3  # of weights: the published allowance for activations and fragmentation
    workspace_bytes: int = 0  # measured scratch, where it is known; then overhead is 1
    staging_layers: int = 0  # whole-context buffers through which slow layers stream in full steps
    page_size: int = 1  # tokens; lengths are rounded up to it
    pass_rows: int = 0  # rows of one pass, for which every slow layer has room beside its buffers

    @property
    def fixed_bytes(self) -> int:
        """What is resident before the first token."""
        return int(self.overhead * (self.weight_bytes + self.head_bytes)) + self.workspace_bytes

    def padded(self, length: int) -> int:
        """Tokens that `length` tokens occupy in pages."""
        return -(-length // self.page_size) * self.page_size


@dataclass(frozen=True)
class Load:
    """One request as the planner sees it: tokens of context now (or at its end) and its budget per KV head."""

    length: int
    budget: int


@dataclass(frozen=True)
class MemoryPlan:
    """What is where, in bytes. `fits` is False where even this placement passes a limit."""

    layers: int
    slow_layers: int  # the last ones
    fast_limit: int
    slow_limit: int | None  # None: no limit is known
    fixed_bytes: int
    resident_bytes: int  # KV of resident layers
    buffer_bytes: int  # selected entries of slow layers
    selector_bytes: int
    staging_bytes: int
    slow_bytes: int

    @property
    def fast_bytes(self) -> int:
        """Bytes of fast memory, weights included."""
        return self.fixed_bytes + self.resident_bytes + self.buffer_bytes + self.selector_bytes + self.staging_bytes

    @property
    def fits(self) -> bool:
        """Whether both tiers hold it."""
        return self.fast_bytes <= self.fast_limit and (self.slow_limit is None or self.slow_bytes <= self.slow_limit)

    def parts(self) -> dict[str, int]:
        """The fast tier's bytes by what they are for; they sum to fast_bytes."""
        return {
            "weights": self.fixed_bytes,
            "resident KV": self.resident_bytes,
            "slow layers' buffers": self.buffer_bytes,
            "selector": self.selector_bytes,
            "staging": self.staging_bytes,
        }


def token_bytes(kv_type: KVType, kv_heads: int, head_dim: int) -> int:
    """Bytes of K and V of one token in one layer. Counted per KV head, whatever the number of query heads."""
    if kv_type not in VALUE_BYTES:
        raise ConfigError(f"KV type {kv_type!r} is unknown; use {', '.join(VALUE_BYTES)}", "kv_cache_dtype")
    value, scale = VALUE_BYTES[kv_type]
    return 2 * kv_heads * (head_dim * value + scale)


def count_parameters(spec: DecoderSpec) -> int:
    """Weights of a dense decoder, to well within a percent (biases and norms of heads are left out)."""
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    mlp = (3 if spec.gated else 2) * spec.hidden_size * spec.intermediate_size
    tables = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    learned = 0 if spec.rope else spec.max_positions * spec.hidden_size
    return tables + learned + spec.num_layers * (attention + mlp + 2 * spec.hidden_size) + spec.hidden_size


def count_head_parameters(spec: DecoderSpec) -> int:
    """Weights of a retrieval head pruned to what gives attention: fusion, Q and K (the embedding is the target's)."""
    fusion = 3 * spec.hidden_size * spec.hidden_size
    return fusion + 2 * spec.hidden_size * spec.head_dim * (spec.num_heads + spec.num_kv_heads)


def selector_token_bytes(
    spec: DecoderSpec, kind: SelectorKind, page_size: int = 16, group: int = 0, taps: int = 8
) -> int:
    """Bytes per token that a selector keeps resident.

    published: (1 + alpha) layers of 16-bit KV, as the paper's formula counts. head: one of the target's shape.
    pages: two bfloat16 vectors per page and KV head, of `taps` (0: all) layers in every `group` (0: of all). window:
    nothing.
    """
    width, layers = spec.num_kv_heads * spec.head_dim, spec.num_layers
    group = min(group, layers) or layers
    sizes_of_groups = [min(group, layers - first) for first in range(0, layers, group)]
    observed = sum(min(taps or size, size) for size in sizes_of_groups)
    sizes = {
        "published": 4 * (1 + spec.num_heads // spec.num_kv_heads) * width,
        "head": -(-head_page_bytes(spec.num_kv_heads, spec.head_dim, spec.hidden_size, page_size) // page_size),
        "pages": -(-2 * 2 * observed * spec.num_kv_heads * (-(-spec.head_dim // 16) * 16) // page_size),
        "window": 0,
    }
    if kind not in sizes:
        raise ConfigError.unknown(kind, sizes, "selector")
    return sizes[kind]


def head_page_bytes(kv_heads: int, head_dim: int, hidden: int, page_size: int) -> int:
    """Bytes that a retrieval head keeps for a page: bfloat16 keys of its entries, and the last one's fused state."""
    return page_size * kv_heads * -(-head_dim // 16) * 16 * 2 + hidden * 4


def footprint(
    spec: DecoderSpec,
    weight_bytes: int,
    selector: SelectorKind = "published",
    kv_type: KVType = "bfloat16",
    slow_type: KVType | None = None,
    page_size: int = 1,
    overhead: float = 1.3,
    staging_layers: int = 0,
) -> Footprint:
    """The footprint of a model with this shape and these stored weights; by default as the paper counts."""
    if not 1 <= overhead < float("inf"):
        raise ConfigError(f"overhead = {overhead} is refused; use 1 or more", "overhead")
    headed = selector in ("published", "head")
    return Footprint(
        weight_bytes=weight_bytes,
        layers=spec.num_layers,
        kv_bytes=token_bytes(kv_type, spec.num_kv_heads, spec.head_dim),
        slow_kv_bytes=token_bytes(slow_type or kv_type, spec.num_kv_heads, spec.head_dim),
        selector_bytes=selector_token_bytes(spec, selector),
        head_bytes=2 * count_head_parameters(spec) if headed else 0,
        overhead=overhead,
        staging_layers=staging_layers,
        page_size=page_size,
    )


def plan(
    model: Footprint,
    fast_limit: int,
    loads: Sequence[Load],
    slow_layers: int = 0,
    slow_limit: int | None = None,
    tokens: int | None = None,
) -> MemoryPlan:
    """Bytes of every part with the last `slow_layers` layers in the slow tier.

    tokens: those that are held, where requests share some or hold less than their length yet; None: all lengths.
    """
    if not 0 <= slow_layers <= model.layers:
        raise ConfigError(f"slow_layers = {slow_layers} is refused; use 0 to {model.layers}", "slow_layers")
    lengths = [model.padded(load.length) for load in loads]
    buffered = sum(min(model.padded(load.budget), length) for load, length in zip(loads, lengths, strict=True))
    staged = model.staging_layers * max(lengths, default=0) if slow_layers else 0
    held = sum(lengths) if tokens is None else model.padded(tokens)
    return MemoryPlan(
        layers=model.layers,
        slow_layers=slow_layers,
        fast_limit=fast_limit,
        slow_limit=slow_limit,
        fixed_bytes=model.fixed_bytes,
        resident_bytes=(model.layers - slow_layers) * model.kv_bytes * held,
        buffer_bytes=slow_layers * model.kv_bytes * (buffered + model.padded(model.pass_rows)),
        selector_bytes=model.selector_bytes * held,
        staging_bytes=staged * model.kv_bytes,
        slow_bytes=slow_layers * model.slow_kv_bytes * held,
    )


def most_tokens(model: Footprint, fast_limit: int, loads: Sequence[Load], slow_layers: int) -> int:
    """Tokens that may be held, whole pages, while requests of these lengths run with so many slow layers."""
    free = fast_limit - plan(model, fast_limit, loads, slow_layers, tokens=0).fast_bytes
    rate = (model.layers - slow_layers) * model.kv_bytes + model.selector_bytes
    most = max(0, free) // rate if rate else (1 << 40) * (free >= 0)
    return most // model.page_size * model.page_size


def fit_layers(
    model: Footprint,
    fast_limit: int,
    loads: Sequence[Load],
    slow_limit: int | None = None,
    tokens: int | None = None,
) -> int | None:
    """The fewest slow layers with which the loads fit; None where no placement does. tokens: as in `plan`."""
    fits = (i for i in range(model.layers + 1) if plan(model, fast_limit, loads, i, slow_limit, tokens).fits)
    return next(fits, None)


def longest_context(
    model: Footprint, fast_limit: int, requests: int, budget: int, slow_layers: int, slow_limit: int | None = None
) -> int | None:
    """S_i: the longest equal length of all requests that fits with i slow layers; None where nothing bounds it.

    For lengths above the budget this is the published threshold with its missing factor restored:
    S_i = (Mem - 1.3 (M_O + M_D) - 4 i B R H D) / (4 (L + 1 + alpha - i) R H D).
    """
    if requests < 1 or budget < 1:
        raise ConfigError("requests and budget must be 1 or more", "requests" if requests < 1 else "budget")
    free = fast_limit - model.fixed_bytes
    staging = model.staging_layers * model.kv_bytes if slow_layers else 0
    short_rate = requests * (model.layers * model.kv_bytes + model.selector_bytes) + staging
    buffers = slow_layers * model.kv_bytes * (requests * model.padded(budget) + model.padded(model.pass_rows))
    long_rate = short_rate - requests * slow_layers * model.kv_bytes
    if free < short_rate * model.padded(budget):
        longest: int | None = max(0, free // short_rate)
    else:
        longest = (free - buffers) // long_rate if long_rate else None
    if slow_limit is not None and slow_layers:
        ceiling = slow_limit // (requests * slow_layers * model.slow_kv_bytes)
        longest = ceiling if longest is None else min(longest, ceiling)
    return longest if longest is None else longest // model.page_size * model.page_size


def thresholds(
    model: Footprint, fast_limit: int, requests: int, budget: int, slow_limit: int | None = None
) -> list[int | None]:
    """S_0 .. S_L: the context length at which each further layer must go down."""
    return [longest_context(model, fast_limit, requests, budget, i, slow_limit) for i in range(model.layers + 1)]


def most_requests(model: Footprint, fast_limit: int, load: Load, slow_limit: int | None = None) -> int:
    """How many requests of this load fit together, slow tier included; searched by doubling and halving."""
    if model.padded(load.length) == 0:
        raise ConfigError("length must be 1 or more", "length")
    high = 1
    while fit_layers(model, fast_limit, [load] * high, slow_limit) is not None and high < 1 << 20:
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        fits = fit_layers(model, fast_limit, [load] * middle, slow_limit) is not None
        low, high = (middle, high) if fits else (low, middle)
    return low


def shortage(model: Footprint, fast_limit: int, loads: Sequence[Load], slow_limit: int | None) -> str:
    """Why no placement fits and what would help, in one line."""
    least = min((plan(model, fast_limit, loads, i, slow_limit) for i in range(model.layers + 1)), key=_excess)
    if least.fast_bytes > fast_limit:
        return (
            f"{len(loads)} contexts need {least.fast_bytes:,} bytes of fast memory of {fast_limit:,} even with "
            f"{least.slow_layers} of {model.layers} layers in the slow tier; lower the budget, the number of requests "
            "or their length"
        )
    return (
        f"{len(loads)} contexts need {least.slow_bytes:,} bytes of the slow tier of {slow_limit:,}; give it more "
        "space, or lower the number of requests or their length"
    )


def _excess(candidate: MemoryPlan) -> int:
    over_slow = 0 if candidate.slow_limit is None else max(0, candidate.slow_bytes - candidate.slow_limit)
    return max(0, candidate.fast_bytes - candidate.fast_limit) + over_slow
