"""What HTTP costs over the Python API for one stream, in turns on the same machine; prints one JSON record.

    python scripts/overhead.py --model smollm2-135m --rounds 12

Both sides answer the same prompts, without speculation, so that every token is a piece of its own: the dearest case.
Figures are medians over the rounds; `cpu_us_per_token` is what the server's process used, less what the API's did.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

from load_process import served

from outrider import LLM, SamplingParams

TEXT = "the river runs past the mill and a lamp burns over the quiet house of letters"
TICK = os.sysconf("SC_CLK_TCK")


class Run(NamedTuple):
    """One answer: seconds to the first token and per token after it, and processor seconds per token."""

    first: float
    each: float
    cpu: float


def timed(ask: Callable[[], Iterator[object]], tokens: int, cpu: Callable[[], float]) -> Run:
    """Time the pieces of so many tokens, from the asking on."""
    used, start = cpu(), time.perf_counter()
    pieces = ask()
    next(pieces)
    first = time.perf_counter()
    deque(pieces, maxlen=0)
    end = time.perf_counter()
    return Run(first - start, (end - first) / (tokens - 1), (cpu() - used) / tokens)


def through_python(llm: LLM, ids: list[int], tokens: int) -> Iterator[object]:
    """The API's stream."""
    return llm.stream(ids, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))


def through_http(url: str, ids: list[int], tokens: int) -> Iterator[object]:
    """The server's stream, read by a client that does as little as it can: it looks at the beginnings of lines."""
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    told = json.dumps(body)
    where = urlsplit(url)
    lines = ["POST /v1/completions HTTP/1.1", f"host: {where.netloc}", "content-type: application/json"]
    asked = "\r\n".join([*lines, f"content-length: {len(told)}", "connection: close", "", told])
    with (
        socket.create_connection((where.hostname, where.port or 80), timeout=600) as connection,
        connection.makefile("rb") as answer,
    ):
        connection.sendall(asked.encode())
        yield from (line for line in answer if line.startswith(b'data: {"id"'))


def process_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--serve", default="", help="more options of the server, as one text")
    options = parser.parse_args()
    python: list[Run] = []
    web: list[Run] = []
    tokens = options.max_tokens
    serve = ["--speculative-config", "off", *options.serve.split()]
    with served(options.model, serve) as (url, pid), LLM(options.model, speculative_config=None) as llm:
        for number in range(options.rounds + 1):
            ids = llm.tokenizer.encode(f"{number} {TEXT}", add_special=True)
            mine = timed(partial(through_python, llm, ids, tokens), tokens, time.process_time)
            theirs = timed(partial(through_http, url, ids, tokens), tokens, partial(process_seconds, pid))
            python.append(mine)
            web.append(theirs)
    python, web = python[1:], web[1:]  # the first round warms up
    both = list(zip(python, web, strict=True))
    record = {
        "schema": "outrider.bench/1",
        "kind": "overhead",
        "config": vars(options),
        "python": {"ttft_ms": 1e3 * median(r.first for r in python), "tpot_ms": 1e3 * median(r.each for r in python)},
        "http": {"ttft_ms": 1e3 * median(r.first for r in web), "tpot_ms": 1e3 * median(r.each for r in web)},
        "more_per_token": round(median(w.each / p.each for p, w in both) - 1, 4),
        "more_to_first_ms": round(1e3 * median(w.first - p.first for p, w in both), 2),
        "cpu_us_per_token": round(1e6 * median(w.cpu - p.cpu for p, w in both), 1),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
