"""`talaria rounds`: one line per slot, and the timeline drawn from a log."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from talaria_cli.main import app
from talaria_cli.rounds_picture import INFEASIBLE, PHASES, of_event, svg

DATA = {
    "model": "alpha",
    "wall_ms": 600.0,
    "active_ms": 500.0,
    "switch_ms": 100.0,
    "p_ms": 150.0,
    "d1_ms": 100.0,
    "sp_ms": 50.0,
    "d_ms": 150.0,
    "dfin_ms": 50.0,
    "linger_ms": 0.0,
    "admitted": 3,
    "sp_admitted": 1,
    "sp_deferred": 2,
    "suspended": 4,
    "retracted": 0,
    "deferred_late": 1,
    "deferred_rows": 2,
    "round": 7,
    "round_planned_ms": 2000.0,
    "round_ms": 1800.0,
    "infeasible": "ttft",
}


def event(at_ms: int, **change) -> dict:
    return {"kind": "round", "source": "cold-0", "at_ms": at_ms, "data": DATA | change}


def log(path: Path, *events: dict) -> Path:
    rows = [json.dumps({"seen_ms": 1, "subject": "talaria.v1.event.round.cold-0", "data": e}) for e in events]
    path.write_text("\n".join(["no json", json.dumps({"subject": "x", "data": {"kind": "switch"}}), *rows]))
    return path


def test_a_slot_is_one_line(tmp_path: Path) -> None:
    file = log(tmp_path / "events.jsonl", event(1000))
    result = CliRunner().invoke(app, ["rounds", str(file), "--scale", "50"])
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    assert "░░PPPddSdddf" in line
    assert "R 1.8/2.0 s" in line
    assert "3 in, 1 by SP, 4 suspended, 2 returns parked, 1 came late, 2 without room, infeasible: ttft" in line


def test_the_timeline_keeps_proportions(tmp_path: Path) -> None:
    file = log(tmp_path / "events.jsonl", event(1000), event(1600, model="beta <b>", infeasible=""))
    out = tmp_path / "rounds.svg"
    result = CliRunner().invoke(app, ["rounds", str(file), "--out", str(out)])
    assert (result.exit_code, "2 slots" in result.stdout) == (0, True)
    root = ET.fromstring(out.read_text())
    bars = [g.findall("{*}rect") for g in root.findall("{*}g")]
    assert len(bars) == 2
    widths = [float(r.attrib["width"]) for r in bars[0]]
    assert [round(w / widths[0], 2) for w in widths] == [1.0, 1.5, 1.0, 0.5, 1.5, 0.5]
    assert abs(sum(widths) - 600) < 0.1  # half of the width: the other slot has the rest


def test_a_log_without_rounds_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["rounds", str(log(tmp_path / "empty.jsonl"))])
    assert result.exit_code == 2


def test_an_older_instance_s_slots_are_drawn_too() -> None:
    """Its events lack the phases."""
    old = {k: v for k, v in DATA.items() if k in {"model", "wall_ms", "active_ms", "switch_ms", "admitted"}}
    slot = of_event({"kind": "round", "source": "i", "at_ms": 5, "data": old})
    assert slot is not None
    assert ET.fromstring(svg([slot])) is not None


def test_the_timeline_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    file = log(tmp_path / "events.jsonl", event(1000), event(1600, model="beta"))
    out = tmp_path / "rounds.png"
    result = CliRunner().invoke(app, ["rounds", str(file), "--out", str(out)])
    assert (result.exit_code, "2 slots" in result.stdout) == (0, True)
    picture = (imread(out)[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    for colour in [colour for _, _, _, colour in PHASES] + [INFEASIBLE]:
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (abs(picture - rgb).sum(axis=1) == 0).sum() > 20, colour


def test_a_png_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = log(tmp_path / "events.jsonl", event(1000))
    result = CliRunner().invoke(app, ["rounds", str(file), "--out", str(tmp_path / "rounds.png")])
    assert result.exit_code == 2
    assert "matplotlib" in result.stderr
    assert not (tmp_path / "rounds.png").exists()
