"""The frozen values that the parts of Outrider hand to each other.

Vocabulary (see docs/architecture.md): a Request is what a user asked; a Plan says who runs in one step and how far;
a Draft is proposed tokens; a Batch is one forward pass; a Verdict is what the target made of a draft.

p is the target's distribution, q a drafter's. Acceptance length = 1 + accepted / drafts.
Three numbers are never mixed: a token's true *position* (RoPE), its *entry* (index among a sequence's KV entries)
and its physical *slot* (page * page size + offset).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import UnsupportedError

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; the names are those of vLLM.

    temperature 0 is greedy. `top_k` 0 or -1 means all. Penalties follow OpenAI (presence, frequency) and
    CTRL (repetition). `seed` fixes the request's noise: the answer does not depend on what runs beside it, nor on
    speculation. `structured_outputs` constrains the text, by exactly one of {"json": schema}, {"json_object": True},
    {"regex": str}, {"choice": [str, ...]} and {"grammar": lark}.
    `extra_args`: {"speculative": bool, "context_budget": int}; other keys are refused.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: Mapping[str, Any] | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for names, fits, expected in _KINDS:
            for name in names.split():
                if not fits(getattr(self, name)):
                    raise UnsupportedError(f"{name} = {getattr(self, name)!r} is refused; use {expected}", field=name)
        for name, ok, rule in self._rules():
            if not ok:
                raise UnsupportedError(f"{name} = {getattr(self, name)!r} is refused; {rule}", field=name)
        _check_extra(self.extra_args)
        if self.structured_outputs is not None:
            _check_structure(self.structured_outputs)

    def _rules(self) -> list[tuple[str, bool, str]]:
        return [
            ("n", 1 <= self.n <= 128, "use 1 to 128"),
            ("temperature", 0 <= self.temperature < float("inf"), "use 0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "use a number above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "use -1 or 0 (all) or a positive number"),
            ("min_p", 0 <= self.min_p <= 1, "use 0 to 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "use 0.01 to 100"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "use -2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "use -2 to 2"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "use 1 or more"),
            ("min_tokens", 0 <= self.min_tokens <= (self.max_tokens or self.min_tokens), "use 0 to max_tokens"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "use 0 to 20"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "use 0 to 20"),
            ("stop", all(self.stop_strings), "stop strings must not be empty"),
        ]

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whether one, several or none were given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def speculative(self) -> bool:
        """Whether this request may be drafted for (per-request switch)."""
        return bool(self.extra_args.get("speculative", True))

    @property
    def context_budget(self) -> int | None:
        """Entries that attention reads per KV head for this request; None: as configured."""
        return self.extra_args.get("context_budget")


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, (Sequence, Set, np.ndarray)) and not isinstance(value, str) and all(map(fits, value))


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_whole, value)) and all(map(_is_number, value.values()))


#: What the values of fields must be: names, test, and the words of the refusal.
_KINDS: Sequence[tuple[str, Callable[[Any], bool], str]] = (
    ("n top_k min_tokens", _is_whole, "a whole number"),
    ("temperature top_p min_p repetition_penalty presence_penalty frequency_penalty", _is_number, "a number"),
    ("max_tokens seed logprobs prompt_logprobs", lambda v: v is None or _is_whole(v), "a whole number, or None"),
    (
        "allowed_token_ids banned_token_ids stop_token_ids",
        lambda v: v is None or _is_list(v, _is_whole),
        "a list of token ids, or None",
    ),
    ("logit_bias", lambda v: v is None or _is_bias(v), "a table from token id to number, or None"),
    (
        "stop",
        lambda v: v is None or isinstance(v, str) or _is_list(v, lambda item: isinstance(item, str)),
        "a string, a list of strings, or None",
    ),
    ("extra_args", lambda v: isinstance(v, Mapping), "a table"),
)


def _check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse unknown keys of extra_args, and values of the wrong kind."""
    unknown = set(extra) - {"speculative", "context_budget"}
    if unknown:
        raise UnsupportedError(
            f"unknown extra_args {sorted(unknown)}; known: speculative, context_budget", field="extra_args"
        )
    if not isinstance(extra.get("speculative", True), bool):
        raise UnsupportedError("extra_args: speculative is True or False", field="extra_args")
    budget = extra.get("context_budget", 1)
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise UnsupportedError("extra_args: context_budget is a number of entries, 1 or more", field="extra_args")


def _check_structure(structure: Mapping[str, Any]) -> None:
    """Exactly one known kind of constraint."""
    known = ("json", "json_object", "regex", "choice", "grammar")
    if len(structure) != 1 or not set(structure) <= set(known):
        raise UnsupportedError(
            f"structured_outputs has the keys {list(structure)}; use exactly one of {', '.join(known)}",
            field="structured_outputs",
        )


