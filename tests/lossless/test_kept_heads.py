"""A prompt that a restart finds on disk selects, drafts and answers as the cold one, with a retrieval head too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_context_head import write_head

import tiering
from contexts import GREEDY, LONG
from outrider import LLM
from tiering import check, slow, start

folder = tiering.folder
KEPT = [88, 56, 0, 120]  # tokens of LONG in whole pages, where they are 50 or more


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two heads of the same shape; the second one reads other states."""
    taps = {"one": (0, 1, 1), "two": (0, 0, 1)}
    return [write_head(tmp_path_factory.mktemp(name), taps=taps[name]) for name in taps]


def config(path: Path, head: str, name: str = "sparse", **more: Any) -> dict[str, Any]:
    selector = {"name": "head", "path": head}
    context = {"mode": name, "budget": 24, "sinks": 2, "window": 4, "selector": selector, "full_every": 5}
    return slow(path, context, **{"layers": 2, "keep_prompts": 50, **more})


def watched(llm: LLM) -> list[np.ndarray]:
    """Everything that selections hold from now on, in their order."""
    seen: list[np.ndarray] = []
    chooser = llm.core.memory.reading.reader.chooser
    choose = chooser.choose_scored

    def note(view: Any, *share: Any) -> Any:
        entries, scores = choose(view, *share)
        seen.append(np.array([view.length]) if entries is None else entries.copy())
        return entries, scores

    chooser.choose_scored = note
    return seen


def ask(llm: LLM) -> tuple[list[list[int]], list[int], list[np.ndarray]]:
    """Answers one by one, how much of each prompt was there, and all selections."""
    seen = watched(llm)
    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in LONG]
    check(llm)
    return [o.outputs[0].token_ids for o in outputs], [o.metrics.cached_tokens for o in outputs], seen


@pytest.mark.parametrize(
    ("name", "before", "layers"),
    [("sparse", 2, 0), ("sparse", 0, 3), ("bounded", 2, 3), ("lossless", 0, 0)],
)
def test_a_restored_prompt_selects_the_sets_of_the_cold_one(folder, heads, tmp_path, name, before, layers) -> None:
    with start(folder, config(tmp_path, heads[0], name, layers=before)) as llm:
        said, cached, chosen = ask(llm)
        assert cached == [0, 0, 0, 0]
        assert llm.core.memory.prompts.written == 3
    with start(folder, config(tmp_path, heads[0], name, layers=layers)) as llm:
        again, cached, same = ask(llm)
        assert llm.core.memory.prompts.found == 3
    assert again == said
    assert cached == KEPT
    assert len(same) == len(chosen) > 20
    assert all(a.shape == b.shape and (a == b).all() for a, b in zip(same, chosen, strict=True))


def test_prompts_of_another_head_or_of_none_are_not_taken_for_this_ones(folder, heads, tmp_path) -> None:
    with start(folder, config(tmp_path, heads[0])) as llm:
        said, _, _ = ask(llm)
    with start(folder, config(tmp_path, heads[1])) as llm:
        other, cached, _ = ask(llm)
        assert cached == [0, 0, 0, 0]
    with start(folder, {**config(tmp_path, heads[0]), "selector": "pages"}) as llm:
        _, cached, _ = ask(llm)
        assert cached == [0, 0, 0, 0]
        assert len(llm.kept_prompts()) == 9
        assert sum(file["usable"] for file in llm.kept_prompts()) == 3
        llm.set_context_config(config(tmp_path, heads[0]))
        again, cached, _ = ask(llm)  # turning to the head finds the prompts that were kept with it
        assert (again, cached) == (said, KEPT)
    assert other != said


def test_a_bound_holds_through_the_engine(folder, heads, tmp_path) -> None:
    context = config(tmp_path, heads[0])
    with start(folder, context) as llm:
        ask(llm)
        sizes = {file["tokens"]: file["bytes"] for file in llm.kept_prompts()}
        report = llm.speculation_report().context.kept
        assert (report.files, report.bytes) == (3, sum(sizes.values()))
    limit = sizes[120] + sizes[56] + 3000
    with start(folder, {**context, "keep_bytes": limit}) as llm:
        assert [file["tokens"] for file in llm.kept_prompts()] == [56, 120], "the least recently used one went"
        ask(llm)
        report = llm.speculation_report().context.kept
        assert report.bytes <= report.limit == limit
        assert report.removed > 1
        assert report.written > 0
