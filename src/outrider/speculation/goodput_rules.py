"""The settings of the goodput length, one `length_options` table."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError


@dataclass(frozen=True)
class GoodputRules:
    """Settings of the goodput length."""

    cheap: float = 0.03  # a drafter whose longest drafts, of all sequences, cost less of a plain step is always asked
    margin_on: float = 0.01  # predicted gain that keeps speculation on
    margin_off: float = 0.04  # predicted gain that switches it on again (hysteresis)
    margin_crowd: float = 0.01  # what both grow by with every further sequence: where rows cost, errors eat the gain
    first_probe: int = 16  # idle rounds before the first probe
    last_probe: int = 128  # probes never come more seldom than this
    probe_depth: int = 2  # tokens of a probe
    crowd: int | None = None  # sequences above which costly drafters are not asked at all; None: wherever they pay
    allowance: float = 1.5  # plain steps of time that trying may cost at first: costly drafters, and verifying drafts
    share: float = 0.005  # share of decoding time that each of both may cost from then on
    credit: float = 16.0  # plain steps of time that each may save up by what it gains
    patience: int = 8  # rounds in a row whose drafts are not worth verifying before nobody drafts for a while
    longest_rest: int = 16  # rounds of such a while at most; each is twice as long as the one before

    def __post_init__(self) -> None:
        if not 0 <= self.margin_on <= self.margin_off or min(self.cheap, self.margin_crowd) < 0:
            raise ConfigError(
                "goodput: use 0 <= margin_on <= margin_off, and margin_crowd and cheap from 0", "length_options"
            )
        if not 1 <= self.first_probe <= self.last_probe or self.probe_depth < 1:
            raise ConfigError("goodput: use 1 <= first_probe <= last_probe and probe_depth from 1", "length_options")
        if not 0 <= self.allowance <= self.credit or not 0 <= self.share <= 1:
            raise ConfigError("goodput: use 0 <= allowance <= credit and share in [0, 1]", "length_options")
        if self.crowd is not None and self.crowd < 1:
            raise ConfigError(f"goodput: crowd = {self.crowd} is refused; use 1 or more", "length_options")
        if self.patience < 1 or self.longest_rest < 0:
            raise ConfigError("goodput: use patience from 1 and longest_rest from 0", "length_options")

    def margin(self, on: bool, n: int) -> float:
        """The share that a prediction for n sequences must gain, with speculation on or off."""
        return (self.margin_on if on else self.margin_off) + self.crowding(n)

    def crowding(self, n: int) -> float:
        """What n sequences ask for more than one does."""
        return self.margin_crowd * (n - 1)