@dataclass(frozen=True)
class Request:
    """What a user asked: prompt token ids and how to answer. Never changes."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams


class Finish(NamedTuple):
    """Why a sequence ended; `detail` is the stop string or token id for `stop`, a message for `error`."""

    reason: FinishReason
    detail: str | int | None = None


class Logprob(NamedTuple):
    """log p of one token under the target, before sampling parameters; `top` holds (token, log p), best first."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of one sequence: a chain, or a tree through `parents`.

    tokens[i] follows tokens[parents[i]]; parent -1 is the sequence's last known token; parents come before children.
    `parents` None means a chain. `probs` is None for point masses, else q with shape [len(tokens), vocabulary]:
    row i is the distribution that tokens[i] was *sampled* from.
    `confidence[i]` is the drafter's own probability of tokens[i] (optional, for early stops and votes).
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    probs: Float64 | None = None
    drafter: str = "none"
    confidence: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every token follows the one before it."""
        return self.parents is None

    def parent(self, node: int) -> int:
        """Index of the node that tokens[node] follows; -1 is the root."""
        return node - 1 if self.parents is None else self.parents[node]

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`, inclusive; empty for the root."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parent(node)
        return nodes[::-1]

    def children(self, node: int) -> list[int]:
        """Nodes that follow `node`, in proposal order."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [i for i, parent in enumerate(self.parents) if parent == node]


NO_DRAFT = Draft()


@dataclass(frozen=True)
class Verdict:
    """What the target made of one sequence's draft in one step.

    tokens: those the sequence gains, in order: the accepted ones, then (unless the text ended on an accepted one) one
    of the target's own: the correction of the first wrong token, or the bonus behind a fully accepted draft.
    accepted: indices of the accepted draft nodes, root to leaf; len(accepted) <= len(tokens) <= len(accepted) + 1.
    Empty tokens mean that the step only computed part of a prompt.
    """

    tokens: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    drafted: int = 0
    drafter: str = "none"
    finish: Finish | None = None
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class Batch:
    """One forward pass over ragged rows, laid out flat. T rows, S sequences, R rows whose logits are wanted.

    Row r of sequence s (row_starts[s] <= r < row_starts[s + 1]) writes its K and V to slots[r] and attends to
    entries 0 .. contexts[s] - 1 of its sequence (found through `pages`) and to rows of its own sequence in this pass:
    those up to itself (chain: ancestors None, or all 64 bits set) or those in `ancestors[r]` (tree, up to 64 rows).
    """

    tokens: Int32  # [T]
    positions: Int32  # [T] true positions
    slots: Int32  # [T] physical slots: page * page_size + offset
    row_starts: Int32  # [S + 1]
    contexts: Int32  # [S] committed entries before this pass
    pages: Int32  # [S, P] physical page of every logical page; unused ones are 0
    logit_rows: Int32  # [R] rows whose best token (and logits) are wanted, ascending
    ancestors: NDArray[np.uint64] | None = None  # [T] bit j: may read row row_starts[s] + j; all ones: causal
    want_logits: bool = True  # False: the best token of each logit row is enough
    selection: Selection | None = None  # None: attention reads every entry
    slow: tuple[SlowView, ...] = ()  # by their first layers; empty: every layer keeps its KV in the cache's pages


@dataclass(frozen=True)
class Selection:
    """Which committed entries attention reads, per sequence and KV head; shared by the layers of one group.

    entries[g, s, h, :counts[g, s, h]] are entry indices in ascending order; `groups[l]` is the group of layer l.
    A sequence with counts -1 reads everything.
    """

    entries: Int32  # [G, S, H, B]
    counts: Int32  # [G, S, H]
    groups: Int32  # [L]


@dataclass(frozen=True)
class SlowView:
    """What takes the place of a Batch's pages, slots and selection from layer `first` on: these layers keep buffers.

    `entries` are rows of the sequence's region of a buffer, in the order of the entries they hold, so that attention
    adds up in the same order as over resident KV and gives the same bits. A sequence with counts -1 reads everything
    through its `pages`. Pages count from the first page of the layer's own buffer.
    """

    pages: Int32  # [S, P] of each sequence: its region, or where all of its KV of this layer has been staged
    slots: Int32  # [T] where the rows of the pass are written
    entries: Int32  # [G, S, KV heads, n]
    counts: Int32  # [G, S, KV heads]
    groups: Int32  # [L] as in Selection
    first: int  # layer; all behind it are slow too


@dataclass(frozen=True)
class Result:
    """What a forward pass gives. `best` breaks ties towards the lowest token id."""

    best: NDArray[np.int64]  # [R]
    logits: Float32 | None = None  # [R, V] where Batch.want_logits
    features: Float32 | None = None  # [taps, T, hidden] hidden states after the tapped layers, where asked for
    queries: Float32 | None = (
        None  # [query taps, R, heads, head_dim] rotated queries of the logit rows, where asked for
    )


class Traffic(NamedTuple):
    """What the slow tier cost one sequence since it was last told."""

    loaded_bytes: int = 0  # for this sequence
    stored_bytes: int = 0
    exposed_s: float = 0.0  # its steps waited so long for loads


class Reads(NamedTuple):
    """What attention read of one sequence's context in a step. The shares are looked at now and then, else None."""

    budget: int  # entries per KV head, the rows of the pass included
    entries: int  # committed entries read per KV head
    length: int  # committed entries there were
    captured: float | None = None  # share of the attention mass that the selector believes it read
    overlap: float | None = None  # share of the selection that the step before had read too


@dataclass(frozen=True)
class Delta:
    """News of one sample of a request, as the engine tells it: new tokens and, exactly once, how it ended."""

    request_id: str
    index: int  # which of the n samples
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    accepted: int = 0  # the first `accepted` tokens were drafted
    drafted: int = 0  # how many were proposed in this step
    drafter: str = "none"
    finish: Finish | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache, told with the first delta
    reads: Reads | None = None  # None: the engine reads everything always
    traffic: Traffic | None = None  # None: all KV is resident
