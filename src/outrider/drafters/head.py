"""An EAGLE-3 head drafts from the target's own hidden states (Li et al. 2025, arXiv 2503.01840).

Slot t of the head joins the fused states of position t with the embedding of token t + 1 and guesses token t + 2;
further tokens of a draft feed the head's own state back. Keys and values of committed slots are kept per sequence, of
drafted ones never. Sequences draft in one padded batch per depth. Those of ended sequences are archived for a while,
so that a prompt whose pages the target found again finds its slots again too.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Context, Need, Observation
from outrider.drafters.host import Host
from outrider.errors import ConfigError, ModelError
from outrider.models.eagle3 import Eagle3Head, HeadKV, spec_from_config
from outrider.models.eagle3_files import CONFIG, load_head
from outrider.models.spec import DecoderSpec
from outrider.types import NO_DRAFT, Draft

_BATCH_ROWS = 16  # a longer backlog is computed before the batch, so that it does not pad the others


@dataclass(frozen=True)
class HeadOptions:
    """Options of the `head` drafter."""

    path: str = ""  # folder of the head
    device: str = "cpu"  # where it runs; may differ from the target's
    width: int = 1  # guesses per depth; from 2 on the draft is a tree: the best chain first, its rivals as leaves
    archive_tokens: int = 32768  # slots of ended sequences that are kept for prompts that begin alike; 0: none

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError('drafter "head" needs a path: {"name": "head", "path": ...}', "drafters")
        if not 1 <= self.width <= 8 or self.archive_tokens < 0:
            raise ConfigError("head: use width 1 to 8 and archive_tokens from 0", "drafters")


@dataclass
class _State:
    """One sequence: the slots computed so far, and states of committed positions that wait for their next token."""

    kv: HeadKV | None = None
    start: int = 0  # position of the first slot
    tokens: list[int] = field(default_factory=list)  # of the slots: tokens start .. start + slots (one more than slots)
    waiting: list[Tensor] = field(default_factory=list)  # fused states [rows, hidden]
    following: int = 0  # position behind the last waiting state

    @property
    def slots(self) -> int:
        return 0 if self.kv is None else self.kv.k.shape[2]


@dataclass
class _Turn:
    """One sequence's part of a call."""

    context: Context
    state: _State
    depth: int
    rows: Tensor  # fused states [rows, hidden] of the slots to compute
    first: int  # position of the first of them
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    rivals: list[list[tuple[int, float]]] = field(default_factory=list)  # by depth: (token, probability)


