"""Load a server with mixed requests, some cancelled and some malformed, and print one JSON record.

    python scripts/load.py --model smollm2-135m --clients 16 --requests 2000
    python scripts/load.py --url http://127.0.0.1:8000 --duration 1800          (soak)

Well-formed requests must be answered, greedy ones bitwise as when they were alone, malformed ones refused with a 4xx;
afterwards the server must be idle and its memory flat. Exit status 1 when anything of that fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

WORDS = re.findall(
    r"\w+", "river stone lamp seven quiet engine letters over the of and runs blue table counts slowly back"
)
KINDS = ("story", "code", "list", "edit")
MALFORMED: tuple[tuple[bytes, str], ...] = (
    (b"{", "application/json"),
    (b'{"prompt": "x", "unknown_field": 1}', "application/json"),
    (b'{"prompt": "x", "temperature": "hot"}', "application/json"),
    (b'{"prompt": "x", "n": 100000}', "application/json"),
    (b'{"prompt": "\xff"}', "application/json"),
    (b"[" * 5000, "application/json"),
    (b'{"prompt": "x"}', "text/plain"),
    (b'{"prompt": "x", "max_tokens": 100000000}', "application/json"),
)


@dataclass
class Tally:
    """What happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    compared: int = 0

    def fail(self, text: str) -> None:
        """Note something that must not happen."""
        self.outcomes["failed"] += 1
        self.failures.append(text[:300])

    def use(self, usage: dict[str, Any]) -> None:
        """Add a response's usage."""
        details = usage["completion_tokens_details"]
        self.tokens += usage["completion_tokens"]
        self.accepted += details["accepted_prediction_tokens"]
        self.drafted += details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]


@dataclass(frozen=True)
class Ask:
    """One well-formed request; `reference` numbers the prompt whose greedy answer is known."""

    body: dict[str, Any]
    stream: bool
    reference: int | None = None


