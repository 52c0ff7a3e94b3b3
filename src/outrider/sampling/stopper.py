"""When a text ends: end tokens, stop ids, stop strings, max_tokens and the room left in the context.

`check` is asked after every emitted token and remembers nothing, so it is right inside an accepted draft too.
Where one token both completes a stop and uses up the length, `stop` is the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from outrider.types import Finish, SamplingParams

#: Characters decoded beyond the longest stop string: the first ones of a window may be cut UTF-8 or a lost space.
_MARGIN = 8


class Stopper:
    """The stop rules of one sample.

    `room`: output tokens that fit the context behind the prompt. `decode`: token ids to text; bytes that are not yet a
    whole character decode to U+FFFD.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        room: int,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._ids = frozenset(params.stop_token_ids or ())
        self._strings = params.stop_strings
        self._longest = max(map(len, self._strings), default=0)
        self._minimum = params.min_tokens
        self._limit = room if params.max_tokens is None else min(room, params.max_tokens)
        self._decode = decode

    def check(self, output: Sequence[int]) -> Finish | None:
        """Whether the last token of `output` ends the text. `detail`: the stop id or string; None for an end token."""
        stop = self._stop(output) if output else None
        if stop is None and len(output) >= self._limit:
            return Finish("length")
        return stop

    def _stop(self, output: Sequence[int]) -> Finish | None:
        # The sampler keeps end tokens back until min_tokens; one that comes earlier was the only token allowed.
        if output[-1] in self._eos:
            return Finish("stop")
        if output[-1] in self._ids:
            return Finish("stop", output[-1])
        found = self._found(output) if self._strings and len(output) >= self._minimum else None
        return None if found is None else Finish("stop", found)

    def _found(self, output: Sequence[int]) -> str | None:
        """The stop string that the last token completes; the one that begins first where there are several."""
        before, text = self._tail(output)
        settled = len(before.rstrip("\ufffd"))
        places = ((text.find(stop, max(0, settled - len(stop) + 1)), stop) for stop in self._strings)
        hits = [(place, order, stop) for order, (place, stop) in enumerate(places) if place >= 0]
        return min(hits)[2] if hits else None

    def _tail(self, output: Sequence[int]) -> tuple[str, str]:
        """Enough text behind which a stop string could end, without and with the last token."""
        width = self._longest + _MARGIN
        while True:
            tail = output[-width:]
            before = self._decode(tail[:-1])
            if len(before) >= self._longest + _MARGIN or width >= len(output):
                return before, self._decode(tail)
            width *= 2
