"""Structured logs: one line an event, with the request id, for people (console) or for machines (json)."""

import contextlib
import logging
import sys
from typing import Any, Literal, TextIO, get_args

import structlog

Format = Literal["console", "json"]
FORMATS = get_args(Format)
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def configure(format: Format = "console", level: str = "INFO", stream: TextIO = sys.stderr, **process: Any) -> None:  # noqa: A002
    """Sends all logs of this process, those of libraries too, to `stream`.

    Args:
        format: "console" or "json".
        level: least level that is shown, of LEVELS in either case.
        stream: where lines go; never stdout, which belongs to the command's own output.
        process: what every line is to carry, for instance ``replica="tiny-omni/thinker/0"``.
    """
    number = logging.getLevelNamesMapping()[level.upper()]

    def with_process(_logger: Any, _method: str, event: Any) -> Any:
        return {**process, **event}

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        with_process,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if format == "json":
        rendering: list[Any] = [
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ]
    else:
        rendering = [
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
            )
        ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.processors.StackInfoRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)


def get(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module; `name` is its ``__name__``."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(name)
    return logger


def say(line: str) -> None:
    """Writes a line to stderr as it is, among the logs. Like a log line that cannot be written, for a disk is full or
    nobody reads any more, it is lost, and whoever says it goes on."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