class Load:
    """Clients that ask a server until the work or the time is over."""

    def __init__(self, options: argparse.Namespace, url: str, pid: int | None) -> None:
        self.options, self.url, self.pid = options, url, pid
        self.random = random.Random(options.seed)
        self.tally = Tally()
        self.prompts = [self._prompt(kind) for kind in KINDS for _ in range(options.references // len(KINDS))]
        self.answers: list[list[int]] = []
        self.memory: list[tuple[float, int]] = []
        self.left = options.requests
        self.end = time.monotonic() + options.duration if options.duration else None

    async def run(self) -> dict[str, Any]:
        """Everything, from the references to the record."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=self.options.timeout, limits=limits) as http:
            for prompt in self.prompts:
                self.answers.append(await self._alone(http, prompt))
            start = time.monotonic()
            watcher = asyncio.create_task(self._watch_memory(start))
            await asyncio.gather(*(self._client(http, number) for number in range(self.options.clients)))
            seconds = time.monotonic() - start
            watcher.cancel()
            idle = await self._idle(http)
        return self._record(seconds, idle)

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        choose = random.Random(self.options.seed * 1000 + number)
        while self._more():
            try:
                if choose.random() < self.options.malformed:
                    await self._send_malformed(http, choose)
                elif choose.random() < self.options.cancel:
                    await self._send_and_leave(http, self._ask(choose), choose.uniform(0.001, 1.0))
                else:
                    await self._send(http, self._ask(choose))
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.tally.fail(f"{type(error).__name__}: {error}")

    def _more(self) -> bool:
        self.left -= 1
        return time.monotonic() < self.end if self.end else self.left >= 0

    def _ask(self, choose: random.Random) -> Ask:
        """A request of the mix: half greedy with a known answer, half sampled; half of each streamed."""
        stream = choose.random() < 0.5
        extra: dict[str, Any] = {"speculative": False} if choose.random() < 0.1 else {}
        if stream:
            extra |= {"stream": True, "stream_options": {"include_usage": True}}
        if choose.random() < 0.5:
            number = choose.randrange(len(self.prompts))
            limit = choose.choice((8, self.options.max_tokens))
            return Ask(self._body(self.prompts[number], limit) | extra, stream, number)
        body = self._body(self._prompt(choose.choice(KINDS)), choose.choice((4, self.options.max_tokens)))
        body |= {"temperature": choose.choice((0.5, 1.0)), "n": choose.choice((1, 1, 2)), "top_p": 0.95}
        if choose.random() < 0.1:
            body["structured_outputs"] = {"regex": "[a-z]{3,12}( [a-z]{3,12}){2,5}"}
        if self.options.context_budget and choose.random() < 0.3:
            body["context_budget"] = self.options.context_budget
        return Ask(body | extra, stream)

    def _body(self, prompt: str, limit: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": limit, "temperature": 0, "return_token_ids": True}

    def _prompt(self, kind: str) -> str:
        size = self.random.choice((12, 40, self.options.long_prompt))
        words = " ".join(self.random.choice(WORDS) for _ in range(size))
        if kind == "edit":
            return f"Repeat this text exactly.\n{words}\nThe text again:\n{words[: len(words) // 2]}"
        heads = {"story": "Once upon a time", "code": "def main():\n    #", "list": "1. one\n2. two\n3."}
        return f"{heads[kind]} {words}"

    async def _alone(self, http: httpx.AsyncClient, prompt: str) -> list[int]:
        body = self._body(prompt, self.options.max_tokens) | {"speculative": False}
        response = await http.post("/v1/completions", json=body)
        response.raise_for_status()
        ids: list[int] = response.json()["choices"][0]["token_ids"]
        return ids

    async def _send(self, http: httpx.AsyncClient, ask: Ask) -> None:
        ids, usage = await (self._streamed(http, ask) if ask.stream else self._whole(http, ask))
        self.tally.outcomes["answered"] += 1
        self.tally.use(usage)
        if ask.reference is not None:
            self.tally.compared += 1
            expected = self.answers[ask.reference][: ask.body["max_tokens"]]
            if ids != expected:
                self.tally.fail(f"greedy answer {ask.reference} differs: {ids[:8]}... for {expected[:8]}...")

    async def _whole(self, http: httpx.AsyncClient, ask: Ask) -> tuple[list[int], dict[str, Any]]:
        response = await http.post("/v1/completions", json=ask.body)
        _must_be_ok(response.status_code, response.text)
        value = response.json()
        return value["choices"][0]["token_ids"], value["usage"]

    async def _streamed(self, http: httpx.AsyncClient, ask: Ask) -> tuple[list[int], dict[str, Any]]:
        ids: list[int] = []
        usage: dict[str, Any] = {}
        start = time.monotonic()
        first = None
        async with http.stream("POST", "/v1/completions", json=ask.body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    _must_be_ok(response.status_code, line)
                    continue
                first = first or time.monotonic()
                event = json.loads(line[6:])
                _must_be_ok(500 if "error" in event else 200, line)
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    ids += choice["token_ids"] if choice["index"] == 0 else []
        self.tally.ttft_ms.append(1e3 * ((first or start) - start))
        return ids, usage

    async def _send_and_leave(self, http: httpx.AsyncClient, ask: Ask, seconds: float) -> None:
        """A client that is gone after some time, unless it was answered before."""
        try:
            await asyncio.wait_for(self._send(http, ask), seconds)
        except asyncio.TimeoutError:
            self.tally.outcomes["cancelled"] += 1

    async def _send_malformed(self, http: httpx.AsyncClient, choose: random.Random) -> None:
        content, kind = choose.choice(MALFORMED)
        response = await http.post("/v1/completions", content=content, headers={"content-type": kind})
        self.tally.outcomes["refused"] += 1
        if not 400 <= response.status_code < 500 or "error" not in response.json():
            self.tally.fail(f"malformed {content[:40]!r} was answered {response.status_code}")

    async def _watch_memory(self, start: float) -> None:
        while self.pid is not None:
            self.memory.append((time.monotonic() - start, resident_bytes(self.pid)))
            await asyncio.sleep(0.5)

    async def _idle(self, http: httpx.AsyncClient) -> dict[str, Any]:
        """The server's state when everybody has gone; waits a little for cancellations to arrive."""
        for _ in range(100):
            stats = (await http.get("/stats")).json()
            engine = stats["engine"]
            if not (stats["in_flight"] or engine["running"] or engine["waiting"]):
                break
            await asyncio.sleep(0.05)
        keys = ("running", "waiting", "kv_pages_used", "kv_pages_total", "acceptance_length")
        return {"in_flight": stats["in_flight"]} | {key: engine[key] for key in keys}

    def _record(self, seconds: float, idle: dict[str, Any]) -> dict[str, Any]:
        tally, memory = self.tally, memory_growth(self.memory)
        busy = [name for name in ("in_flight", "running", "waiting", "kv_pages_used") if idle[name]]
        flat = memory is None or memory["growth"] <= self.options.max_growth
        ok = not tally.failures and not busy and flat and tally.compared > 0
        ordered = sorted(tally.ttft_ms) or [0.0]
        return {
            "schema": "outrider.bench/1",
            "kind": "load",
            "config": {k: v for k, v in vars(self.options).items() if k not in ("url", "out")},
            "seconds": round(seconds, 2),
            "outcomes": dict(tally.outcomes),
            "compared_with_alone": tally.compared,
            "output_tokens": tally.tokens,
            "output_tokens_per_second": round(tally.tokens / seconds, 2),
            "drafted_tokens": tally.drafted,
            "accepted_tokens": tally.accepted,
            "ttft_ms_p50": round(ordered[len(ordered) // 2], 2),
            "ttft_ms_p99": round(ordered[int(len(ordered) * 0.99)], 2),
            "memory": memory,
            "idle": idle,
            "failures": tally.failures[:10],
            "ok": ok,
        }


def _must_be_ok(status: int, text: str) -> None:
    if status != 200:
        raise ValueError(f"answered {status}: {text[:200]}")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_growth(samples: list[tuple[float, int]]) -> dict[str, Any] | None:
    """Growth from the second quarter, when everything is warm, to the last: medians, as a share."""
    if len(samples) < 8:
        return None
    quarter = len(samples) // 4
    early = sorted(size for _, size in samples[quarter : 2 * quarter])[quarter // 2]
    late = sorted(size for _, size in samples[-quarter:])[quarter // 2]
    peak = max(size for _, size in samples)
    return {"early_bytes": early, "late_bytes": late, "peak_bytes": peak, "growth": round(late / early - 1, 4)}


@contextmanager
def served(model: str, options: list[str]) -> Iterator[tuple[str, int]]:
    """Start `outrider serve` on a free port; gives its URL and process id."""
    command = [sys.executable, "-m", "outrider.cli.main", "serve", model, "--port", "0", *options]
    log = subprocess.Popen([*command, "--set", "log_level=info"], stderr=subprocess.PIPE, text=True)
    assert log.stderr is not None
    try:
        found = next((m for line in log.stderr if (m := re.search(r"running on (http://\S+?)\"", line))), None)
        if found is None:
            raise SystemExit("the server did not start")
        drain = subprocess.Popen(["cat"], stdin=log.stderr, stdout=subprocess.DEVNULL)  # keeps the pipe empty
        yield found[1], log.pid
        log.terminate()
        if log.wait(60) != 0:
            raise SystemExit(f"the server ended with status {log.returncode}")
        drain.wait(10)
    finally:
        log.kill()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--url", help="a running server")
    target.add_argument("--model", help="start a server of this model")
    parser.add_argument("--serve-option", action="append", default=[], help="an argument for `outrider serve`")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--duration", type=float, help="seconds to go on for, whatever --requests says")
    parser.add_argument("--cancel", type=float, default=0.2, help="share of requests whose client leaves")
    parser.add_argument("--malformed", type=float, default=0.05, help="share of malformed requests")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of a long answer")
    parser.add_argument("--long-prompt", type=int, default=200, help="words of a long prompt")
    parser.add_argument("--references", type=int, default=16, help="prompts whose greedy answers are compared")
    parser.add_argument("--context-budget", type=int, help="ask some requests to read only so many entries")
    parser.add_argument("--max-growth", type=float, default=0.03, help="share by which memory may grow")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds one request may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the record there too")
    return parser.parse_args(arguments)


def main() -> int:
    """Run and print the record."""
    options = parse()
    if options.url:
        record = asyncio.run(Load(options, options.url, None).run())
    else:
        with served(options.model, options.serve_option) as (url, pid):
            record = asyncio.run(Load(options, url, pid).run())
    line = json.dumps(record)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
