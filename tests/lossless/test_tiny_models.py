"""Speculation on tiny models with the compiled decoder: windows that wrap, every KV type, threads, preemption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loading import LLAMA_CONFIG, llama_folder, repeating_tensors
from outrider import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
PROMPTS = ["The quick brown fox", "def f(x):", "1 2 3 1 2 3 1 2 3 1 2", "it's 1234 times"]
WINDOWED = {**LLAMA_CONFIG, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}


@pytest.fixture(scope="module")
def tensors() -> dict:
    return repeating_tensors()


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory, tensors: dict) -> str:
    return str(llama_folder(tmp_path_factory.mktemp("windowed") / "model", tensors, WINDOWED))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tensors: dict) -> str:
    return str(llama_folder(tmp_path_factory.mktemp("plain") / "model", tensors))


def compare(folder: str, params: SamplingParams = GREEDY, **options: object) -> None:
    """Every prompt alone and plainly, against all together with drafts of 1 to 8 tokens."""
    with LLM(folder, speculative_config=None, backend="compiled", **options) as llm:
        expected = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS]
        drafted = accepted = 0
        for length in (1, 2, 5, 8):
            llm.set_speculative_config(
                {"drafters": ["ngram", "suffix"], "vote": "hedge", "num_speculative_tokens": length}
            )
            outputs = llm.generate(PROMPTS, params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            drafted += sum(output.metrics.speculative.num_draft_tokens for output in outputs)
            accepted += sum(output.metrics.speculative.num_accepted_tokens for output in outputs)
        llm.core.engine.check()
    assert drafted > accepted > 0


def test_drafts_are_rolled_back_once_a_window_has_wrapped(windowed: str) -> None:
    """mlx-lm 1423: window 16, 80 tokens."""
    compare(windowed)


def test_the_window_matters(windowed: str, plain: str) -> None:
    answers = []
    for folder in (windowed, plain):
        with LLM(folder, speculative_config=None, backend="compiled") as llm:
            answers.append(llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids)
    assert answers[0] != answers[1]


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_every_type_of_weights_and_keys(plain: str, dtype: str, kv: str) -> None:
    compare(plain, replace(GREEDY, max_tokens=40), dtype=dtype, kv_cache_dtype=kv)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(plain: str, threads: int) -> None:
    with LLM(plain, backend="compiled", threads=1) as one, LLM(plain, backend="compiled", threads=threads) as several:
        mine, theirs = (llm.generate(PROMPTS, GREEDY) for llm in (one, several))
    assert [o.outputs[0].token_ids for o in mine] == [o.outputs[0].token_ids for o in theirs]


def test_the_first_pass_of_all_may_want_no_logits(plain: str) -> None:
    """A fresh decoder whose first chunk does not reach the end of the prompt."""
    params = replace(GREEDY, max_tokens=8)
    with LLM(plain, backend="compiled", max_num_batched_tokens=2) as fresh, LLM(plain, backend="compiled") as other:
        first, whole = (llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids for llm in (fresh, other))
    assert first == whole


def test_little_memory_changes_nothing(plain: str) -> None:
    lookups = {"drafters": ["ngram", "suffix"], "num_speculative_tokens": 4}
    options = {"backend": "compiled", "speculative_config": lookups}
    with LLM(plain, **options) as roomy, LLM(plain, **options, kv_memory=40_000, page_size=4) as tight:
        mine, theirs = (llm.generate(PROMPTS, replace(GREEDY, max_tokens=60)) for llm in (roomy, tight))
        assert tight.core.engine.scheduler.preemptions > 0
    assert [o.outputs[0].token_ids for o in mine] == [o.outputs[0].token_ids for o in theirs]


def test_sampling_with_a_seed_is_the_same_with_drafts(plain: str) -> None:
    compare(plain, SamplingParams(temperature=0.9, top_p=0.95, seed=4, max_tokens=60, ignore_eos=True))


def test_a_folder_with_another_tokenizer_is_no_drafter(plain: str, tmp_path: Path) -> None:
    """SGLang 24051: an error at start that names the first token that differs."""
    from outrider.errors import OutriderError

    other = llama_folder(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"Ġt"', '"Ġ~"').replace('"Ġ t"', '"Ġ ~"'))
    with pytest.raises(OutriderError, match="token"):
        LLM(plain, backend="compiled", speculative_config={"drafters": [str(other)]})


def test_the_target_as_its_own_drafter_is_always_right(plain: str) -> None:
    """In the target's own bits; a drafter's default of 4 may differ."""
    own = {"name": "model", "path": plain, "dtype": "int8"}
    with LLM(plain, backend="compiled", speculative_config={"drafters": [own], "num_speculative_tokens": 5}) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        speculative = outputs[0].metrics.speculative
        llm.set_speculative_config(None)
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == [
            o.outputs[0].token_ids for o in outputs
        ]
    assert speculative.num_accepted_tokens == speculative.num_draft_tokens > 0
