"""A radix cache of token prefixes, as a real engine keeps one: exact, page-aligned, locked by running calls, LRU.

Ids are packed, 4 bytes each. An edge holds many pages, so that a growing session costs one node per turn and matching
is a handful of memory compares.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

ID_BYTES = 4


@dataclass(slots=True, eq=False)
class Node:
    """An edge and what hangs below it. `locks` counts the running calls whose prefix goes through here.

    A root has no parent; nor has a node that was evicted.
    """

    edge: bytes
    parent: Node | None
    used: float
    locks: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of this edge alone."""
        return len(self.edge) // ID_BYTES


def depth(node: Node) -> int:
    """Tokens from the root to the end of `node`."""
    total, at = 0, node
    while at.parent is not None:
        total += at.tokens
        at = at.parent
    return total


class PrefixCache:
    """The prefixes of one model, by salt. `tokens` is what they occupy, in KV rows."""

    def __init__(self, page_tokens: int) -> None:
        self._page = page_tokens * ID_BYTES
        self._roots: dict[str, Node] = {}
        self.tokens = 0
        self.locked_tokens = 0

    def match(self, salt: str, packed: bytes, now: float) -> tuple[Node, int]:
        """The node where the longest cached prefix of `packed` ends, and its length in tokens (whole pages)."""
        node = self._root(salt, now)
        position = 0
        while True:
            child = node.children.get(packed[position : position + self._page])
            if child is None:
                break
            child.used = now
            common = self._common(child.edge, packed, position)
            if common < len(child.edge):
                child = self._split(child, common)
            node, position = child, position + common
        return node, position // ID_BYTES

    def length(self, salt: str, packed: bytes) -> int:
        """Tokens of the longest cached prefix of `packed`; changes nothing."""
        node = self._roots.get(salt)
        position = 0
        while node is not None:
            node = node.children.get(packed[position : position + self._page])
            if node is None:
                break
            common = self._common(node.edge, packed, position)
            position += common
            if common < len(node.edge):
                break
        return position // ID_BYTES

    def insert(self, salt: str, packed: bytes, now: float) -> tuple[Node, int]:
        """Keep the whole pages of `packed`; returns the node where they end, and how many tokens are new."""
        packed = packed[: len(packed) - len(packed) % self._page]
        node, have = self.match(salt, packed, now)
        rest = packed[have * ID_BYTES :]
        if not rest:
            return node, 0
        leaf = Node(rest, node, now)
        node.children[rest[: self._page]] = leaf
        self.tokens += leaf.tokens
        return leaf, leaf.tokens

    def lock(self, node: Node) -> None:
        """Keep `node` and all above it until `unlock`."""
        self._walk(node, 1)

    def unlock(self, node: Node) -> None:
        """Give back one `lock`."""
        self._walk(node, -1)

    def evict(self, tokens: int) -> int:
        """Free at least `tokens` rows of unlocked prefixes, least recently used leaves first; returns how many."""
        serial = itertools.count()  # breaks ties, in an order that is the same in every run
        leaves = [(n.used, next(serial), n) for n in self._nodes() if not n.children and not n.locks]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < tokens:
            _, _, leaf = heapq.heappop(leaves)
            freed += leaf.tokens
            parent, leaf.parent = leaf.parent, None
            if parent is None:
                raise ValueError("a root is no leaf")
            del parent.children[leaf.edge[: self._page]]
            if parent.parent is not None and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.used, next(serial), parent))
        self.tokens -= freed
        return freed

    def flush(self) -> None:
        """Forget everything; nothing may be locked."""
        if self.locked_tokens:
            raise ValueError(f"{self.locked_tokens} tokens are locked")
        for node in self._nodes():
            node.parent = None
        self._roots.clear()
        self.tokens = 0

    def check(self) -> str:
        """What is wrong inside ("" if nothing): counts against the tree."""
        nodes = list(self._nodes())
        total = sum(n.tokens for n in nodes)
        locked = sum(n.tokens for n in nodes if n.locks)
        if total != self.tokens or locked != self.locked_tokens:
            return f"prefix cache counts {self.tokens} tokens, {self.locked_tokens} locked; it holds {total}, {locked}"
        return ""

    def _root(self, salt: str, now: float) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(b"", None, now)
        return root

    def _common(self, edge: bytes, packed: bytes, position: int) -> int:
        """Bytes that `edge` and `packed` from `position` share, in whole pages (at least one is known to be)."""
        if packed.startswith(edge, position):
            return len(edge)
        low, high = 1, len(edge) // self._page  # pages known to match; pages known not to
        while high - low > 1:
            middle = (low + high) // 2
            if packed.startswith(edge[: middle * self._page], position):
                low = middle
            else:
                high = middle
        return low * self._page

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node`'s edge after `at` bytes; returns the upper half."""
        parent = node.parent
        if parent is None:
            raise ValueError("a root has no edge")
        upper = Node(node.edge[:at], parent, node.used, node.locks)
        parent.children[upper.edge[: self._page]] = upper
        node.edge, node.parent = node.edge[at:], upper
        upper.children[node.edge[: self._page]] = node
        return upper

    def _walk(self, node: Node, by: int) -> None:
        at: Node | None = node
        while at is not None and at.parent is not None:
            was = at.locks
            at.locks += by
            if at.locks < 0:
                raise ValueError("unlocked more often than locked")
            if (was == 0) != (at.locks == 0):
                self.locked_tokens += at.tokens if by > 0 else -at.tokens
            at = at.parent

    def _nodes(self) -> list[Node]:
        out: list[Node] = []
        todo = [child for root in self._roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            out.append(node)
            todo.extend(node.children.values())
        return out
