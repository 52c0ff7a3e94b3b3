"""One sequence's round as the policies learn from it: who proposed what, what was handed out, what the target said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.types import Draft, Verdict


@dataclass(frozen=True)
class Trial:
    """`proposals` holds the draft of every drafter that was asked, by name, empty ones included.

    `submitted` is what the target verified, `verdict.tokens` is what turned out to be true. All proposals can be
    scored against the truth, not only the submitted one.
    """

    sequence_id: int
    proposals: dict[str, Draft]
    submitted: Draft
    verdict: Verdict
    agreed: dict[str, int] = field(init=False)  # by drafter: leading tokens of the truth that its own draft had

    def __post_init__(self) -> None:
        agreed = {name: agreement(draft, self.truth) for name, draft in self.proposals.items()}
        object.__setattr__(self, "agreed", agreed)

    @property
    def truth(self) -> tuple[int, ...]:
        """The round's true tokens."""
        return self.verdict.tokens


def agreement(draft: Draft, truth: Sequence[int]) -> int:
    """How many leading tokens of `truth` the draft contains as a path from its root."""
    if draft.is_chain:
        return _chain_agreement(draft.tokens, truth)
    node, depth = -1, 0
    for token in truth:
        matching = [child for child in draft.children(node) if draft.tokens[child] == token]
        if not matching:
            break
        node, depth = matching[0], depth + 1
    return depth


def _chain_agreement(tokens: Sequence[int], truth: Sequence[int]) -> int:
    for depth, (guess, token) in enumerate(zip(tokens, truth, strict=False)):
        if guess != token:
            return depth
    return min(len(tokens), len(truth))


def depth(draft: Draft) -> int:
    """Length of the longest path of a draft."""
    if draft.is_chain:
        return len(draft)
    depths: list[int] = []
    for node in range(len(draft)):
        parent = draft.parent(node)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def head(draft: Draft, count: int) -> Draft:
    """The first `count` nodes of a draft; parents come before children, so the rest is a draft still."""
    if count >= len(draft):
        return draft
    return Draft(
        draft.tokens[:count],
        None if draft.parents is None else draft.parents[:count],
        None if draft.probs is None else draft.probs[:count],
        draft.drafter,
        None if draft.confidence is None else draft.confidence[:count],
    )


def subset(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft of some nodes, ascending; with a node its parent must be among them. Of a chain: its beginning."""
    if draft.is_chain or len(nodes) == len(draft):
        return head(draft, len(nodes))
    places = {node: index for index, node in enumerate(nodes)}
    parents = [draft.parent(node) for node in nodes]
    return Draft(
        tuple(draft.tokens[node] for node in nodes),
        tuple(places[parent] if parent >= 0 else -1 for parent in parents),
        None if draft.probs is None else draft.probs[list(nodes)],
        draft.drafter,
        None if draft.confidence is None else tuple(draft.confidence[node] for node in nodes),
    )
