"""Running estimates of what an engine's work costs, per model: the profiles that planning and routing read (3.3, 3.4).

Fed with measured steps, restores and switches only; what was never measured is unknown (0: the first step teaches it).
"""

from __future__ import annotations

from collections.abc import Mapping

from talaria_gpu.engine.contract import StepResult

_ALPHA = 0.2
_FADE = 0.9
TYPICAL_TOKENS = 512
"""A prefill of this size stands for all where one figure per token is asked for."""
LEAST_SWITCH_MS = 1.0
"""While all switches seen were alike, a line says that one of which all is staged takes no time."""


class Ewma:
    """An exponentially weighted mean; the first sample is taken whole."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        """Take a sample."""
        self.value = sample if self.value is None else self.value + _ALPHA * (sample - self.value)


class Runs:
    """Mean ms of a decode step, by runs of decode between prefills: each iteration of a run counts alike.

    So one result that stands for many iterations (the sim engine in virtual time) teaches what they would have.
    """

    __slots__ = ("_ms", "_past", "_steps")

    def __init__(self) -> None:
        self._past: float | None = None
        self._steps = 0
        self._ms = 0.0

    def add(self, steps: int, ms: float) -> None:
        """Iterations of the run in progress."""
        self._steps += steps
        self._ms += ms

    def end(self) -> None:
        """The run is over."""
        if self._steps:
            mean = self._ms / self._steps
            weight = 1 - (1 - _ALPHA) ** self._steps
            self._past = mean if self._past is None else self._past + weight * (mean - self._past)
            self._steps, self._ms = 0, 0.0

    @property
    def value(self) -> float:
        """Of the runs before, or of the first one so far; 0: unknown."""
        if self._past is not None:
            return self._past
        return self._ms / self._steps if self._steps else 0.0


class Line:
    """cost = overhead + slope·tokens, least squares over fading samples.

    While all are of one size, the slope is the last one seen; before there was any, the line goes through 0.
    """

    __slots__ = ("_n", "_slope", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._slope: float | None = None

    def add(self, tokens: int, ms: float) -> None:
        """Take a sample."""
        self._n = self._n * _FADE + 1
        self._x = self._x * _FADE + tokens
        self._y = self._y * _FADE + ms
        self._xx = self._xx * _FADE + tokens * tokens
        self._xy = self._xy * _FADE + tokens * ms
        spread = self._xx * self._n - self._x * self._x
        if spread > 0.01 * self._xx * self._n:
            self._slope = max(0.0, (self._xy * self._n - self._x * self._y) / spread)

    @property
    def ratio(self) -> float:
        """Milliseconds per token, overhead included; 0: unknown."""
        return self._y / self._x if self._x else 0.0

    @property
    def typical(self) -> float:
        """Milliseconds per token of a step of typical size, overhead included; 0: unknown."""
        return self.at(TYPICAL_TOKENS) / TYPICAL_TOKENS

    def at(self, tokens: float) -> float:
        """Predicted ms of a step with so many tokens; 0: unknown."""
        if not self._n:
            return 0.0
        # Neither negative overhead nor negative slope is believed: noise of steps of similar size.
        slope = self.ratio if self._slope is None else min(self._slope, self.ratio)
        return (self._y - slope * self._x) / self._n + slope * tokens


class Estimates:
    """Of one engine, by model."""

    def __init__(self) -> None:
        self._decode: dict[str, Runs] = {}
        self._prefill: dict[str, Line] = {}
        self._restore: dict[str, Line] = {}
        self._switch: dict[str, Ewma] = {}
        self._reload: dict[str, Line] = {}
        self._weights: dict[str, int] = {}

    # --- measured

    def step(self, model: str, result: StepResult) -> None:
        """Learn from a step."""
        tokens = result.prefilled_tokens + result.recomputed_tokens
        own_ms = max(0.0, result.wall_ms - result.restore_ms)
        if result.kind == "decode":
            self._decode.setdefault(model, Runs()).add(result.steps, own_ms)
        elif result.kind == "prefill" and model in self._decode:
            self._decode[model].end()
        if result.kind == "prefill" and tokens:
            self._prefill.setdefault(model, Line()).add(tokens, own_ms)
        if result.restored_tokens:
            self._restore.setdefault(model, Line()).add(result.restored_tokens, result.restore_ms)

    def switch(self, model: str, ms: float, *, loaded_bytes: int = 0, weight_bytes: int = 0) -> None:
        """Learn from a switch to `model`: of `weight_bytes`, `loaded_bytes` were not staged, or dirty, and loaded."""
        self._switch.setdefault(model, Ewma()).add(ms)
        if weight_bytes:
            self._weights[model] = weight_bytes
            self._reload.setdefault(model, Line()).add(loaded_bytes, ms)
        for runs in self._decode.values():
            runs.end()

    # --- predicted, ms

    def decode_ms(self, model: str) -> float:
        """One decode step."""
        runs = self._decode.get(model)
        return runs.value if runs is not None else 0.0

    def prefill_ms(self, model: str, tokens: int) -> float:
        """One prefill step of so many prompt tokens."""
        line = self._prefill.get(model)
        return line.at(tokens) if line and tokens else 0.0

    def restore_ms(self, model: str, tokens: int) -> float:
        """Bringing so many tokens' KV back from host."""
        line = self._restore.get(model)
        return line.at(tokens) if line and tokens else 0.0

    def to_switch_ms(self, model: str) -> float:
        """A switch to `model`; before the first one, as long as to the others."""
        known = self._switch.get(model)
        if known is None and self._switch:
            return sum(map(_known, self._switch.values())) / len(self._switch)
        return _known(known)

    def stage_ms(self, model: str) -> float:
        """What staging all of `model` takes off the switch to it, about as long as staging itself takes; 0: unknown."""
        line = self._reload.get(model)
        return line.at(self._weights[model]) - line.at(0) if line else 0.0

    def switch_now_ms(self, staged: Mapping[str, float]) -> dict[str, float]:
        """A switch to each model that had one, of whose weights so large a share (0..1) is staged, the rest loaded.

        A share, since a switch's bytes are those of all ranks, and what is staged is told of one.
        """
        left = {m: weights * (1.0 - min(1.0, staged.get(m, 0.0))) for m, weights in self._weights.items()}
        return {m: max(LEAST_SWITCH_MS, line.at(left[m])) for m, line in self._reload.items()}

    # --- as reported

    @property
    def decode_step_ms(self) -> dict[str, float]:
        """Milliseconds of one decode step, by model."""
        return {m: runs.value for m, runs in self._decode.items() if runs.value}

    @property
    def switch_ms(self) -> dict[str, float]:
        """Milliseconds of a switch to the model."""
        return {m: e.value for m, e in self._switch.items() if e.value is not None}

    @property
    def prefill_ms_per_token(self) -> dict[str, float]:
        """Milliseconds per prompt token of a prefill of typical size.

        Not of those that were seen: where prompts come back cached but for a few tokens, a step's fixed cost would make
        each token so dear that a router takes any queue for more than a round holds.
        """
        return {m: line.typical for m, line in self._prefill.items() if line.typical}

    @property
    def restore_ms_per_token(self) -> dict[str, float]:
        """Milliseconds per token of a restore of typical size."""
        return {m: line.typical for m, line in self._restore.items() if line.typical}


def _known(ewma: Ewma | None) -> float:
    return ewma.value if ewma is not None and ewma.value is not None else 0.0
