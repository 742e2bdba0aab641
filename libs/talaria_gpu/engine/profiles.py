"""Running estimates of what an engine's work costs, per model: the profiles that routing and planning read (3.3)."""

from __future__ import annotations

from talaria_gpu.engine.contract import StepResult

_ALPHA = 0.2


class Ewma:
    """An exponentially weighted mean; the first sample is taken whole."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        """Take a sample."""
        self.value = sample if self.value is None else self.value + _ALPHA * (sample - self.value)


class Profiles:
    """EWMAs of decode steps, prefills and switches. What was never measured is not there."""

    def __init__(self) -> None:
        self._decode: dict[str, Ewma] = {}
        self._switch: dict[str, Ewma] = {}
        self._prefill: dict[str, tuple[Ewma, Ewma]] = {}
        """Wall ms and tokens apart, so that a long prefill weighs as much as its tokens."""

    def step(self, model: str, result: StepResult) -> None:
        """Learn from a step."""
        tokens = result.prefilled_tokens + result.recomputed_tokens
        if result.kind == "decode":
            self._decode.setdefault(model, Ewma()).add(result.wall_ms / result.steps)
        elif result.kind == "prefill" and tokens:
            wall, count = self._prefill.setdefault(model, (Ewma(), Ewma()))
            wall.add(result.wall_ms)
            count.add(tokens)

    def switch(self, model: str, ms: float) -> None:
        """Learn from a switch to `model`."""
        self._switch.setdefault(model, Ewma()).add(ms)

    @property
    def decode_step_ms(self) -> dict[str, float]:
        """Milliseconds of one decode step, by model."""
        return {m: e.value for m, e in self._decode.items() if e.value is not None}

    @property
    def switch_ms(self) -> dict[str, float]:
        """Milliseconds of a switch to the model."""
        return {m: e.value for m, e in self._switch.items() if e.value is not None}

    @property
    def prefill_ms_per_token(self) -> dict[str, float]:
        """Milliseconds per prompt token, fixed costs of a step included."""
        return {m: wall.value / count.value for m, (wall, count) in self._prefill.items() if wall.value and count.value}
