"""What a run's figures say, and what they do not."""

from __future__ import annotations

from typing import Any

import pytest

from talaria_cli.replay import show
from talaria_replay.live.results import Results
from talaria_replay.measure import CallRecord, summary


def record(call: int, **fields: Any) -> CallRecord:
    return CallRecord(session="s", call=call, model="m", intended_s=0.0, sent_s=0.0, prompt_tokens=100, **fields)


def test_a_server_that_tells_of_one_cache_left_out_a_0_elsewhere() -> None:
    silent = {"cache_reported": False}
    assert summary([record(0, **silent), record(1, **silent)])["cached_share"] is None
    assert summary([record(0), record(1, cached_tokens=50)])["cached_share"] == 0.25
    assert summary([record(0, **silent), record(1, cached_tokens=50)])["cached_share"] == 0.25
    assert summary([record(0, **silent), record(1, cached_tokens=0)])["cached_share"] == 0.0
    assert summary([record(0, **silent), record(1, error="x")])["cached_share"] is None
    assert summary([record(0, **silent, error="x")])["cached_share"] == 0.0
    assert summary([])["cached_share"] == 0.0


def test_reuse_that_a_server_does_not_report_is_no_zero(capsys: pytest.CaptureFixture[str]) -> None:
    for reported, said in ((False, "prefix reuse: not reported by this server"), (True, "prefix reuse: 0.0% of")):
        figures = summary([record(0, cache_reported=reported)])
        show(Results(plan={"url": "http://server", "gap_sources": {}}, summary=figures), as_json=False)
        assert said in capsys.readouterr().out
