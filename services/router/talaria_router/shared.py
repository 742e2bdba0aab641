"""Prefixes that sessions have in common, such as a system prompt: where their KV was computed lately.

Beyond the paper, whose C_KV knows a session's own prefix. An instance's prefix cache is shared by a tenant's sessions,
so a new session finds there what another one left. It is a hint for the ranking only: what it says may have been
evicted, and then the call costs more than was thought, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from talaria_common.wire import kv_residence
from talaria_router.cluster import Cluster

HOLDERS = 4
"""Instances remembered per prefix, the last ones: each is a place that a decision looks at."""
PREFIXES = 4096

Prefix = tuple[str, str, str]
"""(tenant, model, prefix_id)."""


class _Held(NamedTuple):
    epoch: str
    kv_epoch: int


class SharedPrefixes:
    """Holders of prefixes, bounded, the least used forgotten first."""

    def __init__(self) -> None:
        self._held: OrderedDict[Prefix, OrderedDict[str, _Held]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def computed(self, prefix: Prefix, iid: str, epoch: str, kv_epoch: int) -> None:
        """A call with this prefix ended on `iid`, whose model's KV has now this epoch."""
        holders = self._held.setdefault(prefix, OrderedDict())
        holders[iid] = _Held(epoch, kv_epoch)
        holders.move_to_end(iid)
        self._held.move_to_end(prefix)
        if len(holders) > HOLDERS:
            holders.popitem(last=False)
        if len(self._held) > PREFIXES:
            self._held.popitem(last=False)

    def holders(self, prefix: Prefix, cluster: Cluster) -> frozenset[str]:
        """Instances whose KV may still hold it."""
        found = self._held.get(prefix)
        if found is None:
            return frozenset()
        self._held.move_to_end(prefix)
        return frozenset(iid for iid, held in found.items() if _there(iid, held, prefix[1], cluster))


def _there(iid: str, held: _Held, model: str, cluster: Cluster) -> bool:
    instance = cluster.get(iid)
    state = instance.models.get(model) if instance is not None else None
    if instance is None or state is None:
        return False
    return kv_residence(held.epoch, held.kv_epoch, 1, instance.snapshot.epoch, state) != "missing"
