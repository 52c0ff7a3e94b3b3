"""Which tokens a head can draft: those that the target says most often."""

from __future__ import annotations

import numpy as np

from outrider.distill.shards import Answers

PROMPT_WEIGHT = 0.5  # of a prompt's token over an answer's: what users say comes back in answers


def choose_vocabulary(answers: Answers, size: int, vocab_size: int) -> list[int]:
    """`size` target ids, ascending: the most frequent of the training sequences.

    Among tokens seen equally often, lower ids come first: in merged vocabularies they are the commoner ones.
    """
    counts = np.zeros(vocab_size)
    for entry in answers.training():
        tokens = answers.tokens(entry).numpy()
        counts += PROMPT_WEIGHT * np.bincount(tokens[: entry.prompt_length], minlength=vocab_size)
        counts += np.bincount(tokens[entry.prompt_length :], minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")
    return sorted(int(token) for token in order[: min(size, vocab_size)])
