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

NOBODY = -1  # id of the sequence that is rehearsed with
_TEXT = [0, 1, 2, 3] * 32
#: (tokens shown, depth) of the timed calls: one token, several, and one behind a text that must be read first.
_SCENES = ((9, 1), (10, 1), (11, 3), (12 + 64, 1))
log = logging.getLogger(__name__)


class Greedy:
    """The chooser of sequences that nobody samples."""

    plain = True

    def pick(self, logits: Float32, output: Sequence[int]) -> int:
        return int(logits.argmax())


GREEDY = Greedy()


def rehearse(drafter: Drafter, clock: Callable[[], float]) -> list[Calls]:
    """The calls of a rehearsal, the first (which warms up) left out; empty where the drafter cannot be rehearsed."""
    done: list[Calls] = []
    shown = 8
    try:
        for length, depth in ((shown, 1), *_SCENES):
            context = Context(NOBODY, _TEXT[:length], length, GREEDY)
            started = clock()
            (draft,) = drafter.propose([context], [depth])
            seconds = clock() - started
            if not draft.tokens:
                return []
            unread = max(0, length - shown)
            done.append(Calls(len(draft), len(draft), seconds, unread))
            shown = length + len(draft)
    except Exception as error:
        log.debug("drafter %r cannot be rehearsed: %s", drafter.name, error)
        return []
    finally:
        _forget(drafter)
    return done[1:]


def _forget(drafter: Drafter) -> None:
    try:
        drafter.forget(NOBODY)
    except Exception as error:
        log.debug("drafter %r does not forget the rehearsal: %s", drafter.name, error)
