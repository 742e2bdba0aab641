"""Recurrent states in the registry (4.3, C): a state belongs to one exact prefix, and is of use only whole.

A hybrid's KV is kept in blocks like any other's. Behind the block where a state was taken hang, in this order: what of
the prefix is shorter than a block (its tail), and the state itself, cut into parts that fit a slab. KV without a state
at its end cannot be restored, a state without all of its parts neither. Pure: no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from talaria_gpu.hkvr.block import Block
from talaria_gpu.hkvr.descriptor import KvDescriptor
from talaria_gpu.hkvr.keys import KEY_BYTES, BlockKeys
from talaria_gpu.hkvr.registry import Registry


class Found(NamedTuple):
    """What the host has of a prefix."""

    tokens: int = 0
    blocks: tuple[Block, ...] = ()
    """Of KV, from the first token on; a hybrid's last one may be a tail."""
    states: tuple[Block, ...] = ()
    """A hybrid's: the parts of the state at exactly `tokens`."""

    @property
    def keys(self) -> list[bytes]:
        """Of all blocks in order: equal on all ranks that have the same."""
        return [block.key for block in (*self.blocks, *self.states)]

    @property
    def all_blocks(self) -> list[Block]:
        """Of KV and state."""
        return [*self.blocks, *self.states]


def state_keys(end: bytes, parts: int) -> list[bytes]:
    """Names of a state's parts, for the prefix with the name `end`."""
    return [
        blake2b(end + b"state" + part.to_bytes(4, "little"), digest_size=KEY_BYTES).digest() for part in range(parts)
    ]


def find(
    registry: Registry, keys: BlockKeys, ids: Sequence[int], tokens: int, *, kv: KvDescriptor, parts: int
) -> Found:
    """The longest prefix of `ids[:tokens]` that can be restored; `parts` of a state, 0 where there is none."""
    chain = registry.match(keys.upto(ids, tokens))
    size = kv.block_tokens
    if not parts:
        return Found(len(chain) * size, tuple(chain))
    while chain:
        end = len(chain) * size
        tails = [b for b in registry.children(chain[-1]) if 0 < b.tokens < size]
        for tail in sorted(tails, key=lambda b: -b.tokens):
            if end + tail.tokens <= tokens and tail.state == "host" and tail.key == keys.exact(ids, end + tail.tokens):
                states = _whole(registry, tail, parts)
                if states:
                    return Found(end + tail.tokens, (*chain, tail), states)
        states = _whole(registry, chain[-1], parts)
        if states:
            return Found(end, tuple(chain), states)
        chain.pop()
    return Found()


def _whole(registry: Registry, end: Block, parts: int) -> tuple[Block, ...]:
    """All parts of the state behind `end`, or none."""
    found = registry.match(state_keys(end.key, parts))
    return tuple(found) if len(found) == parts else ()
