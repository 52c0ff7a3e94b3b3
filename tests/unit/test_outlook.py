"""What a context configuration means, as it is printed at start, by `outrider info` and by `outrider plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loading import repeating_folder
from outrider import LLM, SamplingParams
from outrider.cli.main import DONE, WRONG_USAGE, main
from outrider.cli.plan import make_report
from outrider.config import ContextConfig
from outrider.memory.outlook import PAUSE

SPARSE: dict[str, Any] = {"mode": "sparse", "budget": 48, "sinks": 2, "window": 16, "group": 2}
LIMIT = 1_200_000  # bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return repeating_folder(tmp_path_factory.mktemp("outlook") / "model", layers=4)


def tiered(path: Path, **more: Any) -> dict[str, Any]:
    return {
        **SPARSE,
        "kv_memory": LIMIT,
        "kv_path": str(path / "kv"),
        "slow_kv_dtype": "int8",
        "slow_layers": 2,
        **more,
    }


def info(capsys: pytest.CaptureFixture[str], folder: str, context: dict[str, Any] | None, *words: str) -> Any:
    given = [] if context is None else ["--context-config", json.dumps(context)]
    assert main(["info", folder, "--json", *given, *words]) == DONE
    return json.loads(capsys.readouterr().out)["context_plan"]


@pytest.mark.parametrize("tier", [False, True])
def test_info_says_what_a_start_says(folder, tmp_path, capsys, tier) -> None:
    context = tiered(tmp_path) if tier else SPARSE
    shown = info(capsys, folder, context, "--max-num-seqs", "3", "--kv-cache-dtype", "float32")
    assert not (tmp_path / "kv").exists(), "nothing is made by looking"
    options: dict[str, Any] = {"max_num_seqs": 3, "kv_cache_dtype": "float32", "threads": 1}
    with LLM(folder, speculative_config=None, context_config=context, **options) as llm:
        assert llm.context_plan() == shown
        assert shown["kv_bytes_per_token"] == llm.core.decoder.kv_bytes_per_token()
        if tier:
            one, model = shown["placed"][0], llm.core.place.model
            assert one["slow_bytes"] == one["slow_layers"] * model.slow_kv_bytes * one["length"] > 0
            assert model.slow_kv_bytes < model.kv_bytes


def test_the_words_say_what_is_read_what_is_resident_and_what_is_slow(folder, tmp_path, capsys) -> None:
    plan = info(capsys, folder, tiered(tmp_path, keep_prompts=30, keep_bytes=1 << 20), "--kv-cache-dtype", "float32")
    reads, kv, place, one, many, kept = plan["lines"]
    assert "sparse, steps read 48 entries per KV head (2 first, 16 latest, the others picked by pages" in reads
    assert "float32" in kv
    assert "at most 1.1 MiB of fast memory, 2 slow layers always, slow layers in" in place
    assert place.endswith("as int8")
    slow = plan["placed"][0]["slow_layers"]
    assert slow == 2
    assert "layers 0-1 resident, layers 2-3 slow: " in one
    assert plan["placed"][0]["fast_bytes"] == sum(plan["placed"][0]["parts"].values()) <= LIMIT
    assert "fit at once, the others wait" in many
    assert "prompts of 30 tokens or more" in kept
    assert "1.0 MiB" in kept


def test_everything_resident_and_full_by_default(folder, capsys) -> None:
    plan = info(capsys, folder, None)
    assert plan["lines"][0] == "context: full, attention reads everything"
    assert plan["lines"][2].startswith("place: everything resident")
    assert plan["budget"] is plan["selector"] is plan["slow_kv_type"] is None
    assert main(["info", folder]) == DONE
    assert "full, attention reads everything" in capsys.readouterr().out


def test_lossless_mode_says_that_the_target_does_not_draft_over_slow_layers(folder, tmp_path, capsys) -> None:
    lossless = {**SPARSE, "mode": "lossless"}
    assert f"note: {PAUSE}" in info(capsys, folder, {**tiered(tmp_path), "mode": "lossless"})["lines"]
    assert f"note: {PAUSE}" not in info(capsys, folder, lossless)["lines"]


def test_the_same_line_is_a_warning_at_start(folder, tmp_path, caplog) -> None:
    """And it is true: where layers are slow, nothing is drafted, and the output is that of the model."""
    prompt = [3 + i % 60 for i in range(150)]
    for slow, drafted in ((0, True), (2, False)):
        caplog.clear()
        context = {**tiered(tmp_path), "mode": "lossless", "slow_layers": slow, "slow_kv_dtype": "auto"}
        context |= {} if slow else {"kv_memory": None, "kv_path": None}
        options: dict[str, Any] = {"page_size": 4, "threads": 1, "speculative_config": None, "max_model_len": 200}
        with LLM(folder, context_config=context, max_num_batched_tokens=64, **options) as llm:
            said = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
        assert (said.metrics.speculative.num_drafts > 0) == drafted
        assert (PAUSE in caplog.text) == (not drafted)


def test_commands_that_answer_print_it_at_start_where_a_configuration_was_given(folder, tmp_path, capsys) -> None:
    words = ["generate", folder, "-p", "t5 t6", "--raw", "--max-tokens", "2", "--json"]
    assert main(words) == DONE
    assert "context:" not in capsys.readouterr().err
    assert main([*words, "--context-config", json.dumps(tiered(tmp_path))]) == DONE
    shown = capsys.readouterr()
    assert shown.err.startswith("context: sparse, steps read 48 entries")
    assert "place: at most 1.1 MiB of fast memory" in shown.err
    assert json.loads(shown.out)["context"]["mode"] == "sparse"


@pytest.mark.parametrize(
    ("context", "hint"),
    [({"mode": "sparse", "budgt": 3}, "budget"), ({"kv_memory": 5}, "kv_path"),
     ({**SPARSE, "kv_path": "x", "kv_memory": 5}, "kv_memory")],
)  # fmt: skip
def test_info_refuses_what_a_start_refuses(folder, capsys, context, hint) -> None:
    assert main(["info", folder, "--context-config", json.dumps(context)]) != DONE
    assert hint in capsys.readouterr().err


def test_a_plan_takes_its_budget_and_types_from_the_configuration() -> None:
    context = ContextConfig(mode="sparse", budget=512, selector="window", slow_kv_dtype="int8")
    report = make_report("llama3-8b", 24 << 30, requests=4, length=65536, context=context)
    assert report["budget"] == 512
    assert "512 entries" in report["reads"]
    assert report["footprint"]["selector_bytes"] == 0
    assert report["footprint"]["slow_kv_bytes"] < report["footprint"]["kv_bytes"]
    assert report["footprint"]["staging_layers"] == 2
    assert make_report("llama3-8b", 24 << 30, budget=128, context=context)["budget"] == 128


def test_only_modes_that_decode_sparsely_keep_selections_at_hand() -> None:
    buffers = {mode: plan_of(mode)["parts"]["slow layers' buffers"] for mode in ("sparse", "lossless", "full")}
    assert buffers["lossless"] == buffers["full"] < buffers["sparse"]


def plan_of(mode: Any) -> dict[str, Any]:
    context = ContextConfig(mode=mode, budget=1024, slow_layers=16)
    report = make_report("llama3-8b", 80 << 30, requests=4, length=16384, context=context)
    assert report["slow_layers"] == 16
    return report


def test_kv_memory_alone_plans_kv_alone(capsys) -> None:
    context = json.dumps({"mode": "sparse", "kv_memory": 1 << 30, "kv_path": "x"})
    assert main(["plan", "llama3-8b", "--length", "8192", "--context-config", context, "--json"]) == DONE
    report = json.loads(capsys.readouterr().out)
    assert report["memory"] == 1 << 30 > report["fast_bytes"]
    assert report["parts"]["weights"] == 0 < report["slow_layers"]
    assert main(["plan", "llama3-8b"]) == WRONG_USAGE
    assert "give --memory" in capsys.readouterr().err
