"""The message bus: one interface, a NATS and an in-memory implementation under the same tests."""

from talaria_common.bus import _light  # noqa: F401 - before anything else imports nats-py
from talaria_common.bus.interface import Bus, Headers, KvBucket, KvEntry, KvWatch, Message, RevisionError, Subscription
from talaria_common.bus.memory import MemoryBus, MemoryHub
from talaria_common.bus.nats import NatsBus

__all__ = [
    "Bus",
    "Headers",
    "KvBucket",
    "KvEntry",
    "KvWatch",
    "MemoryBus",
    "MemoryHub",
    "Message",
    "NatsBus",
    "RevisionError",
    "Subscription",
]
