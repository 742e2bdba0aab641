"""The error tree, and the one table that maps it to HTTP.

    TalariaError
    ├── BadRequestError            400 invalid_request_error   the caller can mend the request
    │   ├── ContextLengthError     400 context_length_exceeded
    │   └── UnsupportedError       400 unsupported_parameter   a field we cannot honour
    ├── UnauthorizedError          401 invalid_api_key
    ├── ModelNotFoundError         404 model_not_found
    ├── PayloadTooLargeError       413 payload_too_large
    ├── OverloadedError            429 overloaded              carries retry_after_s
    ├── UnavailableError           503 unavailable             no instance, router or bus
    ├── DeadlineError              504 deadline_exceeded
    ├── EngineError                500 engine_error            the engine failed on this call
    │   └── InstanceLostError      502 instance_lost           an instance died under this call
    └── BusError                   503 bus_unavailable
        ├── BusTimeoutError        504 bus_timeout
        ├── NoRespondersError      503 no_responders
        ├── BusNameError           500 bus_name                an illegal subject, queue, bucket or key: a bug of ours
        └── RevisionError          503 kv_revision             a KV write lost its race

`talaria_common.wire.error` has their form on the bus. Nothing but the standard library is imported here: the memory
substrate runs where torch is all there is.
"""

from __future__ import annotations

from typing import ClassVar


class TalariaError(Exception):
    """Root of the tree. `code` is stable and documented; `status` is its HTTP status.

    Args:
        message: one sentence for the person who reads it.
        param: the request field at fault, if one is.
        retry_after_s: seconds after which trying again makes sense, if known.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequestError(TalariaError):
    """The request itself is wrong."""

    status, code, kind = 400, "invalid_request", "invalid_request_error"


class ContextLengthError(BadRequestError):
    """Prompt and completion do not fit the model's context."""

    code = "context_length_exceeded"


class UnsupportedError(BadRequestError):
    """A field that we cannot honour; refused rather than dropped."""

    code = "unsupported_parameter"


class UnauthorizedError(TalariaError):
    """No API key, or an unknown one."""

    status, code, kind = 401, "invalid_api_key", "authentication_error"


class ModelNotFoundError(TalariaError):
    """The model is not in the catalog."""

    status, code, kind = 404, "model_not_found", "invalid_request_error"


class PayloadTooLargeError(TalariaError):
    """The body is larger than the bus carries."""

    status, code, kind = 413, "payload_too_large", "invalid_request_error"


class OverloadedError(TalariaError):
    """No capacity now; `retry_after_s` says when."""

    status, code, kind = 429, "overloaded", "rate_limit_error"


class UnavailableError(TalariaError):
    """Nothing can serve this: no instance for the model, or a part of the mesh is away."""

    status, code, kind = 503, "unavailable", "server_error"


class DeadlineError(TalariaError):
    """The call's deadline passed."""

    status, code, kind = 504, "deadline_exceeded", "server_error"


class EngineError(TalariaError):
    """The engine failed on this call."""

    status, code, kind = 500, "engine_error", "server_error"


class InstanceLostError(EngineError):
    """An instance or its engine died, or went silent, with this call on it."""

    status, code = 502, "instance_lost"


class BusError(UnavailableError):
    """The message bus is away or refused."""

    code = "bus_unavailable"


class BusTimeoutError(BusError):
    """Nobody answered within the time given."""

    status, code = 504, "bus_timeout"


class NoRespondersError(BusError):
    """Nobody listens on the subject. Never the only sign of a death: a tap hides it (NATS trap 1)."""

    code = "no_responders"


class BusNameError(BusError):
    """A subject, queue, bucket or key that the bus does not take. Ids are hashed or checked before they come here."""

    status, code = 500, "bus_name"


class RevisionError(BusError):
    """A KV write lost the race: the key's revision is not the expected one."""

    code = "kv_revision"


def _tree(cls: type[TalariaError]) -> list[type[TalariaError]]:
    return [cls] + [sub for child in cls.__subclasses__() for sub in _tree(child)]


HTTP: dict[str, type[TalariaError]] = {cls.code: cls for cls in _tree(TalariaError)}
"""Every error code of the wire and the class that carries its HTTP status and OpenAI type."""
