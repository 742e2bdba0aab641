"""Rank 0's side: one engine to its caller, several processes underneath.

Every call that changes anything is given to all ranks in the same order, and done by rank 0 beside them; what cannot be
foreseen (copies that complete, checksums, files) is agreed on inside. A rank that dies, fails, refuses what others do
not or says other tokens ends the engine: `RankLostError`, and the process is started again.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from talaria_common.errors import TalariaError
from talaria_gpu.engine.contract import (
    EngineCall,
    HostKvFigures,
    ModelInfo,
    ModelLoad,
    PrefixState,
    Staged,
    StepResult,
    SwitchTiming,
    logical_switch,
)
from talaria_gpu.engine.sglang.engine import SglangEngine
from talaria_gpu.engine.sglang.ranks.control import Join, Order, Outcome, digest, refusal_of
from talaria_gpu.hkvr.agreement import RankLostError
from talaria_gpu.hkvr.gloo import GlooRanks

_DEATH_S = 5.0
"""How long to look for the rank whose death a failed collective tells of."""
_CLOSE_S = 10.0


class Follower:
    """Another rank's process and the socket to it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "talaria_gpu.engine.sglang.ranks.follower", "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.control: Connection = Connection(ours.detach())

    def tell(self, message: Join | Order) -> None:
        """Send. Raises RankLostError."""
        try:
            self.control.send(message)
        except OSError as e:
            raise RankLostError(f"rank {self.rank} {self.fate() or f'cannot be told: {e}'}") from e

    def outcome(self) -> Outcome:
        """What came of the oldest order that is to be answered. Raises RankLostError."""
        try:
            outcome: Outcome = self.control.recv()
        except (EOFError, OSError) as e:
            raise RankLostError(f"rank {self.rank} {self.fate(_DEATH_S) or 'has closed its socket'}") from e
        if outcome.failure:
            raise RankLostError(f"rank {self.rank} failed: {outcome.failure}")
        return outcome

    def fate(self, within_s: float = 0.0) -> str:
        """How the process ended; "" if it has not."""
        try:
            status = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return ""
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def end(self) -> None:
        """Close the socket, which is the end of it; if that does not help, kill it."""
        self.control.close()
        if not self.fate(_CLOSE_S):
            self.process.kill()
            self.process.wait()


