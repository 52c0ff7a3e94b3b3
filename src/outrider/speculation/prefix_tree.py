"""The prefix tree of a request's drafts: a node weighs as much as the drafters whose drafts pass through it.

The greedy descent to the heaviest child always ends in a chain that some drafter really proposed, so the target
verifies one chain and its cost does not grow with the number of drafters (SC '25, weighted majority vote).
"""

from __future__ import annotations

from outrider.types import NO_DRAFT, Draft

_ROOT = -1


class PrefixTree:
    """Nodes in insertion order; parents come before children, as in Draft."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._weights: list[float] = []
        self._children: dict[int, dict[int, int]] = {_ROOT: {}}
        self._backers: list[tuple[float, str]] = []  # the heaviest single backer of every node
        self._beliefs: list[float] = []  # the highest confidence of any backer of every node
        self._believed = True  # whether every draft came with confidences

    def insert(self, draft: Draft, weight: float, trust: bool = False) -> None:
        """Add a draft: `weight` at every node it passes through; with `trust`, times its confidence there."""
        places: list[int] = []
        confidence = draft.confidence or (1.0,) * len(draft)
        self._believed = self._believed and draft.confidence is not None
        for index, token in enumerate(draft.tokens):
            parent = draft.parent(index)
            node = self._child(_ROOT if parent < 0 else places[parent], token)
            self._add(node, weight * confidence[index] if trust else weight, draft.drafter)
            self._beliefs[node] = max(self._beliefs[node], confidence[index])
            places.append(node)

    def heaviest_chain(self) -> Draft:
        """Descend to the heaviest child at every depth (ties: the earlier one); named after its last node's backer."""
        nodes = self._descend(_ROOT)
        return self._draft(nodes, nodes, None) if nodes else NO_DRAFT

    def runner_up(self) -> Draft:
        """The heaviest chain as a tree with its strongest rival branch, main chain first; no rival: the chain.

        The rival leaves the chain at the sibling of largest weight and follows its own heaviest descent.
        """
        main = self._descend(_ROOT)
        rival = self._strongest_sibling(main)
        if rival is None:
            return self.heaviest_chain()
        nodes = [*main, rival, *self._descend(rival)]
        places = {node: index for index, node in enumerate(nodes)}
        return self._draft(nodes, main, tuple(places.get(self._parents[node], _ROOT) for node in nodes))

    def _draft(self, nodes: list[int], main: list[int], parents: tuple[int, ...] | None) -> Draft:
        return Draft(
            tuple(self._tokens[node] for node in nodes),
            parents,
            drafter=self._backers[main[-1]][1],
            confidence=tuple(map(self._belief, nodes)) if self._believed else None,
        )

    def _belief(self, node: int) -> float:
        """Confidence in a node; siblings share what there is, since at most one of them is right."""
        siblings = self._children[self._parents[node]].values()
        return self._beliefs[node] / max(1.0, sum(self._beliefs[sibling] for sibling in siblings))

    def _strongest_sibling(self, main: list[int]) -> int | None:
        rivals = [
            sibling for node in main for sibling in self._children[self._parents[node]].values() if sibling != node
        ]
        return max(rivals, key=lambda node: self._weights[node], default=None)

    def _descend(self, node: int) -> list[int]:
        path: list[int] = []
        while self._children[node]:
            node = max(self._children[node].values(), key=self._weights.__getitem__)
            path.append(node)
        return path

    def _child(self, parent: int, token: int) -> int:
        children = self._children[parent]
        node = children.get(token)
        if node is None:
            node = children[token] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(parent)
            self._weights.append(0.0)
            self._children[node] = {}
            self._backers.append((0.0, "none"))
            self._beliefs.append(0.0)
        return node

    def _add(self, node: int, weight: float, drafter: str) -> None:
        self._weights[node] += weight
        if weight > self._backers[node][0]:
            self._backers[node] = (weight, drafter)
