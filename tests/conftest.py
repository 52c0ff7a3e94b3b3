"""Makes tests/ importable, so that every test can say `from scripted import ...`, and keeps tests apart."""

from __future__ import annotations

import logging
import os

import pytest


def pytest_configure() -> None:
    """Workers side by side (pytest -n) take a core each: threads of several that wait for each other help nobody."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture(autouse=True)
def plain_logging(request: pytest.FixtureRequest) -> None:
    """A server sends the project's records to its own handler for good; tests elsewhere want to see them."""
    if "server" not in request.path.parts:
        logger = logging.getLogger("outrider")
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