class RankedEngine:
    """The engine contract over several ranks; see `SglangEngine` for what is not said here.

    Args:
        size: how many ranks; on CUDA rank r uses the r-th device from the one named.
        options: arguments of `SglangEngine`.
        progress: told what is being done, in words, by rank 0.

    Raises:
        RankLostError: a rank did not start.
        EngineError: as of `SglangEngine`.
    """

    def __init__(self, size: int, options: dict[str, Any], progress: Callable[[str], None] = lambda _: None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="talaria-ranks-")
        self._followers: list[Follower] = []
        self._stages = bool(options["memory"].staging)
        try:
            self._start(size, options, progress)
        except BaseException:
            self._end()
            raise

    def _start(self, size: int, options: dict[str, Any], progress: Callable[[str], None]) -> None:
        try:
            for rank in range(1, size):
                self._followers.append(Follower(rank))
                self._followers[-1].tell(Join(rank, size, self._directory.name, options))
            for follower in self._followers:
                follower.outcome()
            progress(f"{size} ranks are starting")
            meeting = Path(self._directory.name)
            ranks = GlooRanks(0, size, meeting / "ranks")
            self._engine = SglangEngine(**options, ranks=ranks, meeting=meeting / "sglang", progress=progress)
            for follower in self._followers:
                follower.outcome()
        except (RankLostError, RuntimeError) as e:
            self._explain("start", e)

    # --- all ranks

    def _all(self, method: str, *arguments: Any) -> tuple[Any, list[Any]]:
        """Rank 0's result, and the others'. Refusals are raised, when all refused alike."""
        order = Order(method, arguments)
        for follower in self._followers:
            follower.tell(order)
        value: Any = None
        refused: TalariaError | None = None
        try:
            value = getattr(self._engine, method)(*arguments)
        except RankLostError as e:
            self._explain(method, e)
        except TalariaError as e:
            refused = e
        except RuntimeError as e:  # a collective inside the model
            self._explain(method, e)
        outcomes = [follower.outcome() for follower in self._followers]
        mine = refusal_of(refused) if refused else ""
        for follower, outcome in zip(self._followers, outcomes, strict=True):
            if outcome.refusal != mine:
                raise RankLostError(
                    f"rank {follower.rank} {outcome.refusal or 'did'} where rank 0 {mine or 'did'}: {method}"
                ) from refused
            if not mine and (seen := digest(method, value)) is not None and outcome.value != seen:
                raise RankLostError(f"rank {follower.rank} says other tokens than rank 0: {outcome.value}, {seen}")
        if refused is not None:
            raise refused
        return value, [outcome.value for outcome in outcomes]

    def _explain(self, what: str, error: Exception) -> NoReturn:
        """Raise the error that names the rank at fault, if one has died."""
        until = time.monotonic() + _DEATH_S
        while time.monotonic() < until:
            for follower in self._followers:
                if fate := follower.fate():
                    raise RankLostError(f"rank {follower.rank} {fate} in the middle of: {what}") from error
            time.sleep(0.02)
        raise error

    def _tell(self, method: str, *arguments: Any) -> None:
        for follower in self._followers:
            follower.tell(Order(method, arguments, answered=False))

    # --- the contract

    def submit(self, call: EngineCall) -> None:
        """See the contract."""
        self._all("submit", call)

    def abort(self, rid: str) -> bool:
        """See the contract."""
        return bool(self._all("abort", rid)[0])

    def prefix_state(self, rid: str) -> PrefixState:
        """See the contract. Told to all: a look-up counts as a use, and the ranks' trees must stay alike."""
        self._tell("prefix_state", rid)
        return self._engine.prefix_state(rid)

    def step(self, admit: frozenset[str] | None) -> StepResult:
        """See the contract."""
        result: StepResult = self._all("step", admit)[0]
        return result

    def switch(self, model: str) -> SwitchTiming:
        """See the contract. The slowest rank's times and all ranks' bytes; each rank's own are in `ranks`."""
        timing, others = self._all("switch", model)
        return logical_switch([timing, *others])

    def stage(self, model: str) -> None:
        """See the contract."""
        if self._stages and self._engine.staged_model != model:
            self._all("stage", model)

    def open_model(self, model: str) -> bool:
        """See the contract."""
        return bool(self._all("open_model", model)[0])

    def close_model(self, model: str) -> None:
        """See the contract."""
        self._all("close_model", model)

    def check_idle(self) -> None:
        """See the contract."""
        self._all("check_idle")

    def close(self) -> None:
        """See the contract."""
        self._end()
        self._engine.close()

    def _end(self) -> None:
        for follower in self._followers:
            follower.end()
        self._directory.cleanup()

    # --- what rank 0 knows for all

    def models(self) -> dict[str, ModelInfo]:
        """See the contract; bytes are one rank's."""
        return self._engine.models()

    @property
    def buffer_bytes(self) -> int:
        """Of one rank."""
        return self._engine.buffer_bytes

    @property
    def active(self) -> str | None:
        """See the contract."""
        return self._engine.active

    @property
    def staging_slack_bytes(self) -> int:
        """Of one rank."""
        return self._engine.staging_slack_bytes

    @property
    def host_kv(self) -> HostKvFigures | None:
        """See the contract."""
        return self._engine.host_kv

    @property
    def staged(self) -> Staged:
        """Of one rank: they stage alike."""
        return self._engine.staged

    def waiting(self, model: str) -> list[str]:
        """See the contract."""
        return self._engine.waiting(model)

    def has_unfinished(self, model: str) -> bool:
        """See the contract."""
        return self._engine.has_unfinished(model)

    def running(self, model: str) -> int:
        """See the contract."""
        return self._engine.running(model)

    def load(self, model: str) -> ModelLoad:
        """See the contract; tokens are the same on all ranks. Asked at every heartbeat: a rank that has died shows."""
        for follower in self._followers:
            if fate := follower.fate():
                raise RankLostError(f"rank {follower.rank} {fate}")
        return self._engine.load(model)

    def next_event_in(self) -> float | None:
        """See the contract."""
        return self._engine.next_event_in()
