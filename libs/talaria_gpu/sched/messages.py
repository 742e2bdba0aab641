"""What the slot scheduler is told and what it asks for (DESIGN 2: cores are sans-I/O; 3.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from talaria_gpu.engine.contract import EngineCall, PrefixState, StepResult


class Phase(StrEnum):
    """Where a slot stands: P → D1 → (SP → D)* → Dfin (3.4)."""

    P = "P"
    """Prefill of the calls that waited when the slot opened."""
    D1 = "D1"
    """First decode."""
    SP = "SP"
    """Prefill of calls that came after P."""
    D = "D"
    """Decode after an SP."""
    DFIN = "Dfin"
    """Drain: nothing is admitted any more."""


class Call(NamedTuple):
    """What the scheduler knows of one call."""

    rid: str
    model: str
    arrival: float
    """Seconds, the instance's clock."""
    deadline: float = 0.0
    """Seconds; 0: none."""
    priority: int = 0
    """Higher goes first within its model."""
    is_continuation: bool = False
    tokens: int = 0
    """Prompt length."""
    max_new: int = 0
    """Most tokens that it may generate."""
    session: str = ""

    @classmethod
    def of(cls, call: EngineCall) -> Call:
        """The scheduler's view of an engine call."""
        return cls(
            call.rid,
            call.model,
            call.arrival,
            call.deadline,
            call.priority,
            call.is_continuation,
            len(call.input_ids),
            call.sampling.max_new_tokens,
            call.session,
        )


# --- told


@dataclass(frozen=True, slots=True)
class Arrived:
    """The engine took a call."""

    call: Call


@dataclass(frozen=True, slots=True)
class Left:
    """A call is gone for another reason than a step's result or our own `AbortCall` (client gone, refused)."""

    rid: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step of `model` is over; `waiting` is `Engine.waiting(model)` after it."""

    model: str
    result: StepResult
    waiting: Sequence[str]


@dataclass(frozen=True, slots=True)
class Switched:
    """`model` is in the device buffer."""

    model: str
    switch_ms: float
    left: Sequence[str] = ()
    """`Engine.waiting` of the outgoing model now: what is not in it and ran is suspended, the rest waits again."""
    suspended: int = 0
    """Calls that still ran and kept their KV."""
    retracted: int = 0
    """Calls that still ran and lost it."""
    loaded_bytes: int = 0
    """Weights that came from host: not staged, or staged and dirtied."""
    weight_bytes: int = 0
    """All of them; 0: not told."""
    failed: bool = False
    """It is the model from before: another one could not be brought in, and what that took says nothing of switches."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed while the engine is busy: only deadlines are looked at."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The engine is free: what next? The answer holds at most one `RunStep` or `RunSwitch`; none: rest.

    `prefixes` are `Engine.prefix_state` of the calls that `asks` named.
    """

    prefixes: Mapping[str, PrefixState] = field(default_factory=dict)


Message = Arrived | Left | Stepped | Switched | Tick | Turn


# --- asked for


@dataclass(frozen=True, slots=True)
class RunStep:
    """Step the engine; `admit` as in `Engine.step`: None admits any waiting call."""

    model: str
    admit: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class RunSwitch:
    """Switch the engine to `model`, then report `Switched`."""

    model: str


@dataclass(frozen=True, slots=True)
class AbortCall:
    """Drop the call; the scheduler has forgotten it already."""

    rid: str
    model: str
    reason: Literal["deadline"]


@dataclass(frozen=True, slots=True)
class SlotOver:
    """A slot is over: one term of Eq. 3. Times in ms.

    active = p + d1 + sp + d + dfin + linger, and wall = active + switch.
    """

    model: str
    switch_ms: float
    """The switch that opened the slot."""
    p_ms: float
    d1_ms: float
    sp_ms: float
    d_ms: float
    dfin_ms: float
    linger_ms: float
    """Spent waiting, with nothing to run, for a session that was about to return."""
    sps: int
    """SP batches."""
    prefills: int
    decodes: int
    admitted: int
    """Calls that left the waiting queue, those of SP included."""
    sp_admitted: int
    sp_carried: int
    """Those of them that P had no room for."""
    sp_deferred: int
    """Continuations that came, or stayed, while the slot was open and wait for the model's next one (parked)."""
    deferred: int
    """Calls that came, did not fit or lost their rows, and wait for the model's next slot, new sessions included."""
    deferred_why: Mapping[str, int]
    """How many of them for which reason, see `report`; reasons of none are left out."""
    running: int
    """Calls that still decoded: the switch suspends or retracts them."""
    protected: int
    """d_m: the decode iterations reserved (Eq. 4)."""
    planned_ms: float
    """The slot as planned, without its switch; 0: it ended before a plan was needed."""
    round: int
    """Number of the round."""
    round_planned_ms: float
    """R as planned (Eq. 3); 0: as above."""
    round_ms: float
    """From the round's start to this slot's end; of its last slot: R as measured."""
    infeasible: tuple[str, ...]
    """Targets that the plan had to give up: "ttft" (Eq. 5), "tpot" (Eq. 4)."""
    reason: Literal["drained", "budget", "idle"]

    @property
    def active_ms(self) -> float:
        """The slot without its switch; idle time that nobody else wanted is not in it."""
        return self.p_ms + self.d1_ms + self.sp_ms + self.d_ms + self.dfin_ms + self.linger_ms

    @property
    def wall_ms(self) -> float:
        """The slot's part of the round."""
        return self.active_ms + self.switch_ms


Effect = RunStep | RunSwitch | AbortCall | SlotOver
