"""Sampling: from a request's parameters and the target's logits to tokens, and to the end of the text."""

from outrider.sampling.sampler import Sampler
from outrider.sampling.stopper import Stopper

__all__ = ["Sampler", "Stopper"]
