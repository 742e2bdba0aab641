"""docs/events.md names every field that an instance's events carry."""

import re
from pathlib import Path

from talaria_common.wire import Completion
from talaria_gpu.engine.contract import SwitchTiming
from talaria_gpu.engine.ipc import SlotEnded, Switched

DOC = (Path(__file__).parents[2] / "docs" / "events.md").read_text()


def fields(kind):
    section = DOC.split(f"\n## {kind}\n", 1)[1].split("\n## ")[0].split("\n# ")[0]
    rows = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    return {name.strip() for row in rows[1:] for name in row.split(",")} - {"---"}


def test_every_field_is_there(rig, build):
    rig.forward(build.rid(1))
    rig.forward(build.rid(2), model="gamma")
    rig.engine_dies()
    rig.engine_ready()
    timing = SwitchTiming(target="beta", phases_ms=(1, 2, 3, 4, 5), total_ms=15, weight_bytes=9, h2d_bytes=9)
    slot = dict.fromkeys(SlotEnded.__struct_fields__, 0) | {"model": "alpha", "reason": "idle"}
    rig.said(Switched(timings=[timing]))
    rig.said(SlotEnded(**slot))
    for kind in ("forward", "completion", "switch", "round", "health"):
        seen = {name for data in rig.events(kind) for name in data}
        assert seen, kind
        assert seen <= fields(kind), kind
    assert set(Completion.__struct_fields__) - {"at_ms"} <= fields("completion")
