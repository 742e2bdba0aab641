"""A cluster view in messages that the bus carries: a snapshot of three models is about 2 KB, and it holds them all."""

from __future__ import annotations

from msgspec.structs import replace

from talaria_common.wire import ClusterView, InstanceView, encode

MOST_BYTES = 1 << 20
"""Of a page, also where the bus carries more: whoever reads it does nothing else meanwhile."""
HEADROOM_BYTES = 4096
"""Of a message for what is not payload."""


def page_bytes(max_payload_bytes: int) -> int:
    """Bytes of a page on a bus whose messages have at most `max_payload_bytes`."""
    return min(MOST_BYTES, max_payload_bytes) - HEADROOM_BYTES


def paged(view: ClusterView, most_bytes: int) -> list[ClusterView]:
    """`view` in pages of at most `most_bytes`, numbered from its own version on; an instance is never torn.

    A delta becomes deltas. Of a full view only the last page is full: it names the members, so that whoever reads it
    knows who is there, and whether a page was lost. `removed` is on the last one too.
    """
    if len(encode(view)) <= most_bytes:
        return [view]
    members = tuple(i.snapshot.iid for i in view.instances) if view.full else ()
    last = replace(view, instances=(), members=members)
    groups: list[list[InstanceView]] = [[]]
    left = room = most_bytes - len(encode(replace(last, full=False, removed=(), members=())))
    for instance in view.instances:
        size = len(encode(instance)) + 1
        if size > left and groups[-1]:
            groups.append([])
            left = room
        groups[-1].append(instance)
        left -= size
    if room - left + len(encode(last)) > most_bytes:
        groups.append([])
    pages = [replace(last, full=False, removed=(), members=(), instances=tuple(group)) for group in groups[:-1]]
    pages.append(replace(last, instances=tuple(groups[-1])))
    return [replace(page, version=view.version + n) for n, page in enumerate(pages)]
