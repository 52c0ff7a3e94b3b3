"""Ways to talk to the server that a file's own `server` fixture runs."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from live import Live


@pytest.fixture
def client(server: Live) -> openai.OpenAI:
    """The official client; the stub engine has seen nothing yet."""
    server.backend.seen.clear()
    return server.openai()


@pytest.fixture(scope="module")
def http(server: Live) -> Iterator[httpx.Client]:
    """A plain client."""
    with server.http() as opened:
        yield opened
