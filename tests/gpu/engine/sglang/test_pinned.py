"""A hot instance's model is on its device before the first call."""

from __future__ import annotations

import pytest

from talaria_gpu.engine.worker import pin

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
QWEN3, MLA = "tiny-qwen3-random", "tiny-mla-random"


def test_a_model_that_is_alone(make_engine):
    engine = make_engine(QWEN3)
    pin(engine)
    assert engine.active == QWEN3
    pin(engine)  # once more: it is there
    assert engine.active == QWEN3


def test_of_several_the_first_call_decides(make_engine):
    engine = make_engine(QWEN3, MLA)
    pin(engine)
    assert engine.active is None
