"""What all routes share: the engine, the settings, the gate, the metrics."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.types import Scope

from outrider.server.backend import Backend
from outrider.server.errors import HttpError, classify
from outrider.server.gate import Gate, RateLimit
from outrider.server.metrics import Metrics
from outrider.server.prompts import has_tools
from outrider.server.settings import Settings
from outrider.server.tracing import Tracer, make_tracer

log = logging.getLogger("outrider.server")


@dataclass
class ServerState:
    """One server's shared parts."""

    backend: Backend
    settings: Settings
    gate: Gate
    rate: RateLimit
    metrics: Metrics
    tracer: Tracer = field(repr=False)

    @classmethod
    def of(cls, backend: Backend, settings: Settings) -> ServerState:
        """Everything from the engine and the settings."""
        gate = Gate(settings.max_queue, settings.request_timeout)
        rate = RateLimit(settings.rate_limit)
        return cls(backend, settings, gate, rate, Metrics(backend), make_tracer(settings.otlp_endpoint))

    @property
    def model_names(self) -> list[str]:
        """Names that clients may ask for."""
        return self.settings.served_model_name or [self.backend.model_name]

    @cached_property
    def has_tools(self) -> bool:
        """Whether the model's template shows tools."""
        return has_tools(self.backend.tokenizer)

    def check_model(self, name: str | None) -> str:
        """The served name; raises HttpError 404 for a model that is not here."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        here = ", ".join(self.model_names)
        raise HttpError(404, "model_not_found", f"no model {name[:80]!r} is served here; there is: {here}", "model")

    def failed(self, scope: Scope, error: Exception) -> None:
        """Count an error, and write the details of an unexpected one to the log."""
        status, _, code = classify(error)
        self.metrics.refused.labels(code).inc()
        record_of(scope)["error"] = code
        if status >= 500:
            log.error("request failed: %s", code, exc_info=error, extra={"request_id": record_of(scope)["request_id"]})

    def left(self, scope: Scope) -> None:
        """Count a client that left before its answer was whole."""
        self.metrics.cancelled.inc()
        record_of(scope)["cancelled"] = True


def record_of(scope: Scope) -> dict[str, Any]:
    """The request's log record, which the guard made."""
    record: dict[str, Any] = scope["state"]["record"]
    return record
