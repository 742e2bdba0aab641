"""What things cost on this hardware: latency profiles per (instance, model), learnt; honest guesses until then (3.3).

A value is taken, in this order, from the instance's own EWMA in its snapshot, from the router's EWMA over completions,
from the same model on other instances, from what was measured of other models by the bytes of weights (the least of
those ratios, for what does not grow with the model makes small ones look slow): of the instance's own, its bandwidths,
else of anybody's, for an instance that nobody has tried yet must not look better or worse for that alone; and from a
default: for what moves weights a usual bandwidth, else the right order of magnitude for a small model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from talaria_common.wire import Completion, ModelState

ALPHA = 0.2
"""Weight of the newest observation."""

BYTES_PER_TOKEN = 4.0
PREFILL_MS_PER_TOKEN = 0.5
DECODE_STEP_MS = 30.0
SWITCH_MS = 500.0
"""Of a model whose size is not known."""
SWITCH_BYTES_PER_MS = 20e6
"""Host to device, 20 GB/s."""
OPEN_MS = 10_000.0
"""Beside reading the weights."""
OPEN_BYTES_PER_MS = 1e6
"""Off a disk, 1 GB/s."""
OUTPUT_TOKENS = 128.0
RETURN_PREFILL_MS = 100.0
RESTORE_OVER_PREFILL = 0.1
"""A restore moves what a prefill would have to compute: over PCIe about a tenth of the time for mid-sized models."""


class Ewma:
    """An exponentially weighted mean; `value` is None before the first observation."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, observed: float) -> None:
        """Take in one observation."""
        self.value = observed if self.value is None else self.value + ALPHA * (observed - self.value)

    def get(self, default: float) -> float:
        """The mean, or `default`."""
        return default if self.value is None else self.value


