"""/metrics on a port of its own, for networks where clients must not see it."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.server.metrics import Metrics

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_metrics_app(metrics: Metrics) -> Starlette:
    """An application that answers GET /metrics and nothing else."""

    async def scrape(request: Request) -> Response:
        return Response(metrics.render(), media_type=METRICS_TYPE)

    return Starlette(routes=[Route("/metrics", scrape)])
