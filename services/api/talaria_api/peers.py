"""What the api has heard of each instance: its present epoch and when it last spoke (DESIGN 10: silence means death).

Pure state, shared by all calls. Silence counts only while we could have heard: not before our own bus connection was
back, and not while this process itself stood still.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

KEPT_EPOCHS = 8
"""Earlier lives of an instance that are remembered, so that their late messages are known for what they are."""

Lost = Literal["silent", "restarted"]


@dataclass(slots=True)
class _Peer:
    epoch: str
    heard_at: float
    retired: list[str] = field(default_factory=list)


class Peers:
    """Instances by name.

    Args:
        silence_s: without a batch for this long, an instance with calls of ours is taken for dead.
        outage_s: the same, while our own bus connection is down and nothing can be heard.
    """

    def __init__(self, silence_s: float, outage_s: float) -> None:
        self._silence_s = silence_s
        self._outage_s = outage_s
        self._peers: dict[str, _Peer] = {}
        self._floor = 0.0
        self._connected = True

    def hear(self, now: float, iid: str, epoch: str) -> bool:
        """A message of (iid, epoch) has come. False if it is of an earlier life: it is to be ignored."""
        peer = self._peers.get(iid)
        if peer is None:
            self._peers[iid] = _Peer(epoch, now)
            return True
        if peer.epoch != epoch:
            if epoch in peer.retired:
                return False
            peer.retired = [*peer.retired, peer.epoch][-KEPT_EPOCHS:]
            peer.epoch = epoch
        peer.heard_at = now
        return True

    def lost(self, now: float, iid: str, epoch: str, since: float) -> Lost | None:
        """Whether and why (iid, epoch), known alive at `since`, is to be taken for dead."""
        peer = self._peers.get(iid)
        heard = max(since, self._floor)
        if peer is not None:
            if epoch and epoch in peer.retired:
                return "restarted"
            heard = max(heard, peer.heard_at)
        limit = self._silence_s if self._connected else self._outage_s
        return "silent" if now - heard > limit else None

    def quiet_for(self, now: float, iid: str) -> float:
        """Seconds since the instance was heard; infinite if it never was."""
        peer = self._peers.get(iid)
        return float("inf") if peer is None else now - peer.heard_at

    def connection(self, now: float, connected: bool) -> None:
        """Our own connection was lost or is there again."""
        if connected and not self._connected:
            self._floor = now
        self._connected = connected

    def forgive(self, now: float) -> None:
        """This process stood still: what it did not hear meanwhile is nobody's silence."""
        self._floor = now
