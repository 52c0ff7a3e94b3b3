"""Serve an application with uvicorn: slow clients bounded, SIGTERM drains, /metrics perhaps on a port of its own."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from outrider.errors import ConfigError
from outrider.server.app import create_app
from outrider.server.backend import Backend
from outrider.server.logs import setup_logs
from outrider.server.metrics_app import create_metrics_app
from outrider.server.protocol import BoundedProtocol
from outrider.server.settings import Settings
from outrider.server.state import ServerState

log = logging.getLogger("outrider.server")
LAST_WORDS = 5  # seconds after the drain in which errors are told and connections closed


def serve(open_backend: Callable[[], Backend], settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; returns after the drain.

    The port is taken first, so that a ConfigError about it does not wait for a model; connections are accepted once
    the model is ready.
    """
    setup_logs(settings.log_level)
    listener = bind(settings.host, settings.port)
    backend = open_backend()
    log.info("engine ready", extra={"fields": {"config": backend.describe()}})
    app = create_app(backend, settings)
    asyncio.run(_serve_all(make_server(app, settings), [listener], app.state.server))


def make_server(app: FastAPI, settings: Settings) -> DrainingServer:
    """The uvicorn server of an application."""

    class Protocol(BoundedProtocol):
        header_timeout = settings.read_timeout
        stall_timeout = 1.5 * settings.write_timeout  # a stream notices first, and says so

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=round(settings.drain_timeout) + LAST_WORDS,
    )
    return DrainingServer(config, app.state.server, settings.drain_timeout)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port", "port") from None
    listener.set_inheritable(True)
    return listener


class AnnouncedServer(uvicorn.Server):
    """Says where it listens, once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and log the address."""
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            log.info("running on http://%s:%d", f"[{host}]" if ":" in host else host, port)


class DrainingServer(AnnouncedServer):
    """On the first signal nobody new gets in and the others may finish; a second SIGINT ends at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState, drain_timeout: float) -> None:
        super().__init__(config)
        self._state, self._drain_timeout = state, drain_timeout
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Remember the loop, which signal handlers need."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._state.gate.drain, self._drain_timeout)
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True  # the signal is not raised again: a drained server ends with status 0

    def stop(self) -> None:
        """What SIGTERM does, for callers in another thread."""
        self.handle_exit(signal.SIGTERM, None)


class SideServer(AnnouncedServer):
    """A server that leaves signals to the main one."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield


async def _serve_all(server: DrainingServer, sockets: list[socket.socket], state: ServerState) -> None:
    """The server, and beside it the one for metrics where it has its own port."""
    if state.settings.metrics_port is None:
        await server.serve(sockets)
        return
    listener = bind(state.settings.host, state.settings.metrics_port)
    config = uvicorn.Config(create_metrics_app(state.metrics), log_config=None, access_log=False, ws="none")
    metrics = SideServer(config)
    beside = asyncio.create_task(metrics.serve([listener]))
    await server.serve(sockets)
    metrics.should_exit = True
    await beside
