"""Load a server with mixed requests, some cancelled and some malformed, and print one JSON record.

    python scripts/load.py --model smollm2-135m --clients 16 --requests 2000
    python scripts/load.py --url http://127.0.0.1:8000 --duration 1800          (soak)

Every well-formed request must be answered exactly once, with the very tokens it gets alone wherever these are settled
(load_traffic.py says which), malformed ones must be refused with a 4xx. Afterwards nothing may be held: no page, no
place in the queue, no drafter's table; memory must be flat and neither descriptors nor threads may pile up. Exit status
1 when anything of that fails, or when speculation or selection was meant to happen and did not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from load_process import Watch, served
from load_traffic import MALFORMED, Ask, Reference, Traffic


@dataclass
class Tally:
    """What happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    ttft_ms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

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

    @property
    def mean_seconds(self) -> float:
        """How long an answer took lately."""
        lately = self.seconds[-50:]
        return sum(lately) / len(lately) if lately else 1.0


@dataclass
class Reply:
    """One answer as it came: tokens of every sample, and how often each was ended."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: Counter[int] = field(default_factory=Counter)
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, part: dict[str, Any]) -> None:
        """A chunk, or the whole response."""
        self.usage = part.get("usage") or self.usage
        for choice in part["choices"]:
            self.tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
            self.ends[choice["index"]] += choice["finish_reason"] is not None

    def check(self, ask: Ask) -> None:
        """Raises ValueError unless every sample was answered and ended exactly once and was counted right."""
        samples = ask.body.get("n", 1)
        if self.ends != Counter(range(samples)):
            raise ValueError(f"{samples} samples were ended {dict(self.ends)} times")
        total = sum(map(len, self.tokens.values()))
        if not total or self.usage["completion_tokens"] != total:
            raise ValueError(f"usage tells {self.usage['completion_tokens']} of {total} tokens")


class Load:
    """Clients that ask a server until the work or the time is over."""

    def __init__(self, options: argparse.Namespace, url: str, pid: int | None) -> None:
        self.options, self.url = options, url
        self.tally = Tally()
        self.watch = Watch(pid, url, 0.5 if not options.duration else max(0.5, options.duration / 1800))
        self.left = options.requests
        self.end = 0.0
        self._engine: dict[str, Any] = {}  # what it says of itself when all is over

    async def run(self) -> dict[str, Any]:
        """Everything, from the references to the record."""
        options = self.options
        async with self._client() as http:
            context = (await http.get("/stats")).json()["config"]["context"]
            traffic = Traffic(options.seed, options.long_prompt, options.max_tokens, context)
            references = traffic.references(options.references)
            await self._check_sizes(http, references, context)
            for reference in references:
                reference.answer = await self._alone(http, reference)
        await self.watch.look()
        start = time.monotonic()
        self.end = start + options.duration if options.duration else 0.0
        jobs = [asyncio.create_task(self.watch.run()), asyncio.create_task(self._tell(start))]
        clients = (self._ask_and_ask(number, traffic, references) for number in range(options.clients))
        await asyncio.gather(*clients)
        seconds = time.monotonic() - start
        for job in jobs:
            job.cancel()
        idle = await self._idle()
        await self.watch.look()
        return self._record(seconds, idle | self.watch.piled_up(), context)

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=self.options.timeout, limits=limits)

    async def _check_sizes(self, http: httpx.AsyncClient, references: list[Reference], context: dict[str, Any]) -> None:
        """Long prompts must be well beyond the budget, short ones and their answers within it."""
        if context["mode"] == "full":
            return
        for reference in references:
            response = await http.post("/tokenize", json={"prompt": reference.body["prompt"]})
            count, budget = response.json()["count"], context["budget"]
            if "long" in reference.name and count < 2 * budget:
                raise SystemExit(f"a long prompt has {count} tokens, not twice the budget of {budget}")
            if "short" in reference.name and count + self.options.max_tokens > budget:
                raise SystemExit(f"a short prompt of {count} tokens and its answer exceed the budget of {budget}")

    async def _alone(self, http: httpx.AsyncClient, reference: Reference) -> list[int]:
        response = await http.post("/v1/completions", json=reference.body | {"speculative": False})
        if response.status_code != 200:
            raise SystemExit(f"a {reference.name} prompt was answered {response.status_code}: {response.text[:300]}")
        ids: list[int] = response.json()["choices"][0]["token_ids"]
        return ids

    async def _ask_and_ask(self, number: int, traffic: Traffic, references: list[Reference]) -> None:
        """One client."""
        choose = random.Random(self.options.seed * 1000 + number)
        async with self._client() as http:
            while self._more():
                try:
                    if choose.random() < self.options.malformed:
                        await self._send_malformed(http, choose)
                    elif choose.random() < self.options.cancel:
                        seconds = choose.uniform(0.0005, 1.2 * self.tally.mean_seconds)
                        await self._send_and_leave(http, traffic.ask(choose, references), seconds)
                    else:
                        await self._send(http, traffic.ask(choose, references))
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.tally.fail(f"{type(error).__name__}: {error}")

    def _more(self) -> bool:
        self.left -= 1
        return time.monotonic() < self.end if self.end else self.left >= 0

    async def _send(self, http: httpx.AsyncClient, ask: Ask) -> None:
        start = time.monotonic()
        reply = await (self._streamed(http, ask) if ask.stream else self._whole(http, ask))
        reply.check(ask)
        self.tally.outcomes["answered"] += 1
        self.tally.seconds.append(time.monotonic() - start)
        self.tally.use(reply.usage)
        if ask.reference is not None:
            self.tally.compared[ask.kind] += 1
            expected = list(ask.reference.answer[: ask.body["max_tokens"]])
            if reply.tokens[0] != expected:
                self.tally.fail(f"{ask.kind} differs: {reply.tokens[0][:8]}... for {expected[:8]}...")

    async def _whole(self, http: httpx.AsyncClient, ask: Ask) -> Reply:
        response = await http.post("/v1/completions", json=ask.body)
        _must_be_ok(response.status_code, response.text)
        reply = Reply()
        reply.add(response.json())
        return reply

    async def _streamed(self, http: httpx.AsyncClient, ask: Ask) -> Reply:
        reply, start, ended = Reply(), time.monotonic(), 0
        async with http.stream("POST", "/v1/completions", json=ask.body) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended += 1
                elif line.startswith("data: "):
                    if not reply.tokens:
                        self.tally.ttft_ms.append(1e3 * (time.monotonic() - start))
                    event = json.loads(line[6:])
                    _must_be_ok(500 if "error" in event else 200, line)
                    reply.add(event)
                else:
                    _must_be_ok(response.status_code, line)
        if ended != 1:
            raise ValueError(f"a stream said [DONE] {ended} times")
        return reply

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

    async def _tell(self, start: float) -> None:
        """A line of progress a minute."""
        while True:
            await asyncio.sleep(60)
            told = f"{dict(self.tally.outcomes)}, {self.tally.tokens} tokens"
            print(f"{time.monotonic() - start:.0f} s: {told}", file=sys.stderr, flush=True)

    async def _idle(self) -> dict[str, Any]:
        """What is held when everybody has gone; waits a little for cancellations to arrive."""
        async with self._client() as http:
            for _ in range(200):
                stats = (await http.get("/stats")).json()
                engine = stats["engine"]
                if not (stats["in_flight"] or engine["running"] or engine["waiting"]):
                    break
                await asyncio.sleep(0.05)
        held = {f"held by {drafter['name']}": drafter["held"] for drafter in engine["drafters"]}
        self._engine = engine
        kept = {name: engine[name] for name in ("running", "waiting", "kv_pages_used")}
        return {"in_flight": stats["in_flight"]} | kept | held

    def _record(self, seconds: float, idle: dict[str, Any], context: dict[str, Any]) -> dict[str, Any]:
        tally, watched = self.tally, self.watch.report()
        wrong = self._wrong(idle, context, watched)
        ordered = sorted(tally.ttft_ms) or [0.0]
        return {
            "schema": "outrider.bench/1",
            "kind": "load",
            "config": {k: v for k, v in vars(self.options).items() if k not in ("url", "out")} | {"context": context},
            "seconds": round(seconds, 2),
            "outcomes": dict(tally.outcomes),
            "compared_with_alone": dict(tally.compared),
            "output_tokens": tally.tokens,
            "output_tokens_per_second": round(tally.tokens / seconds, 2),
            "drafted_tokens": tally.drafted,
            "accepted_tokens": tally.accepted,
            "acceptance_length": round(self._engine["acceptance_length"], 3),
            "context": self._engine["context"],
            "preemptions": self._engine["preemptions"],
            "ttft_ms_p50": round(ordered[len(ordered) // 2], 2),
            "ttft_ms_p99": round(ordered[int(len(ordered) * 0.99)], 2),
            "process": watched,
            "idle": idle,
            "failures": tally.failures[:10],
            "wrong": wrong,
            "ok": not tally.failures and not wrong,
        }

    def _wrong(self, idle: dict[str, Any], context: dict[str, Any], watched: dict[str, Any]) -> list[str]:
        """What is left over or did not happen at all."""
        tally, growth = self.tally, watched.get("growth", 0)
        selected = self._engine["context"]["sparse_steps"] or context["mode"] == "full"
        told = {
            f"memory grew by {growth}": growth > self.options.max_growth,
            "nothing was compared": not tally.compared,
            "no draft was accepted, or none was rejected": not 0 < tally.accepted < tally.drafted,
            "nothing was selected": not selected,
        }
        return [f"{name}: {left} left" for name, left in idle.items() if left] + [t for t, so in told.items() if so]


def _must_be_ok(status: int, text: str) -> None:
    if status != 200:
        raise ValueError(f"answered {status}: {text[:200]}")


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
    parser.add_argument("--long-prompt", type=int, default=450, help="words of a long prompt")
    parser.add_argument("--references", type=int, default=16, help="prompts whose answers are compared")
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
