"""What a context configuration means for a model, before anything is allocated: what attention reads, what stays in
fast memory, what is slow, and what it takes. Printed at start; `outrider info MODEL --context-config JSON` shows it.

The numbers are those of planner.py, with the buffers of the engine: whole layers are staged through two slots as long
as the longest context, every slow layer has room for the rows of a pass, and a sixteenth of kv_memory (8 MiB at most)
is set aside for transfers. Weights are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.config import ContextConfig
from outrider.memory.place.build import buffer_capacity, fast_limit
from outrider.memory.planner import Footprint, Load, MemoryPlan, fit_layers, most_requests, plan
from outrider.memory.selectors import full_steps, read_selector


@dataclass(frozen=True)
class Placed:
    """So many requests of one length, as they would be placed; `plan` None: they do not fit at once."""

    requests: int
    length: int
    plan: MemoryPlan | None
    at_once: int  # requests of that length that do fit

    def line(self) -> str:
        """In words."""
        what = f"{self.requests} request{'s' * (self.requests > 1)} of {self.length:,} tokens: "
        if self.plan is None:
            return f"{what}{self.at_once} fit at once, the others wait"
        slow, layers = self.plan.slow_layers, self.plan.layers
        parts = [f"{name} {show_bytes(size)}" for name, size in self.plan.parts().items() if size]
        fast = f"{show_bytes(self.plan.fast_bytes)} of fast memory" + (f" ({', '.join(parts)})" if slow else "")
        if not slow:
            return f"{what}everything resident, {fast}"
        held = f"{_span(0, layers - slow)} resident, " if slow < layers else ""
        gone = f"{_span(layers - slow, layers)} slow"
        return f"{what}{held}{gone}: {fast}, {show_bytes(self.plan.slow_bytes)} in kv_path"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        known: dict[str, Any] = {"requests": self.requests, "length": self.length, "at_once": self.at_once}
        if self.plan is None:
            return {**known, "slow_layers": None}
        sizes = {"fast_bytes": self.plan.fast_bytes, "slow_bytes": self.plan.slow_bytes, "parts": self.plan.parts()}
        return {**known, "slow_layers": self.plan.slow_layers, **sizes}


@dataclass(frozen=True)
class Outlook:
    """A checked configuration, and KV as it would be placed."""

    context: ContextConfig
    model: Footprint  # of KV alone
    kv_type: str
    tokens: int  # that all tiers hold together
    placed: tuple[Placed, ...]

    def lines(self) -> list[str]:
        """In words, for people."""
        return [f"context: {reads_line(self.context)}", f"KV: {self._kv_line()}", *self._place_lines(), *self._notes()]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: sizes in bytes, lengths in tokens."""
        context, selects = self.context, self.context.mode != "full"
        return {
            "mode": context.mode,
            "selector": read_selector(context.selector).name if selects else None,
            "budget": context.budget if selects else None,
            "kv_type": self.kv_type,
            "slow_kv_type": self._slow_type if context.kv_path else None,
            "layers": self.model.layers,
            "kv_bytes_per_token": self.model.layers * self.model.kv_bytes,
            "selector_bytes_per_token": self.model.selector_bytes,
            "kv_memory": context.kv_memory,
            "kv_path": context.kv_path,
            "kv_tokens": self.tokens,
            "placed": [one.to_dict() for one in self.placed],
            "lines": self.lines(),
        }

    @property
    def _slow_type(self) -> str:
        return self.kv_type if self.context.slow_kv_dtype == "auto" else self.context.slow_kv_dtype

    def _kv_line(self) -> str:
        size, layers = self.model.layers * self.model.kv_bytes, self.model.layers
        each = f"{self.kv_type}, {size:,} bytes a token in {layers} layers"
        selector = f", {self.model.selector_bytes:,} more for the selector" if self.model.selector_bytes else ""
        return f"{each}{selector}; room for {self.tokens:,} tokens"

    def _place_lines(self) -> list[str]:
        context = self.context
        if context.kv_memory is None and not context.slow_layers:
            ready = "; kv_path is ready for when kv_memory is set" if context.kv_path else ""
            size = self.tokens * (self.model.layers * self.model.kv_bytes + self.model.selector_bytes)
            return [f"place: everything resident, {show_bytes(size)}{ready}"]
        limit = "no limit" if context.kv_memory is None else f"at most {show_bytes(context.kv_memory)} of fast memory"
        forced = f", {context.slow_layers} slow layers always" if context.slow_layers else ""
        slow = f"slow layers in {context.kv_path} as {self._slow_type}"
        return [f"place: {limit}{forced}, {slow}", *(f"  {one.line()}" for one in self.placed)]

    def _notes(self) -> list[str]:
        context, notes = self.context, []
        if context.keep_prompts is not None:
            size = show_bytes(context.keep_bytes)
            what = f"prompts of {context.keep_prompts:,} tokens or more stay in {context.kv_path}"
            notes.append(f"kept: {what}, {size} of them at most")
        if drafts_may_pause(context):
            notes.append(f"note: {PAUSE}")
        return notes


