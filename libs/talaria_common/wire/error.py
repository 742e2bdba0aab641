"""An error on its way: code, message and what a client may do, rebuilt as the exception at the other end."""

from __future__ import annotations

import msgspec

from talaria_common.errors import HTTP, TalariaError


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error on the wire."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


def info_of(error: TalariaError) -> ErrorInfo:
    """The wire form of `error`."""
    return ErrorInfo(error.code, error.message, error.param, error.retry_after_s)


def from_info(info: ErrorInfo) -> TalariaError:
    """The exception that `info` describes; an unknown code becomes a plain TalariaError (500)."""
    cls = HTTP.get(info.code, TalariaError)
    return cls(info.message, param=info.param, retry_after_s=info.retry_after_s)
