"""The engine's statistics as the server shows them: the one place that knows the keys of `Backend.stats`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")

SPECULATION = ("lengths", "draft_s", "verify_s", "overhead_s")  # kept in the engine's report of speculation


@dataclass(frozen=True)
class DrafterStats:
    """Cumulative counts of one drafter; `per_position[i]` counts accepted tokens at place i of a draft."""

    name: str
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    per_position: tuple[int, ...] = ()
    votes_won: int = 0
    weight: float = 1.0
    time_s: float = 0.0
    failures: int = 0
    off: str | None = None
    held: int = 0

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0


@dataclass(frozen=True)
class ContextStats:
    """What attention read so far. `captured` and `overlap` are means, None where nothing was selected."""

    mode: str = "full"
    budget: int | None = None
    sparse_steps: int = 0
    full_steps: int = 0
    read_entries: int = 0
    known_entries: int = 0
    captured: float | None = None
    overlap: float | None = None
    select_s: float = 0.0
    kept: Mapping[str, int] | None = None  # prompts that stay on disk; None where none ever do

    @property
    def read_share(self) -> float:
        """Entries read over entries there were."""
        return self.read_entries / self.known_entries if self.known_entries else 1.0


@dataclass(frozen=True)
class Snapshot:
    """What the engine does at one moment. Times are cumulative seconds; sizes are bytes."""

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    steps: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    kv_bytes_touched: int = 0
    kv_bytes_total: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    drafters: tuple[DrafterStats, ...] = ()
    lengths: Mapping[int, int] = field(default_factory=dict)  # draft length -> drafts
    draft_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0
    memory: Mapping[str, Any] = field(default_factory=dict)
    tiers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    context: ContextStats = ContextStats()

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Snapshot:
        """From the engine's mapping; keys that an engine does not report keep their neutral value."""
        speculation = _plain(stats.get("speculation"))
        drafters = tuple(_known(DrafterStats, entry) for entry in map(_plain, speculation.get("drafters", ())))
        context = _known(ContextStats, _plain(stats.get("context")))
        plain = [name for name in cls.__dataclass_fields__ if name not in ("drafters", "context", *SPECULATION)]
        values = {name: stats[name] for name in plain if name in stats}
        values |= {name: speculation[name] for name in SPECULATION if name in speculation}
        return cls(drafters=drafters, context=context, **values)

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages in use, 0 to 1."""
        return self.kv_pages_used / self.kv_pages_total if self.kv_pages_total else 0.0

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts over all drafters."""
        drafts = sum(drafter.drafts for drafter in self.drafters)
        return 1.0 + sum(d.accepted_tokens for d in self.drafters) / drafts if drafts else 1.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the ratios spelt out."""
        drafters = [asdict(d) | {"acceptance_length": d.acceptance_length} for d in self.drafters]
        ratios = {"kv_usage": self.kv_usage, "acceptance_length": self.acceptance_length}
        context = asdict(self.context) | {"read_share": self.context.read_share}
        return asdict(self) | ratios | {"drafters": drafters, "context": context}


def _known(cls: type[T], entry: Mapping[str, Any]) -> T:
    """A record of what the engine reports, as far as the server shows it."""
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in entry.items() if name in known})


def _plain(value: Any) -> Mapping[str, Any]:
    """A mapping of what may be a dataclass, a mapping or nothing."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value or {}
