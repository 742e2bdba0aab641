"""Messages between an instance's I/O process and its engine process.

One Unix stream socket; each message is a 4-byte little-endian length and a msgpack array tagged with its type. Both
ends are of one installation, so there is no versioning here. The I/O process starts the other as
`python -m talaria_gpu.engine.worker --config FILE --id IID --fd N`, N being the inherited end of a socket pair; the
worker exits when that end is closed.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any

import msgspec

from talaria_common.wire.error import ErrorInfo
from talaria_gpu.engine.contract import (
    EngineCall,
    HostKvFigures,
    ModelInfo,
    ModelLoad,
    Staged,
    StepResult,
    SwitchTiming,
)


class _Ipc(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base: positional on the wire, tagged by class name."""


# --- I/O process → engine process


class Submit(_Ipc, frozen=True, kw_only=True):
    """Queue a call; a refusal comes back as `Refused`."""

    call: EngineCall
    ids: bytes = b""
    """The call's `input_ids` on the way: 100,000 integers in a list cost milliseconds to parse."""
    width: str = "I"
    """What they are: an `array`'s typecode, native."""


class Abort(_Ipc, frozen=True, kw_only=True):
    """Drop a call; unknown rids are ignored. A known one is confirmed by a `Stepped` that finishes it with "abort"."""

    rid: str


class Open(_Ipc, frozen=True, kw_only=True):
    """Open a configured model; answered by `Opened` or `Closed` when that is over. An open one: `Opened` at once."""

    model: str


class Close(_Ipc, frozen=True, kw_only=True):
    """Close a model; answered by `Closed`. One with unfinished calls stays: `Opened`."""

    model: str


class Stop(_Ipc, frozen=True, kw_only=True):
    """Finish nothing more, release everything, exit 0."""


Command = Submit | Abort | Open | Close | Stop


# --- engine process → I/O process


class Progress(_Ipc, frozen=True, kw_only=True):
    """Start-up, for people: what it is doing now."""

    message: str


class Ready(_Ipc, frozen=True, kw_only=True):
    """The engine serves from now on."""

    models: list[ModelInfo]
    buffer_bytes: int
    pid: int
    paths: dict[str, str] = {}
    """Model directory by name, for the I/O process's tokenizers; a model without one (sim) gets the byte tokenizer."""


class Refused(_Ipc, frozen=True, kw_only=True):
    """The engine did not take a call."""

    rid: str
    error: ErrorInfo


class Stepped(_Ipc, frozen=True, kw_only=True):
    """One step's result; sent only when it produced tokens or finished a call.

    An aborted call, or one past its deadline, is finished by a result of kind "idle" that holds no token.
    """

    model: str
    result: StepResult


class Switched(_Ipc, frozen=True, kw_only=True):
    """A model switch happened: one record per rank."""

    timings: list[SwitchTiming]


class Opened(_Ipc, frozen=True, kw_only=True):
    """A model is open: one switch away."""

    info: ModelInfo
    open_ms: float = 0.0
    """From the command until now; 0: it was open."""


class Closed(_Ipc, frozen=True, kw_only=True):
    """A model is closed; `error` says why if nobody asked for that. Its calls have been told before."""

    model: str
    error: str = ""


class SlotEnded(_Ipc, frozen=True, kw_only=True):
    """A slot is over: a round event's raw material. wall = active + switch."""

    model: str
    wall_ms: float
    active_ms: float
    switch_ms: float
    prefills: int
    decodes: int
    admitted: int
    deferred: int
    retracted: int
    """Calls that still ran at its end, lost their KV and are prefilled again."""
    reason: str
    """Why it ended, now that another model waits.

    idle: nothing was left that the slot may run; drained: all that ran finished in Dfin; budget: what still ran was
    suspended or retracted.
    """
    suspended: int = 0
    """Calls that still ran at its end and go on where they were."""
    deferred_late: int = 0
    """`deferred` by reason (`sched.report.Why`)."""
    deferred_prefix: int = 0
    deferred_rows: int = 0
    deferred_time: int = 0
    deferred_retracted: int = 0
    p_ms: float = 0.0
    """active = p + d1 + sp + d + dfin + linger (3.4, Eq. 3)."""
    d1_ms: float = 0.0
    sp_ms: float = 0.0
    d_ms: float = 0.0
    dfin_ms: float = 0.0
    linger_ms: float = 0.0
    """With nothing to run, waiting for a session that was about to return."""
    sps: int = 0
    """SP batches."""
    sp_admitted: int = 0
    """Calls that entered through SP."""
    sp_carried: int = 0
    """Those of them that P had no room for."""
    sp_deferred: int = 0
    """Continuations that came, or stayed, while the slot was open and wait for the model's next one."""
    protected: int = 0
    """d_m: decode iterations reserved (Eq. 4)."""
    planned_ms: float = 0.0
    """The slot as planned, its switch left out."""
    round: int = 0
    """Number of the round."""
    round_planned_ms: float = 0.0
    """R as planned (Eq. 3)."""
    round_ms: float = 0.0
    """From the round's start to the slot's end; of its last slot: R as measured."""
    infeasible: str = ""
    """Targets that the plan gave up, comma-separated: ttft (Eq. 5), tpot (Eq. 4)."""