class HeadDrafter:
    """Drafts with a head. `embedding` [vocabulary, hidden] is the target's, `taps` are the layers of its features."""

    needs: frozenset[Need] = frozenset({"features"})
    Options = HeadOptions

    def __init__(
        self,
        head: Eagle3Head,
        embedding: Tensor,
        taps: Sequence[int],
        vocab_size: int,
        *,
        width: int = 1,
        archive_tokens: int = 0,
        name: str = "head",
    ) -> None:
        missing = set(head.spec.taps) - set(taps)
        if missing:
            raise ModelError(f"the target does not give the states after layers {sorted(missing)} that the head needs")
        self.name = name
        self._head = head
        self._embedding = embedding
        self._taps = [list(taps).index(tap) for tap in head.spec.taps]
        self._vocab_size = vocab_size
        self._width = width
        self._ids = head.target_ids(torch.arange(head.spec.draft_vocab_size, device=head.d2t.device)).cpu()
        self._archive = _Archive(archive_tokens)
        self._states: dict[int, _State] = {}

    @classmethod
    def build(cls, options: HeadOptions, host: Host) -> HeadDrafter:
        """Load the head; ConfigError or ModelError where it is not one of this target."""
        if host.target is None or host.weights is None:
            raise ConfigError("a head drafter needs the target, which the engine was started without", "drafters")
        head = load_head(options.path, host.target.spec).to(options.device)
        own = head.embed_tokens
        dense = own.weight.detach() if own is not None else torch.from_numpy(host.weights["embed"].dense())
        return cls(
            head,
            dense.to(options.device, torch.float16),
            host.target.taps,
            host.vocab_size,
            width=options.width,
            archive_tokens=options.archive_tokens,
            name=Path(options.path).name,
        )

    @property
    def held(self) -> Collection[int]:
        """Sequences that something is held for."""
        return self._states.keys()

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        turns = {
            i: turn
            for i, (context, depth) in enumerate(zip(contexts, depths, strict=True))
            if depth > 0 and (turn := self._begin(context, depth))
        }
        if turns:
            self._run(list(turns.values()))
        return [self._draft(turns[i]) if i in turns else NO_DRAFT for i in range(len(contexts))]

    @torch.inference_mode()
    def observe(self, observations: Sequence[Observation]) -> None:
        """Fuse and keep the states of what was committed."""
        for seen in observations:
            if seen.features is not None and seen.tokens:
                state = self._states.setdefault(seen.sequence_id, _State(start=seen.start, following=seen.start))
                if state.following != seen.start:  # recomputed or missed: begin again here
                    state = self._states[seen.sequence_id] = _State(start=seen.start, following=seen.start)
                features = torch.from_numpy(seen.features[self._taps]).to(self._embedding.device)
                state.waiting.append(self._head.fuse(features))
                state.following += len(seen.tokens)

    def forget(self, sequence_id: int) -> None:
        state = self._states.pop(sequence_id, None)
        if state is not None:
            self._archive.put(state)

    def _begin(self, context: Context, depth: int) -> _Turn | None:
        """What is to be computed for a sequence; None where its latest states are not there."""
        state = self._states.get(context.sequence_id)
        if state is None or not state.waiting or state.following != len(context.tokens) - 1:
            return None
        if state.kv is None and state.start > 0:
            state.kv, state.start = self._archive.find(context.tokens, state.start), 0
            if state.kv is None:
                state.start = state.following - sum(map(len, state.waiting))
        rows, first = torch.cat(state.waiting), state.start + state.slots
        if len(rows) > _BATCH_ROWS:
            rows, first = self._prefill(state, context.tokens, rows, first)
        state.waiting = [rows]
        return _Turn(context, state, depth, rows, first)

    def _prefill(self, state: _State, tokens: Sequence[int], rows: Tensor, first: int) -> tuple[Tensor, int]:
        """Compute all but the last row on its own; they draft nothing."""
        count = len(rows) - 1
        embeddings = self._embed(tokens[first + 1 : first + 1 + count])
        positions = torch.arange(first, first + count, device=rows.device)
        new = self._head.prefill(rows[None, :count], embeddings[None], positions[None])
        state.kv = new if state.kv is None else _join(state.kv, new)
        return rows[count:], first + count

    def _run(self, turns: list[_Turn]) -> None:
        """One padded pass over the committed rows, then one pass per further depth."""
        live = self._first(turns)
        for depth in range(1, max(turn.depth for turn in turns)):
            positions = torch.tensor([[len(turn.context.tokens) - 2 + depth] for turn in turns])
            embeddings = self._embed([turn.tokens[-1] for turn in turns])[:, None]
            live.valid = torch.cat([live.valid, torch.ones_like(live.valid[:, :1])], dim=1)
            mask = live.valid[:, None, None]
            step = self._head.step(live.h[:, None], embeddings, positions.to(live.h.device), live.kv, mask)
            live.h, live.kv = step.h[:, 0], step.kv
            self._choose(turns, step.logits[:, 0])

    def _first(self, turns: list[_Turn]) -> _Live:
        """The pass over committed rows: their slots are kept, and the first tokens are chosen."""
        device = self._embedding.device
        counts = torch.tensor([len(turn.rows) for turn in turns], device=device)
        most = int(counts.max())
        kv, entries = _stack([turn.state for turn in turns], self._head, device)
        following = [turn.context.tokens[turn.first + 1 :] for turn in turns]
        embeddings = torch.stack([_pad(self._embed(tokens), most) for tokens in following])
        states = torch.stack([_pad(turn.rows, most) for turn in turns])
        firsts = torch.tensor([turn.first for turn in turns], device=device)
        mask, valid = _masks(entries, counts, most)
        step = self._head.step(states, embeddings, firsts[:, None] + torch.arange(most, device=device), kv, mask)
        for index, turn in enumerate(turns):
            self._keep(turn, step.kv, index, int(entries.max()))
        batch = torch.arange(len(turns), device=device)
        self._choose(turns, step.logits[batch, counts - 1])
        return _Live(step.h[batch, counts - 1], step.kv, valid)

    def _keep(self, turn: _Turn, kv: HeadKV, index: int, padded: int) -> None:
        """Commit the slots of a turn's rows; their states need not wait any longer."""
        state, count = turn.state, len(turn.rows)
        new = HeadKV(*(part[index : index + 1, :, padded : padded + count] for part in kv))
        state.kv = HeadKV(*(part.clone() for part in new)) if state.kv is None else _join(state.kv, new)
        state.waiting = []
        state.tokens = list(turn.context.tokens[state.start : state.start + state.slots + 1])

    def _choose(self, turns: list[_Turn], logits: Tensor) -> None:
        """One more token for every turn, by the sequence's own chooser, with the rivals it beat."""
        probabilities = torch.softmax(logits.float(), dim=-1).cpu()
        for turn, row, p in zip(turns, logits.float().cpu(), probabilities, strict=True):
            full = torch.full((self._vocab_size,), -torch.inf)
            full[self._ids] = row
            output = [*turn.context.tokens[turn.context.prompt_length :], *turn.tokens]
            token = int(turn.context.chooser.pick(full.numpy(), output))
            top = p.topk(min(self._width, len(p)))
            chances = dict(zip(self._ids[top.indices].tolist(), top.values.tolist(), strict=True))
            turn.tokens.append(token)
            turn.confidence.append(min(1.0, float(p[self._ids == token].sum())))
            turn.rivals.append([(rival, chance) for rival, chance in chances.items() if rival != token])

    def _draft(self, turn: _Turn) -> Draft:
        """The chain, and behind it, from width 2 on, the rivals of every depth as leaves."""
        depth = turn.depth
        tokens, confidence = turn.tokens[:depth], turn.confidence[:depth]
        if self._width == 1:
            return Draft(tuple(tokens), drafter=self.name, confidence=tuple(confidence))
        parents = [node - 1 for node in range(depth)]
        for node, rivals in enumerate(turn.rivals[:depth]):
            for token, chance in rivals[: self._width - 1]:
                tokens, confidence, parents = [*tokens, token], [*confidence, chance], [*parents, node - 1]
        return Draft(tuple(tokens), tuple(parents), drafter=self.name, confidence=tuple(confidence))

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings [tokens, hidden] of the target."""
        index = torch.tensor(list(tokens), dtype=torch.long, device=self._embedding.device)
        return self._embedding[index].to(self._head.fc.weight.dtype)


@dataclass
class _Live:
    """What goes from one depth to the next: states [batch, hidden], entries, and which are real [batch, entries]."""

    h: Tensor
    kv: HeadKV
    valid: Tensor


class _Archive:
    """Slots of ended sequences, the latest first to be found and the last to be dropped."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, tuple[list[int], HeadKV]] = OrderedDict()
        self._tokens = 0
        self._next = 0

    def put(self, state: _State) -> None:
        """Keep the slots of an ended sequence that began at the first token."""
        if state.kv is None or state.start > 0 or state.slots > self._capacity:
            return
        self._held[self._next] = (state.tokens, state.kv)
        self._next += 1
        self._tokens += state.slots
        while self._tokens > self._capacity:
            _, (_, kv) = self._held.popitem(last=False)
            self._tokens -= kv.k.shape[2]

    def find(self, tokens: Sequence[int], slots: int) -> HeadKV | None:
        """The first `slots` slots of a sequence that begins like `tokens`; slot t needs token t + 1."""
        wanted = list(tokens[: slots + 1])
        for known, kv in reversed(self._held.values()):
            if known[: slots + 1] == wanted and kv.k.shape[2] >= slots:
                return HeadKV(kv.k[:, :, :slots].clone(), kv.v[:, :, :slots].clone())
        return None


