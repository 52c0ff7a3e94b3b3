"""scripts/load.py against a tiny model: nothing is wrong under load, and the script notices when something is."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Live, live

from loading import repeating_folder
from outrider.api.service import Service

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from load import Load, parse

LOOKUPS = ("ngram", "suffix")
SPARSE = {"mode": "sparse", "budget": 448, "window": 32}
MODES: dict[str, tuple[dict[str, Any] | None, tuple[str, ...]]] = {
    "sparse": (SPARSE, LOOKUPS),
    "tiered": (SPARSE | {"slow_layers": 1}, LOOKUPS),
    "lossless": (SPARSE | {"mode": "lossless"}, ("sparse_self",)),
    "full": (None, LOOKUPS),
}


@pytest.fixture(scope="module", params=MODES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = repeating_folder(tmp_path_factory.mktemp("tiny") / "model", positions=4096)
    context, names = MODES[request.param]
    if context is not None and "slow_layers" in context:
        context = context | {"kv_path": str(tmp_path_factory.mktemp("kv"))}
    drafters = {"drafters": names, "num_speculative_tokens": 4}
    options = {"speculative_config": drafters, "max_num_seqs": 8, "max_model_len": 2048}
    service = Service(folder, context_config=context, **options)
    with live(service, max_queue=64) as running:
        yield running


def run(server: Live, requests: int, **changes: Any) -> dict[str, Any]:
    words = ["--url", server.url, "--clients", "6", "--requests", str(requests)]
    load = Load(
        parse([*words, "--max-tokens", "16", "--long-prompt", "260", "--cancel", "0.25", "--malformed", "0.15"]),
        server.url,
        None,
    )
    for name, value in changes.items():
        setattr(load, name, value)
    return asyncio.run(load.run())


def test_nothing_is_wrong_under_load(server: Live) -> None:
    record = run(server, 60)
    assert record["ok"], (record["failures"], record["wrong"])
    assert record["outcomes"]["refused"] > 0
    assert record["outcomes"]["cancelled"] > 0
    drafts = "off" if record["config"]["context"]["mode"] == "sparse" else "on"
    kinds = {"greedy short, speculation on", *(f"{how} long, speculation {drafts}" for how in ("greedy", "sampled"))}
    assert kinds <= set(record["compared_with_alone"])
    assert sum(record["outcomes"].values()) == 60
    stats = server.backend.stats()
    drafts = {drafter["name"]: drafter["drafts"] for drafter in stats["speculation"]["drafters"]}
    assert sum(drafts.values()) > 0, drafts
    if record["config"]["context"].get("slow_layers"):
        assert stats["tiers"]["disk"]["loaded_bytes"] > 0


def test_a_wrong_answer_is_noticed(server: Live) -> None:
    async def alone(http: object, reference: object) -> list[int]:
        return [1] * 16

    record = run(server, 16, _alone=alone)
    assert not record["ok"]
    assert "differs" in record["failures"][0]