class _PerModel:
    __slots__ = (
        "bytes_per_token", "decode", "opens", "output", "prefill", "prefills", "returns", "switch", "weight_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.bytes_per_token = Ewma()
        self.output = Ewma()
        self.prefills = Ewma()
        self.returns = Ewma()
        self.prefill = Ewma()
        self.decode = Ewma()
        self.switch = Ewma()
        self.opens = Ewma()
        self.weight_bytes = 0

    def mean(self, of: _Scaled) -> Ewma:
        """Over all instances."""
        means: dict[_Scaled, Ewma] = {
            "prefill_ms_per_token": self.prefill,
            "decode_step_ms": self.decode,
            "switch_ms": self.switch,
            "open_ms": self.opens,
        }
        return means[of]


class Profile(NamedTuple):
    """Costs of one model on one instance, all known or guessed."""

    prefill_ms_per_token: float
    decode_step_ms: float
    switch_ms: float
    switch_now_ms: float
    """Of a switch that came now: less what of its weights is staged."""
    open_ms: float
    weight_bytes: int
    """0: unknown."""
    restore_ms_per_token: float
    return_ms: float
    """Prefill of a typical returning call: the admission unit."""
    output_tokens: float
    measured: bool
    """Whether prefill and decode were measured by anyone: a guess may rank instances, but never refuse a call."""


_Scaled = Literal["prefill_ms_per_token", "decode_step_ms", "switch_ms", "open_ms"]


def _ratio(beside: Iterable[ModelState], of: _Scaled) -> float:
    """The least that the instance's models took per byte of weights; 0: nothing was measured, or no size is known."""
    ratios = [getattr(m, of) / m.weight_bytes for m in beside if m.weight_bytes > 0 and getattr(m, of) > 0]
    return min(ratios, default=0.0)


class Profiles:
    """All profiles."""

    def __init__(self, admission_unit_ms: float | None) -> None:
        self._unit_ms = admission_unit_ms
        self._models: dict[str, _PerModel] = {}
        self._prefill: dict[tuple[str, str], Ewma] = {}

    def completed(self, c: Completion) -> None:
        """Learn from a call that ended well."""
        model = self._model(c.model)
        if c.prompt_tokens > 0 and c.prompt_bytes > 0:
            model.bytes_per_token.add(c.prompt_bytes / c.prompt_tokens)
        if c.completion_tokens > 0:
            model.output.add(float(c.completion_tokens))
        computed = c.prompt_tokens - c.cached_tokens
        if c.prefill_ms > 0 and computed > 0:
            per_token = c.prefill_ms / computed
            model.prefill.add(per_token)
            self._prefill.setdefault((c.iid, c.model), Ewma()).add(per_token)
        if c.prefill_ms > 0:
            model.prefills.add(c.prefill_ms)
            if c.cached_tokens > 0:
                model.returns.add(c.prefill_ms)

    def snapshot(self, state: ModelState) -> None:
        """Let what one instance measured stand in for others that have not yet measured the same model."""
        model = self._model(state.name)
        model.weight_bytes = state.weight_bytes or model.weight_bytes
        for mean, measured in (
            (model.prefill, state.prefill_ms_per_token),
            (model.decode, state.decode_step_ms),
            (model.switch, state.switch_ms),
            (model.opens, state.open_ms),
        ):
            if measured > 0:
                mean.add(measured)

    def of(self, iid: str, state: ModelState, beside: Iterable[ModelState] = ()) -> Profile:
        """The profile of the model in `state` on `iid`; `beside`: the models there, for what is unknown of this one."""
        model = self._model(state.name)
        weights = state.weight_bytes or model.weight_bytes

        def cost(measured: float, mean: Ewma, of: _Scaled, default: float) -> float:
            known = measured or mean.get(0.0)
            return known or weights * (_ratio(beside, of) or self._ratio_anywhere(of)) or default

        own = self._prefill.get((iid, state.name))
        prefill = state.prefill_ms_per_token or (own.get(0.0) if own else 0.0)
        prefill = cost(prefill, model.prefill, "prefill_ms_per_token", PREFILL_MS_PER_TOKEN)
        decode = cost(state.decode_step_ms, model.decode, "decode_step_ms", DECODE_STEP_MS)
        reload_ms = weights / SWITCH_BYTES_PER_MS if weights else SWITCH_MS
        switch = cost(state.switch_ms, model.switch, "switch_ms", reload_ms)
        opens = cost(state.open_ms, model.opens, "open_ms", OPEN_MS + weights / OPEN_BYTES_PER_MS)
        return Profile(
            prefill_ms_per_token=prefill,
            decode_step_ms=decode,
            switch_ms=switch,
            switch_now_ms=state.switch_now_ms or switch * (1.0 - min(1.0, state.staged)),
            open_ms=max(opens, switch),
            weight_bytes=weights,
            restore_ms_per_token=state.restore_ms_per_token or prefill * RESTORE_OVER_PREFILL,
            return_ms=self.unit_ms(state.name),
            output_tokens=model.output.get(OUTPUT_TOKENS),
            measured=model.prefill.value is not None and model.decode.value is not None,
        )

    def unit_ms(self, model: str) -> float:
        """The admission unit that a live lease charges: configured, or a typical return's prefill, else any call's."""
        if self._unit_ms is not None:
            return self._unit_ms
        known = self._model(model)
        return known.returns.get(known.prefills.get(RETURN_PREFILL_MS))

    def call_s(self, model: str) -> float:
        """What a typical call decodes for, in seconds."""
        known = self._model(model)
        return known.output.get(OUTPUT_TOKENS) * known.decode.get(DECODE_STEP_MS) / 1000

    def prompt_tokens(self, model: str, prompt_bytes: int) -> int:
        """Estimated prompt tokens of `prompt_bytes` of text."""
        return max(1, round(prompt_bytes / self._model(model).bytes_per_token.get(BYTES_PER_TOKEN)))

    def forget(self, iid: str) -> None:
        """The instance is gone."""
        for key in [k for k in self._prefill if k[0] == iid]:
            del self._prefill[key]

    def _ratio_anywhere(self, of: _Scaled) -> float:
        ratios = [m.mean(of).get(0.0) / m.weight_bytes for m in self._models.values() if m.weight_bytes > 0]
        return min((r for r in ratios if r > 0), default=0.0)

    def _model(self, name: str) -> _PerModel:
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = _PerModel()
        return found
