"""The application: routes, error handlers and the layers around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from outrider import __version__
from outrider.errors import OutriderError, UnsupportedError
from outrider.server import responses
from outrider.server.backend import Backend
from outrider.server.chat import chat
from outrider.server.completions import complete
from outrider.server.errors import HttpError, error_response, from_validation
from outrider.server.guard import Guard
from outrider.server.logprobs import token_text
from outrider.server.metrics_app import METRICS_TYPE
from outrider.server.prompts import encode, encode_chat
from outrider.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.server.settings import Settings
from outrider.server.snapshot import Snapshot
from outrider.server.state import ServerState

STATIC = Path(__file__).parent / "static"
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": responses.ErrorBody, "description": text}
    for status, text in {
        400: "a field is unknown, unsupported or out of range",
        401: "no valid API key",
        404: "no such model",
        408: "the body came too slowly",
        413: "the body is too large",
        415: "the body is not JSON",
        429: "too many requests; see Retry-After",
        500: "an internal error",
        503: "overloaded or shutting down; see Retry-After",
        504: "the request's time is over",
    }.items()
}


def create_app(backend: Backend, settings: Settings | None = None) -> FastAPI:
    """The ASGI application that serves `backend`; it closes the backend when it ends.

    `app.state.server` is the shared ServerState.
    """
    state = ServerState.of(backend, settings or Settings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        state.tracer.close()
        backend.close()

    app = FastAPI(
        title="Outrider",
        version=__version__,
        summary="OpenAI-compatible inference with collective speculation and sparse context",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        responses=REFUSALS,
    )
    app.state.server = state
    _add_generation(app, state)
    _add_tokens(app, state)
    _add_operations(app, state)
    if state.settings.web_page:
        _add_page(app)
    _add_handlers(app, state)
    if state.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
        )
    app.add_middleware(Guard, state=state, keys=state.settings.keys())
    return app


def _add_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions", response_model=responses.ChatCompletion, tags=["generation"])
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await chat(state, body, request)

    @app.post("/v1/completions", response_model=responses.TextCompletion, tags=["generation"])
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await complete(state, body, request)

    @app.get("/v1/models", response_model=responses.Models, tags=["generation"])
    async def list_models() -> dict[str, Any]:
        """The names that requests may use."""
        return {"object": "list", "data": [_model(state, name) for name in state.model_names]}

    @app.get("/v1/models/{name:path}", response_model=responses.Model, tags=["generation"])
    async def retrieve_model(name: str) -> dict[str, Any]:
        """One of the names."""
        return _model(state, state.check_model(name))


def _add_tokens(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize", response_model=responses.Tokens, tags=["tokens"])
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text, or of messages through the chat template."""
        state.check_model(body.model)
        tokenizer = state.backend.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise UnsupportedError("give either prompt or messages", field="prompt")
        if body.messages is not None:
            ids = await encode_chat(tokenizer, body.messages, body.tools or (), body.add_generation_prompt)
        else:
            ids = await encode(tokenizer, body.prompt or "", body.add_special_tokens)
        texts = [token_text(tokenizer, token) for token in ids] if body.return_token_strs else None
        limit = state.backend.max_model_len
        return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts}

    @app.post("/detokenize", response_model=responses.Text, tags=["tokens"])
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids."""
        state.check_model(body.model)
        tokenizer = state.backend.tokenizer
        if any(token >= tokenizer.vocab_size for token in body.tokens):
            raise UnsupportedError(
                f"tokens holds an id outside the vocabulary of {tokenizer.vocab_size}", field="tokens"
            )
        return {"prompt": tokenizer.decode(body.tokens)}


def _add_operations(app: FastAPI, state: ServerState) -> None:
    @app.get("/health", response_model=responses.Health, tags=["operations"])
    async def health() -> JSONResponse:
        """Ready (200) or not (503)."""
        status = "draining" if state.gate.draining else "ready" if state.backend.healthy else "failed"
        return JSONResponse({"status": status, "model": state.model_names[0]}, 200 if status == "ready" else 503)

    @app.get("/version", response_model=responses.Version, tags=["operations"])
    async def version() -> dict[str, str]:
        """The server's version."""
        return {"version": __version__}

    @app.get("/stats", tags=["operations"])
    async def stats() -> dict[str, Any]:
        """What the engine does now and what it runs with; the web page's panel shows it."""
        now = Snapshot.of(state.backend.stats()).to_dict()
        config = state.backend.describe() | {"model": state.model_names[0]}
        return {"engine": now, "config": config, "in_flight": state.gate.in_flight}

    if state.settings.metrics_port is None:

        @app.get("/metrics", tags=["operations"], response_class=Response)
        async def metrics() -> Response:
            """Prometheus metrics."""
            return Response(state.metrics.render(), media_type=METRICS_TYPE)


def _add_page(app: FastAPI) -> None:
    def file(name: str, media_type: str) -> Callable[[], Any]:
        async def send() -> FileResponse:
            headers = {"content-security-policy": PAGE_POLICY, "cache-control": "no-cache"}
            return FileResponse(STATIC / name, media_type=media_type, headers=headers)

        return send

    for path, name, media_type in (
        ("/", "page.html", "text/html"),
        ("/static/page.css", "page.css", "text/css"),
        ("/static/page.js", "page.js", "text/javascript"),
    ):
        app.get(path, include_in_schema=False)(file(name, media_type))


def _add_handlers(app: FastAPI, state: ServerState) -> None:
    @app.exception_handler(OutriderError)
    @app.exception_handler(HttpError)
    async def refused(request: Request, error: Exception) -> JSONResponse:
        state.failed(request.scope, error)
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        refusal = from_validation(error, _fields(request))
        state.failed(request.scope, refusal)
        return error_response(refusal)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        codes = {404: "not_found", 405: "method_not_allowed"}
        refusal = HttpError(error.status_code, codes.get(error.status_code, "bad_request"), str(error.detail).lower())
        response = error_response(refusal)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        state.failed(request.scope, error)
        return error_response(error)


def _model(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "outrider",
        "root": state.backend.model_name,
        "max_model_len": state.backend.max_model_len,
    }


def _fields(request: Request) -> list[str]:
    """Names of the fields that a route's body knows, for suggestions."""
    bodies: dict[str, type[BaseModel]] = {
        "/v1/chat/completions": ChatRequest,
        "/v1/completions": CompletionRequest,
        "/tokenize": TokenizeRequest,
        "/detokenize": DetokenizeRequest,
    }
    body = bodies.get(request.url.path)
    return list(body.model_fields) if body else []
