"""Encoding and decoding, and the base of all wire structs."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, TypeVar, cast

import msgspec

from talaria_common.ids import NAME_PATTERN

FORWARD_HEADER = "Talaria-Forward"
"""Bus header that carries a `ForwardHead` beside the untouched HTTP body."""

TRACE_HEADER = "traceparent"
"""W3C trace context, on requests only: headers cost more than a token frame (GATEWAY)."""


Int = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""A number that somebody computes with. JSON has integers of any size, and arithmetic overflows on them long after they
were let in: in a heartbeat, where it ends the process."""

Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
"""A part's name, which becomes a token of a subject (`ids.check_name`): one that cannot ends who publishes there."""

Float = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""The same for measured values: their products stay finite."""


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all wire structs: frozen, named fields, defaults left out, unknown fields ignored."""


class WireError(ValueError):
    """A message that does not fit its schema."""


T = TypeVar("T")
_encoder = msgspec.json.Encoder()


@cache
def _decoder(cls: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(cls)


def encode(message: msgspec.Struct) -> bytes:
    """JSON bytes of a wire struct (ASCII-safe where its strings are: ids and names are)."""
    return _encoder.encode(message)


def decode(data: bytes | str, cls: type[T]) -> T:
    """The struct in `data`.

    Raises:
        WireError: `data` is not JSON or does not fit `cls`; the message names the field.
    """
    try:
        return cast("T", _decoder(cast("Any", cls)).decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:  # the last: nested too deeply
        raise WireError(f"{cls.__name__}: {e}") from e
