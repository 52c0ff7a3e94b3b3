"""OpenTelemetry spans, one per request, where an endpoint is configured; nothing is imported or sent otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from outrider.errors import ConfigError


class Tracer(Protocol):
    """Spans around requests."""

    def span(self, name: str, headers: Mapping[str, str], record: Mapping[str, Any]) -> Any:
        """A context manager; `record` is read when it ends and becomes the span's attributes."""
        ...

    def close(self) -> None: ...


class NoTracer:
    """Spans that cost nothing."""

    @contextmanager
    def span(self, name: str, headers: Mapping[str, str], record: Mapping[str, Any]) -> Iterator[None]:
        """Nothing happens."""
        yield

    def close(self) -> None:
        """Nothing is open."""


class OpenTelemetryTracer:
    """Spans through the OpenTelemetry SDK; a client's `traceparent` header is continued."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.propagate import extract

        self._provider = provider
        self._tracer = provider.get_tracer("outrider")
        self._extract = extract

    @contextmanager
    def span(self, name: str, headers: Mapping[str, str], record: Mapping[str, Any]) -> Iterator[None]:
        """One server span; attributes are counts and times, never text."""
        with self._tracer.start_as_current_span(name, context=self._extract(dict(headers))) as span:
            yield
            for key, value in record.items():
                if isinstance(value, (bool, int, float, str)) and key not in ("prompt", "answer"):
                    span.set_attribute(f"outrider.{key}", value)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def make_tracer(endpoint: str | None) -> Tracer:
    """A tracer that sends to `endpoint`; raises ConfigError where the packages are missing."""
    if endpoint is None:
        return NoTracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "otlp_endpoint needs OpenTelemetry: pip install 'outrider[tracing]'", "otlp_endpoint"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "outrider"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return OpenTelemetryTracer(provider)
