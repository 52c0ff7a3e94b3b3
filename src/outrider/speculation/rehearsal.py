"""What a drafter's calls cost, measured before the first request: a price that is known need not be tried.

The drafter is shown a text of its own that repeats, so that lookups have something to say too, and made to forget it.
One that has no idea without a target behind it (it needs the target's states or memory) stays unmeasured, and is
introduced later by a few short drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from outrider.drafters.base import Context, Drafter
from outrider.speculation.prices import Calls
from outrider.types import Float32

NOBODY = -1  # id of the sequence that is rehearsed with; its companions are -2, -3, ...
_TEXT = [0, 1, 2, 3] * 32
_COMPANY = 4
#: (sequences, tokens shown, depth): one token, several, behind a text that must be read first, and in company. The
#: first call of either company warms up and is not told.
_SCENES = ((1, 8, 1), (1, 9, 1), (1, 10, 1), (1, 11, 3), (1, 12 + 64, 1), (_COMPANY, 78, 1), (_COMPANY, 79, 2))
_WARMING = (0, 5)
log = logging.getLogger(__name__)


class Greedy:
    """The chooser of sequences that nobody samples."""

    plain = True

    def pick(self, logits: Float32, output: Sequence[int]) -> int:
        """The best token of logits [V]."""
        return int(logits.argmax())


GREEDY = Greedy()


def rehearse(drafter: Drafter, clock: Callable[[], float]) -> list[Calls]:
    """The calls of a rehearsal; empty where the drafter cannot be rehearsed."""
    done: list[Calls] = []
    shown = 0
    try:
        for sequences, length, depth in _SCENES:
            contexts = [Context(NOBODY - i, _TEXT[:length], length, GREEDY) for i in range(sequences)]
            started = clock()
            drafts = drafter.propose(contexts, [depth] * sequences)
            seconds = clock() - started
            if not all(draft.tokens for draft in drafts):
                return []
            tokens = sum(map(len, drafts))
            done.append(Calls(max(map(len, drafts)), tokens, seconds, max(0, length - shown) * sequences, sequences))
            shown = length + depth
    except Exception as error:
        log.debug("drafter %r cannot be rehearsed: %s", drafter.name, error)
        return []
    finally:
        for i in range(_COMPANY):
            _forget(drafter, NOBODY - i)
    return [calls for scene, calls in enumerate(done) if scene not in _WARMING]


def _forget(drafter: Drafter, sequence_id: int) -> None:
    try:
        drafter.forget(sequence_id)
    except Exception as error:
        log.debug("drafter %r does not forget the rehearsal: %s", drafter.name, error)