PAUSE = (
    "while layers are slow, the target does not draft for itself (sparse_self), since what it would read of them is "
    "not in fast memory; other drafters do, and the output is the same"
)


def drafts_may_pause(context: ContextConfig) -> bool:
    """Whether lossless mode may find layers in the slow tier."""
    return context.mode == "lossless" and (context.kv_memory is not None or bool(context.slow_layers))


def look_ahead(
    context: ContextConfig, model: Footprint, kv_type: str, tokens: int, longest: int, requests: Sequence[int]
) -> Outlook:
    """The outlook for these numbers of requests, each as long as the engine takes. model: of KV alone."""
    counts = sorted(set(requests))
    placed = tuple(_place(context, model, tokens, longest, count) for count in counts)
    return Outlook(context, model, kv_type, tokens, placed)


def _place(context: ContextConfig, model: Footprint, tokens: int, length: int, requests: int) -> Placed:
    load = Load(length, min(buffer_capacity(context, model.page_size), length))
    loads, limit = [load] * requests, fast_limit(context)
    slow = fit_layers(model, limit, loads) if context.slow_layers is None else context.slow_layers
    made = None if slow is None else plan(model, limit, loads, slow)
    room = tokens // model.padded(length)
    if made is None or not made.fits or room < requests:
        return Placed(requests, length, None, min(room, most_requests(model, limit, load)))
    return Placed(requests, length, made, requests)


def _span(first: int, last: int) -> str:
    """Layers first .. last - 1 in words."""
    return f"layer {first}" if last - first == 1 else f"layers {first}-{last - 1}"


def reads_line(context: ContextConfig) -> str:
    """What attention reads, in words."""
    if context.mode == "full":
        return "full, attention reads everything"
    picker = read_selector(context.selector).name
    shared = "all layers share a selection" if picker == "head" or not context.group else f"groups of {context.group}"
    seen = f", {context.taps or 'all'} of them looked at" if picker == "pages" and context.taps != 1 else ""
    entries = (
        f"{context.budget:,} entries per KV head ({context.sinks} first, {context.window} latest, the others picked by "
        f"{picker}, {shared}{'' if 'share' in shared else ' layers'}{seen})"
    )
    full = full_steps(context)
    begins = f"; the first {full} of every answer read everything" if full > 1 else ""
    if context.mode == "lossless":
        return f"lossless, drafts read {entries}; verification reads everything"
    if context.mode == "sparse":
        return f"sparse, steps read {entries}{begins}"
    return (
        f"bounded, steps read {entries}{begins}; a full one every {context.full_every} at least, and when less than "
        f"{context.min_captured:.0%} of attention is believed to be captured"
    )


def show_bytes(count: float) -> str:
    """Bytes as people read them, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
