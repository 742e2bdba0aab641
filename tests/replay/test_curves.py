"""Measured decode steps are taken as they were measured, batch by batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from talaria_replay.sim import profiles
from talaria_replay.sim.device import Times, times

HARDWARE = """
name = "mine"
about = "a test"
gpus = 1
hbm_gib = 1.0
usable = 1.0
h2d_gb_s = 1.0
d2d_gb_s = 1.0
host_gib = 1.0
phase1_ms = 0.0
phase2_ms = 0.0
phase3_ms = 0.0
phase4_ms = 0.0
phase5_ms = 0.0
"""
MODEL = """
name = "m"
about = "a test"
weight_gb = 0.1
kv_bytes_per_token = 1024
kv_heads = 1
context_tokens = 4096
max_running = 16
prefill_tokens = 2048
[measured.mine]
source = "a test"
prefill_ms = { 256 = 128.0, 1024 = 512.0 }
decode_step_ms = { "b1@1000" = 7.0, "b2@1000" = 12.0, "b3@1000" = 18.0, "b8@1000" = 15.0, "b12@1000" = 19.0 }
"""


@pytest.fixture
def measured(tmp_path: Path) -> Times:
    hardware, model = tmp_path / "mine.toml", tmp_path / "m.toml"
    hardware.write_text(HARDWARE)
    model.write_text(MODEL)
    return times(profiles.model(str(model)), profiles.hardware(str(hardware)), "measured")


@pytest.mark.parametrize(("batch", "ms"), [(1, 7.0), (2, 12.0), (3, 18.0), (8, 15.0), (12, 19.0)])
def test_a_batch_that_was_measured_takes_what_was_measured(measured: Times, batch: int, ms: float):
    assert measured.decode_ms(batch, batch * 1000, 1) == pytest.approx(ms, rel=1e-3)


def test_between_and_beyond_them_it_is_linear(measured: Times):
    empty = {n: measured.decode_ms(n, 0, 1) for n in (3, 5, 8, 12, 16)}
    assert empty[5] == pytest.approx(empty[3] + (empty[8] - empty[3]) * 2 / 5)
    assert empty[16] == pytest.approx(2 * empty[12] - empty[8])


def test_contexts_grow_over_many_iterations(measured: Times):
    one_by_one = sum(measured.decode_ms(2, 2000 + 2 * n, 1) for n in range(50))
    assert measured.decode_ms(2, 2000, 50) == pytest.approx(one_by_one)
