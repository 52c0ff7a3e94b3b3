"""What trying costly drafters may cost: they spend from an account, and earn what their accepted tokens are worth.

Every draft is paid for from a balance of time: a first allowance, a small share of all decoding time, and what accepted
tokens saved. Where the balance does not cover the price, nobody is asked. So whatever the drafters are like, all that
was ever spent on them beyond what they gave is at most the allowance and the share; and those that pay keep the balance
up and never notice. What can be saved up is bounded, so that drafters that stop being useful cannot live long on their
past.
"""

from __future__ import annotations

_STAKE = 0.5  # share of the balance that one draft may cost


class Account:
    """Balance in plain steps of one row: `allowance` to begin with, at most `most` at any time."""

    def __init__(self, allowance: float, most: float) -> None:
        self.balance = allowance
        self._most = most

    def covers(self, steps: float) -> bool:
        """Whether a draft of this price may be tried: for half of the balance at most, so that bad luck is no end."""
        return steps <= _STAKE * self.balance

    def book(self, steps: float) -> None:
        """Add what was earned, or with a negative sign what was spent."""
        self.balance = min(self.balance + steps, self._most)
