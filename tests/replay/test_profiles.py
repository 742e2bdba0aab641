"""What shipped profiles must not leave out."""

from __future__ import annotations

from pathlib import Path

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


HARDWARE = """
name = "h"
about = "x"
gpus = 1
hbm_gib = 80
usable = 0.8
h2d_gb_s = 30
d2d_gb_s = 1000
host_gib = 900
phase1_ms = 1
phase2_ms = 1
phase3_ms = 1
phase4_ms = 1
phase5_ms = 1
bf16_tflops = 100
hbm_tb_s = 3
"""
RECURRENT = """
name = "m"
about = "a model without attention, and points without a whole prompt or a context"
weight_gb = 20
kv_bytes_per_token = 1
kv_heads = 1
context_tokens = 131072
max_running = 64
prefill_tokens = 8192
[roofline]
source = "x"
active_params = 10e9
efficiency = 0.5
bandwidth_efficiency = 0.8
step_overhead_ms = 3.0
[measured.h]
source = "x"
incr_prefill_ms = { "512+0" = 20.0, "1024+4096" = 40.0 }
decode_step_ms = { "b1@0" = 5.0, "b8@0" = 7.0 }
"""


def test_a_model_needs_neither_attention_nor_whole_prompts_nor_contexts(tmp_path: Path) -> None:
    (tmp_path / "h.toml").write_text(HARDWARE)
    (tmp_path / "m.toml").write_text(RECURRENT)
    model, hw = profiles.model(str(tmp_path / "m.toml")), profiles.hardware(str(tmp_path / "h.toml"))
    roofline, measured = times(model, hw, "roofline"), times(model, hw, "measured")
    assert roofline.prefill_pair == 0.0
    assert roofline.prefill_ms([Part(0, 0, 1000)]) == pytest.approx(3.0 + 2 * 10e9 * 1000 / 50e12 * 1000)
    assert measured.prefill_ms([Part(0, 0, 512)]) == pytest.approx(20.0, rel=0.01)
    assert measured.decode_ms(8, 0, 1) == pytest.approx(7.0, rel=0.01)
    assert measured.decode_ms(8, 80_000, 1) == pytest.approx(7.0, rel=0.01), "no point tells what context costs"
