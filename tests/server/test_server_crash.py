"""`outrider serve` killed with SIGKILL under load and started again: nothing stale stays, kept prompts are checked."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from live import command, wait_for

from loading import LLAMA_CONFIG, llama_folder, llama_tensors
from outrider.memory.tiers.scratch import PATTERN

PROMPT = [int(token) for token in np.random.default_rng(3).integers(5, 300, 120)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = {**LLAMA_CONFIG, "num_hidden_layers": 4, "max_position_embeddings": 512}
    return str(llama_folder(tmp_path_factory.mktemp("tiny") / "model", llama_tensors(1, layers=4), config))


@contextmanager
def served(model: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The command itself, with half of the layers in the slow tier and long prompts kept."""
    context = {"mode": "sparse", "budget": 48, "window": 16, "kv_path": str(folder), "kv_memory": 1 << 26}
    context |= {"slow_layers": 2, "keep_prompts": 64}
    options = ["--max-model-len", "512", "--context-config", json.dumps(context), "--speculative-config", "off"]
    with command(model, *options) as (process, url), httpx.Client(base_url=url, timeout=60) as http:
        yield process, http


def answer(http: httpx.Client, prompt: list[int], tokens: int = 24) -> tuple[list[int], int]:
    """Token ids, and how many prompt tokens were found."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    told = response.json()
    return told["choices"][0]["token_ids"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_until_it_dies(http: httpx.Client) -> None:
    with suppress(httpx.TransportError):
        while True:
            answer(http, PROMPT[:40], 300)


def test_killed_under_load_it_starts_clean(model: str, tmp_path: Path) -> None:
    with served(model, tmp_path) as (process, http):
        expected, found = answer(http, PROMPT)
        assert found == 0
        wait_for(lambda: any(tmp_path.glob("*.safetensors")))
        loads = [threading.Thread(target=ask_until_it_dies, args=(http,)) for _ in range(3)]
        for load in loads:
            load.start()
        wait_for(lambda: http.get("/stats").json()["engine"]["running"] > 0)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        for load in loads:
            load.join(60)
    stale = set(tmp_path.glob(PATTERN))
    assert len(stale) == 1

    with served(model, tmp_path) as (process, http):
        assert not stale & set(tmp_path.glob(PATTERN))
        tokens, found = answer(http, PROMPT)
        assert tokens == expected
        assert found >= 64  # the kept prompt is used again
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not list(tmp_path.glob(PATTERN))

    for kept in tmp_path.glob("*.safetensors"):
        content = bytearray(kept.read_bytes())
        content[-40] ^= 1
        kept.write_bytes(content)
    with served(model, tmp_path) as (_, http):
        tokens, found = answer(http, PROMPT)
        assert tokens == expected
        assert found == 0  # its checksum tells, and the prompt is computed again
