"""Heads that come with a target: their compact layout, whom they are found for, and their names in a configuration."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compiling import Stored
from distilling import SPEC, TAPS, tiny_target
from outrider import LLM, SamplingParams
from outrider.api.core import AUTO
from outrider.config import SpeculativeConfig
from outrider.drafters import shipped
from outrider.drafters.shipped import install_head, shipped_heads, with_heads
from outrider.errors import ConfigError, ModelError
from outrider.models.compiled_head import CompiledHead
from outrider.models.eagle3 import Eagle3Head, Eagle3Spec
from outrider.models.eagle3_files import load_head, save_head
from outrider.models.eagle3_store import CARD, COMPACT, Dense, read_head
from outrider.models.head import Job
from outrider.models.identity import identity
from outrider.models.load import load_model

HEAD = Eagle3Spec(32, 320, 64, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48, taps=TAPS)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """A random head in the public layout, in bf16, with a card."""
    folder = tmp_path_factory.mktemp("public")
    torch.manual_seed(0)
    head = Eagle3Head(HEAD, tokens=range(60, 124))
    save_head(head.to(torch.bfloat16), folder)
    (folder / CARD).write_text("# generalist\n")
    return folder


@pytest.fixture
def root(public, tmp_path, monkeypatch):
    """A package with two heads for the tiny target."""
    monkeypatch.setattr(shipped, "ROOT", tmp_path)
    for name in ("code", "generalist"):
        install_head(public, tiny_target(), tmp_path / "tiny" / name)
    return tmp_path


def test_the_compact_layout_holds_what_the_compiled_head_computes_with(public, root):
    folder = root / "tiny" / "code"
    assert sorted(path.name for path in folder.iterdir()) == [CARD, "card.json", "config.json", COMPACT]
    assert (folder / COMPACT).stat().st_size < 0.7 * (public / "model.safetensors").stat().st_size
    stored, whole = read_head(folder, SPEC), read_head(public, SPEC)
    np.testing.assert_array_equal(stored.ids, whole.ids)
    embedding = Dense(np.random.default_rng(0).standard_normal((320, 32)).astype(np.float32))
    guesses = []
    for head in (CompiledHead(stored, embedding), CompiledHead(whole, embedding)):
        features = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
        guesses += head.greedy([Job(head.entries(), features, [1, 2, 3, 4, 5], 0, 6)], 0.0)
    assert guesses[0] == guesses[1]
    assert len(guesses[0].tokens) == 6


def test_pytorch_reads_the_compact_layout_too(public, root):
    read, whole = load_head(root / "tiny" / "code", SPEC).state_dict(), load_head(public, SPEC).state_dict()
    assert read.keys() == whole.keys()
    for name, tensor in whole.items():
        largest = tensor.float().abs().max()
        assert (read[name].float() - tensor.float()).abs().max() <= largest / 127 * 0.51
    assert torch.equal(read["norm.weight"], whole["norm.weight"])


def changed(**weights):
    """The tiny target with other weights."""
    target = tiny_target()
    return replace(target, weights={**target.weights, **weights})


def test_heads_are_found_for_the_model_they_were_trained_for_alone(root):
    """Rounded matrices are the same model in another file; other norms, sizes or tokens are another model."""
    target = tiny_target()
    wanted = {name: root / "tiny" / name for name in ("generalist", "code")}
    assert list(shipped_heads(target)) == ["generalist", "code"]
    assert shipped_heads(target) == wanted
    rounded = {
        name: Stored(np.round(weight.values, 1)) for name, weight in target.weights.items() if weight.values.ndim == 2
    }
    assert shipped_heads(changed(**rounded)) == wanted
    assert shipped_heads(changed(final_norm=Stored(np.full(32, 1.01, np.float32)))) == {}
    assert shipped_heads(replace(target, spec=replace(SPEC, intermediate_size=64))) == {}
    other = tiny_target()
    other.tokenizer._pieces[200] = "other"
    assert identity(other) == identity(target) or shipped_heads(other) == {}


def test_a_damaged_card_costs_its_own_head_alone(root, caplog):
    (root / "tiny" / "code" / "card.json").write_text("{")
    assert list(shipped_heads(tiny_target())) == ["generalist"]
    assert "code is left out" in caplog.text


def test_norms_are_compared_as_bfloat16():
    exact, half = changed(), changed(final_norm=Stored(np.full(32, 1.001, np.float32)))
    assert identity(exact) == identity(half)


def test_names_of_heads_become_folders(root):
    heads = shipped_heads(tiny_target())
    spelt = with_heads(SpeculativeConfig(drafters=("ngram", "heads")), heads)
    folders = [{"name": "head", "path": str(root / "tiny" / name)} for name in ("generalist", "code")]
    assert spelt.drafters == ("ngram", *folders)
    table = {"name": "heads", "dtype": "float32"}
    assert with_heads(SpeculativeConfig(drafters=(table,)), heads).drafters[0]["dtype"] == "float32"
    one = {"name": "head", "path": "code", "width": 2}
    assert with_heads(SpeculativeConfig(drafters=(one,)), heads).drafters == ({**folders[1], "width": 2},)
    assert with_heads(None, heads) is None
    with pytest.raises(ModelError, match=r"no head 'coed'.*generalist, code"):
        with_heads(SpeculativeConfig(drafters=({"name": "head", "path": "coed"},)), heads)
    for wrong, message in (
        ({"required": "no"}, "required = 'no'.*expected bool"),
        ({"path": "x"}, "option 'path'"),
        ({"first": 0}, "first"),
    ):
        with pytest.raises(ConfigError, match=message):
            with_heads(SpeculativeConfig(drafters=({"name": "heads", **wrong},)), heads)


def test_a_device_that_does_not_exist_is_refused(root):
    def generate(device):
        config = {"drafters": [{"name": "heads", "device": device}]}
        with LLM(tiny_target(), speculative_config=config, max_model_len=128) as llm:
            return llm.generate([[70, 71, 72]], GREEDY)

    assert generate("auto")
    with pytest.raises(ConfigError, match="device = 'tpu' is refused; use auto, cpu, cuda"):
        generate("tpu")


def test_auto_takes_the_heads_that_are_there():
    assert with_heads(AUTO, {}).drafters == ("ngram", "suffix")
    assert len(with_heads(AUTO, {"chat": Path("chat")}).drafters) == 3
    both = with_heads(AUTO, {"generalist": Path("generalist"), "chat": Path("chat")}).drafters
    assert [one for one in both if one not in ("ngram", "suffix")] == [{"name": "head", "path": "generalist"}]
    with pytest.raises(ConfigError, match="no heads come with this model"):
        with_heads(SpeculativeConfig(drafters=("heads",)), {})


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_the_engine_drafts_with_shipped_heads_and_says_the_same(root, params):
    """Random heads are wrong all the time, and still nothing changes but the report."""
    prompts = ["the fox", "jumps over the lazy dog", "a"]
    with LLM(tiny_target(), speculative_config=None, max_model_len=128) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        llm.set_speculative_config({"drafters": ["heads"], "num_speculative_tokens": 3, "vote": "hedge"})
        drafted = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        report = llm.speculation_report()
        llm.set_speculative_config("auto")
        names = [drafter.name for drafter in llm.speculation_report().drafters]
        assert names == ["ngram", "suffix", "generalist"]
    assert drafted == plain
    assert [drafter.name for drafter in report.drafters] == ["generalist", "code"]
    assert all(drafter.proposals > 10 and drafter.failures == 0 for drafter in report.drafters)


def test_a_head_shares_the_targets_embedding_and_threads(root):
    config = {"drafters": ["heads"]}
    with LLM(tiny_target(), speculative_config=config, max_model_len=128, threads=3) as llm:
        decoder = llm.core.decoder
        backend = llm.core.speculator._drafters[0]._drafter._backend
        assert backend._matrices[-1]["data"] == decoder.embedding["data"] != 0
        assert backend._members == 3 == decoder.threads


@pytest.mark.model
def test_the_package_holds_small_heads_of_the_default_model():
    """What is shipped is complete, small, and found by what its target is."""
    heads = shipped_heads(load_model("smollm2-135m"))
    assert list(heads) == ["generalist", "chat", "code", "maths"]
    for folder in heads.values():
        files = {path.name: path.stat().st_size for path in folder.iterdir()}
        assert {"config.json", COMPACT, CARD, shipped.CARD} <= set(files)
        assert sum(files.values()) <= 15e6


def test_the_pipelined_engine_drafts_with_heads_too(root):
    """Observations and proposals come from different threads there."""
    prompts = ["the fox", "jumps over the lazy dog", "a", "b c d"]
    config = {"drafters": ["heads"], "num_speculative_tokens": 3, "vote": "hedge"}
    answers = []
    for pipeline in (False, True):
        with LLM(tiny_target(), speculative_config={**config, "pipeline": pipeline}, max_model_len=128) as llm:
            answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)])
            report = llm.speculation_report()
            assert all(drafter.proposals > 10 and drafter.failures == 0 for drafter in report.drafters)
    assert answers[0] == answers[1]


def test_a_head_drafts_without_pytorch(root):
    """Importing it would take longer than loading the default model."""
    code = (
        "import sys, numpy as np\n"
        "from outrider.drafters.head import HeadDrafter\n"
        "from outrider.models.compiled_head import CompiledHead\n"
        "from outrider.models.eagle3_store import Dense, read_head\n"
        "from outrider.models.head import Job\n"
        "from outrider.models.spec import DecoderSpec\n"
        "target = DecoderSpec('llama', 320, 32, 4, 4, 2, 8, 48, 256)\n"
        "head = CompiledHead(read_head(sys.argv[1], target), Dense(np.ones((320, 32), np.float32)))\n"
        "job = Job(head.entries(), np.ones((2, 96), np.float32), [1, 2], 0, 3)\n"
        "assert len(head.greedy([job], 0.0)[0].tokens) == 3\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root / "tiny" / "code")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
