"""An engine without weights: a device model on a clock (DESIGN 8). The load double on the bus, and the simulator's."""

from talaria_gpu.engine.sim.engine import SimEngine
from talaria_gpu.engine.sim.tokens import expected_text, expected_tokens

__all__ = ["SimEngine", "expected_text", "expected_tokens"]
