"""The OpenAI-compatible HTTP server: `create_app(backend, settings)` gives the application, `run` serves it.

It knows the engine only through `backend.Backend`, which `outrider.api.service.Service` satisfies.
"""

from outrider.server.app import create_app
from outrider.server.backend import Backend, Piece, Tokenizer
from outrider.server.run import serve
from outrider.server.settings import Settings

__all__ = ["Backend", "Piece", "Settings", "Tokenizer", "create_app", "serve"]
