"""An EAGLE-3 head drafts from the target's own hidden states (Li et al. 2025, arXiv 2503.01840).

Slot t of the head joins the fused states of position t with the embedding of token t + 1 and guesses token t + 2;
further tokens of a draft feed the head's own state back. What runs the head is a backend (models/head.py): compiled on
a CPU, where a greedy chain is one call, PyTorch elsewhere. What is kept per sequence is head_state.py.

    {"name": "head", "path": FOLDER}      a distilled head
    "heads"                               the heads that come with the target (shipped.py)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from outrider.drafters.base import Context, Need, Observation
from outrider.drafters.head_state import Archive, HeadState
from outrider.drafters.host import Host
from outrider.errors import ConfigError, ModelError
from outrider.models.build import known_device
from outrider.models.eagle3_store import StoredHead, head_taps, read_head
from outrider.models.head import Guess, HeadBackend, Job
from outrider.types import NO_DRAFT, Draft, Float32

__all__ = ["HeadDrafter", "HeadOptions", "head_taps"]

_RECALL = 256  # tokens; beyond them a prompt costs more than what it tells a head is worth
_BACKLOG = 64  # rows that wait before an observation computes them, where everything is read,
_UNBEGUN = 1024  # and before it begins without the slots of a cached prompt, which only a draft looks for


@dataclass(frozen=True)
class HeadOptions:
    """Options of the `head` drafter."""

    path: str = ""  # folder of the head, or the name of one that comes with the target
    device: str = "cpu"  # where it runs; may differ from the target's
    width: int = 1  # guesses per depth; from 2 on the draft is a tree: the best chain first, its rivals as leaves
    min_confidence: float = 0.0  # a greedy chain stops behind the first token below this probability
    archive_tokens: int = 32768  # slots of ended sequences that are kept for prompts that begin alike; 0: none
    dtype: Literal["auto", "float32", "int8", "int4"] = "auto"  # weights on a CPU; auto: as stored, else int8
    threads: int | None = None  # CPU threads; None: as many as the target
    recall: int | None = _RECALL  # most tokens that it reads of a text before it drafts; None: all of it

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError('drafter "head" needs a path: {"name": "head", "path": ...}', "drafters")
        if not 1 <= self.width <= 8 or self.archive_tokens < 0 or not 0 <= self.min_confidence < 1:
            raise ConfigError(
                "head: use width 1 to 8, archive_tokens from 0 and min_confidence from 0 to below 1", "drafters"
            )
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"head: threads = {self.threads} is refused; use 1 or more, or leave it out", "drafters")
        if self.recall is not None and self.recall < 1:
            raise ConfigError(
                f"head: recall = {self.recall} is refused; use 1 or more, or null to read all", "drafters"
            )


@dataclass
class _Turn:
    """One sequence's part of a call."""

    context: Context
    state: HeadState
    job: Job


