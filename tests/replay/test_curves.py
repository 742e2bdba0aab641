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


def curves(folder: Path, model: str) -> Times:
    (folder / "mine.toml").write_text(HARDWARE)
    (folder / "m.toml").write_text(model)
    return times(profiles.model(str(folder / "m.toml")), profiles.hardware(str(folder / "mine.toml")), "measured")


@pytest.fixture
def measured(tmp_path: Path) -> Times:
    return curves(tmp_path, MODEL)


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


def test_one_context_for_each_batch_still_tells_what_context_costs(tmp_path: Path):
    points = '{ "b1@1000" = 6.0, "b2@8000" = 22.0, "b4@2000" = 12.0 }'  # 4 + 1 a call + 0.001 a token, nearly
    of = curves(tmp_path, MODEL[: MODEL.index("decode_step_ms")] + f"decode_step_ms = {points}\n")
    assert of.decode_context == pytest.approx(0.001, rel=0.15)
    assert of.decode_ms(2, 16_000, 1) == pytest.approx(22.0, rel=1e-3)
    assert of.decode_ms(2, 80_000, 1) > 3 * 22.0


def test_two_contexts_of_a_batch_tell_it_by_themselves(tmp_path: Path):
    points = '{ "b1@1000" = 7.0, "b4@1000" = 12.0, "b4@4000" = 24.0 }'
    of = curves(tmp_path, MODEL[: MODEL.index("decode_step_ms")] + f"decode_step_ms = {points}\n")
    assert of.decode_context == pytest.approx(0.001, rel=1e-3)
    assert of.decode_ms(4, 10_000, 1) == pytest.approx(18.0, rel=1e-3)
