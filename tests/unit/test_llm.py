"""The Python API on a tiny random model: outputs, streams, threads, early closing, seeds, refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loading import repeating_folder
from outrider import LLM, SamplingParams
from outrider.errors import (
    CapacityError,
    ConfigError,
    PromptTooLongError,
    RequestError,
    UnsupportedError,
)

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=20, seed=7, ignore_eos=True)
PROMPTS = ["The quick brown fox", "def f(x):", "The quick brown fox jumps", "1 2 3 1 2 3 1 2 3 1 2"]
OFF = {"speculative": False}
LOOKUPS = {"drafters": ["ngram", "suffix"], "vote": "hedge", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return repeating_folder(tmp_path_factory.mktemp("tiny") / "model", positions=128)


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    """Guesses of a fixed length: "auto" rests where guessing does not pay, which here depends on the clock."""
    with LLM(folder, max_model_len=96, backend="reference", speculative_config=LOOKUPS) as llm:
        yield llm


def idle(llm: LLM) -> bool:
    llm.core.engine.check()
    return not llm.core.engine.scheduler.busy


def texts(llm: LLM, params: SamplingParams, prompts: list[str] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_speculation_and_company_change_nothing(llm: LLM, params: SamplingParams) -> None:
    together = llm.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in together] == texts(llm, replace(params, extra_args=OFF))
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS]
    assert [o.outputs[0].token_ids for o in together] == alone
    drafted = sum(o.metrics.speculative.num_draft_tokens for o in together)
    accepted = sum(o.metrics.speculative.num_accepted_tokens for o in together)
    assert drafted > accepted > 0
    assert idle(llm)


def test_seeds_matter_and_samples_differ(llm: LLM) -> None:
    one, other = texts(llm, SAMPLED), texts(llm, replace(SAMPLED, seed=8))
    assert one == texts(llm, SAMPLED) != other
    (output,) = llm.generate(PROMPTS[0], replace(SAMPLED, n=4))
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    assert output.outputs[0].token_ids == one[0]


def test_streams_say_what_generate_says(llm: LLM) -> None:
    pieces = list(llm.stream(PROMPTS[3], GREEDY))
    whole = llm.generate(PROMPTS[3], GREEDY)[0].outputs[0]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.finish is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) < len(whole.token_ids)  # some steps gave several tokens
    assert llm.tokenizer.decode(whole.token_ids) == whole.text


def test_closing_a_stream_releases_everything(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=60))
    next(stream)
    stream.close()
    assert idle(llm)


def test_a_stream_never_started_holds_no_result(llm: LLM) -> None:
    llm.stream(PROMPTS[0], GREEDY).close()
    assert idle(llm)
    assert texts(llm, GREEDY) == texts(llm, GREEDY)


def test_a_stream_that_nobody_keeps_is_aborted(llm: LLM) -> None:
    llm.stream(PROMPTS[0], GREEDY)
    assert idle(llm)


def test_prompts_of_numpy_ids_are_prompts_of_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    for prompt in (np.array(ids), list(np.array(ids)), {"prompt_token_ids": np.array(ids)}):
        assert llm.generate(prompt, GREEDY)[0].prompt_token_ids == ids


@pytest.mark.parametrize("ids", [["a"], None, "ab", [1.5]])
def test_prompt_token_ids_of_another_kind_are_refused(llm: LLM, ids: object) -> None:
    with pytest.raises(RequestError, match="a prompt is a string"):
        llm.generate({"prompt_token_ids": ids}, GREEDY)


def test_sampling_params_of_another_kind_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="give SamplingParams"):
        llm.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]


def test_a_path_is_a_model_and_nothing_is_none(folder: str) -> None:
    with LLM(Path(folder), max_model_len=96, backend="reference") as llm:
        assert llm.generate("a", GREEDY)[0].finished
    with pytest.raises(ConfigError, match="model = None is refused"):
        LLM(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["dtype", "device"])
def test_an_option_that_is_no_string_is_refused(folder: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} = 3 is refused; give a string"):
        LLM(folder, **{option: 3})


def test_an_llm_in_a_forked_process_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, max_model_len=96, backend="reference") as llm:
        monkeypatch.setattr("os.getpid", lambda: -1)
        with pytest.raises(RequestError, match="make one after the fork"):
            llm.generate("a", GREEDY)


def test_many_threads_share_one_llm(llm: LLM) -> None:
    expected = texts(llm, GREEDY)
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        found[i] = llm.generate(PROMPTS[i % 4], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: expected[i % 4] for i in range(12)}
    assert idle(llm)


def test_logprobs_are_those_of_the_target_at_every_position(llm: LLM) -> None:
    params = replace(GREEDY, logprobs=3, prompt_logprobs=2)
    on, off = (llm.generate(PROMPTS[3], p)[0] for p in (params, replace(params, extra_args=OFF)))
    assert on.metrics.speculative.num_accepted_tokens > 0
    assert [e.token for e in on.outputs[0].logprobs] == on.outputs[0].token_ids
    assert on.outputs[0].logprobs == off.outputs[0].logprobs
    assert all(e.logprob == e.top[0][1] and e.rank == 1 for e in on.outputs[0].logprobs)
    assert on.prompt_logprobs == off.prompt_logprobs
    assert on.prompt_logprobs[0] is None
    assert [e.token for e in on.prompt_logprobs[1:]] == on.prompt_token_ids[1:]


def test_a_stop_string_ends_the_text_and_everything_about_it(llm: LLM) -> None:
    text = llm.generate(PROMPTS[3], replace(GREEDY, max_tokens=40))[0].outputs[0].text
    stop = text[6:9]
    output = llm.generate(PROMPTS[3], replace(GREEDY, max_tokens=40, stop=stop, logprobs=0))[0].outputs[0]
    assert output.text == text[: text.find(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.logprobs) == len(output.token_ids) == len(output.accepted) < 40


def test_chat_goes_through_the_template(llm: LLM) -> None:
    message = [{"role": "user", "content": "Hi <|im_end|>"}]
    (output,) = llm.chat(message, GREEDY)
    control = llm.tokenizer.encode("<|im_end|>", allow_special=True)[0]
    assert output.prompt_token_ids.count(control) == 1  # the template's own; the user's is text
    assert [o.outputs[0].token_ids for o in llm.chat([message, message], GREEDY)] == [output.outputs[0].token_ids] * 2


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ("x " * 200, GREEDY, PromptTooLongError, "max_model_len"),
        ("", GREEDY, RequestError, "empty"),
        ([1, 2, 999_999], GREEDY, RequestError, "999999"),
        ({"tokens": [1]}, GREEDY, RequestError, "prompt_token_ids"),
        ("x", replace(GREEDY, logit_bias={999_999: 1.0}), UnsupportedError, "logit_bias"),
        ("x", replace(GREEDY, stop_token_ids=[-1]), UnsupportedError, "stop_token_ids"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(llm: LLM, prompt, params, error, words) -> None:
    with pytest.raises(error, match=words) as caught:
        llm.generate([prompt] if isinstance(prompt, list) else prompt, params)
    assert "\n" not in str(caught.value)
    assert idle(llm)


def test_one_bad_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError):
        llm.generate([*PROMPTS, "x " * 200], GREEDY)
    assert idle(llm)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("extra_args", {"speculative": "no"}),
        ("extra_args", {"context_budget": 0}),
        ("extra_args", {"budget": 1}),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("n", 0),
        ("stop", ""),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field, value) -> None:
    with pytest.raises(UnsupportedError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_sequences": 4}, "max_num_seqs"),
        ({"speculative_config": {"drafter": ["ngram"]}}, "drafters"),
        ({"speculative_config": {"drafters": ["n-gram"]}}, "ngram"),
        ({"speculative_config": "on"}, "auto"),
        ({"context_config": {"mod": "full"}}, "mode"),
        ({"max_model_len": 100_000}, "positions"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"page_size": 0}, "page_size"),
    ],
)
def test_unknown_options_name_the_nearest(folder: str, options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(folder, backend="reference", **options)


def test_too_little_memory_is_a_clear_error(folder: str) -> None:
    with pytest.raises(CapacityError, match="kv_memory"):
        LLM(folder, backend="reference", kv_memory=10)
    with pytest.raises(CapacityError, match="max_model_len"):
        LLM(folder, backend="reference", kv_memory=40_000, max_model_len=128)


@pytest.mark.parametrize("backend", ["reference", "compiled"])
def test_more_kv_memory_than_there_is_is_refused_with_both_numbers(folder: str, backend: str) -> None:
    with pytest.raises(CapacityError, match=rf"kv_memory = {2**50} bytes, but this machine has \d+ bytes of memory"):
        LLM(folder, backend=backend, kv_memory=2**50)


def test_a_closed_llm_says_so(folder: str) -> None:
    with LLM(folder, backend="reference") as llm:
        pass
    with pytest.raises(RequestError, match="closed"):
        llm.generate("x", GREEDY)


def test_speculation_can_be_changed_between_requests(llm: LLM) -> None:
    expected = texts(llm, GREEDY)
    try:
        llm.set_speculative_config(None)
        assert llm.generate(PROMPTS[3], GREEDY)[0].metrics.speculative.num_drafts == 0
        llm.set_speculative_config({"drafters": ["ngram"], "num_speculative_tokens": 7})
        assert texts(llm, GREEDY) == expected
        assert llm.speculation_report().num_drafts > 0
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        with pytest.raises(CapacityError, match="open"):
            llm.set_speculative_config(None)
        stream.close()
    finally:
        llm.set_speculative_config("auto")


@pytest.mark.parametrize("flow", ["published", "little"])
def test_the_pipelined_loop_says_the_same(llm: LLM, flow: str) -> None:
    expected = texts(llm, GREEDY)
    try:
        llm.set_speculative_config({"pipeline": True, "flow": flow})
        assert texts(llm, GREEDY) == expected
        assert llm.core.engine.overlapped > 0
        assert idle(llm)
    finally:
        llm.set_speculative_config("auto")


def test_two_models_live_in_one_process(folder: str, llm: LLM) -> None:
    with LLM(folder, backend="reference", speculative_config=None) as other:
        assert texts(other, GREEDY) == texts(llm, GREEDY)
