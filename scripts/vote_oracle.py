"""What a vote could gain at most: acceptance length of votes, and of an oracle that always submits the best proposal.

    OUTRIDER_DATA=FOLDER python scripts/vote_oracle.py smollm2-135m --prompts 4

Proposals are scored against the finished answer, so one that was not submitted counts as far as it is right. Greedy
answers to prompts of every task of Spec-Bench, one at a time; lengths are fixed, so that votes alone differ.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider import LLM, SamplingParams
from outrider.bench.workloads import load_prompts
from outrider.speculation.trial import Trial, agreement
from outrider.speculation.vote import VotePolicy
from outrider.types import Draft

DRAFTERS = ("ngram", "suffix", {"name": "head", "path": "generalist"})


class Watched:
    """A vote, and what its proposals turn out to have had right once the answer is known."""

    def __init__(self, vote: VotePolicy) -> None:
        self.drafts = self.accepted = self.best = 0
        self._vote = vote
        self._said: dict[int, list[int]] = {}
        self._rounds: dict[int, list[tuple[int, dict[str, Draft]]]] = {}

    def reach(self, sequence_id: int, name: str, earlier: bool) -> int:
        return self._vote.reach(sequence_id, name, earlier)

    def merge(self, sequence_id: int, proposals: Mapping[str, Draft]) -> Draft:
        return self._vote.merge(sequence_id, proposals)

    def weights(self) -> Mapping[str, float]:
        return self._vote.weights()

    def observe(self, trials: Sequence[Trial]) -> None:
        """Count what was accepted, and keep the round."""
        for trial in trials:
            said = self._said.setdefault(trial.sequence_id, [])
            if trial.verdict.drafted:
                self.drafts += 1
                self.accepted += len(trial.verdict.accepted)
                self._rounds.setdefault(trial.sequence_id, []).append((len(said), dict(trial.proposals)))
            said += trial.truth
        self._vote.observe(trials)

    def forget(self, sequence_id: int) -> None:
        """The answer is known: count what the best proposal of every round had right."""
        said = self._said.pop(sequence_id, [])
        for at, proposals in self._rounds.pop(sequence_id, []):
            self.best += max(agreement(draft, said[at:]) for draft in proposals.values())
        self._vote.forget(sequence_id)

    def row(self, name: str) -> dict[str, Any]:
        """Acceptance lengths so far."""
        lengths = [round(1 + right / max(1, self.drafts), 3) for right in (self.accepted, self.best)]
        return {"vote": name, "drafts": self.drafts, "acceptance_length": lengths[0], "oracle": lengths[1]}


def main() -> None:
    """One JSON line for every vote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=4, help="of every task")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--drafters", type=json.loads, default=list(DRAFTERS), help="JSON; as in speculative_config")
    parser.add_argument("--data", help="folder of prompts; default: OUTRIDER_DATA")
    given = parser.parse_args()
    prompts = load_prompts(given.data, None, given.prompts)
    params = SamplingParams(temperature=0, max_tokens=given.max_tokens)
    llm = LLM(given.model, max_num_seqs=1)
    for vote in ("none", "majority", "hedge"):
        llm.set_speculative_config({"drafters": given.drafters, "vote": vote, "num_speculative_tokens": 4})
        speculator = llm.core.engine.speculator
        watched = speculator._vote = Watched(speculator._vote)
        for prompt in prompts:
            llm.chat([{"role": "user", "content": prompt.text}], params)
        print(json.dumps(watched.row(vote)), flush=True)


if __name__ == "__main__":
    main()
