"""A lost rank is no refusal: it leaves the driver, whatever was asked, and ends the process."""

from __future__ import annotations

import pytest

from talaria_gpu.hkvr.agreement import RankLostError
from tests.gpu.engine.rig import Rig, make_call


def lost(*_arguments):
    raise RankLostError("rank 1 was killed by signal 9")


def test_on_submit(monkeypatch):
    rig = Rig()
    monkeypatch.setattr(rig.engine, "submit", lost)
    with pytest.raises(RankLostError):
        rig.driver.submit(make_call("r", [1, 2, 3]))


def test_on_opening_a_model(monkeypatch):
    rig = Rig()
    rig.driver.close_model("b")
    monkeypatch.setattr(rig.engine, "open_model", lost)
    rig.driver.open("b")
    with pytest.raises(RankLostError):
        rig.turn()
