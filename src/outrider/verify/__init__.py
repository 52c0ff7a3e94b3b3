"""Verification: `judge` decides what the target accepts of a draft."""

from outrider.verify.judge import Rows, judge

__all__ = ["Rows", "judge"]
