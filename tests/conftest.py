"""Makes tests/ importable, so that every test can say `from scripted import ...`, and keeps tests apart."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def plain_logging(request: pytest.FixtureRequest) -> None:
    """A server sends the project's records to its own handler for good; tests elsewhere want to see them."""
    if "server" not in request.path.parts:
        logger = logging.getLogger("outrider")
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
