"""One sample's way from logits to tokens: a pure function of (logits, output so far), seeded per sample.

    sampler = Sampler(SamplingParams(temperature=0.8, top_p=0.9), prompt, vocab_size, {eos}, seed=7)
    token = sampler.pick(logits, output)

Nothing depends on how many tokens were chosen before, in which step, or beside which other requests: the same seed
gives the same text alone, in a batch, after preemption, with and without speculation. A drafter that picks with this
object uses the very noise that the target will use, which raises acceptance (Daliri, Musco and Suresh 2025, "Coupling
without Communication and Drafter-Invariant Speculative Decoding").
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from outrider.sampling.processors import Processor, build_processors
from outrider.sampling.race import best_token, probabilities, race, stream, uniform
from outrider.types import Float32, Float64, SamplingParams

#: Temperatures below this are greedy, as in vLLM.
GREEDY_BELOW = 1e-5

#: Independent families of noise. A rejected draft may have been sampled with the sample's own noise, so what replaces
#: it must be drawn with another.
_OWN, _FLIP, _REDRAW = 0, 1, 2


class Sampler:
    """The distribution and noise of one sample of a request.

    `processors` (a grammar, say) run before those that `params` asks for. `index` tells the n samples of a request
    apart. Raises UnsupportedError where a parameter cannot be served.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        eos_token_ids: Collection[int],
        seed: int,
        index: int = 0,
        processors: Sequence[Processor] = (),
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.greedy = params.temperature < GREEDY_BELOW
        self._eos = min((token for token in eos_token_ids if token < vocab_size), default=0)
        self._processors = (*processors, *build_processors(params, prompt, vocab_size, eos_token_ids))
        self._own, self._flip, self._redraw = (stream(seed, index, lane) for lane in (_OWN, _FLIP, _REDRAW))

    @property
    def plain(self) -> bool:
        """Whether `pick` is nothing but the best token, whatever came before."""
        return self.greedy and not self._processors

    @property
    def needs_logits(self) -> bool:
        """Whether the best token of a row is not enough."""
        return not self.greedy or bool(self._processors) or self.params.logprobs is not None

    def distribution(self, logits: Float32, output: Sequence[int]) -> Float64:
        """p [V] of the token after `output`; it sums to 1, and ids from `vocab_size` on have none of it."""
        logits = self._processed(logits, output)
        if self.greedy:
            return _point_mass(self._best(logits), len(logits))
        params = self.params
        p = probabilities(logits, self.vocab_size, params.temperature, params.top_k, params.top_p, params.min_p)
        return p if p.any() else _point_mass(self._eos, len(logits))

    def choose(self, p: Float64, position: int) -> int:
        """Draw the token at `position` of the output from p with this sample's own noise."""
        return race(p, stream(int(self._own), position))

    def pick(self, logits: Float32, output: Sequence[int]) -> int:
        """The token this sample emits after `output` given the target's logits [V]."""
        if self.greedy:
            return self._best(self._processed(logits, output))
        return self.choose(self.distribution(logits, output), len(output))

    def redraw(self, p: Float64, position: int) -> int:
        """Draw from p with noise that no drafter shares: for residuals, see verify/judge.py."""
        return race(p, stream(int(self._redraw), position))

    def flip(self, probability: float, position: int, attempt: int) -> bool:
        """True with the given probability; independent for every (position, attempt)."""
        return uniform(stream(int(self._flip), position), attempt) < probability

    def _processed(self, logits: Float32, output: Sequence[int]) -> Float32:
        """The logits after all processors; the caller's row is left as it was."""
        if not self._processors:
            return logits
        logits = np.array(logits, np.float32)
        logits[self.vocab_size :] = -np.inf
        for processor in self._processors:
            processor.apply(logits, output)
        return logits

    def _best(self, logits: Float32) -> int:
        """The greedy token; the end of the text where nothing is allowed."""
        best = best_token(logits, self.vocab_size)
        return best if best >= 0 else self._eos


def _point_mass(token: int, size: int) -> Float64:
    """All probability on one token."""
    p = np.zeros(size)
    p[token] = 1.0
    return p
