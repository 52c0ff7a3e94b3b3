"""A server on a free loopback port for the length of a test: in this process, or the command itself."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from outrider.server import Settings, create_app
from outrider.server.run import DrainingServer, bind, make_server


@dataclass
class Live:
    """A running server and the ways to talk to it."""

    url: str
    port: int
    server: DrainingServer
    backend: Any
    thread: threading.Thread

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", **({"api_key": "none", "max_retries": 0} | options))

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)


@contextmanager
def live(backend: Any, **settings: Any) -> Iterator[Live]:
    """Serve `backend` until the block ends; the server must then have ended by itself."""
    chosen = Settings(**({"drain_timeout": 0.2, "log_level": "error"} | settings))
    app = create_app(backend, chosen)
    listener = bind("127.0.0.1", 0)
    server = make_server(app, chosen)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    port = listener.getsockname()[1]
    try:
        yield Live(f"http://127.0.0.1:{port}", port, server, backend, thread)
    finally:
        server.stop()
        thread.join(15)
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def command(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`outrider serve` as a process on a free port, and its address; killed at the end unless the test has ended it."""
    program = [sys.executable, "-m", "outrider.cli.main", "serve", *words, "--port", "0"]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        found = next(m for line in process.stderr if (m := re.search(r'running on (http://[^"]+)', line)))
        threading.Thread(target=process.stderr.read, daemon=True).start()  # keeps the pipe empty
        yield process, found[1]
    finally:
        process.kill()
        process.wait(10)


def wait_for(condition: Any, seconds: float = 5.0) -> None:
    """Wait until something is true; fail the test otherwise."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