class HeadDrafter:
    """Drafts with a head. `taps` are the layers of the target's features."""

    needs: frozenset[Need] = frozenset({"features"})
    Options = HeadOptions

    def __init__(
        self,
        backend: HeadBackend,
        taps: Sequence[int],
        vocab_size: int,
        *,
        width: int = 1,
        min_confidence: float = 0.0,
        archive_tokens: int = 0,
        recall: int | None = None,
        name: str = "head",
    ) -> None:
        missing = set(backend.spec.taps) - set(taps)
        if missing:
            raise ModelError(f"the target does not give the states after layers {sorted(missing)} that the head needs")
        self.name = name
        self.recall = recall
        self._backend = backend
        self._taps = [list(taps).index(tap) for tap in backend.spec.taps]
        self._vocab_size = vocab_size
        self._width = width
        self._floor = min_confidence
        self._archive = Archive(archive_tokens)
        self._states: dict[int, HeadState] = {}

    @classmethod
    def build(cls, options: HeadOptions, host: Host) -> HeadDrafter:
        """Load the head; ConfigError or ModelError where it is not one of this target."""
        if host.target is None or host.weights is None:
            raise ConfigError("a head drafter needs the target, which the engine was started without", "drafters")
        device = known_device(options.device)
        stored = read_head(options.path, host.target.spec)
        return cls(
            _compiled(stored, options, host) if device == "cpu" else _torch(stored, device, host),
            host.target.taps,
            host.vocab_size,
            width=options.width,
            min_confidence=options.min_confidence,
            archive_tokens=options.archive_tokens,
            recall=options.recall,
            name=Path(options.path).name,
        )

    @property
    def held(self) -> Collection[int]:
        """Sequences that something is held for."""
        return self._states.keys()

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        turns = {
            i: turn
            for i, (context, depth) in enumerate(zip(contexts, depths, strict=True))
            if depth > 0 and (turn := self._begin(context, depth))
        }
        drafts = dict(zip(turns, self._run(list(turns.values())), strict=True)) if turns else {}
        return [drafts.get(i, NO_DRAFT) for i in range(len(contexts))]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the states of what was committed. They are read once a draft is wanted, which may never be."""
        for seen in observations:
            if seen.features is not None and seen.tokens:
                state = self._states.setdefault(seen.sequence_id, HeadState(self._backend.entries(), seen.start))
                if state.following != seen.start:  # recomputed or missed: begin again here
                    state = self._states[seen.sequence_id] = HeadState(self._backend.entries(), seen.start)
                state.add(seen.tokens, seen.features[self._taps])
                self._relieve(state)

    def _relieve(self, state: HeadState) -> None:
        """Do not let too many states wait: pass over the oldest, or read them where everything is to be read."""
        if self.recall is not None:
            if state.backlog > 2 * self.recall:
                state.pass_over(self.recall)
        elif state.backlog > (_BACKLOG if state.begun else _UNBEGUN):
            self._backend.greedy([state.catch_up()], 0.0)

    def forget(self, sequence_id: int) -> None:
        state = self._states.pop(sequence_id, None)
        if state is not None:
            self._archive.put(state)

    def _begin(self, context: Context, depth: int) -> _Turn | None:
        """What is to be computed for a sequence; None where its latest states are not there."""
        state = self._states.get(context.sequence_id)
        if state is None or not state.backlog or state.following != len(context.tokens) - 1:
            return None
        state.begin(context.tokens, self._archive)
        if self.recall is not None and state.backlog > self.recall:
            state.pass_over(self.recall)
        return _Turn(context, state, state.job(context.tokens, depth))

    def _run(self, turns: list[_Turn]) -> list[Draft]:
        """Drafts of all turns; what they were computed from is kept."""
        jobs = [turn.job for turn in turns]
        if self._width == 1 and all(turn.context.chooser.plain for turn in turns):
            guesses = self._backend.greedy(jobs, self._floor)
            drafts = [Draft(tuple(g.tokens), drafter=self.name, confidence=tuple(g.confidence)) for g in guesses]
        else:
            drafts = self._choose(turns, jobs)
        for turn in turns:
            turn.state.keep(turn.context.tokens)
        return drafts

    def _choose(self, turns: list[_Turn], jobs: list[Job]) -> list[Draft]:
        """Chains whose tokens the sequences' own choosers pick, with the rivals that these beat."""
        chain, deepest = self._backend.chain(jobs), max(job.depth for job in jobs)
        guesses = [Guess([], []) for _ in turns]
        rivals: list[list[list[tuple[int, float]]]] = [[] for _ in turns]
        for depth in range(deepest):
            if depth:
                chain.extend([guess.tokens[-1] for guess in guesses])
            for turn, guess, beaten, row in zip(turns, guesses, rivals, chain.logits, strict=True):
                beaten.append(self._pick(turn.context, guess, row))
        return [self._tree(guess, beaten, job.depth) for guess, beaten, job in zip(guesses, rivals, jobs, strict=True)]

    def _pick(self, context: Context, guess: Guess, logits: Float32) -> list[tuple[int, float]]:
        """One more token of a chain; gives its likeliest rivals with their probabilities."""
        ids, p = self._backend.ids, _softmax(logits)
        full = np.full(self._vocab_size, -np.inf, np.float32)
        full[ids] = logits
        token = int(context.chooser.pick(full, [*context.tokens[context.prompt_length :], *guess.tokens]))
        guess.tokens.append(token)
        guess.confidence.append(min(1.0, float(p[ids == token].sum())))
        best = np.argsort(-p, kind="stable")[: self._width]
        return [(int(ids[i]), float(p[i])) for i in best if ids[i] != token]

    def _tree(self, guess: Guess, rivals: list[list[tuple[int, float]]], depth: int) -> Draft:
        """The chain, and behind it, from width 2 on, the rivals of every depth as leaves."""
        tokens, confidence = guess.tokens[:depth], guess.confidence[:depth]
        if self._width == 1:
            return Draft(tuple(tokens), drafter=self.name, confidence=tuple(confidence))
        parents = [node - 1 for node in range(depth)]
        for node, beaten in enumerate(rivals[:depth]):
            for token, chance in beaten[: self._width - 1]:
                tokens, confidence, parents = [*tokens, token], [*confidence, chance], [*parents, node - 1]
        return Draft(tuple(tokens), tuple(parents), drafter=self.name, confidence=tuple(confidence))


def _compiled(stored: StoredHead, options: HeadOptions, host: Host) -> HeadBackend:
    # Imported here because its kernels are compiled, or read from the cache, when they are imported and used.
    from outrider.models.compiled_head import CompiledHead

    assert host.weights is not None
    packed = getattr(host.target, "embedding", None)  # of a compiled target: held once for both
    embedding = host.weights["embed"] if packed is None else packed
    threads = options.threads or getattr(host.target, "threads", None)
    return CompiledHead(stored, embedding, dtype=options.dtype, threads=threads)


def _torch(stored: StoredHead, device: str, host: Host) -> HeadBackend:
    # Imported here because PyTorch takes seconds to import, which the compiled head should not wait for.
    import torch

    from outrider.models.eagle3_files import head_from_stored
    from outrider.models.torch_head import TorchHead

    assert host.weights is not None
    head = head_from_stored(stored).to(device)
    own = head.embed_tokens
    dense = own.weight.detach() if own is not None else torch.from_numpy(host.weights["embed"].dense())
    return TorchHead(head, dense.to(device, torch.float16))


def _softmax(logits: Float32) -> Float32:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()
