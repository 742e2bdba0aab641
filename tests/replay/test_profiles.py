"""What shipped profiles must not leave out."""

from __future__ import annotations

import pytest

from talaria_gpu.engine.sim.device import Part
from talaria_replay.sim import profiles
from talaria_replay.sim.device import ProfiledDevice, times


def test_weights_are_those_of_the_hardware_s_number_format() -> None:
    """H200 has no FP4: times are those of FP8 there, and so must the weights be."""
    glm = profiles.model("glm-5-nvfp4")

    def weights(hardware: str) -> int:
        return ProfiledDevice(profiles.hardware(hardware), {"m": glm}, "aic").spec("m").weight_bytes

    assert weights("b200-8") == weights("paper-tp8") == 441_000_000_000
    assert weights("h200-8") == 746_000_000_000


@pytest.mark.parametrize(
    ("name", "tokens", "factor"),
    [("qwen3-32b", 30_000, 1.48), ("qwen3-32b", 100_000, 2.60), ("qwen2.5-32b", 30_000, 1.30)],
)
def test_a_roofline_s_prefill_attends(name: str, tokens: int, factor: float) -> None:
    """Over what the parameters alone cost: 4 FLOPs x width for each pair of tokens and layer, against 2 a parameter."""
    model, hw = profiles.model(name), profiles.hardware("paper-tp4")
    assert model.roofline is not None
    flops = hw.gpus * hw.bf16_tflops * 1e12 * model.roofline.efficiency
    alone = model.roofline.step_overhead_ms + 2 * model.roofline.active_params * tokens / flops * 1000
    assert times(model, hw, "roofline").prefill_ms([Part(0, 0, tokens)]) / alone == pytest.approx(factor, abs=0.01)
