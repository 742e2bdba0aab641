"""Carries out a switch's copies on two streams: moves within the device, loads from host beside them (4.4)."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from talaria_gpu.staging.plan import SwitchPlan
from talaria_gpu.streams import Event, Stream


class GatherTimes(NamedTuple):
    """Milliseconds from the start until each stream was done."""

    d2d_ms: float
    h2d_ms: float


def gather(
    plan: SwitchPlan, *, buffer: torch.Tensor, image: torch.Tensor, bounce: torch.Tensor, d2d: Stream, h2d: Stream
) -> GatherTimes:
    """Make the buffer's low end equal to `image`; returns when it is.

    Args:
        plan: the copies.
        buffer: the device buffer, uint8.
        image: the host image, uint8.
        bounce: device scratch of at least one chunk, outside the buffer.
        d2d: stream for the moves.
        h2d: stream for the loads.

    Raises:
        EngineError: a copy failed. Both streams are quiet then, and the buffer's low end is garbage.
    """
    started = time.perf_counter()
    moved: list[Event] = []
    bounces: list[Event] = []
    for source, target, size, bounced in plan.moves:
        held = buffer[source : source + size]
        if bounced:
            bounces.append(d2d.copy(bounce[:size], held))
            held = bounce[:size]
        moved.append(d2d.copy(buffer[target : target + size], held))
    loaded: list[Event] = []
    for offset, size, after in plan.loads:
        needs = moved[after - 1] if after else None
        loaded.append(h2d.copy(buffer[offset : offset + size], image[offset : offset + size], needs))
    d2d_ms, moves_failed = _all_over([*bounces, *moved], started)
    h2d_ms, loads_failed = _all_over(loaded, started)
    failure = moves_failed or loads_failed
    if failure is not None:  # now that nothing is in flight: a failed switch is rolled back over the same bytes
        raise failure
    return GatherTimes(d2d_ms, h2d_ms)


def _all_over(events: list[Event], started: float) -> tuple[float, Exception | None]:
    """Wait for every one, also past a failed one: milliseconds from the start, and what failed."""
    failure: Exception | None = None
    for event in reversed(events):
        try:
            event.result()
        except Exception as e:  # noqa: BLE001 - raised by the caller, when all are over
            failure = e
    return (time.perf_counter() - started) * 1e3 if events else 0.0, failure
