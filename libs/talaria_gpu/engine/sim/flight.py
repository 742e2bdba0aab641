"""What the modelled device does at a time: one batch, with its times, and decode in macro-steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from talaria_gpu.engine.sim.device import Device
from talaria_gpu.engine.sim.pool import Share, SimCall


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch under way. Times in seconds of the engine's clock."""

    kind: Literal["prefill", "decode", "copy"]
    """copy: it waits for prefixes from host, as there is nothing else to run, or no row to run it with."""
    start: float
    due: float
    wall_ms: float
    shares: tuple[Share, ...] = ()
    calls: tuple[SimCall, ...] = ()
    """Of a decode."""
    steps: int = 1
    """Decode iterations."""
    context_tokens: int = 0
    """Of all its calls, at the first iteration."""


def decode(
    device: Device, model: str, start: float, calls: tuple[SimCall, ...], context_tokens: int, *, steps: int
) -> Flight:
    """`steps` iterations of `calls`, from `start` on."""
    wall_ms = device.decode_ms(model, len(calls), context_tokens, steps)
    return Flight("decode", start, start + wall_ms / 1000, wall_ms, (), calls, steps, context_tokens)


def cut(flight: Flight, at: float, device: Device, model: str) -> Flight:
    """The flight, if it is a decode ended at its first iteration that is over at or after `at`."""
    if flight.steps == 1 or flight.due <= at:
        return flight
    low, high = 1, flight.steps
    while low < high:
        middle = (low + high) // 2
        if decode(device, model, flight.start, flight.calls, flight.context_tokens, steps=middle).due >= at:
            high = middle
        else:
            low = middle + 1
    return decode(device, model, flight.start, flight.calls, flight.context_tokens, steps=low)
