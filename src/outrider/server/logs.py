"""One JSON object a line on stderr: what happened, to which request, never what it said (unless log_prompts is set)."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any


class JsonFormatter(logging.Formatter):
    """A log record as a JSON object; fields come through `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if hasattr(record, "request_id"):
            line["request_id"] = record.request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def setup_logs(level: str) -> None:
    """Send the project's and uvicorn's records to stderr as JSON; uvicorn's own access log is off."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("outrider", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    access = logging.getLogger("uvicorn.access")
    access.handlers, access.propagate = [], False
