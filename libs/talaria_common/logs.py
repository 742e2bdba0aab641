"""Logging: structlog, one line per event, on stderr. Readable on a terminal, JSON elsewhere.

TALARIA_LOG overrides the settings for one run: a level, a format, or both (`debug`, `json`, `debug,json`).
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO, get_args

import structlog
import structlog.tracebacks
from structlog.typing import Processor

from talaria_common import tracing
from talaria_common.settings import LogSettings, SettingsError

LEVELS: tuple[str, ...] = get_args(LogSettings.model_fields["level"].annotation)
FORMATS: tuple[str, ...] = get_args(LogSettings.model_fields["format"].annotation)
_TRACEBACK = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
"""Without locals, which structlog shows by default: a call's text is among them."""


def setup(name: str, settings: LogSettings, *, epoch: str = "", stream: TextIO | None = None) -> None:
    """Route structlog and stdlib logging to one handler.

    Args:
        name: the part ("router-0"), in every line as `part`.
        settings: level and format.
        epoch: this life of the process, in every line.
        stream: where to; default: stderr.

    Raises:
        SettingsError: TALARIA_LOG is not understood.
    """
    stream = stream or sys.stderr
    level, form = _overridden(settings, os.environ.get("TALARIA_LOG", ""))
    console = form == "console" or (form == "auto" and stream.isatty())

    def bind(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("part", name)
        if epoch:
            event.setdefault("epoch", epoch)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        bind,
        tracing.add_to_log,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    end: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [structlog.processors.ExceptionRenderer(_TRACEBACK), structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *end]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # asyncio reports slow callbacks here only in debug mode; nats-py's default callback is never used by the bus.
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _overridden(settings: LogSettings, text: str) -> tuple[str, str]:
    level, form = str(settings.level), str(settings.format)
    for word in filter(None, (w.strip().lower() for w in text.split(","))):
        if word in LEVELS:
            level = word
        elif word in FORMATS:
            form = word
        else:
            raise SettingsError([f"TALARIA_LOG = {text!r}: {word!r} is none of {', '.join(LEVELS + FORMATS)}"])
    return level, form
