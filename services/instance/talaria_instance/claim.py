"""One process per instance id: a second one does not start, and one that was taken for dead steps back.

Ids are unique in a mesh (DESIGN 4). Two processes under one id would each take some of the calls and each answer for
the other's, so the later start wins where both live, and a start finds out first whether somebody lives.
"""

from __future__ import annotations

import structlog

from talaria_common import subjects
from talaria_common.bus import Bus
from talaria_common.bus.interface import KvEntry
from talaria_common.errors import BusTimeoutError, NoRespondersError, TalariaError
from talaria_common.wire import ControlReply, ControlRequest, Presence, WireError, decode, encode

log = structlog.get_logger(__name__)

ASK_S = 1.0
"""How long a living twin has to answer. One that hangs longer finds out by itself when it goes on."""


class TwinError(TalariaError):
    """Another process has this instance's id."""


async def refuse_twin(bus: Bus, iid: str) -> None:
    """Return if nobody answers as `iid`.

    Raises:
        TwinError: somebody does.
        BusError: the bus is away.
    """
    try:
        answer = await bus.request(subjects.control(iid, "health"), encode(ControlRequest()), timeout_s=ASK_S)
        epoch = decode(answer.data, ControlReply).epoch
    except (NoRespondersError, BusTimeoutError):
        return
    except WireError:
        epoch = "?"
    raise TwinError(f"an instance {iid!r} runs already in this mesh (epoch {epoch}); give this one another id")


def stands(mine: Presence, entry: KvEntry | None) -> bool:
    """Whether our entry in the presence bucket still stands; False: write it again.

    Raises:
        TwinError: a later start has taken our id over.
    """
    if entry is None:
        return False
    try:
        found = decode(entry.value, Presence)
    except WireError:
        return False
    if found.epoch == mine.epoch:
        return True
    if (found.started_ms, found.epoch) > (mine.started_ms, mine.epoch):
        raise TwinError(f"instance {mine.iid!r} was started again as pid {found.pid} on {found.host}; this one ends")
    return False
