"""From the configuration to a speculator: every policy is selectable by name, so that each is an ablation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from outrider.config import SpeculativeConfig, from_mapping
from outrider.drafters.base import Drafter
from outrider.drafters.host import Host, SparseContext
from outrider.drafters.registry import create_drafters
from outrider.errors import ConfigError
from outrider.models.load import Tokenizer
from outrider.models.spec import Decoder, Weights
from outrider.speculation.acceptance import Acceptance, Estimates, NoEstimates
from outrider.speculation.costs import CostTable
from outrider.speculation.goodput import GoodputLength
from outrider.speculation.goodput_rules import GoodputRules
from outrider.speculation.guard import DEFAULT_RULES, Clock, GuardedDrafter, GuardRules
from outrider.speculation.hedge import HedgeRules, HedgeVote
from outrider.speculation.length import FixedLength, LengthPolicy, TrendLength, TrendRules
from outrider.speculation.none import NoSpeculator
from outrider.speculation.prices import DraftCosts
from outrider.speculation.rehearsal import rehearse
from outrider.speculation.speculator import Speculator
from outrider.speculation.store import new_store
from outrider.speculation.vote import MajorityRules, MajorityVote, NoVote, VotePolicy

T = TypeVar("T")

MEASURED_ROWS = (1, 2, 4, 8, 16, 32)  # the cost table is measured for these at start, and interpolated
DEEPEST = 63  # a tree row's ancestors are 64 bits, the last known token included


def build_speculator(
    config: SpeculativeConfig | None,
    *,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    decoder: Decoder | None = None,
    weights: Weights | None = None,
    max_sequences: int = 16,
    max_model_len: int = 2048,
    measure: Callable[[int], float] | None = None,
    sparse: SparseContext | None = None,
) -> Speculator | NoSpeculator:
    """The speculator that a configuration asks for; None or no drafters: plain decoding.

    vocab_size: length of the target's tokenizer. measure: rows -> seconds of a forward pass of the target, called a few
    times here where the length is chosen from costs; None: costs are learnt from the steps alone.
    ConfigError or ModelError where a drafter does not fit the target.
    """
    if config is None or not config.drafters:
        return NoSpeculator()
    host = Host(vocab_size, tokenizer, decoder, weights, max_sequences, max_model_len, new_store, sparse)
    return assemble(create_drafters(config.drafters, host), config, vocab_size, measure=measure)


def assemble(
    drafters: Sequence[Drafter],
    config: SpeculativeConfig,
    vocab_size: int,
    rules: GuardRules = DEFAULT_RULES,
    measure: Callable[[int], float] | None = None,
    clock: Clock = perf_counter,
    parallel: bool = False,
) -> Speculator:
    """A speculator of drafters that exist already. `parallel`: they run side by side, on devices of their own."""
    guarded = [GuardedDrafter(drafter, vocab_size, rules, clock) for drafter in drafters]
    names = [drafter.name for drafter in guarded]
    asks = config.vote == "hedge" or config.length == "goodput"
    estimates = Acceptance(names) if asks else NoEstimates()
    prices = DraftCosts(names)
    if measure and config.length == "goodput":
        for drafter in drafters:
            for calls in rehearse(drafter, clock):
                prices.update({drafter.name: calls})
    length = make_length(config, estimates, prices, measure, parallel)
    return Speculator(guarded, make_vote(config, names), length, estimates, clock)


def make_vote(config: SpeculativeConfig, names: Sequence[str]) -> VotePolicy:
    """The vote by name, with its options."""
    if config.vote == "hedge":
        return HedgeVote(names, _options(HedgeRules, config.vote_options, "vote_options"))
    if config.vote == "majority":
        return MajorityVote(names, _options(MajorityRules, config.vote_options, "vote_options"))
    _options(_NoOptions, config.vote_options, "vote_options")
    return NoVote(names)


def make_length(
    config: SpeculativeConfig,
    estimates: Estimates,
    prices: DraftCosts,
    measure: Callable[[int], float] | None = None,
    parallel: bool = False,
) -> LengthPolicy:
    """The length policy by name, within the bounds of `num_speculative_tokens`."""
    low, high = bounds(config)
    if config.length == "goodput":
        rules = _options(GoodputRules, config.length_options, "length_options")
        costs = CostTable.measured(measure, MEASURED_ROWS) if measure else CostTable.assumed()
        return GoodputLength(low, high, estimates, costs, prices, rules, parallel)
    if config.length == "trend":
        return TrendLength(max(low, 1), high, _options(TrendRules, config.length_options, "length_options"))
    _options(_NoOptions, config.length_options, "length_options")
    if low != high:
        raise ConfigError("length = 'fixed' takes one number as num_speculative_tokens", "num_speculative_tokens")
    return FixedLength(high)


def bounds(config: SpeculativeConfig) -> tuple[int, int]:
    """[low, high] of the draft length. One number means exactly that where fixed, else "at most"."""
    given = config.num_speculative_tokens
    if isinstance(given, int):
        low, high = (given if config.length == "fixed" else 0), given
    elif len(given) == 2:
        low, high = given
    else:
        raise ConfigError("num_speculative_tokens is a number or [low, high]", "num_speculative_tokens")
    if not 0 <= low <= high or not 1 <= high <= DEEPEST:
        raise ConfigError(f"num_speculative_tokens: use 1 to {DEEPEST}, low at most high", "num_speculative_tokens")
    return low, high


@dataclass(frozen=True)
class _NoOptions:
    """A policy without options: any key is unknown."""


def _options(kind: type[T], given: Any, where: str) -> T:
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{where} = {given!r} is refused; expected a table", where)
    return from_mapping(kind, given, where)
