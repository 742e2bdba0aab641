"""What the estimates say after what was measured."""

from __future__ import annotations

import pytest

from talaria_gpu.engine.contract import StepResult
from talaria_gpu.sched.estimates import Estimates, Line


def prefill(tokens: int, ms: float) -> StepResult:
    return StepResult(kind="prefill", wall_ms=ms, tokens=[], prefilled_tokens=tokens)


def test_short_prefills_do_not_make_tokens_dear() -> None:
    """20 ms a step and 1 ms a token; then only prompts that come back cached but for one token."""
    estimates = Estimates()
    for tokens in (1000, 300, 2000):
        estimates.step("m", prefill(tokens, 20 + tokens))
    for _ in range(500):
        estimates.step("m", prefill(1, 21))
    assert estimates.prefill_ms_per_token["m"] == pytest.approx(1 + 20 / 512, rel=0.01)
    assert estimates.prefill_ms("m", 1) == pytest.approx(21, rel=0.01)
    assert estimates.prefill_ms("m", 1000) == pytest.approx(1020, rel=0.01)


def test_a_line_of_one_size_goes_through_zero_until_another_is_seen() -> None:
    line = Line()
    for _ in range(5):
        line.add(100, 120.0)
    assert (line.at(200), line.typical) == (pytest.approx(240), pytest.approx(1.2))
    line.add(200, 220.0)
    assert line.at(300) == pytest.approx(320, rel=0.01)


def test_noise_never_gives_a_negative_slope_or_overhead() -> None:
    line = Line()
    for tokens, ms in ((100, 50.0), (200, 40.0), (300, 30.0)):
        line.add(tokens, ms)
    assert line.at(1) >= 0
    assert line.at(1000) >= line.at(1)


def test_a_switch_now_costs_what_is_not_staged() -> None:
    """10 ms and 0.1 ms a byte of what is loaded."""
    estimates = Estimates()
    for loaded in (1000, 0, 500):
        estimates.switch("m", 10 + loaded / 10, loaded_bytes=loaded, weight_bytes=1000)
    assert estimates.switch_now_ms({})["m"] == pytest.approx(110, rel=0.01)
    assert estimates.switch_now_ms({"m": 0.8})["m"] == pytest.approx(30, rel=0.01)
    estimates.switch("alike", 50.0, loaded_bytes=1000, weight_bytes=1000)
    assert estimates.switch_now_ms({"alike": 1.0})["alike"] > 0, "0 would say that nothing is known"
