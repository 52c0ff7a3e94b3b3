"""Scripted drafters: right, wrong, half right, silent, slow or broken in every way that a drafter can be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafters.base import Context, Need, Observation
from outrider.types import Draft
from scripted import Script, plain


@dataclass
class ScriptedDrafter:
    """Base of the scripted drafters: remembers whom it holds, so that a leak shows as a non-empty `held`."""

    script: Script
    vocab_size: int = 50
    name: str = "scripted"
    needs: frozenset[Need] = frozenset()
    held: set[int] = field(default_factory=set)
    proposed: int = 0
    observed: list[Observation] = field(default_factory=list)

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        self.held |= {c.sequence_id for c in contexts}
        drafts = [self.guess(c, depth) for c, depth in zip(contexts, depths, strict=True)]
        self.proposed += sum(map(len, drafts))
        return drafts

    def guess(self, context: Context, depth: int) -> Draft:
        return Draft(tuple(plain(self.script, context.tokens, depth)), drafter=self.name)

    def observe(self, observations: Sequence[Observation]) -> None:
        self.observed.extend(observations)

    def forget(self, sequence_id: int) -> None:
        self.held.discard(sequence_id)


@dataclass
class OracleDrafter(ScriptedDrafter):
    """Always right."""

    name: str = "oracle"


@dataclass
class HalfOracleDrafter(ScriptedDrafter):
    """Right for `right` tokens, then wrong."""

    name: str = "half-oracle"
    right: int = 2

    def guess(self, context: Context, depth: int) -> Draft:
        tokens = plain(self.script, context.tokens, depth)
        wrong = [(token + 1) % self.vocab_size for token in tokens[self.right :]]
        return Draft((*tokens[: self.right], *wrong), drafter=self.name)


@dataclass
class JunkDrafter(HalfOracleDrafter):
    """Never right."""

    name: str = "junk"
    right: int = 0


@dataclass
class ConstantDrafter(ScriptedDrafter):
    """Proposes the same token again and again (for example the end token)."""

    name: str = "constant"
    token: int = 0

    def guess(self, context: Context, depth: int) -> Draft:
        return Draft((self.token,) * depth, drafter=self.name)


@dataclass
class DeadDrafter(ScriptedDrafter):
    """Never proposes anything."""

    name: str = "dead"

    def guess(self, context: Context, depth: int) -> Draft:
        return Draft(drafter=self.name)


@dataclass
class TreeDrafter(ScriptedDrafter):
    """A tree: at every depth a wrong sibling before the right token, children under the right one only."""

    name: str = "tree"

    def guess(self, context: Context, depth: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for right in plain(self.script, context.tokens, depth // 2):
            tokens += [(right + 1) % self.vocab_size, right]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Draft(tuple(tokens), tuple(parents), drafter=self.name)


@dataclass
class RaisingDrafter(ScriptedDrafter):
    """Raises in every call, or only in the named ones ("propose", "observe", "forget")."""

    name: str = "raising"
    where: tuple[str, ...] = ("propose", "observe", "forget")
    raised: int = 0

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        self._maybe("propose")
        return super().propose(contexts, depths)

    def observe(self, observations: Sequence[Observation]) -> None:
        self._maybe("observe")

    def forget(self, sequence_id: int) -> None:
        self._maybe("forget")

    def _maybe(self, where: str) -> None:
        if where in self.where:
            self.raised += 1
            raise RuntimeError(f"scripted failure in {where}")


@dataclass
class TooLongDrafter(ScriptedDrafter):
    """Proposes more than it was asked for, and one draft too many."""

    name: str = "too-long"
    extra_drafts: int = 0

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        drafts = super().propose(contexts, [depth + 3 for depth in depths])
        return drafts + [Draft((1,))] * self.extra_drafts


@dataclass
class ForeignDrafter(ScriptedDrafter):
    """Proposes ids outside the vocabulary."""

    name: str = "foreign"

    def guess(self, context: Context, depth: int) -> Draft:
        return Draft(tuple(range(self.vocab_size, self.vocab_size + depth)), drafter=self.name)


@dataclass
class SlowDrafter(ScriptedDrafter):
    """Right, but takes `seconds` for every call."""

    name: str = "slow"
    seconds: float = 0.01

    def propose(self, contexts: Sequence[Context], depths: Sequence[int]) -> list[Draft]:
        time.sleep(self.seconds)
        return super().propose(contexts, depths)
