"""Memory that contexts really take, against the plan: resident, half of the layers slow, and slow as int8.

    python scripts/memory.py smollm2-135m --requests 2 --context 4096

Every setting runs in a process of its own. `limit` is what it may use for KV (kv_memory; the pool where all is
resident), `planned` the most that the plan foretold, `actual` the peak of resident memory over what the process has
beside KV: its peak while short prompts bring in all code and scratch, those of selection and tiers too, less the KV of
these. The allocator is told to give freed memory back at once, so that only what is held counts; without --huge-pages
NumPy asks for none, which would round what is touched of every array up to 2 MiB. Prints one JSON line; exit status 1
where actual passes a limit by more than a hundredth (tables and lists that grow with the context, too). Linux.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from outrider import LLM, SamplingParams
from outrider.api.core import Options
from outrider.api.resolve import Described, outlook, resolve
from outrider.memory.place.build import TRANSFER_SHARE
from outrider.memory.planner import Load, plan
from outrider.models.load import load_model

TOLERANCE = 0.01
BUDGET = 1024
TOKENS = 32  # of every answer
WARM_UP = 600  # tokens of the prompts that touch all scratch, more than a pass takes
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
KINDS = ("resident", "half slow", "int8 slow")


def main() -> int:
    options = parse()
    if options.setting is not None:
        print(json.dumps(measure(options.model, json.loads(options.setting), options.requests, options.context)))
        return 0
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory(dir=options.kv_path) as folder:
            setting = setting_of(kind, options, folder)
            words = [sys.executable, __file__, options.model, "--setting", json.dumps(setting)]
            words += ["--requests", str(options.requests), "--context", str(options.context)]
            environment = {**os.environ, **ALLOCATOR, "NUMPY_MADVISE_HUGEPAGE": str(int(options.huge_pages))}
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        rows.append({"setting": kind, **json.loads(done.stdout.splitlines()[-1])})
        print(json.dumps(rows[-1]), file=sys.stderr)
    print(json.dumps({"model": options.model, "requests": options.requests, "context": options.context, "rows": rows}))
    return int(any(row["share"] > 1 + TOLERANCE for row in rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096, help="tokens of each, answer included")
    parser.add_argument("--huge-pages", action="store_true", help="as NumPy does by default")
    parser.add_argument("--kv-path", help="folder for the slow tier; default: the system's for temporary files")
    parser.add_argument("--setting", help=argparse.SUPPRESS)  # of a child process
    return parser.parse_args()


def setting_of(kind: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The context config of one setting; memory for KV is what half of the layers leave over where some are slow."""
    sparse = {"mode": "sparse", "budget": BUDGET}
    if kind == "resident":
        return sparse
    slow = {**sparse, "kv_path": folder, "slow_kv_dtype": "int8" if kind == "int8 slow" else "auto"}
    loaded = load_model(options.model)
    asked = Options.parse(None, {**slow, "kv_memory": 1 << 40}, engine_of(options.requests, options.context))
    described = Described(loaded.spec, 0)
    model = outlook(described, resolve(described, Options(engine=asked.engine)), asked.engine).model
    half = plan(model, 1 << 40, [Load(options.context, BUDGET)] * options.requests, model.layers // 2)
    return {**slow, "kv_memory": -(-half.fast_bytes * TRANSFER_SHARE // (TRANSFER_SHARE - 1))}


def engine_of(requests: int, context: int) -> dict[str, Any]:
    return {"max_num_seqs": requests, "max_model_len": context}


def measure(model: str, setting: Mapping[str, Any], requests: int, context: int) -> dict[str, Any]:
    """Run the requests once; memory in bytes."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    if "kv_path" in setting:
        load_code(model, {**setting, "slow_layers": 2}, requests, context)
    with LLM(model, speculative_config=None, context_config=setting, **engine_of(requests, context)) as llm:
        gc.collect()  # what loading left behind
        with peak() as warm:
            warm_up(llm, requests)
        beside = warm[0] - touched(llm)
        with peak() as seen:
            step, planned, counted = llm.core.engine.step, [0], [0]

            def watched() -> Any:
                deltas = step()
                planned[0] = max(planned[0], llm.memory_plan().get("kv_planned", 0))
                counted[0] = max(counted[0], touched(llm))
                return deltas

            llm.core.engine.step = watched  # type: ignore[method-assign]
            llm.generate([prompt(llm, context - TOKENS, 100 + seed) for seed in range(requests)], params)
        tiers = llm.speculation_report().context.tiers
        limit = setting.get("kv_memory", llm.core.resolved.kv_bytes)
        return {
            "limit": limit,
            "planned": planned[0] or limit,
            "counted": counted[0],
            "actual": seen[0] - beside,
            "share": (seen[0] - beside) / limit,
            "beside": beside,
            "weights": llm.core.resolved.weight_bytes,
            "slow_layers": tiers.slow_layers if tiers else 0,
            "loaded_bytes": tiers.loaded_bytes if tiers else 0,
        }


def load_code(model: str, setting: Mapping[str, Any], requests: int, context: int) -> None:
    """Code of tiers is read where it is first used; it is no memory of contexts."""
    with LLM(model, speculative_config=None, context_config=setting, **engine_of(requests, context)) as llm:
        warm_up(llm, requests)
    del llm
    gc.collect()


def warm_up(llm: LLM, requests: int) -> None:
    """Short prompts that are read and answered as long ones are."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args={"context_budget": 100})
    llm.generate([prompt(llm, WARM_UP // requests + 1, seed) for seed in range(requests)], params)


def prompt(llm: LLM, length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    vocabulary = llm.core.spec.num_tokens or llm.core.spec.vocab_size
    return np.random.default_rng(seed).integers(100, vocabulary // 2, length).tolist()


def touched(llm: LLM) -> int:
    """KV memory that was touched so far, selection included, as the engine counts it."""
    plan_now = llm.memory_plan()
    if "kv_fast" in plan_now:
        return plan_now["kv_fast"]
    pool, resolved = llm.core.memory.pool, llm.core.resolved
    return pool.touched * (resolved.kv_bytes // pool.num_pages)


def resident() -> int:
    """Resident memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most resident memory while the body runs, looked at every 5 ms."""
    seen, done = [resident()], threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            seen[0] = max(seen[0], resident())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()


if __name__ == "__main__":
    sys.exit(main())
