"""Which models a sim engine knows, and which of them are open: an opening takes the device's `open_ms`."""

from __future__ import annotations

import math

from talaria_common.errors import ModelNotFoundError
from talaria_common.settings import InstanceSettings
from talaria_gpu.engine.contract import ModelInfo
from talaria_gpu.engine.sim.device import Device
from talaria_gpu.engine.sim.tokens import EOS, VOCAB_SIZE


class SimCatalog:
    """The models of `instance`, timed by `device`. All are open but those that `instance.open` leaves out."""

    def __init__(self, instance: InstanceSettings, device: Device) -> None:
        self._device = device
        self.specs = {name: device.spec(name) for name in instance.models}
        self._closed: set[str] = set() if instance.open is None else {*instance.models} - {*instance.open}
        self._opening: dict[str, float] = {}
        """When the files of each will have been read: to the end, as SGLang's catalog does it, whatever is closed."""

    def models(self) -> dict[str, ModelInfo]:
        """The open ones by name."""
        return {
            name: ModelInfo(
                name=name,
                context_tokens=spec.context_tokens,
                kv_capacity_tokens=spec.kv_capacity_tokens,
                weight_bytes=spec.weight_bytes,
                kv_bytes_per_token=spec.kv_bytes_per_token,
                max_running=spec.max_running,
                eos_token_ids=(EOS,),
                vocab_size=VOCAB_SIZE,
            )
            for name, spec in self.specs.items()
            if name not in self._closed
        }

    def require(self, model: str) -> None:
        """Raises ModelNotFoundError: it is not open."""
        if model not in self.specs or model in self._closed:
            raise ModelNotFoundError(f"model {model!r} is not open here")

    def open(self, model: str, now: float) -> bool:
        """Open it; False for `open_ms` from the first time it is asked for. Raises ModelNotFoundError."""
        if model not in self.specs:
            raise ModelNotFoundError(f"model {model!r} is not configured here")
        if model in self._closed:
            if self._opening.setdefault(model, now + self._device.open_ms(model) / 1000) > now:
                return False
            del self._opening[model]
            self._closed.discard(model)
        return True

    def close(self, model: str) -> None:
        """It is open no more."""
        self._closed.add(model)

    def next_opening(self, now: float) -> float:
        """When the weights of a model that is being opened will have been read, seconds; inf: none is.

        One that was to be closed again meanwhile is not asked for any more, and its time passes.
        """
        return min((at for at in self._opening.values() if at > now), default=math.inf)
