"""Logs on standard error, as text or as JSON: a line a request, without content of images, tokens or queries."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

from vitral.wording import printable

LOGGER = logging.getLogger("vitral.serving")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that is being answered."""


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        line = printable(f"{clock} {level}{record.getMessage()} {fields}".rstrip())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        line: dict[str, object] = {"time": stamp, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found: dict[str, object] = dict(getattr(record, "fields", {}))
    if current := request_id.get():
        found.setdefault("request_id", current)
    return found


def configure(style: str) -> None:
    """Log to standard error in this style, "text" or "json"; of uvicorn only warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    for name, level in (("vitral.serving", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def log(message: str, level: int = logging.INFO, **fields: object) -> None:
    """Log a line with named values."""
    LOGGER.log(level, message, extra={"fields": fields})
