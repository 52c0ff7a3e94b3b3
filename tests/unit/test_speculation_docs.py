"""docs/speculation.md names every option with its true default."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from outrider.bench.simulate import PUBLISHED
from outrider.drafters.head import HeadOptions
from outrider.drafters.model import ModelOptions
from outrider.drafters.ngram import NgramOptions
from outrider.drafters.registry import BUILTIN
from outrider.drafters.sparse_self import SparseSelfOptions
from outrider.drafters.suffix import SuffixOptions
from outrider.speculation.goodput_rules import GoodputRules
from outrider.speculation.hedge import HedgeRules
from outrider.speculation.length import TrendRules
from outrider.speculation.vote import MajorityRules

TEXT = " ".join(Path(__file__).parents[2].joinpath("docs", "speculation.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    "kind",
    [
        *(NgramOptions, SuffixOptions, HeadOptions, SparseSelfOptions),
        *(MajorityRules, HedgeRules, TrendRules, GoodputRules),
    ],
)
def test_every_option_stands_there_with_its_default(kind):
    for option in fields(kind):
        wanted = f"`{option.name}` ({option.default}" if option.name not in ("path", "device") else f"`{option.name}`"
        assert wanted in TEXT, wanted


def test_every_drafter_and_model_option_stands_there():
    assert all(f"`{name}`" in TEXT for name in BUILTIN)
    assert all(f"`{option.name}`" in TEXT for option in fields(ModelOptions))


def test_the_papers_figures_stand_there():
    assert all(f"{gain:+.1f} %" in TEXT for gains in PUBLISHED.values() for gain in gains)
