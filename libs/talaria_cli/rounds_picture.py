"""Slots as they went by: one line of text each, or one SVG of them all. Pure; reads the data of `round` events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

PHASES = (
    ("switch_ms", "switch", "░", "#9e9e9e"),
    ("p_ms", "P", "P", "#1565c0"),
    ("d1_ms", "D1", "d", "#81c784"),
    ("sp_ms", "SP", "S", "#ef6c00"),
    ("d_ms", "D", "d", "#4caf50"),
    ("dfin_ms", "Dfin", "f", "#c0ca33"),
    ("linger_ms", "linger", "·", "#e0e0e0"),
)
"""Field, name, letter of the live picture, colour of the timeline."""
_COUNTS = (
    ("sp_admitted", "by SP"),
    ("suspended", "suspended"),
    ("retracted", "cut off"),
    ("sp_deferred", "returns parked"),
    ("deferred_late", "came late"),
    ("deferred_prefix", "without prefix"),
    ("deferred_rows", "without room"),
    ("deferred_time", "without time"),
    ("deferred_retracted", "lost their rows"),
)
"""What a line says of a slot's calls, where it is not 0."""
INFEASIBLE = "#c62828"
"""Colour of the dot at a slot whose plan gave a target up."""
_ROW, _LEFT, _WIDTH = 26, 220, 1200


class Slot(NamedTuple):
    """One `round` event."""

    iid: str
    end_ms: float
    data: dict[str, Any]

    @property
    def start_ms(self) -> float:
        """When its switch began."""
        return self.end_ms - float(self.data["wall_ms"])

    @property
    def lane(self) -> tuple[str, str]:
        """Instance and model: a row of the timeline."""
        return self.iid, str(self.data["model"])


def lanes(slots: Sequence[Slot]) -> list[tuple[str, str]]:
    """The timeline's rows, in order."""
    return sorted({slot.lane for slot in slots})


def line(slot: Slot, ms_per_letter: float) -> str:
    """The slot in one line: its phases in letters, each so many ms long, then what was let in and what was not."""
    data = slot.data
    bar = "".join(letter * round(float(data.get(field, 0.0)) / ms_per_letter) for field, _, letter, _ in PHASES)
    notes = [f"{data['admitted']} in"]
    for field, word in _COUNTS:
        if data.get(field):
            notes.append(f"{data[field]} {word}")
    if data.get("infeasible"):
        notes.append(f"infeasible: {data['infeasible']}")
    planned = float(data.get("round_planned_ms", 0.0))
    ratio = f"R {float(data.get('round_ms', 0.0)) / 1000:.1f}/{planned / 1000:.1f} s" if planned else "alone"
    model = str(data["model"])
    return f"{slot.iid:<10} #{data.get('round', 0):<4} {model:<24.24} {bar:<40} {ratio:<14} {', '.join(notes)}"


def read_log(path: Path) -> list[Slot]:
    """The slots in a log of `talaria tap --json`, or of bare events, one JSON a line; other lines are left out.

    Raises:
        OSError: it cannot be read.
        ValueError: it has no slot.
    """
    slots = []
    for text in path.read_text(encoding="utf-8").splitlines():
        slot = _slot(text)
        if slot is not None:
            slots.append(slot)
    if not slots:
        raise ValueError(f"{path} holds no round event (make one with: talaria tap --json -k round > {path})")
    return slots


def of_event(event: Any) -> Slot | None:
    """A slot from an event's plain data; None: it is another kind."""
    if not isinstance(event, dict) or event.get("kind") != "round" or not isinstance(event.get("data"), dict):
        return None
    return Slot(str(event.get("source", "")), float(event.get("at_ms", 0)), event["data"])


def svg(slots: Sequence[Slot]) -> str:
    """The timeline: a lane per instance and model, a bar per slot, in it the phases in their order and proportion."""
    first, last = min(s.start_ms for s in slots), max(s.end_ms for s in slots)
    scale = _WIDTH / max(1.0, last - first)
    rows = lanes(slots)
    place = {lane: 40 + i * _ROW for i, lane in enumerate(rows)}
    bottom = 40 + len(rows) * _ROW
    out = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{bottom + 50}"'
            ' font-family="sans-serif" font-size="11">'
        ),
        '<rect width="100%" height="100%" fill="white"/>',
        *_legend(),
    ]
    for (iid, model), y in place.items():
        out.append(f'<text x="8" y="{y + 14}">{escape(f"{iid} {model}"[:36])}</text>')
    for slot in slots:
        y = place[slot.lane]
        out += _bar(slot, _LEFT + (slot.start_ms - first) * scale, y, scale)
    out += _axis((last - first) / 1000, bottom)
    return "\n".join([*out, "</svg>", ""])


def _slot(text: str) -> Slot | None:
    try:
        row = json.loads(text)
    except ValueError:
        return None
    if isinstance(row, dict) and "subject" in row:
        row = row.get("data")
    return of_event(row)


def _bar(slot: Slot, x: float, y: float, scale: float) -> Iterable[str]:
    note = escape(line(slot, 1e9).strip())
    yield f"<g><title>{note}</title>"
    for field, _, _, colour in PHASES:
        width = float(slot.data.get(field, 0.0)) * scale
        if width > 0:
            yield f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 6}" fill="{colour}"/>'
        x += width
    if slot.data.get("infeasible"):
        yield f'<circle cx="{x:.2f}" cy="{y}" r="3" fill="{INFEASIBLE}"/>'
    yield "</g>"


def _legend() -> Iterable[str]:
    x = _LEFT
    for _, name, _, colour in PHASES:
        yield f'<rect x="{x}" y="12" width="12" height="12" fill="{colour}"/><text x="{x + 16}" y="22">{name}</text>'
        x += 80
    yield f'<circle cx="{x + 6}" cy="18" r="3" fill="{INFEASIBLE}"/><text x="{x + 16}" y="22">infeasible target</text>'


def _axis(seconds: float, y: int) -> Iterable[str]:
    for i in range(6):
        x = _LEFT + _WIDTH * i / 5
        yield f'<line x1="{x:.1f}" y1="36" x2="{x:.1f}" y2="{y}" stroke="#eeeeee"/>'
        yield f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{seconds * i / 5:.1f} s</text>'
