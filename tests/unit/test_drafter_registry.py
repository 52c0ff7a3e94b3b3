"""Drafters by name: built-in, third-party, by path; what is unknown is refused with the nearest suggestion."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from outrider.drafters import registry
from outrider.drafters.base import Drafter, NoDrafter
from outrider.drafters.host import Host
from outrider.drafters.registry import BUILTIN, create_drafter, create_drafters, find, names
from outrider.errors import ConfigError

HOST = Host(vocab_size=50)


@dataclass(frozen=True)
class EchoOptions:
    times: int = 1


class Echo(NoDrafter):
    """A third party's drafter."""

    name = "echo"
    Options = EchoOptions

    def __init__(self, times: int) -> None:
        self.times = times

    @classmethod
    def build(cls, options: EchoOptions, host: Host) -> Echo:
        return cls(options.times * host.vocab_size)


class Unfinished:
    """Lacks what a drafter type needs."""


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a package with three entry points is installed; `loaded` tells which were imported."""
    points = [
        EntryPoint("echo", f"{__name__}:Echo", registry.GROUP),
        EntryPoint("broken", "no_such_package:Drafter", registry.GROUP),
        EntryPoint("unfinished", f"{__name__}:Unfinished", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_every_built_in_name_leads_to_a_drafter_type(name):
    kind = find(name)
    assert hasattr(kind, "Options")
    assert callable(kind.build)


def test_names_and_tables_build_drafters():
    ngram = create_drafter({"name": "ngram", "max_n": 3}, HOST)
    assert ngram.options.max_n == 3
    assert [drafter.name for drafter in create_drafters(["ngram", "suffix"], HOST)] == ["ngram", "suffix"]


def test_a_package_can_add_a_drafter(installed):
    assert "echo" in names()
    drafter: Drafter = create_drafter({"name": "echo", "times": 2}, HOST)
    assert isinstance(drafter, Echo)
    assert drafter.times == 100
    with pytest.raises(ConfigError, match="did you mean 'times'"):
        create_drafter({"name": "echo", "tmes": 2}, HOST)


def test_a_package_that_fails_is_named(installed):
    with pytest.raises(ConfigError, match="'broken' cannot be imported"):
        create_drafter("broken", HOST)
    with pytest.raises(ConfigError, match="'unfinished' lacks"):
        create_drafter("unfinished", HOST)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("sufix", "did you mean 'suffix'"),
        ("nothing-like-it", "known: .*ngram"),
        ({"name": "ngram", "max_n": "three"}, "expected int"),
        ({"name": 3}, "refused"),
        ({}, "refused"),
        (None, "refused"),
    ],
)
def test_what_is_unknown_is_refused(entry, words):
    with pytest.raises(ConfigError, match=words):
        create_drafter(entry, HOST)


@pytest.mark.parametrize("name", ["smollm2-135m", "org/model", "./model.gguf", "model.gguf"])
def test_models_are_recognised(name):
    assert registry._read(name) == ("model", {"path": name})


def test_a_folder_is_a_model_unless_a_drafter_bears_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "ngram").mkdir()
    assert registry._read("mine") == ("model", {"path": "mine"})
    assert registry._read("ngram") == ("ngram", {})


def test_equal_names_are_told_apart():
    drafters = create_drafters(["ngram", "ngram", {"name": "ngram", "min_n": 1}], HOST)
    assert [drafter.name for drafter in drafters] == ["ngram", "ngram-2", "ngram-3"]