class Status(_Ipc, frozen=True, kw_only=True):
    """Load, sent on every heartbeat and after each switch."""

    active: str | None
    loads: dict[str, ModelLoad]
    prefilled_tokens: int
    switches: int
    switch_ms: dict[str, float]
    """EWMA of the measured switch to each model, ms."""
    decode_step_ms: dict[str, float]
    prefill_ms_per_token: dict[str, float]
    slot_remaining_ms: float
    """Until the open slot admits nothing more; the whole slot while no other model has work."""
    idle_checked: int
    """How often the engine's own leak checks have passed while idle."""
    restore_ms_per_token: dict[str, float] = {}
    """EWMA of measured restores from host, by model."""
    staging_slack_bytes: int = 0
    """What a next model's weights could take on the device now without evicting KV (3.5)."""
    staged: Staged = Staged()
    switch_now_ms: dict[str, float] = {}
    """Predicted time of a switch to each model if it came now, what is staged counted; not of models that had none."""
    at_risk: int = 0
    """Waiting calls whose first token is predicted after T_TTFT or after their deadline."""
    round_planned_ms: float = 0.0
    """R of the round in progress; 0: one model at most has work."""
    infeasible: str = ""
    """As in `SlotEnded`, of the round in progress."""
    scheduler_ms: float = 0.0
    """Time spent deciding so far, look-ups of prefixes included."""
    engine_ms: float = 0.0
    """Time spent in steps and switches so far."""
    host_kv: HostKvFigures | None = None


class Fatal(_Ipc, frozen=True, kw_only=True):
    """The engine cannot go on; the process exits non-zero after this."""

    message: str


Report = Progress | Ready | Refused | Stepped | Switched | Opened | Closed | SlotEnded | Status | Fatal

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_reports = msgspec.msgpack.Decoder(Report)


def pack(message: Command | Report) -> bytearray:
    """A framed message."""
    framed = bytearray(_LENGTH.size)
    _encoder.encode_into(_packed(message) if isinstance(message, Submit) else message, framed, _LENGTH.size)
    _LENGTH.pack_into(framed, 0, len(framed) - _LENGTH.size)
    return framed


def _packed(message: Submit) -> Submit:
    ids = message.call.input_ids
    packed = ids if isinstance(ids, array) else array("I", ids)
    call = msgspec.structs.replace(message.call, input_ids=[])
    return Submit(call=call, ids=packed.tobytes(), width=packed.typecode)


def _unpacked(message: Submit) -> Submit:
    return Submit(call=msgspec.structs.replace(message.call, input_ids=array(message.width, message.ids)))


class _Unpacker:
    """Bytes in, whole messages out."""

    _decoder: msgspec.msgpack.Decoder[Any]

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages completed by `data`, in order."""
        self._buffer += data
        out: list[Any] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as whole, whole[start + _LENGTH.size : end] as payload:
                out.append(self._decoder.decode(payload))
            start = end
        del self._buffer[:start]
        return out


class CommandUnpacker(_Unpacker):
    """For the engine process."""

    _decoder = _commands

    def feed(self, data: bytes) -> list[Command]:
        """As above, with the ids of calls as an array."""
        return [_unpacked(m) if isinstance(m, Submit) else m for m in super().feed(data)]


class ReportUnpacker(_Unpacker):
    """For the I/O process."""

    _decoder = _reports
