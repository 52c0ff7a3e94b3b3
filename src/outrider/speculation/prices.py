"""What drafting costs: measured before the first draft where that is possible, and learnt from every call.

seconds = per_step * passes one after another + per_token * tokens + per_unread * tokens it had not read yet. On an
accelerator a pass costs the same for few or many sequences; on a CPU tokens count; a prompt has to be read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outrider.speculation.costs import RunningMean

_MEMORY = 0.95  # share of old calls' evidence kept per step
_DAMPING = 1.001  # on the diagonal of the least squares
_INTRODUCTIONS = 2  # calls before a price is trusted
_FAR = 2.5  # factor by which a call is far above or below the usual price
_INSISTENT = 4  # so many calls in a row far above the price are the new price
_BACKLOG = 16  # unread tokens from which on reading them is what a call was about,
_BACKLOG_SHARE = 4  # if they are so many times the tokens drafted


class Calls(NamedTuple):
    """What a drafter did since the last step: passes one after another (deepest drafts), tokens in all, seconds."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    unread: int = 0  # tokens of its sequences that it had not been shown before
    turns: int = 1  # sequences, each as often as it was drafted for

    def plus(self, steps: int, tokens: int, seconds: float, unread: int, turns: int) -> Calls:
        """These calls and one more."""
        return Calls(
            self.steps + steps, self.tokens + tokens, self.seconds + seconds, self.unread + unread, self.turns + turns
        )


NO_CALLS = Calls(turns=0)


class Price(NamedTuple):
    """Seconds of a pass, of a token, and of a token that has to be read first."""

    step: float = 0.0
    token: float = 0.0
    unread: float = 0.0

    def of(self, steps: int, tokens: int, unread: int) -> float:
        """Seconds of a call."""
        return steps * self.step + tokens * self.token + unread * self.unread


class DraftCosts:
    """Prices of all drafters, least squares over the latest calls."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._fits = {name: _Fit() for name in names}

    def of(self, name: str) -> Price:
        """The price; zeros before the first call."""
        return self._fits[name].price

    def known(self, name: str) -> bool:
        """Whether enough calls were seen to trust the price; the first one usually computes a prompt."""
        return self._fits[name].calls >= _INTRODUCTIONS

    def turn(self, name: str, depth: int) -> float:
        """Seconds of one draft of one sequence: a lookup takes no longer for a deep one, a model does."""
        return self._fits[name].line.at(depth)

    def update(self, calls: Mapping[str, Calls]) -> None:
        """Learn from what the drafters did since the last step."""
        for name, done in calls.items():
            if done.tokens:
                self._fits[name].learn(done)


class _Fit:
    """A non-negative least-squares fit of two coefficients, old calls fading, and a mean of what reading costs.

    A call that caught up with a prompt, or with what was decoded while the drafter rested, is not the usual price:
    calls far above it are skipped unless they keep coming, and one far below shows that the fit was of such a call.
    """

    def __init__(self) -> None:
        self.price = Price()
        self.line = _Line()
        self.calls = 0
        self._reading = RunningMean(0.0)
        self._above = 0  # calls in a row that were far above the price
        self._restart()

    def learn(self, done: Calls) -> None:
        self.calls += 1
        usual = self.price.of(done.steps, done.tokens, 0)
        behind = done.unread >= max(_BACKLOG, _BACKLOG_SHARE * done.tokens)
        if behind and self.calls > 1:
            self._reading.learn(max(0.0, done.seconds - usual) / done.unread)
            self.price = self.price._replace(unread=self._reading.value)
            return
        self._above = self._above + 1 if usual and done.seconds > _FAR * usual else 0
        if 0 < self._above < _INSISTENT:
            return
        if self._above or done.seconds < usual / _FAR:
            self._restart()
        self._add(done.steps, done.tokens, done.seconds)
        if not behind:
            self.line.add(done.tokens / max(1, done.turns), done.seconds / max(1, done.turns))
        self.price = Price(*self._solve(), self._reading.value)

    def _restart(self) -> None:
        self._ss = self._st = self._tt = 0.0  # sums of steps x steps, steps x tokens, tokens x tokens
        self._sy = self._ty = 0.0  # of steps x seconds, tokens x seconds
        self._above = 0

    def _add(self, steps: int, tokens: int, seconds: float) -> None:
        self._ss = _MEMORY * self._ss + steps * steps
        self._st = _MEMORY * self._st + steps * tokens
        self._tt = _MEMORY * self._tt + tokens * tokens
        self._sy = _MEMORY * self._sy + steps * seconds
        self._ty = _MEMORY * self._ty + tokens * seconds

    def _solve(self) -> tuple[float, float]:
        """With a little damping, so that calls of one shape split the cost instead of dividing by zero."""
        determinant = self._ss * self._tt * _DAMPING**2 - self._st * self._st
        step = (self._sy * self._tt * _DAMPING - self._ty * self._st) / determinant
        token = (self._ty * self._ss * _DAMPING - self._sy * self._st) / determinant
        if token < 0:
            return self._sy / self._ss, 0.0
        return (step, token) if step >= 0 else (0.0, self._ty / self._tt)


class _Line:
    """Seconds of a turn over its depth: a straight line that starts from 0 or above and never falls."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, depth: float, seconds: float) -> None:
        """One turn; old ones fade."""
        self._n = _MEMORY * self._n + 1
        self._x = _MEMORY * self._x + depth
        self._y = _MEMORY * self._y + seconds
        self._xx = _MEMORY * self._xx + depth * depth
        self._xy = _MEMORY * self._xy + depth * seconds

    def at(self, depth: int) -> float:
        """Seconds at a depth; where only one depth was seen, in proportion to it."""
        if not self._n:
            return 0.0
        x, y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - x * x
        slope = (self._xy / self._n - x * y) / spread if spread > 1e-3 * x * x else y / x
        slope = min(max(slope, 0.0), y / x)
        return y + slope * (depth - x)