def head_taps(path: str, target: DecoderSpec) -> tuple[int, ...]:
    """The target's layers whose states the head in a folder needs. ModelError where it is not one of this target."""
    try:
        config: dict[str, Any] = json.loads(Path(path, CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} holds no readable {CONFIG} ({error}); give the folder of an EAGLE-3 head") from error
    return spec_from_config(config, target).taps


def _stack(states: Sequence[_State], head: Eagle3Head, device: torch.device) -> tuple[HeadKV, Tensor]:
    """Entries of several sequences padded at the end, and how many each has [batch]."""
    entries = torch.tensor([state.slots for state in states], device=device)
    most, spec = int(entries.max()), head.spec
    k, v = (
        torch.zeros(len(states), spec.num_kv_heads, most, spec.head_dim, device=device, dtype=head.fc.weight.dtype)
        for _ in range(2)
    )
    for index, state in enumerate(states):
        if state.kv is not None:
            k[index, :, : state.slots], v[index, :, : state.slots] = state.kv.k[0], state.kv.v[0]
    return HeadKV(k, v), entries


def _masks(entries: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """What rows may read [batch, 1, most, entries + most], and which entries are real [batch, entries + most].

    A padding row reads itself, so that it has something to weigh; nobody reads it.
    """
    row = torch.arange(most, device=entries.device)
    old = torch.arange(int(entries.max()), device=entries.device) < entries[:, None]
    real = row < counts[:, None]
    own = ((row[:, None] >= row) & real[:, None, :]) | (row[:, None] == row)
    return torch.cat([old[:, None].expand(-1, most, -1), own], dim=2)[:, None], torch.cat([old, real], dim=1)


def _pad(rows: Tensor, most: int) -> Tensor:
    """Rows [n, hidden] with zeros behind them: [most, hidden]."""
    return torch.nn.functional.pad(rows, (0, 0, 0, most - len(rows)))


def _join(kv: HeadKV, new: HeadKV) -> HeadKV:
    """Entries of one sequence, the new ones behind."""
    return HeadKV(torch.cat([kv.k, new.k], dim=2), torch.cat([kv.v, new.v], dim=2))
